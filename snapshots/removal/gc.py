"""The `gc` command: find objects that nothing needs, and remove them.

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
  marked as lost or pruned, and no operation begins after that. So the mark is read first, then open operations, then
  commits.

docs/storage.md, "Garbage", contains the rules as a table. The grace period is additional protection against causes
outside the protocol, such as wrong clocks and human errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cached_property
from itertools import chain, filterfalse, groupby, islice
from typing import Any, NamedTuple

from msgspec import UnsetType

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.nodes.clocks import note_clocks
from cutline.nodes.lock import FleetBusyError
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.ended_operations import REMOVAL_READ_MAX, reach_of, read_checks, standing_check
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.object_lists import read_lists, read_merge_lists
from cutline.snapshots.operations.open_operations import (
    RESTORE,
    OpenOperation,
    document_names,
    read_open_operations,
    read_recorded_commits,
)
from cutline.snapshots.operations.operation import exclusive, record_outcome
from cutline.snapshots.operations.settling import settle_in_store, settle_operations
from cutline.snapshots.operations.signs import request_numbers, sign_numbers
from cutline.snapshots.records.commit import Commit, Increment, Void, listed_objects
from cutline.snapshots.records.documents import Kind, ManifestError, ParsedKey, parse_key
from cutline.snapshots.records.lost_chains import is_lost, lost_key
from cutline.snapshots.records.merge_records import Merge, first_increment, merge_key, read_merge_turn
from cutline.snapshots.records.operation_records import (
    CREATE,
    DONE,
    IDLE_OUTCOME,
    IN_STORE,
    MERGE,
    OUTCOMES,
    Intent,
    read_any_outcome,
    read_intent,
    read_outcome,
)
from cutline.snapshots.records.proven_chains import (
    NAME,
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
from cutline.snapshots.records.store_identity import FLEET_KEY, is_copy, read_identity
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.snapshots.records.unfinished_records import is_copy_record
from cutline.snapshots.removal.deletion import open_removals
from cutline.snapshots.removal.earlier_objects import EarlierObjects
from cutline.snapshots.removal.survey import SizeTotal, of_increments
from cutline.storage.clock import machine_now, utc_now
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError
from cutline.storage.ids import OPERATION_ID
from cutline.storage.probe import PROBES
from cutline.storage.store import (
    DeletionRefusedError,
    Listed,
    ObjectMissingError,
    ObjectStore,
    Unfinished,
)


class GarbageReason(StrEnum):
    """The reason why an object is garbage or is kept."""

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
        """Whether an object with this reason is garbage."""
        return self in GARBAGE


# A running create stores its intent within this time after its checks.
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
        self._lost = {
            entry.key: entry.created_at <= now - timedelta(seconds=LOST_SECONDS)
            for entry in listed
            if "/lost/" in entry.key
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
        objects = {entry.key for entry in turn.entries}.union(
            stored.key for one in merged for stored in listed_objects(one)
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

    def _judge_of_segments(self, full: Commit) -> Judge:
        """Return the judge for those segments in a chain that its full snapshot does not list."""
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
        """Return the judge for a lost chain's segments. The chain's increments are final, and none may be missing."""
        # A create that was about to begin when the mark was stored has stored its intent by now.
        is_settled = self._lost.get(lost_key(self.snapshot, full.operation), False)
        # A restore needs only what commits list, and may stay unfinished for days.
        open_here = [
            open_operation.id
            for open_operation in read_open_operations(self.store, self.snapshot)
            if open_operation.operation is None or open_operation.operation.kind != RESTORE
        ]
        chain = read_chain(self.store, self.snapshot)
        segments = [segment for commit in chain.commits for segment in _segments_of(commit)]
        # A segment that a repair has replaced stays where it is.
        segments += [chain.original(segment) for segment in segments]
        listed = {segment.key: segment.number for segment in segments}
        last: dict[str, int] = {}
        for key, number in listed.items():
            archive = key.rpartition("/")[0]
            last[archive] = max(number, last.get(archive, 0))
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
                return GarbageVerdict(GarbageReason.UNCLEAR, f"the commit file of increment {missing[0]} is missing")
            if parsed.number <= last.get(key.rpartition("/")[0], 0):
                return GarbageVerdict(GarbageReason.UNCLEAR, "it lies between listed segments")
            return GarbageVerdict(GarbageReason.LOST if is_settled else GarbageReason.YOUNG)

        return judge


def read_intent_in_store(store: ObjectStore, snapshot: str, owner: str) -> Intent | None:
    """Return the intent of `owner` if it is a repair or merge of the snapshot; otherwise None. Raises ManifestError."""
    try:
        intent = read_intent(store, owner)
    except ObjectMissingError:
        return None
    return intent if intent.kind in IN_STORE and intent.snapshot == snapshot else None


@dataclass(frozen=True, slots=True)
class CreateOutcome:
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


def _last_numbers(store: ObjectStore, full: Commit) -> dict[str, int]:
    """Return the number of each node's last listed segment, from the newest commit.

    Only the reason for the verdict depends on the number: the segments are kept in any case.
    """
    try:
        newest = max(increment_numbers(store, full.snapshot), default=0)
        commit = read_commit(store, full.snapshot, newest) if newest else full
    except RefusedError:
        return {}
    idle = {node: last.number for node in commit.segments if (last := commit.end_of_archive(node)) is not None}
    return idle | {node: segments[-1].number for node, segments in commit.segments.items() if segments}


@dataclass(frozen=True, slots=True)
class Garbage:
    """Garbage to remove: `objects`, deleted in this order, or `leftover`, an unfinished upload."""

    kind: Kind
    why: GarbageReason
    objects: tuple[Listed, ...]
    snapshot: str = ""
    operation: str = ""
    leftover: Unfinished | None = None

    @property
    def sizes(self) -> list[int]:
        """The size in bytes of each object or upload."""
        sizes = [stored_object.size for stored_object in self.objects]
        return [*sizes, self.leftover.size_bytes] if self.leftover else sizes


@dataclass(frozen=True, slots=True)
class RefusedRemoval:
    """An object that the store refused to delete, and the reason."""

    key: str
    reason: str


class KeptKey(NamedTuple):
    """The key for counting kept objects; `snapshot` is "" for objects of no snapshot."""

    snapshot: str
    reason: GarbageReason
    text: str


@dataclass(slots=True)
class GcReport:
    """The findings and the result of gc. `kept` counts all objects that are not removed, including needed objects.

    `unsettled` is the reason why earlier operations were not settled first, "" if they were. `unknown` lists
    entries of other programs: objects, and folders, which end with a slash.
    """

    grace_seconds: float
    is_dry: bool = False
    unsettled: str = ""
    garbage: list[Garbage] = field(default_factory=list)
    kept: dict[KeptKey, SizeTotal] = field(default_factory=dict)
    open_operations: tuple[OpenOperation, ...] = ()
    unknown: list[str] = field(default_factory=list)
    refused: list[RefusedRemoval] = field(default_factory=list)
    removed: SizeTotal = field(default_factory=SizeTotal)

    def keep(self, snapshot: str, verdict: GarbageVerdict, size_bytes: int) -> None:
        """Count an object that is kept."""
        self.kept.setdefault(KeptKey(snapshot, verdict.why, verdict.text), SizeTotal()).add(size_bytes)


RECORD_SECONDS = 30 * 86400.0
# Of how many of a chain's newest increments the records stay: if several commits at its end are lost, nothing else
# shows that they existed.
RECORDED_MIN = 16
# The age after which objects from a probe are garbage: a probe takes seconds.
PROBE_SECONDS = 3600.0
# The age after which signs of life are garbage: a process stores one every few seconds.
SIGN_SECONDS = 86400.0
PROBE = re.compile(rf"{PROBES}/{OPERATION_ID.pattern}/(read|(put|parts)-(once|raced-\d))")
INTENT = "intent.json"
ASKING_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class RecordFolder:
    """A folder in `operations` with objects in the order of removal; `verdict` is None if it is not Cutline's."""

    folder: str
    objects: tuple[Listed, ...]
    verdict: GarbageVerdict | None


def judge_probe(listed: Listed, now: datetime) -> GarbageVerdict | None:
    """Judge an object from a probe by its age alone; return None if the object is not Cutline's."""
    if not PROBE.fullmatch(listed.key):
        return None
    is_over = listed.created_at <= now - timedelta(seconds=PROBE_SECONDS)
    return GarbageVerdict(GarbageReason.LEFT_OVER if is_over else GarbageReason.YOUNG)


@dataclass(frozen=True, slots=True)
class RecordJudge:
    """Judges the records of operations.

    `owners` are the operations that own objects; `unfinished` are the snapshots whose removal has no outcome.

    The record of a commit shows `check` that the commit should exist. A later commit of the same chain shows it, too:
    it names the digest of the commit before it.
    """

    store: ObjectStore
    owners: Set[str]
    unfinished: Set[str]
    now: datetime
    _removed: dict[tuple[str, bool], bool] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def judge(self, listed: Iterable[Listed]) -> list[RecordFolder]:
        """Judge every listed folder in `operations`."""
        folders = [
            (folder, tuple(group)) for folder, group in groupby(listed, key=lambda entry: entry.key.split("/", 2)[1])
        ]
        with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
            record_folders = list(chain.from_iterable(threads.map(lambda folder: self._judge_folder(*folder), folders)))
        old, needed = GarbageVerdict(GarbageReason.OLD_RECORD), GarbageVerdict(GarbageReason.NEEDED)
        standing = self._standing_checks() if self._checked else set()
        return [
            replace(record_folder, verdict=needed)
            if record_folder.verdict == old and record_folder.folder in standing
            else record_folder
            for record_folder in record_folders
        ]

    def _judge_folder(self, folder: str, listed: tuple[Listed, ...]) -> list[RecordFolder]:
        objects = tuple(sorted(listed, key=_removal_order))
        if not OPERATION_ID.fullmatch(folder):
            return [RecordFolder(folder, objects, None)]
        names = {stored_object: stored_object.key.split("/", 2)[2] for stored_object in objects}
        # A request without an operation is garbage, because no process answers it. An idle increment's intent that its
        # process did not delete is garbage too, and so is what a base copy stored in order to be resumed.
        is_alone = not {INTENT, *OUTCOMES} & set(names.values())
        is_idle = IDLE_OUTCOME in names.values()
        signs = tuple(
            stored_object
            for stored_object in objects
            if sign_numbers([names[stored_object]])
            or is_copy_record(names[stored_object])
            or (is_alone and request_numbers([names[stored_object]]))
            or (is_idle and names[stored_object] == INTENT)
        )
        others = tuple(stored_object for stored_object in objects if stored_object not in signs)
        folders = [RecordFolder(folder, others, self._verdict(folder, others[-1], names.values()))] if others else []
        if signs:
            is_open = INTENT in names.values() and OUTCOMES.isdisjoint(names.values())
            newest = max(stored_object.created_at for stored_object in objects)
            is_over = not is_open and newest <= self.now - timedelta(seconds=SIGN_SECONDS)
            why = GarbageReason.LEFT_OVER if is_over else GarbageReason.NEEDED
            folders.append(RecordFolder(folder, signs, GarbageVerdict(why)))
        return folders

    def _verdict(self, operation: str, last: Listed, names: Iterable[str]) -> GarbageVerdict:
        is_closed = last.key.rpartition("/")[2] in OUTCOMES
        if operation in self.owners or not is_closed or last.created_at > self.now - timedelta(seconds=RECORD_SECONDS):
            return GarbageVerdict(GarbageReason.NEEDED)
        try:
            outcome = read_any_outcome(self.store, operation, names)
        except ManifestError:
            outcome = None
        if outcome is None or not isinstance(outcome.snapshot, str):
            return GarbageVerdict(GarbageReason.UNCLEAR, f"the outcome of operation {operation} can't be read")
        has_committed = outcome.kind == CREATE and outcome.state == DONE
        if has_committed and not self._is_removed(outcome.snapshot, is_full=outcome.increment == 0):
            number, newest = outcome.increment, self._newest_increment(outcome.snapshot)
            if not isinstance(number, int) or not 0 < number <= newest - RECORDED_MIN:
                return GarbageVerdict(GarbageReason.NEEDED)
        checked = () if isinstance(outcome.checked, UnsetType) else outcome.checked
        self._checked.update(point.snapshot for point in checked if not self._is_removed(point.snapshot, is_full=True))
        return GarbageVerdict(GarbageReason.OLD_RECORD)

    def _standing_checks(self) -> set[str]:
        """For snapshots with an old record of a check, return the checks among those that prune reads that still count.

        These are the standing checks, and of those that later checks may rest on, the newest and the furthest.
        """
        found = read_checks(self.store, document_names(self.store), count_max=REMOVAL_READ_MAX)
        checks, resting = found.by_snapshot, found.resting
        of_each = (checks[name] for name in self._checked if name in checks)
        # If the increments have been pruned since, only the standing check of the full snapshot counts.
        counts = (
            (of_snapshot, {1, max(check.point.increment for check in of_snapshot) + 1}) for of_snapshot in of_each
        )
        standing = (standing_check(of_snapshot, count) for of_snapshot, some in counts for count in some)
        rested_on = {resting[name].operation for name in self._checked if name in resting}
        # `list` shows the record that has read most increments.
        records = (
            [one for one in checks[name] if one.point.oldest_read_at is not None]
            for name in self._checked
            if name in checks
        )
        furthest = [max(some, key=reach_of) for some in records if some]
        rested_on |= {check.operation for check in furthest}
        return rested_on | {check.operation for check in standing if check is not None}

    def _newest_increment(self, snapshot: str) -> int:
        """Return the number of the snapshot's newest increment; 0 if it can't be told, or is about to be removed."""
        if snapshot in self.unfinished:
            return 0
        if snapshot not in self._newest:
            try:
                self._newest[snapshot] = max(increment_numbers(self.store, snapshot), default=0)
            except ManifestError:
                self._newest[snapshot] = 0
        return self._newest[snapshot]

    def _is_removed(self, snapshot: str, *, is_full: bool) -> bool:
        """Whether the removal of the committed snapshot, or of the committed increment, is finished."""
        if snapshot in self.unfinished:
            return False
        key = (snapshot, is_full)
        if key not in self._removed:
            try:
                removed = is_deleted(self.store, snapshot) or (not is_full and is_only_full(self.store, snapshot))
            except ManifestError:
                removed = False
            self._removed[key] = removed
        return self._removed[key]


def _removal_order(entry: Listed) -> tuple[int, str]:
    name = entry.key.split("/", 2)[-1]
    return (0 if name == INTENT else 2 if name in OUTCOMES else 1), name


THREADS_MAX = 16
# The number of removals submitted at once; an interrupt waits for them.
BATCH = 256
# The age margin for unfinished uploads with an unknown key: longer than any put, even if clocks differ.
UNNAMED_SECONDS = 3600.0
# How long after the end of its lease a restore may still be resumed.
RESUMABLE_SECONDS = 7 * 86400.0
OPERATIONS, SNAPSHOTS = "operations", "snapshots"
# Objects that are never removed.
PERMANENT = {
    "baselines": re.compile(r"baselines/\d{16}\.json"),
    "deleted": re.compile(rf"deleted/{NAME.pattern}\.json"),
    "keys": re.compile(r"keys/\d{16}\.json"),
}


def collect_garbage(fleet: Fleet, grace_seconds: float, progress: Progress) -> GcReport:
    """Find and remove the objects that no commit needs and no running operation uses.

    The report lists objects that the store refuses to delete; the rest is removed anyway. If earlier operations can't
    be settled, because a node can't be reached or the store is full, their objects stay. Raises StoreUnreachableError,
    and UndecidedError if the store's answers do not show whether an earlier operation committed.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    unsettled = _settle(store, fleet, progress)
    report = find_garbage(store, grace_seconds, progress)
    report.unsettled = unsettled
    remove_garbage(store, report, progress)
    return report


def preview_garbage(fleet: Fleet, grace_seconds: float, progress: Progress) -> GcReport:
    """Reading only the store, find the garbage that `collect_garbage` would remove now.

    The preview settles no operations, so a run may remove more. Raises StoreUnreachableError.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    report = find_garbage(store, grace_seconds, progress)
    report.is_dry = True
    return report


def find_garbage(store: ObjectStore, grace_seconds: float, progress: Progress) -> GcReport:
    """Search the whole store for garbage, changing nothing."""
    report = GcReport(grace_seconds)
    _GarbageSearch(store, report, progress).run()
    return report


def _settle(store: ObjectStore, fleet: Fleet, progress: Progress) -> str:
    """Settle open operations if the fleet's lock is free; return the reason if they were not settled, else "".

    In a copy, repairs and merges are settled by this machine's clock, because nodes need not exist: at worst, one that
    still runs fails.
    """
    progress.step("settle earlier operations")
    try:
        leases = open_leases(store)
        is_time_known, is_of_copy = False, is_copy(store)
        # The servers of a copy's fleet file need not exist.
        if any(lease.operation.kind == RESTORE or not is_of_copy for lease in leases):
            with suppress(SnapshotError), open_sessions(fleet, fleet.primaries) as sessions:
                note_clocks(sessions.clocks, progress)
                is_time_known = True
        for lease in leases:
            if lease.operation.kind in IN_STORE:
                if is_time_known or is_of_copy:
                    settle_in_store(store, lease.operation, progress)
                continue
            # Until then, the restore can be resumed and `list` shows it. This machine's clock alone is not trusted.
            if is_time_known and not lease.is_running(utc_now() - timedelta(seconds=RESUMABLE_SECONDS)):
                record_outcome(store, lease.operation, "failed", "its lease expired")
        if not any(
            open_operation.operation is None or open_operation.operation.kind == CREATE
            for open_operation in read_open_operations(store)
        ):
            return ""
        with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, "gc", ""):
            settle_operations(store, sessions.fleet, progress)
    except (FleetBusyError, UnreachableError, RefusedError) as error:
        # A full store can't record outcomes, but removing other garbage makes space. The search below raises an error
        # if the store can't be read.
        return error.message
    return ""


class _GarbageSearch:
    def __init__(self, store: ObjectStore, report: GcReport, progress: Progress) -> None:
        self._store = store
        self._report = report
        self._progress = progress
        # Object timestamps are from the store's clock. For a local folder, that is the machine's clock, while utc_now()
        # may be corrected by the nodes' clocks.
        self._now = min(utc_now(), machine_now())
        self._owners: set[str] = set()

    def run(self) -> None:
        """Search everything, one snapshot at a time, so that only one snapshot's listing is in memory."""
        leftovers = self._store.unfinished()
        names = self._store.list_children(SNAPSHOTS)
        self._progress.step("look for garbage", total=len(names), unit="names")
        for name in names:
            if NAME.fullmatch(name):
                self._search_snapshot(name)
            else:
                self._report.unknown.append(self._label(f"{SNAPSHOTS}/{name}"))
            self._progress.advance(1)
        self._search_records()
        self._search_probes()
        self._sort_leftovers(leftovers)
        for folder, form in PERMANENT.items():
            for listed in self._store.inventory(folder):
                if form.fullmatch(listed.key):
                    self._report.keep("", GarbageVerdict(GarbageReason.NEEDED), listed.size)
                else:
                    self._report.unknown.append(listed.key)
        known = {FLEET_KEY, SNAPSHOTS, OPERATIONS, PROBES, *PERMANENT}
        self._report.unknown += [self._label(child) for child in self._store.list_children("") if child not in known]

    def _search_snapshot(self, name: str) -> None:
        listed = self._store.inventory(f"{SNAPSHOTS}/{name}")
        # The rules must be created after the listing.
        judge = GarbageRules(self._store, name, listed, self._now)
        for one in listed:
            parsed = parse_key(name, one.key)
            if parsed is None:
                self._report.unknown.append(one.key)
                continue
            if parsed.owner:
                self._owners.add(parsed.owner)
            verdict = judge.judge(one.key, parsed)
            self._sort(Garbage(parsed.kind, verdict.why, (one,), name, parsed.owner), verdict, one.created_at)

    def _search_records(self) -> None:
        unfinished = {removal.snapshot for removal in open_removals(self._store)}
        judge = RecordJudge(self._store, self._owners, unfinished, self._now)
        for record in judge.judge(self._store.inventory(OPERATIONS)):
            if record.verdict is None:
                self._report.unknown += [stored_object.key for stored_object in record.objects]
                continue
            newest = max(stored_object.created_at for stored_object in record.objects)
            garbage = Garbage(Kind.RECORD, record.verdict.why, record.objects, operation=record.folder)
            self._sort(garbage, record.verdict, newest)

    def _search_probes(self) -> None:
        for listed in self._store.inventory(PROBES):
            verdict = judge_probe(listed, self._now)
            if verdict is None:
                self._report.unknown.append(listed.key)
            else:
                self._sort(Garbage(Kind.PROBE, verdict.why, (listed,)), verdict, listed.created_at)

    def _sort_leftovers(self, leftovers: Iterable[Unfinished]) -> None:
        """Sort unfinished uploads (left by dead creates or in progress), which were listed before all other objects."""
        self._report.open_operations = read_open_operations(self._store)
        running = [
            open_operation.operation for open_operation in self._report.open_operations if open_operation.operation
        ]
        snapshots = {intent.snapshot: intent.id for intent in running if intent.kind in (CREATE, *IN_STORE)}
        oldest = min((datetime.fromisoformat(intent.began_at) for intent in running), default=None)
        if len(running) < len(self._report.open_operations):
            # An operation whose intent can't be read may have begun at any time.
            oldest = datetime.min.replace(tzinfo=UTC)
        margin = timedelta(seconds=UNNAMED_SECONDS)
        for leftover in leftovers:
            top, _, rest = leftover.key.partition("/")
            snapshot = rest.partition("/")[0] if top == SNAPSHOTS else ""
            if leftover.key and (
                parse_key(snapshot, leftover.key) is None if snapshot else top not in (OPERATIONS, PROBES, *PERMANENT)
            ):
                self._report.unknown.append(f"{leftover.key} (unfinished)")
                continue
            verdict, since = GarbageVerdict(GarbageReason.LEFT_OVER), leftover.began_at
            if snapshot in snapshots:
                verdict = GarbageVerdict(GarbageReason.OPEN, f"operation {snapshots[snapshot]} has no outcome")
            elif not snapshot:
                # The key is unknown, or outside snapshots, where objects are small and their puts are short.
                since += margin
                if oldest and leftover.began_at + margin >= oldest:
                    verdict = GarbageVerdict(GarbageReason.OPEN, "an operation without an outcome may be writing it")
            self._sort(Garbage(Kind.UNFINISHED, verdict.why, (), snapshot, leftover=leftover), verdict, since)

    def _sort(self, candidate: Garbage, verdict: GarbageVerdict, since: datetime) -> None:
        if verdict.why.is_garbage and since > self._now - timedelta(seconds=self._report.grace_seconds):
            verdict = GarbageVerdict(GarbageReason.YOUNG)
        if verdict.why.is_garbage:
            self._report.garbage.append(candidate)
            return
        for size in candidate.sizes:
            self._report.keep(candidate.snapshot, verdict, size)

    def _label(self, key: str) -> str:
        return key if self._store.exists(key) else f"{key}/"


def remove_garbage(store: ObjectStore, report: GcReport, progress: Progress) -> None:
    """Remove the report's garbage, a bounded number of objects at a time; add the store's refusals to the report."""
    progress.step("remove", total=len(report.garbage), unit="objects")
    waiting = iter(report.garbage)
    try:
        with ThreadPoolExecutor(THREADS_MAX) as threads:
            while batch := list(islice(waiting, BATCH)):
                for sizes, refused in threads.map(lambda one: _remove_one(store, one), batch):
                    for size in sizes:
                        report.removed.add(size)
                    if refused:
                        report.refused.append(refused)
                    progress.advance(1)
    except SnapshotError as error:
        error.details |= {"removed": report.removed.objects, "bytes": report.removed.size_bytes}
        raise


def _remove_one(store: ObjectStore, garbage: Garbage) -> tuple[list[int], RefusedRemoval | None]:
    """Remove objects in order up to the first refusal; return the sizes of the removed objects, and the refusal."""
    removed: list[int] = []
    key = ""
    try:
        for stored_object in garbage.objects:
            key = stored_object.key
            store.delete(key)
            removed.append(stored_object.size)
        if garbage.leftover:
            key = garbage.leftover.key or garbage.leftover.id
            store.abandon(garbage.leftover)
            removed.append(garbage.leftover.size_bytes)
    except DeletionRefusedError as error:
        return removed, RefusedRemoval(key, error.message)
    return removed, None
