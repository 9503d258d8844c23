"""What an operation leaves in the store, however it ends."""

from __future__ import annotations

from itertools import count

import pytest
from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.snapshots.operations.open_operations import read_open_intents, read_recorded_commits
from cutline.snapshots.operations.operation import Operation, begin, new_operation, record_operation
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.operation_records import Failure, read_failure, read_outcome, write_operation_record
from cutline.snapshots.records.proven_chains import commit_key
from cutline.storage.errors import IndeterminateError, StoppedError
from cutline.storage.memory import InMemoryStore
from cutline.storage.open import open_store
from cutline.storage.store import ObjectStore, StoreUnreachableError
from tests.unit.made_chains import FLEET
from tests.unit.made_commits import commit, named

NUMBERS = count(1)


@pytest.fixture
def store() -> ObjectStore:
    return open_store(f"memory://operations-{next(NUMBERS)}", {})


def new_full() -> Operation:
    return Operation(new_operation("create", "shop", 0, ("a",)))


def commit_and_interrupt(store: ObjectStore, operation: Operation) -> None:
    operation.is_committing = True
    store.create(commit_key("shop", 0), seal(structs.replace(named(commit(0), "shop"), operation=operation.id)))
    raise KeyboardInterrupt


def test_an_error_undoes_and_closes_the_operation(store: ObjectStore) -> None:
    undone: list[int] = []
    with (
        pytest.raises(StoppedError, match=r"^nothing was committed, and no slot is left on a node$") as raised,
        record_operation(store, new_full(), lambda: undone.append(1) is None),
    ):
        raise KeyboardInterrupt
    assert isinstance(raised.value.__cause__, KeyboardInterrupt)
    assert "the name shop is still free" in raised.value.hint
    assert undone == [1]
    assert read_open_intents(store) == []
    assert read_recorded_commits(store) == {}


def test_an_interrupted_increment_does_not_say_that_its_chain_has_lost_its_slots(store: ObjectStore) -> None:
    operation = Operation(new_operation("create", "shop", 1, ("a",)))
    with (
        pytest.raises(StoppedError, match=r"^nothing was committed, and the slots of the chain stay$") as raised,
        record_operation(store, operation),
    ):
        raise KeyboardInterrupt
    assert raised.value.hint == "to try again, repeat the command"


def test_an_interrupt_after_the_commit_undoes_nothing(store: ObjectStore) -> None:
    operation, undone = new_full(), []
    with (
        pytest.raises(StoppedError, match="snapshot shop is committed"),
        record_operation(store, operation, lambda: undone.append(1) is None),
    ):
        commit_and_interrupt(store, operation)
    assert undone == []
    assert read_open_intents(store) == []
    assert read_recorded_commits(store) == {"shop": {operation.id: 0}}


def test_an_operation_that_could_not_be_undone_stays_open_for_the_next_command(store: ObjectStore) -> None:
    operation = new_full()
    with (
        pytest.raises(StoppedError, match="nothing was committed, but something is left on a node"),
        record_operation(store, operation, lambda: False),
    ):
        raise KeyboardInterrupt
    assert read_open_intents(store) == [operation.intent]
    failure = read_failure(store, operation.id)
    assert failure is not None
    assert (failure.reason, failure.code) == ("stopped by Ctrl-C", 130)


@pytest.mark.parametrize("reason", ["", "node-unreachable"])
def test_whoever_settles_a_create_says_why_it_has_failed_if_that_is_known(store: ObjectStore, reason: str) -> None:
    intent = structs.replace(new_full().intent, nodes=())
    begin(store, intent)
    if reason:
        write_operation_record(store, "failure", Failure(intent.id, reason, 6, intent.began_at))
    settle_operations(store, FLEET, Silent())
    outcome = read_outcome(store, intent.id)
    assert outcome is not None
    assert outcome.state == "failed"
    assert outcome.reason == (f"{reason}, settled later" if reason else "found without a commit")


def test_an_indeterminate_operation_is_neither_undone_nor_closed(store: ObjectStore) -> None:
    operation, undone = new_full(), []
    with pytest.raises(IndeterminateError), record_operation(store, operation, lambda: undone.append(1) is None):
        raise IndeterminateError("lost")
    assert undone == []
    assert read_open_intents(store) == [operation.intent]


def test_an_operation_succeeds_even_if_its_outcome_can_not_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a command would report that a snapshot does not exist, and the next command would list it."""
    store, operation, create = InMemoryStore("memory://operations-outcome"), new_full(), InMemoryStore.create

    def refuse_outcome(store: InMemoryStore, key: str, body: bytes) -> None:
        if key.endswith("outcome.json"):
            raise StoreUnreachableError(url=store.url, reason="it does not answer")
        create(store, key, body)

    monkeypatch.setattr(InMemoryStore, "create", refuse_outcome)
    with record_operation(store, operation):
        pass
    assert read_open_intents(store) == [operation.intent]
