"""A slot whose maker was killed is dropped at once, though the server still makes it."""

from __future__ import annotations

import threading
import time

import psycopg

from fleet.config import load_fleet
from fleet.connections import connect_replication
from fleet.embedded import EmbeddedFleet
from tests.snapshot_runs import slots_of
from wal.slots import drop_slot

NAME = "cutline_unfinished"
SECONDS_MAX = 10


def test_a_slot_that_a_standby_still_makes_is_dropped_without_waiting_for_its_primary(
    shared_fleet: EmbeddedFleet,
) -> None:
    node = next(node for node in load_fleet(shared_fleet.fleet_toml).nodes if node.backup_of)
    errors: list[psycopg.Error] = []

    def make() -> None:
        # Nobody asks the primary to log what runs: the server waits for that, whatever became of its client.
        with connect_replication(node) as connection:
            try:
                connection.execute(f'CREATE_REPLICATION_SLOT "{NAME}" LOGICAL pgoutput')
            except psycopg.Error as error:
                errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    deadline = time.monotonic() + SECONDS_MAX
    while NAME not in slots_of(node.dsn):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    assert drop_slot(node, NAME)
    assert time.monotonic() - began < SECONDS_MAX
    thread.join(SECONDS_MAX)
    assert isinstance(errors[0], psycopg.errors.AdminShutdown)
    assert NAME not in slots_of(node.dsn)
