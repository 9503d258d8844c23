"""Transactions that are prepared before an increment copies a table, and decided after it: their rows, and repairs.

Expected rows come from the live server (COPY).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from cutline.check.merge_proof import prove_merge
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.snapshots.base_copy import copy_slots, copy_tables
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.merge.running import plan_merge, run_merge
from cutline.snapshots.records.commit import BASE, Commit, FullSnapshot
from cutline.spark.driver_session import DriverSession
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.held.spanning_transactions import SpanningTransactions
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.stores.damage import remove
from tests.stores.listed import objects_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "spanning"
TABLES = (
    "CREATE SCHEMA shop",
    "CREATE TABLE shop.seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO shop.seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
    # Without a key, a change that counted twice or not at all would show.
    "CREATE TABLE shop.bag (id int, text text)",
    "ALTER TABLE shop.bag REPLICA IDENTITY FULL",
    "INSERT INTO shop.bag SELECT n, 'b' || n % 7 FROM generate_series(1, 50) n",
    "CREATE TABLE shop.other (id int PRIMARY KEY, text text)",
    "INSERT INTO shop.other SELECT n, 'other ' || n FROM generate_series(1, 50) n",
)
REWRITES = tuple(f"ALTER TABLE shop.{table} ALTER id TYPE bigint" for table in ("seen", "bag", "other"))


@dataclass
class Place:
    """A chain of a shard and its standby, whose increment 1 copies all tables, and where it is restored."""

    runs: Runs
    both: Fleet
    target: Fleet
    folder: Path
    states: dict[int, dict[str, bytes]] = field(default_factory=dict)

    @property
    def dsn(self) -> str:
        return self.runs.fleet.primaries[0].dsn

    def execute(self, *statements: str) -> None:
        execute(self.dsn, *statements)

    def increment(self, watching: Watching | None = None) -> Commit:
        return create_increment(self.runs.fleet, CreateRequest(NAME), self.runs.spark, watching or Silent())

    def span(self, gids: dict[str, tuple[str, ...]], watching: Watching | None = None) -> Commit:
        """Take an increment that copies all tables while these transactions are prepared."""
        self.execute(*REWRITES)
        spanning = SpanningTransactions(self.dsn, gids)
        commit = self.increment(watching)
        spanning.thread.join()
        return commit

    def base(self, commit: Commit, node: str, table: str) -> str:
        """The key of the object with a table's rows in a node's base copy."""
        if isinstance(commit, FullSnapshot):
            groups = commit.groups["s1"]
        else:
            assert commit.definition_changes
            groups = commit.definition_changes.groups["s1"]
        numbers = {group.number for group in groups if group.table == table}
        objects = (one for one in objects_of(commit) if (one.kind, one.node) == (BASE, node))
        (key,) = (one.key for one in objects if one.rows.keys() == numbers)
        return key

    def repair(self) -> tuple[int, dict[str, Any]]:
        return run_here(self.runs.fleet, "repair", NAME, "--yes", "--metadata-only")

    def note(self, commit: Commit) -> None:
        """Keep the rows as they are now: those at the cut."""
        self.states[commit.increment] = sorted_copies(self.dsn)

    def compare(self) -> None:
        """Restore every increment, and compare its rows with those at its cut."""
        for number, state in self.states.items():
            self.runs.restore(NAME, self.target, number)
            assert sorted_copies(self.target.primaries[0].dsn) == state
        assert not self.runs.check_one(NAME).conflicts


@pytest.fixture
def place(shared_fleet: EmbeddedFleet, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    spark = cast("SparkSession", DriverSession(lambda: request.getfixturevalue("spark"), 2))
    with database_on(shared_fleet, NAME, tmp_path) as both:
        execute(both.primaries[0].dsn, *TABLES)
        fleet = replace(both, nodes=both.primaries)
        target = replace(fleet, nodes=(with_database(fleet.primaries[0], f"{NAME}_again"),))
        with dropping_slots(both):
            yield Place(Runs(fleet, Ready(spark)), both, target, tmp_path)


def begin(place: Place) -> Commit:
    place.runs.init()
    return place.runs.full(NAME)


def changes_by(*gids: str) -> dict[str, tuple[str, ...]]:
    """Changes of two tables by each transaction, to rows of its own."""
    return {
        gid: (
            f"INSERT INTO shop.seen VALUES ({100 + number}, '{gid}')",
            f"UPDATE shop.seen SET text = '{gid}' WHERE id = {number}",
            f"INSERT INTO shop.bag VALUES (0, '{gid}'), (0, '{gid}'), (7, 'b0')",
            f"DELETE FROM shop.bag WHERE id = {20 + number}",
        )
        for number, gid in enumerate(gids, 1)
    }


def span_and_decide_some(place: Place) -> None:
    """Take increment 1; two transactions are decided after its copy and before its cut, and two stay prepared."""
    begin(place)

    def decide(reached: Reached) -> None:
        if reached.point == CrashPoint.COPY_SLOTS_DROPPED:
            place.execute("COMMIT PREPARED 'kept at once'", "ROLLBACK PREPARED 'undone at once'")

    gids = changes_by("kept at once", "undone at once", "kept later", "undone later")
    commit = place.span(gids, Watching(decide))
    # The premise: the copy has none of them. PostgreSQL may leave out changes of the one that was rolled back before it
    # was decoded; then the commit need not list it.
    assert commit.definition_changes
    assert len(commit.definition_changes.pending["s1"]) in (len(gids) - 1, len(gids))
    place.note(commit)


DECIDE_OTHERS = ("COMMIT PREPARED 'kept later'", "ROLLBACK PREPARED 'undone later'")


def test_a_transaction_counts_once_if_it_is_committed_after_the_copy_and_never_if_it_is_rolled_back(
    place: Place,
) -> None:
    span_and_decide_some(place)
    place.execute(*DECIDE_OTHERS)
    place.note(place.increment())
    place.compare()


def test_it_counts_as_often_after_merges_that_it_spans_and_that_follow_it(place: Place) -> None:
    span_and_decide_some(place)
    merge(place)
    place.execute(*DECIDE_OTHERS)
    place.note(place.increment())
    place.compare()
    merge(place)
    place.execute("DELETE FROM shop.seen WHERE id = 20")
    place.note(place.increment())
    place.compare()


def merge(place: Place) -> None:
    fleet = place.runs.fleet
    run_merge(fleet, plan_merge(fleet, NAME, None, Silent()), place.runs.spark, Silent(), prove_merge)


def test_a_copy_is_made_again_if_a_transaction_that_it_lacks_has_rows_under_an_unknown_name(place: Place) -> None:
    """A schema is renamed and gets its name back. That locks no table, so the copy does not wait for it."""
    begin(place)

    def decide(reached: Reached) -> None:
        # The second copy waits for the transaction, and has its rows.
        if (reached.point, reached.count) == (CrashPoint.COPY_SLOTS_DROPPED, 2):
            place.execute("COMMIT PREPARED 'renaming'")

    watching = Watching(decide)
    commit = place.span(
        {
            "renaming": (
                "ALTER SCHEMA shop RENAME TO store",
                "INSERT INTO store.seen VALUES (100, 'under an unknown name')",
                "DELETE FROM store.bag WHERE id > 40",
                "ALTER SCHEMA store RENAME TO shop",
                "INSERT INTO shop.seen VALUES (101, 'under its name')",
            )
        },
        watching,
    )
    place.note(commit)
    assert [note for note in watching.notes if "invalidated" in note] == [
        "attempt 1 of 4 was invalidated by DDL: node s1: prepared transactions changed tables that were being copied:"
        " renaming"
    ]
    assert commit.definition_changes
    assert not commit.definition_changes.pending
    place.execute("DELETE FROM shop.seen WHERE id = 20")
    place.note(place.increment())
    place.compare()


def test_only_tables_that_no_transaction_spans_are_rebuilt(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction is committed between the positions of both copies: only the standby's has its rows."""
    monkeypatch.setattr(copy_slots, "SLOTS_AT_ONCE", 1)
    # Each table has objects of its own.
    monkeypatch.setattr(copy_tables, "TASK_TABLES", 1)
    place.runs = Runs(place.both, place.runs.spark)
    full = begin(place)
    place.note(full)

    def decide(reached: Reached) -> None:
        if (reached.point, reached.node) == (CrashPoint.SLOT_MADE, "s1"):
            place.execute("COMMIT PREPARED 'spanning'")

    commit = place.span(changes_by("spanning"), Watching(decide))
    place.note(commit)
    assert commit.definition_changes
    assert commit.definition_changes.pending.keys() == {"s1"}
    for table, node in (("seen", "s1"), ("bag", "s1-b1")):
        key = place.base(commit, node, table)
        body = (place.folder / "store" / key).read_bytes()
        remove(place.folder / "store" / key)
        code, document = place.repair()
        assert (code, document["error"]) == (3, "nothing-repairable")
        why = f"tables copied again on s1 while transactions that had changed them were prepared: shop.{table}"
        assert document["message"] == f"object {key} can't be repaired: {why}; nothing was changed"
        assert "--from URL" in document["hint"]
        (place.folder / "store" / key).write_bytes(body)
    for key in (
        place.base(commit, "s1", "other"),
        place.base(commit, "s1-b1", "other"),
        place.base(full, "s1", "seen"),
    ):
        remove(place.folder / "store" / key)
        code, document = place.repair()
        assert code == 0, document
        assert [old["object"] for one in document["replaced"] for old in one["objects"]] == [key]
    place.compare()
