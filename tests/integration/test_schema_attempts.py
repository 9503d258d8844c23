"""Schema changes that interfere with a create: while it runs, and between a failed increment and the next one.

Restored rows are compared with what PostgreSQL prints of the source: of each chain the last state and one drawn at
random, in the long form all of them.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import psycopg
import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Noting
from cutline.nodes.groups import SchemaChangedError
from cutline.nodes.publications import add_to_publications
from cutline.restore.run.build import check_against_ddl
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.ddl.contradictions import DdlContradictedError
from cutline.snapshots.records.proven_chains import read_chain
from cutline.wal.drain.slots import slot_name
from tests.chains.tried_chain import Interrupt, Tried, tried
from tests.commands.snapshot_runs import slots_of

__all__ = ["tried"]  # the fixture

PUBLISH = "cutline.snapshots.ddl.table_changes.add_to_publications"


@pytest.mark.timeout(600)
def test_segments_of_a_failed_increment_are_read_under_their_own_definitions(tried: Tried) -> None:
    tried.runs.full(tried.name)
    tried.run("ALTER TABLE tried.t ADD c text DEFAULT 'old'", "UPDATE tried.t SET c = 'new' WHERE id < 5")
    tried.run("ALTER TABLE tried.bag ADD c int DEFAULT 7", "DELETE FROM tried.bag WHERE a = 'b1'")
    tried.fail()
    # No DDL since: what was archived under the definitions of the failed increment continues under their numbers.
    tried.run("UPDATE tried.t SET c = 'newer' WHERE id = 7", "INSERT INTO tried.bag VALUES ('b1', 0, 7)")
    assert len(tried.increment().successions["s1"]) == 2
    # More DDL since: the failed increment's definitions are not those that the next one makes of the changes.
    tried.run("ALTER TABLE tried.t ADD d int", "UPDATE tried.t SET d = id WHERE id < 9")
    tried.fail()
    tried.run("ALTER TABLE tried.t DROP d", "UPDATE tried.t SET c = NULL WHERE id = 3")
    schema = tried.increment()
    assert schema.successions == {}
    assert [group.table for group in schema.groups["s1"]] == ["t"]
    # A table that the failed increment copied, and a dropped one whose changes it archived.
    tried.run("CREATE TABLE tried.came (id int PRIMARY KEY)", "INSERT INTO tried.came VALUES (1), (2)")
    tried.fail()
    tried.run("UPDATE tried.came SET id = 3 WHERE id = 1", "DELETE FROM tried.bag", "DROP TABLE tried.bag")
    schema = tried.increment()
    assert [group.table for group in schema.groups["s1"]] == ["came"]
    tried.compare()
    assert tried.runs.check(tried.name).exit_code == 0


@pytest.mark.timeout(600)
def test_ddl_during_a_create_is_in_the_snapshot(tried: Tried) -> None:
    def change_during_copy() -> None:
        tried.run(
            "ALTER TABLE tried.t ADD c text DEFAULT 'old'", "UPDATE tried.t SET c = 'new' WHERE id < 5",
            "CREATE TABLE tried.came (id int PRIMARY KEY)", "INSERT INTO tried.came VALUES (1)",
            "ALTER TABLE tried.bag ALTER n TYPE text USING 'n' || n",
        )  # fmt: skip

    commit = tried.create(CrashPoint.BASE_COPIED, change_during_copy, full=True)
    assert commit.definition_changes
    assert {group.table for group in commit.definition_changes.groups["s1"]} == {"t", "came", "bag"}
    tried.note(0)

    def rename_during_cut() -> None:
        tried.run("ALTER TABLE tried.t RENAME c TO d", "UPDATE tried.t SET d = 'renamed' WHERE id = 11")

    # The commit lists the DDL of the base copy, and the DDL that was dumped after the change.
    tried.compare()
    assert tried.runs.check(tried.name).exit_code == 0
    tried.create(CrashPoint.STARTS_WRITTEN, rename_during_cut)
    assert any("was invalidated by DDL" in note for note in tried.notes), tried.notes
    tried.note(1)

    def rename_for_a_while() -> None:
        # After the cut the table is as before, but rows written meanwhile had another column name.
        tried.run(
            "ALTER TABLE tried.t RENAME d TO e", "UPDATE tried.t SET e = 'in between' WHERE id = 12",
            "ALTER TABLE tried.t RENAME e TO d",
        )  # fmt: skip

    tried.create(CrashPoint.FINISHES_WRITTEN, rename_for_a_while)
    tried.note(2)
    tried.run("UPDATE tried.t SET d = 'later' WHERE id = 13")
    assert tried.runs.increment(tried.name).definition_changes is None
    tried.note(3)
    # A table that is dropped and recreated before it is copied.
    tried.run("DROP TABLE tried.bag", "CREATE TABLE tried.bag (id int PRIMARY KEY)", "INSERT INTO tried.bag VALUES (1)")
    tried.create("copy", lambda: tried.run("DROP TABLE tried.bag", "CREATE TABLE tried.bag (other int PRIMARY KEY)"))
    assert any("was invalidated by DDL" in note for note in tried.notes), tried.notes
    tried.note(4)
    slots = [slot for node in tried.fleet.nodes for slot in slots_of(node.dsn)]
    assert len(slots) == len(tried.fleet.nodes), "only the chain's own slots are left"
    tried.compare()
    assert tried.runs.check(tried.name).exit_code == 0


@pytest.mark.timeout(600)
def test_ddl_while_a_full_create_makes_its_slots_is_in_the_snapshot(tried: Tried) -> None:
    numbers = count(1)

    def change_during_slots() -> None:
        column, table = (f"{name}_{next(numbers)}" for name in ("c", "tried.came"))
        tried.run(
            f"ALTER TABLE tried.t ADD {column} text DEFAULT 'old'", f"UPDATE tried.t SET {column} = 'new' WHERE id < 5",
            f"CREATE TABLE {table} (id int PRIMARY KEY)", f"INSERT INTO {table} VALUES (1)",
        )  # fmt: skip

    # The tables have been read, but no slot's exported snapshot shows them like that.
    noting = Noting(Interrupt("slots", change_during_slots, times=10))
    with pytest.raises(SchemaChangedError, match=r"during each of 2 attempts; last: node s1.* while the base copy"):
        create_full(tried.fleet, CreateRequest("never", retries=1), tried.runs.spark, noting)
    assert [note.partition(":")[0] for note in noting.notes if note.startswith("attempt")] == [
        f"attempt {number} of 2 was invalidated by DDL" for number in (1, 2)
    ]
    assert [slots_of(node.dsn) for node in tried.fleet.nodes] == [[], []]
    assert list(tried.fleet.store.open().list("snapshots")) == []
    commit = tried.create("slots", change_during_slots, full=True)
    assert sum("was invalidated by DDL" in note for note in tried.notes) == 1, tried.notes
    assert commit.definition_changes is None
    tried.note(0)
    assert [slots_of(node.dsn) for node in tried.fleet.nodes] == [[slot_name(commit.chain)]] * 2
    # After the checks, and before anything is read for the slots: no attempt is invalidated.
    tried.name = "later"
    tried.create(CrashPoint.INTENT_STORED, change_during_slots, full=True)
    assert not any("was invalidated by DDL" in note for note in tried.notes), tried.notes
    tried.note(0)
    # A table that is dropped before it is copied.
    tried.name = "dropped"
    tried.create("copy", lambda: tried.run("DROP TABLE tried.bag"), full=True)
    assert [note for note in tried.notes if "was invalidated by DDL" in note and '"tried.bag" does not exist' in note]
    tried.note(0)
    tried.compare()


@pytest.mark.timeout(600)
def test_a_table_that_is_unpublished_for_a_while_is_copied_again(tried: Tried) -> None:
    tried.runs.full(tried.name)

    def add_column() -> None:
        tried.run("ALTER TABLE tried.t ADD c text DEFAULT 'old'", "UPDATE tried.t SET c = 'new' WHERE id < 5")

    # DDL between the checks and the plan costs no attempt.
    commit = tried.create(CrashPoint.CHECKED, add_column)
    assert commit.definition_changes
    assert len(commit.definition_changes.successions["s1"]) == 1
    assert not any("was invalidated by DDL" in note for note in tried.notes), tried.notes
    tried.note(1)
    with psycopg.connect(tried.fleet.primaries[0].dsn) as connection:
        query = "SELECT pubname FROM pg_publication_tables WHERE schemaname = 'tried' AND tablename = 't'"
        (publication,) = connection.execute(query).fetchone() or ("",)

    def unpublish_for_a_while() -> None:
        tried.run(
            f"ALTER PUBLICATION {publication} DROP TABLE tried.t", "UPDATE tried.t SET a = a || '!' WHERE id < 9",
            f"ALTER PUBLICATION {publication} ADD TABLE ONLY tried.t",
        )  # fmt: skip

    # Before the checks have read the catalogs, after that, and after the plan.
    for increment, point in enumerate((CrashPoint.LOCKED, CrashPoint.CHECKED, CrashPoint.FINISHES_WRITTEN), start=2):
        commit = tried.create(point, unpublish_for_a_while)
        assert commit.definition_changes
        assert [group.table for group in commit.definition_changes.groups["s1"]] == ["t"]
        is_noted = any("publication of table tried.t changed" in note for note in tried.notes)
        assert is_noted == (point == CrashPoint.FINISHES_WRITTEN), tried.notes
        tried.note(increment)
    tried.compare()
    assert tried.runs.check(tried.name).exit_code == 0


@pytest.mark.timeout(600)
def test_a_table_dropped_while_it_is_published_is_in_no_snapshot(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, drops = add_to_publications, ["DROP TABLE tried.brief"]

    def publish_after_drop(*arguments: Any) -> None:
        tried.run(*drops)
        drops.clear()
        publish(*arguments)

    tried.runs.full(tried.name)
    tried.run("CREATE TABLE tried.brief (id int PRIMARY KEY)", "UPDATE tried.t SET a = 'beside' WHERE id = 1")
    monkeypatch.setattr(PUBLISH, publish_after_drop)
    tried.create(CrashPoint.LOCKED, lambda: None)
    assert [note for note in tried.notes if "was invalidated by DDL" in note and "can't be published" in note], (
        tried.notes
    )
    tried.note(1)
    tried.compare()
    # An error that is not due to DDL ends the command after its retries, and the message gives the cause.
    monkeypatch.undo()
    tried.run("CREATE TABLE tried.brief (id int PRIMARY KEY)")
    monkeypatch.setattr(PUBLISH, fail_to_publish)
    with pytest.raises(SchemaChangedError, match=r"each of 4 attempts; last: node s1: new tables can't be published: "):
        tried.runs.increment(tried.name)
    monkeypatch.setattr("cutline.snapshots.create.initialise.ensure_publications", fail_to_publish)
    with pytest.raises(SchemaChangedError, match=r'^node s1: tables can\'t be published: relation "tried.never"'):
        tried.runs.init()


def fail_to_publish(connection: psycopg.Connection[Any], *_: object) -> list[str]:
    connection.execute("SELECT FROM tried.never")
    return []


def test_what_is_left_out_is_of_the_catalogs_that_the_ddl_is_of(tried: Tried) -> None:
    def drop_excluded() -> None:
        tried.run("DROP TABLE public.aside")

    for is_full in (True, False):
        tried.run("CREATE TABLE public.aside (id int PRIMARY KEY)")
        commit = tried.create("commit", drop_excluded, full=is_full)
        tried.note(commit.increment)
        assert "public.aside" in {one.name for one in commit.left_out or ()}
    tried.compare()


def test_a_table_that_the_rules_exclude_need_not_be_listed_as_left_out(tried: Tried) -> None:
    tried.runs.full(tried.name)
    chain = read_chain(tried.fleet.store.open(), tried.name)
    chain = replace(chain, full=structs.replace(chain.full, left_out=()))
    with psycopg.connect(tried.fleet.primaries[0].dsn, autocommit=True) as connection:
        check_against_ddl(chain, "s1", connection, chain.groups("s1"))
        connection.execute("CREATE TABLE tried.extra (id int)")
        with pytest.raises(DdlContradictedError, match=r"the commit lists no rows of table tried\.extra"):
            check_against_ddl(chain, "s1", connection, chain.groups("s1"))
