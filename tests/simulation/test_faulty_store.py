"""The store with faults is a store while it has none; and each fault is what its name says."""

from __future__ import annotations

import pytest

from storage.store import AnswerLostError, DeletionRefusedError, ObjectExistsError, ObjectStore, StoreUnreachableError
from tests.object_store_contract import ObjectStoreContract
from tests.simulation.faulty_store import Bucket, Call, Fault, FaultyStore, Weather


class Struck(Weather):
    """A weather in which every call meets one fault, if it can."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault: Fault | None = fault

    def fault(self, call: Call) -> Fault | None:
        return self._fault if self._fault in call.possible else None


class TestFaultyStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return FaultyStore(Bucket(), Weather())


@pytest.fixture
def bucket() -> Bucket:
    bucket = Bucket()
    bucket.put("a/1", b"one")
    bucket.put("a/2", b"two")
    return bucket


@pytest.mark.parametrize("fault", [Fault.LOST_STORED, Fault.LOST_NOT_STORED, Fault.LATE])
def test_an_answer_is_lost_with_the_object_stored_or_not_or_later(bucket: Bucket, fault: Fault) -> None:
    with pytest.raises(AnswerLostError):
        FaultyStore(bucket, Struck(fault)).create("b", b"x")
    assert bucket.stored.exists("b") == (fault is Fault.LOST_STORED)
    for late in list(bucket.late):
        assert bucket.arrive(late)
    assert bucket.stored.exists("b") == (fault is not Fault.LOST_NOT_STORED)


@pytest.mark.parametrize("fault", [Fault.LOST_STORED, Fault.LATE])
def test_a_put_that_is_lost_on_its_way_overwrites_nothing(bucket: Bucket, fault: Fault) -> None:
    with pytest.raises(AnswerLostError):
        FaultyStore(bucket, Struck(fault)).create("a/1", b"x")
    assert not any(bucket.arrive(late) for late in list(bucket.late))
    assert bucket.stored.read("a/1") == b"one"


@pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.THROTTLED])
def test_a_store_that_does_not_answer_has_done_nothing(bucket: Bucket, fault: Fault) -> None:
    store = FaultyStore(bucket, Struck(fault))
    for ask in (lambda: store.create("b", b"x"), lambda: store.delete("a/1"), lambda: store.read("a/1")):
        with pytest.raises(StoreUnreachableError):
            ask()
    assert bucket.stored.list("") == ["a/1", "a/2"]


def test_a_412_may_answer_the_retry_of_a_put_that_was_stored(bucket: Bucket) -> None:
    with pytest.raises(ObjectExistsError):
        FaultyStore(bucket, Struck(Fault.TAKEN_BY_ITSELF)).create("b", b"x")
    assert bucket.stored.read("b") == b"x"


def test_a_read_is_cut_short_and_a_listing_is_of_before(bucket: Bucket) -> None:
    assert FaultyStore(bucket, Struck(Fault.TRUNCATED)).read("a/1") == b""
    assert FaultyStore(bucket, Struck(Fault.STALE)).list("a") == []
    bucket.remove("a/2")
    assert bucket.keys_at(2) == {"a/1", "a/2"}


def test_a_deletion_is_refused_or_done_without_an_answer(bucket: Bucket) -> None:
    with pytest.raises(DeletionRefusedError):
        FaultyStore(bucket, Struck(Fault.REFUSED)).delete("a/1")
    assert bucket.stored.exists("a/1")
    with pytest.raises(StoreUnreachableError):
        FaultyStore(bucket, Struck(Fault.LOST_DELETED)).delete("a/1")
    assert not bucket.stored.exists("a/1")


@pytest.mark.parametrize("fault", [Fault.INTERRUPT_BEFORE, Fault.INTERRUPT_AFTER])
def test_a_process_ends_before_its_call_has_an_effect_or_after(bucket: Bucket, fault: Fault) -> None:
    with pytest.raises(KeyboardInterrupt):
        FaultyStore(bucket, Struck(fault)).create("b", b"x")
    assert bucket.stored.exists("b") == (fault is Fault.INTERRUPT_AFTER)
