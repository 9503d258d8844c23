"""Slots that nobody will use: of a client that was killed, and of an operation that had failed before it made them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node, load_fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.messages import unlisted_text
from cutline.nodes.connections import connect_replication
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.operations.open_operations import is_open
from cutline.snapshots.operations.operation import Operation, begin, new_operation, record_operation, record_outcome
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.operations.slot_guard import guard_nodes
from cutline.storage.errors import IndeterminateError, StoppedError
from cutline.storage.memory import InMemoryStore
from cutline.wal.drain.lags import read_waiting
from cutline.wal.drain.slots import copy_slot_name, create_exported_slot, drop_slot, slot_name
from tests.commands.snapshot_runs import runs_on, slots_of
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "cutline_unfinished"
SECONDS_MAX = 10


@contextmanager
def creating_slot(node: Node) -> Iterator[list[psycopg.Error]]:
    """Let a standby create a slot during the block; yield its errors.

    Nothing asks the primary to log its running transactions: the server waits for that even without its client.
    """
    errors: list[psycopg.Error] = []

    def create_slot() -> None:
        with connect_replication(node) as connection:
            try:
                connection.execute(f'CREATE_REPLICATION_SLOT "{NAME}" LOGICAL pgoutput')
            except psycopg.Error as error:
                errors.append(error)

    thread = threading.Thread(target=create_slot)
    thread.start()
    deadline = time.monotonic() + SECONDS_MAX
    while NAME not in slots_of(node.dsn):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield errors
    finally:
        drop_slot(node, NAME)
        thread.join(SECONDS_MAX)


def test_a_slot_that_a_standby_is_still_creating_is_dropped_without_waiting_for_its_primary(
    shared_fleet: EmbeddedFleet,
) -> None:
    node = next(node for node in load_fleet(shared_fleet.fleet_toml).nodes if node.backup_of)
    with creating_slot(node) as errors:
        began = time.monotonic()
        assert drop_slot(node, NAME)
        assert time.monotonic() - began < SECONDS_MAX
    assert isinstance(errors[0], psycopg.errors.AdminShutdown)
    assert NAME not in slots_of(node.dsn)


@pytest.mark.parametrize("increment", [0, 3])
def test_a_node_that_has_left_the_file_is_named_with_the_slot_that_it_may_keep(
    shared_fleet: EmbeddedFleet, increment: int
) -> None:
    """Whoever settles the operation can't drop it there. As many nodes are listed as then, but not the same."""
    fleet, store, watching = load_fleet(shared_fleet.fleet_toml), InMemoryStore("memory://left"), Watching()
    nodes = tuple(node.id for node in fleet.nodes)
    begin(store, operation := new_operation("create", "nightly", increment, (*nodes[:-1], "gone-b1")))
    settle_operations(store, fleet, watching)
    assert not is_open(store, operation.id)
    slot = copy_slot_name(operation.id) if increment else slot_name(operation.id)
    assert [note for note in watching.notes if "gone-b1" in note] == [unlisted_text(["gone-b1"], "the slot", slot)]


def test_an_operation_whose_slot_is_on_a_node_that_is_away_ends_once(shared_fleet: EmbeddedFleet) -> None:
    """As on an old primary after a failover. Each create tries to drop the slots, and says so in one line."""
    fleet, store = load_fleet(shared_fleet.fleet_toml), InMemoryStore("memory://away")
    *others, last = fleet.nodes
    away = replace(fleet, nodes=(*others, replace(last, dsn="host=/nowhere dbname=bank")))
    begin(store, operation := new_operation("create", "nightly", 1, tuple(node.id for node in fleet.nodes)))
    told: list[list[str]] = []
    for known in (away, away, fleet, fleet):
        watching = Watching()
        settle_operations(store, known, watching)
        told.append(watching.notes)
    first, *later = told
    assert first[0] == f"operation {operation.id} ended without committing increment 1 of nightly"
    slots = f"{slot_name(operation.id)}, {copy_slot_name(operation.id)}"
    again = (
        f"operation {operation.id} did not commit, and its slots could not be dropped on node {last.id}; the next"
        f" create tries again: {slots}"
    )
    assert (first[1:], later) == ([again], [[again], [], []])
    assert not is_open(store, operation.id)


def test_no_wal_waits_after_a_slot_that_is_still_created(shared_fleet: EmbeddedFleet) -> None:
    """It has no position yet, and decoding will begin where it gets one. Without a slot, nothing waits either."""
    fleet = load_fleet(shared_fleet.fleet_toml)
    standby = next(node for node in fleet.nodes if node.backup_of)
    with creating_slot(standby), open_sessions(fleet, fleet.nodes) as sessions:
        assert read_waiting(sessions, NAME) == dict.fromkeys((node.id for node in fleet.nodes), 0)


@pytest.mark.parametrize("state", ["done", "failed", ""])
def test_the_slot_of_a_copy_whose_operation_has_ended_is_dropped(shared_fleet: EmbeddedFleet, state: str) -> None:
    fleet, store = load_fleet(shared_fleet.fleet_toml), InMemoryStore(f"memory://copied-{state}")
    node, operation = fleet.primaries[0], new_operation("create", "slept", 1, ())
    begin(store, operation)
    if state:
        record_outcome(store, operation, state)
    slot, watching = copy_slot_name(operation.id), Watching()
    create_exported_slot(node, node, slot, 30).connection.close()
    try:
        with open_sessions(fleet, fleet.nodes) as sessions:
            guard_nodes(store, sessions, watching)
        assert (slot in slots_of(node.dsn)) == (not state)
        assert any(operation.id in note for note in watching.notes) == bool(state)
    finally:
        drop_slot(node, slot)


def test_a_full_snapshot_that_is_interrupted_while_it_copies_new_tables_leaves_no_slot(
    shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession
) -> None:
    with runs_on(shared_fleet, tmp_path, spark) as runs:
        primary = runs.fleet.primaries[0].dsn

        def create_and_stop(reached: Reached) -> None:
            if reached == Reached(CrashPoint.BASE_COPIED, 1):
                execute(primary, "CREATE TABLE made_meanwhile (id int PRIMARY KEY)")
            elif reached == Reached(CrashPoint.BASE_COPIED, 2):
                assert len(slots_of(primary)) == 2
                raise KeyboardInterrupt

        try:
            with pytest.raises(StoppedError, match="no slot is left"):
                create_full(runs.fleet, CreateRequest("nightly"), runs.spark, Watching(create_and_stop))
            assert [slots_of(node.dsn) for node in runs.fleet.nodes] == [[]] * len(runs.fleet.nodes)
        finally:
            execute(primary, "DROP TABLE made_meanwhile")


@pytest.mark.parametrize("failed", [True, False])
def test_a_slot_made_by_a_failed_operation_is_dropped_by_the_next_operation(
    shared_fleet: EmbeddedFleet, *, failed: bool
) -> None:
    fleet, store = load_fleet(shared_fleet.fleet_toml), InMemoryStore(f"memory://failed-{failed}")
    node, operation = fleet.primaries[0], new_operation("create", "slept", 0, ())
    with pytest.raises(IndeterminateError), record_operation(store, Operation(operation)):
        raise IndeterminateError("it sleeps")
    if failed:
        record_outcome(store, operation, "failed", "found without a commit")
    slot = slot_name(operation.id)
    create_exported_slot(node, node, slot, 30).connection.close()
    watching = Watching()
    try:
        with open_sessions(fleet, fleet.nodes) as sessions:
            guard_nodes(store, sessions, watching)
        assert (slot in slots_of(node.dsn)) == (not failed)
        assert any(operation.id in note for note in watching.notes) == failed
    finally:
        drop_slot(node, slot)
