"""Operations that have ended, by their documents in the store: their kinds, and the findings of checks.

All commands that need several of them read them here. Records of operations that have committed stay as long as their
snapshot; others are removed by gc after 30 days. An unreadable record has a `problem`, and hides no other.

A check with credentials that only read stores no outcome: a snapshot without a check here may still have been checked.
Records that are unreadable twice are skipped and named; `history` gives the reasons.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain, groupby, islice
from typing import Any, TypeVar

from msgspec import UnsetType

from cutline.fleet.own_process import read_label
from cutline.fleet.record import Time, to_builtins
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import (
    CONFLICTS,
    INCONCLUSIVE,
    VALID,
    CheckedPoint,
    Intent,
    Outcome,
    read_intent,
    read_outcome,
)
from cutline.storage.clock import utc_now
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectMissingError, ObjectStore

FULL, INCREMENT, ONLY_CUT, RESTORE, DRILL = "full", "increment", "only-cut", "restore", "drill"


def operation_kind(command: str, increment: int | None, intent: Intent | None) -> str:
    """The kind of an operation of `command`, which is any text of a store."""
    if command == "create":
        if increment:
            return INCREMENT
        return ONLY_CUT if intent is not None and intent.only_cut is True else FULL
    return DRILL if intent is not None and intent.is_drill else command


AT_ONCE = 16
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that has ended. `intent` is None if it had none, or none that is still there.

    `problem` says which of its documents can't be read, and why; then `outcome` is None.
    """

    id: str
    intent: Intent | None
    outcome: Outcome | None
    problem: str = ""

    @property
    def snapshot(self) -> str:
        """The snapshot that it worked on; "" for all, or if it is not known."""
        if self.intent is not None:
            return self.intent.snapshot
        return self.outcome.snapshot if self.outcome else ""

    @property
    def kind(self) -> str:
        """Which command it was of, or "drill"; "" if that is not known."""
        if self.intent is not None:
            return DRILL if self.intent.is_drill else self.intent.kind
        return self.outcome.kind if self.outcome else ""

    @property
    def increment(self) -> int | None:
        """The increment that it worked on; 0 is the full snapshot."""
        if self.intent is not None:
            return self.intent.increment
        return _or(self.outcome.increment, None) if self.outcome else None

    @property
    def began_at(self) -> Time | None:
        """When it began."""
        if self.intent is not None:
            return self.intent.began_at
        return _or(self.outcome.began_at, None) if self.outcome else None

    @property
    def ended_at(self) -> datetime | None:
        """When it ended; None if its outcome can't be read."""
        return datetime.fromisoformat(self.outcome.ended_at) if self.outcome else None

    @property
    def label(self) -> str:
        """The label of its process; "" if that is not known."""
        by = self.intent.by if self.intent else self.outcome.by if self.outcome else ""
        return _or(by, "")

    @property
    def seconds(self) -> float | None:
        """How long it took, until its outcome was recorded; None if others have found out how it ended."""
        if self.ended_at is None or self.began_at is None or self.code is None:
            return None
        return max((self.ended_at - datetime.fromisoformat(self.began_at)).total_seconds(), 0.0)

    @property
    def volumes(self) -> dict[str, int]:
        """The amount of its work, by unit."""
        return dict(_or(self.outcome.volumes, {})) if self.outcome else {}

    @property
    def causes(self) -> tuple[str, ...]:
        """Why it had to try again."""
        return tuple(_or(self.outcome.causes, ())) if self.outcome else ()

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase, in order; empty if they are not recorded."""
        if self.outcome is None:
            return {}
        if isinstance(figures := self.outcome.figures, UnsetType):
            return dict(_or(self.outcome.phases, {}))
        return {name: step.seconds for name, step in figures.steps.items()}

    @property
    def checked(self) -> tuple[CheckedPoint, ...]:
        """The findings of a check on each restore point; empty if they are not recorded."""
        return _or(self.outcome.checked, ()) if self.outcome else ()

    @property
    def code(self) -> int | None:
        """The exit code of its command, if that is known: a settled operation has none."""
        return _or(self.outcome.code, None) if self.outcome else None

    def to_json(self) -> dict[str, Any]:
        """The operation as JSON output has it; unknown values are null."""
        owner, outcome = read_label(self.label), self.outcome
        return {
            "operation": self.id,
            "kind": self.kind or None,
            "snapshot": self.snapshot or None,
            "increment": self.increment,
            "state": outcome.state if outcome else None,
            "reason": (outcome.reason or None) if outcome else None,
            "code": self.code,
            "who": f"{owner.user}@{owner.host}" if owner else None,
            "began_at": self.began_at,
            "ended_at": outcome.ended_at if outcome else None,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "volumes": self.volumes,
            "causes": list(self.causes),
            "phases": self.phases,
            "checked": to_builtins(self.checked),
            "problem": self.problem or None,
        }


def list_ended(documents: Mapping[str, Set[str]], *, has_intent: bool | None = None) -> list[str]:
    """The ids of operations with an outcome, the newest first; `documents` are those of document_names.

    With `has_intent`, only those that have an intent, or only those that have none: checks, gc and prunes.
    """
    return [
        document
        for document in sorted(documents, reverse=True)
        if "outcome.json" in documents[document] and has_intent in (None, "intent.json" in documents[document])
    ]


def read_ended(store: ObjectStore, operation: str, *, has_intent: bool = True) -> Ended | None:
    """One operation that has ended; None if it has no outcome. Without `has_intent` no intent is looked for."""
    intent: Intent | None = None
    try:
        if has_intent:
            with suppress(ObjectMissingError):
                intent = read_intent(store, operation)
        outcome = read_outcome(store, operation)
    except ManifestError as error:
        return Ended(operation, intent, None, error.message)
    return Ended(operation, intent, outcome) if outcome else None


def read_batches(
    store: ObjectStore, documents: Mapping[str, Set[str]], operations: Sequence[str]
) -> Iterator[list[Ended]]:
    """The operations in their order, AT_ONCE at a time; a batch is read when it is asked for.

    An operation is left out if its outcome has been removed since `documents` were listed. It takes one read for each,
    and another one if it has an intent.
    """
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for first in range(0, len(operations), AT_ONCE):
            batch = operations[first : first + AT_ONCE]
            endeds = threads.map(
                lambda operation: read_ended(store, operation, has_intent="intent.json" in documents[operation]), batch
            )
            yield [ended for ended in endeds if ended is not None]


def read_history(store: ObjectStore, count: int, snapshot: str | None = None) -> list[Ended]:
    """The last `count` operations that have ended, on `snapshot` or on all, the newest first."""
    documents = document_names(store)
    read = chain.from_iterable(read_batches(store, documents, list_ended(documents)))
    return list(islice((ended for ended in _newest_first(read) if snapshot in (None, ended.snapshot)), count))


def _newest_first(read: Iterable[Ended]) -> Iterator[Ended]:
    """Operations in the order of their ids; operations with ids of the same second, by their end."""
    for _, same_second in groupby(read, key=lambda ended: ended.id.partition("-")[0]):
        yield from sorted(same_second, key=lambda one: one.outcome.ended_at if one.outcome else "", reverse=True)


@dataclass(frozen=True, slots=True)
class EndedOperations:
    """Operations that have ended, the newest first.

    `since`: from when on they are complete; None if all were read.
    """

    found: tuple[Ended, ...]
    since: datetime | None = None


class EndedReader:
    """Reads again and again the newest operations that have committed nothing, or whose commit is gone.

    Operations that have committed are not read: their commits have more. Up to `count_max` operations that had an
    intent are read, and as many of those that had none: so the many checks of a busy schedule hide no restore. An
    outcome never changes: it is read once.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._known: dict[str, Ended] = {}

    def read(
        self, store: ObjectStore, committed: Collection[str], documents: Mapping[str, Set[str]] | None = None
    ) -> EndedOperations:
        """The operations without those that have committed, by id; `documents` are those of document_names."""
        documents = document_names(store) if documents is None else documents
        classes = [
            [operation for operation in list_ended(documents, has_intent=has_intent) if operation not in committed]
            for has_intent in (True, False)
        ]
        wanted = [operation for ids in classes for operation in ids[: self._count_max]]
        self._known = {operation: self._known[operation] for operation in wanted if operation in self._known}
        new = [operation for operation in wanted if operation not in self._known]
        self._known |= {ended.id: ended for batch in read_batches(store, documents, new) for ended in batch}
        cut_off = [ids[: self._count_max] for ids in classes if len(ids) > self._count_max]
        since = max((time for ids in cut_off if (time := self._first_end(ids)) is not None), default=None)
        return EndedOperations(tuple(self._known[operation] for operation in sorted(self._known, reverse=True)), since)

    def _first_end(self, operations: Iterable[str]) -> datetime | None:
        ends = (self._known[operation].ended_at for operation in operations if operation in self._known)
        return min((end for end in ends if end is not None), default=None)


def _or(value: Value | UnsetType, default: Value) -> Value:
    return default if isinstance(value, UnsetType) else value


# So many of the newest operations without an intent, which are checks, gc and prunes, are looked at.
READ_MAX = 256
# And so many where a deletion depends on them: with a check every hour, those of a month.
REMOVAL_READ_MAX = 1000
# By how much the clocks of machines may differ.
AHEAD_SECONDS_MAX = 300.0


@dataclass(frozen=True, slots=True)
class EndedCheck:
    """One restore point in a check that has ended."""

    operation: str
    ended_at: Time
    point: CheckedPoint

    @property
    def moment(self) -> datetime:
        """When it ended."""
        return datetime.fromisoformat(self.ended_at)

    def to_json(self) -> dict[str, Any]:
        """The check as JSON output has it."""
        return {
            "operation": self.operation,
            "ended_at": self.ended_at,
            "increment": self.point.increment,
            "result": self.point.result,
            "full": self.point.full,
        }


@dataclass(frozen=True, slots=True)
class NewestChecks:
    """The checks that were read, all of them `by_snapshot`, and the newest of each snapshot.

    A full check is one of all that the then newest restore point of a snapshot needs. `last` has the newest check,
    `full` the newest full check, and `valid` the newest full check that found all of it valid. `unread` are the
    operations whose outcome can't be read, which may be checks, and checks that end in the future: their clock was
    ahead, so they may be older than others. Of these only conflicts count.
    """

    by_snapshot: dict[str, list[EndedCheck]] = field(default_factory=dict)
    last: dict[str, EndedCheck] = field(default_factory=dict)
    full: dict[str, EndedCheck] = field(default_factory=dict)
    valid: dict[str, EndedCheck] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def add(self, check: EndedCheck) -> None:
        """Add a check; the check that ended last is the newest."""
        point, is_valid = check.point, check.point.result == VALID
        self.by_snapshot.setdefault(point.snapshot, []).append(check)
        _keep_newest(self.last, point.snapshot, check)
        if point.full:
            _keep_newest(self.full, point.snapshot, check)
        if point.full and is_valid:
            _keep_newest(self.valid, point.snapshot, check)

    def add_all(self, batch: Sequence[Ended]) -> list[str]:
        """Add the checks among operations; return the ids of those that can't be read, or can't be trusted."""
        latest = utc_now() + timedelta(seconds=AHEAD_SECONDS_MAX)
        unread = [ended.id for ended in batch if ended.problem]
        for ended in batch:
            for check in checks_of(ended):
                if check.moment <= latest or check.point.result == CONFLICTS:
                    self.add(check)
                elif ended.id not in unread:
                    unread.append(ended.id)
        return unread

    def standing_conflicts(self, snapshot: str, count: int) -> EndedCheck | None:
        """The check with conflicts that stands for its `count` restore points; None if another one stands, or none."""
        check = standing_check(self.by_snapshot.get(snapshot, []), count)
        return check if check and check.point.result == CONFLICTS else None


def _keep_newest(newest: dict[str, EndedCheck], key: str, check: EndedCheck) -> None:
    # The id of an operation contains the second of its begin, so ids of the same second are in no order.
    if key not in newest or newest[key].moment < check.moment:
        newest[key] = check


def newest_covering(checks: Iterable[EndedCheck], count: int) -> list[EndedCheck | None]:
    """By increment, of `count` restore points of a snapshot: the newest of its checks that covers it.

    An inconclusive check counts only if no other check covers it. A check up to an increment covers the restore points
    before it, too: it reads all that they need. Those after it need the same objects. So if it found conflicts, it
    counts for them as well, unless a newer one covers them, or has found the increment itself to be valid.
    """
    covering: list[EndedCheck | None] = []
    newest_first = sorted(checks, key=lambda check: check.moment, reverse=True)
    for check in sorted(newest_first, key=lambda one: one.point.result == INCONCLUSIVE):
        covering += [check] * (min(check.point.increment + 1, count) - len(covering))
    covering += [None] * (count - len(covering))
    carried: EndedCheck | None = None
    for increment, own in enumerate(covering):
        if carried and (own is None or own.point.result == INCONCLUSIVE or own.moment < carried.moment):
            covering[increment] = carried
        elif own and (own.point.increment, own.point.result) == (increment, CONFLICTS):
            carried = own
    return covering


def standing_check(checks: Iterable[EndedCheck], count: int) -> EndedCheck | None:
    """The check whose result stands for `count` restore points of a snapshot; None if no check has settled anything.

    A check that found conflicts stands until a later full check covers the same restore points and finds all of them
    valid: a check of less, or an inconclusive one, may have passed over the damage.
    """
    settling = [
        check
        for check in checks
        if check.point.result == CONFLICTS or (check.point.full and check.point.result == VALID)
    ]
    covering = [check for check in newest_covering(settling, count) if check is not None]
    conflicts = [check for check in covering if check.point.result == CONFLICTS]
    return max(conflicts or covering, key=lambda one: one.moment, default=None)


def checks_of(ended: Ended) -> Iterator[EndedCheck]:
    """The restore points that an operation has checked; none if it was no check."""
    if ended.outcome is not None:
        for point in ended.checked:
            yield EndedCheck(ended.id, ended.outcome.ended_at, point)


def read_checks(
    store: ObjectStore,
    documents: Mapping[str, Set[str]],
    wanted: Set[str] | None = None,
    *,
    count_max: int | None = None,
) -> NewestChecks:
    """The newest checks, with at most `count_max` reads (READ_MAX); `documents` are those of document_names.

    With `wanted`, reading ends once a full and valid check of each of these snapshots is found.
    """
    checks = NewestChecks()
    ids = [operation for operation in list_ended(documents, has_intent=False) if OPERATION_ID.fullmatch(operation)]
    problems: list[str] = []
    for batch in read_batches(store, documents, ids[: READ_MAX if count_max is None else count_max]):
        problems += checks.add_all(batch)
        if wanted is not None and wanted <= checks.valid.keys():
            break
    # A read may have been cut short.
    for batch in read_batches(store, documents, problems):
        checks.unread.extend(checks.add_all(batch))
    return checks
