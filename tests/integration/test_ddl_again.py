"""DDL after the rows goes on where it was, after whichever of its transactions it ended, for objects of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import restore.ddl.archive
import restore.ddl.pg_restore
import restore.ddl.scripts
import restore.ddl.statements
from embedded.fleet import EmbeddedFleet
from fleet.config import Node
from fleet.nodes.connections import with_database
from fleet.nodes.watch import Watch, watch_nodes
from fleet.programs.wheel import run_tool
from restore.ddl.archive import ArchiveDdl, read_archive
from restore.ddl.ddl import Ddl, SchemaLoadError
from restore.ddl.pg_restore import ArchivePart, Manner, run_part
from restore.ddl.scripts import ScriptDdl
from restore.rows.ledger import create_ledger, has_ledger
from snapshots.ddl.dump import POST_DATA, dump_archive
from tests.integration.refusing import execute
from tests.integration.test_definitions import ROLES, run_script
from tests.run.soak import draw

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


def end(ddl: Ddl, node: Node, ledger: str, watch: Watch) -> None:
    ddl.run_after_rows(node, ledger, watch)
    ddl.run_last(node, ledger, watch)


@pytest.mark.parametrize("how", draw(["pg_restore", "its script", "stored script"]))
def test_what_follows_the_rows_goes_on_after_every_transaction(
    source: Node, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process is killed after one more transaction that does something; the next one finds what is done."""
    again = with_database(source, AGAIN)
    execute(with_database(source, "postgres").dsn, f"DROP DATABASE IF EXISTS {AGAIN} WITH (FORCE)")
    execute(with_database(source, "postgres").dsn, f"CREATE DATABASE {AGAIN} TEMPLATE template0")
    with watch_nodes([source]) as watch:
        ddl: Ddl = read_archive(dump_archive(source, None, watch), tmp_path / "archive")
        if how == "stored script":
            assert isinstance(ddl, ArchiveDdl)
            ddl = ScriptDdl(ddl.write_scripts(again))
        elif how == "its script":
            # As on a server older than 17.
            unable = restore.ddl.pg_restore.restoring_programs
            monkeypatch.setattr(restore.ddl.pg_restore, "restoring_programs", lambda *of: (unable(*of)[0], None))
        ddl.run_before_rows(again, watch)
        with psycopg.connect(again.dsn) as connection:
            ledger = create_ledger(connection)
        if isinstance(ddl, ArchiveDdl):
            # Some of what is run side by side was done.
            long = [entry.number for entry in ddl.entries if entry.number in ddl.side_by_side]
            assert len(long) > 10
            some = ArchivePart(ddl.path, POST_DATA, long[::2], Manner.SIDE_BY_SIDE)
            run_part(some, ddl.contents.writer, again, watch)
        monkeypatch.setattr(restore.ddl.archive, "OBJECTS_AT_ONCE", 7)
        monkeypatch.setattr(restore.ddl.statements, "STATEMENTS_MAX", 5)
        place, name = (restore.ddl.scripts, "_execute") if how == "stored script" else (restore.ddl.archive, "run_part")
        work, steps = getattr(place, name), 0
        while True:
            steps += 1
            # What is done already is a step, too, in scripts alone: their settings.
            monkeypatch.setattr(place, name, killed_after(work, steps if how == "stored script" else 2))
            try:
                end(ddl, again, ledger, watch)
            except KilledError:
                assert steps < STEPS_MAX
                with psycopg.connect(again.dsn) as connection:
                    if not has_ledger(connection, ledger):
                        break
            else:
                break
    assert steps > 5
    with psycopg.connect(again.dsn) as connection:
        assert not has_ledger(connection, ledger)
    assert schema_of(again) == schema_of(source)


def test_ddl_that_other_programs_began_is_not_taken_for_done(source: Node, tmp_path: Path) -> None:
    again = with_database(source, AGAIN)
    execute(with_database(source, "postgres").dsn, f"DROP DATABASE IF EXISTS {AGAIN} WITH (FORCE)")
    execute(with_database(source, "postgres").dsn, f"CREATE DATABASE {AGAIN} TEMPLATE template0")
    with watch_nodes([source]) as watch:
        ddl = read_archive(dump_archive(source, None, watch), tmp_path / "archive")
        ddl.run_before_rows(again, watch)
        with psycopg.connect(again.dsn) as connection:
            ledger = create_ledger(connection)
        ddl.run_after_rows(again, ledger, watch)
        with pytest.raises(SchemaLoadError, match="begun by other programs"):
            ScriptDdl(ddl.write_scripts(again)).run_after_rows(again, ledger, watch)
