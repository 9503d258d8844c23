"""The operations that are running or dead according to the store, as `status` lists them. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import UNSET, Struct, UnsetType

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
    CREATE,
    DELETE,
    DRILL,
    OUTCOMES,
    PRUNE,
    CancelRequest,
    Failure,
    Intent,
    SignOfLife,
    read_failure,
)
from cutline.storage.errors import RefusedError
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectStore

WATCH = "watch"
HANGING_WATCH = (
    "if no other watch is working, its process may be hung and still holding the watch lock"
    " (see: snapshot status --nodes)"
)
Found = TypeVar("Found")


class ActivityState(StrEnum):
    """The state of an operation without an outcome, according to the store.

    Unfinished is a removal whose command has ended because the store refused to delete objects.
    """

    RUNNING = "running"
    PUBLISHING = "publishing"
    UNFINISHED = "unfinished"
    DEAD = "dead"


class UnderWay(Struct, frozen=True):
    """An operation without an outcome. `opened` is None if no intent is stored; `sign` is None if no sign is stored.

    `is_decided` is set if a restore has decided to publish. `problems` describe the documents that can't be read.
    `failure` is set if the command has ended, but left something behind: on a node, or objects that it was to remove.
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
        """Whether the kind is known: the intent can be read, or a check, gc or prune left a sign behind."""
        return self.intent is not None or (self.opened is None and self.sign is not None)

    @property
    def intent(self) -> Intent | None:
        """The operation's intent; None if it is missing or can't be read."""
        return self.opened.operation if self.opened else None

    @property
    def kind(self) -> str:
        """The command, or "drill"; "" if it is not known."""
        if self.intent is not None:
            return DRILL if self.intent.is_drill else self.intent.kind
        return self.sign.kind if self.sign else ""

    @property
    def snapshot(self) -> str:
        """The snapshot; "" for all."""
        about = self.intent or self.sign
        return about.snapshot if about else ""

    @property
    def increment(self) -> int | None:
        """The increment; 0 is the full snapshot."""
        about = self.intent or self.sign
        return about.increment if about else None

    @property
    def exact_at(self) -> Time | None:
        """The time whose exact state a restore restores; None if it restores a cut."""
        return None if self.intent is None or isinstance(self.intent.exact_at, UnsetType) else self.intent.exact_at

    @property
    def began_at(self) -> Time | None:
        """The time at which the operation began."""
        about = self.intent or self.sign
        return about.began_at if about else None

    @property
    def seen_at(self) -> Time | None:
        """The time at which the process was last known to be alive."""
        if self.intent is not None and self.opened is not None:
            return self.opened.seen_at
        return self.sign.seen_at if self.sign else self.began_at

    @property
    def interruption(self) -> Failure | None:
        """How the last run of a full snapshot ended that can be resumed; None if it runs, or could not say so."""
        return self.opened.interruption if self.opened else None

    @property
    def label(self) -> str:
        """The label of the process; "" if it is not known."""
        by = self.sign.by if self.sign else self.intent.by if self.intent else ""
        return "" if isinstance(by, UnsetType) else by

    @property
    def is_gone(self) -> bool:
        """Whether the process ran on this machine and has certainly ended."""
        about = self.sign or self.intent
        return about is not None and not isinstance(about.process, UnsetType) and is_gone(about.process)

    @property
    def remedy(self) -> str:
        """The command that ends the operation if its process is gone; "" if there is no intent."""
        return self.opened.remedy if self.opened else ""

    @property
    def left_text(self) -> str:
        """What a dead operation without an intent left behind. The removals of a prune have their own intents."""
        return "it left nothing behind" if self.kind != "prune" else "its removals are separate operations"

    def state(self, now: datetime) -> ActivityState:
        """Return the state according to the signs of life of the process."""
        # Slots that are left on a node keep WAL there: such a removal counts as dead, for which there is an alert.
        is_refused = self.failure is not None and self.failure.code == RefusedError.exit_code
        if is_refused and self.kind in (DELETE, PRUNE):
            return ActivityState.UNFINISHED
        if self.failure is not None or self.interruption is not None or not shows_life(self.intent, self.sign, now):
            return ActivityState.DEAD
        return ActivityState.PUBLISHING if self.is_decided else ActivityState.RUNNING

    def has_ended(self, now: datetime) -> bool:
        """Whether the operation's process has ended, or seems to."""
        return self.state(now) in (ActivityState.UNFINISHED, ActivityState.DEAD)

    @property
    def dead_text(self) -> str:
        """The reason why the operation is considered dead or unfinished."""
        if self.failure is not None and self.kind in (DELETE, PRUNE):
            return f"has not finished ({self.failure.reason})"
        if self.failure is not None:
            return f"has failed ({self.failure.reason}) and left something behind on a node"
        if self.opened is not None and self.interruption is not None:
            return self.opened.dead_text
        return "has ended without an outcome: its process is gone" if self.is_gone else "shows no sign of life"

    def settled_by(self, now: datetime) -> str:
        """Return the remedy to show for an operation that has ended; "" if it has not, or its kind is unknown."""
        if not self.is_known or not self.has_ended(now):
            return ""
        if self.opened is None:
            left = self.left_text if self.kind != WATCH else HANGING_WATCH
            return f"{left}; to forget it: snapshot cancel {self.id}"
        # A removal can't be undone once it has started to remove anything.
        if self.kind != CREATE:
            return self.remedy
        ends = "give it up" if self.opened.is_resumable else "settle it now"
        return f"{self.remedy}; to {ends}: snapshot cancel {self.id}"

    def to_json(self, now: datetime) -> dict[str, Any]:
        """Return the operation for JSON output; unknown values are null."""
        owner, sign = read_label(self.label), self.sign
        return {
            "operation": self.id,
            "kind": self.kind or None,
            "snapshot": self.snapshot or None,
            "increment": self.increment,
            "exact_at": self.exact_at,
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
            "resumable": self.opened is not None and self.opened.is_resumable,
            "kept": self.opened.to_json()["kept"] if self.opened else None,
            "failure": self.failure.reason if self.failure else None,
            "remedy": self.settled_by(now) or None,
            "problem": "; ".join(self.problems) or None,
        }


def read_under_way(store: ObjectStore, documents: Mapping[str, Set[str]] | None = None) -> list[UnderWay]:
    """Read all operations without an outcome, oldest first, with a few reads for each.

    `documents` is the result of document_names, if the caller has it.
    """
    listed = document_names(store) if documents is None else documents
    ways = (_read(store, operation, names) for operation, names in listed.items())
    return [way for way in ways if way is not None]


def read_one(store: ObjectStore, operation: str) -> UnderWay | None:
    """Read one operation; None if it has an outcome, or if it has neither an intent nor a sign of life."""
    return _read(store, operation, set(store.list_children(f"operations/{operation}")))


def _read(store: ObjectStore, operation: str, names: Set[str]) -> UnderWay | None:
    seems_one = seems_open(names) or (names.isdisjoint(OUTCOMES) and bool(sign_numbers(names)))
    has_intent = "intent.json" in names
    # A listing may be out of date.
    if (
        not seems_one
        or not OPERATION_ID.fullmatch(operation)
        or not is_open(store, operation, may_be_check=not has_intent)
    ):
        return None
    opened = read_open_operation(store, operation, names) if has_intent else None
    problems = [opened.problem] if opened and opened.problem else []

    def read(one: Callable[[], Found], missing: Found) -> Found:
        # Handle each document separately, so that an unreadable document doesn't hide the others.
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
        # The operation has ended since it was listed.
        return None
    return UnderWay(operation, opened, sign, request, is_decided, tuple(problems), failure)


def working_watch(operations: Iterable[UnderWay], own: str, now: datetime) -> UnderWay | None:
    """Return the watch whose turn it is, if it shows signs of life and is not the operation `own`; else None."""
    for operation in operations:
        state = operation.sign.watch if operation.kind == WATCH and operation.sign else UNSET
        has_turn = not isinstance(state, UnsetType) and state.had_turn
        if has_turn and operation.id != own and operation.state(now) is not ActivityState.DEAD:
            return operation
    return None


def hanging_watch(operations: Iterable[UnderWay], label: str, now: datetime) -> UnderWay | None:
    """Return the watch of the process with this label if no such watch shows a sign of life; else None.

    A restarted container keeps its label, so a dead watch is ignored while another watch with its label is alive.
    """
    ways = [
        operation for operation in operations if operation.kind == WATCH and is_of_one_process(operation.label, label)
    ]
    if any(way.state(now) is not ActivityState.DEAD for way in ways):
        return None
    return max(ways, key=lambda one: one.seen_at or "", default=None)
