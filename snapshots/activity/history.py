"""Operations that have ended: how they are recorded if they have no intent, and what `history` lists.

Records of operations that have committed stay as long as their snapshot; others are removed by gc after 30 days.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Literal, TypeVar

from msgspec import UNSET, UnsetType

from fleet.label import read_label
from fleet.record import Time, to_builtins
from snapshots.activity.command import Command
from snapshots.operations.operation import current_time
from snapshots.operations.recorded import document_names
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import (
    CheckedPoint,
    Intent,
    Outcome,
    read_intent,
    read_outcome,
    write_operation_record,
)
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ending:
    """How an operation without an intent ended; see Outcome. `code` None: its process could not say it."""

    state: Literal["done", "failed"]
    reason: str = ""
    code: int | None = None
    volumes: Mapping[str, int] = field(default_factory=dict)
    checked: tuple[CheckedPoint, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)


def record_without_intent(store: ObjectStore, command: Command, began_at: Time, by: str, ending: Ending) -> None:
    """Store the outcome of an operation that has no intent, unless it has one; raises StoreUnreachableError."""
    outcome = Outcome(
        operation=command.operation,
        kind=command.kind,
        snapshot=command.snapshot,
        increment=UNSET,
        state=ending.state,
        reason=ending.reason,
        ended_at=current_time(),
        by=by,
        began_at=began_at,
        code=UNSET if ending.code is None else ending.code,
        volumes=dict(ending.volumes),
        checked=ending.checked or UNSET,
        phases=dict(ending.phases) or UNSET,
    )
    with suppress(ObjectExistsError):
        write_operation_record(store, "outcome", outcome)


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
        return _or(self.outcome.snapshot, "") if self.outcome else ""

    @property
    def kind(self) -> str:
        """Which command it was of; "" if that is not known."""
        if self.intent is not None:
            return self.intent.kind
        return _or(self.outcome.kind, "") if self.outcome else ""

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
    def label(self) -> str:
        """The label of its process; "" if that is not known."""
        by = self.intent.by if self.intent else self.outcome.by if self.outcome else ""
        return _or(by, "")

    @property
    def seconds(self) -> float | None:
        """How long it took, until its outcome was recorded."""
        if self.outcome is None or self.began_at is None:
            return None
        lasted = datetime.fromisoformat(self.outcome.ended_at) - datetime.fromisoformat(self.began_at)
        return max(lasted.total_seconds(), 0.0)

    @property
    def volumes(self) -> dict[str, int]:
        """What it worked on, by unit."""
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
        """What a check found of each restore point; empty if that is not recorded."""
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


def read_history(store: ObjectStore, count: int, snapshot: str | None = None) -> list[Ended]:
    """The last `count` operations that have ended, of one snapshot or of all, the newest first.

    It takes one listing, and two reads for each operation that is looked at.
    """
    ids = [one for one, names in document_names(store).items() if "outcome.json" in names]
    read = (found for one in reversed(ids) if (found := read_ended(store, one)) is not None)
    return list(islice((one for one in read if snapshot in (None, one.snapshot)), count))


def read_ended(store: ObjectStore, operation: str) -> Ended | None:
    """One operation that has ended; None if it has no outcome."""
    intent: Intent | None = None
    try:
        with suppress(ObjectMissingError):
            intent = read_intent(store, operation)
        outcome = read_outcome(store, operation)
    except ManifestError as error:
        return Ended(operation, intent, None, error.message)
    return Ended(operation, intent, outcome) if outcome else None


def _or(value: Value | UnsetType, default: Value) -> Value:
    return default if isinstance(value, UnsetType) else value
