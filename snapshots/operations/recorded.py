"""What is recorded of operations: which are open, which have failed, and what they say that they have committed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import FAILED, Intent, read_intent, read_outcome
from cutline.storage.store import ObjectMissingError, ObjectStore

# No outcome is shorter, of whatever version.
OUTCOME_BYTES_MIN = 100


@dataclass(frozen=True, slots=True)
class CommittedIncrement:
    """A full snapshot (increment 0) or an increment that an outcome records as committed."""

    snapshot: str
    increment: int


def read_open_intents(store: ObjectStore, *, skips_unreadable: bool = False) -> list[Intent]:
    """The intents of all open operations, oldest first; raise ManifestError if one can't be read.

    With `skips_unreadable`, leave those out: they must block nobody.
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
    """The ids of all operations without an outcome, oldest first: one listing, and one read for each.

    `documents` are those of document_names, if they have been listed. An outcome is read only by those who need what it
    says: reading them all would take long.
    """
    listed = document_names(store) if documents is None else documents
    ids = [one for one, names in listed.items() if seems_open(names)]
    # A listing may be out of date.
    return [one for one in ids if is_open(store, one)]


def document_names(store: ObjectStore) -> dict[str, set[str]]:
    """The names of all documents by operation, the oldest operation first, from one listing.

    Something in the place of an outcome that is too short to be one is left out.
    """
    documents: dict[str, set[str]] = {}
    for one in store.inventory("operations"):
        operation_id, _, name = one.key.removeprefix("operations/").partition("/")
        names = documents.setdefault(operation_id, set())
        if name != "outcome.json" or one.size >= OUTCOME_BYTES_MIN:
            names.add(name)
    return dict(sorted(documents.items()))


def seems_open(names: Set[str]) -> bool:
    """Whether an operation with documents of these names has an intent and no outcome."""
    return "intent.json" in names and "outcome.json" not in names


def is_open(store: ObjectStore, operation_id: str) -> bool:
    """Whether the operation has no outcome yet, or none that can be read."""
    try:
        return read_outcome(store, operation_id) is None
    except ManifestError:
        return True


def has_failed(store: ObjectStore, operation_id: str) -> bool:
    """Whether the operation has the outcome `failed`; raises ManifestError."""
    outcome = read_outcome(store, operation_id)
    return outcome is not None and outcome.state == FAILED


def read_recorded_commits(
    store: ObjectStore, since: str = "", unread: list[ManifestError] | None = None
) -> dict[str, dict[str, int]]:
    """The committed increments (0: the full snapshot) according to the outcomes: by snapshot, then by operation id.

    Operations that began in an earlier second than the operation `since` are not read. The errors of unreadable records
    are added to `unread`; without that list, raises ManifestError.
    A commit whose process died before it stored an outcome is missing until the next command settles it.
    """
    commits: dict[str, dict[str, int]] = {}
    # Ids sort by time, down to the second.
    second = since.rpartition("-")[0]
    for operation_id in store.list_children("operations"):
        if operation_id < second:
            continue
        try:
            committed = _read_commit_record(store, operation_id)
        except ManifestError as error:
            if unread is None:
                raise
            unread.append(error)
            continue
        if committed:
            commits.setdefault(committed.snapshot, {})[operation_id] = committed.increment
    return commits


def _read_commit_record(store: ObjectStore, operation_id: str) -> CommittedIncrement | None:
    """What the operation's outcome records as committed; None if nothing."""
    outcome = read_outcome(store, operation_id)
    if outcome is None or outcome.state == FAILED:
        return None
    kind, snapshot, increment = outcome.kind, outcome.snapshot, outcome.increment
    if not isinstance(kind, str) or not isinstance(snapshot, str) or not isinstance(increment, int):
        # Outcomes of early versions do not repeat the intent.
        try:
            intent = read_intent(store, operation_id)
        except ObjectMissingError:
            return None
        kind, snapshot, increment = intent.kind, intent.snapshot, intent.increment
    return CommittedIncrement(snapshot, increment) if kind == "create" else None
