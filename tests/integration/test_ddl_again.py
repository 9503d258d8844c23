"""DDL after the rows goes on where it was, after whichever of its transactions it ended, for objects of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

import cutline.restore.ddl.running
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool
from cutline.nodes.watch import watch_nodes
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.ddl.running import DdlRun
from cutline.restore.ddl.side_by_side import EntryQueue, tables_in
from cutline.restore.rows.load import has_ledger
from tests.commands.ddl_runs import dumped_ddl, make_ledger
from tests.integration.refusing import execute
from tests.integration.test_definitions import ROLES, run_script

SOURCE, AGAIN = "defs_again_source", "defs_again"
STEPS_MAX = 400
MORE = (
    "CREATE TABLE place (id int PRIMARY KEY)",
    "CREATE TABLE measured (id int PRIMARY KEY REFERENCES place) PARTITION BY RANGE (id)",
    "CREATE TABLE measured_low PARTITION OF measured FOR VALUES FROM (0) TO (9)",
    'CREATE TABLE "a b" (c int CONSTRAINT "d e" UNIQUE, f int CONSTRAINT "b d e" UNIQUE)',
    "CREATE INDEX of_place ON place (id)",
    "ALTER TABLE place CLUSTER ON of_place",
    "CREATE TABLE booked (id int, EXCLUDE USING btree (abs(id) WITH =))",
    "CREATE FUNCTION note() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN NULL; END'",
    # It would refuse to have the ledger dropped.
    "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'dropped'; END$$",
    "CREATE EVENT TRIGGER noting ON ddl_command_end EXECUTE FUNCTION note()",
    "CREATE EVENT TRIGGER refusing ON sql_drop EXECUTE FUNCTION refuse()",
)


class KilledError(Exception):
    """The process that restores is gone."""


@pytest.fixture(scope="module")
def source(shared_fleet: EmbeddedFleet) -> Iterator[Node]:
    maintenance = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    node = with_database(maintenance, SOURCE)
    names = ['"defs ""odd"" role"', *ROLES[1:]]
    try:
        execute(maintenance.dsn, f"CREATE DATABASE {SOURCE}", *(f"CREATE ROLE {name}" for name in names))
        run_script(node.dsn, "schema.sql")
        execute(node.dsn, *MORE)
        yield node
    finally:
        for database in (SOURCE, AGAIN):
            execute(maintenance.dsn, f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
        execute(maintenance.dsn, *(f"DROP ROLE IF EXISTS {name}" for name in names))


def killed_after(work: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """`work`, but the process is gone after it was called so often."""
    left = steps

    def then(*values: Any) -> Any:
        nonlocal left
        done = work(*values)
        left -= 1
        if left == 0:
            raise KilledError
        return done

    return then


def schema_of(node: Node) -> list[str]:
    return run_tool("pg_dump", "--schema-only", "--restrict-key=same", node.dsn).stdout.splitlines()


def test_what_follows_the_rows_goes_on_after_every_transaction(
    source: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process is killed after one more transaction that does something; the next one finds what is done."""
    again = with_database(source, AGAIN)
    execute(with_database(source, "postgres").dsn, f"DROP DATABASE IF EXISTS {AGAIN} WITH (FORCE)")
    execute(with_database(source, "postgres").dsn, f"CREATE DATABASE {AGAIN} TEMPLATE template0")
    with watch_nodes([source]) as watch:
        ddl = dumped_ddl(source, tmp_path, watch)
        DdlRun(again, ddl, watch).before_rows()
        ledger = make_ledger(again)
        # Some of what is run side by side was done.
        long = [entry for entry in ddl.post_data if entry.number in ddl.side_by_side]
        assert len(long) > 10
        some = DdlRun(again, ddl, watch)
        some._run_side_by_side(EntryQueue(long[::2], tables_in(ddl), {}))
        assert some.refusals == {}
        monkeypatch.setattr(cutline.restore.ddl.running, "OBJECTS_AT_ONCE", 5)
        work, steps = DdlRun._run_chunk, 0
        while True:
            steps += 1
            monkeypatch.setattr(DdlRun, "_run_chunk", killed_after(work, 1))
            run = DdlRun(again, ddl, watch)
            try:
                run.after_rows(ledger)
                assert run.last(ledger)
            except KilledError:
                assert steps < STEPS_MAX
            else:
                break
            finally:
                assert run.refusals == {}
    assert steps > 5
    with psycopg.connect(again.dsn) as connection:
        assert not has_ledger(connection, ledger)
    assert schema_of(again) == schema_of(source)


def test_ddl_that_other_programs_began_is_not_taken_for_done(source: Node, tmp_path: Path) -> None:
    again = with_database(source, AGAIN)
    execute(with_database(source, "postgres").dsn, f"DROP DATABASE IF EXISTS {AGAIN} WITH (FORCE)")
    execute(with_database(source, "postgres").dsn, f"CREATE DATABASE {AGAIN} TEMPLATE template0")
    with watch_nodes([source]) as watch:
        run = DdlRun(again, dumped_ddl(source, tmp_path, watch), watch)
        run.before_rows()
        ledger = make_ledger(again)
        run.after_rows(ledger)
        others = [replace(entry, statements=f"\n{entry.statements}") for entry in run.ddl.post_data]
        with pytest.raises(SchemaLoadError, match="began with different PostgreSQL programs"):
            DdlRun(again, replace(run.ddl, post_data=tuple(others)), watch).after_rows(ledger)
