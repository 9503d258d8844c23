"""Old records of operations (`operations/<id>/…`) that are no longer needed, and leftovers of probes (`probes/…`).

These records are always kept:

- of an operation with an intent and without an outcome;
- of a create whose commit exists, or whose commit file is gone: check finds the loss by the record, and the file may be
  put back;
- of an operation that has left objects: its record proves that they are garbage;
- of a create whose snapshot is being removed: its record proves whose the slots are that are still to be dropped;
- of the check that stands for a snapshot which is still there: without that record, prune would take a bad one for a
  good one and delete an older one, or would not know any more which was the newest that was found valid.

Signs of life are removed a day after their operation has ended, and those of a check, a gc or a prune that was killed a
day after the last one. All others are removed once their outcome is
RECORD_SECONDS old, the intent first and the outcome last. If gc dies between the two, the operation still has its
outcome, and the next gc removes it. In the other order the operation would appear to be open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain, groupby

from msgspec import UnsetType

from cutline.snapshots.activity.checks import REMOVAL_READ_MAX, read_checks, standing_check
from cutline.snapshots.operations.recorded import document_names
from cutline.snapshots.operations.signs import request_numbers, sign_numbers
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import DONE, read_outcome
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.snapshots.removal.garbage import GarbageReason, GarbageVerdict
from cutline.storage.ids import OPERATION_ID
from cutline.storage.probe import PROBES
from cutline.storage.store import Listed, ObjectStore

RECORD_SECONDS = 30 * 86400.0
# A probe takes seconds, and holds no lock.
PROBE_SECONDS = 3600.0
# Signs of life come every few seconds.
SIGN_SECONDS = 86400.0
PROBE = re.compile(rf"{PROBES}/{OPERATION_ID.pattern}/(read|(put|parts)-(once|raced-\d))")
OUTCOME, INTENT = "outcome.json", "intent.json"
ASKING_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class RecordFolder:
    """A folder of `operations`: its objects in the order of removal. `verdict` is None if it is not Cutline's."""

    folder: str
    objects: tuple[Listed, ...]
    verdict: GarbageVerdict | None


def judge_probe(listed: Listed, now: datetime) -> GarbageVerdict | None:
    """Judge a leftover of a probe by its age alone; return None if it is not Cutline's."""
    if not PROBE.fullmatch(listed.key):
        return None
    is_over = listed.created_at <= now - timedelta(seconds=PROBE_SECONDS)
    return GarbageVerdict(GarbageReason.LEFT_OVER if is_over else GarbageReason.YOUNG)


@dataclass(frozen=True, slots=True)
class RecordJudge:
    """Judges the records of operations.

    `owners` are the operations that have left objects, `unfinished` the snapshots whose removal has no outcome.
    """

    store: ObjectStore
    owners: Set[str]
    unfinished: Set[str]
    now: datetime
    _removed: dict[tuple[str, bool], bool] = field(default_factory=dict)
    _checked: set[str] = field(default_factory=set)

    def judge(self, listed: Iterable[Listed]) -> list[RecordFolder]:
        """Judge every listed folder of `operations`."""
        folders = [
            (folder, tuple(group)) for folder, group in groupby(listed, key=lambda one: one.key.split("/", 2)[1])
        ]
        with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
            found = list(chain.from_iterable(threads.map(lambda one: self._judge_folder(*one), folders)))
        old, needed = GarbageVerdict(GarbageReason.OLD_RECORD), GarbageVerdict(GarbageReason.NEEDED)
        standing = self._standing_checks() if self._checked else set()
        return [replace(one, verdict=needed) if one.verdict == old and one.folder in standing else one for one in found]

    def _judge_folder(self, folder: str, listed: tuple[Listed, ...]) -> list[RecordFolder]:
        objects = tuple(sorted(listed, key=_removal_order))
        if not OPERATION_ID.fullmatch(folder):
            return [RecordFolder(folder, objects, None)]
        names = {one: one.key.split("/", 2)[2] for one in objects}
        # Nobody answers a request without an operation.
        is_alone = not {INTENT, OUTCOME} & set(names.values())
        signs = tuple(
            one for one in objects if sign_numbers([names[one]]) or (is_alone and request_numbers([names[one]]))
        )
        others = tuple(one for one in objects if one not in signs)
        found = [RecordFolder(folder, others, self._verdict(folder, others[-1]))] if others else []
        if signs:
            is_open = INTENT in names.values() and OUTCOME not in names.values()
            newest = max(one.created_at for one in objects)
            is_over = not is_open and newest <= self.now - timedelta(seconds=SIGN_SECONDS)
            why = GarbageReason.LEFT_OVER if is_over else GarbageReason.NEEDED
            found.append(RecordFolder(folder, signs, GarbageVerdict(why)))
        return found

    def _verdict(self, operation: str, last: Listed) -> GarbageVerdict:
        is_closed = last.key.endswith(f"/{OUTCOME}")
        if operation in self.owners or not is_closed or last.created_at > self.now - timedelta(seconds=RECORD_SECONDS):
            return GarbageVerdict(GarbageReason.NEEDED)
        try:
            outcome = read_outcome(self.store, operation)
        except ManifestError:
            outcome = None
        if outcome is None or not isinstance(outcome.snapshot, str):
            return GarbageVerdict(GarbageReason.UNCLEAR, f"the outcome of operation {operation} can't be read")
        has_committed = outcome.kind == "create" and outcome.state == DONE
        if has_committed and not self._is_removed(outcome.snapshot, is_full=outcome.increment == 0):
            return GarbageVerdict(GarbageReason.NEEDED)
        checked = () if isinstance(outcome.checked, UnsetType) else outcome.checked
        self._checked.update(one.snapshot for one in checked if not self._is_removed(one.snapshot, is_full=True))
        return GarbageVerdict(GarbageReason.OLD_RECORD)

    def _standing_checks(self) -> set[str]:
        """The checks, of those that prune reads, that stand for snapshots of which an old record is a check."""
        checks = read_checks(self.store, document_names(self.store), count_max=REMOVAL_READ_MAX).by_snapshot
        of_each = (checks[name] for name in self._checked if name in checks)
        # The increments may have been pruned since: then only what stands for the full snapshot counts.
        counts = ((found, {1, max(one.point.increment for one in found) + 1}) for found in of_each)
        standing = (standing_check(found, count) for found, some in counts for count in some)
        return {one.operation for one in standing if one is not None}

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


def _removal_order(one: Listed) -> tuple[int, str]:
    name = one.key.split("/", 2)[-1]
    return {INTENT: 0, OUTCOME: 2}.get(name, 1), name
