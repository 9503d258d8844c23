"""What the newest checks have found of restore points, by the outcomes of those that have ended.

Outcomes of checks are removed by gc after 30 days, and a check with credentials that only read stores none: what is not
found here may still have been checked. What can't be read, twice, is passed over and named; `history` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from cutline.fleet.record import Time
from cutline.snapshots.activity.ended_operations import Ended, list_ended, read_batches
from cutline.snapshots.records.operation_records import CONFLICTS, INCONCLUSIVE, VALID, CheckedPoint
from cutline.storage.clock import utc_now
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectStore

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
    `full` the newest full one, and `valid` the newest full one that found all of it to be valid. `unread` are the
    operations whose outcome can't be read, which may be checks, and checks that end in the future: their clock was
    ahead, so they may be older than others. Of these only conflicts count.
    """

    by_snapshot: dict[str, list[EndedCheck]] = field(default_factory=dict)
    last: dict[str, EndedCheck] = field(default_factory=dict)
    full: dict[str, EndedCheck] = field(default_factory=dict)
    valid: dict[str, EndedCheck] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def add(self, check: EndedCheck) -> None:
        """Add a check; of two, the one that ended later is the newest."""
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
        found = standing_check(self.by_snapshot.get(snapshot, []), count)
        return found if found and found.point.result == CONFLICTS else None


def _keep_newest(newest: dict[str, EndedCheck], key: str, check: EndedCheck) -> None:
    # The id of an operation has the second in which it began, so ids of one second are in no order.
    if key not in newest or newest[key].moment < check.moment:
        newest[key] = check


def newest_covering(checks: Iterable[EndedCheck], count: int) -> list[EndedCheck | None]:
    """By increment, of `count` restore points of a snapshot: the newest of its checks that covers it.

    An inconclusive check counts only if no other one covers it. A check up to an increment covers the restore points
    before it, too: it reads all that they need. Those after it need the same objects. So if it found conflicts, it
    counts for them as well, unless a newer one covers them, or has found the increment itself to be valid.
    """
    covering: list[EndedCheck | None] = []
    newest_first = sorted(checks, key=lambda one: one.moment, reverse=True)
    for one in sorted(newest_first, key=lambda one: one.point.result == INCONCLUSIVE):
        covering += [one] * (min(one.point.increment + 1, count) - len(covering))
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

    One that found conflicts stands until a full one that ended later covers the same restore points and finds all of
    them valid: a check of less, or an inconclusive one, may have passed over the damage.
    """
    settling = [
        one for one in checks if one.point.result == CONFLICTS or (one.point.full and one.point.result == VALID)
    ]
    covering = [one for one in newest_covering(settling, count) if one is not None]
    conflicts = [one for one in covering if one.point.result == CONFLICTS]
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
    found = NewestChecks()
    ids = [one for one in list_ended(documents, has_intent=False) if OPERATION_ID.fullmatch(one)]
    problems: list[str] = []
    for batch in read_batches(store, documents, ids[: READ_MAX if count_max is None else count_max]):
        problems += found.add_all(batch)
        if wanted is not None and wanted <= found.valid.keys():
            break
    # A read may have been cut short.
    for batch in read_batches(store, documents, problems):
        found.unread.extend(found.add_all(batch))
    return found
