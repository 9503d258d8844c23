"""A server whose replication slots are all in use can't copy tables again; its copies go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Progress
from cutline.nodes.left_out import LeftOutKind
from cutline.nodes.problems import NodeUnfitError
from cutline.snapshots.create.absent_copies import ENDED
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full, preview_full
from cutline.snapshots.create.increment import create_increment, preview_increment
from cutline.snapshots.records.commit import Increment
from cutline.wal.drain.slots import NoFreeSlotError, drop_slot
from tests.commands.snapshot_runs import Runs, runs_on, slots_of
from tests.commands.watching import Reached, Watching

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARD, STANDBY = "s1", "s1-b1"
FREE = "SELECT current_setting('max_replication_slots')::int - count(*) FROM pg_replication_slots"


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession) -> Iterator[Runs]:
    with runs_on(shared_fleet, tmp_path, spark) as found:
        found.full("daily")
        execute(found, "CREATE TABLE copied_again (id int PRIMARY KEY)", "INSERT INTO copied_again VALUES (1)")
        try:
            yield found
        finally:
            execute(found, "DROP TABLE IF EXISTS copied_again")


def execute(runs: Runs, *statements: str) -> None:
    with psycopg.connect(runs.fleet.node(SHARD).dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def fill_slots(node: Node) -> None:
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        (free,) = connection.execute(FREE).fetchone() or (0,)
        for number in range(free):
            connection.execute("SELECT pg_create_physical_replication_slot(%s)", (f"other_{number}",))


@contextmanager
def freeing_slots(node: Node) -> Iterator[None]:
    """Drop the slots of `fill_slots` at the end."""
    try:
        yield
    finally:
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE 'other%'"
            )


def increment(runs: Runs, progress: Progress) -> Increment:
    commit = create_increment(runs.fleet, CreateRequest("daily"), runs.spark, progress)
    assert isinstance(commit, Increment)
    return commit


@pytest.mark.parametrize("is_late", [False, True], ids=["at first", "later"])
def test_without_a_free_slot_a_copy_of_tables_is_refused_and_the_chain_stays(runs: Runs, *, is_late: bool) -> None:
    """Also if the last slot is taken after the checks."""
    node = runs.fleet.node(SHARD)
    before = slots_of(node.dsn)
    assert len(before) == 1

    def fill(reached: Reached) -> None:
        if reached.point == CrashPoint.CHECKED:
            fill_slots(node)

    with freeing_slots(node):
        if not is_late:
            fill_slots(node)
            with pytest.raises(NoFreeSlotError):
                preview_increment(runs.fleet, CreateRequest("daily"), Watching())
        watching = Watching(fill)
        with pytest.raises(NoFreeSlotError) as raised:
            increment(runs, watching)
        assert (raised.value.exit_code, raised.value.slug) == (3, "no-free-slot")
        assert f"node {SHARD}: " in raised.value.message
        # The only chain there is the one that goes on.
        assert raised.value.hint == (
            "raise max_replication_slots, or drop slots that are no longer used; then repeat the command"
        )
        points = {reached.point for reached in watching.reached_points}
        assert (CrashPoint.CHECKED in points) == is_late
        assert slots_of(node.dsn) == before

    commit = increment(runs, Watching())
    assert not commit.renewed
    assert slots_of(node.dsn) == before


@pytest.mark.parametrize("is_late", [False, True], ids=["at first", "later"])
def test_a_standby_without_a_free_slot_is_left_out(runs: Runs, *, is_late: bool) -> None:
    node = runs.fleet.node(STANDBY)

    def fill(reached: Reached) -> None:
        if reached.point == CrashPoint.CHECKED:
            fill_slots(node)

    with freeing_slots(node):
        if not is_late:
            fill_slots(node)
        commit = increment(runs, Watching(fill))
        assert commit.absent.keys() == {STANDBY}
        assert "replication slot" in commit.absent[STANDBY].reason
        assert not commit.renewed

    # Its tables have changed meanwhile.
    assert increment(runs, Watching()).renewed.keys() == {STANDBY}


def test_a_standby_without_a_free_slot_in_place_of_a_lost_one_is_left_out(runs: Runs) -> None:
    """Its copy has ended, and it is not said that it will be copied now."""
    execute(runs, "DROP TABLE copied_again")
    node, watching = runs.fleet.node(STANDBY), Watching()
    (slot,) = slots_of(node.dsn)
    assert drop_slot(node, slot)
    with freeing_slots(node):
        fill_slots(node)
        plan = preview_increment(runs.fleet, CreateRequest("daily"), watching)
        assert [note for note in watching.notes if STANDBY in note] == [
            f"standby {STANDBY} is left out: all replication slots are in use"
        ]
        (absent,) = [out for out in plan.left_out if out.kind == LeftOutKind.ABSENT_COPY]
        assert absent.why.endswith(ENDED)
        commit = increment(runs, Watching())
        assert commit.absent[STANDBY].has_ended
        assert [out for out in commit.left_out if out.kind == LeftOutKind.ABSENT_COPY] == [absent]

    assert increment(runs, Watching()).renewed.keys() == {STANDBY}


def test_without_a_free_slot_the_chains_that_can_be_ended_are_named(runs: Runs) -> None:
    """Not the one with the newest restore point. A new full snapshot says before that which others keep their slots."""
    execute(runs, "DROP TABLE copied_again")
    watching = Watching()
    create_full(runs.fleet, CreateRequest("weekly"), runs.spark, watching)
    (note,) = [note for note in watching.notes if "snapshot end" in note]
    assert "for each of these snapshots: daily;" in note
    assert note.endswith("restore points: snapshot end daily")
    node = runs.fleet.node(SHARD)
    with freeing_slots(node):
        fill_slots(node)
        with pytest.raises(NodeUnfitError) as raised:
            preview_full(runs.fleet, CreateRequest("third"), Watching())
        assert raised.value.message == f"node {SHARD}: no replication slot is free, and one is needed"
        assert "newest restore point last: daily, weekly;" in raised.value.hint
        assert raised.value.hint.endswith("restore points: snapshot end daily")
        increment(runs, Watching())
        with pytest.raises(NodeUnfitError) as raised:
            preview_full(runs.fleet, CreateRequest("third"), Watching())
        assert raised.value.hint.endswith("restore points: snapshot end weekly")
