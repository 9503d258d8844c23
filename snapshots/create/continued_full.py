"""Continue a full snapshot that was interrupted while it copied tables, when the same command is repeated.

The repetition continues the same operation: its slots still keep the WAL since the base copy's positions, and the
tables that were copied completely are the base. All other tables are new to the first cut, which copies them as it
copies tables that are created meanwhile (snapshots/create/prepare_tables.py). What has changed since is found as in an
increment.

A create keeps what it has copied if that is worth more than the WAL that the nodes retain meanwhile: from the size in
`[copies] resume_from` on. Otherwise, or if the slots don't fit any more, the snapshot begins again.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import News, Progress
from cutline.nodes.baseline import BaselineChangedError, check_baseline
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.snapshots.base_copy.copy_slots import drop_copy_slots
from cutline.snapshots.create.context import ContinuedFull, CreateRequest
from cutline.snapshots.create.continuable import PLACE_QUERY, check_place
from cutline.snapshots.ddl.table_changes import TableSelection
from cutline.snapshots.operations.open_operations import find_unfinished
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import Intent, operation_key
from cutline.snapshots.records.proven_chains import free_turn
from cutline.snapshots.records.unfinished_records import (
    Resumption,
    UnfinishedCopy,
    read_unfinished,
    resumption_name,
)
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.drain.slots import check_slot, copy_slot_name, slot_name, slot_state
from cutline.wal.segments.archive import archive_prefix
from cutline.wal.segments.segments import list_unlisted


class _BeginsAgainError(Exception):
    """An interrupted snapshot can't be continued; the text is the reason."""


def find_continued(
    store: ObjectStore,
    sessions: Sessions,
    request: CreateRequest,
    selection: TableSelection,
    progress: Progress,
    documents: Mapping[str, Set[str]],
) -> ContinuedFull | None:
    """Return the interrupted operation that this create continues; None if it begins again, noting the reason.

    The caller holds the fleet's lock. `documents` is the result of document_names.
    """
    for intent in reversed(find_unfinished(store, documents)):
        if intent.snapshot != request.name:
            continue
        try:
            copied = _check_fits(store, sessions, request, selection, intent, documents[intent.operation])
        except _BeginsAgainError as error:
            progress.note(f"snapshot {request.name} begins again, because {error}")
            return None
        resumption = _resume(store, intent)
        progress.reached(CrashPoint.RESUMED)
        # A resumption that died while it copied tables leaves its slots.
        drop_copy_slots(sessions.nodes, copy_slot_name(intent.operation), progress)
        tables = sum(len(groups) for groups in copied.groups.values())
        progress.note(
            News(
                f"operation {intent.operation}, which was interrupted, is continued:"
                f" {tables:,} of {sum(len(groups) for groups in copied.base.groups.values()):,} tables are copied"
            )
        )
        return ContinuedFull(intent, copied, resumption)
    return None


def _resume(store: ObjectStore, intent: Intent) -> int:
    """Store a resumption, after which the earlier process can't commit; return its number."""
    number = 1
    while True:
        ours = Resumption(intent.operation, own_label(intent.kind, intent.snapshot), current_time())
        try:
            create_or_find(store, operation_key(intent.operation, resumption_name(number)), seal(ours))
        except ObjectExistsError:
            number += 1
        else:
            return number


def _check_fits(
    store: ObjectStore,
    sessions: Sessions,
    request: CreateRequest,
    selection: TableSelection,
    intent: Intent,
    names: Set[str],
) -> UnfinishedCopy:
    """Return what was copied; raise _BeginsAgainError unless request, nodes and slots are as they were."""
    try:
        copied = read_unfinished(store, intent.operation, names)
    except (ObjectMissingError, ManifestError) as error:
        raise _BeginsAgainError(f"what it had copied can't be read: {error}") from error
    base = copied.base
    if request.terminal or request.large_objects or intent.is_terminal:
        raise _BeginsAgainError("only a snapshot without --terminal and --large-objects can be continued")
    if base.fleet_id != selection.fleet_id or base.global_id != sessions.fleet.global_id:
        raise _BeginsAgainError("[cut] global_id has changed in fleet.toml")
    if base.rules != selection.rules:
        raise _BeginsAgainError("other tables are chosen, in fleet.toml or by --group and --exclude-group")
    then, now = set(base.nodes), set(sessions.identities)
    if then != now:
        nodes = sorted(then ^ now)
        raise _BeginsAgainError(f"it had begun with other nodes: {', '.join(nodes)}")
    if free_turn(store, intent.snapshot, 0) != intent.turn:
        raise _BeginsAgainError("another command has settled it")
    try:
        check_baseline({one.node: one for one in base.baseline}, sessions.identities)
        in_parallel(lambda node: _check_node(store, sessions, intent, node, base.positions[node]), sorted(now))
    except (BaselineChangedError, RefusedError) as error:
        raise _BeginsAgainError(error.message) from error
    return copied


def _check_node(store: ObjectStore, sessions: Sessions, intent: Intent, node: str, position: Lsn) -> None:
    """Raise SlotLostError or WalDivergedError unless the node's slot continues the copy, or what is archived since."""
    slot, end = slot_name(intent.operation), position
    for segment in list_unlisted(store, archive_prefix(intent.snapshot, node, intent.operation), 0):
        end = max(end, segment.segment.through)
    with raising_unreachable(sessions.fleet.node(node)):
        connection = sessions.connections[node]
        state = slot_state(connection, slot)
        (place,) = connection.execute(PLACE_QUERY).fetchone() or (None,)
    check_place(sessions.fleet.node(node), place, end)
    check_slot(node, slot, state, end)
