"""What an operation leaves in the store, whatever ended it."""

from __future__ import annotations

from itertools import count

import pytest

from snapshots.commits import commit_key, sealed
from snapshots.operations import Operation, new_operation, pending, recorded, recorded_commits
from storage.errors import IndeterminateError
from storage.open import open_store
from storage.store import ObjectStore

NUMBERS = count(1)


@pytest.fixture
def store() -> ObjectStore:
    return open_store(f"memory://operations-{next(NUMBERS)}", {})


def full() -> Operation:
    return new_operation("create", "shop", 0, ("a",))


def commit_and_interrupt(store: ObjectStore, operation: Operation) -> None:
    store.create(commit_key("shop", 0), sealed({"operation": operation.id}))
    raise KeyboardInterrupt


def test_an_error_undoes_and_closes(store: ObjectStore) -> None:
    undone: list[int] = []
    with pytest.raises(KeyboardInterrupt), recorded(store, full(), lambda: undone.append(1) is None):
        raise KeyboardInterrupt
    assert undone == [1]
    assert pending(store) == []
    assert recorded_commits(store) == {}


def test_an_interrupt_after_the_commit_undoes_nothing(store: ObjectStore) -> None:
    operation, undone = full(), []
    with pytest.raises(KeyboardInterrupt), recorded(store, operation, lambda: undone.append(1) is None):
        commit_and_interrupt(store, operation)
    assert undone == []
    assert pending(store) == []
    assert recorded_commits(store) == {"shop": {operation.id: 0}}


def test_what_could_not_be_undone_stays_open_for_the_next_command(store: ObjectStore) -> None:
    operation = full()
    with pytest.raises(KeyboardInterrupt), recorded(store, operation, lambda: False):
        raise KeyboardInterrupt
    assert pending(store) == [operation]


def test_what_is_not_known_is_neither_undone_nor_closed(store: ObjectStore) -> None:
    operation, undone = full(), []
    with pytest.raises(IndeterminateError), recorded(store, operation, lambda: undone.append(1) is None):
        raise IndeterminateError("lost")
    assert undone == []
    assert pending(store) == [operation]
