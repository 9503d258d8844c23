"""What keeps rows from existing tables: all of it is named at once, and what the hints say removes it."""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.rows.references import ForeignKeyViolatedError
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import restore_fleet
from cutline.storage.errors import SnapshotError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready
from tests.integration.documented_roles import RESTORER, statements
from tests.integration.refusing import NoSpark, execute
from tests.integration.restoring.filled import REQUEST, assert_filled, tables_to_fill
from tests.integration.restoring.target_place import DATABASE, NAME, Place

BESIDES = ["--schema-only", "--replace", "--no-owner", "--create-roles"]


def refusals(place: Place, target: Fleet) -> list[dict[str, str]]:
    """The obstacles of a restore, which are those of its dry run."""
    with pytest.raises(SnapshotError) as previewed:
        preview_restore(plan_restore(place.fleet, target, REQUEST), Silent())
    with pytest.raises(SnapshotError) as restored:
        restore_fleet(plan_restore(place.fleet, target, REQUEST), NoSpark(), Silent())
    error = restored.value
    assert (previewed.value.message, previewed.value.hint) == (error.message, error.hint)
    assert error.exit_code == 3
    obstacles = error.details.get("obstacles")
    assert isinstance(obstacles, list), error.message
    return obstacles


def as_role(place: Place, node: str, role: str) -> Fleet:
    nodes = tuple(
        replace(one, dsn=psycopg.conninfo.make_conninfo(one.dsn, user=role)) if one.id == node else one
        for one in place.target.nodes
    )
    return replace(place.target, nodes=nodes)


def test_tables_that_do_not_fit_are_named_at_once_on_all_nodes(place: Place) -> None:
    first, _, third = place.target.primaries
    with tables_to_fill(place):
        execute(
            first.dsn,
            "DROP TABLE transfer",
            "DROP TABLE log",
            "CREATE VIEW log AS SELECT 'line' AS what",
            "ALTER TABLE account ALTER id TYPE int, ADD needed int NOT NULL",
            "ALTER TABLE item DROP body",
            "ALTER TABLE account ADD UNIQUE (balance) DEFERRABLE",
            "INSERT INTO account VALUES (1, 1, 1)",
            "CREATE TRIGGER acts BEFORE INSERT ON account EXECUTE FUNCTION refuse()",
            "ALTER TABLE account ENABLE ALWAYS TRIGGER acts",
            "ALTER TABLE item ALTER n DROP DEFAULT; DROP SEQUENCE numbers",
        )
        execute(with_database(third, "postgres").dsn, f"DROP DATABASE {DATABASE}")
        found = refusals(place, place.target)
        assert {one["error"] for one in found} == {"tables-unfit"}
        assert [one["message"] for one in found if one["node"] == "s2"] == []
        said = [one["message"].removeprefix("node s1: ") for one in found if one["node"] == "s1"]
        assert said == [
            "tables of the snapshot are not ordinary tables in database shop: public.log is a view",
            "database shop lacks tables that the snapshot has: public.transfer",
            "columns of tables in database shop differ from the snapshot's:"
            " public.account.id is integer instead of bigint, public.item.body is missing or generated",
            "tables of database shop have NOT NULL columns for which the snapshot has no values: public.account.needed",
            "triggers or rules of database shop would fire for the loaded rows, because they are enabled as ALWAYS or"
            " REPLICA: trigger acts of public.account",
            "deferrable constraints of database shop are not enforced while rows are loaded:"
            " account_balance_key of public.account",
            "tables of database shop are not empty: public.account",
            "database shop lacks sequences that the snapshot has: public.numbers",
        ]
        (gone,) = [one for one in found if one["node"] == "s3"]
        assert gone["message"] == "node s3: there is no database shop, but --data-only needs its tables"
        # The others have theirs, so only this one is made.
        assert f"snapshot restore {NAME} --node s3 --schema-only --increment 1\n" in gone["hint"]


def test_tables_with_rows_are_emptied_as_the_hint_says(place: Place) -> None:
    """Also where tables refer to them that are not restored: then TRUNCATE is refused."""
    with tables_to_fill(place):
        for node in place.target.primaries[:2]:
            execute(node.dsn, "INSERT INTO item (id, n) VALUES (1, 1)", "INSERT INTO account VALUES (1, 5)")
        execute(place.target.primaries[1].dsn, "DROP TABLE tag")
        third = place.target.primaries[2].dsn
        execute(third, "INSERT INTO item (id, n) VALUES (1, 1)")
        execute(
            third,
            "SET session_replication_role = replica;"
            "CREATE TABLE more (i int PRIMARY KEY REFERENCES item ON DELETE CASCADE);"
            "CREATE TABLE further (i int REFERENCES more) PARTITION BY LIST (i);"
            "CREATE TABLE further_1 PARTITION OF further DEFAULT",
        )
        rows = ["INSERT INTO more VALUES (1)", "INSERT INTO further VALUES (1)"]
        # Rows of tables that are not restored would go with them: these are named.
        for count, referring in enumerate(("", "public.more", "public.further_1, public.more")):
            execute(third, *rows[:count])
            (hint,) = [one["hint"] for one in refusals(place, place.target) if one["node"] == "s3"]
            said, *statements = hint.split("\n")
            assert said.startswith(
                f"rows of {referring} may reference their rows; if" if count else "if their rows are not"
            )
            assert [one.split()[0] for one in statements] == ["TRUNCATE" if count else "DELETE"]
            execute(third, *statements)
            assert "s3" not in [one["node"] for one in refusals(place, place.target)]
            execute(third, "INSERT INTO item (id, n) VALUES (1, 1)")
        execute(third, "DROP TABLE further", "DROP TABLE more", "DELETE FROM item")
        found = {one["node"]: one["hint"].split("\n")[1:] for one in refusals(place, place.target)}
        assert [lines[0].split()[0] for lines in found.values()] == ["WITH", "TRUNCATE"]
        for node in place.target.primaries[:2]:
            execute(node.dsn, *found[node.id])
        preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent())


def test_keys_to_empty_tables_are_named_before_rows_are_loaded(place: Place) -> None:
    with tables_to_fill(place):
        second = place.target.primaries[1]
        execute(second.dsn, "DELETE FROM kind")
        said = preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent()).warnings
        # Of `tag` no rows are restored, and the tables that it refers to are filled.
        assert said == [
            "s2: foreign keys reference empty tables that are not restored; if a row has such a key, the restore"
            " fails after the load: item_n_fkey of public.item to public.kind"
        ]
        with pytest.raises(ForeignKeyViolatedError, match="item_n_fkey"):
            restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())


def test_a_database_of_another_encoding_is_refused(place: Place) -> None:
    with tables_to_fill(place):
        third = place.target.primaries[-1]
        execute(
            with_database(third, "postgres").dsn,
            f"DROP DATABASE {DATABASE}",
            f"CREATE DATABASE {DATABASE} TEMPLATE template0 ENCODING LATIN1 LOCALE 'C'",
        )
        messages = [one["message"] for one in refusals(place, place.target)]
        assert "node s3: database shop has encoding LATIN1, but the snapshot's rows are in UTF8" in messages
        assert len(messages) == 3  # and its tables and sequences


def test_a_role_needs_what_the_hints_grant_and_the_page_says(place: Place) -> None:
    node = place.target.primaries[1]
    target = as_role(place, node.id, RESTORER)
    with tables_to_fill(place):
        execute(node.dsn, f"CREATE ROLE {RESTORER} LOGIN", "REVOKE USAGE ON SCHEMA public FROM PUBLIC")
        try:
            hinted = [line for one in refusals(place, target) for line in one["hint"].split("\n")[1:]]
            execute(node.dsn, *hinted)
            preview_restore(plan_restore(place.fleet, target, REQUEST), Silent())
            execute(node.dsn, f"DROP OWNED BY {RESTORER}", *statements("data-only"))
            execute(node.dsn, f"GRANT USAGE ON SCHEMA public TO {RESTORER}")
            # `tag` refers to both, so they can't be truncated.
            with pytest.raises(SnapshotError) as raised:
                preview_restore(plan_restore(place.fleet, target, REQUEST), Silent())
            lacking = [f'GRANT DELETE ON public.{table} TO "{RESTORER}";' for table in ("account", "item")]
            assert [line.strip() for line in raised.value.hint.split("\n")[1:]] == lacking
            execute(node.dsn, *lacking)
            restore_fleet(plan_restore(place.fleet, target, REQUEST), Ready(place.spark), Silent())
            assert_filled(place)
        finally:
            execute(node.dsn, f"DROP OWNED BY {RESTORER}", f"DROP ROLE {RESTORER}")


@pytest.mark.parametrize(
    "more", [*([one] for one in BESIDES), ["--route", "public.*=all"], ["--role-map", "a=b"], ["--group", "a.b=c.d"]]
)
def test_options_that_make_no_sense_are_refused(place: Place, more: list[str]) -> None:
    code, refused = run_here(place.fleet, "restore", NAME, "--data-only", "--yes", *more)
    assert (code, refused["error"]) == (2, "usage"), refused
    assert more[0] in refused["message"] + refused["hint"]
    assert "--data-only" in refused["message"] + refused["hint"]
