"""WAL that is archived between cuts is part of the next increment, once, and nodes keep it no longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

import cutline.snapshots.create.archive_ahead as module
import cutline.wal.segments.segments as segments_module
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.lock import FleetBusyError
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.create.archive_ahead import ArchivedAhead, archive_ahead
from cutline.snapshots.listing.listing import list_store
from cutline.snapshots.operations.operation import exclusive
from cutline.snapshots.records.end_marks import ChainEndedError
from cutline.snapshots.records.proven_chains import read_chain, read_full
from cutline.snapshots.removal.chain_end import supersede
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import read_waiting
from cutline.wal.drain.slots import slot_name
from cutline.wal.segments.archive import ArchivedSegment, archive_prefix, last_number, segment_key
from tests.commands.snapshot_runs import Runs, runs_on, slots_of, sorted_copies
from tests.integration.refusing import execute
from tests.stores.damage import flip_byte

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "ahead"
ROWS = 200


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a table that these tests alone change, and a full snapshot."""
    primaries = shared_fleet.primaries
    for node in primaries:
        execute(node.dsn(), "CREATE TABLE ahead (id int PRIMARY KEY, n int)")
        execute(node.dsn(), "INSERT INTO ahead SELECT i, 0 FROM generate_series(1, 10000) i")
    try:
        with runs_on(shared_fleet, tmp_path_factory.mktemp("ahead"), spark) as found:
            found.full(NAME)
            yield found
    finally:
        for node in primaries:
            execute(node.dsn(), "DROP TABLE ahead")


@pytest.fixture(autouse=True)
def any_wal_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD_BYTES_MIN", 1)


def update(fleet: Fleet, remainder: int) -> int:
    """Update some rows on every shard; return how many changes that were, as PostgreSQL says."""
    changes = 0
    for node in fleet.primaries:
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            query = "UPDATE ahead SET n = n + 1 WHERE id %% 50 = %s"
            changes += connection.execute(query, [remainder]).rowcount
    return changes


def waiting(fleet: Fleet) -> dict[str, int]:
    """The bytes of WAL by node that the chain's slots still have to read."""
    full = read_full(fleet.store.open(), NAME)
    with open_sessions(fleet, fleet.nodes) as sessions:
        return read_waiting(sessions, slot_name(full.operation))


def copies(fleet: Fleet) -> dict[str, dict[str, bytes]]:
    return {node.id: sorted_copies(node.dsn) for node in fleet.primaries}


def test_what_was_archived_ahead_is_in_the_next_increment_once(runs: Runs) -> None:
    fleet = runs.fleet
    changes = update(fleet, 1)
    with psycopg.connect(fleet.primaries[0].dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        changes += connection.execute("UPDATE ahead SET n = n + 1 WHERE id % 50 = 40").rowcount
        connection.execute("PREPARE TRANSACTION 'over an archive'")
        before = max(waiting(fleet).values())
        assert archive_ahead(fleet, NAME, Silent()).bytes >= before
        # Little but the marker's own record is left on any node, standbys included.
        assert max(waiting(fleet).values()) < before / 2
        changes += update(fleet, 2)
        connection.execute("COMMIT PREPARED 'over an archive'")
    assert archive_ahead(fleet, NAME, Silent()).bytes > 0
    changes += update(fleet, 3)
    expected = copies(fleet)
    commit = runs.increment(NAME)
    assert commit.counts["changes"] == changes
    # On every node: two that were archived ahead, and the increment's own.
    assert {len(segments) for segments in commit.segments.values()} == {3}
    assert runs.check_one(NAME).result == "valid"
    assert restored_copies(runs) == expected


def test_a_process_that_archives_again_reads_only_the_last_segment_of_each_node(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, read = runs.fleet, list[str]()
    read_metadata = segments_module.read_metadata

    def noting(store: ObjectStore, node: str, key: str, number: int) -> ArchivedSegment:
        found = read_metadata(store, node, key, number)
        read.append(key)
        return found

    monkeypatch.setattr(segments_module, "read_metadata", noting)
    changes = 0
    for _ in range(4):
        changes += update(fleet, 4)
        read.clear()
        assert archive_ahead(fleet, NAME, Silent()).bytes > 0
    nodes = len(fleet.nodes)
    assert len(read) == nodes, read
    # An increment, and a process that has not archived before, read all of them.
    read.clear()
    commit = runs.increment(NAME)
    assert commit.counts["changes"] == changes
    assert {len(segments) for segments in commit.segments.values()} == {5}
    assert len(set(read)) == 4 * nodes


def restored_copies(runs: Runs) -> dict[str, dict[str, bytes]]:
    """The tables of the chain's last increment, restored beside the fleet's databases."""
    restored = replace(runs.fleet, nodes=tuple(with_database(node, "ahead_restored") for node in runs.fleet.primaries))
    try:
        runs.restore(NAME, restored)
        return copies(restored)
    finally:
        for node in restored.nodes:
            execute(with_database(node, "postgres").dsn, "DROP DATABASE IF EXISTS ahead_restored WITH (FORCE)")


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_standby", [False, True])
def test_a_node_with_a_damaged_segment_that_no_commit_lists_is_copied_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, *, is_standby: bool, is_last: bool
) -> None:
    fleet = runs.fleet
    node = next(node for node in fleet.nodes if (node.backup_of is not None) is is_standby)
    store, before = fleet.store.open(), runs.increment(NAME)
    for remainder in (5, 6):
        update(fleet, remainder)
        assert archive_ahead(fleet, NAME, Silent()).bytes > 0
    chain = read_chain(store, NAME)
    number = last_number(chain.newest_segments(node.id)) + (2 if is_last else 1)
    key = segment_key(archive_prefix(NAME, node.id, chain.archive(node.id)), number)
    flip_byte(Path(fleet.store.url.removeprefix("file://")) / key)
    update(fleet, 7)
    # Another process, which reads all segments, finds it. Then the next increment begins at once.
    monkeypatch.setattr(module, "_read_before", {})
    assert archive_ahead(fleet, NAME, Silent()) == ArchivedAhead(needs_increment=True)
    commit = runs.increment(NAME)
    assert commit.increment == before.increment + 1
    if node.id not in commit.renewed:
        assert is_standby
        assert commit.absent[node.id].has_ended
        assert runs.check_one(NAME).result == "inconclusive"
        commit = runs.increment(NAME)
    assert "which no commit lists, is damaged" in commit.renewed[node.id].reason
    assert commit.absent == {}
    assert archive_ahead(fleet, NAME, Silent()).needs_increment is False
    assert restored_copies(runs) == copies(fleet)
    assert runs.check_one(NAME).result == "valid"


def test_changed_tables_are_left_to_the_increment(runs: Runs) -> None:
    fleet = runs.fleet
    for node in fleet.primaries:
        execute(node.dsn, "CREATE TABLE added (id int PRIMARY KEY)")
    try:
        for node in fleet.primaries:
            execute(node.dsn, "INSERT INTO added VALUES (1)")
        before = waiting(fleet)
        assert archive_ahead(fleet, NAME, Silent()) == ArchivedAhead(needs_increment=True)
        assert all(waiting(fleet)[node] >= bytes_before for node, bytes_before in before.items())
        assert runs.increment(NAME).counts["rows"] > 0
        assert runs.check_one(NAME).result == "valid"
    finally:
        for node in fleet.primaries:
            execute(node.dsn, "DROP TABLE added")
    runs.increment(NAME)


def test_it_needs_the_fleets_lock(runs: Runs) -> None:
    fleet = runs.fleet
    update(fleet, 4)
    with (
        open_sessions(fleet, fleet.primaries) as sessions,
        exclusive(sessions, fleet.store.open(), "create", "another"),
        pytest.raises(FleetBusyError, match="another operation is running: create another"),
    ):
        archive_ahead(fleet, NAME, Silent())


def test_a_chain_that_is_replaced_ends_keeps_no_wal_and_can_be_restored(runs: Runs) -> None:
    fleet = runs.fleet
    kept = slots_of(fleet.nodes[0].dsn)
    assert supersede(fleet, NAME, "next", Silent()) == []
    assert [len(slots_of(node.dsn)) for node in fleet.nodes] == [len(kept) - 1] * len(fleet.nodes)
    with pytest.raises(ChainEndedError, match="next has taken its place"):
        runs.increment(NAME)
    assert archive_ahead(fleet, NAME, Silent()) == ArchivedAhead()
    assert runs.check_one(NAME).result == "valid"
    # Again, as after a crash between the mark and the slots.
    assert supersede(fleet, NAME, "next", Silent()) == []


def test_the_mark_of_a_chain_that_is_replaced_as_its_slot_is_gone_says_where(runs: Runs) -> None:
    fleet, node = runs.fleet, runs.fleet.primaries[-1]
    slot = slot_name(runs.full("gone").operation)
    execute(node.dsn, f"SELECT pg_drop_replication_slot('{slot}')")
    assert supersede(fleet, "gone", "next", Silent()) == []
    (entry,) = [one for one in list_store(fleet).entries if one.name == "gone"]
    where = f"node {node.id}: slot {slot} does not exist"
    assert entry.state == "ended"
    assert entry.remark == f"can't be continued after the full snapshot: {where}; next has taken its place"
    assert [one for one in fleet.nodes if slot in slots_of(one.dsn)] == []
