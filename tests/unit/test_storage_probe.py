"""The probe on stores that break one promise each: the in-memory store with one wrong method."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from cutline.storage.memory import InMemoryStore
from cutline.storage.probe import RACES, probe_store
from cutline.storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    Inventory,
    Keys,
    ObjectExistsError,
    ObjectMissingError,
    StoreUnfitError,
    StoreUnreachableError,
)


def overwrite(store: InMemoryStore, key: str, body: bytes) -> None:
    store._objects[key] = body
    store._created_at[key] = datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Overwriting(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        overwrite(self, key, body)


@dataclass(frozen=True, slots=True)
class OverwritingAndDenying(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        taken = key in self._objects
        overwrite(self, key, body)
        if taken:
            raise ObjectExistsError(url=self.url, key=key)


@dataclass(frozen=True, slots=True)
class Ignoring(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        if not self.exists(key):
            overwrite(self, key, body)


@dataclass(frozen=True, slots=True)
class Truncating(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        InMemoryStore.create(self, key, body[:-1])


@dataclass(frozen=True, slots=True)
class Forgetting(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Unlisting(InMemoryStore):
    def list(self, prefix: str) -> Keys:
        return []


@dataclass(frozen=True, slots=True)
class IgnoringRanges(InMemoryStore):
    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self.read(key)


@dataclass(frozen=True, slots=True)
class Undeleting(InMemoryStore):
    def delete(self, key: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ListingWrongSizes(InMemoryStore):
    def inventory(self, prefix: str, after: str = "") -> Inventory:
        return [replace(one, size=0) for one in InMemoryStore.inventory(self, prefix, after)]


@dataclass(frozen=True, slots=True)
class LettingTwoWin(InMemoryStore):
    """A store that checks whether the object exists, and then stores it."""

    def create(self, key: str, body: bytes) -> None:
        if self.exists(key):
            raise ObjectExistsError(url=self.url, key=key)
        time.sleep(0.05)
        overwrite(self, key, body)


@dataclass(frozen=True, slots=True)
class InParts(InMemoryStore):
    """A store that sends large objects in parts, and completes them with the condition."""

    def create_in_parts(self, key: str, body: bytes) -> None:
        self.create(key, body)


@dataclass(frozen=True, slots=True)
class OverwritingInParts(InMemoryStore):
    def create_in_parts(self, key: str, body: bytes) -> None:
        overwrite(self, key, body)


@dataclass(frozen=True, slots=True)
class LosingAnswers(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        raise AnswerLostError(url=self.url, key=key, reason="the connection broke")


@dataclass(frozen=True, slots=True)
class Unreachable(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        raise StoreUnreachableError(url=self.url, reason="can't connect")

    def list(self, prefix: str) -> Keys:
        raise StoreUnreachableError(url=self.url, reason="can't connect either")


@pytest.mark.parametrize(
    ("store", "lack"),
    [
        (Overwriting("memory://"), "second conditional put was accepted"),
        (Ignoring("memory://"), "second conditional put was accepted"),
        (OverwritingAndDenying("memory://"), "refused conditional put changed the object"),
        (Truncating("memory://"), "different when read back"),
        (Forgetting("memory://"), "just created is missing"),
        (Unlisting("memory://"), "not listed"),
        (IgnoringRanges("memory://"), "range of it is wrong"),
        (ListingWrongSizes("memory://"), "listed size is wrong"),
        (
            LettingTwoWin("memory://"),
            r"[2-8] of 8 concurrent creates of the same object were accepted \(conditional put",
        ),
        (OverwritingInParts("memory://"), "second conditional upload in parts was accepted"),
        (Undeleting("memory://"), "still there"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused_and_the_promise_named(store: InMemoryStore, lack: str) -> None:
    with pytest.raises(StoreUnfitError, match=lack) as raised:
        probe_store(store)
    assert raised.value.exit_code == 3
    if not isinstance(store, (Undeleting, Unlisting)):  # the probe can't find what to remove
        assert not store._objects


def test_a_store_that_does_not_answer_is_not_called_unfit() -> None:
    for store in (LosingAnswers("memory://"), Unreachable("memory://")):
        with pytest.raises(StoreUnreachableError, match=r"gave up|can't connect$"):
            probe_store(store)


def test_the_probe_leaves_the_objects_of_others_alone() -> None:
    store = InMemoryStore("memory://")
    store.create("snapshots/nightly/snapshot.json", b"{}")
    store.create("operations/20261120T074343Z-0000000000/intent.json", b"{}")
    before = store.list("")
    probe_store(store)
    assert store.list("") == before


def test_the_in_memory_store_does_not_find_what_was_never_stored() -> None:
    with pytest.raises(ObjectMissingError):
        InMemoryStore("memory://").read("nothing")


@dataclass(frozen=True, slots=True)
class Keeping(InParts):
    def delete(self, key: str) -> None:
        raise DeletionRefusedError(url=self.url, key=key, reason="a policy")


@dataclass(frozen=True, slots=True)
class Hiding(InMemoryStore):
    def delete(self, key: str) -> None:
        InMemoryStore.delete(self, key)
        raise DeletionRefusedError(url=self.url, key=key, reason="a policy")


def test_a_store_that_refuses_deletions_passes_and_the_refusal_is_returned() -> None:
    store = Keeping("memory://keeping")
    refused = probe_store(store)
    assert refused is not None
    assert "a policy" in refused.message
    assert len(store.list("probes")) == 1 + 2 * (1 + RACES)
    assert probe_store(InMemoryStore("memory://deleting")) is None


def test_a_store_that_refuses_a_deletion_but_hides_the_object_is_unfit() -> None:
    with pytest.raises(StoreUnfitError, match="refused is gone"):
        probe_store(Hiding("memory://hiding"))
