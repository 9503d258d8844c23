"""Taking a full snapshot: every check before anything is changed; `snapshots.full` does the work after that.

Nothing here needs Arrow or Spark, and both are imported only once the checks have passed: a refusal answers at
once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fleet.config import Fleet, GroupRules, Node
from fleet.groups import Table, number_groups, read_tables
from fleet.left_out import LeftOut, read_left_out
from fleet.lock import FleetLock
from fleet.preconditions import check_nodes
from fleet.progress import Progress
from fleet.publications import check_admissible
from fleet.sessions import Sessions, open_sessions
from fleet.table_state import TableState, read_table_states
from snapshots.commits import SnapshotExistsError, check_name, commit_gone, commit_key, increment_numbers
from snapshots.exclusive import exclusive
from snapshots.jobs import SparkSource
from snapshots.manifest import Commit
from snapshots.operations import Operation, new_operation, recorded
from snapshots.points import Point
from snapshots.retained import foresee, guard_nodes
from snapshots.settle import settle_operations
from snapshots.store_identity import read_identity
from storage.open import open_store
from storage.store import ObjectStore
from wal.slots import drop_slots, slot_name

PARTITION_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What the user asks for. `include` and `exclude` are patterns on top of fleet.toml's."""

    name: str
    only_primary: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    retries: int = 3
    wait_seconds: float = 60.0
    comment: str = ""


@dataclass(frozen=True, slots=True)
class FullPlan:
    """What a full snapshot will copy: the nodes, every shard's tables, and what of their databases it leaves out."""

    nodes: tuple[Node, ...]
    tables: Mapping[str, list[Table]]
    fleet_id: str
    rules: GroupRules
    states: Mapping[str, Mapping[str, TableState]]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class Taking:
    """One full snapshot under way."""

    fleet: Fleet
    request: CreateRequest
    store: ObjectStore
    operation: Operation
    sessions: Sessions
    lock: FleetLock
    plan: FullPlan

    @property
    def slot(self) -> str:
        """The chain's slot on every node."""
        return slot_name(self.operation.id)


def chosen_nodes(fleet: Fleet, *, only_primary: bool) -> tuple[Node, ...]:
    """The nodes that a snapshot copies."""
    return fleet.primaries if only_primary else fleet.nodes


def plan_full(fleet: Fleet, request: CreateRequest, sessions: Sessions, store: ObjectStore) -> FullPlan:
    """Make every check of a full snapshot, changing nothing; raise the first that fails."""
    check_name(request.name)
    identity = read_identity(store, fleet)
    if store.exists(commit_key(request.name, 0)):
        raise SnapshotExistsError(
            f"snapshot {request.name} exists already",
            hint=f"its next increment: snapshot create {request.name} --incremental; or choose another name",
            details={"snapshot": request.name},
        )
    if increment_numbers(store, request.name):
        raise commit_gone(request.name, 0)
    check_nodes(sessions)
    rules = narrowed(fleet.groups, request)
    tables = {node: read_tables(connection, rules) for node, connection in sessions.primaries.items()}
    check_admissible(tables)
    tables = number_groups(tables, PARTITION_ROWS)
    states = {
        node: read_table_states(connection, node, identity.fleet_id, tables[node])
        for node, connection in sessions.primaries.items()
    }
    groups = {node: [table.group for table in found] for node, found in tables.items()}
    left_out = read_left_out(sessions.primaries, rules, groups)
    return FullPlan(sessions.nodes, tables, identity.fleet_id, rules, states, left_out)


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
            guard_nodes(store, sessions, progress)
            progress.reached(Point.GIVEN_UP)
            operation = new_operation("create", request.name, 0, tuple(node.id for node in nodes))
            operation = replace(operation, slot=slot_name(operation.id))
            taking = Taking(fleet, request, store, operation, sessions, lock, plan)
            spark.begin()
            progress.reached(Point.SPARK_BEGUN)
            from snapshots.full import take_full

            with recorded(store, operation, lambda: not drop_slots(nodes, taking.slot)):
                commit = take_full(taking, spark, progress, began)
            progress.reached(Point.OUTCOME_STORED)
    progress.reached(Point.RELEASED)
    return commit
