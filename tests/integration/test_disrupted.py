"""A server that lacks room or memory, or whose statements somebody ends, refuses nothing: the restore is to be resumed.

Statements raise the errors, with the codes of PostgreSQL's manual ("PostgreSQL Error Codes").
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec.structs import replace

import cutline.restore.ddl.ddl
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.nodes.connections import NodeDisruptedError, connect, raising_unreachable, with_database
from cutline.nodes.server_errors import remedy_of
from cutline.nodes.watch import watch_nodes
from cutline.restore.ddl.ddl import DdlEntry, refresh_views, set_sequences
from cutline.restore.ddl.running import DdlRun
from cutline.restore.rows.load import LoadError, load_error
from cutline.restore.run.rehearsal import rehearse
from cutline.restore.targets.target import Superusers, Target, target_of
from cutline.snapshots.records.commit import Sequence
from tests.commands.ddl_runs import NOTHING, ddl_of, make_ledger
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE = "disrupted"
ROOM_HINT = "free space on the server's disk, or in /dev/shm if the message names a shared memory segment"
DISRUPTIONS = ("53000", "53100", "53200", "53400", "57014", "58030", "40001", "40P01", "55P03")
# A library or another file that is not there, a row that no index holds, an object that the session itself uses.
REFUSALS = ("58P01", "54000", "23505", "42883", "55006", "XX000")
FULL = "RAISE 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'"
SOURCE, TARGET = "roomy", "roomy_again"
ROOM = f"""
CREATE FUNCTION room(v text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN IF current_database() <> '{SOURCE}' THEN {FULL}; END IF; RETURN v; END $$
"""
SEQUENCE = Sequence("public", "s", 1, is_called=True, increment=1, cycles=False, smallest=1, largest=9)
MENDED = "CREATE OR REPLACE FUNCTION room(v text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT v'"


@pytest.fixture
def target(shared_fleet: EmbeddedFleet) -> Iterator[Target]:
    """An empty database as a restore makes it, of a superuser."""
    node = Node("s1", shared_fleet.primaries[0].dsn(DATABASE))
    target = target_of("s1", node, (), "20260101T000000Z-abcdef0123")
    execute(target.maintenance.dsn, f'CREATE DATABASE "{target.loading}" TEMPLATE template0')
    try:
        yield target
    finally:
        execute(target.maintenance.dsn, f'DROP DATABASE "{target.loading}" WITH (FORCE)')


def raising(state: str) -> str:
    return f"DO $$BEGIN RAISE 'cannot now' USING ERRCODE = '{state}'; END$$;"


def error_of(node: Node, statement: str) -> psycopg.Error:
    with connect(node) as connection, pytest.raises(psycopg.Error) as raised:
        connection.execute(statement.encode())
    return raised.value


def test_what_the_server_lacks_is_no_refusal_in_any_section(target: Target) -> None:
    """Neither in the rehearsal, nor of privileges. Errors about the statement are."""
    node, message = target.loaded, r"node s1: (TABLE|ACL) public\.made[12]: cannot now"
    with watch_nodes([node]) as watch:
        for state in DISRUPTIONS:
            with pytest.raises(NodeDisruptedError, match=message):
                rehearse(target, ddl_of(raising(state)), watch)
        granting, triggers = ddl_of(post_data=raising(state), kind="ACL"), ddl_of(post_data=raising(state)).post_data
        with pytest.raises(NodeDisruptedError, match=message):
            DdlRun(node, granting, watch, is_strict=True).after_rows(make_ledger(node))
        run = DdlRun(node, replace(NOTHING, event_triggers=triggers), watch)
        with pytest.raises(NodeDisruptedError, match=message):
            run.last(make_ledger(node), allows_refused=True)
        for state in REFUSALS:
            (refusal,) = rehearse(target, ddl_of(raising(state)), watch)
            assert refusal.sqlstate == state
        # What is built side by side is tried once more, alone: then there may be room.
        entries = (DdlEntry(1, "INDEX", "public", "i", raising("53100")),)
        side_by_side = replace(NOTHING, post_data=entries, side_by_side=frozenset({1}))
        with pytest.raises(NodeDisruptedError, match=r"INDEX public\.i: cannot now") as raised:
            DdlRun(node, side_by_side, watch).after_rows(make_ledger(node))
    assert (raised.value.exit_code, raised.value.hint) == (6, ROOM_HINT)


def test_a_limit_that_ends_a_statement_is_to_be_raised_for_the_role_or_the_server(target: Target) -> None:
    """As for the sort of an index: not more of a resource is needed, but a higher setting."""
    lowered = "SELECT set_config('temp_file_limit', '64kB', false), set_config('work_mem', '64kB', false)"
    sorting = "SELECT max(n) FROM (SELECT generate_series(1, 99999) AS n ORDER BY n DESC OFFSET 1) AS numbers"
    error = error_of(target.loaded, f"{lowered}; {sorting}")
    assert isinstance(error, psycopg.errors.ConfigurationLimitExceeded)
    assert "temp_file_limit" in str(error)
    assert remedy_of(error) == (
        "raise the setting that the message names: on the server, or for the role, by ALTER ROLE … SET …"
    )


def test_nothing_else_that_a_restore_runs_takes_it_for_a_refusal(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = target.loaded
    execute(
        node.dsn,
        f"CREATE FUNCTION full_disk() RETURNS int LANGUAGE plpgsql AS $$BEGIN {FULL}; END$$",
        "CREATE SCHEMA other",
        "CREATE FUNCTION other.g() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN public.full_disk(); END'",
        # Its name is found at the second attempt, with a search_path.
        "CREATE FUNCTION other.f() RETURNS int LANGUAGE plpgsql AS 'BEGIN RETURN g(); END'",
        "CREATE MATERIALIZED VIEW m AS SELECT full_disk() AS n WITH NO DATA",
        "CREATE FUNCTION on_ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN PERFORM public.full_disk(); END'",
    )
    with watch_nodes([node]) as watch:
        with pytest.raises(NodeDisruptedError, match=r"TABLE public\.made1: could not extend file"):
            DdlRun(node, ddl_of("SELECT other.f();"), watch).before_rows()
        with pytest.raises(NodeDisruptedError, match=r"materialized view public\.m: could not extend file"):
            refresh_views(node, replace(NOTHING, views=("public.m",)), watch)
        with pytest.raises(NodeDisruptedError, match="could not extend file"):
            DdlRun(node, NOTHING, watch).last(make_ledger(node), "SELECT public.full_disk();")
    monkeypatch.setattr(
        cutline.restore.ddl.ddl, "SET_QUERY", "SELECT public.full_disk(), %s::text, %s::text, %s::text, %s::text"
    )
    with connect(node) as connection, pytest.raises(NodeDisruptedError), raising_unreachable(node):
        set_sequences(
            connection, [Sequence("public", "s", 1, is_called=True, increment=1, cycles=False, smallest=1, largest=9)]
        )
    # A deadlock, too, which no block takes for a node that is away.
    execute(
        node.dsn,
        "CREATE OR REPLACE FUNCTION full_disk() RETURNS int LANGUAGE plpgsql AS "
        "$$BEGIN RAISE 'deadlock detected' USING ERRCODE = 'deadlock_detected'; END$$",
    )
    with connect(node) as connection, pytest.raises(NodeDisruptedError):
        set_sequences(
            connection, [Sequence("public", "s", 1, is_called=True, increment=1, cycles=False, smallest=1, largest=9)]
        )
    execute(node.dsn, "CREATE EVENT TRIGGER full_disk ON ddl_command_start EXECUTE FUNCTION on_ddl()")
    superusers = Superusers({"s1": target.maintenance}, "nobody", frozenset(), {})
    beforehand = replace(NOTHING, beforehand=("CREATE EXTENSION citext;",))
    with pytest.raises(NodeDisruptedError, match="CREATE EXTENSION citext: deadlock detected"):
        superusers.run_beforehand(target, beforehand, allows_refused=True)


def test_rows_that_a_server_has_no_room_for_are_not_refused(target: Target) -> None:
    full, wrong = (error_of(target.maintenance, raising(state)) for state in ("53100", "22P02"))
    assert isinstance(load_error(target.node, full), NodeDisruptedError)
    assert isinstance(load_error(target.node, wrong), LoadError)


def test_a_restore_that_meets_a_full_disk_after_its_rows_is_resumed_whatever_it_may_do_without(
    shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet, dropping_slots(fleet):
        (source,) = fleet.primaries
        execute(source.dsn, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'v')", ROOM)
        execute(source.dsn, "CREATE UNIQUE INDEX t_room ON t (room(v))")
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full("snp")
        there = tmp_path / "there.toml"
        dsn = with_database(source, TARGET).dsn
        there.write_text(f'name = "there"\nstore = "file://{tmp_path}/other"\n[[node]]\nid = "s1"\ndsn = "{dsn}"\n')

        def restore_there(command: str, *words: str) -> tuple[int, dict[str, Any]]:
            return run_here(fleet, command, "snp", "--to", str(there), *words, spark=spark)

        allowing = "--allow-refused-ddl"
        for words in (("restore", allowing), ("restore-resume", allowing), ("restore-resume",)):
            code, ended = restore_there(*words)
            assert (code, ended["error"]) == (6, "node-disrupted"), ended
            assert "INDEX public.t_room: could not extend file: No space left on device" in ended["message"]
            assert ended["hint"].splitlines()[0] == ROOM_HINT
            assert f"restore-resume snp --to {there}" in ended["hint"], ended["hint"]
        with psycopg.connect(with_database(source, "postgres").dsn) as connection:
            query = "SELECT datname FROM pg_database WHERE datname ^@ %s"
            ((left,),) = connection.execute(query, (TARGET,)).fetchall()
        assert left.startswith(f"{TARGET}_restoring_")
        execute(with_database(source, left).dsn, MENDED)
        code, done = restore_there("restore-resume")
        assert (code, done["refused"]) == (0, []), json.dumps(done)
        assert sorted_copies(dsn) == sorted_copies(source.dsn)
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT to_regclass('t_room') IS NOT NULL").fetchone() == (True,)
