"""An increment checks that its chain's segments are in the store: all of a short chain's, a long chain's in turn."""

from __future__ import annotations

import pytest

from cutline.snapshots.create import chain_objects
from cutline.snapshots.create.chain_objects import ChainObjectMissingError, check_objects
from cutline.snapshots.records.proven_chains import read_newest_part
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import Inventory
from cutline.wal.segments.archive import archive_prefix, segment_key
from tests.unit.made_garbage import NODES, StoreBuilder

NAME, INCREMENTS = "daily", 4
# Two of each node in the full snapshot, and one of each in an increment.
SEGMENTS = len(NODES) * (2 + INCREMENTS)


def longer_chain() -> tuple[StoreBuilder, str]:
    """A chain of a few increments, and the id of its full snapshot's operation."""
    builder = StoreBuilder()
    operation = builder.take_full(NAME).full.operation
    for _ in range(INCREMENTS):
        builder.take_increment(NAME)
    return builder, operation


def look(store: InMemoryStore, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The number of segments in the listings of the check, and the key that it missed or ""."""
    listed: list[str] = []
    inventory = InMemoryStore.inventory

    def noted(self: InMemoryStore, prefix: str, after: str = "") -> Inventory:
        found = inventory(self, prefix, after)
        listed.extend(one.key for one in found if "/wal/" in one.key)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(InMemoryStore, "inventory", noted)
        try:
            check_objects(store, read_newest_part(store, NAME))
        except ChainObjectMissingError as error:
            return len(listed), str(error.details["object"])
    return len(listed), ""


@pytest.mark.parametrize("node", NODES)
def test_a_missing_segment_of_a_short_chain_is_found_at_once(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, operation = longer_chain()
    assert read_newest_part(builder.store, NAME).is_partial
    assert look(builder.store, monkeypatch) == (SEGMENTS, "")
    missing = segment_key(archive_prefix(NAME, node, operation), 3)
    builder.store.delete(missing)
    assert look(builder.store, monkeypatch) == (SEGMENTS - 1, missing)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("keys", [SEGMENTS // len(NODES), SEGMENTS - 1, 1])
def test_a_missing_segment_of_a_long_chain_is_found_in_turn(
    node: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing returns so many keys that one node's segments take a listing, or one for each segment."""
    monkeypatch.setattr(chain_objects, "LISTINGS_MAX", 1)
    monkeypatch.setattr(chain_objects, "LISTED_KEYS", keys)
    builder, operation = longer_chain()
    assert look(builder.store, monkeypatch) == (SEGMENTS // len(NODES), "")
    missing = segment_key(archive_prefix(NAME, node, operation), 3)
    found = []
    for _ in NODES:
        builder.store.delete(missing)
        found.append(look(builder.store, monkeypatch)[1])
        builder.store.create(missing, missing.encode())
        builder.take_increment(NAME)
    assert sorted(found) == ["", missing]


def test_the_nodes_of_a_turn_take_no_more_listings_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_objects, "LISTED_KEYS", 2)
    builder, _ = longer_chain()
    # Each node has six segments, and so takes three listings of two.
    for most, listed in ((5, 6), (6, 12)):
        monkeypatch.setattr(chain_objects, "LISTINGS_MAX", most)
        assert look(builder.store, monkeypatch) == (listed, "")
