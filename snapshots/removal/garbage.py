"""What in a store is garbage: judged object by object, from what is read by key.

A listing only finds candidates. It is taken first; then the marks of the snapshot are read, then the restores that are
under way, then for each object its owner: the operation in its key (of a segment the chain, which is the operation
that took the full snapshot), its outcome, and last its commit. The order is what makes this safe beside a running
create, which stores its intent before any object, its commit after all of them and its outcome after that:

- an owner without an outcome and without a void is taken for live, and all that is its own is kept;
- one whose outcome was read before its commit was looked for has decided: it does not commit any more;
- a void, or another one's commit, under an owner's own commit key is there for good, whoever is still running;
- what a commit lists was stored before it, and a commit never changes. What it does not list is listed by none later,
  but for the segments after the last of a chain, with which the next increment begins;
- those are garbage only where no increment can follow: all earlier operations were settled before the chain was
  marked lost or pruned, and none begins after that. The mark is read first, then what is open, then the commits.

docs/storage.md, "Garbage", has the rules as a table. The grace period is on top of them: it is for what is outside of
the protocol, such as clocks and people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from snapshots.operations.deciding import key_of
from snapshots.operations.leases import open_leases
from snapshots.operations.open_operations import read_open_operations
from snapshots.operations.operation import read_recorded_commits
from snapshots.records.commit import Commit, Void
from snapshots.records.commits import find_place, increment_label, increment_numbers, read_chain, read_commit, read_turn
from snapshots.records.documents import ManifestError
from snapshots.records.keys import Kind, Place
from snapshots.records.lost_chains import is_lost, lost_key
from snapshots.records.operation_records import DONE, read_intent, read_outcome
from snapshots.records.tombstones import is_deleted, is_only_full
from storage.errors import RefusedError
from storage.store import Listed, ObjectMissingError, ObjectStore


class GarbageReason(StrEnum):
    """Why an object is garbage, or is none."""

    DELETED = "deleted"
    PRUNED = "pruned"
    FAILED = "failed"
    UNLISTED = "unlisted"
    LOST = "lost"
    LEFT_OVER = "left-over"
    OLD_RECORD = "old-record"
    NEEDED = "needed"
    NEXT = "next-increment"
    OPEN = "open-operation"
    IN_USE = "in-use"
    YOUNG = "young"
    UNCLEAR = "unclear"

    @property
    def is_garbage(self) -> bool:
        """Whether nothing needs it."""
        return self in GARBAGE


# Within this time of its checks a create has stored its intent, or it is not going on.
LOST_SECONDS = 3600.0
GARBAGE = frozenset(
    {
        GarbageReason.DELETED,
        GarbageReason.PRUNED,
        GarbageReason.FAILED,
        GarbageReason.UNLISTED,
        GarbageReason.LOST,
        GarbageReason.LEFT_OVER,
        GarbageReason.OLD_RECORD,
    }
)


@dataclass(frozen=True, slots=True)
class GarbageVerdict:
    """Why an object is garbage or kept, and where that is no rule of every day what was found."""

    why: GarbageReason
    text: str = ""


Judge = Callable[[str, Place], GarbageVerdict]
NEEDED = GarbageVerdict(GarbageReason.NEEDED)


class GarbageRules:
    """Judges the objects of one snapshot. Made after they were listed; what it has read once counts for all."""

    def __init__(self, store: ObjectStore, snapshot: str, listed: Iterable[Listed], now: datetime) -> None:
        self.store = store
        self.snapshot = snapshot
        self._lost = {
            one.key: one.created_at <= now - timedelta(seconds=LOST_SECONDS) for one in listed if "/lost/" in one.key
        }
        self.is_deleted = is_deleted(store, snapshot)
        self.is_only_full = is_only_full(store, snapshot)
        self._kept_by_restore = self._restores() if self.is_deleted or self.is_only_full else None
        self._owners: dict[str, Judge] = {}

    def judge(self, key: str, place: Place) -> GarbageVerdict:
        """Whether the object is garbage, its age left aside."""
        if self.is_deleted:
            return self._kept_by_restore or GarbageVerdict(GarbageReason.DELETED)
        if place.kind is Kind.MARK:
            return NEEDED
        if place.kind is Kind.COMMIT:
            # A void is needed like a commit: it is what keeps a late put away.
            return self._pruned() if place.number and self.is_only_full else NEEDED
        if place.owner not in self._owners:
            self._owners[place.owner] = self._owner(place.owner)
        return self._owners[place.owner](key, place)

    def _restores(self) -> GarbageVerdict | None:
        """What keeps the snapshot's objects although it is marked: a restore that began before."""
        try:
            running = [one for one in open_leases(self.store, self.snapshot) if one.is_running(datetime.now(UTC))]
        except ManifestError as error:
            return GarbageVerdict(GarbageReason.UNCLEAR, error.message)
        return (
            GarbageVerdict(GarbageReason.IN_USE, f"operation {running[0].operation.id} restores it")
            if running
            else None
        )

    def _pruned(self) -> GarbageVerdict:
        return self._kept_by_restore or GarbageVerdict(GarbageReason.PRUNED)

    def _owner(self, owner: str) -> Judge:
        """How the objects of an attempt or a chain are judged, by what became of its operation."""
        try:
            fate = create_outcome(self.store, self.snapshot, owner)
            if fate.commit is not None:
                return self._increment(fate.commit) if fate.commit.increment else self._committed(fate.commit)
        except RefusedError as error:
            fate = CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, error.message))
        return lambda _key, _place: fate.verdict

    def _committed(self, full: Commit) -> Judge:
        objects = full.object_sizes.keys()
        segment = self._segments(full)

        def judge(key: str, place: Place) -> GarbageVerdict:
            if key in objects:
                return NEEDED
            return segment(key, place) if place.kind is Kind.SEGMENT else GarbageVerdict(GarbageReason.UNLISTED)

        return judge

    def _increment(self, commit: Commit) -> Judge:
        """How the copies and the DDL of an increment are judged; its segments are the chain's."""
        objects = commit.object_sizes.keys()

        def judge(key: str, place: Place) -> GarbageVerdict:
            if place.kind is Kind.SEGMENT:
                return GarbageVerdict(GarbageReason.UNCLEAR, f"operation {place.owner} began no chain")
            if self.is_only_full:
                return self._pruned()
            return NEEDED if key in objects else GarbageVerdict(GarbageReason.UNLISTED)

        return judge

    def _segments(self, full: Commit) -> Judge:
        """How a chain's segments are judged that the full snapshot does not list."""
        if self.is_only_full:
            return lambda _key, _place: self._pruned()
        if is_lost(self.store, self.snapshot, full.operation):
            return self._lost_segments(full)
        last = _last_numbers(self.store, full)

        def judge(_key: str, place: Place) -> GarbageVerdict:
            return GarbageVerdict(GarbageReason.NEXT) if place.number > last.get(place.node, place.number) else NEEDED

        return judge

    def _lost_segments(self, full: Commit) -> Judge:
        """No increment follows, but those that there are count: all of them are read, and none may be missing."""
        # One that was about to begin when the mark came has its intent now.
        is_settled = self._lost.get(lost_key(self.snapshot, full.operation), False)
        open_here = [one.id for one in read_open_operations(self.store, self.snapshot)]
        chain = read_chain(self.store, self.snapshot)
        listed = {one.key: (one.node, one.number) for commit in chain.commits for one in _segments_of(commit)}
        last: dict[str, int] = {}
        for node, number in listed.values():
            last[node] = max(number, last.get(node, 0))
        gone = sorted(
            number
            for number in read_recorded_commits(self.store, full.operation).get(self.snapshot, {}).values()
            if number > chain.last.increment
        )

        def judge(key: str, place: Place) -> GarbageVerdict:
            if key in listed:
                return NEEDED
            if open_here:
                return GarbageVerdict(GarbageReason.OPEN, f"operation {open_here[0]} has no outcome")
            if gone:
                return GarbageVerdict(GarbageReason.UNCLEAR, f"the commit file of increment {gone[0]} is gone")
            if place.number <= last.get(place.node, 0):
                return GarbageVerdict(GarbageReason.UNCLEAR, "it stands between segments that are listed")
            return GarbageVerdict(GarbageReason.LOST if is_settled else GarbageReason.YOUNG)

        return judge


@dataclass(frozen=True, slots=True)
class CreateOutcome:
    """What became of the operation that owns objects: the verdict on all of them, or its commit, which tells."""

    verdict: GarbageVerdict
    commit: Commit | None = None


def create_outcome(store: ObjectStore, snapshot: str, owner: str) -> CreateOutcome:
    """What became of the operation `owner` of a create; raises ManifestError where that can't be read."""
    try:
        intent = read_intent(store, owner)
    except ObjectMissingError:
        return _without_intent(store, snapshot, owner)
    if (intent.kind, intent.snapshot) != ("create", snapshot):
        return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, f"operation {owner} was not to take this snapshot"))
    outcome = read_outcome(store, owner)
    key = key_of(intent)
    try:
        found = read_turn(store, key)
    except ObjectMissingError:
        if outcome is None:
            return CreateOutcome(GarbageVerdict(GarbageReason.OPEN, f"operation {owner} has no outcome"))
        if outcome.state == DONE:
            why = f"operation {owner} has committed, and its commit file {key} is gone"
            return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, why))
        return CreateOutcome(GarbageVerdict(GarbageReason.FAILED))
    if isinstance(found, Void) or found.operation != owner:
        return CreateOutcome(GarbageVerdict(GarbageReason.FAILED))
    return _committed((snapshot, intent.increment), key, found)


def _without_intent(store: ObjectStore, snapshot: str, owner: str) -> CreateOutcome:
    """Records go only after objects, so somebody removed this one by hand: only a commit tells of it."""
    place = find_place(store, snapshot, 0)
    if place.commit is not None and place.commit.operation == owner:
        return _committed((snapshot, 0), place.key, place.commit)
    return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, f"nothing is known of its operation {owner}"))


def _committed(expected: tuple[str, int], key: str, commit: Commit) -> CreateOutcome:
    if (commit.snapshot, commit.increment) != expected:
        why = f"object {key} is the commit of {increment_label(commit.snapshot, commit.increment)}"
        return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, why))
    return CreateOutcome(NEEDED, commit)


def _segments_of(commit: Commit) -> list[Any]:
    return [one for found in commit.segments.values() for one in found]


def _last_numbers(store: ObjectStore, full: Commit) -> dict[str, int]:
    """The last segment of each node that the chain lists, as far as its newest commit tells. All are kept anyway."""
    try:
        newest = max(increment_numbers(store, full.snapshot), default=0)
        commit = read_commit(store, full.snapshot, newest) if newest else full
    except RefusedError:
        return {}
    return {node: max(one.number for one in found) for node, found in commit.segments.items() if found}
