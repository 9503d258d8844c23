"""The part of a commit that says which definitions and which DDL are not as they were at the commit before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fleet.config import Node
from fleet.lsn import Lsn
from fleet.progress import Progress
from snapshots.create.context import CreateContext
from snapshots.create.make_cut import MadeCut
from snapshots.create.prepare_tables import PreparedTables
from snapshots.ddl.dump import read_roles, store_schema
from snapshots.ddl.table_changes import KnownTables
from snapshots.operations.crash_points import CrashPoint
from snapshots.records.commit import DefinitionChanges, StoredObject
from snapshots.records.keys import ddl_prefix

T = TypeVar("T")


def collect_definition_changes(
    context: CreateContext, known: KnownTables, prepared: PreparedTables, made: MadeCut, progress: Progress
) -> DefinitionChanges | None:
    """What is not as the last commit `known` it; None if nothing changed. Dumps the DDL of shards where it changed."""
    sessions, plan = context.sessions, prepared.plan
    dumped = [shard for shard, found in plan.fingerprints.items() if found != known.fingerprints[shard]]
    objects = [*prepared.objects, *_dump_ddl(context, dumped, progress)]
    roles = sessions.ask_primaries(read_roles) if dumped else {}
    states = {
        shard: tuple(state for name, state in one.states.items() if known.states[shard].get(name) != state)
        for shard, one in plan.shards.items()
    }
    part = DefinitionChanges(
        groups=_drop_empty(
            {shard: tuple(one.table.group for one in found.changed) for shard, found in plan.shards.items()}
        ),
        gone=_drop_empty({shard: found.gone for shard, found in plan.shards.items()}),
        successions=_drop_empty({shard: found.successions for shard, found in plan.shards.items()}),
        begun=_drop_empty(_begun(prepared, made, sessions.nodes)),
        tables=_drop_empty(states),
        objects=tuple(objects),
        roles={shard: roles[shard] for shard in dumped},
        fingerprints={shard: plan.fingerprints[shard] for shard in dumped},
    )
    return None if part == DefinitionChanges() else part


def _drop_empty(found: Mapping[str, T]) -> dict[str, T]:
    return {name: one for name, one in found.items() if one}


def _begun(prepared: PreparedTables, made: MadeCut, nodes: Iterable[Node]) -> dict[str, dict[int, Lsn]]:
    """From which position the changes of each new definition count, by node."""
    begun: dict[str, dict[int, Lsn]] = {node.id: {} for node in nodes}
    for node in nodes:
        archived = made.archived[node.id]
        for one in prepared.plan.shards[node.shard].changed:
            number = one.table.group.number
            if one.after is None:
                begun[node.id][number] = prepared.positions[node.id]
            else:
                first = [found.first_changes[number] for found in archived if number in found.first_changes]
                begun[node.id][number] = min(first, default=made.record.of(node.shard).position)
    return begun


def _dump_ddl(context: CreateContext, shards: Sequence[str], progress: Progress) -> list[StoredObject]:
    """Dump and store the DDL of these shards as it is now."""
    if not shards:
        return []
    progress.step("dump DDL", total=len(shards), unit="nodes")
    operation = context.operation

    def dump(shard: str) -> list[StoredObject]:
        prefix = ddl_prefix(operation.snapshot, shard, operation.id)
        stored = store_schema(context.store, context.fleet.node(shard), prefix, None, context.sessions.watch)
        progress.advance(1)
        return stored

    with ThreadPoolExecutor(max_workers=len(shards)) as threads:
        found = [stored for objects in threads.map(dump, shards) for stored in objects]
    progress.reached(CrashPoint.SCHEMA_STORED)
    return found
