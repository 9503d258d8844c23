"""Collect what changed since the previous commit: definitions of tables, and DDL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import structs

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.nodes.sessions import Sessions, in_parallel
from cutline.fleet.progress import Progress
from cutline.snapshots.create.context import CreateContext
from cutline.snapshots.create.make_cut import ArchivedCut
from cutline.snapshots.create.prepare_tables import PreparedTables
from cutline.snapshots.ddl.dump import read_roles, store_ddl
from cutline.snapshots.ddl.table_changes import KnownTables
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.operations.object_lists import split_entries
from cutline.snapshots.operations.operation import Operation
from cutline.snapshots.records.commit import DefinitionChanges
from cutline.snapshots.records.keys import ddl_prefix
from cutline.snapshots.records.stored_object import StoredObject
from cutline.storage.store import ObjectStore

T = TypeVar("T")


def collect_definition_changes(
    context: CreateContext, known: KnownTables, prepared: PreparedTables, cut: ArchivedCut, progress: Progress
) -> DefinitionChanges | None:
    """What differs from the last commit (`known`); None if nothing. Dumps the DDL of the shards where it changed."""
    sessions, plan = context.sessions, prepared.plan
    dumped = [shard for shard, fingerprint in plan.fingerprints.items() if fingerprint != known.fingerprints[shard]]
    copied, lists = split_entries(prepared.entries)
    ddl = _dump_ddl(context.store, sessions, context.operation, dumped, progress)
    roles = sessions.ask_primaries(read_roles) if dumped else {}
    states = {
        shard: tuple(state for name, state in one.states.items() if known.states[shard].get(name) != state)
        for shard, one in plan.shards.items()
    }
    changes = DefinitionChanges(
        groups=_drop_empty(
            {shard: tuple(one.table.group for one in shard_plan.changed) for shard, shard_plan in plan.shards.items()}
        ),
        gone=_drop_empty({shard: shard_plan.gone for shard, shard_plan in plan.shards.items()}),
        successions=_drop_empty({shard: shard_plan.successions for shard, shard_plan in plan.shards.items()}),
        begun=_drop_empty(_first_positions(prepared, cut, sessions.nodes)),
        tables=_drop_empty(states),
        objects=(*copied, *ddl),
        lists=lists,
        roles={shard: roles[shard] for shard in dumped},
        fingerprints={shard: plan.fingerprints[shard] for shard in dumped},
    )
    return None if changes == DefinitionChanges() else changes


def with_objects(changes: DefinitionChanges | None, objects: Sequence[StoredObject]) -> DefinitionChanges | None:
    """The changes of a commit that also lists these objects, which belong to no definition."""
    if not objects:
        return changes
    changes = changes or DefinitionChanges()
    return structs.replace(changes, objects=(*changes.objects, *objects))


def _drop_empty(values: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in values.items() if value}


def _first_positions(prepared: PreparedTables, cut: ArchivedCut, nodes: Iterable[Node]) -> dict[str, dict[int, Lsn]]:
    """The position from which the changes of each new definition count, by node and number."""
    begun: dict[str, dict[int, Lsn]] = {node.id: {} for node in nodes}
    for node in nodes:
        archived = cut.archived[node.id]
        for one in prepared.plan.shards[node.shard].changed:
            number = one.table.group.number
            if one.after is None:
                begun[node.id][number] = prepared.positions[node.id]
            else:
                first = [segment.first_changes[number] for segment in archived if number in segment.first_changes]
                begun[node.id][number] = min(first, default=cut.record.of(node.shard).position)
    return begun


def _dump_ddl(
    store: ObjectStore, sessions: Sessions, operation: Operation, shards: Sequence[str], progress: Progress
) -> list[StoredObject]:
    """Dump and store the current DDL of these shards."""
    if not shards:
        return []
    progress.step("dump DDL", total=len(shards), unit="nodes")

    def dump(shard: str) -> list[StoredObject]:
        prefix = ddl_prefix(operation.snapshot, shard, operation.id)
        stored = store_ddl(store, sessions.fleet.node(shard), prefix, None, sessions.watch)
        progress.advance(1)
        return stored

    dumped = [stored for objects in in_parallel(dump, shards, sessions.watch.end_all) for stored in objects]
    progress.reached(CrashPoint.DDL_STORED)
    return dumped
