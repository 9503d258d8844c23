"""`restore`: the fleet's databases as they were at a cut, loaded beside what is there and swapped in at the end.

Until the last step nothing exists under a real name, and whatever ends the restore before that drops its databases. The
next restore drops what a restore that died has left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.nodes.sessions import in_parallel
from fleet.nodes.watch import Watch, watch_nodes
from fleet.progress import Progress
from restore.build import check_rows, create_tables, finish_database, read_scripts, without_dependents
from restore.load_target import LoadTarget
from restore.plan import RestorePlan
from restore.report import NodeReport, RestoreReport
from restore.roles import create_roles, missing_roles
from restore.target import (
    Target,
    TargetUnfitError,
    check_target,
    check_xml,
    columns_of_xml,
    create_database,
    drop_loading,
    lock_targets,
    release_slots,
    swap_databases,
)
from snapshots.operations.leases import hold_lease
from snapshots.operations.spark_jobs import SparkSource
from snapshots.records.large_objects import count_by_node
from storage.errors import SnapshotError


def check_restore(plan: RestorePlan, progress: Progress) -> dict[str, list[str]]:
    """Make every check of a restore, changing nothing; return the roles that each shard's target lacks."""
    progress.step("check targets")
    with lock_targets(plan.targets) as connections:
        return check_targets(plan, connections)


def check_targets(plan: RestorePlan, connections: Mapping[str, psycopg.Connection[Any]]) -> dict[str, list[str]]:
    """Raise unless every target can take its shard; return the roles that it lacks, by shard.

    Raises TargetUnfitError, TargetExistsError.
    """
    baseline, request = plan.chain.baseline, plan.request
    places: dict[str, str] = {}
    missing: dict[str, list[str]] = {}
    for target in plan.targets:
        shard, connection = target.shard, connections[target.shard]
        source = baseline[shard]
        place = check_target(target, connection, source, replace=request.replace)
        check_xml(target, connection, source, columns_of_xml(plan.groups[shard], plan.chain.tables(shard)))
        roles = plan.chain.roles(shard)
        missing[shard] = missing_roles(target, connection, roles, source.encoding, may_create=request.create_roles)
        if place in places:
            raise TargetUnfitError(
                f"nodes {places[place]} and {target.node.id} are the same database of one server",
                hint="give every shard of the target a database of its own",
            )
        places[place] = target.node.id
    return missing


def restore_fleet(plan: RestorePlan, spark: SparkSource, progress: Progress) -> RestoreReport:
    """Restore every shard, all in parallel; nothing is visible before all of it is."""
    began = time.monotonic()
    report = plan.report()
    progress.step("check targets")
    with (
        watch_nodes(target.maintenance for target in plan.targets) as watch,
        lock_targets(plan.targets) as connections,
    ):
        missing = check_targets(plan, connections)
        with hold_lease(plan.store.open(), plan.intent, progress):
            scripts, report.left_out = read_all_scripts(plan)
            spark.begin()
            try:
                progress.step("create databases")
                baseline = plan.chain.baseline
                in_parallel(lambda one: create_database(one, connections[one.shard], baseline[one.shard]), plan.targets)
                for target in plan.targets:
                    report.roles_created += create_roles(target, missing[target.shard])
                loaded = load_databases(plan, scripts, spark, watch, progress)
                report.left_out += loaded.left_out
                report.nodes = finish_databases(plan, scripts, loaded, progress)
                progress.step("publish")
                report.aside = swap_databases(plan.targets, connections)
            except BaseException:
                with suppress(SnapshotError):
                    drop_loading(plan.targets)
                raise
            if report.aside:
                report.slots_dropped, report.slots_left = release_slots(plan.targets, connections)
    report.rows = sum(node.rows for node in report.nodes)
    report.seconds = time.monotonic() - began
    return report


@dataclass(frozen=True, slots=True)
class LoadedDatabases:
    """The databases with their rows, by shard; how long loading took, and what of the rows was left out."""

    targets: Mapping[str, LoadTarget]
    seconds: float
    left_out: list[str]


def read_all_scripts(plan: RestorePlan) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Read every shard's DDL, by section; where only some groups are restored, name what is left out for that."""
    store = plan.store.open()
    found: dict[str, dict[str, str]] = {}
    left_out: list[str] = []
    for target in plan.targets:
        scripts = read_scripts(store, plan.chain, target.shard)
        if plan.request.groups:
            scripts, dependents = without_dependents(scripts)
            left_out += [f"{name} on {target.shard}" for name in dependents]
        found[target.shard] = scripts
    return found, left_out


def load_databases(
    plan: RestorePlan,
    scripts: Mapping[str, Mapping[str, str]],
    spark: SparkSource,
    watch: Watch,
    progress: Progress,
) -> LoadedDatabases:
    """Create the tables of every shard and load their rows; the jobs are cancelled when a target falls silent."""
    groups = plan.groups
    created = in_parallel(lambda one: create_tables(one.loaded, scripts[one.shard], groups[one.shard]), plan.targets)
    targets = {one.shard: target for one, target in zip(plan.targets, created, strict=True)}
    # Imported once the checks have passed: a refusal must not wait for Arrow.
    from restore.large_objects import load_large_objects
    from restore.rows import load_rows

    began = time.monotonic()
    session = spark.session()
    left_out: list[str] = []
    with watch.on_silence(session.sparkContext.cancelAllJobs):
        load_rows(session, plan.chain, targets, plan.store, progress)
        counts = count_by_node(plan.chain.full)
        if plan.request.groups:
            left_out = [f"{count} large objects on {shard}" for shard, count in counts.items()]
        elif counts:
            load_large_objects(session, plan.chain.full, targets, plan.store, progress)
    return LoadedDatabases(targets, time.monotonic() - began, left_out)


def finish_databases(
    plan: RestorePlan, scripts: Mapping[str, Mapping[str, str]], loaded: LoadedDatabases, progress: Progress
) -> list[NodeReport]:
    """Count every database's rows, then build its indexes and all else that comes after them."""
    progress.step("indexes and constraints")

    def finish(target: Target) -> NodeReport:
        began = time.monotonic()
        database = loaded.targets[target.shard]
        rows = check_rows(database)
        for problem in finish_database(database, scripts[target.shard], plan.chain.sequences(target.shard)):
            progress.note(problem)
        return NodeReport(target.node.id, target.database, rows, loaded.seconds + time.monotonic() - began)

    return in_parallel(finish, plan.targets)
