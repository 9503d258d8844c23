"""Record how an operation without an intent ended: a check, a gc, a watch. Others record their own outcome."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, UnsetType

from cutline.fleet.record import Time
from cutline.snapshots.activity.command import Command
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.operation_records import CheckedPoint, Outcome, WatchState, write_operation_record
from cutline.storage.store import ObjectExistsError, ObjectStore


@dataclass(frozen=True, slots=True)
class Ending:
    """How an operation without an intent ended; see Outcome. `code` None: its process could not say it."""

    state: Literal["done", "failed"]
    reason: str = ""
    code: int | None = None
    volumes: Mapping[str, int] = field(default_factory=dict)
    checked: tuple[CheckedPoint, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    watch: WatchState | UnsetType = UNSET


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
        watch=ending.watch,
    )
    with suppress(ObjectExistsError):
        write_operation_record(store, "outcome", outcome)
