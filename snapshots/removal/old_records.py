"""Which records of operations, and which objects of probes, are garbage.

A record is garbage some time after its operation has ended, unless the operation owns objects or something still goes
by the record: a check that a later check may rest on, or a commit that nothing else shows to have existed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import chain, groupby

from msgspec import Struct, UnsetType, field
from msgspec.structs import replace

from cutline.snapshots.operations.ended_operations import REMOVAL_READ_MAX, reach_of, read_checks, standing_check
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.operations.signs import request_numbers, sign_numbers
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import CREATE, DONE, IDLE_OUTCOME, OUTCOMES, read_any_outcome
from cutline.snapshots.records.proven_chains import increment_numbers
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.snapshots.records.unfinished_records import is_copy_record
from cutline.snapshots.removal.garbage_rules import GarbageReason, GarbageVerdict
from cutline.storage.ids import OPERATION_ID
from cutline.storage.probe import PROBES
from cutline.storage.store import Listed, ObjectStore

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


class RecordFolder(Struct, frozen=True):
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


class RecordJudge(Struct, frozen=True):
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
