"""Check a restore's targets, their roles and the DDL that they can run, without changing anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import psycopg
from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet, restore_limit
from cutline.fleet.messages import SAME_TARGET, list_some
from cutline.fleet.progress import Progress
from cutline.nodes.free_connections import check_free_connections, task_sessions
from cutline.nodes.other_databases import Replication, read_replication
from cutline.nodes.problems import quote
from cutline.nodes.sessions import in_parallel
from cutline.nodes.watch import Watch, watch_nodes
from cutline.restore.ddl.ddl import Ddl, Refusal
from cutline.restore.ddl.server_roles import find_differences
from cutline.restore.ddl.statements import literal
from cutline.restore.estimates.estimate import (
    BegunShard,
    Estimate,
    ShardVolume,
    combine_volumes,
    estimate_restore,
    machine_load,
    measure_volume,
    read_measured,
    without_large_objects,
    without_rows,
)
from cutline.restore.plan.checked_ddl import read_all_ddl, warn_of_contradictions
from cutline.restore.plan.database_plan import PlannedDatabase, plan_database
from cutline.restore.plan.plan import LockedTargets, RestorePlan, plan_resumed
from cutline.restore.plan.report import COUNT, RefusedStatement, describe_refusals
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.plan.roles import missing_roles
from cutline.restore.run.loading import check_existing
from cutline.restore.run.rehearsal import refuse, rehearse
from cutline.restore.run.run import RestoreRun, running
from cutline.restore.targets.chain_ids import in_ids_of
from cutline.restore.targets.databases import (
    Phase,
    find_busy,
    find_closed,
    find_slots,
    list_databases,
    rehearsal_database,
)
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.requirements import (
    DatabaseSpace,
    DiskSpace,
    check_locales,
    check_space,
    find_data_directory,
    is_data_directory_hidden,
)
from cutline.restore.targets.swap import END_PREPARED, check_swappable, is_restored, prepared_text
from cutline.restore.targets.target import (
    Target,
    check_target,
    check_xml,
    find_xml_columns,
    lock_targets,
    provisional_targets,
    server_of,
)
from cutline.restore.targets.waits import bounding_waits
from cutline.restore.unfinished.unfinished import (
    UnfinishedRestore,
    UnfinishedRestoreError,
    check_no_unfinished,
    check_whole,
    find_resumable,
)
from cutline.snapshots.ddl.ddl_archive import ArchiveEntry
from cutline.snapshots.ddl.server_globals_object import read_globals, read_stored_globals
from cutline.snapshots.operations.removed_chains import naming_removed
from cutline.snapshots.operations.slot_guard import read_slot_owners
from cutline.snapshots.records.commit import count_by_node
from cutline.snapshots.records.server_globals import ServerGlobals
from cutline.storage.errors import SnapshotError
from cutline.wal.segments.damage import ObjectDamagedError

PLACE_QUERY = """
SELECT (SELECT system_identifier::text FROM pg_control_system()) || '/' || oid FROM pg_database WHERE datname = %s
"""
LOADED_QUERY = "SELECT pg_database_size(oid) FROM pg_database WHERE datname = %s"

OTHERS_MAX = 5
WITHOUT_GLOBALS = (
    "omit --create-roles to restore everything else; or take another increment, which stores the roles again; or"
)


class RestorePreview(Struct, frozen=True):
    """What a restore will do: the roles that each shard's target lacks, the omissions, and the replaced databases.

    `ddl`, `servers` and `volumes` are keyed by shard; `disks` are the targets' disks. `untried` are the nodes where the
    DDL was not rehearsed; `refused` are the statements that the other nodes refused or that have been lost from the
    store. `warnings` may describe intended effects. `begun` is the work of earlier processes, keyed by shard; finished
    shards have no volume. `server_globals` are the properties of roles to create, keyed by shard; `role_differences`
    says how existing roles on the targets differ from the snapshot's. For `counted`, see CheckedDdl.
    `rows_left` are the lines of `left_out` about rows and large objects, which come first and are always shown.
    """

    roles_missing: Mapping[str, list[str]]
    ddl: Mapping[str, Ddl]
    left_out: list[str]
    untried: list[str]
    warnings: list[str]
    servers: Mapping[str, str]
    volumes: Mapping[str, ShardVolume]
    disks: list[DiskSpace]
    estimate: Estimate
    replaces: list[str] = field(default_factory=list)
    refused: list[RefusedStatement] = field(default_factory=list)
    begun: Mapping[str, BegunShard] = field(default_factory=dict)
    server_globals: Mapping[str, ServerGlobals] = field(default_factory=dict)
    role_differences: list[str] = field(default_factory=list)
    counted: Mapping[str, str] = field(default_factory=dict)
    rows_left: frozenset[str] = frozenset()


def preview_restore(plan: RestorePlan, progress: Progress) -> RestorePreview:
    """Run all of a restore's checks, and rehearse the DDL in temporary databases; change nothing else.

    Raises any error of check_restore, lock_targets and refuse.
    """
    progress.step("check targets")
    obstacles = Obstacles()
    with (
        watch_nodes(target.maintenance for target in plan.targets) as watch,
        lock_targets(plan.targets, obstacles) as connections,
        bounding_waits(watch, plan.targets, connections, progress),
        TemporaryDirectory(prefix="cutline-ddl-") as folder,
    ):
        locked = LockedTargets(plan, connections, Path(folder), obstacles)
        check_no_unfinished(plan.store.open(), plan.request.name, locked.reached, connections, progress)
        preview = check_restore(locked, plan.targets)
        busy = find_busy(plan.target_fleet, locked.reached, connections)
        preview = replace(preview, replaces=find_replaced(locked, plan.targets), warnings=[*preview.warnings, *busy])
        # Without the missing roles, statements that name them would be refused.
        tried = [
            target
            for target in plan.targets
            if target.shard in preview.ddl and not preview.roles_missing.get(target.shard)
        ]
        if not tried:
            return preview
        progress.step("rehearse the DDL")
        refused = _rehearse_all(plan, preview, tried, connections, watch)
        if not plan.request.allow_refused_ddl:
            refuse(refused, connections, plan.steps)
        statements = [
            statement for target, refusals in refused.items() for statement in describe_refusals(target, refusals)
        ]
        untried = [target.node.id for target in plan.targets if target not in tried]
        return replace(preview, refused=[*preview.refused, *statements], untried=untried)


def _rehearse_all(
    plan: RestorePlan,
    preview: RestorePreview,
    targets: Sequence[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    watch: Watch,
) -> dict[Target, list[Refusal]]:
    def rehearse_one(target: Target) -> list[Refusal]:
        source = plan.chain.baseline[target.source]
        ddl = preview.ddl[target.shard]
        with rehearsal_database(target, connections[target.shard], source, ddl.tablespace) as own:
            if plan.superusers is not None:
                # The DDL lacks what a superuser creates, such as extensions.
                plan.superusers.run_beforehand(own, ddl, allows_refused=plan.request.allow_refused_ddl)
            return rehearse(own, ddl, watch, sessions[target.node.id])

    sessions = task_sessions({target.node: connections[target.shard] for target in targets})
    return dict(zip(targets, in_parallel(rehearse_one, targets, watch.end_all), strict=True))


def preview_resumed(
    source: Fleet, target: Fleet, request: RestoreRequest, progress: Progress
) -> tuple[RestorePlan, RestorePreview]:
    """Run all of a resumed restore's checks, and find its remaining work; change nothing.

    Raises any error of check_restore and find_resumable.
    """
    store = source.store.open()
    target, nodes = in_ids_of(store, request.name, target, request.scope.nodes)
    provisional = provisional_targets(target, nodes)
    with lock_targets(provisional) as locked:
        resumable = find_resumable(store, request.name, provisional, locked, progress, settles=False)
        check_whole(resumable, provisional, locked, store)
        plan = _plan_shown(source, target, resumable)
        with running(plan, progress, locked) as run:
            run.records = dict(resumable.records)
            for one in run.find_stale():
                run.records[one.shard] = structs.replace(run.records[one.shard], phase=Phase.CREATED, rows=0)
            done = plan.targets if resumable.is_published else run.shards_in(Phase.FINISHED, Phase.PUBLISHED)
            left = [one for one in plan.targets if one not in done]
            preview = check_restore(run, left, run.find_begun())
            # If the tables already exist, the DDL that precedes the rows has been run.
            made = run.shards_in(Phase.LOADING, Phase.INDEXING)
            untried = [one.node.id for one in left if one not in made]
            preview = replace(with_replaced(preview, run), untried=untried)
            check_all_swappable(run)
    return plan, preview


def _plan_shown(source: Fleet, target: Fleet, found: UnfinishedRestore) -> RestorePlan:
    """Plan a resumed restore; a published restore needs the plan only for display."""
    try:
        return plan_resumed(source, target, found.last_record)
    except SnapshotError as error:
        if not found.is_published:
            raise
        raise UnfinishedRestoreError(
            f"{found.label()} has published all its databases, but can't be shown: {error.message}",
            hint=[f"to end it: {found.last_record.resume_command}", SAME_TARGET],
            details={"operation": found.last_record.operation},
        ) from error


def check_all_swappable(run: RestoreRun) -> None:
    """Call `check_swappable` for the databases of a resumed restore that are ready to be renamed."""
    if run.plan.request.scope.data_only:
        return
    for one in run.shards_in(Phase.FINISHED):
        databases = list_databases(run.connections[one.shard])
        if not is_restored(databases, one, run.operation):
            check_swappable(one, databases, run.records[one.shard])


def with_replaced(preview: RestorePreview, run: RestoreRun) -> RestorePreview:
    """Add to a resumed restore's preview the databases that it will replace and those that are closed until it ends."""
    published = run.shards_in(Phase.PUBLISHED)
    unnamed = [target for target in run.plan.targets if target not in published and not run.is_renamed(target)]
    closed = [f"nobody can connect to {one} until the restore ends" for one in find_closed(unnamed, run.connections)]
    replaces = find_replaced(run, unnamed)
    return replace(preview, replaces=replaces, warnings=[*preview.warnings, *closed])


def check_restore(
    locked: LockedTargets, targets: Iterable[Target], begun: Mapping[str, BegunShard] = MappingProxyType({})
) -> RestorePreview:
    """Check that the store contains the parts to restore and that every target can take them; change nothing.

    `begun` is keyed by shard. Raises all obstacles, including earlier ones, as one error (Obstacles.raise_found), and
    the errors of check_not_removed.
    """
    chain = locked.plan.chain
    with naming_removed(locked.plan.store.open(), chain.name, chain.last.increment, chain.full.increment):
        return _check_restore(locked, targets, begun)


def _check_restore(locked: LockedTargets, targets: Iterable[Target], begun: Mapping[str, BegunShard]) -> RestorePreview:
    plan, connections, obstacles = locked.plan, locked.connections, locked.obstacles
    targets = [target for target in targets if target.shard in connections]
    if plan.damage is not None:
        obstacles.add(plan.damage)
    with obstacles.collecting():
        check_free_connections({target.node: connections[target.shard] for target in targets})
    if plan.request.scope.data_only:
        server_globals, differences = dict[str, ServerGlobals](), list[str]()
        readable, missing = targets, {target.shard: list[str]() for target in targets}
        checked = check_existing(locked, targets)
        warn_of_contradictions(locked, targets)
    else:
        server_globals, differences = find_globals(locked, targets)
        missing, planned = check_targets(locked, targets, server_globals, is_resumed=bool(begun))
        readable = [target for target in targets if not plan.lacks_ddl(target.source)]
        checked = read_all_ddl(locked, readable, planned)
    volumes = _volumes_left(plan, readable, checked.entries, begun)
    sized = [one for one in readable if one.shard in volumes]
    spaces = [_space_of(plan, one, connections[one.shard], volumes[one.shard]) for one in sized]
    disks = check_space(spaces, obstacles)
    obstacles.raise_found()
    servers = {target.shard: server_of(connections[target.shard]) for target in targets}
    rows_left = left_rows(plan)
    with_ddl = [target for target in targets if target.shard in checked.ddl]
    lost = [statement for target in with_ddl for statement in describe_refusals(target, checked.ddl[target.shard].lost)]
    return RestorePreview(
        roles_missing=missing,
        ddl=checked.ddl,
        left_out=[*rows_left, *checked.left_out],
        untried=[target.node.id for target in with_ddl],
        warnings=[*obstacles.warnings, *_find_prepared(locked, targets)],
        refused=lost,
        servers=servers,
        volumes=volumes,
        disks=disks,
        estimate=_estimate(plan, targets, volumes.values(), is_resumed=bool(begun)),
        begun=begun,
        server_globals=server_globals,
        role_differences=differences,
        counted={**checked.counted, **rows_left},
        rows_left=frozenset(rows_left),
    )


def _find_prepared(locked: LockedTargets, targets: Iterable[Target]) -> list[str]:
    """List the databases that can't be set aside as long as their prepared transactions are not decided."""
    if not locked.plan.request.replace:
        return []
    found = {target: prepared_text(target, locked.connections[target.shard]) for target in targets}
    return [
        f"node {target.node.id}: database {target.database} has {prepared}; before it can be set aside, {END_PREPARED}"
        for target, prepared in found.items()
        if prepared
    ]


def find_globals(locked: LockedTargets, targets: Iterable[Target]) -> tuple[dict[str, ServerGlobals], list[str]]:
    """Return the globals of the snapshot's servers, keyed by shard, and how the targets' roles differ from them.

    For a drill, both are empty: its servers are new, and its roles get no properties.
    """
    found, differences = dict[str, ServerGlobals](), dict[str, None]()
    plan, obstacles = locked.plan, locked.obstacles
    for target in () if plan.request.is_drill else targets:
        try:
            stored = read_stored_globals(plan.store.open(), plan.chain, target.source)
        except ObjectDamagedError as error:
            if plan.request.create_roles:
                error.hint = f"{WITHOUT_GLOBALS}\n{error.hint}"
                obstacles.add(error)
            else:
                obstacles.warnings.append(f"the roles could not be compared: {error.message}")
            continue
        if stored is not None:
            found[target.shard] = stored
            present = read_globals(locked.connections[target.shard])
            lines = find_differences(stored, present)
            differences |= dict.fromkeys(f"node {target.node.id}: {line}" for line in lines)
    return found, list(differences)


def _volumes_left(
    plan: RestorePlan,
    targets: Iterable[Target],
    entries: Mapping[str, Sequence[ArchiveEntry]],
    begun: Mapping[str, BegunShard],
) -> dict[str, ShardVolume]:
    """Return what is left to restore of each shard whose DDL has `entries`; all are keyed by shard."""
    volumes = {one.shard: _volume_of(plan, one, entries[one.shard]) for one in targets if one.shard in entries}
    return volumes | {shard: begun[shard].volume_left(volume) for shard, volume in volumes.items() if shard in begun}


def _estimate(
    plan: RestorePlan, targets: Iterable[Target], volumes: Collection[ShardVolume], *, is_resumed: bool
) -> Estimate:
    rows = sum(volume.row_count for volume in volumes)
    basis, figures = read_measured(plan.store.open(), plan.decided, rows) or ("", None)
    return estimate_restore(
        volumes,
        figures,
        basis,
        is_resumed=is_resumed,
        needs_spark=plan.needs_spark,
        load=machine_load(),
        bytes_per_second=restore_limit(target.node for target in targets),
    )


def _volume_of(plan: RestorePlan, target: Target, entries: Sequence[ArchiveEntry]) -> ShardVolume:
    sources = target.sources or (target.source,)
    volumes = [
        measure_volume(plan.chain, source, plan.request.tables.of(plan.chain.groups(source)), entries)
        for source in sources
    ]
    volume = volumes[0]
    if plan.topology:
        volume = combine_volumes(volumes, [plan.topology.shares(source, target.shard) for source in sources])
    if plan.request.scope.schema_only:
        return without_rows(volume)
    if plan.request.scope.data_only:
        # The volume does not include the existing database's indexes and other tables.
        volume = replace(volume, is_rough=True)
    return volume if plan.request.is_with_all_rows else without_large_objects(volume)


def _space_of(
    plan: RestorePlan, target: Target, connection: psycopg.Connection[Any], volume: ShardVolume
) -> DatabaseSpace:
    """Return the space that a target's database still needs, in addition to rows that an earlier process loaded."""
    (loaded,) = connection.execute(LOADED_QUERY, (target.loading,)).fetchone() or (0,)
    folder = plan.superusers.data_directories[target.shard] if plan.superusers else find_data_directory(connection)
    is_hidden = plan.superusers is None and is_data_directory_hidden(connection)
    return DatabaseSpace(target.node, folder, max(volume.size_bytes - loaded, 0), volume.is_rough, is_hidden)


def check_targets(
    locked: LockedTargets, targets: Iterable[Target], server_globals: Mapping[str, ServerGlobals], *, is_resumed: bool
) -> tuple[dict[str, list[str]], dict[str, PlannedDatabase]]:
    """Add the obstacles to restoring each shard; return the targets' missing roles and the databases' properties.

    Both results are keyed by shard. With --create-roles, the missing roles include roles of the snapshot's server that
    the database does not use.
    """
    plan, obstacles = locked.plan, locked.obstacles
    chain, request, groups = plan.chain, plan.request, plan.groups
    missing, planned = dict[str, list[str]](), dict[str, PlannedDatabase]()
    for target in targets:
        node, shard, connection = target.node, target.shard, locked.connections[target.shard]
        newest = max(target.sources or (shard,), key=lambda one: chain.baseline[one].server_version)
        source = chain.baseline[newest]
        check_target(
            target,
            connection,
            source,
            obstacles,
            request.into_tables,
            replace=request.replace,
            is_partial=request.tables.is_partial,
            is_resumed=is_resumed,
        )
        check_locales(node, connection, source, chain.database_facts(target.source), obstacles)
        with obstacles.collecting(node.id):
            check_xml(target, connection, source, find_xml_columns(groups[shard], chain.tables(target.source)))
        with obstacles.collecting(node.id):
            roles = request.scope.roles_needed(plan.roles(target))
            if request.create_roles and (stored := server_globals.get(shard)):
                replaced = dict(request.scope.role_map)
                others = (role.name for role in stored.roles if not role.superuser and role.name not in replaced)
                roles = list(dict.fromkeys([*roles, *others]))
            planned[shard] = plan_database(plan, target, connection)
            database = planned[shard].ddl
            of_database = [one for one in (database.roles if database else ()) if one not in roles]
            may_create, by_superuser = request.create_roles, plan.superusers is not None
            missing[shard] = missing_roles(
                target,
                connection,
                roles,
                source.encoding,
                of_database=of_database,
                may_create=may_create,
                by_superuser=by_superuser,
            )
    return missing, planned


def left_rows(plan: RestorePlan) -> dict[str, str]:
    """List the rows, sequences and large objects that a restore of only the DDL, or of some tables, omits.

    The lines are mapped to the texts that replace them if they are many, as in CheckedDdl.counted. The rows of
    extension tables are restored only with the complete DDL.
    """
    request, lines = plan.request, dict[str, str]()
    if not request.is_with_all_rows:
        counts = count_by_node(plan.chain.full)
        kept = " except those of extensions" if plan.chain.last.extension_rows else ""
        if request.scope.schema_only:
            lines[f"all rows, and the values of all sequences{kept}"] = ""
        where = f"large objects on {COUNT} shards"
        lines |= {f"{counts[source]} large objects on {source}": where for source in plan.sources if counts.get(source)}
        if request.tables.is_partial:
            for shard in plan.sources:
                groups = plan.chain.groups(shard)
                if others := sorted({one.name for one in groups} - {one.name for one in request.tables.of(groups)}):
                    amount = "another table" if len(others) == 1 else f"{len(others):,} other tables"
                    line = f"rows of {amount} on {shard}: {list_some(others, OTHERS_MAX)}"
                    lines[line] = f"rows of other tables on {COUNT} shards"
    if request.tables.is_partial or request.scope.data_only:
        filled = {stored.node for stored in plan.chain.last.extension_rows}
        where = f"rows of extension tables on {COUNT} shards"
        lines |= {f"rows of extension tables on {shard}": where for shard in plan.sources if shard in filled}
    return lines


def _lines_of_replication(target: Target, others: Replication) -> list[str]:
    """Say what becomes of logical replication that others have set up for a database that is set aside."""
    lines: list[str] = []
    if others.slots:
        drops = " ".join(f"SELECT pg_drop_replication_slot({literal(slot)});" for slot in others.slots)
        lines.append(
            f"{target.node.id}: logical slots of others stay in {target.aside} and retain WAL, and their clients can't"
            f" use them in the new database: {', '.join(others.slots)}; once nobody needs them: {drops}"
        )
    if others.subscriptions:
        ends = " ".join(f"ALTER SUBSCRIPTION {quote(name)} DISABLE;" for name in others.subscriptions)
        lines.append(
            f"{target.node.id}: subscriptions of the old database stay in {target.aside} and go on there:"
            f" {', '.join(others.subscriptions)}; to end that, in {target.aside}: {ends}"
        )
    return lines


def find_replaced(locked: LockedTargets, targets: Iterable[Target]) -> list[str]:
    """List the databases that `--replace` will set aside and the chains that will end with them, one per line."""
    plan = locked.plan
    if not plan.request.replace:
        return []
    lines: list[str] = []
    slots: set[str] = set()
    baseline = [identity for identity in plan.chain.nodes if identity.backup_of is None]
    counts = Counter(identity.place for identity in baseline)
    shards = {identity.place: identity.node for identity in baseline if counts[identity.place] == 1}
    for target in targets:
        connection = locked.connections[target.shard]
        if plan.request.scope.data_only or target.database not in list_databases(connection):
            continue
        lines.append(f"{target.node.id}: database {target.database} will be set aside as {target.aside}")
        (place,) = connection.execute(PLACE_QUERY, (target.database,)).fetchone() or ("",)
        if (shard := shards.get(place, target.shard)) not in (target.shard, *target.sources):
            lines.append(
                f"{target.node.id}: in the snapshot, this server and database are those of {shard}, and they will get"
                f" the rows of {', '.join(target.sources) or target.shard}: check the ids in"
                f" {plan.target_fleet.path.name}"
            )
        slots.update(find_slots(connection, target.database))
        lines += _lines_of_replication(target, read_replication(connection, target.database))
    owners = read_slot_owners(plan.store.open())
    found = {slot: owners.owner_of(slot) for slot in slots}
    chains = {f"chain {owner.snapshot}" if owner else f"the chain of slot {slot}" for slot, owner in found.items()}
    return lines + [f"{chain} will end: it will get no more increments" for chain in sorted(chains)]
