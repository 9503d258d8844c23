"""Collect the differences between the definitions at a cut and those at the last commit, for the new commit.

The DDL is dumped of the shards where it has changed, and of no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from msgspec import structs

from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.sessions import in_parallel
from cutline.snapshots.create.context import CreateContext
from cutline.snapshots.create.make_cut import ArchivedCut
from cutline.snapshots.create.prepare_tables import PreparedTables
from cutline.snapshots.ddl.attempts import ChangedError
from cutline.snapshots.ddl.dump import store_ddl
from cutline.snapshots.ddl.fingerprint import are_same_objects, has_only_added, read_again, read_moment
from cutline.snapshots.ddl.table_changes import KnownTables
from cutline.snapshots.records.commit import DefinitionChanges, StoredObject, split_entries
from cutline.snapshots.records.documents import ddl_prefix

T = TypeVar("T")


def collect_definition_changes(
    context: CreateContext,
    known: KnownTables,
    prepared: PreparedTables,
    cut: ArchivedCut,
    pending: Mapping[str, tuple[Lsn, ...]],
    roles: Mapping[str, tuple[str, ...]],
    progress: Progress,
) -> DefinitionChanges | None:
    """Return the differences from the last commit (`known`), if any; dump the DDL of the shards where it changed.

    `pending` are the transactions whose changes the copies lack, as in the result. `roles` are the roles that each
    shard's DDL names. Raises ChangedError if the catalogs changed, so that the dump may differ from them at the cut.
    """
    sessions, plan = context.sessions, prepared.plan
    dumped = [
        shard
        for shard, fingerprint in plan.fingerprints.items()
        if not are_same_objects(fingerprint, known.fingerprints[shard])
    ]
    copied, lists = split_entries(prepared.entries)
    ddl = _dump_ddl(context, {shard: plan.fingerprints[shard] for shard in dumped}, progress)
    states = {
        shard: tuple(state for name, state in shard_plan.states.items() if known.states[shard].get(name) != state)
        for shard, shard_plan in plan.shards.items()
        if shard_plan.states is not known.states[shard]
    }
    changes = DefinitionChanges(
        groups=_drop_empty(
            {
                shard: tuple(table.table.group for table in shard_plan.changed)
                for shard, shard_plan in plan.shards.items()
            }
        ),
        gone=_drop_empty({shard: shard_plan.gone for shard, shard_plan in plan.shards.items()}),
        successions=_drop_empty({shard: shard_plan.successions for shard, shard_plan in plan.shards.items()}),
        begun=_drop_empty(_first_positions(prepared, cut, sessions.copied_nodes)),
        copied=_drop_empty(_copied_rows(prepared, sessions.copied_nodes)),
        tables=_drop_empty(states),
        objects=(*copied, *ddl),
        lists=lists,
        readers=dict(prepared.readers),
        pending=dict(pending),
        roles={shard: roles[shard] for shard in dumped},
        fingerprints={shard: plan.fingerprints[shard] for shard in dumped},
    )
    return None if changes == DefinitionChanges() else changes


def with_objects(changes: DefinitionChanges | None, objects: Sequence[StoredObject]) -> DefinitionChanges | None:
    """Add `objects`, which don't belong to a definition, to a commit's changes."""
    if not objects:
        return changes
    changes = changes or DefinitionChanges()
    return structs.replace(changes, objects=(*changes.objects, *objects))


def _drop_empty(values: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in values.items() if value}


def _copied_rows(prepared: PreparedTables, nodes: Iterable[Node]) -> dict[str, dict[int, int]]:
    """Return the number of rows in the new base copies, by node and number, also of tables that are empty."""
    rows = {node.id: {table.group.number: 0 for table in prepared.plan.shards[node.shard].to_copy} for node in nodes}
    for entry in prepared.entries:
        for number, count in entry.rows.items():
            rows[entry.node][number] += count
    return rows


def _first_positions(prepared: PreparedTables, cut: ArchivedCut, nodes: Iterable[Node]) -> dict[str, dict[int, Lsn]]:
    """Return the positions from which changes under new definitions count, by node and number."""
    begun: dict[str, dict[int, Lsn]] = {node.id: {} for node in nodes}
    for node in nodes:
        archived = cut.archived[node.id]
        for table in prepared.plan.shards[node.shard].changed:
            number = table.table.group.number
            if table.after is None:
                begun[node.id][number] = prepared.positions[node.id]
            else:
                first = [segment.first_changes[number] for segment in archived if number in segment.first_changes]
                begun[node.id][number] = min(first, default=cut.record.of(node.shard).position)
    return begun


def _dump_ddl(context: CreateContext, fingerprints: Mapping[str, str], progress: Progress) -> list[StoredObject]:
    """Dump the DDL of the shards with these fingerprints.

    pg_dump may take minutes, and meanwhile applications may create tables. It reads a snapshot that has the
    fingerprint, but some of PostgreSQL's functions that it calls read the current catalogs. So the dump counts if none
    of the objects in the snapshot has changed since.
    """
    if not fingerprints:
        return []
    progress.step("dump DDL", total=len(fingerprints), unit="nodes")
    sessions = context.sessions
    # The silence of a standby must not end it.
    watch = sessions.watch.only(sessions.primaries)

    def dump(shard: str) -> list[StoredObject]:
        was, visible = fingerprints[shard], list[str]()

        def check(connection: psycopg.Connection[Any]) -> None:
            if not are_same_objects(read_again(connection, was), was):
                raise ChangedError(f"node {shard}: its catalogs changed", {shard: set()})
            visible.append(read_moment(connection).visible)

        prefix = ddl_prefix(context.operation.snapshot, shard, context.operation.id)
        stored = store_ddl(context.store, sessions.fleet.node(shard), prefix, None, watch, check)
        with raising_unreachable(sessions.fleet.node(shard)):
            is_exact = has_only_added(sessions.connections[shard], was, *visible)
        if not is_exact:
            raise ChangedError(f"node {shard}: its catalogs changed while its DDL was dumped", {shard: set()})
        progress.advance(1)
        return stored

    dumped = [stored for objects in in_parallel(dump, fingerprints, sessions.watch.end_all) for stored in objects]
    progress.reached(CrashPoint.DDL_STORED)
    return dumped
