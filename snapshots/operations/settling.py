"""Settle open operations before a new one begins. The caller holds the fleet's lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from contextlib import suppress

from cutline.fleet.chain_ids import in_listed_ids
from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import group_by_value, name_nodes, unlisted_text
from cutline.fleet.progress import News, Progress
from cutline.nodes.read_only import undo_freeze
from cutline.nodes.sessions import Sessions, ask_identities
from cutline.snapshots.operations.committing import decide, key_of
from cutline.snapshots.operations.leases import read_lease
from cutline.snapshots.operations.open_operations import (
    RESTORE,
    document_names,
    is_resumable,
    name_targets,
    open_operation_ids,
    read_open_intents,
    read_open_operation,
)
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.operations.signs import clear_signs
from cutline.snapshots.operations.slot_guard import is_foreign, read_slot_owners
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.operation_records import (
    DELETE,
    IN_STORE,
    MERGE,
    PRUNE,
    Intent,
    read_failure,
    read_intent,
    read_outcome,
)
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    increment_label,
    increment_numbers,
    read_full,
)
from cutline.snapshots.records.tombstones import only_full_key, tombstone_key
from cutline.storage.clock import utc_now
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.drain.slots import copy_slot_name, drop_slots, slot_name


def settle_operations(
    store: ObjectStore,
    fleet: Fleet,
    progress: Progress,
    documents: Mapping[str, Set[str]] | None = None,
    given_up: Collection[str] = (),
) -> list[Intent]:
    """Record an outcome for every open create, and for every removal that ended before its mark.

    Returns the open restores, which only the operator can resume or undo.

    A create is done if its commit exists. Otherwise it has failed: its slots are dropped, and the fleet is made
    writable again. This decision is final, however late the operation's own put arrives. An operation stays open for
    the next command if a slot can't be dropped now, or if the operation can't be read or belongs to a different fleet;
    a note says so. An unreadable operation holds no lock, and only one of two commits with the same number can be
    stored. A full snapshot that can be resumed stays as it is, unless its operation is in `given_up`. `documents` is
    the result of document_names, if listed under the lock. Raises UndecidedError.
    """
    restores: list[Intent] = []
    documents = document_names(store) if documents is None else documents
    for operation_id in open_operation_ids(store, documents):
        try:
            operation = read_intent(store, operation_id)
            # An unreadable object in place of the outcome prevents an outcome from being stored.
            read_outcome(store, operation_id)
            if operation.kind == RESTORE:
                restores.append(operation)
                continue
            if operation.kind in IN_STORE:
                # Nothing waits for a repair, and a create may not store voids in the place of repairs.
                continue
            if operation.kind != "create":
                _settle_removal(store, operation, progress)
                continue
            if is_foreign(store, operation):
                progress.note(
                    f"operation {operation.id} can't be settled: it belongs to fleet {operation.fleet_id}, so it was"
                    f" copied here from another store; remove operations/{operation.id} from this store"
                )
                continue
            if operation_id not in given_up and is_resumable(store, operation, documents[operation_id]):
                continue
            # An earlier command has settled it, and said so, but could not reach a node that has a slot of it.
            was_decided = (key := key_of(operation)) is not None and store.exists(key)
            committed = decide(store, operation)
        except ObjectMissingError:
            # gc removes the records of old operations, the intent first.
            continue
        except ManifestError as error:
            # The operation stays open, but must not block other snapshots. It may have been a terminal create.
            writes = "; if the fleet accepts no writes, run: snapshot resume"
            progress.note(f"operation {operation_id} can't be settled: {error.message}; {error.hint}{writes}")
            continue
        what = increment_label(operation.snapshot, operation.increment)
        if committed:
            progress.note(News(f"operation {operation.id} had committed {what}"))
            record_outcome(store, operation, "done", "found committed")
            clear_signs(store, operation.id)
            continue
        if not was_decided:
            progress.note(News(f"operation {operation.id} ended without committing {what}"))
        if _clean_up(store, fleet, operation, progress):
            cause = "interrupted, and given up later" if operation_id in given_up else _cause(store, operation)
            record_outcome(store, operation, "failed", cause)
            clear_signs(store, operation.id)
    return restores


def _clean_up(store: ObjectStore, fleet: Fleet, operation: Intent, progress: Progress) -> bool:
    """Remove what a create has left on the nodes; return False if anything remains."""
    listed = in_listed_ids(fleet) | {node.listed_id: node for node in fleet.retired_nodes}
    nodes = [listed[node] for node in operation.nodes if node in listed]
    note_unlisted(fleet, operation, progress)
    if len(nodes) < len(operation.nodes):
        # The others may have other ids now. What the operation left has its own name on every node.
        nodes = [*fleet.nodes, *(node for node in nodes if node in fleet.retired_nodes)]
    is_writable = not operation.is_terminal or undo_freeze(nodes, operation.id, progress)
    return is_writable and _drop_slots(store, operation, nodes, progress)


def note_unlisted(fleet: Fleet, operation: Intent, progress: Progress) -> None:
    """Note the nodes from which a create's slots can't be dropped, because fleet.toml lacks them now."""
    listed = {node.listed_id for node in (*fleet.nodes, *fleet.retired_nodes)}
    if unlisted := sorted({*operation.nodes} - listed):
        slot = copy_slot_name(operation.id) if operation.increment else slot_name(operation.id)
        progress.note(unlisted_text(unlisted, "the slot", slot))


def _cause(store: ObjectStore, operation: Intent) -> str:
    """Return the reason why the operation has no commit, if its command recorded one."""
    failure = None
    with suppress(ManifestError):
        failure = read_failure(store, operation.id)
    return f"{failure.reason}, settled later" if failure else "found without a commit"


def note_restores(store: ObjectStore, restores: Iterable[Intent], sessions: Sessions, progress: Progress) -> None:
    """Report open restores that target the sessions' databases: ending a restore may end the databases' chains."""
    places = {f"{identity.system_identifier}/{identity.database}" for identity in sessions.identities.values()}
    for intent in restores:
        if isinstance(intent.targets, tuple) and not places.isdisjoint(intent.targets):
            names = set(store.list_children(f"operations/{intent.operation}"))
            opened = read_open_operation(store, intent.operation, names)
            if opened is None:
                continue
            what = f"restore {intent.operation} of {intent.snapshot} into {name_targets(intent)}"
            if opened.is_running:
                progress.note(f"{what} is running; it will end the chain of every database that it sets aside")
                continue
            progress.note(
                f"{what} has no outcome; a chain will end if its source database is set aside (when the restore is"
                " resumed) or dropped (when it is abandoned); see: snapshot list"
            )


def _drop_slots(store: ObjectStore, operation: Intent, nodes: list[Node], progress: Progress) -> bool:
    """Drop the slots that the operation may have created; note the remaining slots, and return whether all are gone."""
    slot = slot_name(operation.id)
    owners = read_slot_owners(store)
    if owners.owner_of(slot) != operation:
        others = ", ".join(owner for owner in owners.ids.get(slot, ()) if owner != operation.id)
        why = (
            f"slot {slot} could also belong to another operation: {others}"
            if others
            else f"its intent was changed or removed after it was read, so the owner of slot {slot} is not known"
        )
        progress.note(f"operation {operation.id} can't be settled: {why}")
        return False
    left_on = {name: drop_slots(nodes, name) for name in (slot, copy_slot_name(operation.id))}
    if isinstance(operation.renews, dict) and (chain := _read_chain_slot(store, operation)):
        renewed = [node for node in nodes if node.listed_id in operation.renews]
        # Another server may have the id by now, whose slot of the chain is in use.
        databases = {node: identity.place for node, identity in ask_identities(renewed).items()}
        replaced = {
            node.listed_id for node in renewed if databases.get(node.id) not in (None, operation.renews[node.listed_id])
        }
        left_on[chain] = drop_slots([node for node in renewed if node.listed_id not in replaced], chain)
        if unlisted := sorted({*operation.renews} - {node.listed_id for node in renewed} | replaced):
            progress.note(unlisted_text(unlisted, "the chain's slot", chain))
    left_slots = group_by_value({name: name_nodes(left) for name, left in left_on.items() if left})
    for nodes_text, names in left_slots.items():
        progress.note(
            f"operation {operation.id} did not commit, and its slots could not be dropped on {nodes_text}; the next"
            f" create tries again: {', '.join(names)}"
        )
    return not any(left_on.values())


def _read_chain_slot(store: ObjectStore, operation: Intent) -> str:
    """Return the slot of the chain that a create continued; "" if the chain can't be read or was deleted.

    A deletion drops the slots, and a chain that can't be read is not continued: its slots last until it is deleted. ""
    also if another increment has been committed in place of the operation's: the slots are those of that one.
    """
    if increment_numbers(store, operation.snapshot, operation.increment):
        return ""
    try:
        return slot_name(read_full(store, operation.snapshot).operation)
    except (SnapshotMissingError, ManifestError):
        return ""


REPAIRED = ("had repaired", "ended without repairing")


def settle_in_store(store: ObjectStore, operation: Intent, progress: Progress) -> None:
    """Record the outcome of a repair or merge whose lease has expired; if it stored none, a void ensures that it can't.

    Needs no lock: the worst that a wrong clock can do is to make a running repair or merge fail. Raises ManifestError,
    UndecidedError.
    """
    if read_lease(store, operation).is_running(utc_now()):
        return
    is_done = decide(store, operation)
    done, undone = ("had merged", "ended without merging") if operation.kind == MERGE else REPAIRED
    found = done if is_done else undone
    progress.note(News(f"operation {operation.id} {found} snapshot {operation.snapshot}"))
    record_outcome(store, operation, "done" if is_done else "failed", "found after its lease had expired")
    clear_signs(store, operation.id)


def _is_marked(store: ObjectStore, removal: Intent) -> bool:
    """Whether the removal's mark is stored: the next delete, prune or merge then resumes it."""
    if removal.is_giving_up:
        return first_increment(store, removal.snapshot) >= removal.increment
    return store.exists((tombstone_key if removal.kind == DELETE else only_full_key)(removal.snapshot))


def _settle_removal(store: ObjectStore, operation: Intent, progress: Progress) -> None:
    """Record as failed a removal that ended before storing its mark, because it removed nothing.

    If the mark arrives in the store later, the removal can still be resumed, because only the mark counts. What gives
    up the beginning of a chain needs no lock, so it may be running until its lease has expired.
    """
    is_running = operation.is_giving_up and read_lease(store, operation).is_running(utc_now())
    if operation.kind in (DELETE, PRUNE) and not is_running and not _is_marked(store, operation):
        progress.note(
            News(f"operation {operation.id} ended before it removed anything from snapshot {operation.snapshot}")
        )
        record_outcome(store, operation, "failed", "found without a mark")
        clear_signs(store, operation.id)


def settle_removals(store: ObjectStore, progress: Progress) -> None:
    """Record as failed, in a copy, the removals that ended before storing their marks; otherwise no pin is possible.

    No lock shows there that none is running, so each counts as running until a lease of its age would have expired.
    Raises ManifestError.
    """
    for operation in read_open_intents(store, skips_unreadable=True):
        is_removal = operation.kind in (DELETE, PRUNE)
        if is_removal and not read_lease(store, operation).is_running(utc_now()):
            _settle_removal(store, operation, progress)
