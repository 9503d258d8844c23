"""Signs of life in stores that refuse, lose, do not answer, or belong to another fleet."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import ClassVar

import pytest

import cutline.snapshots.operations.activity as activity
from cutline.fleet.progress import Silent
from cutline.snapshots.operations.activity import Activity, Command
from cutline.snapshots.operations.signs import sign_numbers
from cutline.snapshots.records.store_identity import ensure_identity, read_identity
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import DeletionRefusedError, StoreUnreachableError
from tests.unit.document_kinds import FLEET
from tests.unit.made_commits import memory, unused_url
from tests.unit.made_signs import SECONDS_MAX, begun, names, never, newest, until


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(activity, "SIGN_SECONDS", 0.02)


class Locked(InMemoryStore):
    """A store that refuses to delete signs."""

    def delete(self, key: str) -> None:
        if "/sign-" in key and self.exists(key):
            raise DeletionRefusedError(url=self.url, key=key, reason="it is locked")
        super().delete(key)


class Losing(InMemoryStore):
    """A store that loses the answer to the first sign."""

    lost: ClassVar[list[str]] = []
    lists: ClassVar[list[str]] = []

    def create(self, key: str, body: bytes) -> None:
        super().create(key, body)
        if "/sign-" in key and not self.lost:
            self.lost.append(key)
            raise StoreUnreachableError(url=self.url, reason="it does not answer")

    def list_children(self, prefix: str) -> list[str]:
        self.lists.append(prefix)
        return super().list_children(prefix)


@pytest.mark.parametrize("loses", [False, True])
def test_no_sign_is_left_and_only_after_a_failure_they_are_listed_for_it(*, loses: bool) -> None:
    store = Losing(unused_url())
    store.lost[:] = [] if loses else ["none"]
    intent = begun(store)
    with Activity(Silent(), Command("create", "daily", intent.id), lambda: store, never):
        until(lambda: max(sign_numbers(InMemoryStore.list_children(store, f"operations/{intent.id}")), default=0) > 3)
        store.lists.clear()
    assert InMemoryStore.list_children(store, f"operations/{intent.id}") == ["intent.json"]
    # The command waits for what is done at its end.
    assert len(store.lists) == int(loses)


class Away(InMemoryStore):
    """A store that stores nothing until it is back."""

    back = threading.Event()

    def create(self, key: str, body: bytes) -> None:
        if "/sign-" in key and not self.back.is_set():
            raise StoreUnreachableError(url=self.url, reason="it does not answer")
        super().create(key, body)


def test_where_nothing_may_be_deleted_signs_become_rarer() -> None:
    store = Locked(unused_url())
    intent = begun(store)
    with Activity(Silent(), Command("create", "daily", intent.id), lambda: store, never):
        time.sleep(1.3)
    # After 0.02 s, and then after twice as long each time: the first six take 1.26 s.
    assert 1 <= len(sign_numbers(names(store, intent))) <= 8


def test_a_store_that_is_away_for_a_while_fails_nothing() -> None:
    store = Away(unused_url())
    intent = begun(store)
    store.back.clear()
    with Activity(Silent(), Command("create", "daily", intent.id), lambda: store, never):
        time.sleep(0.1)
        assert newest(store, intent) is None
        store.back.set()
        until(lambda: newest(store, intent))


def test_a_store_that_never_answers_holds_the_end_up_for_some_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "END_SECONDS_MAX", 0.2)
    answers = threading.Event()

    def open_store() -> InMemoryStore:
        answers.wait(SECONDS_MAX)
        return memory()

    with Activity(Silent(), Command("create", "daily", "20261120T000000Z-000000000a"), open_store, never):
        time.sleep(0.1)
        began = time.monotonic()
    assert time.monotonic() - began < 5.0
    answers.set()


def test_nothing_is_stored_in_the_store_of_another_fleet() -> None:
    store, looked = memory(), threading.Event()
    ensure_identity(store, replace(FLEET, name="another"))
    before = store.list("")

    def open_store() -> InMemoryStore:
        looked.set()
        read_identity(store, FLEET)
        return store

    with Activity(Silent(), Command("check", "daily", "20261120T000000Z-000000000a"), open_store, never):
        assert looked.wait(SECONDS_MAX)
        time.sleep(0.1)
    assert store.list("") == before


def test_nothing_is_stored_once_the_store_is_another_fleet_s() -> None:
    """As if a file system was unmounted: the folder at its place is none of ours."""
    mine, other = memory(), memory()
    ensure_identity(mine, FLEET)
    ensure_identity(other, replace(FLEET, name="another"))
    intent, before = begun(mine), other.list("")
    mounted, looked = [mine], threading.Event()

    def open_store() -> InMemoryStore:
        if mounted[0] is other:
            looked.set()
        read_identity(mounted[0], FLEET)
        return mounted[0]

    with Activity(Silent(), Command("create", "daily", intent.id), open_store, never):
        until(lambda: newest(mine, intent))
        mounted[0] = other
        assert looked.wait(SECONDS_MAX)
        signs = mine.list("operations")
        time.sleep(0.2)
        assert mine.list("operations") == signs
    assert other.list("") == before
