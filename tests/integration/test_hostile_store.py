"""Somebody who can write to the store makes Cutline drop no slot that is not its own.

The attacks succeeded once. tests/unit/test_slot_owners.py has those by marks.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from msgspec import UNSET, structs

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.operations.open_operations import open_operation_ids
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.operations.slot_guard import read_kept_chains
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.wal.drain.slots import slot_name
from tests.held.retained_wal import Notes
from tests.integration.own_shard import database_on

APPLICATION, STANDBY = "debezium_orders", "standby_of_somebody"
LIVE = "20261120T074343Z-3f9a01bc77"


@pytest.fixture
def own(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A database with slots of an application and of a chain, on a server with a physical slot for a standby."""
    with (
        database_on(shared_fleet, "planted", tmp_path_factory.mktemp("planted")) as fleet,
        psycopg.connect(fleet.primaries[0].dsn, autocommit=True) as connection,
    ):
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (APPLICATION,))
        connection.execute("SELECT pg_create_physical_replication_slot(%s)", (STANDBY,))
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (slot_name(LIVE),))
        try:
            yield fleet
        finally:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = ANY (%s)",
                ([APPLICATION, STANDBY, slot_name(LIVE)],),
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


def plant(own: Fleet, operation: str, fleet_id: str | None = None) -> Intent:
    """Begin a create that no process runs."""
    intent = new_operation("create", "planted", 0, tuple(node.id for node in own.nodes))
    intent = structs.replace(intent, operation=operation, fleet_id=UNSET if fleet_id is None else fleet_id)
    begin(own.store.open(), intent)
    return intent


def test_an_intent_whose_id_has_the_slot_of_a_live_chain_drops_nothing(own: Fleet) -> None:
    initialise(own, Silent())
    store, before, notes = own.store.open(), all_slots(own.primaries[0].dsn), Notes()
    live = plant(own, LIVE)
    record_outcome(store, live, "done")
    plant(own, LIVE.lower())
    settle_operations(store, own, notes)
    assert notes.find_one(
        f"operation {LIVE.lower()} can't be settled", f"could also belong to another operation: {LIVE}"
    )
    assert slot_name(LIVE) in all_slots(own.primaries[0].dsn) == before
    assert open_operation_ids(store) == [LIVE.lower()]


def test_the_slot_of_a_live_chain_is_of_no_snapshot_while_another_id_has_it_too(own: Fleet) -> None:
    initialise(own, Silent())
    store = own.store.open()
    with open_sessions(own, own.primaries) as sessions:

        def chain_of_live_slot() -> str:
            (kept,) = [one for one in read_kept_chains(store, sessions, Silent()) if one.slot == slot_name(LIVE)]
            return kept.chain

        assert chain_of_live_slot() == ""
        record_outcome(store, plant(own, LIVE), "failed")
        assert chain_of_live_slot() == LIVE
        # The planted one would say that the operation has failed, so that its slots are dropped.
        record_outcome(store, plant(own, LIVE.lower()), "failed")
        assert chain_of_live_slot() == ""


def test_an_intent_that_was_copied_from_another_fleets_store_drops_nothing(own: Fleet) -> None:
    initialise(own, Silent())
    store, before, notes = own.store.open(), all_slots(own.primaries[0].dsn), Notes()
    plant(own, LIVE, fleet_id="0123abcd")
    settle_operations(store, own, notes)
    assert notes.find_one(f"operation {LIVE} can't be settled", "fleet 0123abcd", "remove operations/")
    assert slot_name(LIVE) in all_slots(own.primaries[0].dsn) == before
    assert store.list("snapshots") == []


def test_an_operation_of_this_fleet_loses_its_slot(own: Fleet) -> None:
    identity, _ = ensure_identity(own.store.open(), own)
    plant(own, LIVE, fleet_id=identity.fleet_id)
    settle_operations(own.store.open(), own, Silent())
    assert slot_name(LIVE) not in all_slots(own.primaries[0].dsn)
    assert open_operation_ids(own.store.open()) == []
