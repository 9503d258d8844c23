"""Deciding for good whether an operation has committed: the store has either its commit or a void."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec import structs

import cutline.storage.storing as storing
from cutline.snapshots.operations.committing import (
    OperationSettledError,
    UndecidedError,
    decide,
    has_committed,
    put_commit,
)
from cutline.snapshots.records.commit import Previous
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.end_marks import EndMark, mark_end
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import (
    SnapshotExistsError,
    SnapshotMissingError,
    commit_key,
    find_place,
    free_turn,
    increment_numbers,
    read_chain,
    snapshot_names,
)
from cutline.snapshots.records.tombstones import SnapshotDeletedError, only_full_key, tombstone_key
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import AnswerLostError
from tests.unit.made_commits import as_read, commit, mark, memory, unused_url


def new_intent(increment: int = 0, turn: int = 1, name: str = "") -> Intent:
    new = commit(increment)
    return Intent(
        operation=name or new.operation, kind="create", snapshot=new.snapshot, increment=increment, turn=turn,
        began_at="2026-11-20T11:00:00Z", nodes=(), slot=None,
    )  # fmt: skip


def test_a_voided_operation_can_never_commit() -> None:
    store = memory()
    assert not decide(store, new_intent())
    with pytest.raises(OperationSettledError):
        put_commit(store, commit(0))
    assert snapshot_names(store) == []
    assert not decide(store, new_intent())


def test_a_committed_operation_can_not_be_voided() -> None:
    store = memory()
    put_commit(store, commit(0))
    assert decide(store, new_intent())
    assert not decide(store, new_intent(name="another"))
    assert read_chain(store, "daily").full == as_read(commit(0))


def test_asking_whether_it_has_committed_changes_nothing() -> None:
    store = memory()
    assert not has_committed(store, new_intent())
    put_commit(store, commit(0))
    assert has_committed(store, new_intent())


@pytest.mark.parametrize("voids", [1, 2, 11])
def test_after_a_void_the_next_operation_takes_the_next_turn(voids: int) -> None:
    store = memory()
    put_commit(store, commit(0))
    for turn in range(1, voids + 1):
        assert free_turn(store, "daily", 1) == turn
        assert not decide(store, new_intent(1, turn))
        assert increment_numbers(store, "daily") == []
        assert read_chain(store, "daily").increments == ()
    put_commit(store, commit(1), voids + 1)
    assert read_chain(store, "daily").increments == (as_read(commit(1)),)
    assert increment_numbers(store, "daily") == [1]
    with pytest.raises(SnapshotExistsError, match="increment 1 of daily already exists"):
        free_turn(store, "daily", 1)
    put_commit(store, commit(2))
    assert [one.increment for one in read_chain(store, "daily").commits] == [0, 1, 2]


def test_an_increment_of_an_ended_chain_is_not_suggested() -> None:
    store, hints = memory(), list[str]()
    put_commit(store, commit(0))
    for _ in range(2):
        with pytest.raises(SnapshotExistsError, match="daily already exists") as refused:
            free_turn(store, "daily", 0)
        hints.append(refused.value.hint)
        mark_end(store, EndMark("daily", "op-0", 0, "", "2026-11-20T00:00:00Z"))
    assert hints == [
        "take its next increment: snapshot create daily --incremental   or choose a different name",
        "choose a different name",
    ]


def test_a_full_snapshot_of_a_later_turn_is_listed() -> None:
    store = memory()
    decide(store, new_intent())
    put_commit(store, commit(0), free_turn(store, "daily", 0))
    assert snapshot_names(store) == ["daily"]
    assert find_place(store, "daily", 0).key == commit_key("daily", 0, 2) == "snapshots/daily/snapshot.2.json"


@dataclass(frozen=True, slots=True)
class LosingStore(InMemoryStore):
    """A store that loses the answer to every create of a void."""

    arrives: bool = True

    def create(self, key: str, body: bytes) -> None:
        if b"cutline/void/1" not in body:
            InMemoryStore.create(self, key, body)
            return
        if self.arrives:
            InMemoryStore.create(self, key, body)
        raise AnswerLostError(url=self.url, key=key, reason="the connection was lost")


def test_a_lost_answer_to_a_void_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "READ_BACK_PAUSES_SECONDS", (0.0, 0.0))
    assert not decide(LosingStore(unused_url()), new_intent())
    store = LosingStore(unused_url(), arrives=False)
    with pytest.raises(UndecidedError) as error:
        decide(store, new_intent())
    assert error.value.exit_code == 5
    # Nothing was decided: the operation may still commit.
    put_commit(store, commit(0))
    assert decide(store, new_intent())


def test_an_increment_of_another_predecessor_is_neither_committed_nor_read() -> None:
    store = memory()
    put_commit(store, commit(0))
    full = read_chain(store, "daily").full
    wrong = structs.replace(commit(1), previous=Previous(full.operation, "0" * 64))
    with pytest.raises(ManifestError, match="snapshot daily is not the commit"):
        put_commit(store, wrong)
    put_commit(store, structs.replace(commit(1), previous=Previous(full.operation, full.digest)))
    assert read_chain(store, "daily").last.previous == Previous(full.operation, full.digest)
    forged = memory()
    put_commit(forged, structs.replace(commit(0), comment="the same operation, another file"))
    forged.create(commit_key("daily", 1), seal(wrong))
    with pytest.raises(ManifestError, match="belongs to another chain"):
        read_chain(forged, "daily")


def test_nothing_is_read_or_committed_under_a_deleted_name() -> None:
    store = memory()
    put_commit(store, commit(0))
    store.create(tombstone_key("daily"), seal(mark()))
    assert snapshot_names(store) == []
    for ask in (lambda: read_chain(store, "daily"), lambda: put_commit(store, commit(1))):
        with pytest.raises(SnapshotDeletedError, match="deleted at 2026-11-20T11:00:00Z"):
            ask()
    # An operation from before the deletion has not committed, and deciding so stores no void.
    before = store.list("")
    assert not decide(store, new_intent(1))
    assert store.list("") == before


def test_pruned_increments_are_neither_read_nor_continued() -> None:
    store = memory()
    put_commit(store, commit(0))
    full = read_chain(store, "daily").full
    put_commit(store, structs.replace(commit(1), previous=Previous(full.operation, full.digest)))
    first = read_chain(store, "daily").last
    store.create(only_full_key("daily"), seal(mark(only_full=True)))
    assert read_chain(store, "daily").increments == ()
    for ask in (
        lambda: read_chain(store, "daily", 1),
        lambda: put_commit(store, structs.replace(commit(2), previous=Previous(first.operation, first.digest))),
    ):
        with pytest.raises(SnapshotMissingError, match="increments of snapshot daily were pruned"):
            ask()
