"""Schema changes that meet a create: while it is under way, and between an attempt that failed and the next one.

What is restored is compared with what PostgreSQL prints of the source: of each chain the last state and one that is
drawn, in the long form all of them.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import psycopg
import pytest

from fleet.progress import Noting
from fleet.tables.groups import SchemaChangedError
from fleet.tables.publications import ensure_publications
from snapshots.create.full import create_full
from snapshots.create.request import CreateRequest
from snapshots.operations.crash_points import Point
from tests.chains.tried_chain import Interrupted, Tried, tried
from tests.snapshot_runs import slots_of
from wal.slots.slots import slot_name

__all__ = ["tried"]  # the fixture

PUBLISH = "snapshots.ddl.table_changes.ensure_publications"


@pytest.mark.timeout(600)
def test_what_an_attempt_that_failed_has_archived_is_read_as_it_was_meant(tried: Tried) -> None:
    tried.runs.full(tried.name)
    tried.run("ALTER TABLE tried.t ADD c text DEFAULT 'old'", "UPDATE tried.t SET c = 'new' WHERE id < 5")
    tried.run("ALTER TABLE tried.bag ADD c int DEFAULT 7", "DELETE FROM tried.bag WHERE a = 'b1'")
    tried.fail()
    # As it was: what was archived under the definitions of the attempt goes on under their numbers.
    tried.run("UPDATE tried.t SET c = 'newer' WHERE id = 7", "INSERT INTO tried.bag VALUES ('b1', 0, 7)")
    assert len(tried.increment().successions["s1"]) == 2
    # Changed once more: what the attempt made of the changes is not what the next one would.
    tried.run("ALTER TABLE tried.t ADD d int", "UPDATE tried.t SET d = id WHERE id < 9")
    tried.fail()
    tried.run("ALTER TABLE tried.t DROP d", "UPDATE tried.t SET c = NULL WHERE id = 3")
    schema = tried.increment()
    assert schema.successions == {}
    assert [group.table for group in schema.groups["s1"]] == ["t"]
    # A table that the attempt copied, and one that it had archived changes of and that is gone.
    tried.run("CREATE TABLE tried.came (id int PRIMARY KEY)", "INSERT INTO tried.came VALUES (1), (2)")
    tried.fail()
    tried.run("UPDATE tried.came SET id = 3 WHERE id = 1", "DELETE FROM tried.bag", "DROP TABLE tried.bag")
    schema = tried.increment()
    assert [group.table for group in schema.groups["s1"]] == ["came"]
    tried.compare()
    assert tried.runs.check(tried.name).exit_code == 0


@pytest.mark.timeout(600)
def test_what_is_changed_while_a_create_is_under_way_is_in_it(tried: Tried) -> None:
    def while_copied() -> None:
        tried.run(
            "ALTER TABLE tried.t ADD c text DEFAULT 'old'", "UPDATE tried.t SET c = 'new' WHERE id < 5",
            "CREATE TABLE tried.came (id int PRIMARY KEY)", "INSERT INTO tried.came VALUES (1)",
            "ALTER TABLE tried.bag ALTER n TYPE text USING 'n' || n",
        )  # fmt: skip

    commit = tried.create(Point.BASE_COPIED, while_copied, full=True)
    assert commit.definition_changes
    assert {group.table for group in commit.definition_changes.groups["s1"]} == {"t", "came", "bag"}
    tried.note(0)

    def while_cut() -> None:
        tried.run("ALTER TABLE tried.t RENAME c TO d", "UPDATE tried.t SET d = 'renamed' WHERE id = 11")

    tried.create(Point.STARTS_WRITTEN, while_cut)
    assert any("met a change of the schema" in note for note in tried.notes), tried.notes
    tried.note(1)

    def undone() -> None:
        # The table is as it was when the cut is over, and what was written meanwhile had another name.
        tried.run(
            "ALTER TABLE tried.t RENAME d TO e", "UPDATE tried.t SET e = 'in between' WHERE id = 12",
            "ALTER TABLE tried.t RENAME e TO d",
        )  # fmt: skip

    tried.create(Point.FINISHES_WRITTEN, undone)
    tried.note(2)
    tried.run("UPDATE tried.t SET d = 'later' WHERE id = 13")
    assert tried.runs.increment(tried.name).definition_changes is None
    tried.note(3)
    # A table that is another before it is copied.
    tried.run("DROP TABLE tried.bag", "CREATE TABLE tried.bag (id int PRIMARY KEY)", "INSERT INTO tried.bag VALUES (1)")
    tried.create("copy", lambda: tried.run("DROP TABLE tried.bag", "CREATE TABLE tried.bag (other int PRIMARY KEY)"))
    assert any("met a change" in note for note in tried.notes), tried.notes
    tried.note(4)
    slots = [slot for node in tried.fleet.nodes for slot in slots_of(node.dsn)]
    assert len(slots) == len(tried.fleet.nodes), "none is left but the chain's own"
    tried.compare()
    assert tried.runs.check(tried.name).exit_code == 0


@pytest.mark.timeout(600)
def test_what_is_changed_while_a_full_one_makes_its_slots_is_in_it(tried: Tried) -> None:
    numbers = count(1)

    def while_made() -> None:
        column, table = (f"{name}_{next(numbers)}" for name in ("c", "tried.came"))
        tried.run(
            f"ALTER TABLE tried.t ADD {column} text DEFAULT 'old'", f"UPDATE tried.t SET {column} = 'new' WHERE id < 5",
            f"CREATE TABLE {table} (id int PRIMARY KEY)", f"INSERT INTO {table} VALUES (1)",
        )  # fmt: skip

    # The tables are read, and no slot shows them so.
    noting = Noting(Interrupted("slots", while_made, times=10))
    with pytest.raises(SchemaChangedError, match=r"during each of 2 attempts; last: node s1.* while the copy of its"):
        create_full(tried.fleet, CreateRequest("never", retries=1), tried.runs.spark, noting)
    assert [note.partition(":")[0] for note in noting.notes if note.startswith("attempt")] == [
        f"attempt {number} of 2 met a change of the schema" for number in (1, 2)
    ]
    assert [slots_of(node.dsn) for node in tried.fleet.nodes] == [[], []]
    assert list(tried.fleet.store.open().list("snapshots")) == []
    commit = tried.create("slots", while_made, full=True)
    assert sum("met a change of the schema" in note for note in tried.notes) == 1, tried.notes
    assert commit.definition_changes is None
    tried.note(0)
    assert [slots_of(node.dsn) for node in tried.fleet.nodes] == [[slot_name(commit.chain)]] * 2
    # After the checks, and before anything is read for the slots: nothing is void.
    tried.name = "later"
    tried.create(Point.INTENT_STORED, while_made, full=True)
    assert not any("met a change" in note for note in tried.notes), tried.notes
    tried.note(0)
    # Not there any more when it is to be copied.
    tried.name = "dropped"
    tried.create("copy", lambda: tried.run("DROP TABLE tried.bag"), full=True)
    assert [note for note in tried.notes if "met a change" in note and '"tried.bag" does not exist' in note]
    tried.note(0)
    tried.compare()


@pytest.mark.timeout(600)
def test_a_table_that_is_not_published_for_a_while_is_copied_anew_whenever_that_is(tried: Tried) -> None:
    tried.runs.full(tried.name)

    def changed() -> None:
        tried.run("ALTER TABLE tried.t ADD c text DEFAULT 'old'", "UPDATE tried.t SET c = 'new' WHERE id < 5")

    # What is changed between the checks and the plan costs no attempt.
    commit = tried.create(Point.CHECKED, changed)
    assert commit.definition_changes
    assert len(commit.definition_changes.successions["s1"]) == 1
    assert not any("met a change" in note for note in tried.notes), tried.notes
    tried.note(1)
    with psycopg.connect(tried.fleet.primaries[0].dsn) as connection:
        query = "SELECT pubname FROM pg_publication_tables WHERE schemaname = 'tried' AND tablename = 't'"
        (publication,) = connection.execute(query).fetchone() or ("",)

    def unpublished() -> None:
        tried.run(
            f"ALTER PUBLICATION {publication} DROP TABLE tried.t", "UPDATE tried.t SET a = a || '!' WHERE id < 9",
            f"ALTER PUBLICATION {publication} ADD TABLE ONLY tried.t",
        )  # fmt: skip

    # Before the checks have read the catalogs, after that, and after the plan.
    for increment, point in enumerate((Point.LOCKED, Point.CHECKED, Point.FINISHES_WRITTEN), start=2):
        commit = tried.create(point, unpublished)
        assert commit.definition_changes
        assert [group.table for group in commit.definition_changes.groups["s1"]] == ["t"]
        is_met = any("tried.t was published otherwise" in note for note in tried.notes)
        assert is_met == (point == Point.FINISHES_WRITTEN), tried.notes
        tried.note(increment)
    tried.compare()
    assert tried.runs.check(tried.name).exit_code == 0


@pytest.mark.timeout(600)
def test_a_table_that_is_dropped_while_it_is_published_is_in_no_snapshot(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, drops = ensure_publications, ["DROP TABLE tried.brief"]

    def dropped(*arguments: Any) -> list[str]:
        tried.run(*drops)
        drops.clear()
        return publish(*arguments)

    tried.runs.full(tried.name)
    tried.run("CREATE TABLE tried.brief (id int PRIMARY KEY)", "UPDATE tried.t SET a = 'beside' WHERE id = 1")
    monkeypatch.setattr(PUBLISH, dropped)
    tried.create(Point.LOCKED, lambda: None)
    assert [note for note in tried.notes if "met a change" in note and "can't be published" in note], tried.notes
    tried.note(1)
    tried.compare()
    # Nothing else is taken for a change: what never works ends the command, and says why.
    monkeypatch.undo()
    tried.run("CREATE TABLE tried.brief (id int PRIMARY KEY)")
    monkeypatch.setattr(PUBLISH, failing)
    with pytest.raises(SchemaChangedError, match=r"each of 4 attempts; last: node s1: new tables can't be published: "):
        tried.runs.increment(tried.name)
    monkeypatch.setattr("snapshots.create.initialise.ensure_publications", failing)
    with pytest.raises(SchemaChangedError, match=r'^node s1: tables can\'t be published: relation "tried.never"'):
        tried.runs.init()


def failing(connection: psycopg.Connection[Any], *_: object) -> list[str]:
    connection.execute("SELECT FROM tried.never")
    return []
