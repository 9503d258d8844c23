"""A role that may create schemas in a database to fill makes a restore run nothing there, and blocks none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import cutline.restore.rows.filling as filling
from cutline.fleet.config import Node
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import resume_restore
from cutline.restore.targets.databases import list_databases
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from tests.integration.refusing import NoSpark, execute
from tests.integration.restoring.filled import REQUEST, tables_to_fill
from tests.integration.restoring.target_place import DATABASE, NAME, Place
from tests.run.soak import first

SCHEMA = "cutline_restoring_0123456789"
LEDGER = f"{SCHEMA}.ledger"
# What of the schema is somebody else's.
VIEW = (
    f"CREATE SCHEMA {SCHEMA} AUTHORIZATION mallory",
    f"SET ROLE mallory; CREATE VIEW {SCHEMA}.record AS SELECT m.evil() AS text",
    f"CREATE TABLE {SCHEMA}.tables (relid regclass); CREATE TABLE {SCHEMA}.ledger (rows bigint)",
)
POLICY = (
    f"CREATE SCHEMA {SCHEMA} AUTHORIZATION mallory",
    f"SET ROLE mallory; CREATE TABLE {SCHEMA}.record (text text); INSERT INTO {SCHEMA}.record VALUES ('')",
    f"CREATE TABLE {SCHEMA}.tables (relid regclass); CREATE TABLE {SCHEMA}.ledger (rows bigint)",
    f"ALTER TABLE {SCHEMA}.record ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
    f"CREATE POLICY evil ON {SCHEMA}.record USING (m.evil() <> '')",
)
IN_OURS = (
    f"CREATE SCHEMA {SCHEMA}; GRANT CREATE, USAGE ON SCHEMA {SCHEMA} TO mallory",
    f"CREATE TABLE {SCHEMA}.tables (relid regclass); CREATE TABLE {SCHEMA}.ledger (rows bigint)",
    f"SET ROLE mallory; CREATE VIEW {SCHEMA}.record AS SELECT m.evil() AS text",
)
EVIL = """
CREATE FUNCTION m.evil() RETURNS text LANGUAGE plpgsql
    AS $$ BEGIN ALTER ROLE mallory SUPERUSER; RETURN ''; END $$
"""


class Noting(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def attacked(place: Place) -> Iterator[Node]:
    node = place.target.primaries[0]
    with tables_to_fill(place, "DROP EVENT TRIGGER refuse"):
        execute(node.dsn, "CREATE ROLE mallory", "CREATE SCHEMA m AUTHORIZATION mallory", f"SET ROLE mallory; {EVIL}")
        yield node
    execute(place.fleet.primaries[0].dsn, "DROP ROLE mallory")


def is_super(node: Node) -> bool:
    with psycopg.connect(node.dsn) as connection:
        return connection.execute("SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'").fetchone() == (True,)


@pytest.mark.parametrize(
    "planted", first([(VIEW,), (POLICY,), (IN_OURS,)]), ids=["a view", "a policy", "a view in a schema of ours"]
)
def test_what_looks_like_a_filling_of_others_is_not_read_and_blocks_nothing(
    place: Place, attacked: Node, planted: tuple[str, ...]
) -> None:
    execute(attacked.dsn, *planted)
    progress = Noting()
    preview_restore(plan_restore(place.fleet, place.target, REQUEST), progress)
    (note,) = progress.notes
    assert note.startswith(f"{attacked.id}: ")
    assert SCHEMA in note
    with pytest.raises(UnfinishedRestoreError, match="no unfinished restore into these databases"):
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), NoSpark(), Silent())
    with pytest.raises(UnfinishedRestoreError, match="no unfinished restore into these databases"):
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
    assert not is_super(attacked)


def test_what_is_exchanged_between_the_check_and_the_lock_is_not_read(
    attacked: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, calls = filling._find_schemas, list[int]()

    def find_once_too_early(connection: psycopg.Connection[Any]) -> tuple[list[str], list[str]]:
        calls.append(1)
        return ([SCHEMA], []) if len(calls) == 1 else find(connection)

    execute(attacked.dsn, *VIEW)
    monkeypatch.setattr(filling, "_find_schemas", find_once_too_early)
    with psycopg.connect(attacked.dsn, autocommit=True) as connection:
        assert filling.find_fillings(connection) == ({}, [])
    assert not is_super(attacked)


def test_the_owner_of_a_database_can_not_write_the_record_of_its_filling(place: Place, attacked: Node) -> None:
    """A record in its comment would name the ledger, of which the rows are asked."""
    record = (
        '{"schema":"cutline/restoring/1","operation":"20261122T115359Z-0123456789","snapshot":"daily","increment":1,'
        '"digest":"x","began_at":"2026-11-22T11:53:59.296Z","by":"mallory","version":"1","groups":[],"replace":false,'
        '"create_roles":false,"in_store":false,"allow_refused_ddl":false,"shards":["s1"],"phase":"loading","ledger":"%s",'
        '"scope":{"data_only":%s}}'
    )

    def is_believed(ledger: str, is_filling: str) -> bool:
        execute(attacked.dsn, f"COMMENT ON DATABASE {DATABASE} IS '{record % (ledger, is_filling)}'")
        with psycopg.connect(attacked.dsn) as connection:
            return list_databases(connection)[DATABASE].record is not None

    assert is_believed(LEDGER, "false")
    assert not is_believed(LEDGER, "true")
    assert not is_believed("m.evil() AS l (rows)", "false")
    assert not is_believed("m.evil() AS l (rows)", "true")
