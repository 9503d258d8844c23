"""Somebody who can write to the store makes Cutline drop no slot that is not its own.

The attack succeeded once. tests/unit/test_tombstones.py has those by marks.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from msgspec import structs

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from fleet.progress import Silent
from snapshots.create.initialise import initialise
from snapshots.operations.operation import begin, new_operation, open_operation_ids
from snapshots.operations.settling import settle_operations
from tests.integration.own_shard import database_on

APPLICATION, STANDBY = "debezium_orders", "standby_of_somebody"


@pytest.fixture
def own(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A database with a slot of an application, on a server with a physical slot for a standby."""
    with (
        database_on(shared_fleet, "planted", tmp_path_factory.mktemp("planted")) as fleet,
        psycopg.connect(fleet.primaries[0].dsn, autocommit=True) as connection,
    ):
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (APPLICATION,))
        connection.execute("SELECT pg_create_physical_replication_slot(%s)", (STANDBY,))
        try:
            yield fleet
        finally:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = ANY (%s)",
                ([APPLICATION, STANDBY],),
            )


def all_slots(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        return {name for (name,) in connection.execute("SELECT slot_name FROM pg_replication_slots")}


@pytest.mark.parametrize("slot", [APPLICATION, STANDBY])
@pytest.mark.parametrize("increment", [0, 1])
def test_a_planted_intent_drops_no_slot_of_anybody_else(own: Fleet, slot: str, increment: int) -> None:
    initialise(own, Silent())
    store, before = own.store.open(), all_slots(own.primaries[0].dsn)
    assert {APPLICATION, STANDBY} <= before
    planted = new_operation("create", "planted", increment, tuple(node.id for node in own.nodes))
    begin(store, structs.replace(planted, slot=slot))
    settle_operations(store, own, Silent())
    assert open_operation_ids(store) == []
    assert all_slots(own.primaries[0].dsn) == before
