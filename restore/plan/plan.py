"""Plan a restore: read the chain and find every shard's target. Only the store is contacted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from msgspec import UNSET, Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet
from cutline.fleet.messages import SAME_TARGET, check_command, list_some
from cutline.fleet.record import Time
from cutline.fleet.table_names import is_matching, is_schema_named, similar_names
from cutline.nodes.groups import Group
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.restore.plan.copies import CopyChoice, Wanted, check_chosen, count_bytes, settle_copies
from cutline.restore.plan.report import BorrowedRows, NodeReport, RestoreReport
from cutline.restore.plan.request import RestoreRequest, check_routable
from cutline.restore.plan.topology import Topology, check_large_objects_routed, compare_sources, plan_topology
from cutline.restore.scope.scope import TableMove, choose_nodes, warn_of_nodes
from cutline.restore.targets.chain_ids import in_ids_of, other_ids
from cutline.restore.targets.databases import DatabaseRecord
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.target import Connections, Superusers, Target, find_targets
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.ddl.dump import find_ddl
from cutline.snapshots.fold.amounts import amount_of_copies
from cutline.snapshots.listing.exact_point import ExactPoint, check_same_definitions, digest_at, find_exact_point
from cutline.snapshots.listing.listing import find_doubts, read_restorable
from cutline.snapshots.listing.recovery_plan import in_doubt_transactions
from cutline.snapshots.operations.object_damage import find_listed_damage
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.operations.open_operations import (
    OpenOperation,
    document_names,
    naming_open_operations,
    read_open_operations,
)
from cutline.snapshots.operations.operation import current_time, list_decided, new_operation
from cutline.snapshots.operations.removed_chains import naming_removed
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Sequence
from cutline.snapshots.records.merged_chain import MergedAwayError, before_beginning_error, read_from_merge
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    chain_at,
    check_has_rows,
    commit_key,
    cut_time,
    increment_label,
    next_cut_time,
    safe_time,
)
from cutline.snapshots.records.store_identity import StoreIdentity, check_of_fleet, read_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError
from cutline.spark.amount import Amount, is_for_command
from cutline.storage.errors import UsageError
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError


class RestorePlan(Struct, frozen=True):
    """A restore that has not started: the snapshot and its parts, the store, the targets, and the operation.

    `damage`: the error for needed objects that a listing shows to be missing, reported together with all other
    obstacles. `next_cut`: the time of the first cut after the requested time. `exact`: the state of `chain`, unless it
    is that of a cut. `doubts`: reasons in the records not to trust the snapshot. `superusers`: the superusers who do
    what the restoring role may not; None if that role does everything. `decided`: the earlier restores with a decision,
    newest first. `spark_master`: where jobs run.
    """

    request: RestoreRequest
    store: StoreLocation
    target_fleet: Fleet
    chain: Chain
    targets: tuple[Target, ...]
    intent: Intent
    open_operations: tuple[OpenOperation, ...]
    copies: CopyChoice = field(default_factory=CopyChoice)
    damage: ObjectDamagedError | None = None
    topology: Topology | None = None
    next_cut: datetime | None = None
    exact: ExactPoint | None = None
    doubts: tuple[str, ...] = ()
    superusers: Superusers | None = None
    decided: tuple[str, ...] = ()
    spark_master: str = ""

    def begun_now(self) -> RestorePlan:
        """Return the plan with the current time as the restore's start."""
        return replace(self, intent=structs.replace(self.intent, began_at=current_time()))

    @property
    def wanted(self) -> Wanted:
        """The parts of the chain that this restore needs."""
        return self.request.wanted(is_routed=self.topology is not None)

    @property
    def amount(self) -> Amount:
        """About how much work the jobs have."""
        if self.topology and len(self.sources) > 1:
            # Spark looks for conflicts between the sources, however small they are.
            return Amount()
        nodes = self.chain.present if self.request.use_backup_copies else self.sources
        return amount_of_copies(self.chain, nodes)

    @property
    def needs_spark(self) -> bool:
        """Whether Spark starts before the rows are loaded."""
        return not is_for_command(self.amount, self.spark_master, self.store)

    @property
    def groups(self) -> dict[str, tuple[Group, ...]]:
        """The groups that are restored, by shard."""
        return {target.shard: self.groups_of(target) for target in self.targets}

    def groups_of(self, target: Target) -> tuple[Group, ...]:
        """Return the groups that are restored to the target."""
        return self.request.tables.of(self.chain.groups(target.source))

    @property
    def sources(self) -> tuple[str, ...]:
        """The snapshot's shards whose rows are restored."""
        return self.topology.sources if self.topology else tuple(target.shard for target in self.targets)

    def sequences(self, target: Target) -> tuple[Sequence, ...]:
        """Return a target's sequences, with their values."""
        return self.topology.sequences(self.chain) if self.topology else self.chain.sequences(target.source)

    def roles(self, target: Target) -> tuple[str, ...]:
        """Return the roles that the DDL of a target's sources names."""
        sources = target.sources or (target.source,)
        return tuple(dict.fromkeys(role for source in sources for role in self.chain.roles(source)))

    def moves(self, target: Target) -> list[TableMove]:
        """Return the tables of a target that will get new names."""
        tables = {(group.schema, group.table) for group in self.groups_of(target)}
        return [move for move in self.request.scope.moves if (move.schema, move.table) in tables]

    @property
    def chosen(self) -> dict[str, frozenset[int]]:
        """The numbers of the groups taken from each copy, by node; a shard without an entry uses all of its copy."""
        borrowed = dict(self.copies.borrowed)
        for shard in self.sources:
            lent = [numbers for node, numbers in borrowed.items() if self.chain.shard_of(node) == shard]
            if lent or not self.request.is_with_all_rows:
                groups = self.request.tables.of(self.chain.groups(shard))
                borrowed[shard] = frozenset(group.number for group in groups).difference(*lent)
        return borrowed

    @property
    def borrowed_rows(self) -> tuple[BorrowedRows, ...]:
        """The rows that are taken from standbys' copies, with the names of their groups."""
        return tuple(
            BorrowedRows(
                shard, node, tuple(group.name for group in self.chain.groups(shard) if group.number in numbers)
            )
            for node, numbers in self.copies.borrowed.items()
            for shard in [self.chain.shard_of(node)]
        )

    @property
    def steps(self) -> tuple[str, str] | None:
        """The commands for the same restore in two steps, first all but the rows, then the rows; None if impossible."""
        return None if self.topology else self.request.steps(self.chain.last.increment)

    def lacks_ddl(self, shard: str) -> bool:
        """Whether the shard's DDL is known to be damaged."""
        damaged = self.damage.details.get("damaged", []) if self.damage else []
        keys = {str(damage["object"]) for damage in damaged} if isinstance(damaged, list) else set[str]()
        return find_ddl(self.chain, shard).key in keys

    def _warn_of_other_targets(self) -> list[str]:
        """Return a warning that names the primaries of the target into which nothing is restored, if there are any."""
        if self.request.is_drill or self.request.scope.nodes or self.topology:
            return []
        shards = self.chain.primaries
        others = [node.id for node in self.target_fleet.primaries if node.id not in shards]
        if not others:
            return []
        point = increment_label(self.chain.name, self.chain.last.increment)
        return [
            f"{point} has no shard {', '.join(others)}: what {self.target_fleet.path.name} lists there stays as it is"
        ]

    @property
    def _not_in_snapshot(self) -> tuple[LeftOut, ...]:
        """The parts of the restored databases that the snapshot lacks; large objects only if all rows are restored."""
        of_all = () if self.request.is_with_all_rows else (LeftOutKind.LARGE_OBJECTS, LeftOutKind.LARGE_OBJECTS_OF_FULL)
        return tuple(out for out in self.chain.left_out if out.node in self.sources and out.kind not in of_all)

    def report(self) -> RestoreReport:
        """Return the report on this restore as it is before the restore starts."""
        return RestoreReport(
            snapshot=self.request.name,
            increment=self.chain.last.increment,
            operation=self.intent.id,
            nodes=[NodeReport(target.node.id, target.database) for target in self.targets],
            bytes=count_bytes(self.chain, self.sources),
            not_in_snapshot=self._not_in_snapshot,
            open_operations=self.open_operations,
            in_doubt=in_doubt_transactions(self.chain.last),
            borrowed=self.borrowed_rows,
            damaged=self.copies.damaged,
            warnings=[
                *self.doubts,
                *warn_of_nodes(self.request.scope.nodes, self.chain.primaries),
                *self._warn_of_other_targets(),
            ],
            moved=[f"{target.node.id}: {move.label}" for target in self.targets for move in self.moves(target)],
            routes=self.topology.shown(self.groups[self.targets[0].shard]) if self.topology else [],
            scope=self.request.scope,
            remarks=[
                *(self.topology.remarks(self.chain, self.groups[self.targets[0].shard]) if self.topology else []),
                *(
                    f"{target.node.id} is called {target.node.listed_as} in {self.target_fleet.path.name}"
                    for target in self.targets
                    if target.node.listed_as
                ),
            ],
            cut_at=cut_time(self.chain.last),
            safe_at=safe_time(self.chain.last),
            exact=self.exact,
        )


class LockedTargets(Struct):
    """The targets of a planned restore, whose locks this process holds. `connections` are keyed by shard.

    If a target has no connection, `obstacles` contains the reason. `folder` is a private folder for the DDL.
    """

    plan: RestorePlan
    connections: Connections
    folder: Path
    obstacles: Obstacles

    @property
    def reached(self) -> list[Target]:
        """The targets that have a connection."""
        return [target for target in self.plan.targets if target.shard in self.connections]


def plan_resumed(
    source: Fleet, target: Fleet, record: DatabaseRecord, *, allow_refused_ddl: bool = False
) -> RestorePlan:
    """Plan the remaining work of the restore that wrote a database's record.

    `allow_refused_ddl`: continue without statements that the targets refuse, even if the restore was started without
    this option. Raises UnfinishedRestoreError if the snapshot has changed, and any error of plan_restore.
    """
    request = RestoreRequest(
        record.snapshot,
        record.increment,
        groups=record.groups,
        routes=record.routes,
        replace=record.replace,
        create_roles=record.create_roles,
        use_backup_copies=bool(record.borrowed),
        allow_refused_ddl=record.allow_refused_ddl or allow_refused_ddl,
        scope=record.scope,
        at=datetime.fromisoformat(record.exact_at) if record.exact_at else None,
        exact=record.exact_at is not None,
    )
    try:
        plan = plan_restore(source, target, request, record)
    except (SnapshotDeletedError, SnapshotMissingError) as error:
        raise UnfinishedRestoreError(
            f"operation {record.operation} can't continue: {error.message}",
            hint=[f"to undo it: {record.abandon_command}", SAME_TARGET],
            details={"operation": record.operation},
        ) from error
    if plan.chain.digest != record.digest:
        raise UnfinishedRestoreError(
            f"{increment_label(record.snapshot, record.increment)} has changed since operation {record.operation}"
            " began to restore it",
            hint=[
                f"undo the restore: {record.abandon_command}",
                f"if {commit_key(record.snapshot, record.increment)} was replaced by mistake, put the right object back"
                " from a copy of the store",
                f"check what the store has now, then restore it: {check_command(record.snapshot, record.increment)}",
            ],
            details={"operation": record.operation},
        )
    if (shards := tuple(target.shard for target in plan.targets)) != record.shards:
        raise UsageError(
            f"operation {record.operation} restores into {', '.join(record.shards)}, but {target.path} lists"
            f" {', '.join(shards)}",
            hint="pass the --to FILE of the restore, with its primaries in their original order",
        )
    return plan


def plan_restore(
    source: Fleet, target: Fleet, request: RestoreRequest, resumed: DatabaseRecord | None = None
) -> RestorePlan:
    """Read the chain and find every shard's target; `resumed` is the record of the restore to continue, if any.

    The plan's `damage` names parts that a listing shows to be missing, or damaged DDL that prevents comparing the
    sources. If the target fleet lacks a shard or the request has routes, all its primaries are targets, and routes
    divide the rows.

    Raises UsageError if such rows have no route, no group matches, or --replace would leave tables empty; also
    SourcesDifferError, LargeObjectsUnroutedError, and any error of read_chain, check_not_removed, check_archive and
    find_ddl; for an exact time, any error of find_exact_point and check_same_definitions.
    """
    store = source.store.open()
    identity = read_identity(store, source)
    with naming_removed(store, request.name, request.increment or 0) as check:
        plan = _plan_restore(source, target, request, resumed, identity)
        if plan.damage is not None:
            check()
    return plan


def _plan_restore(
    source: Fleet, target: Fleet, request: RestoreRequest, resumed: DatabaseRecord | None, identity: StoreIdentity
) -> RestorePlan:
    store = source.store.open()
    own = resumed.operation if resumed else None
    documents = document_names(store)
    operations = read_open_operations(store, request.name, documents=documents)
    open_operations = tuple(operation for operation in operations if operation.id != own)
    with naming_open_operations(open_operations):
        whole = _read_whole(store, request, resumed)
        following: datetime | None = None
        while request.at and whole.beginning and cut_time(whole.full) > request.at:
            following = cut_time(whole.full)
            # The increment after an exact time may be the one of the merge.
            last = request.increment if request.exact else whole.full.increment - 1
            try:
                whole = read_restorable(store, request.name, last, whole.full.increment - 1)
            except MergedAwayError as error:
                raise before_beginning_error(whole, request.at, error) from None
        whole = read_chain_lists(store, whole)
        chain = chain_at(whole, request.at) if request.at and not request.exact else whole
    check_of_fleet(chain, identity)
    check_has_rows(chain, f"recover physical backups of the nodes to it: snapshot show {chain.name} --recovery-plan")
    target, nodes = in_ids_of(store, request.name, target, request.scope.nodes, chain.primaries)
    request = replace(request, scope=structs.replace(request.scope, nodes=nodes))
    exact = find_exact_point(store, whole, request.exact_at, request.command) if request.exact_at else None
    chain = exact.chain if exact else chain
    # The shards at that time: others may have joined the chain or left it since.
    shards = choose_nodes(request.scope.nodes, chain.primaries, f"snapshot {request.name}")
    if exact:
        check_same_definitions(exact, shards, request.command)
    chain.check_archive()
    for shard in shards:
        find_ddl(chain, shard)
    intent = new_operation("restore", request.name, chain.last.increment, tuple(shards))
    intent = structs.replace(
        intent,
        only_nodes=True if request.scope.nodes else UNSET,
        exact_at=Time.exactly(request.exact_at) if request.exact_at else UNSET,
    )
    if resumed is not None:
        intent = structs.replace(intent, operation=resumed.operation, began_at=resumed.began_at)
    targets, topology = find_targets(target, shards, intent.id), None
    if request.routes or len(targets) < len(shards):
        check_routable(request, target)
        targets = find_targets(target, [node.id for node in target.primaries], intent.id)
        targets = tuple(replace(target, sources=tuple(shards)) for target in targets)
        chosen = request.tables.of(chain.groups(shards[0]))
        others = other_ids(store, request.name, target) if request.routes else {}
        with _naming_lacking(target, shards, is_routed=bool(request.routes)):
            topology = plan_topology(shards, [target.shard for target in targets], chosen, request.routes, others)
        if request.is_with_all_rows:
            check_large_objects_routed(chain, shards)
    wanted = request.wanted(is_routed=topology is not None)
    copies, damage = _choose_copies(store, chain, wanted, resumed)
    if topology:
        damage = compare_sources(store, chain, shards, wanted) or damage
    plan = RestorePlan(request, source.store, target, chain, targets, intent, open_operations, copies, damage, topology)
    _check_tables(plan, is_resumed=resumed is not None)
    plan = replace(plan, decided=tuple(list_decided(documents)), spark_master=source.spark_master, exact=exact)
    if request.at and not request.exact:
        plan = replace(plan, next_cut=next_cut_time(whole, chain) or following)
    if resumed:
        return plan
    is_newest = request.increment is None and not following and chain.last.increment == whole.last.increment
    return replace(plan, doubts=find_doubts(store, documents, chain, is_newest=is_newest))


@contextmanager
def _naming_lacking(target: Fleet, shards: Iterable[str], *, is_routed: bool) -> Iterator[None]:
    """Unless routes were given, add to the hint of a UsageError which shards the target fleet lacks."""
    try:
        yield
    except UsageError as error:
        have = {node.id for node in target.primaries}
        if not is_routed and (lacking := [shard for shard in shards if shard not in have]):
            nodes = " ".join(f"--node {shard}" for shard in shards if shard in have)
            only = f"; or restore only the others: {nodes}" if nodes else ""
            file = target.path.name
            error.hint = (
                f"{file} lacks {', '.join(lacking)}: add a [[node]] for each, so that every shard has its own database"
                f"{only}; or let several shards share a database:\n{error.hint}"
            )
        raise


def _read_whole(store: ObjectStore, request: RestoreRequest, resumed: DatabaseRecord | None) -> Chain:
    """Read the chain. A restore that is resumed reads it from where it began, even if it was merged since."""
    whole = chain = read_restorable(store, request.name, request.increment)
    # What lies before a merge may have been given up.
    with suppress(MergedAwayError):
        while resumed is not None and chain.beginning and not _has_begun_with(chain, request, resumed):
            chain = read_from_merge(store, request.name, request.increment, chain.full.increment - 1)
    return chain if resumed is not None and _has_begun_with(chain, request, resumed) else whole


def _has_begun_with(chain: Chain, request: RestoreRequest, resumed: DatabaseRecord) -> bool:
    """Whether the restore that is resumed has begun with the chain, or with an exact time before its end."""
    return resumed.digest == (digest_at(chain, request.exact_at) if request.exact_at else chain.digest)


def _choose_copies(
    store: ObjectStore, chain: Chain, wanted: Wanted, resumed: DatabaseRecord | None
) -> tuple[CopyChoice, ObjectDamagedError | None]:
    """Return the copies from which rows are taken, and the error if a listing shows that parts are missing."""
    if resumed is None:
        try:
            return settle_copies(store, chain, wanted, find_listed_damage(store, chain)), None
        except ObjectDamagedError as error:
            return CopyChoice(), error
    # A resumed restore takes its rows from the same copies as before.
    copies = CopyChoice({node: frozenset(numbers) for node, numbers in resumed.borrowed.items()})
    check_chosen(chain, wanted, copies)
    return copies, None


# How many tables a hint about a pattern names, and how many the refusal of --replace.
SIMILAR_MAX = OTHERS_NAMED_MAX = 3
SCHEMAS_NAMED_MAX = 20


def _check_tables(plan: RestorePlan, *, is_resumed: bool) -> None:
    request = plan.request
    known = {group.schema for target in plan.targets for group in plan.chain.groups(target.source)}
    if unknown := sorted(
        name for name in set(request.scope.schemas) if not any(is_schema_named(one, (name,)) for one in known)
    ):
        raise UsageError(
            f"snapshot {request.name} has no tables in --schema {', '.join(unknown)}",
            hint=f"see: snapshot show {request.name}"
            + (f"   schemas with tables: {list_some(sorted(known), SCHEMAS_NAMED_MAX)}" if known else ""),
            details={"schemas": unknown},
        )
    for move in request.scope.moves:
        if not any(move in plan.moves(target) for target in plan.targets):
            raise UsageError(
                f"--group {move.label}: the first table has no rows in snapshot {request.name}",
                hint=f"see: snapshot show {request.name}   the rows of a partitioned table are in its partitions",
                details={"table": move.label},
            )
    names = [group.name for target in plan.targets for group in plan.chain.groups(target.source)]
    if unmatched := [group for group in request.groups if not any(is_matching(name, (group,)) for name in names)]:
        raise UsageError(
            f"no table with rows in snapshot {request.name} matches {', '.join(unmatched)}",
            hint=[
                *filter(None, (similar_names(pattern, names, SIMILAR_MAX) for pattern in unmatched)),
                f"see: snapshot show {request.name}",
            ],
            details={"groups": unmatched},
        )
    if not is_resumed:
        _check_replaced(plan)


def _check_replaced(plan: RestorePlan) -> None:
    """Raise UsageError if --replace would give databases their names in which some tables have lost their rows."""
    request = plan.request
    if not request.replace or not request.tables.is_partial:
        return
    groups = [group for target in plan.targets for group in plan.chain.groups(target.source)]
    if others := sorted({group.name for group in groups} - {group.name for group in request.tables.of(groups)}):
        raise UsageError(
            "--replace with --group or --schema would replace the databases by ones in which all other tables are"
            f" empty: {list_some(others, OTHERS_NAMED_MAX)}",
            hint=[
                "to restore the rows into databases of their own, name these with --to FILE, and omit --replace",
                "to load the rows into existing tables, which must be empty, give --data-only in place of --replace",
            ],
            details={"tables_left_empty": others},
        )
