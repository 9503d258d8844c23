"""The documents of an operation: its intent, its outcome, and a restore's measurements, decision and renewals.

An operation is a single run of a command that changes something. Its intent is stored before it changes anything, its
outcome at the end. A restore's decision is stored before the first database gets its real name. While an operation runs
for long, signs of life say how far it is, and anybody may ask it to stop. A check and a gc change nothing that others
would have to settle, so they have no intent. All kinds share one format tag; the key tells them apart.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, UnsetType, field

from cutline.fleet.own_process import read_label
from cutline.fleet.record import Count, Record, Seconds, Time
from cutline.snapshots.records.documents import check_about, checking, read_sealed, seal
from cutline.snapshots.records.proven_chains import NAME
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find


class StepFigures(Record, frozen=True):
    """A step of a restore, on all nodes: how long it took, and its amount of work (restore/estimates/estimate.py)."""

    seconds: Seconds
    amount: Count


class NodeFigures(Record, frozen=True):
    """One node's part of a restore: its rows, and how long steps took there."""

    rows: Count
    seconds: dict[str, Seconds] = field(default_factory=dict)


class RestoreFigures(Record, frozen=True):
    """The figures of a restore that loaded everything itself; `steps` by name, `nodes` by node, `bytes` as stored.

    `transactions` are those of the increments up to the cut.
    """

    rows: Count
    bytes: Count
    seconds: Seconds
    steps: dict[str, StepFigures]
    nodes: dict[str, NodeFigures]
    transactions: Count


FORMAT = "cutline/operation/1"
DONE: Literal["done"] = "done"
FAILED: Literal["failed"] = "failed"
# The command in the label of a restore that is a drill.
DRILL = "drill"


ExitCode: TypeAlias = Annotated[int, Meta(ge=0, le=255)]
CheckResult: TypeAlias = Literal["valid", "conflicts", "inconclusive"]
VALID: Final = "valid"
CONFLICTS: Final = "conflicts"
INCONCLUSIVE: Final = "inconclusive"
# Units per second, bytes among them.
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]


class Intent(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """The intent of an operation, stored before it changes anything.

    `turn` is the turn of the commit that it will write. `slot` is the slot that a full create makes. `terminal`: the
    operation may leave the fleet read-only. `by` is the label of the command (fleet.own_process). Only creates have
    `fleet_id`, that of the store, and `only_cut`: they are without rows. Only restores have the fields that follow.
    `expires_at` is when the lease first expires. `targets` are the databases that the restore makes, as `system
    identifier/name`. `servers` are their addresses, as `host:port` or `folder of the socket:port`, and `started` when
    these servers were started, because a physical copy of a server has its system identifier. `only_nodes`: it was
    asked for `nodes` alone. Every intent has `process`, that of the command (fleet.own_process), where its system
    tells.
    """

    operation: str
    kind: str
    snapshot: str
    increment: Count
    turn: Count = 1
    began_at: Time
    nodes: tuple[str, ...]
    slot: str | None
    terminal: bool | UnsetType = UNSET
    fleet_id: str | UnsetType = field(default=UNSET, name="fleet")
    expires_at: Time | UnsetType = UNSET
    by: str | UnsetType = UNSET
    targets: tuple[str, ...] | UnsetType = UNSET
    servers: tuple[str, ...] | UnsetType = UNSET
    started: tuple[str, ...] | UnsetType = UNSET
    only_nodes: bool | UnsetType = UNSET
    only_cut: bool | UnsetType = UNSET
    process: str | UnsetType = UNSET

    @property
    def id(self) -> str:
        """The operation's id."""
        return self.operation

    @property
    def is_drill(self) -> bool:
        """Whether a restore makes its servers itself, which are gone when its process is."""
        label = None if isinstance(self.by, UnsetType) else read_label(self.by)
        return label is not None and label.command == DRILL

    @property
    def is_terminal(self) -> bool:
        """Whether the operation may have made the fleet read-only."""
        return self.terminal is True


class SkippedPart(Record, frozen=True):
    """Something that a check did not compare, and why."""

    what: str
    why: str


class CheckFigures(Record, frozen=True):
    """How much a check compared: objects, bytes, rows, changes, partitions and transactions; and its findings.

    `skipped` counts the parts not compared; `examples` are the first of them.
    """

    compared: dict[str, Count]
    conflicts: Count
    skipped: Count
    examples: tuple[SkippedPart, ...] = ()


class CheckedPoint(Record, frozen=True):
    """A check's findings on a restore point; `full`: on all that the newest restore point of its snapshot needs."""

    snapshot: str
    increment: Count
    result: CheckResult
    full: bool
    figures: CheckFigures | UnsetType = UNSET


class FailingTask(Record, frozen=True):
    """A task of a watch that has failed and has been told; it has not been done since."""

    task: str
    since: Time
    problem: str


class WatchState(Record, frozen=True):
    """The reports of a watch on its tasks up to `at`, so that the next watch reports their end.

    `had_turn`: it was the last watch to work. If not, only `watch` and `fleet-file` are among them.
    """

    at: Time
    had_turn: bool
    failing: tuple[FailingTask, ...]


class Outcome(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """How an operation ended.

    `code` is the exit code of the command, `volumes` counts its work (bytes, objects, rows, …), and `causes` are the
    reasons of its retries. `phases` has the seconds of each step by its name, in order; a restore that estimates rely
    on has `figures` in their place, and a resumed restore has neither. `checked` are a check's findings. Operations
    without an intent have `by` and `began_at` here; `snapshot` is "" for all.
    """

    operation: str
    kind: str
    snapshot: str
    increment: Count | UnsetType = UNSET
    state: Literal["done", "failed"]
    reason: str
    ended_at: Time
    figures: RestoreFigures | UnsetType = UNSET
    by: str | UnsetType = UNSET
    began_at: Time | UnsetType = UNSET
    code: ExitCode | UnsetType = UNSET
    volumes: dict[str, Count] | UnsetType = UNSET
    causes: tuple[str, ...] | UnsetType = UNSET
    checked: tuple[CheckedPoint, ...] | UnsetType = UNSET
    phases: dict[str, Seconds] | UnsetType = UNSET
    watch: WatchState | UnsetType = UNSET


class NodeSign(Record, frozen=True, kw_only=True):
    """How far the current step is on one node; `rate` is in units per second. Null: it is not known."""

    node: str
    done: Count
    total: Count | None
    unit: str
    rate: Rate | None
    seconds_left: Seconds | None


class SignOfLife(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """How far an operation was at `seen_at`; the next sign follows within `next_seconds`. The newest counts.

    `snapshot` is "" for all. `done`, `total`, `unit` and `rate` describe the step `phase`, `nodes` its nodes as far as
    they are known. `seconds_left` is for the whole operation; if it `is_rough`, it may be off by more than a fifth. Of
    many nodes only the least advanced are among `nodes`; `other_nodes` counts the others. `process` is as in Intent.
    """

    operation: str
    kind: str
    snapshot: str
    increment: Count | None
    by: str
    began_at: Time
    seen_at: Time
    next_seconds: Seconds
    phase: str
    done: Count
    total: Count | None
    unit: str
    rate: Rate | None
    nodes: tuple[NodeSign, ...]
    other_nodes: Count | UnsetType = UNSET
    seconds_left: Seconds | None
    is_rough: bool
    watch: WatchState | UnsetType = UNSET
    process: str | UnsetType = UNSET


class CancelRequest(Record, frozen=True, tag_field="schema", tag=FORMAT):
    """Somebody asks the process that works on the operation to stop. Requests are numbered."""

    operation: str
    by: str
    asked_at: Time


class Failure(Record, frozen=True, tag_field="schema", tag=FORMAT):
    """Why a create failed, and its exit code: it left something on a node; the command that removes it records this."""

    operation: str
    reason: str
    code: ExitCode
    failed_at: Time


class Decision(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """What becomes of a restore's databases: all get their real names (`publish`), or all are dropped (`abandon`).

    The first one stored counts.
    """

    operation: str
    decision: Literal["publish", "abandon"]
    by: str
    decided_at: Time


class LeaseRenewal(Record, frozen=True, tag_field="schema", tag=FORMAT):
    """A renewal of a restore's lease: the new time at which it expires."""

    operation: str
    expires_at: Time


Found = TypeVar("Found", Outcome, Failure, Decision, LeaseRenewal, SignOfLife, CancelRequest)
OperationRecord: TypeAlias = Intent | Outcome | Failure | Decision | LeaseRenewal | SignOfLife | CancelRequest


def operation_key(operation_id: str, name: str) -> str:
    """The key of the operation's document `name`."""
    return f"operations/{operation_id}/{name}.json"


def write_operation_record(store: ObjectStore, name: str, record: OperationRecord) -> None:
    """Store a document of an operation; raise ObjectExistsError if it exists with other content."""
    create_or_find(store, operation_key(record.operation, name), seal(record))


def read_intent(store: ObjectStore, operation_id: str) -> Intent:
    """Read an intent; raise ObjectMissingError, ManifestError."""
    key = operation_key(operation_id, "intent")
    intent: Intent = read_sealed(store, key, Intent)
    check_about(key, f"operation {intent.operation}", f"operation {operation_id}")
    with checking(key):
        if intent.kind == "create" and not NAME.fullmatch(intent.snapshot):
            raise ValueError(f"snapshot {intent.snapshot!r}")
    return intent


def read_outcome(store: ObjectStore, operation_id: str) -> Outcome | None:
    """Read an outcome, None if there is none; raise ManifestError."""
    return _read(store, operation_id, "outcome", Outcome)


def read_failure(store: ObjectStore, operation_id: str) -> Failure | None:
    """Read why an operation has failed, None if that is not recorded; raise ManifestError."""
    return _read(store, operation_id, "failure", Failure)


def read_decision(store: ObjectStore, operation_id: str) -> Decision | None:
    """Read a restore's decision, None if there is none; raise ManifestError."""
    return _read(store, operation_id, "decision", Decision)


def read_renewal(store: ObjectStore, operation_id: str, number: int) -> LeaseRenewal | None:
    """Read renewal `number` of a lease, from 1 on; None if there is none. Raises ManifestError."""
    return _read(store, operation_id, f"lease-{number}", LeaseRenewal)


def read_sign(store: ObjectStore, operation_id: str, number: int) -> SignOfLife | None:
    """Read the sign of life `number`, from 1 on; None if there is none. Raises ManifestError."""
    return _read(store, operation_id, f"sign-{number}", SignOfLife)


def read_cancel_request(store: ObjectStore, operation_id: str, number: int) -> CancelRequest | None:
    """Read request `number` to stop an operation, from 1 on; None if there is none. Raises ManifestError."""
    return _read(store, operation_id, f"cancel-{number}", CancelRequest)


def _read(store: ObjectStore, operation_id: str, name: str, kind: type[Found]) -> Found | None:
    """Read the operation's document `name`, None if there is none; raise ManifestError."""
    key = operation_key(operation_id, name)
    try:
        found: Found = read_sealed(store, key, kind)
    except ObjectMissingError:
        return None
    check_about(key, f"operation {found.operation}", f"operation {operation_id}")
    return found
