"""The probe against stores that break one promise each: the in-memory store with one method wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from storage.memory import InMemoryStore
from storage.probe import probe_store
from storage.store import (
    AnswerLostError,
    Keys,
    ObjectExistsError,
    ObjectMissingError,
    StoreUnfitError,
    StoreUnreachableError,
)


@dataclass(frozen=True, slots=True)
class Overwriting(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        self._objects[key] = body


@dataclass(frozen=True, slots=True)
class OverwritingAndDenying(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        taken = key in self._objects
        self._objects[key] = body
        if taken:
            raise ObjectExistsError(url=self.url, key=key)


@dataclass(frozen=True, slots=True)
class Ignoring(InMemoryStore):
    def create(self, key: str, body: bytes) -> None:
        self._objects.setdefault(key, body)


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
        (Truncating("memory://"), "read back changed"),
        (Forgetting("memory://"), "just created is missing"),
        (Unlisting("memory://"), "not listed"),
        (IgnoringRanges("memory://"), "range of it is wrong"),
        (Undeleting("memory://"), "still there"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused_by_its_name(store: InMemoryStore, lack: str) -> None:
    with pytest.raises(StoreUnfitError, match=lack) as raised:
        probe_store(store)
    assert raised.value.exit_code == 3
    if not isinstance(store, (Undeleting, Unlisting)):  # it can't find what to remove
        assert not store._objects


def test_a_store_that_does_not_answer_is_not_called_unfit() -> None:
    for store in (LosingAnswers("memory://"), Unreachable("memory://")):
        with pytest.raises(StoreUnreachableError, match=r"gave up|can't connect$"):
            probe_store(store)


def test_what_others_stored_is_left_alone() -> None:
    store = InMemoryStore("memory://")
    store.create("snapshots/nightly/snapshot.json", b"{}")
    store.create("operations/20261120T074343Z-0000000000/intent.json", b"{}")
    before = store.list("")
    probe_store(store)
    assert store.list("") == before


def test_the_double_forgets_what_it_never_had() -> None:
    with pytest.raises(ObjectMissingError):
        InMemoryStore("memory://").read("nothing")
