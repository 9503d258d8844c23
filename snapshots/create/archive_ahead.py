"""Archive a chain's WAL between its cuts, so that the next increment has little to do and nodes retain little WAL.

Archiving ahead leaves the same state as an increment that failed after its drain: segments that no commit lists yet.
The next increment continues after them. Archiving ahead can be interrupted at any point and repeated, and stores
neither an intent nor an outcome.
"""

from __future__ import annotations

import psycopg
from msgspec import Struct
from msgspec.structs import replace

from cutline.fleet.chain_ids import with_chain_ids
from cutline.fleet.config import Fleet, Node
from cutline.fleet.progress import Progress
from cutline.nodes.sessions import Sessions, in_parallel, open_sessions
from cutline.snapshots.create.absent_copies import (
    ENDING,
    find_spare,
    leave_out,
    leave_out_ended,
    leave_out_late,
    standby_wait_seconds,
)
from cutline.snapshots.create.context import CreateContext, CreateRequest
from cutline.snapshots.create.continuable import check_continuable, check_fleet_file
from cutline.snapshots.create.renamed import ask_renamed, missing_shards
from cutline.snapshots.operations.operation import Operation, exclusive, new_operation
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.end_marks import check_chain_not_ended
from cutline.snapshots.records.proven_chains import naming_contradictions, read_continued, read_newest_part
from cutline.snapshots.records.store_identity import check_of_fleet, check_takes_snapshots, read_identity
from cutline.spark.spark_jobs import run_own_tasks
from cutline.storage.errors import SnapshotError, UnreachableError, error_of
from cutline.wal.drain.lags import drain_rounds, read_waiting
from cutline.wal.drain.slots import slot_name
from cutline.wal.segments.archive import ArchivedSegment

# Less WAL is not worth an object per node.
AHEAD_BYTES_MIN = 1 << 20
# The segments that this process has archived since the last increment, by key. A watch archives every minute: reading
# all of them again each time would take longer and longer. An increment reads them from the store.
_read_before: dict[str, ArchivedSegment] = {}  # process-wide state


class ArchivedAhead(Struct, frozen=True):
    """The number of bytes of WAL archived on the node with the most WAL.

    If `needs_increment`, nothing was archived: tables have changed, or the copy of a node must begin again, and an
    increment must copy or publish them.
    """

    bytes: int = 0
    needs_increment: bool = False


def archive_ahead(fleet: Fleet, name: str, progress: Progress) -> ArchivedAhead:
    """Archive the WAL that the chain's slots retain, if it amounts to at least AHEAD_BYTES_MIN on any node.

    Raises the same errors as an increment, for example FleetBusyError.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    check_takes_snapshots(identity, store)
    chain = read_newest_part(store, name)
    check_of_fleet(chain, identity)
    fleet, listed = with_chain_ids(fleet, chain.renamed), fleet
    if missing_shards(fleet, chain) and not missing_shards(with_chain_ids(listed, ask_renamed(listed, chain)), chain):
        # An increment records the ids.
        return ArchivedAhead(needs_increment=True)
    with open_sessions(
        fleet,
        [node for node in check_fleet_file(fleet, chain) if node.id in chain.parts or node.id in chain.copying],
        spares_standbys=True,
        known=lambda: chain.system_identifiers,
    ) as sessions:
        leave_out_late(sessions, progress, standby_wait_seconds(fleet, CreateRequest(name).wait_seconds))
        waiting = read_waiting(sessions, slot_name(chain.full.operation))
        most = max(waiting.values(), default=0)
        if most < AHEAD_BYTES_MIN:
            return ArchivedAhead()
        with naming_contradictions(store, name), exclusive(sessions, store, "archive", name) as lock:
            # Read the increments under the lock, which keeps other commands from adding any.
            chain = read_continued(store, name)
            check_chain_not_ended(store, chain)
            leave_out_ended(sessions, chain, progress)
            nodes = tuple(node.listed_id for node in sessions.nodes)
            operation = Operation(new_operation("archive", name, chain.last.increment + 1, nodes))
            context = CreateContext(CreateRequest(name), store, operation, lock)
            try:
                is_archived = _archive(context, chain, progress)
            except ENDING:
                # The copy of a node has ended: an increment begins it again.
                is_archived = False
            return ArchivedAhead(most) if is_archived else ArchivedAhead(needs_increment=True)


def _archive(context: CreateContext, chain: Chain, progress: Progress) -> bool:
    """Archive the WAL; return False if nothing was archived because an increment must copy tables first."""
    # Imported here: a command that is refused, or finds too little WAL to archive, does not need Arrow.
    from cutline.snapshots.create.cut_attempt import plan_cut
    from cutline.snapshots.create.failover_slots import reading_failover_slots
    from cutline.snapshots.create.prepare_tables import PreparedTables, read_archived
    from cutline.snapshots.ddl.table_changes import plan_ddl
    from cutline.wal.cut.markers import Marker, write_markers
    from cutline.wal.decoding.known_definitions import SchemaMovedError
    from cutline.wal.drain.drain import drain
    from cutline.wal.drain.replay import await_standbys

    sessions, store = context.sessions, context.store
    # This runs often, and a complete copy waits for the next increment.
    continuable = check_continuable(store, sessions, chain, reads_archives=False)
    if continuable.to_renew:
        return False
    state = continuable.state
    archived = read_archived(store, chain.name, state, sessions.nodes, _read_before)
    tables = plan_ddl(state.seen, state.known, archived.definitions, {})
    if tables.unpublished or any(shard.changed for shard in tables.shards.values()):
        return False
    plan = plan_cut(context, state, PreparedTables(tables, archived.last_segments))
    # Write a marker at which every node's drain ends: the end of WAL may be in the middle of a record.
    try:
        written = write_markers(sessions.primaries, Marker(state.chain, context.operation.id, "archive"))
    except psycopg.OperationalError as error:
        raise UnreachableError(str(error).strip(), hint="check that the node is up, and read its log") from error
    finishes = {shard: marker.position for shard, marker in written.items()}
    read_before = tuple(_read_before.values())
    tasks = [replace(task, finish=finishes[task.node.shard], read_before=read_before) for task in plan.tasks.values()]
    _read_before.clear()
    progress.step("archive WAL", total=len(tasks), unit="nodes")

    def problem_of(standby: Node) -> SnapshotError | None:
        try:
            spared = {standby.id} if sessions.may_leave_out(standby) else set[str]()
            await_standbys([standby], finishes, plan.wait_seconds, progress, "archiving WAL", spared)
        except SnapshotError as error:
            return error
        return None

    for problem in in_parallel(problem_of, [task.node for task in tasks if task.node.backup_of is not None]):
        if problem is not None:
            _spare(sessions, problem)
    with reading_failover_slots(sessions, tasks[0].slot, finishes, plan.wait_seconds, progress):
        for some, at_once in drain_rounds(task for task in tasks if task.node.id not in sessions.absent):
            for report in run_own_tasks(drain, some, sessions, progress, at_once):
                if report.problem is not None:
                    problem = error_of(report.problem)
                    if isinstance(problem, SchemaMovedError):
                        return False
                    _spare(sessions, problem)
                _read_before.update({segment.segment.key: segment for segment in report.segments})
    return True


def _spare(sessions: Sessions, error: SnapshotError) -> None:
    """Leave out the standby whose failure caused the error; raise the error if that was no such standby."""
    if (node := find_spare(sessions, error)) is None:
        raise error
    leave_out(sessions, node, error)
