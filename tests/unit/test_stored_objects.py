"""What a commit lists is asked for: object by object, or by a listing where there are many in a folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cutline.snapshots.operations.committing import LISTED_MIN, ObjectsNotStoredError, check_stored
from cutline.storage.local import LocalStore
from cutline.storage.store import Inventory

MANY = {f"base/s1/part-{number}": number for number in range(LISTED_MIN)}
FEW = {"wal/s1/1": 7, "wal/s1/2": 8, "schema/s1/archive": 9}


class Counting(LocalStore):
    """Counts requests; a listing lacks the `lag` objects that were created last."""

    __slots__ = ("asked", "lag")

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        object.__setattr__(self, "asked", Counter())
        self.lagging(0)

    def lagging(self, count: int) -> None:
        object.__setattr__(self, "lag", count)

    def size(self, key: str) -> int:
        self.asked["size"] += 1
        return LocalStore.size(self, key)

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        self.asked["inventory"] += 1
        found = LocalStore.inventory(self, prefix, after)
        return found[: len(found) - self.lag]


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    made = Counting(tmp_path)
    for key, size in (MANY | FEW).items():
        made.create(key, b"x" * size)
    return made


def test_many_in_a_folder_are_listed_and_others_are_asked_for(store: Counting) -> None:
    check_stored(store, MANY | FEW)
    assert store.asked == {"inventory": 1, "size": len(FEW)}
    check_stored(store, {})


def test_what_a_listing_does_not_have_yet_is_asked_for(store: Counting) -> None:
    store.lagging(3)
    check_stored(store, MANY)
    assert store.asked == {"inventory": 1, "size": 3}


@pytest.mark.parametrize("keys", [("wal/s1/1",), ("base/s1/part-1", "schema/s1/archive")])
def test_what_is_missing_or_has_another_size_is_named(store: Counting, keys: tuple[str, ...]) -> None:
    for key in keys:
        store.delete(key)
    sizes = MANY | FEW | {"wal/s1/2": 9}
    with pytest.raises(ObjectsNotStoredError) as raised:
        check_stored(store, sizes)
    assert raised.value.message == (
        f"store {store.url} lacks {', '.join(keys)} and has different sizes for wal/s1/2"
        f" ({len(sizes)} objects were reported as stored); nothing was committed"
    )
    assert "a lifecycle rule of the bucket" in raised.value.hint
    assert raised.value.details == {
        "store": store.url,
        "missing": len(keys),
        "other_size": 1,
        "objects": len(sizes),
    }
