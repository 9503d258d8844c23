"""Take a full snapshot: run all checks, then create slots, copy the tables, make the first cut, and commit.

This order ensures that no change is lost. A slot keeps every change from its position on, and the base copy contains
the rows as of that position. The cut archives the changes since then, and handles tables that DDL changed in the
meantime. The snapshot does not exist until its commit is stored. After an error the slots are dropped.

Spark is imported only after the checks have passed, so that a refusal is immediate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import cast

from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet, GroupRules, Node, read_limit
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.fleet.progress import News, Progress, StepTimes
from cutline.nodes.clocks import check_clocks
from cutline.nodes.collation_versions import note_collation_versions
from cutline.nodes.connections import CopyError
from cutline.nodes.free_connections import task_sessions
from cutline.nodes.groups import Group, Table, list_names
from cutline.nodes.large_objects import (
    check_readable,
    count_large_objects,
    measure_large_objects,
    note_ownerless,
)
from cutline.nodes.left_out import LeftOut, mark_large_objects, read_left_out, standby_copies
from cutline.nodes.preconditions import find_fillings, find_node_problems
from cutline.nodes.privileges import find_table_problems
from cutline.nodes.problems import refuse_unfit
from cutline.nodes.programs import check_programs
from cutline.nodes.read_only import check_terminal
from cutline.nodes.sessions import Sessions, in_parallel, open_sessions
from cutline.nodes.table_state import SNAPSHOT_BEGAN, TableState
from cutline.nodes.unmatched_patterns import note_unmatched
from cutline.nodes.watch import Watch, WatchOfSome
from cutline.snapshots.base_copy.copy_ranges import CopyDestination
from cutline.snapshots.base_copy.copy_slots import (
    check_exported,
    drop_copy_slots,
    find_prepared,
    insert_position,
)
from cutline.snapshots.base_copy.copy_tables import CopiedTables, TableSource, amount_to_copy, copy_tables
from cutline.snapshots.create.absent_copies import (
    leave_out_crowded,
    leave_out_failed,
    leave_out_late,
    leave_out_unfit,
    never_copied,
    note_servers,
    repeat_without_failed,
    standby_wait_seconds,
    switches_of,
)
from cutline.snapshots.create.context import (
    ChainState,
    CreateContext,
    CreateRequest,
    begin_full,
    counted_full,
    undo_create,
)
from cutline.snapshots.create.counters import check_append_only, states_to_compare
from cutline.snapshots.create.cut_attempt import CutResult
from cutline.snapshots.create.make_cut import LastCut
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.snapshots.create.readers import choose_readers, export_readers_last, note_readers
from cutline.snapshots.create.resumed_full import find_resumable, preview_resumable
from cutline.snapshots.create.spared_cut import drop_table_slots, take_cut_without_failed
from cutline.snapshots.create.terminal import check_final, end_writes
from cutline.snapshots.ddl.attempts import ChangedError, invalidate_if, may_be_ddl, retry_until_unchanged
from cutline.snapshots.ddl.dump import store_ddl
from cutline.snapshots.ddl.extension_tables import store_extension_rows
from cutline.snapshots.ddl.server_globals_object import store_globals
from cutline.snapshots.ddl.table_changes import (
    KnownTables,
    NodeTables,
    TableSelection,
    find_change,
    publish_new_tables,
    read_current_tables,
    read_fleet_tables,
)
from cutline.snapshots.operations.majority import read_newest_record, read_recorded_servers
from cutline.snapshots.operations.object_lists import check_commit_stored, replace_by_lists
from cutline.snapshots.operations.old_primaries import check_timelines
from cutline.snapshots.operations.operation import (
    check_exclusive,
    commit_operation,
    record_operation,
)
from cutline.snapshots.operations.slot_guard import how_to_free_slots, preview_guard
from cutline.snapshots.records.commit import (
    BASE,
    Commit,
    FullSnapshot,
    NamedObject,
    SharedBase,
    StoredObject,
    split_entries,
    with_large_object_counts,
)
from cutline.snapshots.records.documents import ddl_prefix
from cutline.snapshots.records.proven_chains import (
    check_name,
    commit_missing_error,
    free_turn,
    increment_numbers,
)
from cutline.snapshots.records.store_identity import check_takes_snapshots, read_identity
from cutline.snapshots.records.tombstones import ANOTHER_NAME, check_not_deleted
from cutline.snapshots.records.unfinished_records import (
    UnfinishedBase,
    UnfinishedCopy,
    forget_copied,
    forget_unfinished_base,
    is_unfinished_base,
    store_unfinished_base,
)
from cutline.spark.amount import Amount
from cutline.spark.spark_jobs import (
    LANE_BYTES,
    Dealing,
    JobWatch,
    NodeShares,
    SparkSource,
    raise_first,
    run_tasks,
    share_rate,
    shared_problem,
)
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError, UsageError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import ExportedSlot, copy_slot_name, drop_slots, slot_name
from cutline.wal.segments.archive import archive_prefix, segment_key
from cutline.wal.segments.own_store import check_own_store

# Contents of large objects are compressed in their pages, and holes have no pages.
BYTES_PER_LARGE_OBJECT_BYTE = 4


class FullPlan(Struct, frozen=True):
    """The scope of a full snapshot: the nodes, every shard's tables, and the database objects left out.

    `readers` are the standbys on which the tables of primaries are read, by primary. `large_object_bytes` is the size
    of the pages with the large objects to copy.
    """

    nodes: tuple[Node, ...]
    node_tables: Mapping[str, NodeTables]
    selection: TableSelection
    left_out: tuple[LeftOut, ...]
    readers: Mapping[str, Node] = field(default_factory=dict)
    large_object_bytes: int = 0

    @property
    def sources(self) -> tuple[Node, ...]:
        """The nodes on which tables are read."""
        return tuple(node for node in self.nodes if node.id not in self.readers)

    @property
    def tables(self) -> dict[str, tuple[Table, ...]]:
        """Every shard's tables."""
        return {shard: tables.tables for shard, tables in self.node_tables.items()}

    @property
    def states(self) -> dict[str, Mapping[str, TableState]]:
        """The states of every shard's tables, by name."""
        return {shard: tables.states for shard, tables in self.node_tables.items()}

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every shard's catalogs."""
        return {shard: tables.fingerprint for shard, tables in self.node_tables.items()}


def choose_nodes(fleet: Fleet, *, only_primary: bool) -> tuple[Node, ...]:
    """Return the nodes that a snapshot copies."""
    return fleet.primaries if only_primary else fleet.nodes


def plan_full(
    fleet: Fleet, request: CreateRequest, sessions: Sessions, store: ObjectStore, progress: Progress
) -> FullPlan:
    """Run every check for a full snapshot; raise the error of the first check that fails.

    Standbys whose settings don't fit are left out, which is noted, unless fleet.toml requires them.
    """
    check_name(request.name)
    identity = read_identity(store, fleet)
    check_takes_snapshots(identity, store)
    check_not_deleted(store, request.name, ANOTHER_NAME)
    free_turn(store, request.name, 0)
    if increment_numbers(store, request.name):
        raise commit_missing_error(request.name, 0)
    selection = TableSelection(identity.fleet_id, narrow_rules(fleet.groups, request))
    problems = find_node_problems(sessions, partial(how_to_free_slots, store))
    refuse_unfit(
        leave_out_unfit(sessions, problems, progress)
        + find_fillings(sessions)
        + find_table_problems(sessions, selection.rules, identity.fleet_id)
    )
    check_programs(sessions)
    node_tables = read_fleet_tables(sessions, selection)
    groups = {node: [table.group for table in listed.tables] for node, listed in node_tables.items()}
    if selection.rules.include != GroupRules().include and not any(groups.values()):
        raise UsageError(
            f"no table matches {', '.join(selection.rules.include)}, so the snapshot would be empty",
            hint="correct --group, or groups.include in fleet.toml: a pattern is schema.table, and may contain * and ?",
        )
    left_out, large_object_bytes = read_left_out(sessions.primaries, selection.rules, groups), 0
    if request.large_objects:
        check_readable(sessions)
        note_ownerless(sessions, progress)
        counts = sessions.ask_primaries(count_large_objects)
        left_out = mark_large_objects(left_out, {node: (count, "this") for node, count in counts.items() if count})
        large_object_bytes = sum(sessions.ask_primaries(measure_large_objects).values())
    left_out += standby_copies(sessions.too_old, sessions.identities) + never_copied(sessions)
    readers = choose_readers(sessions)
    return FullPlan(sessions.nodes, node_tables, selection, left_out, readers, large_object_bytes)


def narrow_rules(rules: GroupRules, request: CreateRequest) -> GroupRules:
    """Return the rules in fleet.toml, narrowed by --group and --exclude-group."""
    return structs.replace(rules, include=request.include or rules.include, exclude=(*rules.exclude, *request.exclude))


def _note_unmatched(sessions: Sessions, rules: GroupRules, request: CreateRequest, progress: Progress) -> None:
    options = {"include": ("--group", request.include), "exclude": ("--exclude-group", request.exclude)}
    note_unmatched(sessions, rules, progress, options=options)


def preview_full(fleet: Fleet, request: CreateRequest, progress: Progress) -> FullPlan:
    """Run every check for a full snapshot and return its scope without changing anything."""
    progress.step("check nodes")
    store = fleet.store.open()
    nodes = choose_nodes(fleet, only_primary=request.only_primary)
    with open_sessions(fleet, nodes, spares_standbys=True, known=lambda: read_recorded_servers(store)) as sessions:
        leave_out_late(sessions, progress, standby_wait_seconds(fleet, request.wait_seconds))
        leave_out_crowded(sessions)
        note_servers(sessions, progress)
        check_clocks(sessions.clocks, progress)
        plan = plan_full(fleet, request, sessions, store, progress)
        note_collation_versions(sessions, progress)
        _note_unmatched(sessions, plan.selection.rules, request, progress)
        check_timelines(sessions, read_newest_record(store))
        preview_guard(store, sessions, None, progress)
        check_terminal(sessions, plan.selection.fleet_id, progress, terminal=request.terminal)
        preview_resumable(store, sessions, request, plan.selection, progress)
        # A snapshot that is resumed leaves out standbys.
        left_out = tuple(dict.fromkeys((*plan.left_out, *never_copied(sessions))))
        plan = replace(plan, nodes=sessions.nodes, left_out=left_out, readers=choose_readers(sessions))
        note_readers(plan.node_tables, plan.readers, sessions, progress)
        return plan


class BaseCopy(Struct, frozen=True):
    """A finished base copy: its tables, the positions of the slots by node, and the entries for the stored objects.

    Groups, `states` (by name) and `fingerprints` are those of the tables when they were copied, by shard; `node_tables`
    are the primaries' tables as last read. `highest` is the highest group number that was used. `slots_complete_at` has
    the positions of the primaries when all slots had been created. `readers` are the standbys on which the tables of
    primaries were read, by primary. `rewritten` are the tables that must be copied again, as in CopiedTables. So must
    those whose groups have the numbers in `without_rows`, by shard: `entries` don't have their rows. `unread` are the
    oids of those that `groups` no longer have, by shard.
    """

    groups: Mapping[str, tuple[Group, ...]]
    states: Mapping[str, Mapping[str, TableState]]
    fingerprints: Mapping[str, str]
    highest: int
    node_tables: Mapping[str, NodeTables]
    positions: Mapping[str, Lsn]
    slots_complete_at: Mapping[str, Lsn]
    readers: Mapping[str, str]
    entries: tuple[NamedObject, ...]
    rewritten: Mapping[str, set[int]]
    without_rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unread: Mapping[str, frozenset[int]] = field(default_factory=dict)


def take_full(
    context: CreateContext, plan: FullPlan, spark: SparkSource, progress: Progress, began: float
) -> FullSnapshot:
    """Take the snapshot and commit it; `began` is when the command started (time.monotonic)."""
    progress.reached(CrashPoint.INTENT_STORED)
    sessions, store, operation = context.sessions, context.store, context.operation
    sessions.read_histories()
    slot = slot_name(operation.id)
    base = resumed_base(context.copied, plan) if context.copied else copy_base(context, plan, spark, progress)
    wait = context.request.wait_seconds
    await_prepared(sessions, wait, progress)
    progress.reached(CrashPoint.PREPARED_OVER)

    def end_all_writes(_: SparkSource | None) -> Mapping[str, Lsn]:
        return end_writes(context.lock, store, operation, plan.selection.fleet_id, wait, progress)

    def present_base() -> BaseCopy:
        nonlocal base
        base = without_unarchived(without_absent(base, sessions, progress), context)
        return base

    cut = take_cut_without_failed(
        context,
        lambda: _initial_state(present_base(), plan.selection, operation.id),
        spark,
        progress,
        end_all_writes if context.request.terminal else None,
        lambda: base.rewritten,
    )
    progress.step("commit")
    # Otherwise their servers would keep WAL until the next increment copies them.
    absent = [node for node in context.began_with if node.id in sessions.absent]
    drop_slots(absent, slot)
    drop_table_slots(context, absent)
    unknown = check_append_only(sessions, states_to_compare(cut.tables, _known_tables(base)), SNAPSHOT_BEGAN)
    seconds = time.monotonic() - began
    ran_seconds = None
    if operation.resumption:
        ran_seconds = round(context.ran_seconds + seconds, 3)
        seconds = max(ran_seconds, (utc_now() - datetime.fromisoformat(operation.began_at)).total_seconds())
    commit = _build_commit(context, plan.selection, base, cut, seconds, progress)
    commit = structs.replace(commit, ran_seconds=ran_seconds)
    commit = structs.replace(
        commit, left_out=(*with_large_object_counts(commit.left_out, commit, commit.parts), *unknown)
    )
    check_final(operation, cut.plan, cut.archived_cut, cut.ends, sessions, store, progress)
    check_own_store(store, plan.selection.fleet_id)
    check_commit_stored(store, commit)
    commit = counted_full(replace_by_lists(store, commit, progress), cut.archived_cut.ignored)
    check_exclusive(context.lock, store, operation)
    commit = cast("FullSnapshot", commit_operation(store, operation, commit))
    progress.ending()
    progress.reached(CrashPoint.COMMITTED)
    return commit


def copy_base(context: CreateContext, plan: FullPlan, spark: SparkSource, progress: Progress) -> BaseCopy:
    """Create the slots and copy all tables.

    DDL committed while the slots are being created invalidates the attempt before anything is copied. DDL that makes
    the copy fail, such as DROP TABLE, also invalidates the attempt. If a standby fails before anything is copied, it is
    left out, and the slots are created again; if it fails later, `_copy` goes on without it. No other error gives up
    what tasks have copied.
    """
    sessions, slot = context.sessions, slot_name(context.operation.id)
    number = 0

    def attempt() -> BaseCopy:
        nonlocal number
        number += 1
        if number > 1:
            drop_copy_slots(sessions.nodes, slot, progress)
        seen = dict(read_current_tables(sessions, plan.selection, plan.node_tables))
        publish_new_tables(sessions, seen, plan.selection, context.request.wait_seconds, progress)
        # Standbys may have been left out since.
        now = replace(plan, nodes=sessions.nodes, readers=choose_readers(sessions), node_tables=seen)
        try:
            with (
                invalidate_if(lambda: find_change(sessions, now.node_tables, now.selection)),
                export_readers_last(context, now.nodes, now.readers, slot, progress) as slots,
            ):
                slots_complete_at = sessions.ask_primaries(insert_position)
                check_exported(now.nodes, slots, now.fingerprints)
                unfinished = _unfinished_base(context, now, slots, slots_complete_at, number)
                copied, readers = _copy(context, now, slots, unfinished, spark, progress)
        except ChangedError:
            give_up()
            raise
        progress.reached(CrashPoint.SNAPSHOTS_RELEASED)
        groups = _groups_of(now)
        return BaseCopy(
            groups=groups,
            states=now.states,
            fingerprints=now.fingerprints,
            highest=_highest(groups),
            node_tables=now.node_tables,
            positions={node: slots[node].position for node in slots if node not in sessions.absent},
            slots_complete_at=slots_complete_at,
            readers={primary: node.id for primary, node in readers.items()},
            entries=tuple(copied.entries),
            rewritten=copied.rewritten,
        )

    def give_up() -> None:
        """Make sure that nothing of the attempt is resumed: the next one drops its slots."""
        context.operation.is_resumable = False
        forget_unfinished_base(context.store, context.operation.id, number)

    while True:
        try:
            return retry_until_unchanged(attempt, context.request.retries, context.request.ddl_seconds, progress)
        except Exception as error:
            # What tasks have copied is worth more: a repetition resumes it.
            if _has_copied(context) or not leave_out_failed(sessions, error, progress):
                raise
            give_up()


def _has_copied(context: CreateContext) -> bool:
    """Whether a repetition of the command would resume the base copy because a task has copied something."""
    operation = context.operation
    if not operation.is_resumable:
        return False
    try:
        return is_unfinished_base(context.store.list_children(f"operations/{operation.id}"))
    except SnapshotError:
        return True


def without_absent(base: BaseCopy, sessions: Sessions, progress: Progress) -> BaseCopy:
    """Return the base copy without the standbys that have been left out since.

    The rows of primaries' tables that were read on one of them are no longer part of it: the cut copies these tables,
    on all nodes of their shards.
    """
    if not any(node in sessions.absent for node in base.positions):
        return base
    lost = {primary for primary, reader in base.readers.items() if reader in sessions.absent}
    if lost:
        names = list_some(sorted(lost), NODES_NAMED_MAX)
        progress.note(News(f"the tables of {names} are copied again: they were read on a standby that is left out"))

    def stays(entry: NamedObject) -> bool:
        is_lost = entry.kind == BASE and sessions.fleet.node(entry.node).shard in lost
        return entry.node not in sessions.absent and not is_lost

    return replace(
        base,
        positions={node: position for node, position in base.positions.items() if node not in sessions.absent},
        readers={primary: reader for primary, reader in base.readers.items() if primary not in lost},
        entries=tuple(filter(stays, base.entries)),
        rewritten={shard: oids for shard, oids in base.rewritten.items() if shard not in lost},
        without_rows={
            **base.without_rows,
            **{shard: frozenset(group.number for group in base.groups[shard]) for shard in lost},
        },
    )


def without_unarchived(base: BaseCopy, context: CreateContext) -> BaseCopy:
    """Return the base copy without the groups that have no rows in it, as far as no archived WAL has changes of them.

    A cut that failed, or that was interrupted, may have archived changes of the others. The commit lists its segments,
    so it must define these groups, too: they end in it.
    """

    def is_archived(shard: str) -> bool:
        nodes = (node for node in context.sessions.nodes if node.shard == shard)
        prefixes = (archive_prefix(context.operation.snapshot, node.id, context.operation.id) for node in nodes)
        return any(context.store.exists(segment_key(prefix, 1)) for prefix in prefixes)

    unarchived = {shard: numbers for shard, numbers in base.without_rows.items() if not is_archived(shard)}
    if not unarchived:
        return base
    groups = {
        shard: tuple(group for group in groups if group.number not in unarchived.get(shard, ()))
        for shard, groups in base.groups.items()
    }
    return replace(
        base,
        groups=groups,
        states={
            shard: {name: states[name] for name in list_names(groups[shard])} for shard, states in base.states.items()
        },
        without_rows={shard: numbers for shard, numbers in base.without_rows.items() if shard not in unarchived},
        unread={
            **base.unread,
            **{
                shard: base.unread.get(shard, frozenset())
                | {
                    base.states[shard][name].oid
                    for name in set(base.states[shard]).difference(list_names(groups[shard]))
                }
                for shard in unarchived
            },
        },
    )


def resumed_base(copied: UnfinishedCopy, plan: FullPlan) -> BaseCopy:
    """Return the tables that an interrupted snapshot has copied; `plan` has those of today."""
    base = copied.base
    complete = {shard: {group.number for group in groups} for shard, groups in copied.groups.items()}
    return BaseCopy(
        groups=base.groups,
        states={shard: {state.table: state for state in states} for shard, states in base.tables.items()},
        fingerprints=base.fingerprints,
        highest=_highest(base.groups),
        node_tables=plan.node_tables,
        positions=base.positions,
        slots_complete_at=base.slots_complete_at,
        readers=base.readers,
        entries=copied.entries,
        rewritten=copied.rewritten,
        without_rows={
            shard: frozenset(group.number for group in groups) - complete[shard]
            for shard, groups in base.groups.items()
            if len(groups) > len(complete[shard])
        },
    )


def _groups_of(plan: FullPlan) -> dict[str, tuple[Group, ...]]:
    return {node: tuple(table.group for table in tables) for node, tables in plan.tables.items()}


def _highest(groups: Mapping[str, tuple[Group, ...]]) -> int:
    return max((group.number for listed in groups.values() for group in listed), default=0)


def _unfinished_base(
    context: CreateContext,
    plan: FullPlan,
    slots: Mapping[str, ExportedSlot],
    slots_complete_at: Mapping[str, Lsn],
    attempt: int,
) -> UnfinishedBase | None:
    """Return what a repetition needs to resume the base copy, still without the DDL; None if it begins again."""
    size = amount_to_copy(plan.sources, plan.tables).page_bytes or 0
    request = context.request
    if size < context.fleet.resume_bytes_min or request.large_objects or request.terminal:
        return None
    return UnfinishedBase(
        operation=context.operation.id,
        attempt=attempt,
        fleet_id=plan.selection.fleet_id,
        global_id=context.fleet.global_id,
        baseline=tuple(context.sessions.identities.values()),
        positions={node: slot.position for node, slot in slots.items()},
        slots_complete_at=dict(slots_complete_at),
        readers={primary: node.id for primary, node in plan.readers.items()},
        is_only_primary=request.only_primary,
        rules=plan.selection.rules,
        groups=_groups_of(plan),
        tables={shard: tuple(states.values()) for shard, states in plan.states.items()},
        fingerprints=plan.fingerprints,
        objects=(),
    )


class _DumpWatch(Struct, frozen=True):
    """Ends the jobs that copy if a node stops responding, or as soon as the `dump` of the DDL has failed.

    A copy may take hours, and would be of no use.
    """

    watch: Watch | WatchOfSome
    dump: Future[list[StoredObject]]

    @contextmanager
    def on_silence(self, act: Callable[[], object]) -> Iterator[None]:
        """Call `act` if a node falls silent or the dump fails while the block runs; raise what a failed dump raised."""

        def end(dump: Future[list[StoredObject]]) -> None:
            if dump.exception() is not None:
                # The job may have ended.
                with suppress(Exception):
                    act()

        self.raise_failure()
        with self.watch.on_silence(act):
            self.dump.add_done_callback(end)
            yield

    def raise_failure(self) -> None:
        """Raise the error of the dump if it has failed."""
        if self.dump.done():
            self.dump.result()


def _copy(
    context: CreateContext,
    plan: FullPlan,
    slots: Mapping[str, ExportedSlot],
    unfinished: UnfinishedBase | None,
    spark: SparkSource,
    progress: Progress,
) -> tuple[CopiedTables, Mapping[str, Node]]:
    """Copy all rows in a Spark job, and dump the DDL of every shard at the same time.

    Once the DDL is dumped, the plan `unfinished`, if any, is stored, with which the copy can be resumed.

    If a standby fails, the others are copied without it; if tables of its primary were read on it, they are read on the
    primary. Returns what was copied, and the standbys on which tables of primaries were read, by primary.
    """
    sessions, operation = context.sessions, context.operation
    attempt = unfinished.attempt if unfinished else 0
    destination = CopyDestination(operation.snapshot, operation.id, context.fleet.store, attempt=attempt)
    primaries = [node for node in plan.nodes if node.backup_of is None]
    tables, readers = plan.tables, dict(plan.readers)
    # The silence of a standby must not end what is done on primaries.
    of_primaries = sessions.watch.only(sessions.primaries)

    def dump(node: Node) -> list[StoredObject]:
        prefix = ddl_prefix(operation.snapshot, node.id, operation.id)
        return store_ddl(context.store, node, prefix, slots[node.id].snapshot, of_primaries)

    def dump_all() -> list[StoredObject]:
        dumped = [stored for objects in in_parallel(dump, primaries) for stored in objects]
        if unfinished is not None:
            store_unfinished_base(context.store, structs.replace(unfinished, objects=tuple(dumped)))
            operation.is_resumable = True
        return dumped

    with ThreadPoolExecutor(max_workers=1) as threads:
        ddl = threads.submit(dump_all)
        watch = _DumpWatch(sessions.watch, ddl)

        def recover(error: Exception) -> list[TableSource]:
            """Leave out the standby that caused the error, and return what is read on its primary then."""
            watch.raise_failure()
            # DDL that any fleet executes is not the cause of a standby's shutdown.
            is_ddl = isinstance(error, CopyError) and may_be_ddl(error) and not sessions.watch.silent()
            is_ddl = is_ddl and bool(find_change(sessions, plan.node_tables, plan.selection))
            if is_ddl or not leave_out_failed(sessions, error, progress):
                raise error
            lost = [primary for primary, reader in readers.items() if reader.id in sessions.absent]
            for primary in lost:
                reader = readers.pop(primary)
                progress.note(News(f"the tables of {primary} are read on the primary, because {reader.id} is left out"))
            return [
                TableSource(sessions.fleet.node(primary), slots[primary].snapshot, tables[primary]) for primary in lost
            ]

        reading = set(readers.values())
        sources = [
            TableSource(node, slots[node.id].snapshot, tables[node.shard], is_for_primary=node in reading)
            for node in plan.sources
        ]
        try:
            copied = copy_tables(sources, destination, sessions, spark, progress, watch, recover)
            if context.request.large_objects:
                watch = _DumpWatch(of_primaries, ddl)
                copied.entries.extend(_copy_large_objects(sessions, slots, destination, spark, progress, watch))
            copied.entries.extend(ddl.result())
        except KeyboardInterrupt:
            # Don't wait for pg_dump: a lock may block it for a long time.
            sessions.watch.end_all()
            raise
        except Exception:
            watch.raise_failure()
            raise
        progress.reached(CrashPoint.DDL_STORED)
        return copied, readers


def _copy_large_objects(
    sessions: Sessions,
    slots: Mapping[str, ExportedSlot],
    destination: CopyDestination,
    spark: SparkSource,
    progress: Progress,
    watch: JobWatch,
) -> list[NamedObject]:
    # Imported here: few snapshots copy large objects.
    from cutline.snapshots.base_copy.large_objects import (
        LargeObjectSource,
        LargeObjectTask,
        copy_large_objects,
        plan_large_objects,
    )

    session = spark.session()
    sources = [
        LargeObjectSource(sessions.fleet.node(node), slots[node].snapshot, connection)
        for node, connection in sessions.primaries.items()
    ]
    limit = read_limit(source.node for source in sources)
    limited, share = share_rate(session, task_sessions(sessions.by_node), limit)
    tasks = plan_large_objects(sources, destination, share)
    progress.step("copy large objects", total=len(tasks), unit="tasks")
    # The number of bytes in a range of oids is unknown.
    dealing = Dealing[LargeObjectTask](lambda _: LANE_BYTES, lambda task: (task.node.id,), limited)
    shares = NodeShares[LargeObjectTask].of_tasks(progress, tasks, lambda task: task.node.id)
    shares.begin()
    reports = run_tasks(session, copy_large_objects, tasks, shares, dealing, watch, shared_problem)
    raise_first([report.problem for report in reports])
    return [entry for report in reports for entry in report.entries]


def _known_tables(base: BaseCopy) -> KnownTables:
    return KnownTables(
        base.groups,
        base.states,
        base.fingerprints,
        base.highest,
        without_rows=base.without_rows,
        unread=base.unread,
    )


def _initial_state(base: BaseCopy, selection: TableSelection, chain: str) -> ChainState:
    return ChainState(
        chain,
        selection,
        _known_tables(base),
        base.node_tables,
        base.positions,
        {},
        {shard: LastCut(base.positions[shard]) for shard in base.groups},
    )


def _build_commit(
    context: CreateContext,
    selection: TableSelection,
    base: BaseCopy,
    cut: CutResult,
    seconds: float,
    progress: Progress,
) -> FullSnapshot:
    sessions, operation = context.sessions, context.operation
    copied, lists = split_entries(base.entries)
    shared = _shared_bases(context.store, base, cut)
    server_globals = store_globals(context.store, sessions, operation, None, progress)
    extension_rows, unread = store_extension_rows(context.store, sessions, operation, selection.rules)
    return FullSnapshot(
        snapshot=operation.snapshot,
        increment=0,
        operation=operation.id,
        chain=operation.id,
        created_at=operation.began_at,
        seconds=round(seconds, 3),
        comment=context.request.comment,
        counts={},
        cut=cut.archived_cut.record,
        sequences=dict(cut.sequences),
        segments=cut.archived_cut.segments,
        left_out=cut.left_out + unread + standby_copies(sessions.too_old, sessions.identities) + never_copied(sessions),
        terminal=context.request.terminal,
        definition_changes=cut.definition_changes,
        databases=dict(cut.databases),
        extension_rows=extension_rows,
        fleet_id=selection.fleet_id,
        global_id_form=sessions.fleet.global_id,
        switches=switches_of(sessions),
        baseline=tuple(sessions.identities.values()),
        groups=dict(base.groups),
        base=dict(base.positions),
        slots_complete_at=dict(base.slots_complete_at),
        shared_bases=shared,
        copied=(*copied, *server_globals),
        lists=lists,
        roles=dict(cut.roles),
        rules=selection.rules,
        tables={shard: tuple(states.values()) for shard, states in base.states.items()},
        fingerprints=dict(base.fingerprints),
    )


def _shared_bases(store: ObjectStore, base: BaseCopy, cut: CutResult) -> dict[str, SharedBase]:
    def share(shard: str) -> SharedBase:
        reader = base.readers[shard]
        return SharedBase(reader, tuple(find_prepared(store, cut.archived_cut.segments[shard], base.positions[reader])))

    shards = list(base.readers)
    return dict(zip(shards, in_parallel(share, shards), strict=True))


def _amount(context: CreateContext, plan: FullPlan) -> Amount:
    """Return the amount of work of the base copy."""
    if context.copied is None:
        size = BYTES_PER_LARGE_OBJECT_BYTE * plan.large_object_bytes
        return amount_to_copy(plan.sources, plan.tables) + Amount(size)
    # The first cut adds the tables that are not copied yet.
    return Amount(0)


def create_full(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the full snapshot and return its commit."""
    began, steps = time.monotonic(), StepTimes(progress)
    return repeat_without_failed(fleet, steps, partial(_create_full, fleet, request, spark, steps, began))


def _create_full(
    fleet: Fleet,
    request: CreateRequest,
    spark: SparkSource,
    progress: StepTimes,
    began: float,
    begins: Callable[[], None],
) -> Commit:
    progress.step("check nodes")
    store = fleet.store.open()
    nodes = choose_nodes(fleet, only_primary=request.only_primary)
    with open_sessions(fleet, nodes, spares_standbys=True, known=lambda: read_recorded_servers(store)) as sessions:
        leave_out_late(sessions, progress, standby_wait_seconds(fleet, request.wait_seconds))
        note_servers(sessions, progress)
        check_clocks(sessions.clocks, progress)
        plan = plan_full(fleet, request, sessions, store, progress)
        note_collation_versions(sessions, progress)
        _note_unmatched(sessions, plan.selection.rules, request, progress)
        progress.reached(CrashPoint.CHECKED)
        find = partial(find_resumable, store, sessions, request, plan.selection, progress)
        with begin_full(sessions, store, request, plan.selection.fleet_id, progress, find) as context:
            operation = context.operation
            # Standbys may have been left out since the checks.
            plan = replace(plan, nodes=sessions.nodes, readers=choose_readers(sessions))
            note_readers(plan.node_tables, plan.readers, sessions, progress)
            # The first cut copies tables again, for which it makes slots of their own.
            slots = slot_name(operation.id), copy_slot_name(operation.id)

            def begin_spark() -> None:
                spark.begin(context.executor_needs, progress, _amount(context, plan))
                progress.reached(CrashPoint.SPARK_BEGUN)

            if not operation.resumption:
                # Nothing is stored before this, so the create can begin again if a standby fails here.
                begin_spark()
            begins()
            with record_operation(store, operation, lambda: undo_create(context, slots, progress), progress):
                if operation.resumption:
                    begin_spark()
                commit = take_full(context, plan, spark, progress, began)
            progress.reached(CrashPoint.OUTCOME_STORED)
            forget_copied(store, operation.id)
    progress.reached(CrashPoint.RELEASED)
    return commit
