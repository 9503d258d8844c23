"""What the newest checks have found of restore points, by the outcomes of those that have ended.

Outcomes of checks are removed by gc after 30 days, and a check with credentials that only read stores none: what is not
found here may still have been checked. What can't be read is passed over; `history` names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from fleet.record import Time
from snapshots.activity.ended_operations import Ended, list_ended, read_batches
from snapshots.records.operation_records import VALID, CheckedPoint
from storage.ids import OPERATION_ID
from storage.store import ObjectStore

# So many of the newest operations without an intent, which are checks, gc and prunes, are looked at.
READ_MAX = 256
Key = TypeVar("Key")


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
    """The newest checks. Of restore points, by snapshot and increment: `of_points`, and those that found them valid.

    A full check is one of all that the then newest restore point of a snapshot needs. By snapshot, `last` has the
    newest check, `full` the newest full one, and `valid` the newest full one that found all of it to be valid.
    """

    of_points: dict[tuple[str, int], EndedCheck] = field(default_factory=dict)
    valid_points: dict[tuple[str, int], EndedCheck] = field(default_factory=dict)
    last: dict[str, EndedCheck] = field(default_factory=dict)
    full: dict[str, EndedCheck] = field(default_factory=dict)
    valid: dict[str, EndedCheck] = field(default_factory=dict)

    def add(self, check: EndedCheck) -> None:
        """Add a check; of two, the one that ended later is the newest."""
        point, is_valid = check.point, check.point.result == VALID
        _keep_newest(self.of_points, (point.snapshot, point.increment), check)
        _keep_newest(self.last, point.snapshot, check)
        if is_valid:
            _keep_newest(self.valid_points, (point.snapshot, point.increment), check)
        if point.full:
            _keep_newest(self.full, point.snapshot, check)
        if point.full and is_valid:
            _keep_newest(self.valid, point.snapshot, check)


def _keep_newest(newest: dict[Key, EndedCheck], key: Key, check: EndedCheck) -> None:
    # The id of an operation has the second in which it began, so ids of one second are in no order.
    if key not in newest or newest[key].moment < check.moment:
        newest[key] = check


def checks_of(ended: Ended) -> Iterator[EndedCheck]:
    """The restore points that an operation has checked; none if it was no check."""
    if ended.outcome is not None:
        for point in ended.checked:
            yield EndedCheck(ended.id, ended.outcome.ended_at, point)


def read_checks(store: ObjectStore, documents: Mapping[str, Set[str]], wanted: Set[str] | None = None) -> NewestChecks:
    """The newest checks, with at most READ_MAX reads; `documents` are those of document_names.

    With `wanted`, reading ends once a full and valid check of each of these snapshots is found.
    """
    found = NewestChecks()
    ids = [one for one in list_ended(documents, has_intent=False) if OPERATION_ID.fullmatch(one)]
    for batch in read_batches(store, documents, ids[:READ_MAX]):
        for ended in batch:
            for check in checks_of(ended):
                found.add(check)
        if wanted is not None and wanted <= found.valid.keys():
            break
    return found
