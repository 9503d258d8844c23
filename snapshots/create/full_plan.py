"""The checks of a full snapshot, and the plan of what it copies. Nothing here changes a node or the store.

Nothing here needs Arrow or Spark, so a refusal comes at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.nodes.clocks import check_clocks
from cutline.fleet.nodes.collation_versions import note_collation_versions
from cutline.fleet.nodes.free_connections import check_free_connections
from cutline.fleet.nodes.preconditions import find_fillings, find_node_problems
from cutline.fleet.nodes.problems import refuse_unfit
from cutline.fleet.nodes.sessions import Sessions, open_sessions
from cutline.fleet.programs.clients import check_programs
from cutline.fleet.progress import Progress
from cutline.fleet.read_only.resume import check_terminal
from cutline.fleet.tables.groups import Table
from cutline.fleet.tables.large_objects import check_readable, count_large_objects
from cutline.fleet.tables.left_out import LeftOut, mark_large_objects, read_left_out, standby_copies
from cutline.fleet.tables.privileges import find_table_problems
from cutline.fleet.tables.table_state import TableState
from cutline.snapshots.create.request import CreateRequest
from cutline.snapshots.ddl.table_changes import NodeTables, TableSelection, read_fleet_tables
from cutline.snapshots.operations.slot_guard import preview_guard
from cutline.snapshots.records.commits import check_name, commit_missing_error, free_turn, increment_numbers
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import check_not_deleted
from cutline.storage.errors import UsageError
from cutline.storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class FullPlan:
    """What a full snapshot copies: the nodes and every shard's tables; and what it leaves out of their databases."""

    nodes: tuple[Node, ...]
    node_tables: Mapping[str, NodeTables]
    selection: TableSelection
    left_out: tuple[LeftOut, ...]

    @property
    def tables(self) -> dict[str, tuple[Table, ...]]:
        """Every shard's tables."""
        return {shard: one.tables for shard, one in self.node_tables.items()}

    @property
    def states(self) -> dict[str, Mapping[str, TableState]]:
        """The states of every shard's tables, by name."""
        return {shard: one.states for shard, one in self.node_tables.items()}

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every shard's catalogs."""
        return {shard: one.fingerprint for shard, one in self.node_tables.items()}


def choose_nodes(fleet: Fleet, *, only_primary: bool) -> tuple[Node, ...]:
    """The nodes that a snapshot copies."""
    return fleet.primaries if only_primary else fleet.nodes


def plan_full(fleet: Fleet, request: CreateRequest, sessions: Sessions, store: ObjectStore) -> FullPlan:
    """Make every check of a full snapshot; raise the error of the first that fails."""
    check_name(request.name)
    identity = read_identity(store, fleet)
    check_not_deleted(store, request.name)
    free_turn(store, request.name, 0)
    if increment_numbers(store, request.name):
        raise commit_missing_error(request.name, 0)
    selection = TableSelection(identity.fleet_id, narrow_rules(fleet.groups, request))
    refuse_unfit(
        find_node_problems(sessions)
        + find_fillings(sessions)
        + find_table_problems(sessions, selection.rules, identity.fleet_id)
    )
    check_programs(sessions)
    node_tables = read_fleet_tables(sessions, selection)
    groups = {node: [table.group for table in listed.tables] for node, listed in node_tables.items()}
    if selection.rules.include != GroupRules().include and not any(groups.values()):
        raise UsageError(
            f"no table matches {', '.join(selection.rules.include)}, so the snapshot would be empty",
            hint="correct --group, or groups.include in fleet.toml: a pattern names schema.table, with * and ?",
        )
    left_out = read_left_out(sessions.primaries, selection.rules, groups)
    if request.large_objects:
        check_readable(sessions.primaries)
        counts = sessions.ask_primaries(count_large_objects)
        left_out = mark_large_objects(left_out, {node: (count, "this") for node, count in counts.items() if count})
    left_out += standby_copies(sessions.too_old, sessions.identities)
    return FullPlan(sessions.nodes, node_tables, selection, left_out)


def narrow_rules(rules: GroupRules, request: CreateRequest) -> GroupRules:
    """fleet.toml's rules, narrowed by --group and --exclude-group."""
    return structs.replace(rules, include=request.include or rules.include, exclude=(*rules.exclude, *request.exclude))


def preview_full(fleet: Fleet, request: CreateRequest, progress: Progress) -> FullPlan:
    """Make every check of a full snapshot and return what it would copy, changing nothing."""
    progress.step("check nodes")
    store = fleet.store.open()
    with open_sessions(fleet, choose_nodes(fleet, only_primary=request.only_primary)) as sessions:
        check_clocks(sessions.clocks, progress)
        check_free_connections(sessions.by_node)
        plan = plan_full(fleet, request, sessions, store)
        note_collation_versions(sessions, progress)
        preview_guard(store, sessions, None, progress)
        check_terminal(sessions, plan.selection.fleet_id, progress, terminal=request.terminal)
        return plan
