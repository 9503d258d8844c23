"""Take an increment: run all checks, then make the cut, archive the WAL up to it, and commit.

Before the commit, only the archive, the DDL, and base copies of tables that can't be converted are written. An attempt
that dies leaves archived segments behind; the next attempt continues after them. The slots are then at the end of the
archive, or before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack, suppress
from functools import partial

from msgspec import UNSET, Struct, structs
from msgspec.structs import replace

from cutline.fleet.chain_ids import naming_listed_ids
from cutline.fleet.config import Fleet, Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import without_node
from cutline.fleet.progress import News, Progress, StepTimes
from cutline.nodes.baseline import BaselineChangedError
from cutline.nodes.clocks import check_clocks
from cutline.nodes.left_out import LeftOut, read_left_out
from cutline.nodes.lock import FleetLock
from cutline.nodes.publications import PublicationChangedError
from cutline.nodes.read_only import check_terminal
from cutline.nodes.sessions import Sessions, open_sessions
from cutline.nodes.unmatched_patterns import note_unmatched
from cutline.snapshots.create.absent_copies import (
    ENDING,
    absent_copies,
    drop_retired,
    leave_out_crowded,
    leave_out_late,
    left_out_standbys,
    note_removed,
    note_retired,
    note_servers,
    renamed_of,
    repeat_without_failed,
    retired_shards,
    standby_wait_seconds,
    switches_of,
    timelines_of,
)
from cutline.snapshots.create.background_copies import carried_copies
from cutline.snapshots.create.context import ChainState, CreateContext, CreateRequest, counted_increment, undo_create
from cutline.snapshots.create.continuable import (
    Continuable,
    check_continuable,
    check_fleet_file,
    check_free_slots,
    without_publication,
)
from cutline.snapshots.create.copy_between import copy_between
from cutline.snapshots.create.counters import check_append_only, last_commit_label, states_to_compare, with_warnings
from cutline.snapshots.create.cut_attempt import CutResult, EndWrites
from cutline.snapshots.create.definition_changes import with_objects
from cutline.snapshots.create.last_cuts import naming_last_cuts
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.snapshots.create.readers import choose_readers, note_readers
from cutline.snapshots.create.remains import naming_remains
from cutline.snapshots.create.renamed import NodesRenamedError, check_chain_ids, in_chain_ids, note_renamed
from cutline.snapshots.create.renewal import (
    NewCopies,
    drop_left_out,
    find_later,
    find_lost,
    leave_out_background,
    leave_out_incomplete,
    renew_copies,
    renewal_note,
    with_completed,
)
from cutline.snapshots.create.spared_cut import drop_table_slots, take_cut_without_failed
from cutline.snapshots.create.terminal import check_final, end_writes
from cutline.snapshots.ddl.extension_tables import store_extension_rows
from cutline.snapshots.ddl.server_globals_object import store_globals
from cutline.snapshots.ddl.table_changes import DdlPlan, report_changes
from cutline.snapshots.listing.unmerged import note_unmerged
from cutline.snapshots.operations.majority import read_newest_record
from cutline.snapshots.operations.object_lists import check_commit_stored, replace_by_lists
from cutline.snapshots.operations.old_primaries import check_timelines
from cutline.snapshots.operations.open_operations import document_names, is_open
from cutline.snapshots.operations.operation import (
    Operation,
    OutcomeDetails,
    check_exclusive,
    commit_operation,
    exclusive,
    new_operation,
    record_operation,
)
from cutline.snapshots.operations.settling import note_restores, settle_operations
from cutline.snapshots.operations.slot_guard import guard_nodes, preview_guard
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    Commit,
    DefinitionChanges,
    FullSnapshot,
    Increment,
    Previous,
    with_large_object_counts,
)
from cutline.snapshots.records.end_marks import check_chain_not_ended
from cutline.snapshots.records.proven_chains import (
    check_has_rows,
    check_not_pruned,
    cut_time,
    free_turn,
    naming_contradictions,
    read_continued,
    read_continued_full,
)
from cutline.snapshots.records.store_identity import check_of_fleet, check_takes_snapshots, read_identity
from cutline.spark.amount import Amount
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import SparkSource, start_session
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import is_for_spark, read_waiting
from cutline.wal.drain.lineage import agreed_position
from cutline.wal.drain.slots import drop_slots, slot_name
from cutline.wal.segments.own_store import check_own_store


def take_increment(
    context: CreateContext,
    chain: Chain,
    continuable: Continuable,
    spark: SparkSource,
    progress: Progress,
    began: float,
) -> Increment:
    """Take the increment and commit it.

    `continuable` is the result of the checks; `began` is when the command started (time.monotonic).
    """
    progress.reached(CrashPoint.INTENT_STORED)
    sessions, store, operation, state = context.sessions, context.store, context.operation, continuable.state
    new = renew_copies(context, state, chain, continuable.to_renew, spark, progress)
    new = replace(new, lost=find_lost(store, chain, continuable.agreed))
    new = with_completed(context, chain, new, continuable.underway, progress)
    state = new.state_after(state, operation.id, sessions)
    if copied := continuable.plan.to_copy.keys() | new.slots_complete_at.keys() & new.positions.keys():
        note_readers(sorted(copied), choose_readers(sessions), sessions, progress)
    end = _ending_writes(context, chain, progress) if context.request.terminal else None
    cut = take_cut_without_failed(context, lambda: state, spark, progress, end)
    progress.step("commit")
    commit = _prepare_commit(context, chain, continuable, state, new, cut, progress, began)
    check_own_store(store, chain.full.fleet_id)
    check_commit_stored(store, commit)
    commit = counted_increment(chain, replace_by_lists(store, commit, progress), cut.archived_cut.ignored)
    check_exclusive(context.lock, store, operation)
    operation.is_idle = commit.idle.keys() | commit.absent.keys() == commit.segments.keys() and not commit.named
    commit_operation(store, operation, commit)
    progress.ending()
    progress.reached(CrashPoint.COMMITTED)
    return commit


def _ending_writes(context: CreateContext, chain: Chain, progress: Progress) -> EndWrites:
    """Return the function that ends the fleet's writes for a terminal snapshot."""
    request = context.request

    def end_all_writes(archiving: SparkSource | None) -> Mapping[str, Lsn]:
        await_prepared(context.sessions, request.wait_seconds, progress, "the end of all writes")
        if archiving is not None:
            # Start the JVM before ending writes, so that writers don't wait for it and are not stopped if it fails to
            # start.
            start_session(archiving, progress)
        return end_writes(
            context.lock, context.store, context.operation, chain.full.fleet_id, request.wait_seconds, progress
        )

    return end_all_writes


def _prepare_commit(
    context: CreateContext,
    chain: Chain,
    continuable: Continuable,
    state: ChainState,
    new: NewCopies,
    cut: CutResult,
    progress: Progress,
    began: float,
) -> Increment:
    """Return the commit of this cut, without its counts and object lists; store the objects that only it needs.

    Drops the slots of standbys that are left out. Raises the errors of the checks that end a cut.
    """
    sessions, store, operation = context.sessions, context.store, context.operation
    unknown = check_append_only(sessions, states_to_compare(cut.tables, state.known), last_commit_label(chain))
    server_globals = store_globals(store, sessions, operation, chain, progress)
    extension_rows, unread = store_extension_rows(store, sessions, operation, state.selection.rules)
    leave_out_incomplete(context, new, cut.archived_cut)
    drop_left_out(context, new, slot_name(state.chain))
    # Another create drops those on standbys that are still away (operations/slot_guard.py).
    drop_table_slots(context, [node for node in context.began_with if node.id in sessions.absent])
    later = find_later(store, new, cut.archived_cut, sessions)
    ended = {node for node, absence in sessions.absent.items() if absence.has_ended}
    copying = leave_out_background(context, new, cut.archived_cut, continuable.underway, progress)
    absent = absent_copies(chain, sessions, cut.definition_changes)
    renewed = new.of(chain, sessions, later)
    others = {*renewed, *continuable.to_renew, *ended}
    copying = carried_copies(chain, absent, sessions, cut.definition_changes, others) | copying
    note_removed(chain, absent, sessions.fleet, progress)
    retired = retired_shards(sessions.fleet, chain)
    left_out = _with_left_out_of_chain(cut.left_out + unread, chain, retired)
    left_out += left_out_standbys(chain, absent, sessions, renewed, copying)
    changes = new.with_entries(cut.definition_changes, renewed)
    if retired:
        changes = changes or DefinitionChanges()
    check_final(operation, cut.plan, cut.archived_cut, cut.ends, sessions, store, progress)
    return Increment(
        snapshot=chain.name,
        increment=operation.increment,
        operation=operation.id,
        chain=chain.full.operation,
        created_at=operation.began_at,
        seconds=round(time.monotonic() - began, 3),
        comment=context.request.comment,
        counts={},
        cut=cut.archived_cut.record,
        sequences=dict(cut.sequences),
        segments={
            node: () if node in absent else new.segments_of(node, cut.archived_cut.segments[node])
            for node in {**chain.parts, **renewed}
            if node in renewed or chain.shard_of(node) not in retired
        },
        idle={node: chain.original(last) for node, last in cut.archived_cut.idle.items() if node not in absent},
        absent=absent,
        copying=copying,
        timelines=timelines_of(chain, sessions, renewed),
        switches=switches_of(sessions, chain.last, absent),
        renamed=renamed_of(chain, sessions, renewed),
        previous=Previous(chain.last.operation, chain.last.digest),
        history=chain.next_history,
        left_out=with_warnings(left_out, chain, unknown, sessions.primaries, cut.copied_tables),
        terminal=context.request.terminal,
        definition_changes=with_objects(changes, server_globals),
        databases=dict(cut.databases),
        extension_rows=extension_rows,
        renewed=renewed,
        slots_complete_at=dict(new.slots_complete_at),
        retired=retired,
    )


def _with_left_out_of_chain(
    left_out: tuple[LeftOut, ...], chain: Chain, retired: tuple[str, ...]
) -> tuple[LeftOut, ...]:
    """Add what the chain itself does not cover: its large objects since the full snapshot, and standbys."""
    shards = [shard for shard in chain.primaries if shard not in retired]
    too_old = tuple(out for out in chain.too_old if out.node in shards)
    return with_large_object_counts(left_out, chain.stored_full, shards) + too_old


ANOTHER = "take a new restore point under a different name: snapshot create NAME --only-cut"


class IncrementPlan(Struct, frozen=True):
    """The scope of an increment: the bytes of WAL to decode on each node, and the database objects left out."""

    wal_bytes: Mapping[str, int]
    left_out: tuple[LeftOut, ...]


def create_increment(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the next increment of the snapshot and return its commit.

    If the chain knows nodes by other ids than fleet.toml has, the work is done on the fleet with the chain's ids.
    """
    began, steps, listed = time.monotonic(), StepTimes(progress), fleet
    steps.step("check the chain")
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    check_takes_snapshots(identity, store)
    full = read_continued_full(store, request.name)
    check_of_fleet(Chain(full), identity)
    check_has_rows(Chain(full), ANOTHER)
    with naming_contradictions(store, request.name):
        fleet = in_chain_ids(store, fleet, full, request.replaced)
        check_not_pruned(store, request.name)
        while True:
            try:
                with naming_listed_ids(fleet):
                    create = partial(
                        _create_increment, fleet, listed, full, _with_chain_ids(request, fleet), spark, steps, began
                    )
                    commit = repeat_without_failed(fleet, steps, create)
                    if commit.copying and request.copies_between and not commit.terminal:
                        copy_between(fleet, listed, commit, request, spark, steps)
                    return commit
            except NodesRenamedError as renamed:
                fleet = renamed.fleet


def _with_chain_ids(request: CreateRequest, fleet: Fleet) -> CreateRequest:
    ids = {node.listed_id: node.id for node in fleet.nodes}
    return replace(request, replaced=tuple(ids.get(shard, shard) for shard in request.replaced))


def _create_increment(
    fleet: Fleet,
    listed: Fleet,
    full: FullSnapshot,
    request: CreateRequest,
    spark: SparkSource,
    progress: StepTimes,
    began: float,
    begins: Callable[[], None],
) -> Increment:
    """Take the next increment. `fleet` has the chain's ids as far as they are known, and `listed` those of the file.

    Raises NodesRenamedError if the servers show that they are others.
    """
    store, chain = fleet.store.open(), Chain(full)
    nodes = _find_nodes(store, fleet, full)
    with ExitStack() as stack:
        with naming_last_cuts(store, lambda: read_continued(store, request.name, full)):
            sessions = stack.enter_context(
                open_sessions(
                    fleet,
                    nodes,
                    spares_standbys=True,
                    known=lambda: read_continued(store, request.name, full).system_identifiers,
                )
            )
        leave_out_late(sessions, progress, standby_wait_seconds(fleet, request.wait_seconds))
        lock = stack.enter_context(exclusive(sessions, store, "create", request.name))
        stack.enter_context(naming_remains(sessions, chain))
        progress.reached(CrashPoint.LOCKED)
        # While the lock is held, no other command starts a create, so one listing serves all checks.
        operations = document_names(store)
        note_restores(store, settle_operations(store, sessions.fleet, progress, operations), sessions, progress)
        progress.reached(CrashPoint.SETTLED)
        # Read the increments under the lock, which keeps other commands from adding or removing any.
        chain = read_continued(store, request.name, full)
        continuable = _check_chain(sessions, fleet, listed, chain, request, operations, progress)
        _begin_jobs(continuable, sessions, chain, request, spark, progress)
        begins()
        commit = _commit_renewing(request, lock, chain, continuable, spark, progress, began)
        if commit.retired:
            drop_retired(sessions, chain.followed_by(commit), progress)
            note_retired(fleet, chain, commit.retired, progress)
    progress.reached(CrashPoint.RELEASED)
    return commit


def _check_chain(
    sessions: Sessions,
    fleet: Fleet,
    listed: Fleet,
    chain: Chain,
    request: CreateRequest,
    operations: Mapping[str, Set[str]],
    progress: StepTimes,
) -> Continuable:
    """Run the checks of an increment of `chain` under the lock, and return what continues.

    `operations` are the names of all documents. Leaves out standbys with too few connections, drops the slots of chains
    and shards that have ended, and raises the errors of the checks.
    """
    store = fleet.store.open()
    check_chain_ids(sessions, fleet, listed, chain, request.replaced)
    check_fleet_file(fleet, chain)
    note_renamed(fleet, chain, progress)
    check_clocks(sessions.clocks, progress, cut_time(chain.last))
    guarded = guard_nodes(store, sessions, progress, operations, chain.full.chain)
    leave_out_crowded(sessions)
    progress.reached(CrashPoint.SLOTS_DROPPED)
    check_chain_not_ended(store, chain)
    continuable = check_continuable(store, sessions, chain, operations, request.replaced, dropped=guarded.dropped)
    check_free_slots(sessions, continuable)
    _note_found(continuable, sessions, chain, progress)
    note_unmerged(store, chain, fleet, progress)
    drop_retired(sessions, chain, progress)
    check_terminal(sessions, chain.full.fleet_id, progress, terminal=request.terminal)
    progress.reached(CrashPoint.CHECKED)
    return continuable


def _note_found(continuable: Continuable, sessions: Sessions, chain: Chain, progress: Progress) -> None:
    """Note what the checks found that doesn't keep the chain from being continued."""
    if continuable.lack:
        progress.note(continuable.lack)
    note_unmatched(sessions, continuable.state.selection.rules, progress, known=chain.full.rules)
    note_servers(sessions, progress, chain.absent, chain.baseline)


def _begin_jobs(
    continuable: Continuable,
    sessions: Sessions,
    chain: Chain,
    request: CreateRequest,
    spark: SparkSource,
    progress: Progress,
) -> None:
    """Begin to start Spark if the increment needs jobs."""
    amount = _amount_of_jobs(continuable.plan, slot_name(chain.full.operation), sessions)
    if amount is None:
        return
    # In the roles that the servers have now, and without the standbys that are left out.
    needs = ExecutorNeeds(sessions.fleet.store, sessions.nodes, writes=True, wait_seconds=request.wait_seconds)
    spark.begin(needs, progress, amount)
    progress.reached(CrashPoint.SPARK_BEGUN)


def _commit_renewing(
    request: CreateRequest,
    lock: FleetLock,
    chain: Chain,
    continuable: Continuable,
    spark: SparkSource,
    progress: StepTimes,
    began: float,
) -> Increment:
    """Take the increment and return its commit.

    If it fails because a node's copy can't be continued, take it again in a new operation that copies the node again.
    """
    sessions = lock.sessions
    store = sessions.fleet.store.open()
    while True:
        operation = _new_operation(store, sessions, chain, request, continuable, progress)
        context = CreateContext(request, store, operation, lock, sessions.nodes)
        try:
            return _run_operation(context, chain, continuable, spark, progress, began)
        except (*ENDING, PublicationChangedError) as error:
            # Only reading a node's WAL showed that its copy can't be continued, or a publication was altered meanwhile.
            node = _find_ended(sessions, continuable, error)
            if node is None or request.terminal or is_open(store, operation.id):
                raise
            ended = {node: without_node(error.message, node)}
            if isinstance(error, PublicationChangedError):
                ended = without_publication(sessions, error)
            position = agreed_position(error)
            agreed = {} if position is None else {node: position}
            sessions.incomplete.difference_update(ended)
            continuable = replace(
                continuable,
                to_renew={**ended, **continuable.to_renew},
                agreed={**continuable.agreed, **agreed},
                underway={other: copy for other, copy in continuable.underway.items() if other not in ended},
            )


def _find_nodes(store: ObjectStore, fleet: Fleet, full: FullSnapshot) -> tuple[Node, ...]:
    """Return the nodes that the next increment may use; raise the errors of check_fleet_file.

    The increments are read only if fleet.toml lacks shards of the full snapshot: they may have been retired since.
    """
    try:
        return check_fleet_file(fleet, Chain(full))
    except BaselineChangedError:
        return check_fleet_file(fleet, read_continued(store, full.snapshot, full))


def _new_operation(
    store: ObjectStore,
    sessions: Sessions,
    chain: Chain,
    request: CreateRequest,
    continuable: Continuable,
    progress: StepTimes,
) -> Operation:
    number = chain.last.increment + 1
    # An operation has the ids of the file: any command settles it.
    ids = {node.id: node.listed_id for node in continuable.nodes}
    intent = new_operation("create", request.name, number, tuple(ids.values()))
    intent = structs.replace(
        intent,
        turn=free_turn(store, request.name, number),
        terminal=request.terminal or UNSET,
        fleet_id=chain.full.fleet_id,
        renews={
            ids[node]: sessions.identities[node].place for node in continuable.to_renew if node in sessions.identities
        }
        or UNSET,
    )
    return Operation(intent, details=OutcomeDetails(times=progress))


def _run_operation(
    context: CreateContext,
    chain: Chain,
    continuable: Continuable,
    spark: SparkSource,
    progress: StepTimes,
    began: float,
) -> Increment:
    operation = context.operation
    with record_operation(context.store, operation, lambda: _undo(context, continuable, progress), progress):
        commit = take_increment(context, chain, continuable, spark, progress, began)
    progress.reached(CrashPoint.OUTCOME_STORED)
    return commit


def _find_ended(sessions: Sessions, continuable: Continuable, error: SnapshotError) -> str | None:
    """Return the node whose copy can't be continued according to the error, unless it had restarted."""
    named = error.details.get("node")
    return next((node.id for node in sessions.nodes if node.id == named and node.id not in continuable.to_renew), None)


def _undo(context: CreateContext, continuable: Continuable, progress: Progress) -> bool:
    """Remove the traces of a failed increment, the slots of new copies included; return False if anything remains.

    If the lock was lost, another increment may have created these slots in the meantime, so they are left to the
    command that settles this operation.
    """
    operation = context.operation
    nodes, left = [node for node in context.began_with if node.id in continuable.to_renew], True
    with suppress(SnapshotError):
        if nodes:
            check_exclusive(context.lock, context.store, operation)
        left = bool(drop_slots(nodes, slot_name(continuable.state.chain)))
    return undo_create(context, operation.table_slots, progress) and not left


def _amount_of_jobs(plan: DdlPlan, slot: str, sessions: Sessions) -> Amount | None:
    """Return the amount of work of jobs without copies of tables, which add theirs later; None if there are no jobs."""
    if is_for_spark(read_waiting(sessions, slot)):
        return Amount()
    return Amount(0) if plan.unpublished or plan.to_copy else None


def preview_increment(fleet: Fleet, request: CreateRequest, progress: Progress) -> IncrementPlan:
    """Run every check for an increment and return its scope without changing anything."""
    progress.step("check the chain")
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    check_takes_snapshots(identity, store)
    chain, listed = read_continued(store, request.name), fleet
    check_of_fleet(chain, identity)
    check_has_rows(chain, ANOTHER)
    with naming_contradictions(store, request.name):
        fleet = in_chain_ids(store, fleet, chain.full, request.replaced)
        while True:
            try:
                with naming_listed_ids(fleet):
                    return _preview_increment(store, fleet, listed, chain, _with_chain_ids(request, fleet), progress)
            except NodesRenamedError as renamed:
                fleet = renamed.fleet


def _preview_increment(
    store: ObjectStore, fleet: Fleet, listed: Fleet, chain: Chain, request: CreateRequest, progress: Progress
) -> IncrementPlan:
    nodes = check_fleet_file(fleet, chain)
    with ExitStack() as stack:
        with naming_last_cuts(store, lambda: chain):
            sessions = stack.enter_context(
                open_sessions(fleet, nodes, spares_standbys=True, known=lambda: chain.system_identifiers)
            )
        check_chain_ids(sessions, fleet, listed, chain, request.replaced)
        note_renamed(fleet, chain, progress)
        leave_out_late(sessions, progress, standby_wait_seconds(fleet, request.wait_seconds))
        check_clocks(sessions.clocks, progress, cut_time(chain.last))
        leave_out_crowded(sessions)
        check_chain_not_ended(store, chain)
        check_timelines(sessions, read_newest_record(store))
        preview_guard(store, sessions, chain.full.chain, progress)
        with naming_remains(sessions, chain):
            continuable = check_continuable(store, sessions, chain, replaced=request.replaced)
            check_free_slots(sessions, continuable)
        _note_found(continuable, sessions, chain, progress)
        plan, rules = continuable.plan, continuable.state.selection.rules
        report_changes(plan, progress)
        renewed = {node: reason for node, reason in continuable.to_renew.items() if node not in sessions.absent}
        complete = {node for node, copy in continuable.underway.items() if copy.is_complete}
        for node_id, copy in continuable.underway.items():
            progress.note(News(f"standby {node_id} is being copied: {copy.text}"))
        for node in sessions.nodes:
            if node.id in renewed:
                progress.note(renewal_note(node, "will be copied", renewed[node.id], chain))
        for shard in retired_shards(fleet, chain):
            progress.note(News(f"shard {shard} is retired in fleet.toml: the chain will continue without it"))
        check_terminal(sessions, chain.full.fleet_id, progress, terminal=request.terminal)
        waiting = read_waiting(sessions, slot_name(chain.full.operation))
        groups = {shard: shard_plan.groups for shard, shard_plan in plan.shards.items()}
        left_out = read_left_out(sessions.primaries, rules, groups)
        left_out = _with_left_out_of_chain(left_out, chain, retired_shards(fleet, chain))
        left_out += left_out_standbys(
            chain, absent_copies(chain, sessions, None), sessions, {*renewed, *complete}, continuable.underway
        )
        return IncrementPlan(waiting, with_warnings(left_out, chain, continuable.unknown, sessions.primaries))
