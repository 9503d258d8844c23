"""A store with faults for the simulation: every call may fail in every way that an object store's calls fail.

Below it is InMemoryStore, which says what is really there. Each process has a FaultyStore of its own, as its client;
all share one Weather, which draws the faults. Without faults it passes ObjectStoreContract.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple, TypeVar

from storage.digest import digest
from storage.memory import InMemoryStore
from storage.store import (
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
)

Answer = TypeVar("Answer")


class Fault(StrEnum):
    """What may happen to a call. A crash ends the process, an interrupt is Ctrl-C."""

    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"
    INTERRUPT_BEFORE = "interrupt before"
    INTERRUPT_AFTER = "interrupt after"
    UNREACHABLE = "unreachable"
    THROTTLED = "throttled"
    LOST_STORED = "answer lost, stored"
    LOST_NOT_STORED = "answer lost, not stored"
    LATE = "answer lost, stored later"
    LATE_CRASH = "crash, stored later"
    TAKEN_BY_ITSELF = "412 after its own retry"
    TRUNCATED = "truncated read"
    STALE = "stale listing"
    REORDERED = "reordered listing"
    REFUSED = "deletion refused"
    LOST_DELETED = "answer lost, deleted"


ANY = (
    Fault.CRASH_BEFORE,
    Fault.CRASH_AFTER,
    Fault.INTERRUPT_BEFORE,
    Fault.INTERRUPT_AFTER,
    Fault.UNREACHABLE,
    Fault.THROTTLED,
)
OF_CREATE = (
    *ANY,
    Fault.LOST_STORED,
    Fault.LOST_NOT_STORED,
    Fault.LATE,
    Fault.LATE_CRASH,
    Fault.TAKEN_BY_ITSELF,
)
OF_READ = (*ANY, Fault.TRUNCATED)
OF_LIST = (*ANY, Fault.STALE, Fault.REORDERED)
OF_DELETE = (*ANY, Fault.REFUSED, Fault.LOST_DELETED)


class Call(NamedTuple):
    """One call of a process, as the weather sees it."""

    verb: str
    key: str
    possible: tuple[Fault, ...]


@dataclass(slots=True)
class Late:
    """A put that is still under way, whatever has become of the process that sent it."""

    key: str
    body: bytes


@dataclass(slots=True)
class Bucket:
    """What is stored, and all that ever was: a stale listing is one of an earlier moment.

    `first` has the digest of every object as it was created: nobody may put another in its place.
    """

    stored: InMemoryStore = field(default_factory=lambda: InMemoryStore("memory://simulated"))
    log: list[tuple[str, bool]] = field(default_factory=list)
    first: dict[str, str] = field(default_factory=dict)
    created_at: dict[str, datetime] = field(default_factory=dict)
    late: list[Late] = field(default_factory=list)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def put(self, key: str, body: bytes) -> None:
        """Create the object; raises ObjectExistsError."""
        self.stored.create(key, body)
        self.log.append((key, True))
        self.first.setdefault(key, digest(body))
        self.created_at[key] = self.now()

    def remove(self, key: str) -> None:
        """Delete the object if it is there."""
        if self.stored.exists(key):
            self.stored.delete(key)
            self.log.append((key, False))
            self.first.pop(key, None)

    def arrive(self, late: Late) -> bool:
        """Let a put that was under way reach the store; whether it was stored."""
        self.late.remove(late)
        try:
            self.put(late.key, late.body)
        except ObjectExistsError:
            return False
        return True

    def copy_to(self, other: Bucket) -> None:
        """Put all that is and was here into an empty bucket. Puts under way are left out."""
        for key in self.stored.list(""):
            other.stored.create(key, self.stored.read(key))
        other.log += self.log
        other.first |= self.first
        other.created_at |= self.created_at

    def keys_at(self, moment: int) -> set[str]:
        """The keys that were there after the first `moment` changes."""
        found: set[str] = set()
        for key, is_there in self.log[:moment]:
            if is_there:
                found.add(key)
            else:
                found.discard(key)
        return found


class Weather:
    """Says what happens to each call. This one is fair: nothing does."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()

    def before(self, call: Call) -> None:
        """Called before every call; a schedule lets others run here, and kills who is dead."""

    def fault(self, call: Call) -> Fault | None:
        """What happens to the call."""
        return None

    def below(self, size: int) -> int:
        """A number from 0 up to below `size`: how much of a read is missing, how old a listing is."""
        return 0

    def end(self, fault: Fault) -> BaseException:
        """What a crash or an interrupt raises in the process."""
        return KeyboardInterrupt()

    def struck(self, fault: Fault, call: Call) -> None:
        """Told of every fault that the call had."""
        self.met[fault] += 1


class FaultyStore:
    """An ObjectStore over a bucket, in a weather."""

    def __init__(self, bucket: Bucket, weather: Weather) -> None:
        self._bucket = bucket
        self._weather = weather

    @property
    def url(self) -> str:
        """See ObjectStore."""
        return self._bucket.stored.url

    def create(self, key: str, body: bytes) -> None:
        """See ObjectStore; but a 412 may also be the answer to a retry of this very put, as on S3 without its care."""
        fault = self._begin(Call("create", key, OF_CREATE))
        if fault in (Fault.LATE, Fault.LATE_CRASH):
            self._bucket.late.append(Late(key, body))
        elif fault is not Fault.LOST_NOT_STORED:
            try:
                self._bucket.put(key, body)
            except ObjectExistsError:
                if fault is not Fault.LOST_STORED:
                    self._end(fault)
                    raise
        if fault in (Fault.LOST_STORED, Fault.LOST_NOT_STORED, Fault.LATE):
            raise AnswerLostError(url=self.url, key=key, reason=str(fault))
        if fault is Fault.TAKEN_BY_ITSELF:
            raise ObjectExistsError(url=self.url, key=key)
        self._end(fault)

    def read(self, key: str) -> bytes:
        """See ObjectStore; but a body may be cut short, for the digest to find."""
        return self._asked("read", key, lambda: self._bucket.stored.read(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See `read`."""
        check_range(start, length)
        return self._asked("read", key, lambda: self._bucket.stored.read_range(key, start, length))

    def digest(self, key: str) -> str:
        """See `read`."""
        return digest(self.read(key))

    def size(self, key: str) -> int:
        """See ObjectStore."""
        return self._simple("size", key, lambda: self._bucket.stored.size(key))

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        return self._simple("exists", key, lambda: self._bucket.stored.exists(key))

    def list(self, prefix: str) -> Keys:
        """See ObjectStore; but the listing may be of an earlier moment, and in any order."""
        folder = check_prefix(prefix)
        start = f"{folder}/" if folder else ""
        return self._listed("list", folder, lambda keys: [key for key in keys if key.startswith(start)])

    def list_children(self, prefix: str) -> Keys:
        """See `list`."""
        folder = check_prefix(prefix)
        start = f"{folder}/" if folder else ""

        def children(keys: Keys) -> Keys:
            return list(dict.fromkeys(key[len(start) :].partition("/")[0] for key in keys if key.startswith(start)))

        return self._listed("list", folder, children)

    def inventory(self, prefix: str) -> Inventory:
        """See `list`; an object that is gone since is left out."""
        stored, created_at = self._bucket.stored, self._bucket.created_at
        return [Listed(key, stored.size(key), created_at[key]) for key in self.list(prefix) if stored.exists(key)]

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        fault = self._begin(Call("delete", key, OF_DELETE))
        if fault is Fault.REFUSED and self._bucket.stored.exists(key):
            raise DeletionRefusedError(url=self.url, key=key, reason="a lock keeps it")
        self._bucket.remove(key)
        if fault is Fault.LOST_DELETED:
            raise StoreUnreachableError(url=self.url, reason=str(fault))
        self._end(fault)

    def unfinished(self) -> Leftovers:
        """See ObjectStore; a put that is under way shows nowhere."""
        return []

    def abandon(self, leftover: Unfinished) -> None:
        """See ObjectStore."""

    def _simple(self, verb: str, key: str, ask: Callable[[], Answer]) -> Answer:
        fault = self._begin(Call(verb, key, ANY))
        answer = ask()
        self._end(fault)
        return answer

    def _asked(self, verb: str, key: str, ask: Callable[[], bytes]) -> bytes:
        fault = self._begin(Call(verb, key, OF_READ))
        body = ask()
        if fault is Fault.TRUNCATED:
            return body[: self._weather.below(len(body))]
        self._end(fault)
        return body

    def _listed(self, verb: str, folder: str, chosen: Callable[[Keys], Keys]) -> Keys:
        fault = self._begin(Call(verb, folder, OF_LIST))
        if fault is Fault.STALE:
            return chosen(sorted(self._bucket.keys_at(self._weather.below(len(self._bucket.log) + 1))))
        found = chosen(self._bucket.stored.list(folder))
        if fault is Fault.REORDERED:
            middle = self._weather.below(len(found) + 1)
            return [*found[middle:], *found[:middle]]
        self._end(fault)
        return found

    def _begin(self, call: Call) -> Fault | None:
        """What happens to the call; raises what comes before it has any effect."""
        self._weather.before(call)
        fault = self._weather.fault(call)
        if fault is None:
            return None
        self._weather.struck(fault, call)
        if fault in (Fault.CRASH_BEFORE, Fault.INTERRUPT_BEFORE):
            raise self._weather.end(fault)
        if fault is Fault.UNREACHABLE:
            raise StoreUnreachableError(url=self.url, reason="it does not answer")
        if fault is Fault.THROTTLED:
            raise StoreUnreachableError(url=self.url, reason="503 SlowDown, and so at every retry")
        return fault

    def _end(self, fault: Fault | None) -> None:
        """Raise what comes after the call had its effect and before its answer is seen."""
        if fault in (Fault.CRASH_AFTER, Fault.INTERRUPT_AFTER, Fault.LATE_CRASH):
            raise self._weather.end(fault)
