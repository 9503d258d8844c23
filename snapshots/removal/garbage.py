"""The rules of garbage: judge each object of a snapshot from documents that are read by key.

A listing only finds candidates. The order of reading is: the listing; the marks of the snapshot; the running restores;
then, for each object, its owner's intent, its outcome, and last its commit. The owner is the operation in the object's
key; of a segment it is the chain, that is, the operation that took the full snapshot. This order is safe beside a
running create, which stores its intent before any object, its commit after all objects, and its outcome last:

- an owner without an outcome and without a void counts as running: all its objects are kept;
- an owner whose outcome was read before its commit was looked up has decided: it will not commit any more;
- a void, or the commit of another operation, under the owner's commit key is final, whatever is still running;
- the objects that a commit lists were stored before it, and a commit never changes. An object that it does not list is
  never listed later, except the segments after the last one of a chain: the next increment begins with those;
- those segments are garbage only if no increment can follow: all earlier operations were settled before the chain was
  marked as lost or pruned, and none begins after that. So the mark is read first, then open operations, then commits.

docs/storage.md, "Garbage", has the rules as a table. The grace period comes on top. It covers what is outside of the
protocol, such as clocks and people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from cutline.snapshots.operations.committing import key_of
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.object_lists import read_lists
from cutline.snapshots.operations.open_operations import RESTORE, read_open_operations, read_recorded_commits
from cutline.snapshots.records.chains import (
    find_place,
    increment_label,
    increment_numbers,
    read_chain,
    read_commit,
    read_turn,
)
from cutline.snapshots.records.commit import Commit, Void
from cutline.snapshots.records.documents import Kind, ManifestError, ParsedKey
from cutline.snapshots.records.lost_chains import is_lost, lost_key
from cutline.snapshots.records.operation_records import DONE, read_intent, read_outcome
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError
from cutline.storage.store import Listed, ObjectMissingError, ObjectStore


class GarbageReason(StrEnum):
    """Why an object is garbage, or why it is kept."""

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
        """Whether the object is garbage: nothing needs it."""
        return self in GARBAGE


# A create that still runs has stored its intent within this time of its checks.
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
    """Why an object is garbage or kept. `text` explains unusual cases."""

    why: GarbageReason
    text: str = ""


Judge = Callable[[str, ParsedKey], GarbageVerdict]
NEEDED = GarbageVerdict(GarbageReason.NEEDED)


class GarbageRules:
    """Judges the objects of one snapshot. Must be made after they were listed; reads each document once."""

    def __init__(self, store: ObjectStore, snapshot: str, listed: Iterable[Listed], now: datetime) -> None:
        self.store = store
        self.snapshot = snapshot
        self._lost = {
            one.key: one.created_at <= now - timedelta(seconds=LOST_SECONDS) for one in listed if "/lost/" in one.key
        }
        self.is_deleted = self.is_only_full = False
        self._unclear: GarbageVerdict | None = None
        try:
            self.is_deleted = is_deleted(store, snapshot)
            self.is_only_full = is_only_full(store, snapshot)
        except ManifestError as error:
            self._unclear = GarbageVerdict(GarbageReason.UNCLEAR, error.message)
        self._kept_by_restore = self._find_restore() if self.is_deleted or self.is_only_full else None
        self._owners: dict[str, Judge] = {}

    def judge(self, key: str, parsed: ParsedKey) -> GarbageVerdict:
        """Judge an object, regardless of its age."""
        if self.is_deleted:
            return self._kept_by_restore or GarbageVerdict(GarbageReason.DELETED)
        if self._unclear:
            return self._unclear
        if parsed.kind is Kind.MARK:
            return NEEDED
        if parsed.kind is Kind.COMMIT:
            # A void is needed as much as a commit: it makes a late put fail.
            return self._pruned_verdict() if parsed.number and self.is_only_full else NEEDED
        if parsed.owner not in self._owners:
            self._owners[parsed.owner] = self._judge_of_owner(parsed.owner)
        return self._owners[parsed.owner](key, parsed)

    def _find_restore(self) -> GarbageVerdict | None:
        """A restore that began before the snapshot was marked keeps its objects; None if there is none."""
        try:
            running = [one for one in open_leases(self.store, self.snapshot) if one.is_running(utc_now())]
        except ManifestError as error:
            return GarbageVerdict(GarbageReason.UNCLEAR, error.message)
        return (
            GarbageVerdict(GarbageReason.IN_USE, f"operation {running[0].operation.id} is restoring it")
            if running
            else None
        )

    def _pruned_verdict(self) -> GarbageVerdict:
        return self._kept_by_restore or GarbageVerdict(GarbageReason.PRUNED)

    def _judge_of_owner(self, owner: str) -> Judge:
        """The judge of the objects of an attempt or a chain, from the outcome of its operation."""
        try:
            outcome = create_outcome(self.store, self.snapshot, owner)
            if self.is_only_full and outcome.is_of_increment:
                # Its commit was removed first.
                return lambda _key, _parsed: self._pruned_verdict()
            if outcome.commit:
                commit = read_lists(self.store, outcome.commit)
                return self._judge_of_increment(commit) if commit.increment else self._judge_of_full(commit)
        except RefusedError as error:
            outcome = CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, error.message))
        return lambda _key, _parsed: outcome.verdict

    def _judge_of_full(self, full: Commit) -> Judge:
        objects = full.object_sizes.keys()
        judge_segment = self._judge_of_segments(full)

        def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
            if key in objects:
                return NEEDED
            return judge_segment(key, parsed) if parsed.kind is Kind.SEGMENT else GarbageVerdict(GarbageReason.UNLISTED)

        return judge

    def _judge_of_increment(self, commit: Commit) -> Judge:
        """The judge of an increment's base copies and DDL. Its segments belong to the chain."""
        objects = commit.object_sizes.keys()

        def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
            if parsed.kind is Kind.SEGMENT:
                return GarbageVerdict(GarbageReason.UNCLEAR, f"operation {parsed.owner} did not begin a chain")
            if self.is_only_full:
                return self._pruned_verdict()
            return NEEDED if key in objects else GarbageVerdict(GarbageReason.UNLISTED)

        return judge

    def _judge_of_segments(self, full: Commit) -> Judge:
        """The judge of those segments of a chain that its full snapshot does not list."""
        if self.is_only_full:
            return lambda _key, _parsed: self._pruned_verdict()
        if is_lost(self.store, self.snapshot, full.operation):
            return self._judge_of_lost_segments(full)
        last = _last_numbers(self.store, full)

        def judge(_key: str, parsed: ParsedKey) -> GarbageVerdict:
            return (
                GarbageVerdict(GarbageReason.NEXT) if parsed.number > last.get(parsed.node, parsed.number) else NEEDED
            )

        return judge

    def _judge_of_lost_segments(self, full: Commit) -> Judge:
        """The judge of a lost chain's segments. Its increments are final: all are read, and none may be missing."""
        # A create that was about to begin when the mark was stored has its intent by now.
        is_settled = self._lost.get(lost_key(self.snapshot, full.operation), False)
        # A restore needs only what commits list, and may stay unfinished for days.
        open_here = [
            one.id
            for one in read_open_operations(self.store, self.snapshot)
            if one.operation is None or one.operation.kind != RESTORE
        ]
        chain = read_chain(self.store, self.snapshot)
        listed = {one.key: (one.node, one.number) for commit in chain.commits for one in _segments_of(commit)}
        last: dict[str, int] = {}
        for node, number in listed.values():
            last[node] = max(number, last.get(node, 0))
        missing = sorted(
            number
            for number in read_recorded_commits(self.store, full.operation).get(self.snapshot, {}).values()
            if number > chain.last.increment
        )

        def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
            if key in listed:
                return NEEDED
            if open_here:
                return GarbageVerdict(GarbageReason.OPEN, f"operation {open_here[0]} has no outcome")
            if missing:
                return GarbageVerdict(GarbageReason.UNCLEAR, f"the commit file of increment {missing[0]} is gone")
            if parsed.number <= last.get(parsed.node, 0):
                return GarbageVerdict(GarbageReason.UNCLEAR, "it lies between segments that are listed")
            return GarbageVerdict(GarbageReason.LOST if is_settled else GarbageReason.YOUNG)

        return judge


@dataclass(frozen=True, slots=True)
class CreateOutcome:
    """How a create ended, for the objects it owns: a verdict on all of them, or its commit, which decides.

    `is_of_increment`: it has committed an increment, whose commit may be gone.
    """

    verdict: GarbageVerdict
    commit: Commit | None = None
    is_of_increment: bool = False


def create_outcome(store: ObjectStore, snapshot: str, owner: str) -> CreateOutcome:
    """How the create `owner` ended; raise ManifestError if its documents can't be read."""
    try:
        intent = read_intent(store, owner)
    except ObjectMissingError:
        return _without_intent(store, snapshot, owner)
    if (intent.kind, intent.snapshot) != ("create", snapshot):
        return CreateOutcome(
            GarbageVerdict(GarbageReason.UNCLEAR, f"operation {owner} is not a create of this snapshot")
        )
    outcome = read_outcome(store, owner)
    key = key_of(intent)
    try:
        commit = read_turn(store, key)
    except ObjectMissingError:
        if outcome is None:
            return CreateOutcome(GarbageVerdict(GarbageReason.OPEN, f"operation {owner} has no outcome"))
        if outcome.state == DONE:
            why = f"operation {owner} has committed, but its commit file {key} is gone"
            return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, why), is_of_increment=intent.increment > 0)
        return CreateOutcome(GarbageVerdict(GarbageReason.FAILED))
    if isinstance(commit, Void) or commit.operation != owner:
        return CreateOutcome(GarbageVerdict(GarbageReason.FAILED))
    return _outcome_of_commit((snapshot, intent.increment), key, commit)


def _without_intent(store: ObjectStore, snapshot: str, owner: str) -> CreateOutcome:
    """Judge by the commit alone. Records are removed after objects, so this one was deleted by hand."""
    place = find_place(store, snapshot, 0)
    if place.commit is not None and place.commit.operation == owner:
        return _outcome_of_commit((snapshot, 0), place.key, place.commit)
    return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, f"its operation {owner} has no record"))


def _outcome_of_commit(expected: tuple[str, int], key: str, commit: Commit) -> CreateOutcome:
    if (commit.snapshot, commit.increment) != expected:
        why = f"object {key} is the commit of {increment_label(commit.snapshot, commit.increment)}"
        return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, why))
    return CreateOutcome(NEEDED, commit)


def _segments_of(commit: Commit) -> list[Any]:
    return [one for segments in commit.segments.values() for one in segments]


def _last_numbers(store: ObjectStore, full: Commit) -> dict[str, int]:
    """The number of each node's last listed segment, from the newest commit.

    Only the verdict's reason depends on it: the segments are kept either way.
    """
    try:
        newest = max(increment_numbers(store, full.snapshot), default=0)
        commit = read_commit(store, full.snapshot, newest) if newest else full
    except RefusedError:
        return {}
    return {node: max(one.number for one in segments) for node, segments in commit.segments.items() if segments}
