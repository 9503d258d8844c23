"""The operations that are under way, or died, as the store shows them: what `status` lists. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from cutline.fleet.own_process import is_gone, is_of_one_process, read_label
from cutline.fleet.record import Time, fields_of
from cutline.snapshots.operations.open_operations import (
    OpenOperation,
    document_names,
    is_open,
    read_open_operation,
    seems_open,
)
from cutline.snapshots.operations.operation import is_publishing
from cutline.snapshots.operations.signs import newest_request, newest_sign, shows_life, sign_numbers
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import (
    DRILL,
    CancelRequest,
    Failure,
    Intent,
    SignOfLife,
    read_failure,
)
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectStore

WATCH = "watch"
HANGING_WATCH = "if no other watch works, its process may hang and hold the watch lock (see: snapshot status --nodes)"
Found = TypeVar("Found")


class ActivityState(StrEnum):
    """The state of an operation without an outcome, according to the store."""

    RUNNING = "running"
    PUBLISHING = "publishing"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class UnderWay:
    """An operation without an outcome. `opened` is None without an intent, `sign` without a stored sign.

    `is_decided`: a restore has decided to publish. `problems` say which of its documents can't be read, and why.
    `failure`: its command has ended, and left something on a node.
    """

    id: str
    opened: OpenOperation | None
    sign: SignOfLife | None
    request: CancelRequest | None
    is_decided: bool
    problems: tuple[str, ...] = ()
    failure: Failure | None = None

    @property
    def is_known(self) -> bool:
        """Whether its kind is known: its intent can be read, or it is a check, a gc or a prune."""
        return self.intent is not None or (self.opened is None and self.sign is not None)

    @property
    def intent(self) -> Intent | None:
        """The operation's intent; None if it has none, or none that can be read."""
        return self.opened.operation if self.opened else None

    @property
    def kind(self) -> str:
        """Which command it is of, or "drill"; "" if that is not known."""
        if self.intent is not None:
            return DRILL if self.intent.is_drill else self.intent.kind
        return self.sign.kind if self.sign else ""

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
    def is_gone(self) -> bool:
        """Whether its process ran on this machine, and is certainly gone."""
        about = self.sign or self.intent
        return about is not None and not isinstance(about.process, UnsetType) and is_gone(about.process)

    @property
    def remedy(self) -> str:
        """The command that ends it if its process is gone; "" if it has no intent."""
        return self.opened.remedy if self.opened else ""

    @property
    def left_text(self) -> str:
        """Its remains if its process is gone and it has no intent: the removals of a prune have their own intents."""
        return "it has left nothing" if self.kind != "prune" else "its removals are operations of their own"

    def state(self, now: datetime) -> ActivityState:
        """Whether its process shows signs of life."""
        if self.failure is not None or not shows_life(self.intent, self.sign, now):
            return ActivityState.DEAD
        return ActivityState.PUBLISHING if self.is_decided else ActivityState.RUNNING

    @property
    def dead_text(self) -> str:
        """Its fate if it is dead."""
        if self.failure is not None:
            return f"has failed ({self.failure.reason}), and left something on a node"
        return "has ended without saying how: its process is gone" if self.is_gone else "shows no sign of life"

    def settled_by(self, now: datetime) -> str:
        """The remedy if it is dead, for people; "" if it is not dead, or its kind is unknown."""
        if not self.is_known or self.state(now) is not ActivityState.DEAD:
            return ""
        if self.opened is None:
            left = self.left_text if self.kind != WATCH else HANGING_WATCH
            return f"{left}; to forget it: snapshot cancel {self.id}"
        # A removal can't be undone once it has begun to remove.
        return f"{self.remedy}; at once: snapshot cancel {self.id}" if self.kind == "create" else self.remedy

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
            "nodes": [fields_of(node) | {"phase": sign.phase} for node in sign.nodes] if sign else [],
            "other_nodes": sign.other_nodes or 0 if sign else 0,
            "seconds_left": sign.seconds_left if sign else None,
            "seconds_left_is_rough": sign.is_rough if sign else None,
            "cancel_asked_at": self.request.asked_at if self.request else None,
            "committed": self.opened.to_json()["committed"] if self.opened else None,
            "failure": self.failure.reason if self.failure else None,
            "remedy": self.settled_by(now) or None,
            "problem": "; ".join(self.problems) or None,
        }


def read_under_way(store: ObjectStore, documents: Mapping[str, Set[str]] | None = None) -> list[UnderWay]:
    """All operations without an outcome, the oldest first: one listing, and a few reads for each.

    `documents` are those of document_names, if they have been listed.
    """
    listed = document_names(store) if documents is None else documents
    ways = (_read(store, operation, names) for operation, names in listed.items())
    return [way for way in ways if way is not None]


def read_one(store: ObjectStore, operation: str) -> UnderWay | None:
    """One operation; None if it has an outcome, or neither an intent nor a sign of life."""
    return _read(store, operation, set(store.list_children(f"operations/{operation}")))


def _read(store: ObjectStore, operation: str, names: Set[str]) -> UnderWay | None:
    seems_one = seems_open(names) or ("outcome.json" not in names and bool(sign_numbers(names)))
    # A listing may be out of date.
    if not seems_one or not OPERATION_ID.fullmatch(operation) or not is_open(store, operation):
        return None
    opened = read_open_operation(store, operation, names) if "intent.json" in names else None
    problems = [opened.problem] if opened and opened.problem else []

    def read(one: Callable[[], Found], missing: Found) -> Found:
        # Each by itself: an unreadable operation hides no other.
        try:
            return one()
        except ManifestError as error:
            problems.append(error.message)
            return missing

    sign = read(lambda: newest_sign(store, operation, names), None)
    request = read(lambda: newest_request(store, operation, names), None)
    failure = read(lambda: read_failure(store, operation) if "failure.json" in names else None, None)
    is_decided = read(lambda: is_publishing(store, operation), missing=False)
    if opened is None and sign is None and not problems:
        # It has ended since it was listed.
        return None
    return UnderWay(operation, opened, sign, request, is_decided, tuple(problems), failure)


def working_watch(operations: Iterable[UnderWay], own: str, now: datetime) -> UnderWay | None:
    """The watch that has the turn, and shows signs of life; None if that is the operation `own`, or none has."""
    for operation in operations:
        state = operation.sign.watch if operation.kind == WATCH and operation.sign else UNSET
        has_turn = not isinstance(state, UnsetType) and state.had_turn
        if has_turn and operation.id != own and operation.state(now) is not ActivityState.DEAD:
            return operation
    return None


def hanging_watch(operations: Iterable[UnderWay], label: str, now: datetime) -> UnderWay | None:
    """The watch of the process with this label, if that shows no sign of life; None if it shows some.

    A restarted container has its predecessor's label: a dead watch counts for nothing while another is alive.
    """
    ways = [
        operation for operation in operations if operation.kind == WATCH and is_of_one_process(operation.label, label)
    ]
    if any(way.state(now) is not ActivityState.DEAD for way in ways):
        return None
    return max(ways, key=lambda one: one.seen_at or "", default=None)
