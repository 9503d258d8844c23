"""The records of operations: which operations are open, which have failed, and which commits they report.

An operation without an outcome is running, has died, or lost the answer to its commit; the store alone does not show
which. Only its commit counts, and the next operation that holds the fleet's lock settles it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from msgspec import Struct, UnsetType

from cutline.fleet.messages import SAME_TARGET, abandon_command, list_some, resume_command
from cutline.fleet.own_process import Label, read_label
from cutline.fleet.record import Time
from cutline.snapshots.operations.committing import has_committed
from cutline.snapshots.operations.signs import newest_sign, shows_life
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import (
    CHECK_OUTCOMES,
    CREATE,
    DELETE,
    DRILL,
    FAILED,
    IN_STORE,
    MERGE,
    OUTCOMES,
    PRUNE,
    REPAIR,
    Failure,
    Intent,
    Outcome,
    SignOfLife,
    read_any_outcome,
    read_intent,
    read_outcome,
)
from cutline.snapshots.records.proven_chains import SnapshotMissingError, find_place, increment_label
from cutline.snapshots.records.tombstones import is_deleted
from cutline.snapshots.records.unfinished_records import (
    CopiedShare,
    is_unfinished_base,
    last_run,
    read_copied_share,
    read_interruption,
    read_resumption,
)
from cutline.storage.clock import utc_now
from cutline.storage.store import ObjectMissingError, ObjectStore

READS_AT_ONCE = 16
# Every outcome is at least this long.
OUTCOME_BYTES_MIN = 100


def read_open_intents(store: ObjectStore, *, skips_unreadable: bool = False) -> list[Intent]:
    """Read the intents of all open operations, oldest first; raise ManifestError if an intent can't be read.

    With `skips_unreadable`, leave out unreadable intents, so that they don't block other commands.
    """
    intents: list[Intent] = []
    for operation_id in open_operation_ids(store):
        try:
            intents.append(read_intent(store, operation_id))
        except ObjectMissingError:
            continue  # gc removes old records, the intent first
        except ManifestError:
            if not skips_unreadable:
                raise
    return intents


def open_operation_ids(store: ObjectStore, documents: Mapping[str, Set[str]] | None = None) -> list[str]:
    """Return the ids of all operations without an outcome, oldest first.

    `documents` is the result of document_names, if the caller has it. Reads each operation that was listed with an
    intent but no outcome.
    """
    listed = document_names(store) if documents is None else documents
    ids = [one for one, names in listed.items() if seems_open(names)]
    # A listing may be out of date.
    return [operation for operation in ids if is_open(store, operation)]


FAILURE = "failure.json"


def is_resumable(store: ObjectStore, intent: Intent, names: Set[str]) -> bool:
    """Whether an open operation is a full snapshot that has copied tables, and may still commit.

    `names` are those of its documents. Not if a void has taken the place of its commit, or if it has ended and left
    something on a node: then it is settled. Raises ManifestError.
    """
    if intent.kind != CREATE or intent.increment or FAILURE in names or not is_unfinished_base(names):
        return False
    if is_deleted(store, intent.snapshot):
        return False
    place = find_place(store, intent.snapshot, 0)
    return place.commit is None and place.turn == intent.turn


def resumable_creates(store: ObjectStore, documents: Mapping[str, Set[str]]) -> list[Intent]:
    """Return the interrupted full snapshots that can be resumed, oldest first.

    `documents` is the result of document_names. What can't be read is left to settling.
    """
    found: list[Intent] = []
    for operation in open_operation_ids(store, documents):
        if is_unfinished_base(documents[operation]):
            try:
                intent = read_intent(store, operation)
                if is_resumable(store, intent, documents[operation]):
                    found.append(intent)
            except (ObjectMissingError, ManifestError):
                continue
    return found


def document_names(store: ObjectStore) -> dict[str, set[str]]:
    """List the names of all documents by operation, oldest operation first, in one listing.

    Of operations with an intent, leaves out objects that are named like an outcome, but are too short to be one: these
    operations are open. Without an intent, such as for checks, only the name shows that something has ended: the object
    stays, and its readers find that it is damaged.
    """
    documents: dict[str, set[str]] = {}
    short: dict[str, set[str]] = {}
    for listed in store.inventory("operations"):
        operation_id, _, name = listed.key.removeprefix("operations/").partition("/")
        documents.setdefault(operation_id, set()).add(name)
        if name in OUTCOMES and listed.size < OUTCOME_BYTES_MIN:
            short.setdefault(operation_id, set()).add(name)
    for operation_id, names in short.items():
        if "intent.json" in documents[operation_id]:
            documents[operation_id] -= names
    return dict(sorted(documents.items()))


def seems_open(names: Set[str]) -> bool:
    """Whether an operation with documents of these names has an intent and no outcome."""
    return "intent.json" in names and names.isdisjoint(OUTCOMES)


def is_open(store: ObjectStore, operation_id: str, *, may_be_check: bool = False) -> bool:
    """Whether the operation has no outcome yet, or its outcome can't be read. A check has no intent."""
    try:
        return (read_any_outcome if may_be_check else read_outcome)(store, operation_id) is None
    except ManifestError:
        return True


def has_failed(store: ObjectStore, operation_id: str) -> bool:
    """Whether the outcome of the operation is `failed`; raises ManifestError."""
    outcome = read_outcome(store, operation_id)
    return outcome is not None and outcome.state == FAILED


def read_recorded_commits(
    store: ObjectStore,
    since: str = "",
    unread: list[ManifestError] | None = None,
    documents: Mapping[str, Set[str]] | None = None,
) -> dict[str, dict[str, int]]:
    """Read the increments that outcomes record as committed (0: the full snapshot), keyed by snapshot and operation id.

    For the arguments see `read_create_outcomes`. If a process died between its commit and its outcome, the commit is
    missing until the next command settles it.
    """
    return recorded_commits(read_create_outcomes(store, since, unread, documents))


def recorded_commits(outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, int]]:
    """Return the increments that these outcomes record as committed, keyed by snapshot and operation id."""
    commits: dict[str, dict[str, int]] = {}
    for operation_id, outcome in outcomes.items():
        if outcome.state != FAILED and isinstance(outcome.increment, int):
            commits.setdefault(outcome.snapshot, {})[operation_id] = outcome.increment
    return commits


def read_create_outcomes(
    store: ObjectStore,
    since: str = "",
    unread: list[ManifestError] | None = None,
    documents: Mapping[str, Set[str]] | None = None,
) -> dict[str, Outcome]:
    """Read the outcomes of creates, keyed by operation id.

    Operations that began in an earlier second than the operation `since` are not read. The errors for unreadable
    records are added to `unread`; without that list, raises ManifestError. `documents` are the names of the documents
    of all operations (document_names), if the caller has them.
    """
    outcomes = read_outcomes(store, since, unread, documents)
    return {operation_id: outcome for operation_id, outcome in outcomes if outcome.kind == CREATE}


def read_outcomes(
    store: ObjectStore,
    since: str = "",
    unread: list[ManifestError] | None = None,
    documents: Mapping[str, Set[str]] | None = None,
) -> Iterator[tuple[str, Outcome]]:
    """Read the outcomes of all operations; yield each with its operation id. See `read_create_outcomes`."""
    # Ids sort by time, down to the second.
    second = since.rpartition("-")[0]
    listed = store.list_children("operations") if documents is None else documents
    ids = [operation_id for operation_id in listed if operation_id >= second]
    # An outcome may have been stored since the documents were listed, when the operation was settled.
    names = [CHECK_OUTCOMES if documents is None else {*documents[one], "outcome.json"} for one in ids]
    with ThreadPoolExecutor(READS_AT_ONCE) as threads:
        for operation_id, outcome in zip(ids, threads.map(partial(_read_recorded, store), ids, names), strict=True):
            if isinstance(outcome, ManifestError):
                if unread is None:
                    raise outcome
                unread.append(outcome)
            elif outcome is not None:
                yield operation_id, outcome


def _read_recorded(store: ObjectStore, operation_id: str, names: Iterable[str]) -> Outcome | ManifestError | None:
    try:
        return read_any_outcome(store, operation_id, names)
    except ManifestError as error:
        return error


RESTORE = "restore"
SHOWN_MAX = 3


class OpenOperation(Struct, frozen=True):
    """An operation without a readable outcome.

    If a document can't be read, `problem` describes it; if that is the intent, `operation` is None. `sign` is the
    newest sign of life of the process. `is_running` is set if the process showed signs of life when the operation was
    read. `is_resumable` is set if it is a full snapshot that can be resumed if it is interrupted. Then `interruption`
    is how its last run ended, if it said so, and `kept` how much it has copied, if it does not run. `resumed_at` is
    when its last run began, if that has left no other trace.
    """

    id: str
    operation: Intent | None
    committed: bool = False
    problem: str = ""
    sign: SignOfLife | None = None
    is_running: bool = False
    is_resumable: bool = False
    interruption: Failure | None = None
    kept: CopiedShare | None = None
    resumed_at: Time | None = None

    @property
    def kind(self) -> str:
        """The command, or "drill"; "" if the intent can't be read."""
        if self.operation is None:
            return ""
        return DRILL if self.operation.is_drill else self.operation.kind

    @property
    def owner(self) -> Label | None:
        """The process that runs the operation; None if it is not known."""
        by = self.sign.by if self.sign else self.operation.by if self.operation else ""
        return None if isinstance(by, UnsetType) else read_label(by)

    @property
    def seen_at(self) -> Time | None:
        """The time at which the process was last known to be alive."""
        if self.interruption:
            return self.interruption.failed_at
        if self.sign:
            return self.sign.seen_at
        return self.resumed_at or (self.operation.began_at if self.operation else None)

    @property
    def dead_text(self) -> str:
        """The reason why the process, if it does not run, is known to have ended, or seems to."""
        if self.interruption is None:
            return "shows no sign of life"
        return f"was interrupted at {self.interruption.failed_at} ({self.interruption.reason})"

    @property
    def kept_text(self) -> str:
        """What an interrupted full snapshot has kept, before `remedy`; "" if that is not known."""
        return f"{self.kept.text} and kept; " if self.kept else ""

    @property
    def text(self) -> str:
        """A line for the operator: where the operation is running, or what to do next."""
        intent = self.operation
        if intent is None:
            return f"the result of operation {self.id} is not known: {self.problem}"
        into = f" into {targets}" if (targets := name_targets(intent)) else ""
        what = f"operation {self.id} ({self.kind} {intent.snapshot}{into}, begun {intent.began_at})"
        if self.problem:
            return f"the result of {what} is not known: {self.problem}"
        made = increment_label(intent.snapshot, intent.increment) if intent.kind == CREATE else ""
        if made and self.committed:
            return f"{what} has no outcome yet: its commit is in the store, so {made} exists"
        if self.committed:
            return f"{what} has no outcome yet: its {intent.kind} is in the store"
        if self.is_running:
            return f"{what} is running{self._where}; to follow it: snapshot status"
        if intent.kind in (DELETE, PRUNE):
            # Perhaps the store refused to delete objects; the process did not die then.
            return f"{what} has not finished; {self.remedy}"
        lacks = f", and has not committed {made}" if made else ""
        return f"{what} {self.dead_text} and has no outcome{lacks}; {self.kept_text}{self.remedy}"

    @property
    def _where(self) -> str:
        by = self.owner
        where = f" on {by.host}, started by {by.user} as process {by.process}" if by else ""
        return f"{where}, last sign of life at {self.seen_at}" if self.sign else where

    @property
    def remedy(self) -> str:
        """The action that ends the operation if its process is gone; "" if the intent can't be read."""
        intent = self.operation
        if intent is None:
            return ""
        if intent.kind == RESTORE and intent.is_drill:
            return "the next drill on its machine settles it; a drill on another machine does so after a week"
        if intent.kind == RESTORE:
            nodes = intent.nodes if intent.only_nodes is True else ()
            return (
                f"to finish it: {resume_command(intent.snapshot, nodes)}   to undo it:"
                f" {abandon_command(intent.snapshot, nodes)}   ({SAME_TARGET}); until then these"
                " databases may refuse connections"
            )
        if intent.kind == REPAIR:
            # The length of a lease (snapshots/operations/leases.py).
            return (
                "the snapshot can be repaired again at once; its lease keeps delete, prune and gc from the snapshot for"
                " up to 15 minutes, and then the next repair of the snapshot, or gc, settles it"
            )
        if intent.kind == MERGE:
            return f"to continue it, repeat the command: snapshot merge {intent.snapshot}"
        if intent.kind != CREATE:
            again = f"snapshot delete {intent.snapshot}" if intent.kind == "delete" else f"snapshot {intent.kind}"
            return f"to resume it: {again}"
        if self.is_resumable:
            return f"to resume it: snapshot create {intent.snapshot}   (with the options with which it began)"
        is_read_only = "; until then the fleet may refuse writes, unless you run: snapshot resume"
        return f"the next create, delete, prune or gc settles it{is_read_only if intent.is_terminal else ''}"

    def concerns(self, name: str) -> bool:
        """Whether the operation may concern the snapshot `name`."""
        return self.operation is None or self.operation.snapshot == name

    def to_json(self) -> dict[str, Any]:
        """Return the operation for JSON output; unknown values are null."""
        one, owner = self.operation, self.owner
        return {
            "operation": self.id,
            "kind": self.kind or None,
            "snapshot": one.snapshot if one else None,
            "increment": one.increment if one else None,
            "began_at": one.began_at if one else None,
            "running": self.is_running,
            "seen_at": self.seen_at,
            "who": f"{owner.user}@{owner.host}" if owner else None,
            "process": owner.process if owner else None,
            "databases": _databases_of(one) if one else [],
            "servers": _servers_of(one) if one else [],
            "terminal": one.is_terminal if one else None,
            "committed": self.committed if one and one.kind in (CREATE, *IN_STORE) and not self.problem else None,
            "resumable": self.is_resumable,
            "kept": self.kept._asdict() if self.kept else None,
            "problem": self.problem or None,
        }


def name_targets(intent: Intent) -> str:
    """Name the databases that a restore creates, and their servers; "" if the intent lacks them."""
    databases, servers = _databases_of(intent), _servers_of(intent)
    on = f" on {list_some(servers, SHOWN_MAX)}" if servers else ""
    return f"database {list_some(databases, SHOWN_MAX)}{on}" if databases else ""


def _databases_of(intent: Intent) -> list[str]:
    """Return the database names; each target is a server's identifier, a slash, and a database's name."""
    return sorted({target.partition("/")[2] for target in intent.targets}) if isinstance(intent.targets, tuple) else []


def _servers_of(intent: Intent) -> list[str]:
    return sorted(set(intent.servers)) if isinstance(intent.servers, tuple) else []


def read_open_operations(
    store: ObjectStore, name: str | None = None, documents: Mapping[str, Set[str]] | None = None
) -> tuple[OpenOperation, ...]:
    """Read the operations without an outcome, on the snapshot `name` or all, oldest first.

    `documents` is the result of document_names, if the caller has it. Takes a few reads per operation.
    """
    listed = document_names(store) if documents is None else documents
    operations = (
        read_open_operation(store, operation, listed[operation]) for operation in open_operation_ids(store, listed)
    )
    return tuple(
        operation for operation in operations if operation is not None and (name is None or operation.concerns(name))
    )


def read_open_operation(store: ObjectStore, operation_id: str, names: Set[str]) -> OpenOperation | None:
    """Read an operation that had no outcome when the `names` of its documents were listed; None if it was removed."""
    operation: Intent | None = None
    try:
        operation = read_intent(store, operation_id)
        read_outcome(store, operation_id)
        committed = has_committed(store, operation)
        resumable = is_resumable(store, operation, names)
    except ObjectMissingError:
        # A listing may be out of date.
        return None
    except ManifestError as error:
        return OpenOperation(operation_id, operation, problem=error.message)
    sign, interruption, resumed_at = None, None, None
    with suppress(ManifestError):
        sign = newest_sign(store, operation_id, names)
    with suppress(ManifestError, ObjectMissingError):
        interruption = read_interruption(store, operation_id, names) if resumable else None
        if resumable and sign is None and interruption is None and (run := last_run(names)) > 1:
            resumed_at = read_resumption(store, operation_id, run - 1).resumed_at
    # A failure record means that the command has ended, but left something behind.
    is_running = FAILURE not in names and interruption is None and shows_life(operation, sign, utc_now())
    return OpenOperation(
        operation_id,
        operation,
        committed,
        sign=sign,
        is_running=is_running,
        is_resumable=resumable,
        interruption=interruption,
        kept=read_copied_share(store, operation_id, names) if resumable and not is_running else None,
        resumed_at=resumed_at,
    )


@contextmanager
def naming_open_operations(operations: tuple[OpenOperation, ...]) -> Iterator[None]:
    """Add these operations, which may be creating the snapshot, to the details and hint of a SnapshotMissingError."""
    try:
        yield
    except SnapshotMissingError as error:
        if operations:
            error.details["open_operations"] = [operation.to_json() for operation in operations]
            error.hint = "; ".join([*(operation.text.replace("\n", "\\n") for operation in operations), error.hint])
        raise
