"""FaultyStore without faults keeps the store's contract, and each fault does what its name says."""

from __future__ import annotations

import pytest

from cutline.storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    ObjectExistsError,
    ObjectStore,
    StoreUnreachableError,
)
from tests.simulation.faulty_store import Bucket, FaultyStore
from tests.simulation.store_faults import Call, Fault, FaultSource
from tests.stores.contract import ObjectStoreContract


class ConstantFault(FaultSource):
    """Every call meets the same fault, if it can."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault: Fault | None = fault

    def fault(self, call: Call) -> Fault | None:
        return self._fault if self._fault in call.possible else None


class TestFaultyStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return FaultyStore(Bucket(), FaultSource())


@pytest.fixture
def bucket() -> Bucket:
    bucket = Bucket()
    bucket.put("a/1", b"one")
    bucket.put("a/2", b"two")
    return bucket


@pytest.mark.parametrize("fault", [Fault.LOST_STORED, Fault.LOST_NOT_STORED, Fault.LATE])
def test_an_answer_is_lost_with_the_object_stored_or_not_stored_or_stored_later(bucket: Bucket, fault: Fault) -> None:
    with pytest.raises(AnswerLostError):
        FaultyStore(bucket, ConstantFault(fault)).create("b", b"x")
    assert bucket.stored.exists("b") == (fault is Fault.LOST_STORED)
    for late in list(bucket.late):
        assert bucket.deliver(late)
    assert bucket.stored.exists("b") == (fault is not Fault.LOST_NOT_STORED)


@pytest.mark.parametrize("fault", [Fault.LOST_STORED, Fault.LATE])
def test_a_put_whose_answer_is_lost_overwrites_nothing(bucket: Bucket, fault: Fault) -> None:
    with pytest.raises(AnswerLostError):
        FaultyStore(bucket, ConstantFault(fault)).create("a/1", b"x")
    assert not any(bucket.deliver(late) for late in list(bucket.late))
    assert bucket.stored.read("a/1") == b"one"


@pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.THROTTLED])
def test_a_call_that_gets_no_answer_has_no_effect(bucket: Bucket, fault: Fault) -> None:
    store = FaultyStore(bucket, ConstantFault(fault))
    for ask in (lambda: store.create("b", b"x"), lambda: store.delete("a/1"), lambda: store.read("a/1")):
        with pytest.raises(StoreUnreachableError):
            ask()
    assert bucket.stored.list("") == ["a/1", "a/2"]


def test_the_retry_of_a_put_that_was_stored_may_be_answered_with_412(bucket: Bucket) -> None:
    with pytest.raises(ObjectExistsError):
        FaultyStore(bucket, ConstantFault(Fault.TAKEN_BY_ITSELF)).create("b", b"x")
    assert bucket.stored.read("b") == b"x"


def test_a_read_is_truncated_and_a_listing_is_stale(bucket: Bucket) -> None:
    assert FaultyStore(bucket, ConstantFault(Fault.TRUNCATED)).read("a/1") == b""
    assert FaultyStore(bucket, ConstantFault(Fault.STALE)).list("a") == []
    bucket.remove("a/2")
    assert bucket.keys_at(2) == {"a/1", "a/2"}


def test_a_deletion_is_refused_or_its_answer_is_lost(bucket: Bucket) -> None:
    with pytest.raises(DeletionRefusedError):
        FaultyStore(bucket, ConstantFault(Fault.REFUSED)).delete("a/1")
    assert bucket.stored.exists("a/1")
    with pytest.raises(StoreUnreachableError):
        FaultyStore(bucket, ConstantFault(Fault.LOST_DELETED)).delete("a/1")
    assert not bucket.stored.exists("a/1")


@pytest.mark.parametrize("fault", [Fault.INTERRUPT_BEFORE, Fault.INTERRUPT_AFTER])
def test_an_interrupt_comes_before_or_after_the_effect_of_a_call(bucket: Bucket, fault: Fault) -> None:
    with pytest.raises(KeyboardInterrupt):
        FaultyStore(bucket, ConstantFault(fault)).create("b", b"x")
    assert bucket.stored.exists("b") == (fault is Fault.INTERRUPT_AFTER)
