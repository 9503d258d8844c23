"""Taking a full snapshot: every check before anything is changed; `snapshots.full` does the work after that.

Nothing here needs Arrow or Spark, and both are imported only once the checks have passed: a refusal answers at
once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fleet.config import Fleet, GroupRules, Node
from fleet.groups import Table
from fleet.large_objects import check_readable, count_large_objects
from fleet.left_out import LeftOut, read_left_out, standby_copies, with_large_objects
from fleet.lock import FleetLock
from fleet.preconditions import check_nodes
from fleet.progress import Progress
from fleet.sessions import Sessions, open_sessions
from fleet.table_state import TableState
from snapshots.commits import check_name, commit_gone, free_turn, increment_numbers
from snapshots.exclusive import exclusive
from snapshots.jobs import SparkSource
from snapshots.manifest import Commit
from snapshots.operations import Operation, new_operation, recorded
from snapshots.points import Point
from snapshots.read_only import check_terminal, undo_freeze
from snapshots.retained import foresee, guard_nodes
from snapshots.schema_changes import Catalogs, read_all
from snapshots.settle import settle_operations
from snapshots.store_identity import read_identity
from snapshots.tombstones import check_not_deleted
from storage.open import open_store
from storage.store import ObjectStore
from wal.slots import drop_slots, slot_name


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What the user asks for. `include` and `exclude` are patterns on top of fleet.toml's.

    A `terminal` snapshot ends with a fleet that accepts no writes (snapshots/terminal.py). `large_objects`: copy them.
    """

    name: str
    only_primary: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    retries: int = 3
    wait_seconds: float = 60.0
    comment: str = ""
    terminal: bool = False
    large_objects: bool = False


@dataclass(frozen=True, slots=True)
class FullPlan:
    """What a full snapshot will copy: the nodes, every shard's catalogs, and what of their databases it leaves out."""

    nodes: tuple[Node, ...]
    catalogs: Mapping[str, Catalogs]
    fleet_id: str
    rules: GroupRules
    left_out: tuple[LeftOut, ...]

    @property
    def tables(self) -> dict[str, tuple[Table, ...]]:
        """Every shard's tables."""
        return {shard: one.tables for shard, one in self.catalogs.items()}

    @property
    def states(self) -> dict[str, Mapping[str, TableState]]:
        """The states of every shard's tables, by name."""
        return {shard: one.states for shard, one in self.catalogs.items()}

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every shard's catalogs."""
        return {shard: one.fingerprint for shard, one in self.catalogs.items()}


@dataclass(frozen=True, slots=True)
class Creating:
    """A create under way, of a full snapshot or of an increment: what for, into which store, and under which lock."""

    request: CreateRequest
    store: ObjectStore
    operation: Operation
    lock: FleetLock

    @property
    def sessions(self) -> Sessions:
        """The sessions that hold the lock."""
        return self.lock.sessions

    @property
    def fleet(self) -> Fleet:
        """The fleet as fleet.toml describes it."""
        return self.lock.sessions.fleet


def chosen_nodes(fleet: Fleet, *, only_primary: bool) -> tuple[Node, ...]:
    """The nodes that a snapshot copies."""
    return fleet.primaries if only_primary else fleet.nodes


def plan_full(fleet: Fleet, request: CreateRequest, sessions: Sessions, store: ObjectStore) -> FullPlan:
    """Make every check of a full snapshot, changing nothing; raise the first that fails."""
    check_name(request.name)
    identity = read_identity(store, fleet)
    check_not_deleted(store, request.name)
    free_turn(store, request.name, 0)
    if increment_numbers(store, request.name):
        raise commit_gone(request.name, 0)
    check_nodes(sessions)
    rules = narrowed(fleet.groups, request)
    catalogs = read_all(sessions, (identity.fleet_id, rules))
    groups = {node: [table.group for table in found.tables] for node, found in catalogs.items()}
    left_out = read_left_out(sessions.primaries, rules, groups)
    if request.large_objects:
        check_readable(sessions.primaries)
        counts = sessions.ask_primaries(count_large_objects)
        left_out = with_large_objects(left_out, {node: (count, "this") for node, count in counts.items() if count})
    return FullPlan(
        sessions.nodes,
        catalogs,
        identity.fleet_id,
        rules,
        left_out + standby_copies(sessions.too_old, sessions.identities),
    )


def narrowed(rules: GroupRules, request: CreateRequest) -> GroupRules:
    """fleet.toml's rules, narrowed by --group and --exclude-group."""
    return replace(rules, include=request.include or rules.include, exclude=(*rules.exclude, *request.exclude))


def estimate_full(fleet: Fleet, request: CreateRequest, progress: Progress) -> FullPlan:
    """Make every check of a full snapshot and return what it would copy, changing nothing."""
    progress.step("check nodes")
    store = open_store(fleet.store_url, fleet.store_options)
    with open_sessions(fleet, chosen_nodes(fleet, only_primary=request.only_primary)) as sessions:
        plan = plan_full(fleet, request, sessions, store)
        foresee(store, sessions, None, progress)
        check_terminal(sessions, plan.fleet_id, progress, terminal=request.terminal)
        return plan


def create_full(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the full snapshot and return its commit."""
    began = time.monotonic()
    progress.step("check nodes")
    store = open_store(fleet.store_url, fleet.store_options)
    nodes = chosen_nodes(fleet, only_primary=request.only_primary)
    with open_sessions(fleet, nodes) as sessions:
        plan = plan_full(fleet, request, sessions, store)
        progress.reached(Point.CHECKED)
        with exclusive(sessions, store, "create", request.name) as lock:
            progress.reached(Point.LOCKED)
            settle_operations(store, fleet, progress)
            progress.reached(Point.SETTLED)
            check_not_deleted(store, request.name)
            guard_nodes(store, sessions, progress)
            progress.reached(Point.GIVEN_UP)
            check_terminal(sessions, plan.fleet_id, progress, terminal=request.terminal)
            operation = new_operation("create", request.name, 0, tuple(node.id for node in plan.nodes))
            # Settling may have used up a turn.
            turn, details = free_turn(store, request.name, 0), terminal_details(request)
            operation = replace(operation, slot=slot_name(operation.id), turn=turn, details=details)
            creating = Creating(request, store, operation, lock)
            spark.begin()
            progress.reached(Point.SPARK_BEGUN)
            from snapshots.full import take_full

            with recorded(store, operation, lambda: undone(creating, slot_name(operation.id), progress), progress):
                commit = take_full(creating, plan, spark, progress, began)
            progress.reached(Point.OUTCOME_STORED)
    progress.reached(Point.RELEASED)
    return commit


def terminal_details(request: CreateRequest) -> dict[str, bool]:
    """What the intent says of a terminal snapshot: whoever settles the operation undoes its freeze."""
    return {"terminal": True} if request.terminal else {}


def undone(creating: Creating, slot: str, progress: Progress) -> bool:
    """Take away what a create that failed has made on the nodes, `slot` among it; False if something is left."""
    accepts = not creating.request.terminal or undo_freeze(creating.fleet.primaries, creating.operation.id, progress)
    return not drop_slots(creating.sessions.nodes, slot) and accepts
