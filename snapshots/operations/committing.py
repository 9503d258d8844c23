"""Store a commit with a single conditional put, and decide once and for all whether a dead operation has committed.

Before the put, the store is checked for the objects that executors reported: an executor on another machine may have
stored them in a local folder with the same path.

If the answer to the put is lost, the commit is read back. If that is inconclusive, the result is indeterminate, and the
next command decides whether the operation has committed before doing anything else.

A put whose answer was lost may arrive late, and a suspended process may continue. So reading alone is not enough: if
there is no commit, a *void* is stored under the same key, also with a conditional put. Exactly one of the two puts
succeeds, so an operation that was voided can no longer commit (docs/store-format.md, "Deciding").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from msgspec import structs

from cutline.fleet.messages import list_some
from cutline.snapshots.records.commit import Commit, Previous, Void
from cutline.snapshots.records.commit_rules import check_commit
from cutline.snapshots.records.documents import (
    DocumentTooLargeError,
    ManifestError,
    TextTooLongError,
    seal,
    seal_with_digest,
)
from cutline.snapshots.records.merge_records import Merge, merge_key, read_merge_turn
from cutline.snapshots.records.operation_records import CREATE, MERGE, REPAIR, Intent
from cutline.snapshots.records.proven_chains import (
    VOID_BYTES_MAX,
    SnapshotExistsError,
    chain_pruned_error,
    commit_key,
    find_place,
    increment_label,
    is_stored,
    operation_of,
    read_turn,
)
from cutline.snapshots.records.repair_records import Repair, RepairVoid, read_repair, repair_key
from cutline.snapshots.records.tombstones import ANOTHER_NAME, check_not_deleted, is_deleted, is_only_full
from cutline.storage.errors import BusyError, IndeterminateError, RefusedError, SnapshotError
from cutline.storage.store import (
    AnswerLostError,
    EncryptionIgnoredError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
)
from cutline.storage.storing import INCONCLUSIVE, read_back

NAMED_MAX = 3
ASKING_THREADS_MAX = 16
# A listing returns up to 1,000 keys per request, but may also contain keys that were not asked for.
LISTED_MIN = 50


class ObjectsNotStoredError(RefusedError):
    """The store lacks objects that were reported as stored; nothing was committed."""


def check_stored(store: ObjectStore, sizes: Mapping[str, int]) -> None:
    """Raise ObjectsNotStoredError unless the store has an object of this size (bytes) under each key."""
    listed = listed_sizes(store, sizes)
    # A listing may be out of date.
    unsure = [key for key, size in sizes.items() if listed.get(key) != size]
    asked = sizes_of(store, unsure)
    lacking = [key for key in unsure if asked[key] is None]
    others = [key for key in unsure if asked[key] not in (None, sizes[key])]
    if not lacking and not others:
        return
    whats = [f"lacks {list_some(lacking, NAMED_MAX)}"] if lacking else []
    whats += [f"has different sizes for {list_some(others, NAMED_MAX)}"] if others else []
    raise ObjectsNotStoredError(
        f"store {store.url} {' and '.join(whats)} ({len(sizes)} objects were reported as stored);"
        " nothing was committed",
        hint="nothing else may delete objects, such as a lifecycle rule of the bucket, and executors on other machines"
        " must use the same store: s3://, or a folder that all machines mount at the same path; then repeat the"
        " command",
        details={"store": store.url, "missing": len(lacking), "other_size": len(others), "objects": len(sizes)},
    )


def listed_sizes(store: ObjectStore, keys: Iterable[str]) -> dict[str, int]:
    """Return the sizes (bytes) of objects from listings of the folders that contain many of the keys."""
    folders: dict[str, int] = {}
    for key in keys:
        folder = key.rpartition("/")[0]
        folders[folder] = folders.get(folder, 0) + 1
    wanted = [folder for folder, count in folders.items() if count >= LISTED_MIN]
    return {listed.key: listed.size for folder in wanted for listed in store.inventory(folder)}


def sizes_of(store: ObjectStore, keys: Iterable[str]) -> dict[str, int | None]:
    """Return the size (bytes) of each object by key, None if it is missing; makes one request per key, in parallel."""

    def ask(key: str) -> int | None:
        try:
            return store.size(key)
        except ObjectMissingError:
            return None

    keys = list(keys)
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        return dict(zip(keys, threads.map(ask, keys), strict=True))


class OperationSettledError(BusyError):
    """Another command considered the operation dead, and settled it as not committed."""


class CommitTooLargeError(RefusedError):
    """The commit contains more tables than a document can hold."""


class CommitIndeterminateError(IndeterminateError):
    """The answer to the commit's put was lost, and reading it back was inconclusive."""


def put_commit(store: ObjectStore, commit: Commit, turn: int = 1) -> Commit:
    """Store the commit, which makes the snapshot or increment exist; return the stored one, with its digest.

    Raises SnapshotExistsError if another operation committed it, OperationSettledError if another command settled this
    operation as not committed, CommitIndeterminateError if it is not known whether the commit was stored. After
    CommitTooLargeError and TextTooLongError, nothing was put.
    """
    key = commit_key(commit.snapshot, commit.increment, turn)
    check_predecessor(store, commit)
    # A commit that no command would accept must not be stored.
    check_commit(commit)
    try:
        body, digest = seal_with_digest(commit)
    except DocumentTooLargeError as error:
        raise CommitTooLargeError(
            f"the commit of {increment_label(commit.snapshot, commit.increment)} is too large: {error.message}",
            hint="take a new full snapshot: it contains equal definitions of several shards only once"
            if commit.increment
            else "take snapshots of fewer tables: --exclude-group, or divide the fleet",
            details={"snapshot": commit.snapshot, "increment": commit.increment},
        ) from error
    except TextTooLongError as error:
        raise TextTooLongError(
            f"nothing was committed: no command could read the commit of"
            f" {increment_label(commit.snapshot, commit.increment)}, because {error.message}",
            hint="shorten this text, wherever it comes from: an option, fleet.toml, or a database of the fleet, such as"
            " its COMMENT or a setting of ALTER DATABASE; then repeat the command",
            details={"snapshot": commit.snapshot, "increment": commit.increment},
        ) from error
    if len(body) <= VOID_BYTES_MAX:
        raise RuntimeError(f"a commit file of {len(body)} bytes would be mistaken for a void")
    try:
        store.create(key, body)
    except ObjectExistsError as error:
        # The object may be ours: the store client may have retried this put after an answer was lost.
        return _check_stored(store, key, commit, error, at_once=True)
    except AnswerLostError as error:
        return _check_stored(store, key, commit, error, at_once=False)
    except EncryptionIgnoredError:
        # The commit is stored, so the snapshot exists. The next conditional put raises the same error.
        pass
    return structs.replace(commit, digest=digest)


def check_predecessor(store: ObjectStore, commit: Commit) -> None:
    """Raise unless this increment builds on the previous commit, and that commit has not been deleted meanwhile."""
    check_not_deleted(store, commit.snapshot, ANOTHER_NAME)
    if commit.previous is None:
        return
    # This operation has proven what it read under this digest, so the same bytes need not be parsed again: a full
    # snapshot of thousands of tables has megabytes. A commit may have another key, after voids.
    key = commit_key(commit.snapshot, commit.increment - 1)
    if not is_stored(store, key, commit.previous.digest):
        before = find_place(store, commit.snapshot, commit.increment - 1, commit.previous.digest).commit
        if before is None or Previous(before.operation, before.digest) != commit.previous:
            raise _replaced_error(commit, key)
    if is_only_full(store, commit.snapshot):
        raise chain_pruned_error(commit.snapshot)


def _replaced_error(commit: Commit, key: str) -> ManifestError:
    return ManifestError(
        f"{increment_label(commit.snapshot, commit.increment - 1)} is not the commit that this increment builds on",
        hint=f"somebody replaced or removed {key} during this command, which committed nothing: put it back from a"
        " copy of the store, or repeat the command to build on what the store has now",
        details={"snapshot": commit.snapshot, "increment": commit.increment - 1, "object": key},
    )


def _check_stored(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> Commit:
    """Return the operation's stored commit; else raise the error for the document, or CommitIndeterminateError.

    If the operation was resumed, it may be the commit of the process that seemed dead, with another cut.
    """
    found: list[Commit] = []

    def is_ours() -> bool:
        stored = read_turn(store, key)
        if isinstance(stored, Void):
            raise operation_settled_error(commit.operation) from error
        if stored.operation != commit.operation:
            raise _name_taken_error(commit) from error
        found.append(stored)
        return True

    # A truncated body is as inconclusive as a missing body.
    if not read_back(is_ours, (*INCONCLUSIVE, ManifestError), at_once=at_once):
        what = increment_label(commit.snapshot, commit.increment)
        raise CommitIndeterminateError(
            f"it is not known whether {what} was committed: the store's answer was lost",
            hint="once the store answers, run: snapshot list   (the next create, delete, prune or gc settles the"
            " operation)",
            details={"snapshot": commit.snapshot, "increment": commit.increment, "operation": commit.operation},
        ) from error
    return found[0]


def operation_settled_error(operation_id: str) -> OperationSettledError:
    """Return the error for an operation that another command settled as dead."""
    return OperationSettledError(
        f"another command settled operation {operation_id} as not committed",
        hint="this operation committed nothing; repeat the command",
        details={"operation": operation_id},
    )


def _name_taken_error(commit: Commit) -> SnapshotExistsError:
    return SnapshotExistsError(
        f"{increment_label(commit.snapshot, commit.increment)} was committed by another operation in the meantime",
        hint="this operation committed nothing; run: snapshot list",
        details={"snapshot": commit.snapshot, "increment": commit.increment},
    )


class UndecidedError(IndeterminateError):
    """It is not known whether an earlier operation has committed, and that can't be decided now."""


class RepairSupersededError(BusyError):
    """Another repair of the snapshot was stored in the meantime."""


def put_repair(store: ObjectStore, repair: Repair) -> None:
    """Store the repair, which makes its objects supersede those that it replaces.

    Raises RepairSupersededError if another repair has its number, OperationSettledError if another command settled this
    operation, CommitIndeterminateError if it is not known whether the repair was stored.
    """
    try:
        body = seal(repair)
    except DocumentTooLargeError as error:
        raise CommitTooLargeError(
            f"the repair of {repair.snapshot} is too large: {error.message}",
            hint="repair fewer objects at a time: --object KEY",
            details={"snapshot": repair.snapshot},
        ) from error
    try:
        store.create(repair_key(repair.snapshot, repair.number), body)
    except ObjectExistsError as error:
        # The object may be ours: the store client may have retried this put after an answer was lost.
        _check_repair_stored(store, repair, error, at_once=True)
    except AnswerLostError as error:
        _check_repair_stored(store, repair, error, at_once=False)
    except EncryptionIgnoredError:
        # The repair is stored. The next conditional put raises the same error.
        return


def _check_repair_stored(store: ObjectStore, repair: Repair, error: SnapshotError, *, at_once: bool) -> None:
    """Return if this repair is stored; else raise the error for the stored document, or CommitIndeterminateError."""

    def is_ours() -> bool:
        stored = read_repair(store, repair.snapshot, repair.number)
        if isinstance(stored, RepairVoid):
            raise operation_settled_error(repair.operation) from error
        if stored.operation != repair.operation:
            raise RepairSupersededError(
                f"operation {stored.operation} has repaired snapshot {repair.snapshot} in the meantime; this operation"
                " replaced nothing",
                hint=f"to see what is still damaged: snapshot repair {repair.snapshot} --dry-run",
                details={"snapshot": repair.snapshot, "operation": stored.operation},
            ) from error
        return True

    if not read_back(is_ours, (*INCONCLUSIVE, ManifestError), at_once=at_once):
        key = repair_key(repair.snapshot, repair.number)
        raise CommitIndeterminateError(
            f"it is not known whether the repair of {repair.snapshot} was stored: the store's answer was lost",
            hint=f"once the store answers, repeat: snapshot repair {repair.snapshot}",
            details={"snapshot": repair.snapshot, "operation": repair.operation, "object": key},
        ) from error


class MergeSupersededError(BusyError):
    """Another merge at the same increment was stored in the meantime."""


def put_merge(store: ObjectStore, merge: Merge, turn: int) -> None:
    """Store the merge, with which the chain begins from then on.

    Raises MergeSupersededError if another merge has its place, OperationSettledError if another command settled this
    operation, CommitIndeterminateError if it is not known whether the merge was stored.
    """
    key = merge_key(merge.snapshot, merge.increment, turn)
    label = f"the merge of {merge.snapshot} at increment {merge.increment}"
    try:
        body = seal(merge)
    except DocumentTooLargeError as error:
        raise CommitTooLargeError(
            f"{label} is too large: {error.message}",
            hint="take a new full snapshot: snapshot create NAME",
            details={"snapshot": merge.snapshot},
        ) from error

    def is_ours() -> bool:
        stored = read_merge_turn(store, key)
        if isinstance(stored, Void):
            raise operation_settled_error(merge.operation)
        if stored.operation != merge.operation:
            raise MergeSupersededError(
                f"operation {stored.operation} has merged {merge.snapshot} at increment {merge.increment} in the"
                " meantime; this operation changed nothing",
                hint="nothing is left to do; to remove what this operation has stored: snapshot gc",
                details={"snapshot": merge.snapshot, "operation": stored.operation},
            )
        return True

    try:
        store.create(key, body)
    except (ObjectExistsError, AnswerLostError) as error:
        # The object may be ours: the store client may have retried this put after an answer was lost.
        at_once = isinstance(error, ObjectExistsError)
        if not read_back(is_ours, (*INCONCLUSIVE, ManifestError), at_once=at_once):
            raise CommitIndeterminateError(
                f"it is not known whether {label} was stored: the store's answer was lost",
                hint=f"once the store answers, repeat the command: snapshot merge {merge.snapshot}",
                details={"snapshot": merge.snapshot, "operation": merge.operation, "object": key},
            ) from error
    except EncryptionIgnoredError:
        # The merge is stored. The next conditional put raises the same error.
        return


def has_committed(store: ObjectStore, intent: Intent) -> bool:
    """Whether the operation's commit, repair or merge is in the store now; a late put may still store it."""
    key = key_of(intent)
    if key is None or is_deleted(store, intent.snapshot):
        return False
    try:
        return _writer_of(store, intent, key) == intent.operation
    except ObjectMissingError:
        return False


def decide(store: ObjectStore, intent: Intent) -> bool:
    """Return whether the operation has stored its commit, repair or merge; if not, ensure that it never can.

    Raises UndecidedError if the store's answers are lost, ManifestError if the stored document can't be read.
    """
    key = key_of(intent)
    if key is None or is_deleted(store, intent.snapshot):
        # A commit that arrives in a deleted snapshot is garbage.
        return False
    if has_committed(store, intent):
        return True
    try:
        store.create(key, _void(intent))
    except ObjectExistsError:
        return _writer_of(store, intent, key) == intent.operation
    except AnswerLostError as error:
        is_committed = read_back(lambda: _writer_of(store, intent, key) == intent.operation)
        if is_committed is None:
            raise UndecidedError(
                f"it is not known whether operation {intent.operation} has committed: the store's answers were lost",
                hint="repeat the command once the store answers: it will settle this operation first",
                details={"operation": intent.operation, "object": key},
            ) from error
        return is_committed
    return False


def key_of(intent: Intent) -> str | None:
    """Return the key of the document that makes the operation's results exist; None if it stores no such document."""
    if intent.kind == CREATE:
        return commit_key(intent.snapshot, intent.increment, intent.turn)
    if intent.kind == MERGE:
        return merge_key(intent.snapshot, intent.increment, intent.turn)
    if intent.kind == REPAIR and isinstance(intent.repair, int):
        return repair_key(intent.snapshot, intent.repair)
    return None


def _writer_of(store: ObjectStore, intent: Intent, key: str) -> str:
    """Return the operation that wrote the commit, repair or merge at `key`, "" for a void; see operation_of."""
    if intent.kind == REPAIR and isinstance(intent.repair, int):
        turn = read_repair(store, intent.snapshot, intent.repair)
        return "" if isinstance(turn, RepairVoid) else turn.operation
    if intent.kind == MERGE:
        merge = read_merge_turn(store, key)
        return "" if isinstance(merge, Void) else merge.operation
    return operation_of(store, key)


def _void(intent: Intent) -> bytes:
    if intent.kind == REPAIR and isinstance(intent.repair, int):
        return seal(RepairVoid(intent.snapshot, intent.repair, intent.operation))
    body = seal(Void(intent.snapshot, intent.increment, intent.operation))
    if len(body) > VOID_BYTES_MAX:
        raise RuntimeError(f"a void of {len(body)} bytes would be mistaken for a commit")
    return body
