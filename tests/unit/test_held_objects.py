"""Held objects: read once from the store, and again if an answer was cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.storage.digest import digest
from cutline.storage.encryption.fleet_encryption import DataKey
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation
from cutline.storage.store import StoreUnreachableError
from cutline.storage.stored_form import stored_form
from cutline.wal.segments.damage import HeldObjects, ObjectDamagedError, read_listed

BODY = bytes(range(100))


@pytest.fixture(params=["plain", "encrypted"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> HeldObjects:
    encryption = DataKey(bytes(range(32))) if request.param == "encrypted" else None
    return HeldObjects(StoreLocation(f"file://{tmp_path}", {}, encryption))


def stored_digest(held: HeldObjects, start: int = 0) -> str:
    form = stored_form(held.location.open())
    return digest(form.raw.read("a/b")[form.stored_offset(start) :])


def test_an_object_is_read_once_whole_and_in_part(held: HeldObjects, tmp_path: Path) -> None:
    held.location.open().create("a/b", BODY)
    whole, tail = stored_digest(held), stored_digest(held, 90)
    assert read_listed(held.open(), "s1", "a/b", (100, whole)) == BODY
    (tmp_path / "a" / "b").unlink()
    assert read_listed(held.open(), "s1", "a/b", (100, whole)) == BODY
    assert read_listed(held.open(), "s1", "a/b", (100, tail), 90) == BODY[90:]


def test_what_is_missing_stays_so_and_a_part_alone_is_not_held(held: HeldObjects, tmp_path: Path) -> None:
    with pytest.raises(ObjectDamagedError, match="it is not in the store"):
        read_listed(held.open(), "s1", "a/b", (100, ""))
    held.location.open().create("a/b", BODY)
    tail = stored_digest(held, 90)
    assert read_listed(held.open(), "s1", "a/b", (100, tail), 90) == BODY[90:]
    if held.location.encryption:
        # Of so small an object every part is all of it.
        return
    (tmp_path / "a" / "b").unlink()
    with pytest.raises(ObjectDamagedError, match="it is not in the store"):
        read_listed(held.open(), "s1", "a/b", (100, tail), 90)


def test_an_answer_that_was_cut_short_is_asked_for_again(held: HeldObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    held.location.open().create("a/b", BODY)
    whole = stored_digest(held)
    read_range, cut = LocalStore.read_range, [20, 20, 20, 0]

    def cutting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        found = read_range(self, key, start, length)
        return found[: len(found) - cut.pop(0)]

    monkeypatch.setattr(LocalStore, "read_range", cutting)
    with pytest.raises(StoreUnreachableError, match=r"reading a/b ended after"):
        read_listed(held.open(), "s1", "a/b", (100, whole))
    assert read_listed(held.open(), "s1", "a/b", (100, whole)) == BODY
    assert cut == []
