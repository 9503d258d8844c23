"""A drill on servers that the user keeps touches none of their databases, and leaves neither databases nor roles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import cutline.restore.drill.assertions
import cutline.restore.run.restore
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import AssertionTable, Node, load_fleet
from cutline.fleet.progress import Noting, Silent
from cutline.fleet.units import Duration
from cutline.nodes.connections import NodeUnreachableError, connect, with_database
from cutline.nodes.open_sessions import shut_down
from cutline.nodes.watch import watch_nodes
from cutline.restore.drill.assertions import ROWS_SHOWN_MAX, Reader, ask
from cutline.restore.drill.drill import run_drill
from cutline.restore.drill.own_servers import _check_roles, _drop_databases, _drop_roles, drop_dead
from cutline.restore.drill.servers import DrillUnfitError
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.plan.roles import missing_roles
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.target import TargetUnfitError, target_of
from cutline.restore.targets.waits import TargetBlockedError, TargetWaits
from cutline.storage.errors import UnreachableError, UsageError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready
from tests.held.waiting_commits import commit_waiting
from tests.integration.drill.conftest import NAMED_AS_OURS
from tests.integration.drill.drilled import HOLDING, NAME, Drilled, write_fleet
from tests.integration.own_shard import database_on
from tests.integration.refusing import NoSpark, execute
from tests.run.soak import first

ROOT, SECONDS_MAX = Path(__file__).parents[3], 120
ROLE = "driller"
ADVICE = re.compile("restore-resume|restore-abandon")


def left_on(shared_fleet: EmbeddedFleet) -> list[object]:
    """Every database and every role of the servers."""
    found: list[object] = []
    for node in shared_fleet.primaries:
        with psycopg.connect(node.dsn("postgres")) as connection:
            found += connection.execute("SELECT datname FROM pg_database ORDER BY 1").fetchall()
            found += connection.execute("SELECT rolname FROM pg_roles ORDER BY 1").fetchall()
    return found


def describe(path: Path, shared_fleet: EmbeddedFleet, role: str) -> Path:
    """The file of servers of one's own: the shared fleet's, whose databases are named in vain."""
    nodes = "".join(
        f'\n[[node]]\nid = "{node.id}"\ndsn = "{make_conninfo(node.dsn(), user=role)}"\n'
        for node in shared_fleet.primaries
    )
    path.write_text(f'name = "spare"\nstore = "/nowhere"\n{nodes}')
    return path


@contextmanager
def role_on(shared_fleet: EmbeddedFleet, statement: str) -> Iterator[None]:
    """A role of the servers, made by the statement."""
    try:
        for node in shared_fleet.primaries:
            execute(node.dsn("postgres"), statement)
        yield
    finally:
        for node in shared_fleet.primaries:
            execute(node.dsn("postgres"), f"DROP ROLE IF EXISTS {ROLE}", "DROP ROLE IF EXISTS other")


def test_a_superuser_drills_by_a_role_without_privileges_and_nothing_is_left(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    before = left_on(shared_fleet)
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    to, junit = describe(tmp_path / "spare.toml", shared_fleet, "postgres"), tmp_path / "drill.xml"
    words = ("drill", NAME, "--to", str(to), "--junit", str(junit))
    code, document = run_here(fleet, *words, spark=drilled.spark)
    assert (code, document["result"]) == (0, "holds"), document
    assert [one["rows"] for one in document["nodes"]] == drilled.rows
    (suite,) = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("6", "0")
    assert left_on(shared_fleet) == before


def test_a_role_that_may_no_more_than_a_restore_drills_as_itself(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    to = describe(tmp_path / "spare.toml", shared_fleet, ROLE)
    with role_on(shared_fleet, f"CREATE ROLE {ROLE} LOGIN CREATEDB"):
        before = left_on(shared_fleet)
        # What superusers of the source own takes one, unless it all belongs to the role.
        code, document = run_here(fleet, "drill", NAME, "--to", str(to), spark=drilled.spark)
        assert (code, document["error"]) == (3, "target-unfit")
        assert "--no-owner" in document["hint"]
        code, document = run_here(fleet, "drill", NAME, "--to", str(to), "--no-owner", spark=drilled.spark)
        assert (code, document["result"]) == (0, "holds"), document
        assert left_on(shared_fleet) == before


NEVER_ENDS = """
CREATE FUNCTION never_ends() RETURNS int LANGUAGE plpgsql AS $$
  BEGIN LOOP BEGIN PERFORM pg_sleep(3600); EXCEPTION WHEN query_canceled THEN NULL; END; END LOOP; END $$
"""
OF_OTHERS = """
[[drill.assertion]]
node = "s2"
sql = "SELECT relowner::regrole::text, has_table_privilege('other', oid, 'SELECT') FROM pg_class WHERE relname = 'item'"
expected = [["driller", true]]
"""


def test_a_role_that_is_no_superuser_drills_with_roles_in_the_place_of_others(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, OF_OTHERS))
    to = describe(tmp_path / "spare.toml", shared_fleet, ROLE)
    words = ["drill", NAME, "--to", str(to)]
    pairs = {"postgres": ROLE, "cutline_drill": "other", "cutline_drill_reader": "other"}
    with role_on(shared_fleet, f"CREATE ROLE {ROLE} LOGIN CREATEDB; CREATE ROLE other"):
        before = left_on(shared_fleet)
        mapped = [word for pair in pairs.items() for word in ("--role-map", "=".join(pair))]
        code, document = run_here(fleet, *words, *mapped, spark=drilled.spark)
        assert (code, document["result"]) == (0, "holds"), document
        assert left_on(shared_fleet) == before


def test_roles_with_powers_and_files_without_a_shard_are_refused(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    own = load_fleet(describe(tmp_path / "spare.toml", shared_fleet, ROLE))
    statement = f"CREATE ROLE {ROLE} LOGIN CREATEDB IN ROLE pg_read_server_files"
    with (
        role_on(shared_fleet, statement),
        pytest.raises(DrillUnfitError, match="could use the privileges of role driller: pg_read_server_files"),
    ):
        run_drill(fleet, RestoreRequest(NAME), NoSpark(), Silent(), own=own)
    request = RestoreRequest(NAME, scope=RestoreScope(role_map=(("a", "b"),)))
    by_superuser = load_fleet(describe(tmp_path / "super.toml", shared_fleet, "postgres"))
    with pytest.raises(UsageError, match="--role-map is allowed only if the drill's role is not a superuser"):
        run_drill(fleet, request, NoSpark(), Silent(), own=by_superuser)
    (tmp_path / "spare.toml").write_text(own.path.read_text().rpartition("\n[[node]]")[0])
    with pytest.raises(UsageError, match="has no primaries with the ids s2"):
        run_drill(fleet, RestoreRequest(NAME), NoSpark(), Silent(), own=load_fleet(own.path))


def test_what_earlier_drills_have_left_in_use_is_noted_and_keeps_no_drill_from_its_work(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    """A comment alone makes no role a drill's; a restore does not take a drill's roles for those of the target."""
    fleet = load_fleet(write_fleet(drilled, tmp_path, ""))
    request = RestoreRequest(NAME, scope=RestoreScope(role_map=(("a", "b"),)))
    own = load_fleet(describe(tmp_path / "spare.toml", shared_fleet, "postgres"))
    maintenance, mark = shared_fleet.primaries[0].dsn("postgres"), f"cutline_drill_{'a' * 10}"
    before, noting = left_on(shared_fleet), Noting(Silent())
    made = (mark, ROLE, "free")
    with psycopg.connect(maintenance, autocommit=True) as connection:
        execute(maintenance, f"CREATE ROLE {mark} LOGIN CREATEDB", "CREATE ROLE bystander")
        execute(maintenance, *(f"CREATE ROLE {role} ROLE {mark}" for role in made[1:]))
        execute(maintenance, *(f"COMMENT ON ROLE {role} IS '{mark}'" for role in (*made, "bystander")))
        # As code of the owners, which runs as the first, can leave them.
        for database in (f"{mark}_1", "renamed"):
            execute(maintenance, f"CREATE DATABASE {database} OWNER {mark} IS_TEMPLATE true")
        execute(maintenance, f"CREATE SCHEMA its AUTHORIZATION {ROLE}")
        try:
            target = target_of("s1", with_database(Node("s1", maintenance), "free"), (), "0" * 32)
            with pytest.raises(TargetUnfitError, match=r"a drill has created roles .*: driller"):
                missing_roles(target, connection, ["bystander", ROLE], "UTF8", may_create=True)
            # It goes as far as a refusal that comes after it.
            with pytest.raises(UsageError, match="--role-map"):
                run_drill(fleet, request, NoSpark(), noting, own=own)
            query = "SELECT rolname, rolcanlogin FROM pg_roles WHERE rolname = ANY (%s) ORDER BY 1"
            assert connection.execute(query, [[*made, "bystander"]]).fetchall() == [
                ("bystander", False), (mark, False), (ROLE, False),
            ]  # fmt: skip
        finally:
            execute(maintenance, "DROP SCHEMA its", "DROP ROLE bystander")
    left = [one for one in noting.notes if "was left behind by a killed drill and could not be dropped" in one]
    assert [re.sub(" was left behind .*", "", one) for one in left] == [
        f"node s1: role {ROLE}",
        f"node s1: role {mark}",
    ]
    with pytest.raises(UsageError, match="--role-map"):
        run_drill(fleet, request, NoSpark(), Silent(), own=own)
    assert left_on(shared_fleet) == before


def test_what_another_drill_has_dropped_in_between_ends_none(shared_fleet: EmbeddedFleet) -> None:
    target = target_of("s1", with_database(Node("s1", shared_fleet.primaries[0].dsn("postgres")), "free"), (), "0" * 32)
    mark = f"cutline_drill_{'d' * 10}"
    with connect(target.maintenance) as session:
        waits = TargetWaits([target], Silent())
        assert list(_drop_databases(target, session, [f"{mark}_1"], [(mark, mark)], waits)) == []
        assert list(_drop_roles(session, [(mark, mark)], waits)) == []


def test_what_a_drill_that_lives_has_made_stays_until_it_has_ended(shared_fleet: EmbeddedFleet) -> None:
    node, name = Node("s1", shared_fleet.primaries[0].dsn("postgres")), f"cutline_drill_{'c' * 10}"
    target = target_of("s1", with_database(node, "cutline_drill_x"), (), "0" * 32)
    before = left_on(shared_fleet)
    execute(node.dsn, f"CREATE ROLE {name} LOGIN CREATEDB", f"COMMENT ON ROLE {name} IS '{name}'")
    execute(node.dsn, f"CREATE DATABASE {name}_1", f"CREATE DATABASE owned OWNER {name}")
    living = left_on(shared_fleet)
    with connect(node) as session:
        with psycopg.connect(node.dsn, application_name=name):
            drop_dead(target, session, Silent(), TargetWaits([target], Silent()))
            assert left_on(shared_fleet) == living
        deadline = time.monotonic() + SECONDS_MAX
        while left_on(shared_fleet) != before:
            assert time.monotonic() < deadline
            drop_dead(target, session, Silent(), TargetWaits([target], Silent()))


def test_a_session_that_is_lost_is_a_node_that_is_away(shared_fleet: EmbeddedFleet) -> None:
    node = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    target = target_of("s1", with_database(node, "cutline_drill_x"), (), "0" * 32)
    lost = connect(node)
    execute(node.dsn, f"SELECT pg_terminate_backend({lost.info.backend_pid}, 5000)")
    with pytest.raises(NodeUnreachableError, match="node s1"):
        _check_roles([target], {"s1": lost})
    lost.close()


def test_a_server_that_goes_away_under_an_assertion_is_no_bug(
    shared_fleet: EmbeddedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node("s1", shared_fleet.primaries[0].dsn("postgres"))

    def connect_and_lose(node: Node) -> psycopg.Connection[Any]:
        connection = connect(node)
        threading.Timer(0.5, shut_down, (connection,)).start()
        return connection

    monkeypatch.setattr(cutline.restore.drill.assertions, "connect", connect_and_lose)
    with pytest.raises(NodeUnreachableError, match="node s1"):
        ask(AssertionTable("s1", "SELECT pg_sleep(60)", 1), Reader(node, lambda _: False))


def test_a_drill_shows_that_it_lives_by_sessions_that_are_renewed(shared_fleet: EmbeddedFleet) -> None:
    node, name = Node("s1", shared_fleet.primaries[0].dsn("postgres")), f"cutline_drill_{'b' * 10}"
    mine = f"SELECT pid FROM pg_stat_activity WHERE application_name = '{name}'"
    with watch_nodes([node], name), psycopg.connect(node.dsn, autocommit=True) as other:
        for _ in range(2):
            deadline = time.monotonic() + SECONDS_MAX
            while not (found := other.execute(mine.encode()).fetchall()):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            other.execute("SELECT pg_terminate_backend(%s, 5000)", found[0])


@pytest.mark.parametrize("on_own_servers", first([False, True]))
def test_a_drill_that_the_store_ends_advises_nothing_and_leaves_nothing(
    drilled: Drilled,
    shared_fleet: EmbeddedFleet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    on_own_servers: bool,
) -> None:
    def lose(*_: object) -> None:
        raise UnreachableError("the store is away", hint="try later")

    before = left_on(shared_fleet)
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    to = ("--to", str(describe(tmp_path / "spare.toml", shared_fleet, "postgres")))
    monkeypatch.setattr(cutline.restore.run.restore, "decide_restore", lose)
    words = ("drill", NAME, *to[: 2 * on_own_servers])
    code, document = run_here(fleet, *words, spark=drilled.spark)
    assert (code, ADVICE.search(document["hint"]), "unfinished" in document["details"]) == (6, None, False)
    assert left_on(shared_fleet) == before


@pytest.mark.parametrize("signal_name", first(["SIGINT", "SIGKILL"]))
def test_an_interrupted_drill_drops_what_it_has_made_and_the_next_one_what_a_killed_one_has_left(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path, signal_name: str
) -> None:
    before = left_on(shared_fleet)
    path = write_fleet(drilled, tmp_path, HOLDING)
    to = describe(tmp_path / "spare.toml", shared_fleet, "postgres")
    point = [signal_name, RestoreCrashPoint.LOADING, "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.signalled_command", *point, "--", "--fleet", str(path),
         "drill", NAME, "--to", str(to)],
        capture_output=True, text=True, timeout=SECONDS_MAX, cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    if signal_name == "SIGINT":
        assert (done.returncode, left_on(shared_fleet)) == (130, before), done.stderr
        assert "everything that the drill created was removed" in done.stderr
        assert ADVICE.search(done.stderr) is None
        return
    assert done.returncode == -9, done.stderr
    left = [one for one in left_on(shared_fleet) if one not in before]
    # On each server a database, the drill's role, the one in the place of postgres, and those of the snapshot's roles
    # that the server lacks.
    assert len(left) == 2 * (3 + len(NAMED_AS_OURS)), left
    fleet, own = load_fleet(path), load_fleet(to)
    assert run_drill(fleet, RestoreRequest(NAME), Ready(drilled.spark), Silent(), own=own).result == "holds"
    assert left_on(shared_fleet) == before


def test_an_assertion_has_the_search_path_of_the_database_and_no_answer_without_a_bound(
    shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    with database_on(shared_fleet, "asserted", tmp_path) as fleet:
        node = fleet.primaries[0]
        execute(
            node.dsn,
            "CREATE SCHEMA shop",
            "CREATE TABLE shop.customer AS SELECT 7 AS id",
            "ALTER DATABASE asserted SET search_path = shop, public",
            "CREATE VIEW public.huge AS SELECT repeat('x', 400000) FROM generate_series(1, 1000)",
        )
        reader = Reader(node, lambda _: False)
        assert ask(AssertionTable("s1", "SELECT id FROM customer", 7), reader).holds
        found = ask(AssertionTable("s1", "SELECT * FROM huge", 1), reader)
        assert (found.holds, found.why) == (False, "its answer is longer than 1,000,000 characters")
        # Nor are more rows read than are shown.
        found = ask(AssertionTable("s1", "SELECT generate_series(1, 1000000)", 1), reader)
        assert (found.why, len(found.found)) == ("expected 1, found (1), (2), (3), (4), (5), …", ROWS_SHOWN_MAX)


def test_a_session_that_nobody_can_end_holds_up_no_answer(
    shared_fleet: EmbeddedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(_process: int) -> bool:
        raise NodeUnreachableError("node s1: sorry, too many clients already")

    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    with database_on(shared_fleet, "endless", tmp_path) as fleet:
        execute(fleet.primaries[0].dsn, NEVER_ENDS)
        assertion = AssertionTable("s1", "SELECT public.never_ends()", timeout=Duration(0.5))
        found = ask(assertion, Reader(fleet.primaries[0], end))
    assert (found.holds, found.why) == (False, "no answer after 0.5 s, so its session was terminated")
    assert (found.has_ended_server, uncaught) == (False, [])


def test_a_drill_that_waits_names_whom_and_the_next_drill_drops_what_is_left(
    drilled: Drilled, shared_fleet: EmbeddedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"LOOK_SECONDS": 0.3, "WAIT_SECONDS_MAX": 8.0}.items():
        monkeypatch.setattr(f"cutline.restore.targets.waits.{name}", seconds)
    monkeypatch.setattr("cutline.nodes.watch.PROBE_SECONDS", 0.3)
    before = left_on(shared_fleet)
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    own = load_fleet(describe(tmp_path / "spare.toml", shared_fleet, "postgres"))
    noting = Noting(Silent())
    with commit_waiting(shared_fleet.primaries[1].dsn()) as process:
        with pytest.raises(TargetBlockedError, match=f"node s2: DROP DATABASE .*for process {process} ") as raised:
            run_drill(fleet, RestoreRequest(NAME), Ready(drilled.spark), noting, own=own)
        # The drill's role may not see for what the process itself waits.
        assert f"SELECT pg_terminate_backend({process});" in raised.value.hint.split("\n")
        (left,) = [
            note for note in noting.notes if "database cutline_drill_" in note and "until the next drill" in note
        ]
        assert f"for process {process} " in left
        assert left_on(shared_fleet) != before
    assert run_drill(fleet, RestoreRequest(NAME), Ready(drilled.spark), Silent(), own=own).result == "holds"
    assert left_on(shared_fleet) == before
