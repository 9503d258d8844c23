"""The search for writes after the last cut of a terminal snapshot, on a server on which little happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import psycopg
import pytest

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.snapshots.base_copy.copy_slots import insert_position
from cutline.snapshots.create.terminal import FinalStateError, _check_unwritten
from cutline.wal.drain.slots import drop_slot
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.wal.drain.drain_task import DrainTask

SLOT = "final_state"
# The server flushes the rest of a record after up to 15 seconds if nothing commits.
SECONDS_MAX, TRIES = 3.0, 4


@pytest.fixture
def node(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Node]:
    with own_database(shared_fleet, tmp_path, "final") as fleet:
        found = fleet.nodes[0]
        execute(
            found.dsn,
            "CREATE TABLE seen (id int)",
            "CREATE PUBLICATION final FOR TABLE seen",
            f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput', false, true)",
        )
        try:
            yield found
        finally:
            drop_slot(found, SLOT)


def await_flushed(connection: psycopg.Connection, after: Lsn) -> None:
    """Wait until the server has flushed WAL after this position."""
    deadline = time.monotonic() + 20
    query = "SELECT pg_current_wal_flush_lsn() > %s::pg_lsn + 8192"
    while connection.execute(query, (str(after),)).fetchone() != (True,):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_does_not_wait_for_the_rest_of_a_record_that_an_open_transaction_has_written(node: Node) -> None:
    task = cast("DrainTask", SimpleNamespace(node=node, slot=SLOT, publications=("final",)))
    with psycopg.connect(node.dsn, autocommit=True) as connection, psycopg.connect(node.dsn) as writer:
        finish = insert_position(connection)
        for _ in range(TRIES):
            # No commit follows, so that only the record's whole pages are flushed.
            before = insert_position(connection)
            writer.execute("SELECT pg_logical_emit_message(false, 'other', repeat('x', 20000))")
            await_flushed(connection, before)
            began = time.monotonic()
            _check_unwritten(connection, task, finish)
            assert time.monotonic() - began < SECONDS_MAX
        execute(node.dsn, "INSERT INTO seen VALUES (1)")
        with pytest.raises(FinalStateError, match=r"1 changes were written to public\.seen after the cut"):
            _check_unwritten(connection, task, finish)
