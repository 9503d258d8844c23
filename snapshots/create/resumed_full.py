"""Resume a full snapshot that was interrupted while it copied tables, when the same command is repeated.

The repetition resumes the same operation: its slots still keep the WAL since the base copy's positions, and the
tables that were copied completely are the base. All other tables are new to the first cut, which copies them as it
copies tables that are created meanwhile (snapshots/create/prepare_tables.py). What has changed since is found as in an
increment.

A create keeps what it has copied if that is worth more than the WAL that the nodes retain meanwhile: from the size in
`[copies] resume_from` on. Otherwise, or if the slots don't fit any more, the snapshot begins again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from datetime import datetime

from msgspec import UnsetType

from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NODES_NAMED_MAX, list_some, without_node
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import News, Progress
from cutline.fleet.record import Time
from cutline.nodes.baseline import BaselineChangedError, check_baseline
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.sessions import Absence, Sessions, in_parallel
from cutline.snapshots.base_copy.copy_slots import drop_copy_slots
from cutline.snapshots.create.absent_copies import note_left_out
from cutline.snapshots.create.context import CreateRequest, ResumedFull
from cutline.snapshots.create.continuable import PLACE_QUERY, check_place
from cutline.snapshots.ddl.table_changes import TableSelection
from cutline.snapshots.operations.open_operations import document_names, resumable_creates
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.operations.settling import note_unlisted
from cutline.snapshots.operations.signs import first_sign, newest_sign, next_number, sign_numbers, store_sign
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import Intent, operation_key
from cutline.snapshots.records.unfinished_records import (
    Resumption,
    UnfinishedBase,
    UnfinishedCopy,
    last_run,
    read_interruption,
    read_resumption,
    read_unfinished,
    read_unfinished_base,
    resumption_name,
)
from cutline.storage.errors import RefusedError, SnapshotError, UsageError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.drain.slots import check_slot, copy_slot_name, slot_name, slot_problem, slot_state
from cutline.wal.segments.archive import ArchiveError, archive_prefix, segment_key
from cutline.wal.segments.segments import read_metadata


class _BeginsAgainError(Exception):
    """An interrupted snapshot can't be resumed; the text is the reason."""


def find_resumable(
    store: ObjectStore,
    sessions: Sessions,
    request: CreateRequest,
    selection: TableSelection,
    progress: Progress,
    documents: Mapping[str, Set[str]],
) -> ResumedFull | None:
    """Return the interrupted operation that this create resumes; None if it begins again, noting the reason.

    The caller holds the fleet's lock. `documents` is the result of document_names. Standbys that were not there when it
    began, and those whose slots are lost, are left out, which is noted. If tables of a primary were read on such a
    standby, or on one that is away, they are copied again. Raises UsageError if the command has other options, so that
    nothing is given up by mistake.
    """
    for intent in reversed(resumable_creates(store, documents)):
        if intent.snapshot != request.name:
            continue
        before = frozenset(sessions.absent)
        try:
            copied, lost = _check_fits(store, sessions, request, selection, intent, documents[intent.operation])
        except _BeginsAgainError as error:
            progress.note(f"snapshot {request.name} begins again, because {error}")
            return None
        ran_seconds = _ran_seconds(store, intent, documents[intent.operation])
        resumption = _resume(store, intent, documents[intent.operation], ran_seconds)
        progress.reached(CrashPoint.RESUMED)
        # A resumption that died while it copied tables leaves its slots.
        drop_copy_slots(sessions.nodes, copy_slot_name(intent.operation), progress)
        progress.note(News(f"operation {intent.operation}, which was interrupted, is resumed: {copied.share_text}"))
        note_left_out(sessions, before, progress)
        _note_lost(lost, progress)
        note_unlisted(sessions.fleet, intent, progress)
        return ResumedFull(intent, copied, resumption, ran_seconds)
    return None


def preview_resumable(
    store: ObjectStore, sessions: Sessions, request: CreateRequest, selection: TableSelection, progress: Progress
) -> None:
    """Note what the create would do with interrupted snapshots; raise the errors of find_resumable.

    Standbys are left out as find_resumable does, which is noted.
    """
    documents = document_names(store)
    for intent in resumable_creates(store, documents):
        what = f"operation {intent.operation} (create {intent.snapshot}), which was interrupted,"
        if intent.snapshot != request.name:
            progress.note(News(f"{what} will be given up"))
            continue
        before = frozenset(sessions.absent)
        try:
            copied, lost = _check_fits(store, sessions, request, selection, intent, documents[intent.operation])
        except _BeginsAgainError as error:
            progress.note(f"snapshot {request.name} will begin again, because {error}")
        else:
            progress.note(News(f"{what} will be resumed: {copied.share_text}"))
            note_left_out(sessions, before, progress)
            _note_lost(lost, progress)
            note_unlisted(sessions.fleet, intent, progress)


def _note_lost(shards: Collection[str], progress: Progress) -> None:
    if shards:
        names = list_some(sorted(shards), NODES_NAMED_MAX)
        progress.note(News(f"the tables of {names} are copied again: they were read on a standby that is left out"))


def _resume(store: ObjectStore, intent: Intent, names: Set[str], ran_seconds: float) -> int:
    """Store a resumption and return its number; a process that had lost the fleet's lock then doesn't commit.

    A sign of life follows at once: until this process stores others, the interrupted run's would make it seem dead.
    """
    number = last_run(names)
    while True:
        ours = Resumption(intent.operation, own_label(intent.kind, intent.snapshot), current_time(), ran_seconds)
        try:
            create_or_find(store, operation_key(intent.operation, resumption_name(number)), seal(ours))
        except ObjectExistsError:
            number += 1
        else:
            break
    # Signs are only for others.
    with suppress(SnapshotError):
        store_sign(store, first_sign(intent, "resume", ours.resumed_at), next_number(sign_numbers(names)))
    return number


def _ran_seconds(store: ObjectStore, intent: Intent, names: Set[str]) -> float:
    """Return how long the earlier runs took, each until its interruption or its last sign of life, if that is stored.

    A run that is not known to have lived counts as none.
    """
    run, began_at, before = last_run(names), intent.began_at, 0.0
    ended: list[Time] = []
    with suppress(ManifestError, ObjectMissingError):
        if run > 1:
            resumption = read_resumption(store, intent.operation, run - 1)
            began_at = resumption.resumed_at
            before = 0.0 if isinstance(resumption.ran_seconds, UnsetType) else resumption.ran_seconds
    with suppress(ManifestError):
        if interruption := read_interruption(store, intent.operation, names):
            ended.append(interruption.failed_at)
    with suppress(ManifestError):
        if sign := newest_sign(store, intent.operation, names):
            ended.append(sign.seen_at)
    began = datetime.fromisoformat(began_at)
    took = max(((datetime.fromisoformat(end) - began).total_seconds() for end in ended), default=0.0)
    return round(before + max(took, 0.0), 3)


def _check_fits(
    store: ObjectStore,
    sessions: Sessions,
    request: CreateRequest,
    selection: TableSelection,
    intent: Intent,
    names: Set[str],
) -> tuple[UnfinishedCopy, set[str]]:
    """Return what was copied, and leave out the standbys that are not part of it.

    Also returns the primaries whose tables were read on a standby that takes no part. Raises _BeginsAgainError unless
    nodes and slots are as they were; then all standbys still take part.
    """
    try:
        base = read_unfinished_base(store, intent.operation, names)
        _check_slots(sessions, intent, base)
        _check_options(sessions, request, selection, intent, base)
        away = _check_nodes(sessions, base)
        left_out = _find_unfit(store, sessions, intent, base, away)
        left_out |= {
            node: "it was not there when the snapshot began" for node in sessions.nodes if node.id not in base.nodes
        }
        _check_required(sessions, left_out)
        copied = read_unfinished(store, base, names, away | {node.id for node in left_out})
    except (ObjectMissingError, ManifestError) as error:
        raise _BeginsAgainError(f"what it had copied can't be read: {error}") from error
    if not any(copied.groups.values()):
        raise _BeginsAgainError("it had copied no table completely")
    # Only now: a snapshot that begins again copies them.
    for node, reason in left_out.items():
        sessions.leave_out(node, Absence(reason, has_ended=True))
    return copied, {*base.readers} - {*copied.base.readers}


def _find_unfit(
    store: ObjectStore, sessions: Sessions, intent: Intent, base: UnfinishedBase, away: Collection[str]
) -> dict[Node, str]:
    """Return the standbys whose servers or slots are not as they were, with the reason.

    Raises _BeginsAgainError if a primary is not.
    """
    baseline = {identity.node: identity for identity in base.baseline}
    nodes = [node for node in sessions.nodes if node.id in baseline and node.id not in away]

    def check(node: Node) -> str:
        try:
            check_baseline({node.id: baseline[node.id]}, sessions.identities)
            _check_node(store, sessions, intent, node.id, base.positions[node.id])
        except (BaselineChangedError, RefusedError, ArchiveError) as error:
            return error.message
        return ""

    unfit: dict[Node, str] = {}
    for node, problem in zip(nodes, in_parallel(check, nodes), strict=True):
        if problem and node.backup_of is None:
            raise _BeginsAgainError(problem)
        if problem:
            unfit[node] = without_node(problem, node.id)
    return unfit


def _check_required(sessions: Sessions, left_out: Mapping[Node, str]) -> None:
    """Raise _BeginsAgainError if fleet.toml requires a standby that would be left out."""
    kept = Counter(node.shard for node in sessions.nodes if node.backup_of is not None and node not in left_out)
    for node, reason in left_out.items():
        if kept[node.shard] < sessions.fleet.standbys_needed(node.shard):
            raise _BeginsAgainError(f"[copies] require demands {node.id}, but {reason}")


def _check_slots(sessions: Sessions, intent: Intent, base: UnfinishedBase) -> None:
    """Raise _BeginsAgainError if a primary has lost its slot: then other options give nothing up."""
    slot, places = slot_name(intent.operation), {identity.place for identity in base.baseline}
    for node, state in sessions.ask_primaries(lambda connection: slot_state(connection, slot)).items():
        if sessions.identities[node].place in places and (problem := slot_problem(slot, state)):
            raise _BeginsAgainError(f"node {node}: {problem}")


def _check_options(
    sessions: Sessions, request: CreateRequest, selection: TableSelection, intent: Intent, base: UnfinishedBase
) -> None:
    """Raise UsageError unless the command has the options of the interrupted command."""
    other = ""
    if request.terminal or request.large_objects:
        other = "--terminal or large objects (--large-objects, or large_objects under [groups] in fleet.toml)"
    elif base.rules != selection.rules:
        other = "other tables, in [groups] of fleet.toml or by --group and --exclude-group"
    elif base.global_id != sessions.fleet.global_id:
        other = "another [cut] global_id in fleet.toml"
    elif request.only_primary != base.is_only_primary:
        other = "other nodes (--only-primary)"
    if other:
        raise UsageError(
            f"snapshot {intent.snapshot} was interrupted, and can't be resumed with {other}",
            hint=f"repeat the command as it was; to give up what was copied: snapshot cancel {intent.operation}",
            details={"snapshot": intent.snapshot, "operation": intent.operation},
        )


def _check_nodes(sessions: Sessions, base: UnfinishedBase) -> set[str]:
    """Return the standbys that are away now, whose copies are given up.

    Raises _BeginsAgainError if a shard has come or gone.
    """
    primaries = {identity.node for identity in base.baseline if identity.backup_of is None}
    if primaries != sessions.primaries.keys():
        _check_not_renamed(sessions, base, primaries)
        others = ", ".join(sorted(primaries ^ sessions.primaries.keys()))
        raise _BeginsAgainError(f"it had begun with other shards: {others}")
    return {*base.nodes} - {node.id for node in sessions.nodes}


def _check_not_renamed(sessions: Sessions, base: UnfinishedBase, primaries: Set[str]) -> None:
    """Raise UsageError if a shard has another id in fleet.toml than when the snapshot began."""
    places = {identity.place: identity.node for identity in base.baseline if identity.node in primaries}
    for node in sorted(sessions.primaries.keys() - primaries):
        if (known := places.get(sessions.identities[node].place)) and known not in sessions.primaries:
            raise UsageError(
                f"{known} is called {node} in fleet.toml now, and the snapshot was interrupted before that",
                hint=f"call it {known} until the snapshot is finished; to give up what was copied:"
                f" snapshot cancel {base.operation}",
                details={"node": node, "operation": base.operation},
            )


def _check_node(store: ObjectStore, sessions: Sessions, intent: Intent, node: str, position: Lsn) -> None:
    """Check that the node's slot continues the copy, or what is archived since.

    Raises SlotLostError, WalDivergedError, and the errors of read_metadata.
    """
    slot, end = slot_name(intent.operation), position
    prefix, number = archive_prefix(intent.snapshot, node, intent.operation), 0
    while store.exists(segment_key(prefix, number + 1)):
        number += 1
    if number:
        end = read_metadata(store, node, segment_key(prefix, number), number).segment.through
    with raising_unreachable(sessions.fleet.node(node)):
        connection = sessions.connections[node]
        state = slot_state(connection, slot)
        (place,) = connection.execute(PLACE_QUERY).fetchone() or (None,)
    check_place(sessions.fleet.node(node), place, end)
    check_slot(node, slot, state, end)
