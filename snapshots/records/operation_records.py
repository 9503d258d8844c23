"""The documents of an operation: its intent, its outcome, and a restore's measurements, decision and renewals.

An operation is a single run of a command that changes something. Its intent is stored before it changes anything, and
its outcome at the end. A restore's decision is stored before the first database gets its real name. During a long
operation, signs of life report its progress, and a cancel request can ask it to stop. A check or gc leaves nothing for
others to settle, so it has no intent; nor has a prune, whose removals have their own. All these documents share one
format tag; their keys distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, UnsetType, field

from cutline.fleet.own_process import read_label
from cutline.fleet.record import Count, Record, Seconds, Time
from cutline.snapshots.records.documents import NAME, check_about, checking, read_sealed, seal
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find


class StepFigures(Record, frozen=True):
    """A step of a restore on all nodes: its duration and its amount of work (restore/estimates/estimate.py)."""

    seconds: Seconds
    amount: Count


class NodeFigures(Record, frozen=True):
    """One node's part of a restore: its rows, and the duration of each step on that node."""

    rows: Count
    seconds: dict[str, Seconds] = field(default_factory=dict)


class RestoreFigures(Record, frozen=True):
    """The figures of a restore that loaded everything itself. `bytes` counts stored bytes.

    `steps` is keyed by name and `nodes` by node. `transactions` counts the increments' transactions up to the cut.
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
# The command in the label of a drill's restore.
DRILL = "drill"
CREATE: Final = "create"
REPAIR: Final = "repair"
MERGE: Final = "merge"
DELETE: Final = "delete"
PRUNE: Final = "prune"
# The kinds of operations that change a chain in the store alone: they need no lock, but must be recorded.
IN_STORE = (REPAIR, MERGE)


ExitCode: TypeAlias = Annotated[int, Meta(ge=0, le=255)]
CheckResult: TypeAlias = Literal["valid", "one-copy", "conflicts", "inconclusive"]
VALID: Final = "valid"
CONFLICTS: Final = "conflicts"
INCONCLUSIVE: Final = "inconclusive"
# Each copy is consistent with itself, and the fleet file allows shards without a second copy.
ONE_COPY: Final = "one-copy"
PASSED = (VALID, ONE_COPY)
# In units per second; the unit may be bytes.
Rate: TypeAlias = Annotated[float, Meta(ge=0, le=1e18)]


class Intent(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """The intent of an operation, stored before it changes anything.

    `turn` is the turn of the commit or merge that the operation will write, and `slot` is the slot that a full create
    will use. `by` is the label of the command and `process` identifies its process, where the system allows it
    (fleet.own_process). If `terminal`, the operation may leave the fleet read-only.

    Only creates have `fleet_id`, the id of the store's fleet, `only_cut`, which marks a restore point, and `renews`,
    the databases (system identifier/oid) on which an increment creates the chain's slot again, by node. Only repairs
    have `repair`, the number of the repair that they will store, if any. `expires_at` is the first expiry of the lease
    of a restore, repair or merge, or of a prune with an increment: it gives up what lies before that increment. Only
    restores have the other fields. `targets` are the databases that the restore creates, as `system identifier/name`.
    `servers` are the addresses of their servers, as `host:port` or `folder of the socket:port`. `started` are the start
    times of these servers, because a physical copy of a server has the same system identifier. If `only_nodes`, the
    restore was limited to `nodes`. `exact_at` is the time whose exact state is restored, up to the cut of `increment`.
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
    renews: dict[str, str] | UnsetType = UNSET
    process: str | UnsetType = UNSET
    repair: Count | UnsetType = UNSET
    exact_at: Time | UnsetType = UNSET

    @property
    def id(self) -> str:
        """The operation's id."""
        return self.operation

    @property
    def is_drill(self) -> bool:
        """Whether the restore is a drill, whose servers stop with its process."""
        label = None if isinstance(self.by, UnsetType) else read_label(self.by)
        return label is not None and label.command == DRILL

    @property
    def is_giving_up(self) -> bool:
        """Whether the operation gives up the restore points before its increment."""
        return self.kind == PRUNE and self.increment > 0

    @property
    def is_terminal(self) -> bool:
        """Whether the operation may have made the fleet read-only."""
        return self.terminal is True


class SkippedPart(Record, frozen=True):
    """A part that a check did not compare, and the reason."""

    what: str
    why: str


class CheckFigures(Record, frozen=True):
    """The amounts that a check compared (objects, bytes, rows, changes, partitions, transactions), and its findings.

    `skipped` counts the parts that were not compared; `examples` lists the first of them.
    """

    compared: dict[str, Count]
    conflicts: Count
    skipped: Count
    examples: tuple[SkippedPart, ...] = ()


# The places of objects, by which rereading is divided, are numbers below this one (check/read_times.py).
PLACES = 1 << 32
# A ReadTimes has at most this many parts, and as many entries for increments.
READ_ENTRIES_MAX = 64
Place: TypeAlias = Annotated[int, Meta(gt=0, le=PLACES)]


class ReadPart(Record, frozen=True):
    """The objects with places below `below`, from where the part before ends: all have been read since `at`."""

    below: Place
    at: Time


class ReadIncrement(Record, frozen=True):
    """The objects that the commits up to `increment` list, after the entry before: all have been read since `at`."""

    increment: Count
    at: Time


# The longest list of spans of restore points in the result of a check.
SPANS_MAX = 1000


class ReadTimes(Record, frozen=True, kw_only=True):
    """When the objects of a chain were last read, so that a later check can rest on this check.

    The check found the chain valid up to its increment, except that shards may have one copy. An object has been read
    since the later of the times in its part and in its entry of `increments`; `oldest_at` is the oldest of these times
    of all objects. `compared_by` is the operation that read and compared everything, and ended before `compared_at`; it
    is "" if this check itself did.

    These times mean nothing for another chain, store, version or set of rules. `commits` is a digest of the commits up
    to the increment and of the repairs of their objects, and `last_operation` stored the last of these commits. `store`
    is a digest of the store's address.
    """

    commits: str
    last_operation: str
    store: str
    version: str
    rules: Count
    compared_by: str
    compared_at: Time
    oldest_at: Time
    parts: Annotated[tuple[ReadPart, ...], Meta(min_length=1, max_length=READ_ENTRIES_MAX)]
    increments: Annotated[tuple[ReadIncrement, ...], Meta(min_length=1, max_length=READ_ENTRIES_MAX)]


class CheckedPoint(Record, frozen=True):
    """A check's findings on a restore point. If `full`, it read and compared all data up to the newest restore point.

    `rests_on` is the operation of the earlier check whose record stands for the objects that this check did not read;
    UNSET if it used no record. `read` is set if later checks can rest on this check. `uncompared` are spans of earlier
    restore points, as the first and the last increment, at which the check did not compare everything. `restorable`
    says whether a restore could load the rows; UNSET if the check did not build them (`--restorable`).
    """

    snapshot: str
    increment: Count
    result: CheckResult
    full: bool
    figures: CheckFigures | UnsetType = UNSET
    rests_on: str | UnsetType = UNSET
    read: ReadTimes | UnsetType = UNSET
    uncompared: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=SPANS_MAX)] | UnsetType = UNSET
    restorable: bool | UnsetType = UNSET

    @property
    def has_passed(self) -> bool:
        """Whether the check found nothing wrong, and compared everything."""
        return self.result in PASSED

    def settles(self, conflicts: CheckedPoint) -> bool:
        """Whether this result of a later check of the same restore points shows that these conflicts are gone.

        Only building the rows again shows that a restore can load them.
        """
        return self.has_passed and (conflicts.restorable is not False or self.restorable is True)

    @property
    def compared_spans(self) -> list[tuple[int, int]]:
        """The spans of restore points about which the result says something, in order."""
        spans, begin = list[tuple[int, int]](), 0
        for first, last in () if isinstance(self.uncompared, UnsetType) or not self.has_passed else self.uncompared:
            spans, begin = [*spans, (begin, first - 1)], last + 1
        within = ((first, min(last, self.increment)) for first, last in (*spans, (begin, self.increment)))
        return [(first, last) for first, last in within if first <= last]

    @property
    def rests_on_records(self) -> bool:
        """Whether the check used the record of an earlier check."""
        return isinstance(self.rests_on, str)

    @property
    def oldest_read_at(self) -> Time | None:
        """The time since which every object has been read; None if it is not recorded."""
        return self.read.oldest_at if isinstance(self.read, ReadTimes) else None


class CopiedPoint(Record, frozen=True):
    """The newest restore point of a snapshot in a second store after a copy, and the time of its cut.

    `to` is the URL of the second store, without secrets. `behind` counts the restore points that the second store still
    lacked.
    """

    to: str
    snapshot: str
    increment: Count
    cut_at: Time
    behind: Count


class FailingTask(Record, frozen=True):
    """A failed task of a watch that has been reported and has not succeeded since."""

    task: str
    since: Time
    problem: str


class WatchState(Record, frozen=True):
    """The failures that a watch had reported by `at`, so that the next watch can report when they are over.

    `had_turn` says whether this watch was the last to do any work. Otherwise, `failing` contains only `watch` and
    `fleet-file`.
    """

    at: Time
    had_turn: bool
    failing: tuple[FailingTask, ...]


class Outcome(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """The outcome of an operation.

    `code` is the exit code of the command, `volumes` measures its work (bytes, objects, rows, …), and `causes` are the
    reasons for its retries. `phases` holds the duration of each step by name, in order. A restore that estimates rely
    on has `figures` instead; a resumed restore has neither. `checked` lists a check's findings, and `copied` what a
    copy has left in its second stores. `commit_digest` is the digest of the commit of a full snapshot, as its create
    stored it. `began_at` is as in the intent. Operations without an intent record `by` here. `snapshot` is "" for all
    snapshots.
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
    copied: tuple[CopiedPoint, ...] | UnsetType = UNSET
    phases: dict[str, Seconds] | UnsetType = UNSET
    watch: WatchState | UnsetType = UNSET
    commit_digest: str | UnsetType = UNSET


class NodeSign(Record, frozen=True, kw_only=True):
    """The progress of the current step on one node; `rate` is in units per second. Null means unknown."""

    node: str
    done: Count
    total: Count | None
    unit: str
    rate: Rate | None
    seconds_left: Seconds | None


class SignOfLife(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """The progress of an operation at `seen_at`; the next sign follows within `next_seconds`. The newest sign counts.

    `snapshot` is "" for all snapshots. `done`, `total`, `unit` and `rate` describe the step `phase`, and `nodes`
    describes its progress on each node, where known. If there are many nodes, `nodes` contains only the least advanced
    of them, and `other_nodes` counts the others. `seconds_left` is for the whole operation; if `is_rough`, it may be
    off by more than a fifth. `process` is as in Intent.
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
    """A request to stop the operation. Requests are numbered."""

    operation: str
    by: str
    asked_at: Time


class Failure(Record, frozen=True, tag_field="schema", tag=FORMAT):
    """The reason and exit code of a failed create that left something on a node, for the outcome after the cleanup.

    Also of one run of a full snapshot that was interrupted, and that a repetition of the command can resume, and of a
    removal that has not finished.
    """

    operation: str
    reason: str
    code: ExitCode
    failed_at: Time


class Decision(Record, frozen=True, kw_only=True, tag_field="schema", tag=FORMAT):
    """The decision on a restore's databases: all get their real names (`publish`), or all are dropped (`abandon`).

    The decision that is stored first counts.
    """

    operation: str
    decision: Literal["publish", "abandon"]
    by: str
    decided_at: Time


class LeaseRenewal(Record, frozen=True, tag_field="schema", tag=FORMAT):
    """A renewal of a restore's lease, with its new expiry."""

    operation: str
    expires_at: Time


Found = TypeVar("Found", Outcome, Failure, Decision, LeaseRenewal, SignOfLife, CancelRequest)
OperationRecord: TypeAlias = Intent | Outcome | Failure | Decision | LeaseRenewal | SignOfLife | CancelRequest


# The documents that end an operation. An increment that stored only its commit has an increment.json: an outcome that
# also contains the data of the intent, which is deleted.
IDLE_OUTCOME = "increment.json"
# The outcome of a check that found conflicts, and of any other check that read a snapshot completely, have names of
# their own: a listing shows them among any number of operations, however long ago the check began.
CONFLICTS_OUTCOME, FULL_OUTCOME = "conflicts.json", "full-check.json"
# `cancel` may have stored an outcome.json for a check that seemed dead; what the check itself found comes first.
CHECK_OUTCOMES = (CONFLICTS_OUTCOME, FULL_OUTCOME, "outcome.json")
OUTCOMES = frozenset({*CHECK_OUTCOMES, IDLE_OUTCOME})
INTENTS = frozenset({"intent.json", IDLE_OUTCOME})


def operation_key(operation_id: str, name: str) -> str:
    """Return the key of the operation's document `name`."""
    return f"operations/{operation_id}/{name}.json"


def write_operation_record(store: ObjectStore, name: str, record: OperationRecord) -> None:
    """Store a document of an operation; raise ObjectExistsError if it exists with different content."""
    create_or_find(store, operation_key(record.operation, name), seal(record))


def read_intent(store: ObjectStore, operation_id: str) -> Intent:
    """Return an intent; raise ObjectMissingError or ManifestError."""
    key = operation_key(operation_id, "intent")
    intent: Intent = read_sealed(store, key, Intent)
    check_about(key, f"operation {intent.operation}", f"operation {operation_id}")
    with checking(key):
        if intent.kind == "create" and not NAME.fullmatch(intent.snapshot):
            raise ValueError(f"snapshot {intent.snapshot!r}")
    return intent


def outcome_name(checked: Iterable[CheckedPoint]) -> str:
    """Return the document name, without `.json`, for the outcome of a check with these findings; see CHECK_OUTCOMES."""
    points = list(checked)
    if any(point.result == CONFLICTS for point in points):
        return CONFLICTS_OUTCOME.removesuffix(".json")
    return (FULL_OUTCOME if any(point.full for point in points) else "outcome.json").removesuffix(".json")


def read_outcome(store: ObjectStore, operation_id: str) -> Outcome | None:
    """Return the outcome of an operation with an intent, or None if it is missing; raise ManifestError."""
    return _read(store, operation_id, "outcome", Outcome) or _read(store, operation_id, "increment", Outcome)


def read_any_outcome(store: ObjectStore, operation_id: str, names: Iterable[str] = CHECK_OUTCOMES) -> Outcome | None:
    """Return the outcome of an operation that may be a check, or None if it is missing; raise ManifestError.

    `names` are the names of the operation's documents, if they are known; that saves requests.
    """
    stored = set(names)
    for name in CHECK_OUTCOMES:
        if name in stored and (found := _read(store, operation_id, name.removesuffix(".json"), Outcome)):
            return found
    return _read(store, operation_id, IDLE_OUTCOME.removesuffix(".json"), Outcome)


def read_failure(store: ObjectStore, operation_id: str, name: str = "failure") -> Failure | None:
    """Return the reason for an operation's failure, or None if it is missing; raise ManifestError."""
    return _read(store, operation_id, name, Failure)


def read_decision(store: ObjectStore, operation_id: str) -> Decision | None:
    """Return a restore's decision, or None if it is missing; raise ManifestError."""
    return _read(store, operation_id, "decision", Decision)


def read_renewal(store: ObjectStore, operation_id: str, number: int) -> LeaseRenewal | None:
    """Return renewal `number` of a lease (from 1), or None if it is missing; raise ManifestError."""
    return _read(store, operation_id, f"lease-{number}", LeaseRenewal)


def read_sign(store: ObjectStore, operation_id: str, number: int) -> SignOfLife | None:
    """Return sign of life `number` (from 1), or None if it is missing; raise ManifestError."""
    return _read(store, operation_id, f"sign-{number}", SignOfLife)


def read_cancel_request(store: ObjectStore, operation_id: str, number: int) -> CancelRequest | None:
    """Return cancel request `number` (from 1), or None if it is missing; raise ManifestError."""
    return _read(store, operation_id, f"cancel-{number}", CancelRequest)


def _read(store: ObjectStore, operation_id: str, name: str, kind: type[Found]) -> Found | None:
    key = operation_key(operation_id, name)
    try:
        found: Found = read_sealed(store, key, kind)
    except ObjectMissingError:
        return None
    check_about(key, f"operation {found.operation}", f"operation {operation_id}")
    return found
