"""Plan a restore: read the chain, and find the target of every shard. Only the store is contacted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from fleet.config import Fleet
from fleet.tables.groups import Group
from fleet.tables.names import is_matching
from restore.database_records import DatabaseRecord
from restore.report import NodeReport, RestoreReport
from restore.request import RestoreRequest
from restore.target import Target, target_of
from restore.topology.same_sources import check_large_objects_routed, check_sources
from restore.topology.topology import Topology, plan_topology
from restore.unfinished import SAME_TARGET, UnfinishedRestoreError
from snapshots.ddl.dump import find_ddl_objects
from snapshots.operations.open_operations import OpenOperation, naming_open_operations, read_open_operations
from snapshots.operations.operation import new_operation
from snapshots.records.chain import Chain
from snapshots.records.commit import Sequence
from snapshots.records.commits import SnapshotMissingError, increment_label, read_chain
from snapshots.records.cut_times import chain_at
from snapshots.records.operation_records import Intent
from snapshots.records.store_identity import check_of_fleet, read_identity
from snapshots.records.tombstones import SnapshotDeletedError
from storage.errors import UsageError
from storage.location import StoreLocation


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A restore before it begins: what is restored, from which store, into which targets, as which operation."""

    request: RestoreRequest
    store: StoreLocation
    target_fleet: Fleet
    chain: Chain
    targets: tuple[Target, ...]
    intent: Intent
    open_operations: tuple[OpenOperation, ...]
    topology: Topology | None = None

    @property
    def groups(self) -> dict[str, tuple[Group, ...]]:
        """The groups that are restored, by shard."""
        return {target.shard: choose_groups(self.chain, target.source, self.request.groups) for target in self.targets}

    def sequences(self, target: Target) -> tuple[Sequence, ...]:
        """The sequences of a target, with their values."""
        return self.topology.sequences(self.chain) if self.topology else self.chain.sequences(target.source)

    def roles(self, target: Target) -> tuple[str, ...]:
        """The roles that the DDL of a target's sources names."""
        sources = target.sources or (target.source,)
        return tuple(dict.fromkeys(role for source in sources for role in self.chain.roles(source)))

    def report(self) -> RestoreReport:
        """The report of this restore before it begins."""
        return RestoreReport(
            snapshot=self.request.name,
            increment=self.chain.last.increment,
            operation=self.intent.id,
            nodes=[NodeReport(target.node.id, target.database) for target in self.targets],
            bytes=sum(sum(commit.object_sizes.values()) for commit in self.chain.commits),
            not_in_snapshot=self.chain.left_out,
            open_operations=self.open_operations,
            routes=self.topology.shown(self.groups[self.targets[0].shard]) if self.topology else [],
            remarks=self.topology.remarks(self.chain, self.groups[self.targets[0].shard]) if self.topology else [],
        )


def choose_groups(chain: Chain, shard: str, patterns: tuple[str, ...]) -> tuple[Group, ...]:
    """The shard's groups that match one of the patterns; all groups if there are no patterns."""
    return tuple(group for group in chain.groups(shard) if not patterns or is_matching(group.name, patterns))


def plan_resumed(source: Fleet, target: Fleet, record: DatabaseRecord) -> RestorePlan:
    """Plan the rest of the restore that a database's record is of; raise as plan_restore does.

    Raises UnfinishedRestoreError if the snapshot is not what it was.
    """
    request = RestoreRequest(
        record.snapshot,
        record.increment,
        groups=record.groups,
        routes=record.routes,
        replace=record.replace,
        create_roles=record.create_roles,
    )
    try:
        plan = plan_restore(source, target, request, record)
    except (SnapshotDeletedError, SnapshotMissingError) as error:
        raise UnfinishedRestoreError(
            f"operation {record.operation} can't go on: {error.message}",
            hint=[f"to undo it: snapshot restore {record.snapshot} --abandon", SAME_TARGET],
            details={"operation": record.operation},
        ) from error
    if plan.chain.last.digest != record.digest:
        raise UnfinishedRestoreError(
            f"{increment_label(record.snapshot, record.increment)} is not the one that operation {record.operation}"
            " began to restore",
            hint=f"undo the restore: snapshot restore {record.snapshot} --abandon; and run: snapshot check",
            details={"operation": record.operation},
        )
    if (shards := tuple(target.shard for target in plan.targets)) != record.shards:
        raise UsageError(
            f"operation {record.operation} restores into {', '.join(record.shards)}, and {target.path} has"
            f" {', '.join(shards)}",
            hint="give the --to FILE that the restore had, with its primaries in the same order",
        )
    return plan


def provisional_targets(fleet: Fleet) -> tuple[Target, ...]:
    """The targets of all primaries, before it is known which restore they are of."""
    operation = new_operation("restore", "", 0, ()).operation
    return _find_targets(fleet, [node.id for node in fleet.primaries], operation)


def plan_restore(
    source: Fleet, target: Fleet, request: RestoreRequest, resumed: DatabaseRecord | None = None
) -> RestorePlan:
    """Read the chain and find every shard's target; `resumed` is a record of the restore if it goes on with one.

    If the target lacks a shard, or there are routes, all of the target's primaries are targets, and the routes decide.
    Raises UsageError if a table has no route then or no group matches, SourcesDifferError, LargeObjectsUnroutedError,
    and what read_chain, check_archive and find_ddl_objects raise.
    """
    store = source.store.open()
    identity = read_identity(store, source)
    own = resumed.operation if resumed else None
    open_operations = tuple(one for one in read_open_operations(store, request.name) if one.id != own)
    with naming_open_operations(open_operations):
        chain = read_chain(store, request.name, request.increment)
        chain = chain_at(chain, request.at) if request.at else chain
    check_of_fleet(chain, identity)
    chain.check_archive()
    shards = [identity.node for identity in chain.nodes if identity.backup_of is None]
    for shard in shards:
        find_ddl_objects(chain, shard)
    intent = new_operation("restore", request.name, chain.last.increment, tuple(shards))
    if resumed is not None:
        intent = structs.replace(intent, operation=resumed.operation, began_at=resumed.began_at)
    targets, topology = _find_targets(target, shards, intent.id), None
    if request.routes or len(targets) < len(shards):
        targets = _find_targets(target, [node.id for node in target.primaries], intent.id)
        targets = tuple(replace(one, sources=tuple(shards)) for one in targets)
        chosen = choose_groups(chain, shards[0], request.groups)
        topology = plan_topology(shards, [one.shard for one in targets], chosen, request.routes)
        check_sources(store, chain, shards)
        if not request.groups:
            check_large_objects_routed(chain, shards)
    plan = RestorePlan(request, source.store, target, chain, targets, intent, open_operations, topology)
    if request.groups and not any(plan.groups.values()):
        raise UsageError(
            f"no group of snapshot {request.name} matches {', '.join(request.groups)}",
            hint=f"see: snapshot show {request.name}",
        )
    return plan


def _find_targets(fleet: Fleet, ids: list[str], operation: str) -> tuple[Target, ...]:
    """The targets with these ids that the fleet has."""
    primaries = {node.id: node for node in fleet.primaries}
    backups = {one: tuple(node for node in fleet.nodes if node.backup_of == one) for one in ids}
    return tuple(target_of(one, primaries[one], backups[one], operation) for one in ids if one in primaries)
