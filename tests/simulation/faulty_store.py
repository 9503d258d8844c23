"""An object store with faults: every call may fail in every way in which calls to a real object store fail.

All processes share one Bucket, an InMemoryStore with what is really stored. Each has its own client, a FaultyStore,
whose FaultSource draws the faults. Without faults, FaultyStore passes ObjectStoreContract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from cutline.storage.digest import digest
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    Inventory,
    Keys,
    Leftovers,
    Listed,
    ObjectExistsError,
    StoreUnreachableError,
    Unfinished,
    check_prefix,
    check_range,
    is_key,
)
from tests.simulation.store_faults import (
    COMMON_FAULTS,
    CREATE_FAULTS,
    DELETE_FAULTS,
    LIST_FAULTS,
    READ_FAULTS,
    Call,
    Fault,
    FaultSource,
)

Answer = TypeVar("Answer")


@dataclass(slots=True)
class LatePut:
    """A put that is still on its way, even if the process that sent it is dead."""

    key: str
    body: bytes


@dataclass(slots=True)
class Bucket:
    """What is stored, and every change so far: a stale listing shows an earlier state.

    `first_digests` has the digest of every object as it was created, to show if one is ever overwritten. `on_put` is
    told the key of every object that is stored.
    """

    stored: InMemoryStore = field(default_factory=lambda: InMemoryStore("memory://simulated"))
    changes: list[tuple[str, bool]] = field(default_factory=list)
    first_digests: dict[str, str] = field(default_factory=dict)
    created_at: dict[str, datetime] = field(default_factory=dict)
    late: list[LatePut] = field(default_factory=list)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    on_put: Callable[[str], None] = lambda key: None

    def put(self, key: str, body: bytes) -> None:
        """Create the object; raises ObjectExistsError."""
        self.stored.create(key, body)
        self.changes.append((key, True))
        self.first_digests.setdefault(key, digest(body))
        self.created_at[key] = self.now()
        self.on_put(key)

    def remove(self, key: str) -> None:
        """Delete the object if it is there."""
        if self.stored.exists(key):
            self.stored.delete(key)
            self.changes.append((key, False))
            self.first_digests.pop(key, None)

    def deliver(self, late: LatePut) -> bool:
        """Let a late put reach the store; return whether it was stored."""
        self.late.remove(late)
        try:
            self.put(late.key, late.body)
        except ObjectExistsError:
            return False
        return True

    def copy_to(self, other: Bucket) -> None:
        """Copy all objects and the history into an empty bucket, without the late puts."""
        for key in self.stored.list(""):
            other.stored.create(key, self.stored.read(key))
        other.changes += self.changes
        other.first_digests |= self.first_digests
        other.created_at |= self.created_at

    def keys_at(self, moment: int) -> set[str]:
        """The keys that were stored after the first `moment` changes; names that are no keys are never listed."""
        found: set[str] = set()
        for key, is_there in self.changes[:moment]:
            if is_there and is_key(key):
                found.add(key)
            else:
                found.discard(key)
        return found


class FaultyStore:
    """An ObjectStore over a bucket, with the faults of a FaultSource."""

    def __init__(self, bucket: Bucket, fault_source: FaultSource) -> None:
        self._bucket = bucket
        self._fault_source = fault_source

    @property
    def url(self) -> str:
        """See ObjectStore."""
        return self._bucket.stored.url

    def expect_answers(self) -> None:
        """See ObjectStore. Its faults are those of calls."""

    def create(self, key: str, body: bytes) -> None:
        """See ObjectStore; but a put that was stored may be answered with 412, as if the client had retried it."""
        fault = self._before_effect(Call("create", key, CREATE_FAULTS))
        if fault in (Fault.LATE, Fault.LATE_CRASH):
            self._bucket.late.append(LatePut(key, body))
        elif fault is not Fault.LOST_NOT_STORED:
            try:
                self._bucket.put(key, body)
            except ObjectExistsError:
                if fault is not Fault.LOST_STORED:
                    self._after_effect(fault)
                    raise
        if fault in (Fault.LOST_STORED, Fault.LOST_NOT_STORED, Fault.LATE):
            raise AnswerLostError(url=self.url, key=key, reason=str(fault))
        if fault is Fault.TAKEN_BY_ITSELF:
            raise ObjectExistsError(url=self.url, key=key)
        self._after_effect(fault)

    def read(self, key: str) -> bytes:
        """See ObjectStore; but the body may be truncated, which a digest detects."""
        return self._ask_bytes("read", key, lambda: self._bucket.stored.read(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See `read`."""
        check_range(start, length)
        return self._ask_bytes("read", key, lambda: self._bucket.stored.read_range(key, start, length))

    def digest(self, key: str) -> str:
        """See `read`."""
        return digest(self.read(key))

    def size(self, key: str) -> int:
        """See ObjectStore."""
        return self._ask("size", key, lambda: self._bucket.stored.size(key))

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        return self._ask("exists", key, lambda: self._bucket.stored.exists(key))

    def list(self, prefix: str) -> Keys:
        """See ObjectStore; but the listing may be stale, and in any order."""
        folder = check_prefix(prefix)
        start = f"{folder}/" if folder else ""
        return self._ask_keys("list", folder, lambda keys: [key for key in keys if key.startswith(start)])

    def list_children(self, prefix: str) -> Keys:
        """See `list`."""
        folder = check_prefix(prefix)
        start = f"{folder}/" if folder else ""

        def children(keys: Keys) -> Keys:
            return list(dict.fromkeys(key[len(start) :].partition("/")[0] for key in keys if key.startswith(start)))

        return self._ask_keys("list", folder, children)

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        """See `list`; an object that was deleted since the listing is left out."""
        stored, created_at = self._bucket.stored, self._bucket.created_at
        keys = [key for key in self.list(prefix) if key > after and stored.exists(key)]
        return [Listed(key, stored.size(key), created_at[key]) for key in keys]

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        fault = self._before_effect(Call("delete", key, DELETE_FAULTS))
        if fault is Fault.REFUSED and self._bucket.stored.exists(key):
            raise DeletionRefusedError(url=self.url, key=key, reason="a lock keeps it")
        self._bucket.remove(key)
        if fault is Fault.LOST_DELETED:
            raise StoreUnreachableError(url=self.url, reason=str(fault))
        self._after_effect(fault)

    def unfinished(self) -> Leftovers:
        """See ObjectStore; a late put is not listed."""
        return []

    def abandon(self, leftover: Unfinished) -> None:
        """See ObjectStore."""

    def _ask(self, verb: str, key: str, ask: Callable[[], Answer]) -> Answer:
        fault = self._before_effect(Call(verb, key, COMMON_FAULTS))
        answer = ask()
        self._after_effect(fault)
        return answer

    def _ask_bytes(self, verb: str, key: str, ask: Callable[[], bytes]) -> bytes:
        fault = self._before_effect(Call(verb, key, READ_FAULTS))
        body = ask()
        if fault is Fault.TRUNCATED:
            return body[: self._fault_source.below(len(body))]
        self._after_effect(fault)
        return body

    def _ask_keys(self, verb: str, folder: str, chosen: Callable[[Keys], Keys]) -> Keys:
        fault = self._before_effect(Call(verb, folder, LIST_FAULTS))
        if fault is Fault.STALE:
            return chosen(sorted(self._bucket.keys_at(self._fault_source.below(len(self._bucket.changes) + 1))))
        found = chosen(self._bucket.stored.list(folder))
        if fault is Fault.REORDERED:
            middle = self._fault_source.below(len(found) + 1)
            return [*found[middle:], *found[:middle]]
        self._after_effect(fault)
        return found

    def _before_effect(self, call: Call) -> Fault | None:
        """Return the fault that the call meets; raise it if the call has no effect."""
        self._fault_source.before(call)
        fault = self._fault_source.fault(call)
        if fault is None:
            return None
        self._fault_source.record(fault, call)
        if fault in (Fault.CRASH_BEFORE, Fault.INTERRUPT_BEFORE):
            raise self._fault_source.exit_error(fault)
        if fault is Fault.UNREACHABLE:
            raise StoreUnreachableError(url=self.url, reason="it does not answer")
        if fault is Fault.THROTTLED:
            raise StoreUnreachableError(url=self.url, reason="503 SlowDown, and so at every retry")
        return fault

    def _after_effect(self, fault: Fault | None) -> None:
        """Raise a fault that comes after the call's effect and before its answer."""
        if fault in (Fault.CRASH_AFTER, Fault.INTERRUPT_AFTER, Fault.LATE_CRASH):
            raise self._fault_source.exit_error(fault)
