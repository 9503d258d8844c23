"""Which objects in a snapshot are garbage: the rules, and the documents that decide.

A listing only finds candidates; each is judged by documents that are read by key. Everything is read in this order: the
listing; the marks of the snapshot; the running restores; then, for each object, its owner's intent, outcome, and
finally commit. The owner is the operation in the object's key; the owner of a segment is the chain, that is, the
operation that took the full snapshot. This order is safe while a create is running, because a create stores its intent
before any object, its commit after all objects, and its outcome last:

- An owner without an outcome and without a void counts as running, and all its objects are kept.
- An owner whose outcome was read before its commit was looked up is decided: it can no longer commit.
- A void, or the commit of a different operation, under the owner's commit key is final, even if the owner is still
  running.
- The objects that a commit lists were stored before it, and a commit never changes. An object that the commit does not
  list is never listed later, except for the segments after the last segment of a chain, which the next increment lists.
- Those segments are garbage only if no increment can follow: all earlier operations were settled before the chain was
  marked as ended or pruned, and no operation begins after that. So the mark is read first, then open operations, then
  commits.

docs/storage.md, "Garbage", contains the rules as a table. Nothing here changes the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from itertools import filterfalse
from typing import Any

from msgspec import Struct

from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.object_lists import read_lists, read_merge_lists
from cutline.snapshots.operations.open_operations import RESTORE, read_open_operations, read_recorded_commits
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, Increment, Void, listed_objects, parts_of_entries
from cutline.snapshots.records.documents import Kind, ManifestError, ParsedKey
from cutline.snapshots.records.end_marks import end_key, has_end
from cutline.snapshots.records.merge_records import Merge, first_increment, merge_key, read_merge_turn
from cutline.snapshots.records.operation_records import DONE, IN_STORE, MERGE, Intent, read_intent, read_outcome
from cutline.snapshots.records.proven_chains import (
    commit_key,
    find_place,
    increment_label,
    increment_numbers,
    read_chain,
    read_commit,
    read_full,
    read_turn,
)
from cutline.snapshots.records.repair_records import Repair, RepairTurn, read_repair, read_repairs
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.snapshots.removal.earlier_objects import EarlierObjects
from cutline.snapshots.removal.survey import of_increments
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError
from cutline.storage.store import Listed, ObjectMissingError, ObjectStore
from cutline.wal.segments.archive import Segment


class GarbageReason(StrEnum):
    """The reason why an object is garbage or is kept."""

    DELETED = "deleted"
    PRUNED = "pruned"
    FAILED = "failed"
    UNLISTED = "unlisted"
    ENDED = "ended"
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
        """Whether an object with this reason is garbage."""
        return self in GARBAGE


# A running create stores its intent within this time after its checks.
ENDED_SECONDS = 3600.0
GARBAGE = frozenset(
    {
        GarbageReason.DELETED,
        GarbageReason.PRUNED,
        GarbageReason.FAILED,
        GarbageReason.UNLISTED,
        GarbageReason.ENDED,
        GarbageReason.LEFT_OVER,
        GarbageReason.OLD_RECORD,
    }
)


class GarbageVerdict(Struct, frozen=True):
    """The verdict on an object. `text` explains unusual cases."""

    why: GarbageReason
    text: str = ""


Judge = Callable[[str, ParsedKey], GarbageVerdict]
NEEDED = GarbageVerdict(GarbageReason.NEEDED)


class GarbageRules:
    """Judges the objects in a snapshot. Must be created after the listing; reads each document once."""

    def __init__(self, store: ObjectStore, snapshot: str, listed: Iterable[Listed], now: datetime) -> None:
        self.store = store
        self.snapshot = snapshot
        self._settled = {
            entry.key: entry.created_at <= now - timedelta(seconds=ENDED_SECONDS)
            for entry in listed
            if "/ended/" in entry.key
        }
        self.is_deleted = self.is_only_full = False
        self._unclear: GarbageVerdict | None = None
        try:
            self.is_deleted = is_deleted(store, snapshot)
            self.is_only_full = is_only_full(store, snapshot)
        except ManifestError as error:
            self._unclear = GarbageVerdict(GarbageReason.UNCLEAR, error.message)
        self._first = 0 if self.is_deleted else first_increment(store, snapshot)
        is_removed = self.is_deleted or self.is_only_full or self._first
        self._kept_by_restore = self._find_restore() if is_removed else None
        self._owners: dict[str, Judge] = {}

    def judge(self, key: str, parsed: ParsedKey) -> GarbageVerdict:
        """Judge an object, regardless of its age."""
        verdict = self._judge(key, parsed)
        # If the lists of a full snapshot that was given up are gone, what it listed is unclear otherwise.
        may_be_earlier = verdict.why in (GarbageReason.NEEDED, GarbageReason.UNCLEAR) and not self._unclear
        if may_be_earlier and self._earlier is not None and self._earlier.has(key, parsed):
            return self._pruned_verdict()
        return verdict

    @cached_property
    def _earlier(self) -> EarlierObjects | None:
        """The objects before the beginning of the chain, if it begins at a merge for good and can be read."""
        if self._first and not self.is_only_full:
            with suppress(RefusedError):
                return EarlierObjects.of(self.store, self.snapshot, self._first)
        return None

    def _judge(self, key: str, parsed: ParsedKey) -> GarbageVerdict:
        if self.is_deleted:
            return self._kept_by_restore or GarbageVerdict(GarbageReason.DELETED)
        if self._unclear:
            return self._unclear
        # A void in the place of a repair or merge makes a late put fail. A pin whose release is gone would be in force
        # again.
        if parsed.kind in (Kind.MARK, Kind.REPAIR, Kind.MERGE, Kind.PIN):
            return NEEDED
        if parsed.kind is Kind.COMMIT:
            # A void is needed as much as a commit, because it makes a late put fail.
            return self._pruned_verdict() if parsed.number and self.is_only_full else NEEDED
        if parsed.owner not in self._owners:
            self._owners[parsed.owner] = self._judge_of_owner(parsed.owner)
        return self._owners[parsed.owner](key, parsed)

    def _find_restore(self) -> GarbageVerdict | None:
        """Return the verdict if a restore or repair that started before the mark keeps the objects, else None."""
        try:
            running = [lease for lease in open_leases(self.store, self.snapshot) if lease.is_running(utc_now())]
        except ManifestError as error:
            return GarbageVerdict(GarbageReason.UNCLEAR, error.message)
        return (
            GarbageVerdict(
                GarbageReason.IN_USE, f"in operation {running[0].operation.id}, it is being {running[0].what}"
            )
            if running
            else None
        )

    def _pruned_verdict(self) -> GarbageVerdict:
        return self._kept_by_restore or GarbageVerdict(GarbageReason.PRUNED)

    def _judge_of_owner(self, owner: str) -> Judge:
        """Return the judge for the objects of an attempt or a chain, according to the outcome of its operation."""
        try:
            if intent := read_intent_in_store(self.store, self.snapshot, owner):
                return self._judge_of_merge(intent) if intent.kind == MERGE else self._judge_of_repair(intent)
            outcome = create_outcome(self.store, self.snapshot, owner)
            if self.is_only_full and outcome.is_of_increment:
                # The commit was removed before the other objects of the increment.
                return lambda _key, _parsed: self._pruned_verdict()
            if outcome.commit:
                commit = read_lists(self.store, outcome.commit)
                return self._judge_of_increment(commit) if commit.increment else self._judge_of_full(commit)
        except RefusedError as error:
            outcome = CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, error.message))
        return lambda _key, _parsed: outcome.verdict

    def _judge_of_repair(self, intent: Intent) -> Judge:
        """Return the judge for the objects that a repair stored: those that its document names are needed.

        The outcome is read before the document. Objects stay even if a later repair replaces them again.
        """
        outcome = read_outcome(self.store, intent.operation)
        repair: RepairTurn | None = None
        with suppress(ObjectMissingError):
            if isinstance(intent.repair, int):
                repair = read_repair(self.store, self.snapshot, intent.repair)
        if repair is None and outcome is None:
            verdict = GarbageVerdict(GarbageReason.OPEN, f"operation {intent.operation} has no outcome")
            return lambda _key, _parsed: verdict
        if not isinstance(repair, Repair) or repair.operation != intent.operation:
            # In a second store that was repaired by itself, repairs of the first store have other numbers, or none: if
            # only merges list their objects.
            is_copied = outcome is not None and outcome.state == DONE
            verdict = NEEDED if is_copied else GarbageVerdict(GarbageReason.FAILED)
            return lambda _key, _parsed: verdict
        new = {entry.key for one in repair.replacements for entry in one.new}
        of_full = set[str]()
        if self.is_only_full:
            full, repairs = read_commit(self.store, self.snapshot, 0), read_repairs(self.store, self.snapshot)
            of_full = set(filterfalse(of_increments(full, repairs), new))

        def judge(key: str, _parsed: ParsedKey) -> GarbageVerdict:
            if key not in new:
                return GarbageVerdict(GarbageReason.UNLISTED)
            return self._pruned_verdict() if self.is_only_full and key not in of_full else NEEDED

        return judge

    def _judge_of_merge(self, intent: Intent) -> Judge:
        """Return the judge for the objects that a merge stored: those that its document lists are needed.

        The outcome is read before the document.
        """
        has_ended = read_outcome(self.store, intent.operation) is not None
        turn: Merge | Void | None = None
        with suppress(ObjectMissingError):
            turn = read_merge_turn(self.store, merge_key(self.snapshot, intent.increment, intent.turn))
        if turn is None and not has_ended:
            verdict = GarbageVerdict(GarbageReason.OPEN, f"operation {intent.operation} has no outcome")
            return lambda _key, _parsed: verdict
        if not isinstance(turn, Merge) or turn.operation != intent.operation:
            return lambda _key, _parsed: GarbageVerdict(GarbageReason.FAILED)
        if self.is_only_full:
            return lambda _key, _parsed: self._pruned_verdict()
        merged = read_merge_lists(self.store, turn)
        objects = {entry.key for entry in parts_of_entries(turn.entries)}.union(
            key for one in merged for stored in listed_objects(one) for key in stored.keys
        )
        return lambda key, _parsed: NEEDED if key in objects else GarbageVerdict(GarbageReason.UNLISTED)

    def _judge_of_full(self, full: Commit) -> Judge:
        objects = full.object_sizes.keys()
        judge_segment = self._judge_of_segments(full)

        def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
            if key in objects:
                return NEEDED
            return judge_segment(key, parsed) if parsed.kind is Kind.SEGMENT else GarbageVerdict(GarbageReason.UNLISTED)

        return judge

    def _judge_of_increment(self, commit: Commit) -> Judge:
        """Return the judge for an increment's base copies and DDL, and for the archives that it began.

        Its other segments belong to archives that began earlier.
        """
        objects = commit.object_sizes.keys()
        renewed = commit.renewed if isinstance(commit, Increment) else {}
        began = any(copying.operation == commit.operation for copying in commit.copying.values())
        if began and isinstance(commit, Increment):
            return self._judge_of_background(commit)
        judge_segment = self._judge_of_segments(read_full(self.store, self.snapshot)) if renewed else None

        def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
            if parsed.kind is Kind.SEGMENT:
                if judge_segment is not None and parsed.node in renewed:
                    return judge_segment(key, parsed)
                # The increment began an archive of a standby, and was committed without it.
                return GarbageVerdict(GarbageReason.UNLISTED)
            if self.is_only_full:
                return self._pruned_verdict()
            return NEEDED if key in objects else GarbageVerdict(GarbageReason.UNLISTED)

        return judge

    def _judge_of_background(self, commit: Increment) -> Judge:
        """Return the judge for an increment that began to copy standbys in the background of later increments.

        Of such a copy, everything is in use while the newest commit names it and can be continued. The increment with
        which it is complete lists what belongs to it; its steps are needed no more.
        """
        if self.is_only_full:
            return lambda _key, _parsed: self._pruned_verdict()
        full, operation = read_full(self.store, self.snapshot), commit.operation
        ended = self._read_ended(full)
        chain = ended.chain if ended else read_chain(self.store, self.snapshot)
        completed = {node for one in chain.increments for node, new in one.renewed.items() if new.began_by == operation}
        objects = set(commit.object_sizes)
        for one in chain.increments:
            if any(renewal.began_by == operation for renewal in one.renewed.values()):
                objects |= read_lists(self.store, one).object_sizes.keys()
        in_use = {node for node, copying in chain.copying.items() if copying.operation == operation}
        of_copy = ended.verdict if ended else GarbageVerdict(GarbageReason.NEXT)
        judge_segment = self._judge_of_segments(full)

        def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
            if parsed.kind is Kind.SEGMENT and parsed.node in (*completed, *commit.renewed):
                return judge_segment(key, parsed)
            if key in objects:
                return NEEDED
            is_in_use = parsed.node in in_use and parsed.kind is not Kind.SCHEMA
            return of_copy if is_in_use else GarbageVerdict(GarbageReason.UNLISTED)

        return judge

    def _judge_of_segments(self, full: Commit) -> Judge:
        """Return the judge for those segments in a chain that its full snapshot does not list."""
        if self.is_only_full:
            return lambda _key, _parsed: self._pruned_verdict()
        if ended := self._read_ended(full):
            return _judge_of_ended_segments(ended)
        last = _last_segments(self.store, full)

        def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
            newest = last.get(parsed.node)
            # The node may have earlier archives, each with its own numbers: nothing continues those.
            is_next = (
                newest is not None and _archive_of(key) == _archive_of(newest.key) and parsed.number > newest.number
            )
            return GarbageVerdict(GarbageReason.NEXT) if is_next else NEEDED

        return judge

    def _read_ended(self, full: Commit) -> _EndedChain | None:
        """Read a chain that has ended; None if it has not. Its increments are final, and none may be missing."""
        # The mark is read first, then open operations, and then commits.
        if not has_end(self.store, self.snapshot, full.operation):
            return None
        # A create that was about to begin when the mark was stored has stored its intent by now.
        is_settled = self._settled.get(end_key(self.snapshot, full.operation), False)
        # A restore needs only what commits list, and may stay unfinished for days.
        open_here = [
            open_operation.id
            for open_operation in read_open_operations(self.store, self.snapshot)
            if open_operation.operation is None or open_operation.operation.kind != RESTORE
        ]
        chain = read_chain(self.store, self.snapshot)
        missing = sorted(
            number
            for number in read_recorded_commits(self.store, full.operation).get(self.snapshot, {}).values()
            if number > chain.last.increment
        )
        verdict = GarbageVerdict(GarbageReason.ENDED if is_settled else GarbageReason.YOUNG)
        if open_here:
            verdict = GarbageVerdict(GarbageReason.OPEN, f"operation {open_here[0]} has no outcome")
        elif missing:
            verdict = GarbageVerdict(GarbageReason.UNCLEAR, f"the commit file of increment {missing[0]} is missing")
        return _EndedChain(chain, verdict)


class _EndedChain(Struct, frozen=True):
    """A chain that has ended, and the verdict on what only a later increment could have listed."""

    chain: Chain
    verdict: GarbageVerdict


def _judge_of_ended_segments(ended: _EndedChain) -> Judge:
    """Return the judge for an ended chain's segments."""
    chain, verdict = ended.chain, ended.verdict
    segments = [segment for commit in chain.commits for segment in _segments_of(commit)]
    # A segment that a repair has replaced stays where it is.
    segments += [chain.original(segment) for segment in segments]
    listed = {segment.key: segment.number for segment in segments}
    last: dict[str, int] = {}
    for key, number in listed.items():
        archive = _archive_of(key)
        last[archive] = max(number, last.get(archive, 0))

    def judge(key: str, parsed: ParsedKey) -> GarbageVerdict:
        if key in listed:
            return NEEDED
        is_decided = verdict.why in (GarbageReason.ENDED, GarbageReason.YOUNG)
        if is_decided and parsed.number <= last.get(_archive_of(key), 0):
            return GarbageVerdict(GarbageReason.UNCLEAR, "it lies between listed segments")
        return verdict

    return judge


def read_intent_in_store(store: ObjectStore, snapshot: str, owner: str) -> Intent | None:
    """Return the intent of `owner` if it is a repair or merge of the snapshot; otherwise None. Raises ManifestError."""
    try:
        intent = read_intent(store, owner)
    except ObjectMissingError:
        return None
    return intent if intent.kind in IN_STORE and intent.snapshot == snapshot else None


class CreateOutcome(Struct, frozen=True):
    """The outcome of a create for the objects that it owns: a verdict on all of them, or the commit that decides.

    `is_of_increment` is set if the create has committed an increment, whose commit may be gone.
    """

    verdict: GarbageVerdict
    commit: Commit | None = None
    is_of_increment: bool = False


def create_outcome(store: ObjectStore, snapshot: str, owner: str) -> CreateOutcome:
    """Read the outcome of the create `owner`; raise ManifestError if its documents can't be read."""
    try:
        intent = read_intent(store, owner)
    except ObjectMissingError:
        return _without_intent(store, snapshot, owner)
    if (intent.kind, intent.snapshot) != ("create", snapshot):
        return CreateOutcome(
            GarbageVerdict(GarbageReason.UNCLEAR, f"operation {owner} is not a create of this snapshot")
        )
    outcome = read_outcome(store, owner)
    key = commit_key(intent.snapshot, intent.increment, intent.turn)
    try:
        commit = read_turn(store, key)
    except ObjectMissingError:
        if outcome is None:
            return CreateOutcome(GarbageVerdict(GarbageReason.OPEN, f"operation {owner} has no outcome"))
        if outcome.state == DONE:
            why = f"operation {owner} has committed, but its commit file {key} is missing"
            return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, why), is_of_increment=intent.increment > 0)
        return CreateOutcome(GarbageVerdict(GarbageReason.FAILED))
    if isinstance(commit, Void) or commit.operation != owner:
        return CreateOutcome(GarbageVerdict(GarbageReason.FAILED))
    return _outcome_of_commit((snapshot, intent.increment), key, commit)


def _without_intent(store: ObjectStore, snapshot: str, owner: str) -> CreateOutcome:
    """Judge by the commit: the idle increment's if the outcome names one, otherwise the full snapshot's.

    gc removes records after objects, so any other missing intent was deleted by hand.
    """
    outcome = read_outcome(store, owner)
    number = outcome.increment if outcome is not None and isinstance(outcome.increment, int) else 0
    place = find_place(store, snapshot, number)
    if place.commit is not None and place.commit.operation == owner:
        return _outcome_of_commit((snapshot, number), place.key, place.commit)
    return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, f"there is no record of its operation {owner}"))


def _outcome_of_commit(expected: tuple[str, int], key: str, commit: Commit) -> CreateOutcome:
    if (commit.snapshot, commit.increment) != expected:
        why = f"object {key} is the commit of {increment_label(commit.snapshot, commit.increment)}"
        return CreateOutcome(GarbageVerdict(GarbageReason.UNCLEAR, why))
    return CreateOutcome(NEEDED, commit)


def _segments_of(commit: Commit) -> list[Any]:
    return [segment for segments in commit.segments.values() for segment in segments]


def _archive_of(key: str) -> str:
    return key.rpartition("/")[0]


def _last_segments(store: ObjectStore, full: Commit) -> dict[str, Segment]:
    """Return each node's last listed segment, from the newest commit.

    Only the reason for the verdict depends on it: the segments are kept in any case.
    """
    try:
        newest = max(increment_numbers(store, full.snapshot), default=0)
        commit = read_commit(store, full.snapshot, newest) if newest else full
    except RefusedError:
        return {}
    idle = {node: last for node in commit.segments if (last := commit.end_of_archive(node)) is not None}
    return idle | {node: segments[-1] for node, segments in commit.segments.items() if segments}
