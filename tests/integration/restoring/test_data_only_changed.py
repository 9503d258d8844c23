"""What others have done to tables between the end of a `restore --data-only` and its undoing, and keys of others."""

from __future__ import annotations

import psycopg
import pytest

from cutline.fleet.config import Node
from cutline.nodes.connections import with_database
from cutline.restore.rows.filled_tables import TablesUnfitError
from cutline.restore.rows.filling import TablesChangedError
from cutline.restore.rows.references import KeyUntrustedError
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.integration.refusing import execute
from tests.integration.restoring.ending import abandon, resume
from tests.integration.restoring.filled import acting_at, assert_empty, leave, load, rows_of
from tests.integration.restoring.target_place import Place, drop_databases


def test_rows_that_refer_to_loaded_ones_keep_these_from_being_deleted(place: Place, filled: Node) -> None:
    """`tag` is not restored; its key counts as valid, and stays so."""
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(filled.dsn, "INSERT INTO tag SELECT max(id) FROM item")
    with pytest.raises(TablesChangedError, match=r"node s2: .*a row of public.tag references a row of public.item"):
        abandon(place)
    assert rows_of(filled.dsn)["public.item"]
    execute(filled.dsn, "DELETE FROM tag")
    abandon(place)
    assert_empty(place)


def test_a_table_of_another_name_is_neither_emptied_nor_filled(place: Place, filled: Node) -> None:
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(
        filled.dsn,
        "SET session_replication_role = replica; ALTER TABLE log RENAME TO mine;"
        " CREATE TABLE log (what text); INSERT INTO mine VALUES ('my own row')",
    )
    with pytest.raises(TablesUnfitError, match="were replaced after the restore began"):
        resume(place)
    with pytest.raises(TablesChangedError, match=r'table public.mine was named "public"."log" when it was filled'):
        abandon(place)
    with psycopg.connect(filled.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM mine WHERE what = 'my own row'").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM log").fetchone() == (0,)
    execute(filled.dsn, "DROP TABLE log", "ALTER TABLE mine RENAME TO log")
    abandon(place)
    assert_empty(place)


ACTING = {
    # On TRUNCATE of `log`; one on INSERT alone is not in the way.
    "trigger refuse of public.log": (
        "ALTER TABLE log ENABLE ALWAYS TRIGGER refuse;"
        " CREATE TRIGGER acts BEFORE INSERT ON item EXECUTE FUNCTION refuse();"
        " ALTER TABLE item ENABLE ALWAYS TRIGGER acts",
        "ALTER TABLE log ENABLE TRIGGER refuse",
    ),
    # `item` is deleted from, because `tag` refers to it.
    "rule keep of public.item": (
        "CREATE RULE keep AS ON DELETE TO item DO INSTEAD NOTHING; ALTER TABLE item ENABLE ALWAYS RULE keep",
        "DROP RULE keep ON item",
    ),
}


@pytest.mark.parametrize("name", ACTING)
def test_what_would_act_on_emptying_is_named(place: Place, filled: Node, name: str) -> None:
    made, ended = ACTING[name]
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(filled.dsn, made)
    with pytest.raises(TablesChangedError, match=f"{name} would fire"):
        abandon(place)
    assert all(rows_of(filled.dsn).values())
    execute(filled.dsn, ended)
    abandon(place)
    assert_empty(place)


EVIL = """
CREATE TYPE m.key AS ENUM ('7');
CREATE FUNCTION m.evil(k m.key) RETURNS int LANGUAGE plpgsql
    AS $$ BEGIN ALTER ROLE mallory SUPERUSER; RETURN k::text::int; END $$;
CREATE CAST (m.key AS int) WITH FUNCTION m.evil(m.key) AS IMPLICIT;
CREATE TABLE m.refers (k m.key REFERENCES public.item)
"""


@pytest.mark.parametrize("is_early", [True, False])
def test_keys_of_roles_that_own_no_restored_table_are_not_verified(
    place: Place, filled: Node, *, is_early: bool
) -> None:
    """A cast of its type would run as our role."""
    execute(
        filled.dsn,
        "DROP EVENT TRIGGER refuse",
        "CREATE ROLE mallory",
        "CREATE SCHEMA m AUTHORIZATION mallory",
        "GRANT REFERENCES, SELECT ON item TO mallory",
        "GRANT USAGE ON SCHEMA public TO mallory",
    )
    try:
        make = f"SET ROLE mallory; {EVIL}; SET ROLE NONE; SET session_replication_role = replica"
        make += "; INSERT INTO m.refers VALUES ('7')"
        if is_early:
            with pytest.raises(TablesUnfitError, match=r"refers_k_fkey of m.refers, which belongs to mallory"):
                load(place, acting_at(RestoreCrashPoint.INTENT_STORED, lambda: execute(filled.dsn, make)))
        else:
            said = "node s2: foreign key refers_k_fkey of table m.refers can't be verified"
            # While it runs, its locks let nobody add a key.
            leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
            execute(filled.dsn, make)
            with pytest.raises(KeyUntrustedError, match=said):
                abandon(place)
        with psycopg.connect(filled.dsn) as connection:
            assert connection.execute("SELECT FROM pg_roles WHERE rolname = 'mallory' AND rolsuper").rowcount == 0
        execute(filled.dsn, "DROP SCHEMA m CASCADE")
        if not is_early:
            abandon(place)
        assert_empty(place)
    finally:
        drop_databases(place)
        execute(with_database(filled, "postgres").dsn, "DROP ROLE mallory")
