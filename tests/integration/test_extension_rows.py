"""Rows of extensions' configuration tables are stored with every commit, and come back as pg_dump would bring them.

The extension is made for the test, as are its tables' conditions, types and keys: what they hold is compared as COPY
prints it.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
import zstandard
from msgspec import structs
from psycopg.conninfo import make_conninfo

from cutline.cli.commands.create import lines_of as create_lines
from cutline.fleet.config import AssertionTable, Fleet, GroupRules
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect, with_database
from cutline.nodes.encodings import RAW
from cutline.nodes.left_out import LeftOutKind
from cutline.nodes.programs import run_tool, shared_temporary_directory
from cutline.restore.ddl.statements import run_statements
from cutline.restore.drill.assertions import AssertionResult
from cutline.restore.drill.drill import verdict_of
from cutline.restore.plan.checked_ddl import _find_extension_rows
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.filled_tables import TablesUnfitError
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.target import TargetUnfitError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.ddl import extension_tables
from cutline.snapshots.ddl.ddl_archive import EXTENSION
from cutline.snapshots.ddl.extension_tables import (
    BYTES_MAX,
    _compress_rows,
    _divide,
    _list_marked,
    _read_rows,
    _reading,
    _UnfitTableError,
    read_extension_rows,
    read_extension_rows_object,
)
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.removal.gc import collect_garbage
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.in_process import run_as_text
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import execute
from tests.servers.dealt import current_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.restore.plan.plan import RestorePlan
    from cutline.snapshots.ddl.ddl_archive import ArchiveEntry
    from tests.integration.conftest import FleetFactory

NAME = "kept"
REFUSAL_SECONDS_MAX = 30
CONTROL = "default_version = '1.0'\nrelocatable = false\nschema = kept\ntrusted = true\n"
# fact references kind, which is marked later; kind has rows of the extension's own.
SCRIPT = r"""
CREATE TABLE kind (id int PRIMARY KEY, v text);
CREATE TABLE fact (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind int NOT NULL REFERENCES kind, v text,
  "odd ""name" bytea, a text[], at timestamptz, f float8, during interval,
  twice bigint GENERATED ALWAYS AS (id * 2) STORED);
CREATE TABLE loose (v text);
CREATE TABLE named (t regclass PRIMARY KEY);
CREATE TABLE tree (id int, w text, parent int, PRIMARY KEY (id) INCLUDE (w), FOREIGN KEY (parent) REFERENCES tree (id));
CREATE TABLE setting (name text UNIQUE NOT NULL, v text);
INSERT INTO setting VALUES ('mode', 'default');
CREATE TABLE paired (id int, same int GENERATED ALWAYS AS (id) STORED, v text, PRIMARY KEY (id, same));
INSERT INTO paired VALUES (1, DEFAULT, 'own');
CREATE TABLE unmarked (id int PRIMARY KEY);
CREATE SEQUENCE counter;
INSERT INTO kind VALUES (1, 'own'), (2, 'default');
SELECT pg_extension_config_dump('fact', '');
SELECT pg_extension_config_dump('kind', 'WHERE id <> 1');
SELECT pg_extension_config_dump('loose', '');
SELECT pg_extension_config_dump('named', '');
SELECT pg_extension_config_dump('tree', '');
SELECT pg_extension_config_dump('setting', '');
SELECT pg_extension_config_dump('paired', '');
SELECT pg_extension_config_dump('counter', '');
"""
FILLED = r"""
CREATE SCHEMA kept; CREATE EXTENSION kept;
UPDATE kept.kind SET v = 'mine' WHERE id = 2;
UPDATE kept.kind SET v = 'not dumped' WHERE id = 1;
INSERT INTO kept.kind VALUES (3, E'it''s \\ a "third"\n'), (4, NULL);
INSERT INTO kept.fact (kind, v, "odd ""name", a, at, f, during)
  SELECT 2 + n % 3, CASE WHEN n % 7 > 0 THEN repeat('%s;''$1', n % 5) || chr(8364) END, decode('00ff27', 'hex'),
         ARRAY['NULL', NULL, E'a,"b\\'], '2026-03-29 01:30+00'::timestamptz + n * interval '1 us', n / 3.0,
         n * interval '1 mon 2 days' FROM generate_series(1, 1201) AS n;
INSERT INTO kept.loose VALUES ('a'), ('a'), (NULL);
INSERT INTO kept.named VALUES ('account'), ('pg_class');
INSERT INTO kept.tree SELECT n, 'w', nullif((n + 600) % 1300, n) FROM generate_series(0, 1299) AS n;
UPDATE kept.setting SET v = 'mine';
UPDATE kept.paired SET v = 'mine';
INSERT INTO kept.unmarked VALUES (7);
SELECT setval('kept.counter', 41)
"""


@dataclass(frozen=True, slots=True)
class AtStep(Silent):
    """Runs a statement when a step begins."""

    name: str
    dsn: str
    statement: str

    def step(self, name: str, **_: Any) -> None:
        if name == self.name:
            execute(self.dsn, self.statement)


TABLES = ("kind", "fact", "loose", "named", "tree", "setting", "paired")


@pytest.fixture
def share() -> Iterator[Path]:
    """A folder that the servers' account can read."""
    with TemporaryDirectory(dir=shared_temporary_directory()) as found:
        Path(found).chmod(0o755)
        yield Path(found)


def write_extension(folder: Path) -> None:
    (folder / "kept.control").write_text(CONTROL)
    (folder / "kept--1.0.sql").write_text(SCRIPT)


def link_or_copy(source: str, place: str) -> None:
    try:
        os.link(source, place)
    except OSError:
        # Another file system.
        shutil.copy2(source, place)


@pytest.fixture
def embedded(fleet_factory: FleetFactory, share: Path) -> EmbeddedFleet:
    """A shard whose server has the extension. 15 to 17 find none outside their installation: it gets a copy of that."""
    if server := current_server(standbys=False):
        installation = share / "installation"
        shutil.copytree(server.programs.parent, installation, copy_function=link_or_copy)
        (folder,) = {one.parent for one in installation.rglob("plpgsql.control")}
        write_extension(folder)
        return fleet_factory(programs=installation / server.programs.name)
    (share / "extension").mkdir()
    write_extension(share / "extension")
    return fleet_factory(settings={"extension_control_path": f"$system:{share}"})


@pytest.fixture
def runs(embedded: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Runs:
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    execute(fleet.nodes[0].dsn, *FILLED.split(";\n"))
    found = Runs(fleet, Ready(spark))
    found.init()
    return found


@pytest.fixture
def there(runs: Runs) -> Fleet:
    return replace(runs.fleet, nodes=(with_database(runs.fleet.nodes[0], "back"),))


def copies(fleet: Fleet) -> dict[str, list[bytes]]:
    """The marked tables as COPY prints them, rows sorted."""
    (node,) = fleet.nodes
    found = dict[str, list[bytes]]()
    with psycopg.connect(node.dsn) as connection:
        for table in TABLES:
            with connection.cursor().copy(f"COPY kept.{table} TO STDOUT".encode()) as copy:
                found[table] = sorted(map(bytes, copy))
    return found


def ask(fleet: Fleet, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(fleet.nodes[0].dsn) as connection:
        return connection.execute(query.encode()).fetchall()


def uncompressed(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True).read()


def plan_and_preview(source: Fleet, target: Fleet) -> None:
    preview_restore(plan_restore(source, target, RestoreRequest(NAME, replace=True)), Silent())


def expected_of(source: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
    """The row that its condition leaves out is as the extension's script makes it."""
    kinds = [b"1\town\n" if row.startswith(b"1\t") else row for row in source["kind"]]
    return source | {"kind": sorted(kinds)}


def test_rows_of_each_commit_come_back(runs: Runs, there: Fleet) -> None:
    # A child's rows are its own.
    child = "CREATE TABLE child (PRIMARY KEY (t)) INHERITS (kept.named); INSERT INTO child VALUES ('pg_proc')"
    execute(runs.fleet.nodes[0].dsn, child)
    commit = runs.full(NAME)
    assert {one.name: one.kind for one in commit.left_out or ()} == {"kept.unmarked": LeftOutKind.EXTENSION_TABLE}
    (stored,) = commit.extension_rows
    tables = read_extension_rows_object(runs.fleet.store.open(), stored).tables
    # Tables that others reference come first.
    assert [(one.table.name, one.table.rows) for one in tables] == [
        ("kind", 3), ("loose", 3), ("named", 2), ("tree", 1300), ("setting", 1), ("paired", 1),
        ("fact", 1201),
    ]  # fmt: skip
    # Every command knows the objects.
    assert collect_garbage(runs.fleet, 0, Silent()).unknown == []
    before = copies(runs.fleet)
    execute(
        runs.fleet.nodes[0].dsn,
        "DELETE FROM kept.fact WHERE id > 20",
        "UPDATE kept.fact SET v = 'changed' WHERE id < 5",
        "DELETE FROM kept.loose; TRUNCATE kept.named",
        "SELECT nextval('kept.counter')",
    )
    runs.increment(NAME)
    after = copies(runs.fleet)
    assert before != after
    for increment, expected, value in ((0, before, 41), (1, after, 42)):
        report = runs.restore(NAME, there, increment)
        assert not report.refused
        assert copies(there) == expected_of(expected)
        assert ask(there, "SELECT count(*) FROM kept.unmarked") == [(0,)]
        assert ask(there, "SELECT nextval('kept.counter')") == [(value + 1,)]
    # Identity goes on after the rows.
    execute(there.nodes[0].dsn, "INSERT INTO kept.fact (kind) VALUES (3)")
    assert ask(there, "SELECT max(id) FROM kept.fact") == [(1202,)]
    # What the command prints is SQL.
    shown = run_as_text(runs.fleet, "show", NAME, "--increment", "0", "--statements")
    _, _, script = shown.partition("-- s1: rows of extension tables in database bank\n")
    execute(
        there.nodes[0].dsn,
        f"TRUNCATE {', '.join(f'kept.{table}' for table in TABLES)}",
        "INSERT INTO kept.kind VALUES (1, 'own')",
    )
    execute(there.nodes[0].dsn, script)
    assert copies(there) == expected_of(before)


def test_a_script_of_the_store_fills_the_tables_without_cutline(runs: Runs, there: Fleet, tmp_path: Path) -> None:
    """As the page about the store says: it is a script for psql."""
    commit = runs.full(NAME)
    store = runs.fleet.store.open()
    source = copies(runs.fleet)
    script = uncompressed(store.read(commit.extension_rows[0].key))
    execute(runs.fleet.nodes[0].dsn, "CREATE DATABASE back")
    execute(there.nodes[0].dsn, "CREATE SCHEMA kept; CREATE EXTENSION kept; CREATE TABLE account (id int)")
    execute(there.nodes[0].dsn, "ALTER DATABASE back SET standard_conforming_strings = off")
    path = tmp_path / "rows.sql"
    path.write_bytes(b"SET client_encoding = 'UTF8'; SET standard_conforming_strings = on;\n" + script)
    run_tool("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={path}", there.nodes[0].dsn)
    assert copies(there) == expected_of(source)


def test_what_is_not_read_is_named_in_every_output(runs: Runs, there: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with policies, one that is too large, and one that is excluded."""
    (node,) = runs.fleet.nodes
    execute(
        node.dsn,
        "INSERT INTO kept.loose SELECT repeat('x', 17 << 20)",
        "CREATE ROLE backup LOGIN REPLICATION",
        "GRANT pg_read_all_data, pg_monitor, pg_checkpoint TO backup; GRANT USAGE ON SCHEMA kept TO backup",
        "ALTER TABLE kept.named ENABLE ROW LEVEL SECURITY",
    )
    with connect(node) as connection:
        connection.execute("SET ROLE backup")
        body, left_out = _read_rows(node, connection, rules=GroupRules(exclude=("kept.fact",)))
        assert body
        found = {one.name: one.why for one in left_out}
        assert found.keys() == {"kept.named", "kept.loose"}
        assert "row-level security" in found["kept.named"]
        assert "(more than 16 MiB)" in found["kept.loose"]
        with monkeypatch.context() as patch:
            patch.setattr(extension_tables, "SCRIPT_BYTES_MAX", extension_tables.HEADER_BYTES_MAX + (4 << 20))
            _, left_out = _read_rows(node, connection, rules=GroupRules(include=("kept.setting", "kept.loose")))
        (line,) = [one.why for one in left_out]
        assert "(more than 4 MiB together with the shard's other tables)" in line
    commit = runs.full(NAME)
    (line,) = [one for one in create_lines(commit) if "kept.loose" in one]
    assert line.startswith("warning: rows of extension tables were not read")
    assert "kept.loose on s1" in line
    runs.restore(NAME, there)
    assert copies(there)["loose"] == []
    assert len(copies(there)["fact"]) == 1201


def test_damaged_rows_are_found_and_done_without(runs: Runs, there: Fleet) -> None:
    runs.full(NAME)
    store = runs.fleet.store.open()
    (stored,) = read_chain(store, NAME).last.extension_rows
    body = store.read(stored.key)
    damage(runs.fleet, stored.key, body[:-1] + bytes([body[-1] ^ 1]))
    (conflict,) = runs.check_one(NAME).conflicts
    assert (conflict.kind, conflict.object) == ("digest", stored.key)
    with pytest.raises(ObjectDamagedError) as raised:
        runs.restore(NAME, there)
    assert "--allow-refused-ddl" in raised.value.hint
    assert "--increment" not in raised.value.hint
    request = RestoreRequest(NAME, replace=True, allow_refused_ddl=True)
    plan = plan_restore(runs.fleet, there, request)
    report = restore_fleet(plan, runs.spark, Silent())
    # So the command ends with 10, its file names them, and a drill that did without them is inconclusive.
    (refused,) = report.refused
    assert (refused.object, refused.statement, refused.script.strip()) == ("TABLE DATA of extensions", "", "")
    assert refused.reason.startswith(f"object {stored.key} of node s1: ")
    assert preview_restore(plan, Silent()).refused == [refused]
    holds = AssertionResult(AssertionTable("s1", "SELECT 1"), holds=True)
    assert verdict_of([holds], report) == "inconclusive"
    assert len(copies(there)["kind"]) == 2
    # The next commit has them again, and is named where those of a later one are lost.
    runs.increment(NAME)
    runs.restore(NAME, there)
    assert copies(there) == expected_of(copies(runs.fleet))
    (stored,) = runs.increment(NAME).extension_rows
    path_of(runs.fleet, stored.key).unlink()
    with pytest.raises(ObjectDamagedError, match="it is not in the store") as raised:
        plan_and_preview(runs.fleet, there)
    assert f"with undamaged rows: snapshot restore {NAME} --replace --increment 1\n" in raised.value.hint
    assert ("missing", stored.key) in {(one.kind, one.object) for one in runs.check_one(NAME).conflicts}


def test_a_role_that_may_not_fill_the_tables_is_told_before_any_row(runs: Runs, there: Fleet) -> None:
    """The tables of a trusted extension belong to the bootstrap superuser, whoever creates it."""
    (node,) = there.nodes
    execute(runs.fleet.nodes[0].dsn, "CREATE ROLE other LOGIN CREATEDB")
    as_other = replace(there, nodes=(replace(node, dsn=make_conninfo(node.dsn, user="other")),))
    runs.full(NAME)
    scope = RestoreScope(no_owner=True)
    with pytest.raises(TargetUnfitError, match=r"TABLE DATA kept\.kind: permission denied for table kind") as raised:
        runs.restore(NAME, as_other, scope=scope)
    assert "change the user in the \\connect lines to a superuser and run it" in raised.value.hint
    # Rows may be secret.
    assert "mine" not in f"{raised.value}{raised.value.details}"
    report = runs.restore(NAME, as_other, scope=scope, allow_refused_ddl=True)
    assert {one.object for one in report.refused} == {f"TABLE DATA kept.{table}" for table in TABLES}
    assert all("mine" not in str(one.document()) for one in report.refused)
    assert any("mine" in one.script for one in report.refused)
    assert ask(there, "SELECT count(*) FROM account") == ask(runs.fleet, "SELECT count(*) FROM account")


EVIL = """
CREATE FUNCTION evil(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
  RAISE WARNING 'evil as %', current_user; RETURN $1; END $$"""
ON_INDEX = "CREATE INDEX ON kept.loose ((1 + public.evil(1)))"
# The condition, id <> 1, finds a cast of the owner's.
ON_CAST = """
CREATE TYPE mine AS ENUM ('1', '2');
CREATE FUNCTION evil(mine) RETURNS int LANGUAGE plpgsql AS $$ BEGIN
  RAISE WARNING 'evil as %', current_user; RETURN 2; END $$;
CREATE CAST (mine AS int) WITH FUNCTION evil(mine) AS IMPLICIT;
TRUNCATE kept.kind CASCADE;
ALTER TABLE kept.fact DROP CONSTRAINT fact_kind_fkey;
ALTER TABLE kept.kind ALTER id TYPE mine USING '1';
INSERT INTO kept.kind VALUES ('1', 'x');
ALTER TABLE kept.kind OWNER TO owner"""


def test_reading_runs_no_code_of_a_tables_owner(runs: Runs) -> None:
    """COPY of a whole table is not planned. A condition is only evaluated where superusers own all of it."""
    (node,) = runs.fleet.nodes
    said: list[str] = []
    execute(node.dsn, "CREATE ROLE owner", EVIL, ON_INDEX, *ON_CAST.split(";\n"))
    with connect(node) as connection:
        connection.add_notice_handler(lambda note: said.append(str(note.message_primary)))
        # That a query does run it.
        connection.execute("SELECT count(*) FROM kept.loose WHERE v = 'a'")
        connection.execute("SELECT count(*) FROM kept.kind WHERE id <> 1")
        assert said == ["evil as postgres"] * 2
        said.clear()
        body, left_out = _read_rows(node, connection, rules=GroupRules())
    assert said == []
    assert body
    assert [one.name for one in left_out] == ["kept.kind"]
    assert "its owner or its extension's owner is not a superuser" in left_out[0].why
    # The owner of the extension may change its functions.
    execute(
        node.dsn,
        "ALTER TABLE kept.kind OWNER TO postgres",
        "UPDATE pg_extension SET extowner = 'owner'::regrole WHERE extname = 'kept'",
    )
    with connect(node) as connection:
        _, left_out = _read_rows(node, connection, rules=GroupRules())
    assert [one.name for one in left_out] == ["kept.kind"]


def await_refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that waits until a reader has found a table locked and given up that try.

    The reader doesn't wait in the server, so pg_locks never shows it.
    """
    refused, try_table = threading.Event(), extension_tables._TableReader._try

    def noted(reader: extension_tables._TableReader, *arguments: Any) -> bool:
        is_done = try_table(reader, *arguments)
        if not is_done:
            refused.set()
        return is_done

    def wait() -> None:
        assert refused.wait(REFUSAL_SECONDS_MAX)

    monkeypatch.setattr(extension_tables._TableReader, "_try", noted)
    return wait


def test_a_table_that_is_being_rewritten_is_waited_for(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state from before the end of TRUNCATE would show it empty."""
    (node,), refused = runs.fleet.nodes, await_refusal(monkeypatch)
    with psycopg.connect(node.dsn) as other, connect(node) as connection, ThreadPoolExecutor(1) as threads:
        other.execute("TRUNCATE kept.loose")
        other.execute("INSERT INTO kept.loose VALUES ('new')")
        reading = threads.submit(_read_rows, node, connection, rules=GroupRules())
        refused()
        # Nothing is held while it waits: others get what they want, at most a try later.
        other.execute("SET lock_timeout = '5s'")
        other.execute("LOCK TABLE kept.kind, kept.fact IN ACCESS EXCLUSIVE MODE")
        assert not reading.done()
        other.commit()
        body, left_out = reading.result()
    assert left_out == ()
    assert b"\n('new')" in uncompressed(body)


def test_nothing_is_locked_while_what_a_condition_needs_is_waited_for(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner locks a table's indexes."""
    (node,), refused = runs.fleet.nodes, await_refusal(monkeypatch)
    with psycopg.connect(node.dsn) as other, connect(node) as connection, ThreadPoolExecutor(1) as threads:
        other.execute("REINDEX INDEX kept.kind_pkey")
        reading = threads.submit(_read_rows, node, connection, rules=GroupRules())
        refused()
        # With what the reader held meanwhile, the server would find a deadlock, and end this one.
        other.execute("SET lock_timeout = '5s'")
        other.execute("TRUNCATE kept.loose")
        other.execute("INSERT INTO kept.loose VALUES ('new')")
        other.commit()
        body, left_out = reading.result()
    assert left_out == ()
    script = uncompressed(body)
    assert b"\n('new')" in script
    # Each once, though it was tried several times.
    assert [script.count(f"INSERT INTO kept.{table} ".encode()) for table in TABLES] == [1, 3, 1, 1, 1, 1, 1]


def test_tables_that_stay_locked_are_left_out(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose condition asks another table."""
    (node,) = runs.fleet.nodes
    monkeypatch.setattr(extension_tables, "LOCK_SECONDS_MAX", 1)
    condition = "WHERE id <> 1 AND id NOT IN (SELECT id FROM public.account WHERE id < 0)"
    execute(node.dsn, f"UPDATE pg_extension SET extcondition[2] = '{condition}' WHERE extname = 'kept'")
    with psycopg.connect(node.dsn) as other, connect(node) as connection:
        other.execute("LOCK TABLE account, kept.loose")
        # A reader that waits without bound would hang here.
        connection.execute("SET statement_timeout = '5s'")
        body, left_out = _read_rows(node, connection, rules=GroupRules())
    assert {one.name: one.why.partition("(")[2].partition(")")[0] for one in left_out} == {
        "kept.kind": "other sessions kept it, or a relation that its condition needs, locked for 1 s",
        "kept.loose": "other sessions kept it locked for 1 s",
    }
    assert {one.table.name for one in _divide(uncompressed(body)).tables} == {*TABLES} - {"kind", "loose"}
    with connect(node) as connection:
        body, left_out = _read_rows(node, connection, rules=GroupRules())
    assert left_out == ()
    assert {one.table.name for one in _divide(uncompressed(body)).tables} == {*TABLES}


def test_a_table_that_gets_the_name_of_another_is_not_read_for_it(runs: Runs) -> None:
    (node,) = runs.fleet.nodes
    with connect(node) as connection:
        # In a circle no order would do.
        execute(node.dsn, "ALTER TABLE kept.kind ADD fact bigint REFERENCES kept.fact")
        tables, _ = _list_marked(connection, GroupRules())
        assert {table.name for table in tables} == {*TABLES}
        (loose,) = [table for table in tables if table.name == "loose"]
        with _reading(connection):
            connection.execute("SELECT")
            execute(node.dsn, "ALTER TABLE kept.loose RENAME TO gone", "CREATE TABLE kept.loose (v text)")
            with pytest.raises(_UnfitTableError, match="since the cut, a different table has taken its name"):
                _compress_rows(connection, loose, BYTES_MAX)
        # What is stored for it would not be what its first line says.
        (setting,) = [table for table in tables if table.name == "setting"]
        execute(node.dsn, "ALTER TABLE kept.setting RENAME TO other")
        with _reading(connection), pytest.raises(_UnfitTableError, match="it was renamed after the cut"):
            _compress_rows(connection, setting, BYTES_MAX)


def test_parts_of_a_restore_say_that_they_bring_no_rows_of_extensions(runs: Runs, there: Fleet) -> None:
    runs.full(NAME)
    expected = copies(runs.fleet)
    report = runs.restore(NAME, there, scope=RestoreScope(schema_only=True))
    assert "all rows, and the values of all sequences except those of extensions" in report.left_out
    assert copies(there) == expected_of(expected)
    execute(there.nodes[0].dsn, "DELETE FROM kept.loose")
    report = restore_fleet(
        plan_restore(runs.fleet, there, RestoreRequest(NAME, scope=RestoreScope(data_only=True))), runs.spark, Silent()
    )
    assert "rows of extension tables on s1" in report.left_out
    assert copies(there)["loose"] == []
    report = runs.restore(NAME, there, groups=("public.account",))
    assert "rows of extension tables on s1" in report.left_out
    assert copies(there)["loose"] == []


def test_rows_alone_do_without_the_sequences_of_extensions_that_can_not_be_set(runs: Runs, there: Fleet) -> None:
    """In steps, as the hint to a refused extension says: the DDL without it, then the rows."""
    (target,) = there.nodes
    made = "CREATE ROLE other LOGIN CREATEDB; CREATE SEQUENCE größe; SELECT setval('größe', 7)"
    execute(runs.fleet.nodes[0].dsn, made)
    as_other = replace(there, nodes=(replace(target, dsn=make_conninfo(target.dsn, user="other")),))
    runs.full(NAME)
    runs.restore(NAME, as_other, scope=RestoreScope(schema_only=True, no_owner=True), allow_refused_ddl=True)
    plan = plan_restore(runs.fleet, as_other, RestoreRequest(NAME, scope=RestoreScope(data_only=True)))

    def unset(left_out: list[str]) -> list[str]:
        return sorted(one for one in left_out if one.startswith("value of sequence "))

    execute(target.dsn, "GRANT SET ON PARAMETER session_replication_role TO other")
    why = "it keeps the value that its extension gave it, because the role may not set it"
    names = ("counter", "fact_id_seq")
    assert unset(preview_restore(plan, Silent()).left_out) == [
        f"value of sequence kept.{name} on s1: {why}" for name in names
    ]
    execute(target.dsn, "DROP EXTENSION kept; ALTER SEQUENCE größe RENAME TO another")
    # What the DDL creates is needed.
    with pytest.raises(TablesUnfitError, match=r"database back lacks sequences that the snapshot has: public\.größe$"):
        preview_restore(plan, Silent())
    # Also what is dropped while the rows are loaded.
    granted = "GRANT USAGE ON SCHEMA kept TO other; GRANT UPDATE ON ALL SEQUENCES IN SCHEMA kept TO other"
    execute(target.dsn, "ALTER SEQUENCE another RENAME TO größe", f"CREATE EXTENSION kept; {granted}")
    assert unset(preview_restore(plan, Silent()).left_out) == []
    report = restore_fleet(plan, runs.spark, AtStep("set sequences", target.dsn, "DROP EXTENSION kept"))
    why = "its extension is missing, or has a different version"
    assert unset(report.left_out) == [f"value of sequence kept.{name} on s1: {why}" for name in names]
    assert ask(there, "SELECT nextval('größe')") == [(8,)]
    rows = "SELECT * FROM account ORDER BY id"
    assert ask(there, rows) == ask(runs.fleet, rows) != []


def test_an_extension_that_is_made_after_the_cut_does_not_keep_it_from_being_restored(runs: Runs, there: Fleet) -> None:
    (node,) = runs.fleet.nodes
    execute(node.dsn, "DROP EXTENSION kept")
    made = "CREATE EXTENSION kept; INSERT INTO kept.loose VALUES ('late')"
    # The cut is made, and the catalogs have been compared.
    commit = create_full(runs.fleet, CreateRequest(NAME), runs.spark, AtStep("commit", node.dsn, made))
    assert commit.extension_rows
    report = runs.restore(NAME, there)
    assert "rows of extension tables on s1: kept.loose belongs to an extension created after the cut" in report.left_out
    assert ask(there, "SELECT count(*) FROM pg_extension WHERE extname = 'kept'") == [(0,)]


def test_rows_are_compared_without_their_order(runs: Runs, there: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of shards that are merged are."""
    (node,) = runs.fleet.nodes
    store = runs.fleet.store.open()
    runs.full(NAME)
    before = read_extension_rows(store, read_chain(store, NAME).last, "s1")
    # The rows move to other places of the table, and to other statements.
    execute(
        node.dsn,
        "UPDATE kept.fact SET v = v WHERE id % 3 = 0",
        "UPDATE kept.kind SET v = v WHERE id = 2",
        "UPDATE kept.loose SET v = v WHERE v = 'a'",
    )
    runs.increment(NAME)
    after = read_extension_rows(store, read_chain(store, NAME).last, "s1")
    assert before != after
    assert before.digests() == after.digests()
    execute(node.dsn, "UPDATE kept.fact SET v = 'other' WHERE id = 3")
    runs.increment(NAME)
    other = read_extension_rows(store, read_chain(store, NAME).last, "s1").digests()
    assert [name for name, digest in other.items() if digest != before.digests()[name]] == ["kept.fact"]

    # Another shard that has the same, and one that has not: each table is looked at once.
    plan = plan_restore(runs.fleet, there, RestoreRequest(NAME))
    first, second, third = (commit.extension_rows[0] for commit in plan.chain.commits)
    objects = (first, structs.replace(second, node="same"), structs.replace(third, node="other"))
    merging = cast("RestorePlan", SimpleNamespace(
        request=plan.request, store=plan.store, chain=SimpleNamespace(last=SimpleNamespace(extension_rows=objects))
    ))  # fmt: skip
    looked_at: list[bytes] = []
    digest = extension_tables._digest_rows

    def note(statements: bytes) -> bytes:
        looked_at.append(statements)
        return digest(statements)

    monkeypatch.setattr(extension_tables, "_digest_rows", note)
    (target,) = plan.targets
    entry = cast("ArchiveEntry", SimpleNamespace(kind=EXTENSION, name="kept"))
    for sources, expected, looks in (
        (("s1",), [], 0),
        (("s1", "same", "other"), ["taken from s1; those of other differ and are left out"], 3),
    ):
        looked_at.clear()
        found = _find_extension_rows(merging, structs.replace(target, sources=sources), [entry], Obstacles())
        assert [line.partition(": ")[2] for line in found.left_out] == expected
        assert found.found == before
        assert len(looked_at) == looks * len(TABLES)


@pytest.mark.parametrize(
    "statements",
    [
        b"INSERT INTO kept.loose (v) OVERRIDING SYSTEM VALUE VALUES\n('a');\n\\! touch x\n",
        b"INSERT INTO kept.loose (v) OVERRIDING SYSTEM VALUE VALUES\n(evil());\n",
        b"INSERT INTO kept.loose (v) OVERRIDING SYSTEM VALUE VALUES\n('a\0');\n",
        b"INSERT INTO kept.loose (v) OVERRIDING SYSTEM VALUE VALUES\n('a'\n",
        b"INSERT INTO kept.loose (v) OVERRIDING SYSTEM VALUE VALUES\n('a'),\n;\n",
        b"INSERT INTO kept.loose (v) OVERRIDING SYSTEM VALUE VALUES\n;\n",
        b"INSERT INTO kept.loose (v$) OVERRIDING SYSTEM VALUE VALUES\n('a');\n",
        b"INSERT INTO kept.loose (\xff) OVERRIDING SYSTEM VALUE VALUES\n('a');\n",
        b"INSERT INTO public.loose (v) OVERRIDING SYSTEM VALUE VALUES\n('a');\n",
        b"INSERT INTO kept.loose (v) OVERRIDING SYSTEM VALUE VALUES\n('a');\n"
        b"INSERT INTO kept.fact (v) OVERRIDING SYSTEM VALUE VALUES\n('a');\n",
        b"COPY kept.loose FROM STDIN;\n",
        b"COMMIT;\n",
    ],
)
def test_an_object_with_anything_but_rows_is_damaged(statements: bytes) -> None:
    table = {"extension": "kept", "schema": "kept", "name": "loose", "rows": 1, "size": len(statements)}
    document = json.dumps({"schema": "cutline/extension-rows/1", "tables": [table]}).encode()
    with pytest.raises(ValueError, match=r"kept\.loose are not in the form that Cutline writes"):
        _divide(b"-- " + document + b"\n" + statements)


def path_of(fleet: Fleet, key: str) -> Path:
    return Path(fleet.store.url.removeprefix("file://")) / key


def damage(fleet: Fleet, key: str, body: bytes) -> None:
    path = path_of(fleet, key)
    path.chmod(0o600)
    path.write_bytes(body)


def test_rows_keep_the_bytes_of_their_databases_encoding(runs: Runs) -> None:
    (node,) = runs.fleet.nodes
    text = bytes(range(160, 256)) + b"'\\"
    for name in ("latin", "latin_back"):
        execute(
            node.dsn,
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING LATIN1 LOCALE 'C' LOCALE_PROVIDER libc",
        )
        execute(with_database(node, name).dsn, "CREATE SCHEMA kept; CREATE EXTENSION kept")
    source, back = with_database(node, "latin"), with_database(node, "latin_back")
    with psycopg.connect(source.dsn, client_encoding=RAW) as connection:
        run_statements(
            connection, b"INSERT INTO kept.loose VALUES (E'" + text.replace(b"\\", b"\\\\").replace(b"'", b"''") + b"')"
        )
        connection.commit()
    # Names are compared with what the first line says, which is UTF-8.
    renamed = ("SET client_encoding = 'UTF8'", 'ALTER TABLE kept.setting RENAME TO "größe \\xff ""x"" "')
    execute(source.dsn, *renamed)
    with connect(source) as connection:
        body, left_out = _read_rows(source, connection, rules=GroupRules())
    assert left_out == ()
    script = uncompressed(body)
    assert [one.table.name for one in _divide(script).tables] == ["kind", "loose", 'größe \\xff "x" ', "paired"]
    for name, other in ((b'""x""', b'""y""'), (b'kept."gr', b'kepd."gr')):
        with pytest.raises(ValueError, match="are not in the form that Cutline writes"):
            _divide(script.replace(name, other))
    execute(back.dsn, *renamed)
    with connect(back, client_encoding=RAW) as connection:
        run_statements(connection, script)
        assert connection.execute("SELECT textsend(v) FROM kept.loose").fetchall() == [(text,)]
