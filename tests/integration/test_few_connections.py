"""A machine with many cores leaves a node the connections that others need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo

from cutline.fleet.config import Node, load_fleet
from cutline.fleet.lsn import ORIGIN
from cutline.nodes.connections import connect, connect_replication, with_database
from cutline.nodes.free_connections import TooFewConnectionsError, check_free_connections, task_sessions
from cutline.nodes.problems import NodeUnfitError
from cutline.nodes.programs import run_tool
from cutline.nodes.sessions import open_sessions
from cutline.nodes.timelines import read_switches
from cutline.storage.errors import UnreachableError
from cutline.wal.drain.peek import peek
from tests.commands.snapshot_runs import configure_fleet
from tests.run.quick_spark import QUICK
from tests.run.soak import first

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.fleet.config import Fleet
    from tests.integration.conftest import FleetFactory

ROOT = Path(__file__).parents[2]
CONNECTIONS, RESERVED, CORES, CONNECTIONS_MAX = 16, 3, 12, 6
# Of several targets on one server. Each needs three connections besides those for its tasks.
TARGETS, SHARED_CONNECTIONS = 10, 64
COMMAND_SECONDS_MAX = 600
SAMPLE_SECONDS, SAMPLES = 0.01, 5
ENDING_SECONDS_MAX = 60
OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
# Many small tasks. With Spark, it folds all changes.
COMMAND = """
import os
from tests.run.by_spark import work_by_spark
import cutline.snapshots.base_copy.copy_tables
import cutline.snapshots.fold.limits as limits, cutline.spark.spark_jobs as dealing
cutline.snapshots.base_copy.copy_tables.TASK_PAGES = 8
dealing.LANE_BYTES = 1
if "BY_SPARK" in os.environ:
    work_by_spark()
    limits.CHANGES_MAX = limits.CHOSEN_CHANGES_MAX = 0
from cutline.cli.main import main
main()
"""
COUNT = """
SELECT count(*) FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND application_name <> 'other'
"""


@dataclass(slots=True)
class Seen:
    most: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def counting(dsn: str) -> Iterator[Seen]:
    """Count the sessions on a server while the block runs.

    A session that was closed is counted until its process has ended, which takes long on a busy machine, and meanwhile
    another may be opened. So only what all of some successive samples show counts.
    """
    seen = Seen()

    def count() -> None:
        samples = deque[int](maxlen=SAMPLES)
        with psycopg.connect(dsn, dbname="postgres", autocommit=True) as session:
            while not seen.ended.wait(SAMPLE_SECONDS):
                samples.append(session.execute(COUNT).fetchall()[0][0])
                if len(samples) == SAMPLES:
                    seen.most = max(seen.most, min(samples))

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield seen
    finally:
        seen.ended.set()
        thread.join()


def run_command(fleet: Fleet, *words: str, code: int = 0) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--fleet", str(fleet.path), "--json", *words],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == code, found
    return dict(found)


def few(
    fleet_factory: FleetFactory, folder: Path, limit: int | None = None, connections: int = CONNECTIONS
) -> EmbeddedFleet:
    servers = fleet_factory(1, 0, settings={"max_connections": str(connections)})
    spark = f'[spark]\nmaster = "local[{CORES}]"\n"driver.extraJavaOptions" = "{QUICK}"\n'
    configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store", more=spark)
    if limit is not None:
        path = folder / "fleet.toml"
        path.write_text(path.read_text().replace('id = "s1"\n', f'id = "s1"\nconnections_max = {limit}\n'))
    with psycopg.connect(servers.dsns()[0], autocommit=True) as session:
        # Sessions that made the fleet may still be ending.
        await_others(session)
    return servers


def await_others(session: psycopg.Connection[Any]) -> None:
    """Wait until all other sessions of the server have ended."""
    deadline = time.monotonic() + ENDING_SECONDS_MAX
    while session.execute(OTHERS).fetchall() != [(0,)]:
        assert time.monotonic() < deadline
        time.sleep(SAMPLE_SECONDS)


@pytest.mark.parametrize(
    ("limit", "by_spark"), first([(None, True), (CONNECTIONS_MAX, False), (CONNECTIONS_MAX, True), (None, False)], 2)
)
def test_all_cores_work_on_one_node_with_few_connections(
    fleet_factory: FleetFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, *, by_spark: bool
) -> None:
    if by_spark:
        monkeypatch.setenv("BY_SPARK", "1")
    servers = few(fleet_factory, tmp_path, limit)
    fleet, (dsn,) = load_fleet(tmp_path / "fleet.toml"), servers.dsns()
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        session.execute("INSERT INTO t SELECT n, repeat(md5(n::text), 10) FROM generate_series(1, 8000) n")
        for number in range(6):
            session.execute(f"CREATE INDEX ON t (v, id) WHERE id % 7 = {number}")
    most: dict[str, int] = {}
    run_command(fleet, "init")
    with counting(dsn) as seen:
        run_command(fleet, "create", "one")
    most["create"] = seen.most
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute("UPDATE t SET v = 'changed ' || id WHERE id % 3 = 0")
        expected = session.execute("SELECT count(*), sum(hashtext(t::text)::bigint) FROM t").fetchall()
    run_command(fleet, "create", "one", "--incremental")
    with counting(dsn) as seen:
        restored = run_command(fleet, "restore", "one", "--replace", "--yes")
    most["restore"] = seen.most
    assert restored["increment"] == 1
    with psycopg.connect(dsn) as session:
        assert session.execute("SELECT count(*), sum(hashtext(t::text)::bigint) FROM t").fetchall() == expected
    assert max(most.values()) <= (CONNECTIONS - RESERVED - 1 if limit is None else limit), most


def test_indexes_of_several_targets_share_the_connections_of_their_server(
    fleet_factory: FleetFactory, tmp_path: Path
) -> None:
    """Each target alone would build four indexes at a time, and all of them at the same time."""
    servers = few(fleet_factory, tmp_path, connections=SHARED_CONNECTIONS)
    fleet, (dsn,) = load_fleet(tmp_path / "fleet.toml"), servers.dsns()
    with psycopg.connect(dsn, autocommit=True) as session:
        body = "BEGIN IF current_database() <> 'bank' THEN PERFORM pg_sleep(0.5); END IF; RETURN n; END"
        session.execute(f"CREATE FUNCTION slow(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $${body}$$".encode())
        session.execute("CREATE TABLE t (id int PRIMARY KEY)")
        session.execute("INSERT INTO t VALUES (1)")
        for _ in range(4):
            session.execute("CREATE INDEX ON t (slow(id))")
    run_command(fleet, "init")
    run_command(fleet, "create", "one")
    dsns = [with_database(fleet.primaries[0], f"target{number}").dsn for number in range(TARGETS)]
    nodes = (f'[[node]]\nid = "t{number}"\ndsn = "{target}"\n' for number, target in enumerate(dsns))
    there = tmp_path / "there.toml"
    there.write_text(f'name = "there"\nstore = "file://{tmp_path}/other"\n{"".join(nodes)}')
    with counting(dsn) as seen:
        run_command(fleet, "restore", "one", "--to", str(there), "--route", "*=all")
    assert seen.most < SHARED_CONNECTIONS - RESERVED
    for target in dsns:
        with psycopg.connect(target) as session:
            query = "SELECT count(*), (SELECT count(*) FROM pg_indexes WHERE tablename = 't') FROM t"
            assert session.execute(query).fetchall() == [(1, 5)]


def test_what_is_free_is_shared_and_what_is_reserved_is_left_alone(fleet_factory: FleetFactory, tmp_path: Path) -> None:

    servers = few(fleet_factory, tmp_path)
    (node,), (dsn,) = load_fleet(tmp_path / "fleet.toml").primaries, servers.dsns()
    with connect(node) as own:
        await_others(own)
        free = CONNECTIONS - RESERVED - 1
        assert task_sessions({node: own}) == {"s1": free // 2}
        # Two databases of one server.
        other = replace(node, id="s2")
        assert task_sessions({node: own, other: own}) == {"s1": free // 4, "s2": free // 4}
        assert task_sessions({replace(node, connections_max=9): own}) == {"s1": 4}
        limited = (replace(one, connections_max=20) for one in (node, other))
        assert task_sessions(dict.fromkeys(limited, own)) == {"s1": free // 2, "s2": free // 2}
        check_free_connections({node: own})
        held = [psycopg.connect(dsn) for _ in range(free - 2)]
        try:
            assert task_sessions({node: own}) == {"s1": 1}
            with pytest.raises(TooFewConnectionsError, match="node s1 has 2 of the 3 needed"):
                check_free_connections({node: own})
        finally:
            for session in held:
                session.close()


def test_the_limits_of_a_role_and_of_a_database_count(fleet_factory: FleetFactory, tmp_path: Path) -> None:

    servers = few(fleet_factory, tmp_path)
    (node,), (dsn,) = load_fleet(tmp_path / "fleet.toml").primaries, servers.dsns()
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute("CREATE ROLE backup LOGIN CONNECTION LIMIT 5")
        with psycopg.connect(dsn, user="backup", autocommit=True) as own:
            assert task_sessions({node: own}) == {"s1": (5 - 1) // 2}
            session.execute("ALTER ROLE backup CONNECTION LIMIT -1")
            session.execute("ALTER DATABASE bank CONNECTION LIMIT 9")
            assert task_sessions({node: own}) == {"s1": (9 - 2) // 2}


@contextmanager
def limited(dsn: str, statement: str, count: int) -> Iterator[Node]:
    """Limit the connections of a role or a database by `statement`; yield the role's node, which has `count` already.

    The limits do not apply to superusers.
    """
    with ExitStack() as stack:
        session = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        session.execute('CREATE ROLE "back ""up" LOGIN REPLICATION')
        session.execute(statement.encode())
        node = Node(id="s1", dsn=make_conninfo(dsn, user='back "up'))
        for _ in range(count):
            stack.enter_context(psycopg.connect(node.dsn))
        yield node


# Statements that limit connections, and the limits that two sessions of the role reach. Other sessions count for a
# database, too.
LIMITS = pytest.mark.parametrize(
    ("limit", "reached"),
    [('ALTER ROLE "back ""up" CONNECTION LIMIT', 2), ('ALTER DATABASE "bank" CONNECTION LIMIT', 3)],
    ids=["role", "database"],
)


@LIMITS
def test_a_limit_that_refuses_a_session_is_named(
    fleet_factory: FleetFactory, tmp_path: Path, limit: str, reached: int
) -> None:
    """By every way in which Cutline connects."""
    (dsn,) = few(fleet_factory, tmp_path).dsns()
    hints = []
    with limited(dsn, f"{limit} {reached}", 2) as node:
        for connects in (
            lambda: connect(node),
            lambda: next(peek(node, "none", ("none",), ORIGIN, 1)),
            lambda: run_tool("pg_dump", "--schema-only", node.dsn),
        ):
            with pytest.raises(UnreachableError, match="too many connections for ") as raised:
                connects()
            hints.append(raised.value.hint)
    for hint in hints:
        assert hint.startswith(f"end other sessions of the {'role' if 'ROLE' in limit else 'database'}, or raise its")
        assert f" limit: {limit} …;" in hint
        assert "max_connections" not in hint


@LIMITS
def test_a_limit_that_leaves_too_few_sessions_is_named(
    fleet_factory: FleetFactory, tmp_path: Path, limit: str, reached: int
) -> None:
    (dsn,) = few(fleet_factory, tmp_path).dsns()
    with (
        limited(dsn, f"{limit} {reached + 1}", 1) as node,
        connect(node) as own,
        pytest.raises(TooFewConnectionsError, match="node s1 has 1 of the 3 needed") as raised,
    ):
        check_free_connections({node: own})
    (raise_it,) = (line for line in raised.value.hint.splitlines() if "LIMIT" in line)
    assert raise_it == f"{limit} …;"


def test_the_number_of_wal_senders_is_named(fleet_factory: FleetFactory, tmp_path: Path) -> None:
    servers = fleet_factory(1, 0, settings={"max_wal_senders": "1"})
    (node,) = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store").primaries
    with connect_replication(node), pytest.raises(UnreachableError, match="max_wal_senders") as raised:
        connect_replication(node)
    assert raised.value.hint.startswith("raise max_wal_senders")


def test_what_refuses_to_show_a_history_is_named(fleet_factory: FleetFactory, tmp_path: Path) -> None:
    """A server past its first timeline is asked for its history by every increment, which needs a WAL sender."""
    servers = fleet_factory(1, 0, settings={"max_wal_senders": "1"})
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    (node,) = fleet.primaries
    sender = connect_replication(node)
    with pytest.raises(NodeUnfitError, match=r"s1: no WAL sender is free") as raised:
        read_switches(node, 2)
    assert raised.value.hint.startswith("raise max_wal_senders, or end")
    freed = threading.Timer(0.5, sender.close)
    freed.start()
    # There is no timeline 2.
    assert read_switches(node, 2) == {}
    freed.join()
    # The server's grammar has no timeline 0.
    with pytest.raises(NodeUnfitError, match=r"s1: the replication command TIMELINE_HISTORY was refused: invalid"):
        read_switches(node, 0)

    with psycopg.connect(node.dsn, autocommit=True) as session:
        session.execute("CREATE ROLE limited LOGIN")
    limited_node = replace(node, dsn=make_conninfo(node.dsn, user="limited"))
    with open_sessions(replace(fleet, nodes=(limited_node,)), [limited_node]) as sessions:
        sessions.identities["s1"] = structs.replace(sessions.identities["s1"], timeline=2)
        with pytest.raises(NodeUnfitError, match="role limited lacks the REPLICATION attribute"):
            sessions.read_histories()


def test_a_command_is_refused_before_it_makes_anything(fleet_factory: FleetFactory, tmp_path: Path) -> None:

    servers = few(fleet_factory, tmp_path)
    fleet, (dsn,) = load_fleet(tmp_path / "fleet.toml"), servers.dsns()
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute("CREATE TABLE t (id int PRIMARY KEY)")
    run_command(fleet, "init")
    stored = sorted(fleet.store.open().list("operations/"))
    # The command asks with two sessions of its own.
    others = [psycopg.connect(dsn) for _ in range(CONNECTIONS - RESERVED - 4)]
    try:
        found = run_command(fleet, "create", "one", code=3)
        assert found["error"] == "too-few-connections"
        assert "raise max_connections of node s1" in str(found["hint"])
        assert "node s1 has 2 of the 3 needed" in str(found["message"])
        others += [psycopg.connect(dsn) for _ in range(4 + RESERVED)]
        found = run_command(fleet, "create", "one", code=6)
        assert "all its connections are in use" in str(found["hint"])
    finally:
        for session in others:
            session.close()
    assert sorted(fleet.store.open().list("operations/")) == stored
    with psycopg.connect(dsn) as session:
        assert session.execute("SELECT count(*) FROM pg_replication_slots").fetchone() == (0,)


def test_a_standby_with_too_few_connections_is_left_out(fleet_factory: FleetFactory, tmp_path: Path) -> None:
    servers = fleet_factory(1, 1, settings={"max_connections": str(CONNECTIONS)})
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    with psycopg.connect(fleet.node("s1").dsn, autocommit=True) as session:
        session.execute("CREATE TABLE t (id int PRIMARY KEY)")
    run_command(fleet, "init")

    @contextmanager
    def crowded() -> Iterator[None]:
        """Leave too few connections for a command, which asks with two sessions of its own."""
        standby = fleet.node("s1-b1").dsn
        with psycopg.connect(standby, autocommit=True) as session:
            await_others(session)
            others = [psycopg.connect(standby) for _ in range(CONNECTIONS - RESERVED - 5)]
            try:
                yield
            finally:
                for other in others:
                    other.close()

    def absent(document: dict[str, object]) -> dict[str, str]:
        found: Any = document["left_out"]
        return {one["name"]: one["why"] for one in found if one["kind"] == "absent_copy"}

    with crowded():
        for words in ("create", "one", "--dry-run"), ("create", "one"):
            found = absent(run_command(fleet, *words))
            assert found.keys() == {"s1-b1"}, words
            assert "too few connections are free" in found["s1-b1"]
    assert absent(run_command(fleet, "create", "one", "--incremental")) == {}
    with crowded():
        for words in ("create", "one", "--incremental", "--dry-run"), ("create", "one", "--incremental"):
            assert absent(run_command(fleet, *words)).keys() == {"s1-b1"}, words
        path = fleet.path
        path.write_text(f'{path.read_text()}\n[copies]\nrequire = "all"\n')
        assert run_command(fleet, "create", "one", "--incremental", code=3)["error"] == "too-few-connections"
    assert absent(run_command(fleet, "create", "one", "--incremental")) == {}
