"""`restore`: load the fleet's databases as of a cut beside the existing ones, and swap them in at the end.

Until the last step no restored database has its real name. A restore that ends before that drops its databases; those
that a killed restore left are dropped by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import psycopg

from fleet.nodes.encodings import raw_text
from fleet.nodes.privileges import read_role
from fleet.nodes.sessions import in_parallel
from fleet.nodes.watch import Watch, watch_nodes
from fleet.progress import Progress
from fleet.tables.groups import Group
from restore.against_ddl import check_against_ddl
from restore.build import check_rows, create_tables, finish_database, read_shard_ddl
from restore.databases import create_database, drop_loading, find_owner_changes, release_slots, swap_databases
from restore.ddl.ddl import Ddl
from restore.ddl.unprivileged import AdaptedDdl, adapt_ddl
from restore.load_target import LoadTarget
from restore.plan import RestorePlan
from restore.rehearsal import check_memberships, read_our_name, rehearse
from restore.report import NodeReport, RestoreReport
from restore.request import RestoreRequest
from restore.roles import create_roles, missing_roles, name_bytes
from restore.target import Target, TargetUnfitError, check_target, check_xml, find_xml_columns, lock_targets
from snapshots.operations.leases import hold_lease
from snapshots.operations.spark_jobs import SparkSource
from snapshots.records.chain import Chain
from snapshots.records.large_objects import count_by_node
from storage.errors import SnapshotError
from storage.location import StoreLocation
from storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class RestorePreview:
    """What a restore would do: the roles that each shard's target lacks, and what it would leave out.

    `untried` are the nodes where our role is not a superuser: only the restore itself tries the DDL there, and compares
    the owners of large objects.
    """

    roles_missing: Mapping[str, list[str]]
    left_out: list[str]
    untried: list[str]


def preview_restore(plan: RestorePlan, progress: Progress) -> RestorePreview:
    """Make every check of a restore that changes nothing.

    Raises what check_targets and lock_targets raise.
    """
    progress.step("check targets")
    with lock_targets(plan.targets) as connections, TemporaryDirectory(prefix="cutline-ddl-") as folder:
        missing = check_targets(plan.targets, plan.chain, plan.groups, plan.request, connections)
        ddl, left_out = read_all_ddl(plan.store.open(), plan, connections, Path(folder))
        if plan.request.groups:
            left_out += left_large_objects(plan.chain)
        untried = [target.node.id for target in plan.targets if isinstance(ddl[target.shard], AdaptedDdl)]
        return RestorePreview(missing, left_out, untried)


def check_targets(
    targets: Iterable[Target],
    chain: Chain,
    groups: Mapping[str, Iterable[Group]],
    request: RestoreRequest,
    connections: Mapping[str, psycopg.Connection[Any]],
) -> dict[str, list[str]]:
    """Raise unless every target can take its shard; return the roles that it lacks, by shard.

    `groups` and `connections` are by shard. Raises TargetUnfitError, TargetExistsError.
    """
    places: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for target in targets:
        shard, connection = target.shard, connections[target.shard]
        source = chain.baseline[shard]
        place = check_target(target, connection, source, replace=request.replace)
        check_xml(target, connection, source, find_xml_columns(groups[shard], chain.tables(shard)))
        roles = chain.roles(shard)
        missing[shard] = missing_roles(target, connection, roles, source.encoding, may_create=request.create_roles)
        if place in places:
            raise TargetUnfitError(
                f"nodes {places[place]} and {target.node.id} are the same database of one server",
                hint="give every shard of the target a database of its own",
            )
        places[place] = target.node.id
    return missing


def restore_fleet(plan: RestorePlan, spark: SparkSource, progress: Progress) -> RestoreReport:
    """Restore all shards in parallel; no database has its real name before all are loaded and checked."""
    began = time.monotonic()
    chain, targets, groups, is_partial = plan.chain, plan.targets, plan.groups, bool(plan.request.groups)
    store = plan.store.open()
    report = plan.report()
    progress.step("check targets")
    with (
        watch_nodes(target.maintenance for target in targets) as watch,
        lock_targets(targets) as connections,
        TemporaryDirectory(prefix="cutline-ddl-") as folder,
    ):
        missing = check_targets(targets, chain, groups, plan.request, connections)
        with hold_lease(store, plan.intent, progress):
            ddl, report.left_out = read_all_ddl(store, plan, connections, Path(folder))
            spark.begin()
            try:
                progress.step("create databases")
                report.roles_created = make_databases(plan, connections, missing, ddl, watch)
                databases = create_all_tables(targets, chain, groups, ddl, watch)
                load_began = time.monotonic()
                session = spark.session()
                # A target that falls silent cancels the jobs.
                with watch.on_silence(session.sparkContext.cancelAllJobs):
                    check_large_objects(session, plan, connections, ddl, progress)
                    report.left_out += load_databases(
                        session, chain, databases, plan.store, progress, is_partial=is_partial
                    )
                load_seconds = time.monotonic() - load_began
                progress.step("indexes and constraints")
                report.nodes, problems = finish_databases(targets, databases, ddl, chain, watch)
                for problem in problems:
                    progress.note(problem)
                progress.step("swap databases")
                report.aside = swap_databases(targets, connections)
            except BaseException:
                with suppress(SnapshotError):
                    drop_loading(targets)
                raise
            if report.aside:
                report.owner_changes = find_owner_changes(targets, connections)
                report.slots_dropped, report.slots_left = release_slots(targets, connections)
    report.rows = sum(node.rows for node in report.nodes)
    for node in report.nodes:
        node.seconds += load_seconds
    report.seconds = time.monotonic() - began
    return report


def read_all_ddl(
    store: ObjectStore, plan: RestorePlan, connections: Mapping[str, psycopg.Connection[Any]], folder: Path
) -> tuple[dict[str, Ddl], list[str]]:
    """Read every shard's DDL, as the role of its target can run it; return what is left out for that, too.

    Raises TargetUnfitError if a role may not act as an owner that the DDL names.
    """
    found: dict[str, Ddl] = {}
    left_out: list[str] = []
    for number, target in enumerate(plan.targets):
        shard, connection = target.shard, connections[target.shard]
        ddl = read_shard_ddl(store, plan.chain, shard, folder / f"archive-{number}")
        if plan.request.groups:
            ddl, dependents = ddl.without_dependents()
            left_out += [f"{name} on {shard}" for name in dependents]
        found[shard] = ddl
        if not read_role(target.node, connection).is_super:
            ddl, grants = ddl.without_system_grants()
            left_out += [f"{name} on {shard}: a superuser grants them" for name in grants]
            scripts = ddl.write_scripts(target.maintenance)
            ours = adapt_ddl(scripts, ddl.search_path, read_our_name(target))
            check_memberships(target, connection, ours.roles)
            left_out += [f"publication {name} on {shard}: made by: snapshot init" for name in ours.omitted]
            found[shard] = ours
    return found, left_out


def make_databases(
    plan: RestorePlan,
    connections: Mapping[str, psycopg.Connection[Any]],
    missing: Mapping[str, Iterable[str]],
    ddl: Mapping[str, Ddl],
    watch: Watch,
) -> list[str]:
    """Create the empty databases and the missing roles; return the roles created here, as `node: role`.

    Raises TargetUnfitError if the role of a target may not restore its DDL: that is tried first.
    """

    def create(target: Target) -> None:
        create_database(target, connections[target.shard], plan.chain.baseline[target.shard])

    def try_first(target: Target) -> None:
        adapted = ddl[target.shard]
        if isinstance(adapted, AdaptedDdl):
            rehearse(target, adapted.ddl.scripts, watch)
            create(target)

    in_parallel(create, plan.targets)
    created = [role for target in plan.targets for role in create_roles(target, missing[target.shard])]
    in_parallel(try_first, plan.targets, watch.end_all)
    return created


def create_all_tables(
    targets: Iterable[Target],
    chain: Chain,
    groups: Mapping[str, Iterable[Group]],
    ddl: Mapping[str, Ddl],
    watch: Watch,
) -> dict[str, LoadTarget]:
    """Create the tables of every shard in its database; return the databases to load, by shard."""

    def create(target: Target) -> LoadTarget:
        check = partial(check_against_ddl, chain, target.shard)
        return create_tables(target.loaded, ddl[target.shard], groups[target.shard], check, watch)

    shards = [target.shard for target in targets]
    return dict(zip(shards, in_parallel(create, targets, watch.end_all), strict=True))


def load_databases(
    session: SparkSession,
    chain: Chain,
    databases: Mapping[str, LoadTarget],
    store: StoreLocation,
    progress: Progress,
    *,
    is_partial: bool,
) -> list[str]:
    """Load the rows and, unless the restore is partial, the large objects; return what was left out, a line each."""
    # Imported once the checks have passed: a refusal must not wait for Arrow.
    from restore.large_objects import load_large_objects
    from restore.rows import load_rows

    load_rows(session, chain, databases, store, progress)
    if is_partial:
        return left_large_objects(chain)
    if count_by_node(chain.full):
        load_large_objects(session, chain.full, databases, store, progress)
    return []


def left_large_objects(chain: Chain) -> list[str]:
    """The large objects that a restore of some tables leaves out, a line for each shard."""
    return [f"{count} large objects on {shard}" for shard, count in count_by_node(chain.full).items()]


def check_large_objects(
    session: SparkSession,
    plan: RestorePlan,
    connections: Mapping[str, psycopg.Connection[Any]],
    ddl: Mapping[str, Ddl],
    progress: Progress,
) -> None:
    """Raise TargetUnfitError if a role may not act as an owner or grantor of large objects that are to be restored.

    The stored objects name them, so these are read for it, in Spark tasks. A superuser needs no check.
    """
    shards = count_by_node(plan.chain.full).keys() & {one for one in ddl if isinstance(ddl[one], AdaptedDdl)}
    if plan.request.groups or not shards:
        return
    from restore.large_objects import find_actors

    actors = find_actors(session, plan.chain.full, shards, plan.store, progress)
    for target in plan.targets:
        connection, found = connections[target.shard], actors.get(target.shard, {})
        names = name_bytes(connection, found, plan.chain.baseline[target.shard].encoding)
        check_memberships(target, connection, dict(zip(map(raw_text, names), found.values(), strict=True)))


def finish_databases(
    targets: Iterable[Target],
    databases: Mapping[str, LoadTarget],
    ddl: Mapping[str, Ddl],
    chain: Chain,
    watch: Watch,
) -> tuple[list[NodeReport], list[str]]:
    """Check every database's row counts, then create its indexes and everything else that follows the rows.

    Also returns one line for each materialized view that could not be populated, with the reason.
    """

    def finish(target: Target) -> tuple[NodeReport, list[str]]:
        began, shard = time.monotonic(), target.shard
        rows = check_rows(databases[shard], watch)
        problems = finish_database(databases[shard], ddl[shard], chain.sequences(shard), watch)
        return NodeReport(target.node.id, target.database, rows, time.monotonic() - began), problems

    finished = in_parallel(finish, targets, watch.end_all)
    return [report for report, _ in finished], [problem for _, problems in finished for problem in problems]
