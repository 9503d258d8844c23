"""Archive a chain's WAL between its cuts, so that the next increment has little to do and nodes retain little.

What it leaves is what an increment leaves that failed after its drain: segments that no commit lists yet, after which
the next increment continues. So it may be ended anywhere, and repeated. It has no intent and no outcome.
"""

from __future__ import annotations

from dataclasses import replace

import psycopg

from fleet.config import Fleet
from fleet.nodes.sessions import open_sessions
from fleet.progress import Progress
from snapshots.create.chain_state import state_of
from snapshots.create.context import CreateContext
from snapshots.create.continuable import check_continuable, check_fleet_file, rules_since
from snapshots.create.request import CreateRequest
from snapshots.operations.exclusive import exclusive
from snapshots.operations.operation import Operation, new_operation
from snapshots.records.chain import Chain
from snapshots.records.chains import read_newest_part
from snapshots.records.lost_chains import check_not_lost
from snapshots.records.store_identity import check_of_fleet, read_identity
from storage.errors import UnreachableError, error_of
from wal.slots.retained import read_waiting
from wal.slots.slots import slot_name

# Less of it is not worth an object per node.
AHEAD_BYTES_MIN = 1 << 20


def archive_ahead(fleet: Fleet, name: str, progress: Progress) -> int:
    """Archive what waits in the slots of the snapshot's chain; return the bytes of WAL on the node with the most.

    Returns 0 without doing anything if no node has AHEAD_BYTES_MIN, or if tables have changed: then an increment has to
    copy or publish some. Raises what an increment raises, FleetBusyError among it.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    chain = read_newest_part(store, name)
    check_of_fleet(chain, identity)
    with open_sessions(fleet, check_fleet_file(fleet, chain)) as sessions:
        waiting = max(read_waiting(sessions, slot_name(chain.full.operation)).values(), default=0)
        if waiting < AHEAD_BYTES_MIN:
            return 0
        with exclusive(sessions, store, "archive", name) as lock:
            # Read again under the lock: from here on nobody else adds an increment.
            chain = read_newest_part(store, name)
            check_not_lost(store, chain)
            nodes = tuple(node.id for node in sessions.nodes)
            operation = Operation(new_operation("archive", name, chain.last.increment + 1, nodes))
            context = CreateContext(CreateRequest(name), store, operation, lock)
            return waiting if _archive(context, chain, progress) else 0


def _archive(context: CreateContext, chain: Chain, progress: Progress) -> bool:
    """Whether the WAL was archived; if not, tables have changed."""
    # Imported here: what is refused, or too little, needs no Arrow.
    from snapshots.create.cut_attempt import plan_cut
    from snapshots.create.prepare_tables import PreparedTables, read_archived
    from snapshots.ddl.table_changes import plan_ddl
    from snapshots.tasks.own_tasks import run_own_tasks
    from wal.cut.markers import Marker, write_markers
    from wal.decoding.known_definitions import SchemaMovedError
    from wal.drain.drain import drain

    sessions, store = context.sessions, context.store
    node_tables = check_continuable(store, sessions, chain)
    state = state_of(chain, rules_since(chain, context.fleet), node_tables)
    archived = read_archived(store, chain.name, state, sessions.nodes)
    tables = plan_ddl(node_tables, state.known, archived.definitions, {})
    if tables.unpublished or any(shard.changed for shard in tables.shards.values()):
        return False
    plan = plan_cut(context, state, PreparedTables(tables, archived.last_segments))
    # A record of its own is where every node's drain can end: the end of WAL may be within another one.
    try:
        written = write_markers(sessions.primaries, Marker(state.chain, context.operation.id, "archive"))
    except psycopg.OperationalError as error:
        raise UnreachableError(str(error).strip(), hint="see whether the node is up, and its log") from error
    tasks = [replace(task, finish=written[task.node.shard].position) for task in plan.tasks.values()]
    progress.step("archive WAL", total=len(tasks), unit="nodes")
    for report in run_own_tasks(drain, tasks, sessions, progress):
        if report.problem is not None:
            problem = error_of(report.problem)
            if isinstance(problem, SchemaMovedError):
                return False
            raise problem
    return True
