"""The slots of operations: which create made a slot, and how much WAL nodes may retain for it (invariant 9).

The contents of documents never decide which slot is dropped: anyone who can write to the store could name the slot of
an application, or of another store's chain. Slot names are derived from the ids of operations in lowercase, so two ids
can have the same slot name. In that case one of the ids was planted, and neither is trusted. The exception is a node's
limit on retained WAL: past the limit, a slot that is named like Cutline's slots is always dropped.

A node's limit protects its disk, so it applies to every chain. The slots of a chain are dropped only on the nodes past
their limit, and the chain's next increment copies these nodes again. So a limit never ends a chain, and the slots of a
chain that nobody continues are dropped node by node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psycopg
from msgspec import UNSET, Struct, field
from msgspec.structs import replace

from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import FREE_SLOTS, NODES_NAMED_MAX, group_by_value, list_some, name_nodes
from cutline.fleet.progress import News, Progress
from cutline.fleet.units import size_text
from cutline.nodes.sessions import Sessions
from cutline.snapshots.operations.committing import has_committed
from cutline.snapshots.operations.open_operations import has_failed, is_resumable
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.end_marks import EndMark, has_end, mark_end
from cutline.snapshots.records.operation_records import Intent, read_intent, read_outcome
from cutline.snapshots.records.proven_chains import (
    commit_key,
    cut_time,
    increment_numbers,
    listed_numbers,
    point_label,
    read_newest_part,
)
from cutline.snapshots.records.store_identity import read_fleet_id
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.snapshots.records.unfinished_records import read_unfinished_base
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.drain.lags import Retained, RetainedAnswers, query_retained, read_retained
from cutline.wal.drain.slots import COPY_SUFFIX, copy_slot_name, drop_slots, slot_name


class SlotOwners(Struct, frozen=True):
    """The ids of the operations in the store, keyed by the names of the slots that a create with that id makes."""

    store: ObjectStore
    ids: dict[str, list[str]]

    def owner_of(self, slot: str) -> Intent | None:
        """Return the create that made the slot; None if the store does not prove which create did."""
        ids = self.ids.get(slot, [])
        if len(ids) != 1:
            return None
        try:
            intent = read_intent(self.store, ids[0])
        except (ObjectMissingError, ManifestError):
            return None
        return None if intent.kind != "create" or is_foreign(self.store, intent) else intent


def read_slot_owners(store: ObjectStore, operations: Iterable[str] | None = None) -> SlotOwners:
    """Read the owners of all slots; `operations` are the ids of all operations, if the caller has them."""
    ids: dict[str, list[str]] = {}
    for operation in store.list_children("operations") if operations is None else operations:
        for name in (slot_name(operation), copy_slot_name(operation)):
            ids.setdefault(name, []).append(operation)
    return SlotOwners(store, ids)


def is_foreign(store: ObjectStore, intent: Intent) -> bool:
    """Whether the intent names a different fleet than the store, because it was copied here from another store."""
    return intent.fleet_id is not UNSET and intent.fleet_id != read_fleet_id(store)


class KeptChain(Struct, frozen=True):
    """The WAL that the nodes keep for one chain. `snapshot` is None if no snapshot in this store has the chain.

    `unfinished` is the snapshot of a create that was interrupted and can be resumed, "" otherwise; `readers` are the
    standbys on which its tables are read instead of the primaries. `is_failed` is set if the operation has failed, but
    made slots after another command had settled it and dropped its slots. `removal_text` says that the chain was
    deleted or pruned, and is "" otherwise. `is_ended_copy` is set for a slot for copying tables whose operation has
    ended, unless tables are still copied in the background for it; such a slot belongs to the operation `chain`, and to
    no snapshot.
    """

    slot: str
    retained: tuple[Retained, ...]
    snapshot: str | None = None
    chain: str = ""
    unfinished: str = ""
    readers: frozenset[str] = frozenset()
    is_failed: bool = False
    removal_text: str = ""
    is_ended_copy: bool = False

    @property
    def worst(self) -> Retained:
        """The WAL of the node that is nearest to its limit, or furthest past it."""
        return max(self.retained, key=lambda one: one.size_bytes / one.limit_bytes)

    @property
    def past_limit(self) -> set[str]:
        """The nodes that keep more WAL than their limits."""
        return {one.node for one in self.retained if one.is_past_limit}

    @property
    def label(self) -> str:
        """The snapshot or slot for which the WAL is kept."""
        if self.snapshot:
            return f"snapshot {self.snapshot}"
        if self.unfinished:
            return f"snapshot {self.unfinished}, which is not finished,"
        if self.chain and self.slot.endswith(COPY_SUFFIX):
            return f"operation {self.chain}, which copies tables,"
        return f"slot {self.slot}, not part of a snapshot in this store,"


class SlotRuling(Struct, frozen=True):
    """What a create does with the slots of a chain: it drops those on `nodes`. Without nodes, all slots stay.

    `reason` says why, as part of a sentence; it is "" if the reason is a node's limit. Then only the copies of these
    nodes end (`ends_copies`), unless no chain can be continued without them.
    """

    nodes: tuple[Node, ...] = ()
    reason: str = ""
    ends_copies: bool = False


def rule_on_slots(kept: KeptChain, fleet: Fleet, *, ended: bool) -> SlotRuling:
    """Return what a create does with the slots of `kept`.

    `ended` says that the chain is marked as ended. This is the only place that decides about slots: guard_nodes obeys
    it, and `list` and every preview report it.
    """
    nodes = tuple(fleet.nodes)
    if kept.is_failed:
        return SlotRuling(nodes, f"operation {kept.chain} has failed but still has slots")
    if kept.is_ended_copy:
        having = {retained.node for retained in kept.retained}
        reason = f"operation {kept.chain} has ended but still has slots for copying tables"
        return SlotRuling(tuple(node for node in nodes if node.id in having), reason)
    if kept.removal_text:
        return SlotRuling(nodes, f"{kept.removal_text} but still has slots")
    if ended:
        return SlotRuling(nodes, f"{kept.label} will get no more increments but still has slots")
    if not kept.worst.is_past_limit:
        return SlotRuling()
    past = tuple(node for node in nodes if node.id in kept.past_limit)
    is_needed = any(node.backup_of is None or fleet.standbys_needed(node.shard) for node in past)
    # The tables that an unfinished snapshot read on a standby alone are copied again when it is resumed.
    if kept.snapshot or (kept.unfinished and not is_needed):
        return SlotRuling(past, ends_copies=True)
    return SlotRuling(nodes)


def ruling_text(kept: KeptChain, ruling: SlotRuling, continued: str | None = None) -> str:
    """Return what a create will do with the slots, and what an operator can do instead; "" if there is nothing to say.

    Without a `continued` chain, the next create may be one of any snapshot.
    """
    if ruling.reason:
        return f"{ruling.reason}: the next create will drop them"
    if not ruling.nodes:
        return warning_text(kept) if kept.worst.is_past_half else ""
    past = sorted(kept.past_limit)
    where = list_some(past, NODES_NAMED_MAX)
    if ruling.ends_copies:
        copies = "copy of this node" if len(past) == 1 else "copies of these nodes"
        will = f"will drop its slot on {where}, which ends only the {copies}"
        if kept.snapshot and kept.chain == continued:
            return f"{over_limit_text(kept)}: the increment {will}, and copy {where} again"
        renewed = ""
        if kept.snapshot:
            renewed = f"; the next increment copies {where} again: snapshot create {kept.snapshot} --incremental;"
            renewed += f" {_how_to_end(kept.snapshot)}"
        if kept.readers.intersection(past):
            renewed = "; the tables that were read there are copied again when the snapshot is resumed"
        return f"{over_limit_text(kept)}: the next create {will}{renewed}"
    lost = ", so it can't be resumed" if kept.unfinished else ""
    return f"{over_limit_text(kept)}: the next create will drop its slots{lost}"


class Guarded(Struct, frozen=True):
    """The snapshots whose chains still have slots, sorted; one that is not finished may be among them.

    `dropped` are the nodes whose slots of the continued chain were past their limits, with the reason for a new copy.
    """

    staying: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)


def guard_nodes(
    store: ObjectStore,
    sessions: Sessions,
    progress: Progress,
    operations: Iterable[str] | None = None,
    continued: str | None = None,
) -> Guarded:
    """Warn of every chain past half of a node's limit, and drop the slots past it.

    Also drops the slots of chains that have failed, were removed or have ended, and those for copying tables whose
    operations have ended: a standby that was away then may still have one. The caller holds the fleet's lock, so no
    other command continues a chain at the same time. For `operations`, see read_slot_owners.
    """
    staying, reasons = list[str](), dict[str, str]()
    for kept in read_kept_chains(store, sessions, progress, operations):
        ruling = rule_on_slots(kept, sessions.fleet, ended=is_marked_ended(store, kept, progress))
        dropped = {node.id for node in ruling.nodes}
        if kept.snapshot and not dropped.issuperset(retained.node for retained in kept.retained):
            staying.append(kept.snapshot)
        if not ruling.nodes:
            if kept.worst.is_past_half:
                progress.note(warning_text(kept))
            continue
        if ruling.reason:
            progress.note(News(ruling.reason))
        elif not ruling.ends_copies:
            progress.note(over_limit_text(kept))
        elif kept.chain == continued:
            # The increment says what it copies again.
            progress.note(News(over_limit_text(kept)))
            reasons = {one.node: _limit_reason(one) for one in kept.retained if one.node in dropped}
        else:
            progress.note(_dropped_text(store, kept, ruling))
        _drop_kept_slots(kept, ruling.nodes, progress)
    return Guarded(tuple(sorted(staying)), reasons)


def _limit_reason(retained: Retained) -> str:
    """Return why the node is copied again, for the commit: afterwards, nothing else shows that there was a slot."""
    kept, limit = size_text(retained.size_bytes), size_text(retained.limit_bytes)
    return f"it kept {kept} of WAL for the chain, more than max_retained_wal ({limit}), so its slot was dropped"


def _dropped_text(store: ObjectStore, kept: KeptChain, ruling: SlotRuling) -> str:
    """Return the note that slots of a chain, or of an unfinished snapshot, that the command does not continue go."""
    where = list_some([node.id for node in ruling.nodes], NODES_NAMED_MAX)
    text = f"{over_limit_text(kept)}: its slot is dropped on {where}"
    if not kept.snapshot:
        return text
    text += f", and the next increment copies {where} again"
    if any(node.backup_of is None for node in ruling.nodes):
        last = point_label(_last_number(store, kept.snapshot))
        text += f"; no time between {last} and that increment can be restored"
    return f"{text}; {_how_to_end(kept.snapshot)}"


def _how_to_end(snapshot: str) -> str:
    return f"if nobody continues this chain: snapshot end {snapshot}"


def note_older_chains(store: ObjectStore, snapshots: Iterable[str], progress: Progress) -> None:
    """Note the `snapshots` with slots that a new full snapshot does not end, and how to end them.

    The note also appears with --quiet: without a watch, nothing else ends a chain that a rule of retention keeps.
    """
    if others := [name for name in snapshots if store.exists(commit_key(name, 0))]:
        progress.note(
            f"nodes also keep WAL and a slot for each of these snapshots: {list_some(others, NODES_NAMED_MAX)}; to end"
            f" the chain of one that needs no more increments, and keep its restore points: snapshot end {others[0]}"
        )


def how_to_free_slots(
    store: ObjectStore, node: Node, connection: psycopg.Connection[Any], continued: str | None = None
) -> str:
    """Return the hint for a server whose slots are all in use: which snapshots they belong to, and how to end these.

    The chain with the newest restore point, and the chain `continued`, are not to be ended. Says nothing about slots
    of other databases of the server, and of other programs.
    """
    chains, loose, unfinished = list[str](), list[str](), list[str]()
    # The hint is for an error that matters more than one that the store may have.
    with suppress(SnapshotError):
        owners = read_slot_owners(store)
        for retained in read_retained(node, connection):
            owner = owners.owner_of(retained.slot)
            kept = find_kept_chain(store, KeptChain(retained.slot, (retained,)), owner)
            if kept.chain == continued and continued:
                continue
            if kept.snapshot and store.exists(commit_key(kept.snapshot, 0)):
                chains.append(kept.snapshot)
            elif owner is not None and (kept.snapshot or kept.unfinished):
                unfinished.append(owner.id)
            elif not kept.chain or kept.is_failed or kept.removal_text or kept.is_ended_copy:
                loose.append(retained.slot)
    return free_slots_text(sorted(chains, key=lambda name: _newest_cut(store, name)), unfinished, loose, continued)


def free_slots_text(
    chains: Sequence[str], unfinished: Iterable[str], loose: Iterable[str], continued: str | None = None
) -> str:
    """Return the hint about `chains`, oldest restore point first, `unfinished` creates, and slots without a chain."""
    texts = [FREE_SLOTS]
    if chains:
        texts = [
            "raise max_replication_slots, or end chains that nobody continues; these snapshots have slots there, the"
            f" newest restore point last: {list_some(chains, NODES_NAMED_MAX)}"
        ]
    # A command that continues no chain needs at least one to be left.
    if ended := chains if continued else chains[:-1]:
        commands = "; ".join(f"snapshot end {name}" for name in ended[:NODES_NAMED_MAX])
        texts.append(f"to end those that get no more increments, and keep their restore points: {commands}")
    texts += [
        f"operation {one} is a full snapshot: if it runs (snapshot status), wait for it; to give it up if it was"
        f" interrupted: snapshot cancel {one}"
        for one in unfinished
    ]
    texts += [f"if nobody needs it: SELECT pg_drop_replication_slot('{slot}')" for slot in loose]
    return "; ".join(texts)


def _newest_cut(store: ObjectStore, snapshot: str) -> datetime:
    """Return when the newest restore point was made; that of a damaged snapshot counts as the oldest."""
    try:
        return cut_time(read_newest_part(store, snapshot).last)
    except SnapshotError:
        return datetime.min.replace(tzinfo=UTC)


def preview_guard(store: ObjectStore, sessions: Sessions, continued: str | None, progress: Progress) -> None:
    """Note what guard_nodes would do, without doing it."""
    for kept in read_kept_chains(store, sessions, progress):
        ruling = rule_on_slots(kept, sessions.fleet, ended=is_marked_ended(store, kept, progress))
        if text := ruling_text(kept, ruling, continued):
            progress.note(News(text) if ruling.reason else text)


def read_kept_chains(
    store: ObjectStore, sessions: Sessions, progress: Progress, operations: Iterable[str] | None = None
) -> list[KeptChain]:
    """Return the WAL that all nodes in the fleet keep, by chain; note the nodes that do not answer."""
    retained = [slot for found in sessions.ask_nodes(read_retained).values() for slot in found]
    others = query_retained(node for node in sessions.fleet.nodes if node.id not in sessions.connections)
    for why, nodes in group_by_value(others.unanswered).items():
        progress.note(f"{name_nodes(nodes)}: the size of the retained WAL is not known: {why}")
    answers = RetainedAnswers((*retained, *others.retained), others.unanswered)
    slots = sorted({one.slot for one in answers.retained})
    if not slots:
        return []
    owners = read_slot_owners(store, operations)
    return [find_kept_chain(store, KeptChain(slot, answers.of_slot(slot)), owners.owner_of(slot)) for slot in slots]


def note_unknown_slots(chains: Iterable[KeptChain], progress: Progress) -> None:
    """Note Cutline slots that no create in this store made; they belong to an earlier or a different store.

    Below a node's limit, nothing else reports such slots, and no command drops them.
    """
    for kept in chains:
        if kept.chain:
            continue
        nodes = sorted({retained.node for retained in kept.retained})
        progress.note(
            f"{_wal_text(kept, kept.worst)}; if the store that it belongs to is gone, drop it on"
            f" {list_some(nodes, NODES_NAMED_MAX)}:"
            f" SELECT pg_drop_replication_slot('{kept.slot}')"
        )


def find_kept_chain(store: ObjectStore, kept: KeptChain, operation: Intent | None) -> KeptChain:
    """Complete `kept` with the store's records of the create that made the slot."""
    if operation is None:
        return kept
    kept = replace(kept, chain=operation.id)
    if kept.slot.endswith(COPY_SUFFIX):
        is_ended = _has_ended(store, operation.id) and not _is_copied_in_background(store, operation)
        return replace(kept, is_ended_copy=is_ended)
    try:
        if has_failed(store, operation.id) and not has_committed(store, operation):
            return replace(kept, is_failed=True)
        if is_deleted(store, operation.snapshot):
            return replace(kept, removal_text=f"snapshot {operation.snapshot} was deleted")
        if is_only_full(store, operation.snapshot):
            return replace(kept, removal_text=f"the increments of snapshot {operation.snapshot} were pruned")
        # The whole commit file is read only if there is something to report.
        if not kept.worst.is_past_half or has_committed(store, operation):
            return replace(kept, snapshot=operation.snapshot)
        names = set(store.list_children(f"operations/{operation.id}"))
        if is_resumable(store, operation, names):
            readers = read_unfinished_base(store, operation.id, names).readers
            return replace(kept, unfinished=operation.snapshot, readers=frozenset(readers.values()))
    except ObjectMissingError:
        return kept
    except ManifestError:
        # An unreadable document doesn't end a chain; only the limit does.
        return replace(kept, snapshot=operation.snapshot)
    return kept


def _has_ended(store: ObjectStore, operation: str) -> bool:
    try:
        return read_outcome(store, operation) is not None
    except ManifestError:
        return False


def _is_copied_in_background(store: ObjectStore, operation: Intent) -> bool:
    """Whether the newest commit says that a copy which the operation began is being made (create/copy_between.py).

    Its steps create slots after the operation has ended, and drop what others have left.
    """
    try:
        chain = read_newest_part(store, operation.snapshot)
        is_copied = any(copying.operation == operation.id for copying in chain.copying.values())
        return is_copied and not has_end(store, chain.name, chain.full.chain)
    except RefusedError:
        return False


def mark_set_aside(store: ObjectStore, slots: Iterable[tuple[str, str]], restore: str) -> None:
    """Mark the chains that continue in these slots, each with its node, as ended by the `restore` operation."""
    found: dict[str, list[str]] = {}
    for slot, node in slots:
        found.setdefault(slot, []).append(node)
    owners = read_slot_owners(store) if found else None
    for slot, nodes in found.items():
        owner = owners.owner_of(slot) if owners and not slot.endswith(COPY_SUFFIX) else None
        if owner is not None and not owner.increment and has_committed(store, owner):
            last = _last_number(store, owner.snapshot)
            at, of_nodes = current_time(), tuple(sorted(set(nodes)))
            mark = EndMark(owner.snapshot, owner.id, last, of_nodes[0], at, restore=restore, nodes=of_nodes)
            mark_end(store, mark)


def is_marked_ended(store: ObjectStore, kept: KeptChain, progress: Progress) -> bool:
    """Whether the chain is marked as ended; an unreadable mark is noted and ignored."""
    if not kept.snapshot:
        return False
    try:
        return has_end(store, kept.snapshot, kept.chain)
    except ManifestError as error:
        progress.note(f"{error.message}; {error.hint}")
        return False


def _last_number(store: ObjectStore, snapshot: str) -> int:
    try:
        return max(increment_numbers(store, snapshot), default=0)
    except ManifestError:
        return max(listed_numbers(store, snapshot), default=0)


def _drop_kept_slots(kept: KeptChain, nodes: Iterable[Node], progress: Progress) -> None:
    left = drop_slots(nodes, kept.slot)
    if left:
        progress.note(f"slot {kept.slot} could not be dropped on {', '.join(left)}; the next create will retry")
    else:
        progress.note(News(f"slot {kept.slot} was dropped"))


def warning_text(kept: KeptChain) -> str:
    """Return the warning about a chain past half of a node's limit."""
    remedy = ""
    if kept.snapshot:
        remedy = f"; take an increment: snapshot create {kept.snapshot} --incremental; {_how_to_end(kept.snapshot)}"
    if kept.unfinished:
        remedy = f"; to resume it: snapshot create {kept.unfinished}"
    return f"{_wal_text(kept, kept.worst)}, more than half its limit of {size_text(kept.worst.limit_bytes)}{remedy}"


def retained_text(kept: KeptChain) -> str:
    """Return the line about a chain for which a node retains much WAL, but no more than half of its limit."""
    return f"{_wal_text(kept, kept.worst)}, of at most {size_text(kept.worst.limit_bytes)}"


def over_limit_text(kept: KeptChain) -> str:
    """Return the message about a chain past a node's limit."""
    return f"{_wal_text(kept, kept.worst)}, more than its limit of {size_text(kept.worst.limit_bytes)}"


def ended_text(kept: KeptChain) -> str:
    """Return the message about a chain that will get no more increments."""
    nodes = sorted({retained.node for retained in kept.retained})
    where = list_some(nodes, NODES_NAMED_MAX)
    return f"{_wal_text(kept, kept.worst)}, which will get no more increments; it has slots on {where}"


def _wal_text(kept: KeptChain, worst: Retained) -> str:
    return f"node {worst.node} keeps {size_text(worst.size_bytes)} of WAL for {kept.label}".removesuffix(",")
