"""Copy nodes again whose copies in the chain can't be continued, so that only their copies restart, not the chain.

A copy can't be continued if its slot was lost, if its WAL branched off before the end of its archive, if a publication
of its shard was altered, if its server was upgraded, if its database was replaced, or if a standby was rebuilt, was
added to fleet.toml, or missed a change of tables. A shard that joins the chain has none to continue. The increment
creates the chain's slot on such a node again and begins a new archive at the slot's position. A standby's tables are
copied as they are at this position. The tables of a primary are copied by the increment's own attempts
(`prepare_tables`), on all nodes of the shard, under new group numbers.

The new archive has the increment's operation in its keys. So it never continues the archive of another attempt. The
slot has the chain's name: the intent names the nodes, and whoever settles a dead increment drops it on them.

A standby that can't be copied is left out, unless fleet.toml requires it. A large standby only gets its slot: its
tables are copied in the background of this and later increments (snapshots/create/background_copies.py), and then the
copy is added to the chain as if the increment had made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import cast

import psycopg
from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import without_node
from cutline.fleet.progress import News, Progress
from cutline.nodes.connections import NodeUnreachableError, raising_unreachable
from cutline.nodes.groups import SchemaChangedError, Table
from cutline.nodes.problems import NodeUnfitError
from cutline.nodes.publications import repair_options
from cutline.nodes.sessions import Absence, Sessions, in_parallel
from cutline.snapshots.base_copy.copy_ranges import CopyDestination
from cutline.snapshots.base_copy.copy_slots import check_exported, export_snapshots, insert_position
from cutline.snapshots.base_copy.copy_tables import TableSource, amount_to_copy, copy_tables
from cutline.snapshots.create.absent_copies import leave_out, leave_out_silent
from cutline.snapshots.create.background_copies import (
    UnderwayCopy,
    list_later,
    reason_text,
    restarted_reason,
)
from cutline.snapshots.create.context import ChainState, CreateContext
from cutline.snapshots.create.make_cut import ArchivedCut, LastCut
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.snapshots.create.rewritten_tables import find_incomplete, rewritten_text
from cutline.snapshots.create.spared_cut import renew_lost
from cutline.snapshots.ddl.attempts import ChangedError
from cutline.snapshots.ddl.table_changes import KnownTables, plan_ddl, read_current_tables
from cutline.snapshots.operations.operation import check_exclusive
from cutline.snapshots.records.background_records import StepsCopied
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BackgroundCopy,
    CopiedLater,
    DefinitionChanges,
    LostWal,
    NamedObject,
    Renewal,
    split_entries,
)
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.proven_chains import SnapshotMissingError, point_label, read_commit
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import ADVANCED, drop_slots, is_synchronized, slot_name
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError

ONE_READER = (
    "a chain's slots can feed only one store: find the program that advanced it, such as a create or watch that uses a"
    " duplicate of this store, and stop it"
)


class CompletedCopy(Struct, frozen=True):
    """A copy that increments have made in the background: its steps, and its archive up to the last commit."""

    copying: BackgroundCopy
    copied: StepsCopied
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> dict[int, int]:
        """The number of rows by the number under which they are stored."""
        rows = {number: count for step in self.copied.steps for number, count in step.rows.items()}
        return {number: rows[number] for number in self.copied.copied}


class NewCopies(Struct, frozen=True):
    """The copies that an increment restarts: their reasons and positions, by node, and the copied tables.

    `entries` are the objects of standbys' tables, and `copied` counts their rows by group number. The tables of the
    `copied_shards` are copied by the increment's attempts. `slots_complete_at` has the positions of all primaries when
    the slots had been created; it is empty unless a primary is among the nodes.
    `rewritten` lists, by standby, the tables whose rows may be incomplete (snapshots/create/rewritten_tables.py).
    `without_rows` has the numbers, by shard, of the groups that these copies lack: the increment copies such a table on
    all nodes, or it is gone. `lost` is what primaries have lost of the WAL of their copies in the chain. `background`
    are copies made in the background that are still incomplete, and `completed` those whose tables are all copied.
    """

    reasons: Mapping[str, str] = field(default_factory=dict)
    positions: Mapping[str, Lsn] = field(default_factory=dict)
    entries: tuple[NamedObject, ...] = ()
    copied: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    copied_shards: frozenset[str] = frozenset()
    slots_complete_at: Mapping[str, Lsn] = field(default_factory=dict)
    rewritten: Mapping[str, tuple[Table, ...]] = field(default_factory=dict)
    without_rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    lost: Mapping[str, LostWal] = field(default_factory=dict)
    background: Mapping[str, BackgroundCopy] = field(default_factory=dict)
    completed: Mapping[str, CompletedCopy] = field(default_factory=dict)

    def of(self, chain: Chain, sessions: Sessions, later: Mapping[str, tuple[CopiedLater, ...]]) -> dict[str, Renewal]:
        """Return the renewals for the next commit of the chain, without standbys that have been left out since.

        `later` are the tables of the completed copies (`find_later`).
        """
        return {
            node: Renewal(
                sessions.identities[node],
                at,
                self.reasons[node],
                dict(self.copied.get(node, {})),
                is_new=node not in chain.parts,
                lost=self.lost.get(node),
                began_by=self.completed[node].copying.operation if node in self.completed else "",
                later=later.get(node, ()),
            )
            for node, at in self.positions.items()
            if node not in sessions.absent
        }

    def segments_of(self, node: str, new: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Return the segments that the commit lists for the node, with the `new` ones."""
        return (*(self.completed[node].segments if node in self.completed else ()), *new)

    def with_entries(self, changes: DefinitionChanges | None, nodes: Iterable[str]) -> DefinitionChanges | None:
        """Add the objects of these nodes, which are those of `of`, to a commit's changes."""
        nodes = set(nodes)
        if not nodes:
            return changes
        changes = changes or DefinitionChanges()
        objects, lists = split_entries(entry for entry in self.entries if entry.node in nodes)
        return structs.replace(changes, objects=(*changes.objects, *objects), lists=(*changes.lists, *lists))

    def state_after(self, state: ChainState, operation: str, sessions: Sessions) -> ChainState:
        """Return the chain's state in which these copies restart.

        The DDL of a primary's shard is stored again in any case: after a failover, other DDL may have had the same
        transaction ids as what was lost, and so have left the same fingerprint.
        """
        begun = {node: at for node, at in self.positions.items() if node not in self.completed}
        if not begun:
            return state
        shards = frozenset(self.positions.keys() & sessions.primaries.keys())
        # A shard that joins the chain has no last cut.
        markers = {shard: cut.marker for shard, cut in state.last_cut.items()}
        return replace(
            state,
            known=replace(
                state.known,
                lost=self.copied_shards | shards,
                fingerprints={**state.known.fingerprints, **dict.fromkeys(shards, "")},
                without_rows=_merged(state.known.without_rows, self.without_rows),
            ),
            base={**state.base, **begun},
            segments={node: segments for node, segments in state.segments.items() if node not in begun},
            last_cut={
                **state.last_cut,
                **{shard: LastCut(self.positions[shard], marker=markers.get(shard)) for shard in shards},
            },
            archives={**state.archives, **dict.fromkeys(begun, operation)},
            absent=state.absent | begun.keys(),
        )


def renew_copies(
    context: CreateContext,
    state: ChainState,
    chain: Chain,
    reasons: Mapping[str, str],
    spark: SparkSource,
    progress: Progress,
) -> NewCopies:
    """Restart the copies of the nodes in `reasons`: create their slots, and copy the tables of standbys.

    Afterwards, all transactions that were prepared before the slots existed are decided: they are decoded only at
    COMMIT PREPARED. Raises the errors of `export_snapshots` and `await_prepared` for primaries and required standbys.
    """
    if not reasons:
        return NewCopies()
    sessions, slot = context.sessions, slot_name(state.chain)
    nodes = [node for node in sessions.nodes if node.id in reasons]
    for node in nodes:
        progress.note(renewal_note(node, "is copied", reasons[node.id], chain))
    # Another increment that had taken the lock would have created these slots.
    check_exclusive(context.lock, context.store, context.operation)
    _repair_publications(sessions, nodes, state.selection.fleet_id, progress)
    left = drop_slots(nodes, slot)
    for node in (node for node in nodes if node.id in left):
        _do_without(sessions, node, _undropped_error(sessions, node, slot))
    primaries = [node for node in nodes if node.backup_of is None]
    new = _begin_primaries(context, primaries, slot, progress)
    new = _begin_standbys(context, replace(state, known=_with_lost(state, primaries)), new, nodes, spark, progress)
    if primaries:
        await_prepared(sessions, context.request.wait_seconds, progress, "the new copy")
        progress.reached(CrashPoint.PREPARED_OVER)
        new = replace(new, slots_complete_at=sessions.ask_primaries(insert_position))
    return replace(new, reasons=reasons)


def _repair_publications(sessions: Sessions, nodes: Iterable[Node], fleet_id: str, progress: Progress) -> None:
    """Repair the publications of the primaries among the nodes: slots decode the WAL that follows through them."""

    def repair(node: Node) -> list[str]:
        with raising_unreachable(node):
            return repair_options(sessions.connections[node.id], fleet_id)

    primaries = [node for node in nodes if node.backup_of is None]
    for node, repaired in zip(primaries, in_parallel(repair, primaries), strict=True):
        if repaired:
            progress.note(News(f"node {node.id}: repaired Cutline's publications: {', '.join(repaired)}"))


def with_completed(
    context: CreateContext, chain: Chain, new: NewCopies, underway: Mapping[str, UnderwayCopy], progress: Progress
) -> NewCopies:
    """Add the copies that earlier increments have begun: those that are complete now, and the others."""
    sessions = context.sessions
    completed: dict[str, CompletedCopy] = {}
    for node in [node for node in sessions.nodes if node.id in underway]:
        copy = underway[node.id]
        if not copy.is_complete:
            progress.note(News(f"standby {node.id} is being copied: {copy.text}"))
            continue
        completed[node.id] = CompletedCopy(copy.copying, copy.copied, copy.segments)
        progress.note(renewal_note(node, "was copied", copy.copying.reason, chain))
    entries = (entry for one in completed.values() for step in one.copied.steps for entry in step.entries)
    return replace(
        new,
        reasons={**new.reasons, **{node: one.copying.reason for node, one in completed.items()}},
        positions={**new.positions, **{node: one.copying.base for node, one in completed.items()}},
        entries=(*new.entries, *entries),
        copied={**new.copied, **{node: one.rows for node, one in completed.items()}},
        background={
            **new.background,
            **{node: copy.copying for node, copy in underway.items() if node in sessions.incomplete},
        },
        completed=completed,
    )


def find_lost(store: ObjectStore, chain: Chain, agreed: Mapping[str, Lsn]) -> dict[str, LostWal]:
    """Return what primaries have lost, by node; `agreed` has up to where each server has the WAL of its copy."""
    return {
        node: LostWal(position, _first_beyond(store, chain, node, position))
        for node, position in agreed.items()
        if node in chain.primaries
    }


def _first_beyond(store: ObjectStore, chain: Chain, node: str, position: Lsn) -> int | None:
    """Return the first restore point whose cut of the primary lies beyond the position; None if there is none."""
    if position == ORIGIN:
        return chain.begun(node)
    first, commit = None, chain.last
    while (cut := commit.cut.by_node.get(node)) is not None and cut.position > position:
        first = commit.increment
        if not first:
            break
        try:
            # The chain lacks most of its commits here (Chain.is_partial). Usually, few were lost.
            commit = read_commit(store, chain.name, first - 1)
        except (SnapshotMissingError, ManifestError):
            break
    return first


def _undropped_error(sessions: Sessions, node: Node, slot: str) -> SnapshotError:
    is_copy = False
    # If the server does not answer, this is why the slot is still there.
    with suppress(psycopg.Error):
        is_copy = is_synchronized(sessions.connections[node.id], slot)
    if is_copy:
        return NodeUnfitError(
            f"node {node.id}: its slot {slot} is synchronized from the primary's; turn off the failover property there",
            hint=f'on the primary, with replication=database: ALTER_REPLICATION_SLOT "{slot}" (FAILOVER false)',
            details={"node": node.id},
        )
    return NodeUnreachableError(
        f"node {node.id}: slot {slot} could not be dropped",
        hint="check the server's log; the next create will drop the slot",
        details={"node": node.id},
    )


def renewal_note(node: Node, does: str, reason: str, chain: Chain) -> str:
    """Return the note that the node `is copied` or `will be copied`: a warning if restorable times or changes are lost.

    The copy of a primary that restarts leaves a gap in the chain. An advanced slot shows that something else reads
    it, on a standby as well. All else is routine.
    """
    kind, is_again = "primary" if node.backup_of is None else "standby", node.id in chain.parts
    text = f"{kind} {node.id} {does}{' again' if is_again else ''}: {reason}"
    is_advanced = reason.endswith(ADVANCED)
    if not is_again or not (is_advanced or node.backup_of is None):
        return News(text)
    if node.backup_of is None:
        text += f"; no time between {point_label(chain.last.increment)} and this increment can be restored"
    if is_advanced:
        text += f"; {ONE_READER}"
    return text


def find_later(
    store: ObjectStore, new: NewCopies, cut: ArchivedCut, sessions: Sessions
) -> dict[str, tuple[CopiedLater, ...]]:
    """Return the tables of the completed copies with their positions, by node (background_copies.list_later).

    Leaves out the standbys whose archives are damaged: their copies end. Raises the error if fleet.toml requires one.
    """
    found: dict[str, tuple[CopiedLater, ...]] = {}
    for node in [node for node in sessions.nodes if node.id in new.completed]:
        try:
            found[node.id] = list_later(
                store, new.completed[node.id].copied, new.segments_of(node.id, cut.segments[node.id])
            )
        except ObjectDamagedError as error:
            leave_out(sessions, node, error, has_ended=True)
    return found


def leave_out_background(
    context: CreateContext, new: NewCopies, cut: ArchivedCut, underway: Mapping[str, UnderwayCopy], progress: Progress
) -> dict[str, BackgroundCopy]:
    """Leave out the standbys whose copies are not complete yet; return what the commit says about them.

    If a primary is copied again, its tables get new numbers, and what was copied on its standbys no longer counts.
    """
    sessions, found = context.sessions, dict[str, BackgroundCopy]()
    renewed = new.copied_shards | new.positions.keys()
    for node in [node for node in sessions.nodes if node.id in new.background]:
        last = cut.segments[node.id][-1]
        if node.id in underway:
            found[node.id] = underway[node.id].at_commit(last)
            if node.shard in renewed:
                reason = restarted_reason(found[node.id].reason, f"all tables of {node.shard} are copied again")
                found[node.id] = structs.replace(found[node.id], copied=0, copied_bytes=0, reason=reason)
                progress.note(News(f"standby {node.id}: {reason}"))
        else:
            found[node.id] = structs.replace(new.background[node.id], reason=new.reasons[node.id], last=last)
        sessions.leave_out(node, Absence(reason_text(found[node.id]), has_ended=True))
    return found


def drop_left_out(context: CreateContext, new: NewCopies, slot: str) -> None:
    """Drop the slots of new copies whose standbys have been left out since; the next increment restarts them."""
    sessions = context.sessions
    begun = new.positions.keys() - new.completed.keys()
    gone = [node for node in sessions.chosen if node.id in begun and node.id in sessions.absent]
    for node in gone:
        sessions.absent[node.id] = Absence(sessions.absent[node.id].reason, has_ended=True)
    drop_slots(gone, slot)


def leave_out_incomplete(context: CreateContext, new: NewCopies, cut: ArchivedCut) -> None:
    """Leave out the standbys whose new copies may lack rows that the cut has.

    Raises SchemaChangedError if fleet.toml requires one of them.
    """
    sessions = context.sessions
    for standby, tables in new.rewritten.items():
        node = context.fleet.node(standby)
        if standby in sessions.absent:
            continue
        positions = new.positions[standby], cut.record.of(node.shard).position
        if left := find_incomplete(context.store, tables, cut.segments[standby], *positions):
            _do_without(sessions, node, _changed_error(rewritten_text(left)))


def _with_lost(state: ChainState, primaries: Iterable[Node]) -> KnownTables:
    return replace(state.known, lost=frozenset(node.id for node in primaries))


def _begin_primaries(context: CreateContext, nodes: list[Node], slot: str, progress: Progress) -> NewCopies:
    if not nodes:
        return NewCopies()
    wait = context.request.wait_seconds
    with export_snapshots(context.fleet, nodes, slot, wait, progress, is_kept=True) as slots:
        return NewCopies(positions={node: exported.position for node, exported in slots.items()})


def _begin_standbys(
    context: CreateContext,
    state: ChainState,
    new: NewCopies,
    nodes: list[Node],
    spark: SparkSource,
    progress: Progress,
) -> NewCopies:
    """Add the standbys among the nodes; leave out those that fail, and start over with the others.

    If a primary's session is lost, it is renewed, up to `retries` times, as for a cut. Other errors of a shard cost
    only its own standbys. If tables have changed and fleet.toml requires the standby, the whole shard is copied, as for
    a primary.
    """
    sessions, slot, attempts = context.sessions, slot_name(state.chain), context.request.retries
    while left := [node for node in nodes if node.backup_of is not None and node.id not in sessions.absent]:
        try:
            plan = _plan_copies(sessions, state, {node.shard for node in left})
            if changed := [node for node in left if node.shard in plan.changed]:
                for node in changed:
                    if sessions.may_leave_out(node):
                        _do_without(sessions, node, _changed_error(f"columns of tables of {node.shard} have changed"))
                    else:
                        state = replace(state, known=replace(state.known, lost=state.known.lost | {node.shard}))
                continue
            new = _copy_standbys(context, new, left, plan, slot, spark, progress)
            return replace(new, copied_shards=state.known.lost)
        except Exception as error:
            drop_slots(left, slot)
            if leave_out_silent(sessions):
                continue
            failed = _affected(error, left)
            if isinstance(error, ChangedError):
                error = _changed_error(str(error))
            if not isinstance(error, SnapshotError):
                raise
            if attempts and isinstance(error, NodeUnreachableError) and error.details.get("node") in sessions.primaries:
                attempts = renew_lost(context, error, attempts, progress)
                continue
            for node in failed:
                _do_without(sessions, node, error)
    return new


def _affected(error: Exception, nodes: Sequence[Node]) -> Sequence[Node]:
    """Return which of the standbys can't be copied because of the error: all of them if it does not say."""
    if isinstance(error, ChangedError):
        return [node for node in nodes if node.shard in error.moved] or nodes
    if not isinstance(error, SnapshotError):
        return nodes
    transactions = cast("list[dict[str, object]]", error.details.get("transactions", []))
    named = {error.details.get("node"), *(transaction.get("node") for transaction in transactions)}
    of_shards = [node for node in nodes if node.shard in named]
    return [node for node in nodes if node.id in named] or of_shards or nodes


def _changed_error(problem: str) -> SchemaChangedError:
    return SchemaChangedError(problem, hint="repeat the command: it tries to copy them again")


def _do_without(sessions: Sessions, node: Node, error: SnapshotError) -> None:
    """Leave the standby out, and say that its copy has ended; raise the error if the command needs the node."""
    if not sessions.may_leave_out(node):
        raise error
    reason = without_node(error.message, node.id)
    sessions.leave_out(node, Absence(f"it could not be copied again: {reason}", has_ended=True))


class _CopyPlan(Struct, frozen=True):
    """The tables to copy from standbys, by shard, under their numbers in the chain, and the catalogs' fingerprints.

    `changed` are the shards with tables whose rows the increment converts to new definitions: they can't be copied
    under those of the last commit. `without_rows` has the numbers, by shard, of groups whose tables are gone or are
    copied by the increment. Shards that the increment copies anyway have no tables here.
    """

    tables: Mapping[str, list[Table]]
    fingerprints: Mapping[str, str]
    changed: frozenset[str]
    without_rows: Mapping[str, frozenset[int]]


def _plan_copies(sessions: Sessions, state: ChainState, shards: set[str]) -> _CopyPlan:
    seen = read_current_tables(sessions, state.selection, {})
    plan, wanted = plan_ddl(seen, state.known, {}, {}), shards - state.known.lost
    changed = frozenset(shard for shard in wanted if plan.shards[shard].successions)
    tables: dict[str, list[Table]] = {}
    for shard in wanted - changed:
        same = {group.name: group for group in plan.shards[shard].unchanged}
        named = ((table, same.get(table.group.name)) for table in seen[shard].tables)
        tables[shard] = [replace(table, group=group) for table, group in named if group is not None]
    without_rows = {shard: frozenset(plan.shards[shard].gone) for shard in tables}
    return _CopyPlan(tables, plan.fingerprints, changed, without_rows)


def _merged(one: Mapping[str, frozenset[int]], other: Mapping[str, frozenset[int]]) -> Mapping[str, frozenset[int]]:
    return {shard: one.get(shard, frozenset()) | other.get(shard, frozenset()) for shard in one.keys() | other.keys()}


def _copy_standbys(
    context: CreateContext,
    new: NewCopies,
    nodes: list[Node],
    plan: _CopyPlan,
    slot: str,
    spark: SparkSource,
    progress: Progress,
) -> NewCopies:
    """Create the slots of these standbys, and copy the tables of those that are not left to the background."""
    sessions, wait = context.sessions, context.standby_wait_seconds
    later: list[Node] = []
    sessions.incomplete.difference_update(node.id for node in nodes)
    for node in nodes:
        if _is_for_background(context, node, plan):
            later.append(node)
            sessions.incomplete.add(node.id)
    to_copy = [node for node in nodes if plan.tables.get(node.shard) and node not in later]
    entries: tuple[NamedObject, ...] = ()
    rewritten: Mapping[str, tuple[Table, ...]] = {}
    with export_snapshots(context.fleet, nodes, slot, wait, progress) as slots:
        check_exported(to_copy, slots, plan.fingerprints)
        if to_copy:
            spark.begin(context.executor_needs, progress, amount_to_copy(to_copy, plan.tables))
            destination = CopyDestination(context.operation.snapshot, context.operation.id, context.fleet.store)
            sources = [TableSource(node, slots[node.id].snapshot, plan.tables[node.shard]) for node in to_copy]
            read = copy_tables(sources, destination, sessions, spark, progress)
            entries, rewritten = tuple(read.entries), read.list_rewritten(plan.tables, sessions.fleet)
        positions = {node: exported.position for node, exported in slots.items()}
    progress.reached(CrashPoint.SNAPSHOTS_RELEASED)
    for node in later:
        progress.note(News(f"standby {node.id} is large: its tables are copied in the background of increments"))
    await_prepared(sessions, wait, progress, "the new copy", {node.shard for node in nodes})
    progress.reached(CrashPoint.PREPARED_OVER)
    copied = {
        node.id: Counter({table.group.number: 0 for table in plan.tables[node.shard]})
        for node in nodes
        if node.shard in plan.tables and node not in later
    }
    for entry in entries:
        copied[entry.node].update(entry.rows)
    return replace(
        new,
        positions={**new.positions, **positions},
        entries=entries,
        copied=copied,
        rewritten=rewritten,
        without_rows={node.shard: plan.without_rows[node.shard] for node in nodes if node.id in copied},
        background={node.id: _begun(context, node, positions[node.id], plan) for node in later},
    )


def _is_for_background(context: CreateContext, node: Node, plan: _CopyPlan) -> bool:
    """Whether the standby's tables are copied after the commit: they are large, and the increment needs no copy."""
    size = amount_to_copy([node], plan.tables).page_bytes or 0
    return size >= context.fleet.background_bytes_min and context.sessions.may_leave_out(node)


def _begun(context: CreateContext, node: Node, position: Lsn, plan: _CopyPlan) -> BackgroundCopy:
    """Return the beginning of a copy in the background, without its reason and archive."""
    nowhere = Segment(
        key="", number=0, size=0, digest="", changes=0, events=0, partials=0, truncates=0, node=node.id,
        operation=context.operation.id, after=position, through=position, open=None,
    )  # fmt: skip
    size = amount_to_copy([node], plan.tables).page_bytes or 0
    identity, tables = context.sessions.identities[node.id], plan.tables.get(node.shard, [])
    switches = context.sessions.history(node).switches
    return BackgroundCopy(context.operation.id, position, identity, "", nowhere, 0, len(tables), 0, size, switches)
