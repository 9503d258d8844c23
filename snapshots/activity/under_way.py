"""The operations that are under way, or died, as the store shows them: what `status` lists. Changes nothing."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from msgspec import UnsetType

from fleet.label import read_label
from fleet.record import Time, fields_of
from snapshots.operations.open_operations import OpenOperation, read_open_operation
from snapshots.operations.operation import document_names, is_open, seems_open
from snapshots.operations.restore_decisions import is_publishing
from snapshots.operations.signs import newest_sign, sign_numbers
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import CancelRequest, Intent, SignOfLife, read_cancel_request
from storage.store import ObjectStore

# How late a sign may be. A store that does not answer, and clocks that differ, take their time.
DEAD_SECONDS = 60.0


class ActivityState(StrEnum):
    """What the store says of an operation without an outcome."""

    RUNNING = "running"
    PUBLISHING = "publishing"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class UnderWay:
    """An operation without an outcome. `opened` is None for what has no intent, `sign` if it has stored none.

    `is_decided`: a restore has decided to publish. `problem` says which of its documents can't be read, and why.
    """

    id: str
    opened: OpenOperation | None
    sign: SignOfLife | None
    request: CancelRequest | None
    is_decided: bool
    problem: str = ""

    @property
    def intent(self) -> Intent | None:
        """The operation's intent; None if it has none, or none that can be read."""
        return self.opened.operation if self.opened else None

    @property
    def kind(self) -> str:
        """Which command it is of; "" if that is not known."""
        about = self.intent or self.sign
        return about.kind if about else ""

    @property
    def snapshot(self) -> str:
        """The snapshot that it works on; "" for all."""
        about = self.intent or self.sign
        return about.snapshot if about else ""

    @property
    def increment(self) -> int | None:
        """The increment that it works on; 0 is the full snapshot."""
        about = self.intent or self.sign
        return about.increment if about else None

    @property
    def began_at(self) -> Time | None:
        """When it began."""
        about = self.intent or self.sign
        return about.began_at if about else None

    @property
    def seen_at(self) -> Time | None:
        """When its process was last known to be alive."""
        return self.sign.seen_at if self.sign else self.began_at

    @property
    def label(self) -> str:
        """The label of its process; "" if that is not known."""
        by = self.sign.by if self.sign else self.intent.by if self.intent else ""
        return "" if isinstance(by, UnsetType) else by

    @property
    def remedy(self) -> str:
        """What ends it if its process is gone; "" if it has no intent."""
        return self.opened.remedy if self.opened else ""

    def state(self, now: datetime) -> ActivityState:
        """Whether its process shows signs of life."""
        late_seconds = DEAD_SECONDS + (self.sign.next_seconds if self.sign else 0.0)
        if self.seen_at is None or datetime.fromisoformat(self.seen_at) < now - timedelta(seconds=late_seconds):
            return ActivityState.DEAD
        return ActivityState.PUBLISHING if self.is_decided else ActivityState.RUNNING

    def to_json(self, now: datetime) -> dict[str, Any]:
        """The operation as JSON output has it; unknown values are null."""
        owner, sign = read_label(self.label), self.sign
        return {
            "operation": self.id,
            "kind": self.kind or None,
            "snapshot": self.snapshot or None,
            "increment": self.increment,
            "state": self.state(now).value,
            "who": f"{owner.user}@{owner.host}" if owner else None,
            "process": owner.process if owner else None,
            "began_at": self.began_at,
            "seen_at": self.seen_at,
            "phase": sign.phase if sign else None,
            "done": sign.done if sign else None,
            "total": sign.total if sign else None,
            "unit": (sign.unit or None) if sign else None,
            "rate": sign.rate if sign else None,
            "nodes": [fields_of(one) | {"phase": sign.phase} for one in sign.nodes] if sign else [],
            "seconds_left": sign.seconds_left if sign else None,
            "seconds_left_is_rough": sign.is_rough if sign else None,
            "cancel_asked_at": self.request.asked_at if self.request else None,
            "committed": self.opened.to_json()["committed"] if self.opened else None,
            "problem": self.problem or None,
        }


def read_under_way(store: ObjectStore) -> list[UnderWay]:
    """All operations without an outcome, the oldest first: one listing, and a few reads for each."""
    found = (_read(store, operation, names) for operation, names in document_names(store).items() if _is_one(names))
    return [one for one in found if one is not None]


def read_one(store: ObjectStore, operation: str) -> UnderWay | None:
    """One operation; None if it has an outcome, or neither an intent nor a sign of life."""
    names = set(store.list_children(f"operations/{operation}"))
    return _read(store, operation, names) if _is_one(names) else None


def _is_one(names: Set[str]) -> bool:
    """Whether a folder with these names seems to be of an operation without an outcome."""
    return seems_open(names) or ("outcome.json" not in names and bool(sign_numbers(names)))


def _read(store: ObjectStore, operation: str, names: set[str]) -> UnderWay | None:
    # A listing may be out of date.
    if not is_open(store, operation):
        return None
    opened = read_open_operation(store, operation) if "intent.json" in names else None
    problem = opened.problem if opened else ""
    sign = request = None
    is_decided = False
    try:
        sign = newest_sign(store, operation, names)
        request = read_cancel_request(store, operation)
        is_decided = is_publishing(store, operation)
    except ManifestError as error:
        problem = problem or error.message
    if opened is None and sign is None:
        # It has ended since it was listed.
        return None
    return UnderWay(operation, opened, sign, request, is_decided, problem)
