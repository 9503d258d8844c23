"""Operations that have ended, read from their documents in the store: their kinds, and the results of checks.

Every command that needs several ended operations reads them here. The records of full snapshots and of the newest
increments are kept as long as their snapshot; gc removes the others after 30 days. An unreadable record becomes an
Ended with a `problem`, and doesn't hide other records.

A check whose credentials permit only reading stores no outcome, so a snapshot without a check here may still have been
checked. Records that can't be read in two attempts are skipped and listed; `history` shows the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import chain, groupby, islice
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct, UnsetType, field, structs
from msgspec.structs import replace

from cutline.fleet.own_process import read_label
from cutline.fleet.record import Time, to_builtins
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import (
    CHECK_OUTCOMES,
    CONFLICTS,
    CONFLICTS_OUTCOME,
    FULL_OUTCOME,
    INCONCLUSIVE,
    INTENTS,
    OUTCOMES,
    PASSED,
    CheckedPoint,
    Intent,
    Outcome,
    ReadTimes,
    read_any_outcome,
    read_intent,
)
from cutline.storage.clock import utc_now
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectMissingError, ObjectStore

FULL, INCREMENT, ONLY_CUT, RESTORE, DRILL = "full", "increment", "only-cut", "restore", "drill"


def operation_kind(command: str, increment: int | None, intent: Intent | None) -> str:
    """Return the kind of an operation of `command`, which is unchecked text from the store."""
    if command == "create":
        if increment:
            return INCREMENT
        return ONLY_CUT if intent is not None and intent.only_cut is True else FULL
    return DRILL if intent is not None and intent.is_drill else command


AT_ONCE = 16
Value = TypeVar("Value")


class Ended(Struct, frozen=True):
    """An operation that has ended. `intent` is None if there never was an intent, or if it was removed.

    If a document can't be read, `problem` describes it and `outcome` is None.
    """

    id: str
    intent: Intent | None
    outcome: Outcome | None
    problem: str = ""

    @property
    def snapshot(self) -> str:
        """The snapshot; "" for all, or if it is not known."""
        if self.intent is not None:
            return self.intent.snapshot
        return self.outcome.snapshot if self.outcome else ""

    @property
    def kind(self) -> str:
        """The command, or "drill"; "" if it is not known."""
        if self.intent is not None:
            return DRILL if self.intent.is_drill else self.intent.kind
        return self.outcome.kind if self.outcome else ""

    @property
    def increment(self) -> int | None:
        """The increment; 0 is the full snapshot."""
        if self.intent is not None:
            return self.intent.increment
        return _or(self.outcome.increment, None) if self.outcome else None

    @property
    def exact_at(self) -> Time | None:
        """The time whose exact state a restore restores; None if it restores a cut."""
        return _or(self.intent.exact_at, None) if self.intent else None

    @property
    def began_at(self) -> Time | None:
        """The time at which the operation began."""
        if self.intent is not None:
            return self.intent.began_at
        return _or(self.outcome.began_at, None) if self.outcome else None

    @property
    def ended_at(self) -> datetime | None:
        """The time at which the operation ended; None if its outcome can't be read."""
        return datetime.fromisoformat(self.outcome.ended_at) if self.outcome else None

    @property
    def label(self) -> str:
        """The label of the process; "" if it is not known."""
        by = self.intent.by if self.intent else self.outcome.by if self.outcome else ""
        return _or(by, "")

    @property
    def seconds(self) -> float | None:
        """The duration until the outcome was recorded; None if another command recorded it."""
        if self.ended_at is None or self.began_at is None or self.code is None:
            return None
        return max((self.ended_at - datetime.fromisoformat(self.began_at)).total_seconds(), 0.0)

    @property
    def volumes(self) -> dict[str, int]:
        """The amounts of work done, by unit."""
        return dict(_or(self.outcome.volumes, {})) if self.outcome else {}

    @property
    def causes(self) -> tuple[str, ...]:
        """The reasons for repeated attempts."""
        return tuple(_or(self.outcome.causes, ())) if self.outcome else ()

    @property
    def phases(self) -> dict[str, float]:
        """How many seconds each phase took, in order; empty if not recorded."""
        if self.outcome is None:
            return {}
        if isinstance(figures := self.outcome.figures, UnsetType):
            return dict(_or(self.outcome.phases, {}))
        return {name: step.seconds for name, step in figures.steps.items()}

    @property
    def checked(self) -> tuple[CheckedPoint, ...]:
        """The result of a check for each restore point; empty if not recorded."""
        return _or(self.outcome.checked, ()) if self.outcome else ()

    @property
    def code(self) -> int | None:
        """The exit code of the command; None if it is not known, as for a settled operation."""
        return _or(self.outcome.code, None) if self.outcome else None

    def to_json(self) -> dict[str, Any]:
        """Return the operation for JSON output; unknown values are null."""
        owner, outcome = read_label(self.label), self.outcome
        return {
            "operation": self.id,
            "kind": self.kind or None,
            "snapshot": self.snapshot or None,
            "increment": self.increment,
            "exact_at": self.exact_at,
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
    """Return the ids of operations with an outcome, newest first; `documents` is the result of document_names.

    If `has_intent` is given, return only operations that began with an intent, or only those without (checks, gc and
    prunes).
    """
    return [
        document
        for document in sorted(documents, reverse=True)
        if documents[document] & OUTCOMES and has_intent in (None, bool(documents[document] & INTENTS))
    ]


def read_ended(
    store: ObjectStore, operation: str, names: Iterable[str] = ("intent.json", *CHECK_OUTCOMES)
) -> Ended | None:
    """Read an operation that has ended; None if it has no outcome. `names` are its documents, if they are known."""
    intent: Intent | None = None
    try:
        if "intent.json" in names:
            with suppress(ObjectMissingError):
                intent = read_intent(store, operation)
        outcome = read_any_outcome(store, operation, names)
    except ManifestError as error:
        return Ended(operation, intent, None, error.message)
    return Ended(operation, intent, outcome) if outcome else None


def read_batches(
    store: ObjectStore, documents: Mapping[str, Set[str]], operations: Sequence[str]
) -> Iterator[list[Ended]]:
    """Yield the operations in the given order, AT_ONCE at a time; each batch is read when the caller requests it.

    An operation is left out if its outcome has been removed since `documents` were listed. Each operation takes one
    read, plus another for its intent if it has an intent.
    """
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for first in range(0, len(operations), AT_ONCE):
            batch = operations[first : first + AT_ONCE]
            read = threads.map(lambda operation: read_ended(store, operation, documents[operation]), batch)
            yield [ended for ended in read if ended is not None]


def read_history(store: ObjectStore, count: int, snapshot: str | None = None) -> list[Ended]:
    """Read the last `count` operations that have ended, on `snapshot` or on all snapshots, newest first."""
    documents = document_names(store)
    read = chain.from_iterable(read_batches(store, documents, list_ended(documents)))
    return list(islice((ended for ended in _newest_first(read) if snapshot in (None, ended.snapshot)), count))


def _newest_first(read: Iterable[Ended]) -> Iterator[Ended]:
    """Sort operations whose ids contain the same second by end time; all others stay in the order of their ids."""
    for _, same_second in groupby(read, key=lambda ended: ended.id.partition("-")[0]):
        yield from sorted(same_second, key=lambda one: one.outcome.ended_at if one.outcome else "", reverse=True)


class EndedOperations(Struct, frozen=True):
    """Operations that have ended, newest first; complete from `since` on, or as a whole if `since` is None.

    `earlier_checks` are further checks, which tell whether conflicts that a check found before that still stand.
    """

    found: tuple[Ended, ...]
    since: datetime | None = None
    earlier_checks: tuple[Ended, ...] = ()


class EndedReader:
    """Repeatedly reads the newest operations that have committed nothing, or whose commit is gone.

    Operations that have committed are not read, because their commits contain more information. Up to `count_max`
    operations with an intent are read, and up to `count_max` without an intent, so that the many checks of a busy
    schedule don't hide a restore. An outcome never changes, so it is read once.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._known: dict[str, Ended] = {}

    def read(
        self, store: ObjectStore, committed: Collection[str], documents: Mapping[str, Set[str]] | None = None
    ) -> EndedOperations:
        """Read the operations, except those in `committed` (ids); `documents` is the result of document_names."""
        documents = document_names(store) if documents is None else documents
        classes = [
            [operation for operation in list_ended(documents, has_intent=has_intent) if operation not in committed]
            for has_intent in (True, False)
        ]
        wanted = [operation for ids in classes for operation in ids[: self._count_max]]
        earlier, self._known = self._known, {}
        self._known |= {one.id: one for batch in _read_unless_known(store, documents, wanted, earlier) for one in batch}
        found = tuple(self._known[operation] for operation in sorted(self._known, reverse=True))
        checks, further = NewestChecks(), dict[str, Ended]()
        checks.add_all(found)

        def read(operations: Sequence[str]) -> Iterator[list[Ended]]:
            for batch in _read_unless_known(store, documents, operations, earlier):
                further.update((one.id, one) for one in batch)
                yield batch

        _add_beyond(checks, documents, classes[1], self._known.keys(), read)
        self._known |= further
        cut_off = [ids[: self._count_max] for ids in classes if len(ids) > self._count_max]
        since = max((time for ids in cut_off if (time := self._first_end(ids)) is not None), default=None)
        return EndedOperations(found, since, tuple(further.values()))

    def _first_end(self, operations: Iterable[str]) -> datetime | None:
        ends = (self._known[operation].ended_at for operation in operations if operation in self._known)
        return min((end for end in ends if end is not None), default=None)


def _read_unless_known(
    store: ObjectStore, documents: Mapping[str, Set[str]], operations: Sequence[str], known: Mapping[str, Ended]
) -> Iterator[list[Ended]]:
    """Like read_batches, but what is `known` is not read again."""
    for first in range(0, len(operations), AT_ONCE):
        batch = operations[first : first + AT_ONCE]
        read = read_batches(store, documents, [operation for operation in batch if operation not in known])
        yield [known[operation] for operation in batch if operation in known] + list(chain.from_iterable(read))


def _or(value: Value | UnsetType, default: Value) -> Value:
    return default if isinstance(value, UnsetType) else value


# At most this many of the newest operations without an intent (checks, gc and prunes) are read.
READ_MAX = 256
# The same limit for deletions that depend on checks: enough for a month of hourly checks.
REMOVAL_READ_MAX = 1000
# The largest accepted difference between the clocks of machines.
AHEAD_SECONDS_MAX = 300.0


class EndedCheck(Struct, frozen=True):
    """A restore point with its result in a check that has ended."""

    operation: str
    ended_at: Time
    point: CheckedPoint

    @property
    def moment(self) -> datetime:
        """The time at which the check ended."""
        return datetime.fromisoformat(self.ended_at)

    def to_json(self) -> dict[str, Any]:
        """Return the check for JSON output."""
        return {
            "operation": self.operation,
            "ended_at": self.ended_at,
            "increment": self.point.increment,
            "result": self.point.result,
            "full": self.point.full,
            "rests_on_records": self.point.rests_on_records,
            "oldest_read_at": self.point.oldest_read_at,
        }


class NewestChecks(Struct, frozen=True):
    """The checks that were read: all of them in `by_snapshot`, and the newest checks of each snapshot.

    A full check covers everything that the newest restore point of the snapshot needed at that time. `last` contains
    the newest check, `full` contains the newest full check, and `valid` contains the newest full check whose result is
    valid. `covering` contains the newest check that is full or rests on the record of an earlier check for the rest;
    `passed` contains the newest of these that found nothing wrong, and `resting` the newest check that later checks may
    rest on. `unread` lists operations whose outcome can't be read, because they may be checks. It also lists checks
    that end in the future: the clock was ahead, so they may be older than other checks, and they count only if they
    found conflicts. `unread_conflicts` are those of them that found conflicts according to their names.
    """

    by_snapshot: dict[str, list[EndedCheck]] = field(default_factory=dict)
    last: dict[str, EndedCheck] = field(default_factory=dict)
    full: dict[str, EndedCheck] = field(default_factory=dict)
    valid: dict[str, EndedCheck] = field(default_factory=dict)
    covering: dict[str, EndedCheck] = field(default_factory=dict)
    passed: dict[str, EndedCheck] = field(default_factory=dict)
    resting: dict[str, EndedCheck] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    unread_conflicts: list[str] = field(default_factory=list)

    def add(self, check: EndedCheck) -> None:
        """Add a check; the check that ended last is the newest."""
        point, is_valid = check.point, check.point.result in PASSED
        self.by_snapshot.setdefault(point.snapshot, []).append(check)
        _keep_newest(self.last, point.snapshot, check)
        if point.full:
            _keep_newest(self.full, point.snapshot, check)
        if point.full or point.rests_on_records:
            _keep_newest(self.covering, point.snapshot, check)
            if is_valid:
                _keep_newest(self.passed, point.snapshot, check)
        if point.oldest_read_at is not None:
            _keep_newest(self.resting, point.snapshot, check)
        if point.full and is_valid:
            _keep_newest(self.valid, point.snapshot, check)

    def from_increments(self, first: Mapping[str, int]) -> NewestChecks:
        """Return the checks without those that found nothing in increments of a chain before its `first`.

        What they read was given up after a merge. Conflicts may be in later restore points as well.
        """
        kept = NewestChecks(unread=self.unread, unread_conflicts=self.unread_conflicts)
        for name, checks in self.by_snapshot.items():
            for check in checks:
                if check.point.result == CONFLICTS or check.point.increment >= first.get(name, 0):
                    kept.add(check)
        return kept

    def add_all(self, batch: Sequence[Ended]) -> list[str]:
        """Add the checks among operations; return the ids of those that can't be read, or whose clock was ahead."""
        latest = utc_now() + timedelta(seconds=AHEAD_SECONDS_MAX)
        unread = [ended.id for ended in batch if ended.problem]
        for ended in batch:
            for check in checks_of(ended):
                if check.moment <= latest or check.point.result == CONFLICTS:
                    self.add(check)
                elif ended.id not in unread:
                    unread.append(ended.id)
        return unread

    @property
    def unsettled(self) -> list[EndedCheck]:
        """The checks with conflicts that no later check, of those that were read, has shown to be gone.

        Of those up to the same increment, only the newest.
        """
        found: list[EndedCheck] = []
        for checks in self.by_snapshot.values():
            newest: dict[str, EndedCheck] = {}
            for check in checks:
                if check.point.result == CONFLICTS:
                    _keep_newest(newest, str(check.point.increment), check)
            full = [check for check in checks if newest and check.point.full]
            found += [
                check
                for check in newest.values()
                if not any(
                    one.moment > check.moment
                    and one.point.increment >= check.point.increment
                    and one.point.settles(check.point)
                    for one in full
                )
            ]
        return found

    def furthest_record(self, snapshot: str, operations: Mapping[int, str]) -> EndedCheck | None:
        """Return the check that later checks may rest on and that has read most increments of the snapshot's chain.

        `operations` are those that committed the chain, by increment: the snapshot may have had another chain before.
        Of checks up to the same increment, the one whose oldest reading is the newest counts; None if there is none.
        """
        of_chain = [
            check
            for check in self.by_snapshot.get(snapshot, [])
            if isinstance(read := check.point.read, ReadTimes)
            and operations.get(check.point.increment) == read.last_operation
        ]
        return max(of_chain, key=reach_of, default=None)

    def standing_conflicts(self, snapshot: str, count: int) -> EndedCheck | None:
        """Return the snapshot's standing check (of `count` restore points) if it found conflicts, otherwise None."""
        check = standing_check(self.by_snapshot.get(snapshot, []), count)
        return check if check and check.point.result == CONFLICTS else None


def reach_of(record: EndedCheck) -> tuple[int, datetime]:
    """Return the increment up to which a check with a record has read, and since when everything has been read."""
    oldest = record.point.oldest_read_at
    return record.point.increment, datetime.fromisoformat(oldest) if oldest else record.moment


def _keep_newest(newest: dict[str, EndedCheck], key: str, check: EndedCheck) -> None:
    # An operation's id contains the second at which it began, so ids with the same second have no order.
    if key not in newest or newest[key].moment < check.moment:
        newest[key] = check


def newest_covering(checks: Iterable[EndedCheck], count: int) -> list[EndedCheck | None]:
    """Return, for each of the `count` restore points of a snapshot in order, the newest check that covers it.

    An inconclusive check counts only if no other check covers the restore point. A check up to an increment also covers
    the earlier restore points, because it reads all their objects. Later restore points need the objects that it read.
    So if it found conflicts, it counts for the later restore points too, unless a newer check covers them or found the
    increment itself valid. A check that passes is inconclusive about the earlier restore points at which it did not
    compare everything. Conflicts that would keep a restore from loading the rows count until a newer check that has
    built them passes.
    """
    return _cover(checks, count, lambda check: check.point.compared_spans)


Spans: TypeAlias = Callable[[EndedCheck], Iterable[tuple[int, int]]]


def _up_to_increment(check: EndedCheck) -> Iterable[tuple[int, int]]:
    return ((0, check.point.increment),)


def _cover(checks: Iterable[EndedCheck], count: int, spans_of: Spans) -> list[EndedCheck | None]:
    """Like `newest_covering`, where a conclusive check covers the restore points in its spans."""
    newest_first = sorted(checks, key=lambda check: check.moment, reverse=True)
    conclusive = [check for check in newest_first if check.point.result != INCONCLUSIVE]
    covering = _first_of_each(conclusive, count, spans_of)
    building = [check for check in conclusive if isinstance(check.point.restorable, bool)]
    for number, check in enumerate(_first_of_each(building, count, _up_to_increment)):
        found = covering[number]
        if check and check.point.restorable is False and found and found.point.result != CONFLICTS:
            covering[number] = check
    for number, check in enumerate(_first_of_each(newest_first, count, _up_to_increment)):
        if covering[number] is None and check is not None:
            is_sure = check.point.result != INCONCLUSIVE
            unsure = replace(check, point=structs.replace(check.point, result=INCONCLUSIVE)) if is_sure else check
            covering[number] = unsure
    carried: EndedCheck | None = None
    for increment, own in enumerate(covering):
        if carried and (own is None or own.moment < carried.moment or not _is_verdict_after(carried, own)):
            covering[increment] = carried
        elif own and (own.point.increment, own.point.result) == (increment, CONFLICTS):
            carried = own
    return covering


def _is_verdict_after(conflicts: EndedCheck, newer: EndedCheck) -> bool:
    """Whether a newer check of a later restore point has found conflicts itself, or shows that there are none."""
    return newer.point.result == CONFLICTS or newer.point.settles(conflicts.point)


def _first_of_each(checks: Iterable[EndedCheck], count: int, spans_of: Spans) -> list[EndedCheck | None]:
    """Return, for each of the `count` restore points, the first of the checks that has it in one of its spans."""
    found: list[EndedCheck | None] = [None] * count
    # From each restore point, the next one that has no check yet may be found there, or from there on.
    further = list(range(count + 1))

    def next_free(number: int) -> int:
        while further[number] != number:
            further[number] = further[further[number]]
            number = further[number]
        return number

    for check in checks:
        for first, last in spans_of(check):
            number = next_free(min(first, count))
            while number <= min(last, count - 1):
                found[number], further[number] = check, number + 1
                number = next_free(number)
    return found


def standing_check(checks: Iterable[EndedCheck], count: int) -> EndedCheck | None:
    """Return the check that determines the state of a snapshot with `count` restore points; None if there is none.

    A check that found conflicts stands until a later full check covers the same restore points and finds nothing
    wrong. A smaller or inconclusive check may have missed the damage, and a check that did not build the rows does not
    know whether a restore can load them. Earlier restore points at which a full check could not compare everything
    don't change its result, so it settles what was found there.
    """
    settling = [
        check for check in checks if check.point.result == CONFLICTS or (check.point.full and check.point.has_passed)
    ]
    covering = [check for check in _cover(settling, count, _up_to_increment) if check is not None]
    conflicts = [check for check in covering if check.point.result == CONFLICTS]
    return max(conflicts or covering, key=lambda one: one.moment, default=None)


def checks_of(ended: Ended) -> Iterator[EndedCheck]:
    """Yield the restore points that an operation has checked; nothing if it is not a check."""
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
    """Read the newest checks, and every check that found conflicts; `documents` is the result of document_names.

    The newest are those in at most `count_max` operations (default READ_MAX). With `wanted`, reading them ends once a
    full and valid check of each of these snapshots is found. Operations are read in the order in which they began, so a
    check that lasts long may end last and still not be among the newest. Checks with conflicts are therefore read in
    any case, and so are full checks since then, until one is found that shows the conflicts to be gone.
    """
    checks = NewestChecks()
    ids = [operation for operation in list_ended(documents, has_intent=False) if OPERATION_ID.fullmatch(operation)]
    problems: list[str] = []
    known: set[str] = set()
    for batch in read_batches(store, documents, ids[: READ_MAX if count_max is None else count_max]):
        problems += checks.add_all(batch)
        known |= {ended.id for ended in batch}
        if wanted is not None and wanted <= checks.valid.keys():
            break
    problems += _add_beyond(checks, documents, ids, known, lambda some: read_batches(store, documents, some))
    # Read the problematic operations again: the first read may have been cut short.
    for batch in read_batches(store, documents, problems):
        checks.unread.extend(checks.add_all(batch))
    checks.unread_conflicts.extend(one for one in checks.unread if CONFLICTS_OUTCOME in documents[one])
    return checks


def _add_beyond(
    checks: NewestChecks,
    documents: Mapping[str, Set[str]],
    ids: Iterable[str],
    known: Set[str],
    read: Callable[[Sequence[str]], Iterable[list[Ended]]],
) -> list[str]:
    """Add the checks with conflicts that are not `known` yet, and full checks since then; return the unreadable ids.

    `ids` are the operations without an intent that have ended, newest first.
    """
    problems: list[str] = []
    unknown = [operation for operation in ids if operation not in known]
    for batch in read([operation for operation in unknown if CONFLICTS_OUTCOME in documents[operation]]):
        problems += checks.add_all(batch)
    if unsettled := checks.unsettled:
        oldest = min(check.operation for check in unsettled)
        later = [operation for operation in unknown if operation > oldest and FULL_OUTCOME in documents[operation]]
        for batch in read(later):
            problems += checks.add_all(batch)
            if not checks.unsettled:
                break
    return problems
