"""`restore`: load the fleet's databases as of a cut beside the existing ones, and swap them in at the end.

Until the last step no restored database has its real name. A restore that ends before that drops its databases; those
that a killed restore left are dropped by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg

from fleet.nodes.sessions import in_parallel
from fleet.nodes.watch import watch_nodes
from fleet.progress import Progress
from fleet.tables.groups import Group
from restore.build import check_rows, create_tables, finish_database, read_scripts, remove_dependents
from restore.load_target import LoadTarget
from restore.plan import RestorePlan
from restore.report import NodeReport, RestoreReport
from restore.request import RestoreRequest
from restore.roles import create_roles, missing_roles
from restore.target import (
    Target,
    TargetUnfitError,
    check_target,
    check_xml,
    create_database,
    drop_loading,
    find_xml_columns,
    lock_targets,
    release_slots,
    swap_databases,
)
from snapshots.operations.leases import hold_lease
from snapshots.operations.spark_jobs import SparkSource
from snapshots.records.chain import Chain
from snapshots.records.large_objects import count_by_node
from storage.errors import SnapshotError
from storage.location import StoreLocation
from storage.store import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def preview_restore(plan: RestorePlan, progress: Progress) -> dict[str, list[str]]:
    """Make every check of a restore, changing nothing; return the roles that each shard's target lacks.

    Raises what check_targets and lock_targets raise.
    """
    progress.step("check targets")
    with lock_targets(plan.targets) as connections:
        return check_targets(plan.targets, plan.chain, plan.groups, plan.request, connections)


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
    ):
        missing = check_targets(targets, chain, groups, plan.request, connections)
        with hold_lease(store, plan.intent, progress):
            scripts, report.left_out = read_all_scripts(store, chain, groups.keys(), is_partial=is_partial)
            spark.begin()
            try:
                progress.step("create databases")
                in_parallel(
                    lambda one: create_database(one, connections[one.shard], chain.baseline[one.shard]), targets
                )
                for target in targets:
                    report.roles_created += create_roles(target, missing[target.shard])
                databases = create_all_tables(targets, groups, scripts)
                load_began = time.monotonic()
                session = spark.session()
                # A target that falls silent cancels the jobs.
                with watch.on_silence(session.sparkContext.cancelAllJobs):
                    report.left_out += load_databases(
                        session, chain, databases, plan.store, progress, is_partial=is_partial
                    )
                load_seconds = time.monotonic() - load_began
                report.nodes = finish_databases(targets, databases, scripts, chain, progress)
                progress.step("swap databases")
                report.aside = swap_databases(targets, connections)
            except BaseException:
                with suppress(SnapshotError):
                    drop_loading(targets)
                raise
            if report.aside:
                report.slots_dropped, report.slots_left = release_slots(targets, connections)
    report.rows = sum(node.rows for node in report.nodes)
    for node in report.nodes:
        node.seconds += load_seconds
    report.seconds = time.monotonic() - began
    return report


def read_all_scripts(
    store: ObjectStore, chain: Chain, shards: Iterable[str], *, is_partial: bool
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Read every shard's DDL, by section; if only some groups are restored, return what is left out for that, too."""
    found: dict[str, dict[str, str]] = {}
    left_out: list[str] = []
    for shard in shards:
        scripts = read_scripts(store, chain, shard)
        if is_partial:
            scripts, dependents = remove_dependents(scripts)
            left_out += [f"{name} on {shard}" for name in dependents]
        found[shard] = scripts
    return found, left_out


def create_all_tables(
    targets: Iterable[Target], groups: Mapping[str, Iterable[Group]], scripts: Mapping[str, Mapping[str, str]]
) -> dict[str, LoadTarget]:
    """Create the tables of every shard in its database; return the databases to load, by shard."""

    def create(target: Target) -> LoadTarget:
        return create_tables(target.loaded, scripts[target.shard], groups[target.shard])

    shards = [target.shard for target in targets]
    return dict(zip(shards, in_parallel(create, targets), strict=True))


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
    large_objects = count_by_node(chain.full)
    if is_partial:
        return [f"{count} large objects on {shard}" for shard, count in large_objects.items()]
    if large_objects:
        load_large_objects(session, chain.full, databases, store, progress)
    return []


def finish_databases(
    targets: Iterable[Target],
    databases: Mapping[str, LoadTarget],
    scripts: Mapping[str, Mapping[str, str]],
    chain: Chain,
    progress: Progress,
) -> list[NodeReport]:
    """Check every database's row counts, then create its indexes and everything else that follows the rows."""
    progress.step("indexes and constraints")

    def finish(target: Target) -> NodeReport:
        began = time.monotonic()
        database = databases[target.shard]
        rows = check_rows(database)
        for problem in finish_database(database, scripts[target.shard], chain.sequences(target.shard)):
            progress.note(problem)
        return NodeReport(target.node.id, target.database, rows, time.monotonic() - began)

    return in_parallel(finish, targets)
