"""Load a restore's databases: create them, their tables, the rows, and what follows the rows.

Each step is done where it is not done yet, as the databases' records tell (restore/targets/database_records.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cutline.fleet.nodes.encodings import raw_text
from cutline.fleet.nodes.free_connections import task_sessions
from cutline.fleet.nodes.sessions import in_parallel
from cutline.restore.against_ddl import check_against_ddl
from cutline.restore.build import FinishedDatabase, count_rows, create_tables, find_load_target, finish_database
from cutline.restore.copies.choice import explain_damage
from cutline.restore.copies.verifying import verify_copies
from cutline.restore.crash_points import RestoreCrashPoint
from cutline.restore.ddl.ddl import Ddl, Refusal
from cutline.restore.ddl.running import DdlRun
from cutline.restore.estimates.model import RestoreStep
from cutline.restore.estimates.tally import indexes_tally, rows_tally, tallying
from cutline.restore.existing_tables import keeping_held, open_tables, verify_keys, verify_rows
from cutline.restore.memberships import check_memberships
from cutline.restore.parts.role_changes import RoleChanges
from cutline.restore.refused import REFUSED_KEPT_MAX, report_refused
from cutline.restore.rehearsal import refuse, rehearse
from cutline.restore.report import NodeReport
from cutline.restore.roles import create_roles, name_bytes
from cutline.restore.rows.ledger import READS_OTHERS, LoadError
from cutline.restore.rows.load_target import LoadTarget
from cutline.restore.run import RestoreRun
from cutline.restore.targets.database_records import Phase
from cutline.restore.targets.databases import create_database, drop_rehearsals
from cutline.restore.targets.target import Target
from cutline.restore.topology.feeds import find_feeds
from cutline.snapshots.records.large_objects import count_by_node
from cutline.snapshots.records.server_globals import ServerGlobals
from cutline.snapshots.tasks.spark_jobs import SparkSource
from cutline.storage.errors import SnapshotError
from cutline.wal.segments.damage import ObjectDamagedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def load_all(
    run: RestoreRun,
    ddl: Mapping[str, Ddl],
    missing: Mapping[str, list[str]],
    server_globals: Mapping[str, ServerGlobals],
    spark: SparkSource,
) -> None:
    """Bring every database to the phase FINISHED; `missing` are the roles to create, by shard, as in the globals."""
    plan, progress, runs = run.plan, run.progress, dict[str, DdlRun]()
    check_sources_apart(run, spark)
    if plan.request.scope.data_only:
        progress.step("prepare tables")
        databases = open_tables(run)
        # All have begun, or begun again: from here on what is gone is lost.
        for target in plan.targets:
            if run.records[target.shard].undoing:
                run.enter(target, run.records[target.shard].phase, undoing=False)
    else:
        progress.step("create databases")
        make_databases(run, missing, server_globals, ddl)
        databases, runs = create_all_tables(run, ddl)
    with keeping_held(run):
        _load_and_finish(run, databases, runs, spark)


def _load_and_finish(
    run: RestoreRun, databases: Mapping[str, LoadTarget], runs: Mapping[str, DdlRun], spark: SparkSource
) -> None:
    plan, progress = run.plan, run.progress
    began = time.monotonic()
    loaded: Mapping[str, float] = {}
    if run.shards_in(Phase.LOADING) and not plan.request.scope.schema_only:
        progress.step("start Spark")
        session = spark.session()
        tallies = [rows_tally(one.node, one.ledger, run.row_count(shard)) for shard, one in databases.items()]
        # A target that falls silent cancels the jobs.
        with run.watch.on_silence(session.sparkContext.cancelAllJobs), tallying(progress, tallies) as loaded:
            check_large_objects(session, run, runs)
            load_databases(session, run, databases)
        progress.reached(RestoreCrashPoint.ROWS_LOADED)
    seconds = time.monotonic() - began
    progress.step("verify foreign keys" if plan.request.scope.data_only else "indexes and constraints")
    finish_databases(run, databases, runs)
    for node in run.report.nodes:
        if run.pace:
            times = {RestoreStep.ROWS: loaded.get(node.node, 0.0), RestoreStep.INDEXES: node.seconds}
            run.pace.end_node(node.node, node.rows, times)
        node.seconds += seconds


def choose_verified_copies(run: RestoreRun, spark: SparkSource) -> None:
    """Verify every object that is needed, and choose from which copies the rows are taken."""
    plan = run.plan
    run.progress.step("start Spark")
    session = spark.session()
    with run.watch.on_silence(session.sparkContext.cancelAllJobs):
        copies = verify_copies(session, plan.chain, plan.wanted, plan.store, run.progress)
    run.plan = replace(plan, copies=copies)
    run.report.borrowed, run.report.damaged = run.plan.borrowed_rows, copies.damaged


@contextmanager
def naming_lost_rows(run: RestoreRun) -> Iterator[None]:
    """Let the error for a damaged object say which rows are lost without it, and what can be restored still."""
    try:
        yield
    except ObjectDamagedError as error:
        plan = run.plan
        explained = explain_damage(plan.store.open(), plan.chain, plan.wanted, error)
        if explained is error:
            raise
        raise explained from error


@contextmanager
def naming_steps(run: RestoreRun) -> Iterator[None]:
    """Let the error of a CHECK that may read other rows name the commands by which these are there before it."""
    try:
        yield
    except SnapshotError as error:
        if READS_OTHERS not in error.hint:
            raise
        again = "drop it, repeat the command, then add it again"
        if not run.plan.request.scope.data_only and (steps := run.plan.steps):
            again = f"restore in steps: {steps[0]}; drop the CHECK; {steps[1]}; add it again"
        error.hint = error.hint.replace(READS_OTHERS, f"{READS_OTHERS}: {again}")
        raise


def check_sources_apart(run: RestoreRun, spark: SparkSource) -> None:
    """Raise KeyConflictError if rows of several sources can't be in one target, before anything is created.

    A restore that is resumed with something created has passed this.
    """
    topology = run.plan.topology
    if topology is None or len(topology.sources) == 1 or run.records:
        return
    from cutline.restore.topology.conflicts import check_conflicts

    run.progress.step("start Spark")
    session = spark.session()
    with run.watch.on_silence(session.sparkContext.cancelAllJobs):
        check_conflicts(session, run.plan.chain, topology, run.plan.store, run.progress)


def make_databases(
    run: RestoreRun,
    missing: Mapping[str, list[str]],
    server_globals: Mapping[str, ServerGlobals],
    ddl: Mapping[str, Ddl],
) -> None:
    """Create the empty databases and the missing roles, rehearse the DDL, and make the databases again.

    Raises TargetUnfitError or SchemaLoadError naming what is refused, unless the restore is to do without it.
    """
    kept = {one.shard for one in run.shards_in(Phase.LOADING, Phase.INDEXING, Phase.FINISHED, Phase.PUBLISHED)}
    targets = [target for target in run.plan.targets if target.shard not in kept]
    superusers = run.plan.superusers

    def create(target: Target) -> None:
        drop_rehearsals(target, run.connections[target.shard])
        run.records.pop(target.shard, None)
        run.created.add(target.shard)
        chosen = ddl[target.shard]
        source = run.plan.chain.baseline[target.source]
        create_database(target, run.connections[target.shard], source, chosen.tablespace)
        run.enter(target, Phase.CREATED, **_ending_of(chosen))
        if superusers is not None:
            superusers.run_beforehand(target, chosen, allows_refused=run.allows_refused)

    def try_first(target: Target) -> list[Refusal]:
        return rehearse(target, ddl[target.shard], run.watch)

    in_parallel(create, targets)
    for target in targets:
        created, notes = create_roles(target, missing[target.shard], superusers, server_globals.get(target.shard))
        run.report.roles_created += created
        run.report.warnings += notes
    run.progress.reached(RestoreCrashPoint.ROLES_CREATED)
    refused = dict(zip(targets, in_parallel(try_first, targets, run.watch.end_all), strict=True))
    if not run.allows_refused:
        refuse(refused, run.connections, run.plan.steps)
    in_parallel(create, targets)


def _ending_of(ddl: Ddl) -> dict[str, Any]:
    """What the record says that the database gets at the end."""
    if (database := ddl.database) is None:
        return {}
    properties = database.properties
    return {
        "owner": database.owner,
        "comment": properties.comment,
        "is_template": properties.is_template,
        "own_privileges": database.own_privileges,
    }


def create_all_tables(run: RestoreRun, ddl: Mapping[str, Ddl]) -> tuple[dict[str, LoadTarget], dict[str, DdlRun]]:
    """Create the tables of every empty database; return the databases to load or to finish, and their DDL, by shard."""
    chain, groups = run.plan.chain, run.plan.groups

    def create(target: Target) -> tuple[LoadTarget, DdlRun]:
        shard = target.shard
        ledger = run.records[shard].ledger
        if run.records[shard].phase != Phase.CREATED and ledger:
            return find_load_target(target.loaded, ddl[shard], groups[shard], ledger, run.watch)
        check = partial(check_against_ddl, chain, target.source)
        created, ddl_run = create_tables(target.loaded, ddl[shard], groups[shard], check, run.watch)
        run.enter(target, Phase.LOADING, ledger=created.ledger)
        return created, ddl_run

    targets = run.shards_in(Phase.CREATED, Phase.LOADING, Phase.INDEXING)
    made = dict(zip((one.shard for one in targets), in_parallel(create, targets, run.watch.end_all), strict=True))
    return {shard: one for shard, (one, _) in made.items()}, {shard: one for shard, (_, one) in made.items()}


def load_databases(session: SparkSession, run: RestoreRun, databases: Mapping[str, LoadTarget]) -> None:
    """Load the rows and, unless the restore is partial, the large objects."""
    # Imported once the checks have passed: a refusal must not wait for Arrow.
    from cutline.restore.rows.jobs import count_parts, load_rows
    from cutline.restore.rows.large_objects import load_large_objects

    plan, targets = run.plan, run.shards_in(Phase.LOADING)
    sessions = task_sessions({target.node: run.connections[target.shard] for target in targets})
    parts = max(run.records[target.shard].parts for target in targets) or count_parts(
        session, len(plan.topology.sources if plan.topology else plan.targets), sessions, is_routed=bool(plan.topology)
    )
    for target in targets:
        if run.records[target.shard].parts != parts:
            run.enter(target, Phase.LOADING, parts=parts)
    databases = {
        target.shard: replace(databases[target.shard], task_sessions=sessions[target.node.id]) for target in targets
    }
    shards = tuple(target.shard for target in plan.targets)
    loads = find_feeds(plan.chain, shards, plan.topology, databases, parts)
    loads = replace(loads, chosen=plan.chosen)
    placed = load_rows(session, plan.chain, loads, plan.store, run.progress)
    if plan.topology:
        run.placed = {one.shard: placed[number] for number, one in enumerate(plan.targets)}
    if count_by_node(plan.chain.full) and plan.request.is_with_all_rows:
        scope = plan.request.scope
        roles = RoleChanges(dict(scope.role_map), scope.no_owner)
        load_large_objects(session, plan.chain.full, databases, plan.store, run.progress, roles)


def check_large_objects(session: SparkSession, run: RestoreRun, runs: Mapping[str, DdlRun]) -> None:
    """Raise TargetUnfitError if a role may not act as an owner or grantor of large objects that are to be restored.

    The stored objects name them, so these are read for it, in Spark tasks. A superuser needs no check.
    """
    plan = run.plan
    shards = count_by_node(plan.chain.full).keys() & {shard for shard, one in runs.items() if one.ddl.is_adapted}
    if not plan.request.is_with_all_rows or plan.request.scope.no_owner or not shards:
        return
    from cutline.restore.rows.large_objects import find_actors

    actors = find_actors(session, plan.chain.full, shards, plan.store, run.progress)
    names = dict(plan.request.scope.role_map)
    for target in plan.targets:
        connection, found = run.connections[target.shard], dict[str, list[str]]()
        for role, things in actors.get(target.shard, {}).items():
            found.setdefault(names.get(role, role), []).extend(things)
        stored = name_bytes(connection, found, plan.chain.baseline[target.source].encoding)
        check_memberships(target, connection, dict(zip(map(raw_text, stored), found.values(), strict=True)))


def finish_databases(run: RestoreRun, databases: Mapping[str, LoadTarget], runs: Mapping[str, DdlRun]) -> None:
    """Check every loaded database's row counts, then create its indexes and everything else that follows the rows.

    Notes each materialized view that could not be populated, with the reason, and what could not be analyzed. Raises
    DdlRefusedError, when everything else is done, if statements are refused and the restore is not to do without them.
    """
    watch, scope = run.watch, run.plan.request.scope

    def finish(target: Target) -> FinishedDatabase:
        database, shard = databases[target.shard], target.shard
        began = time.monotonic()
        if (is_loading := run.records[shard].phase == Phase.LOADING) or scope.data_only:
            # Existing tables may have been written to since another process has counted.
            rows = verify_rows(run, target, database) if scope.data_only else count_rows(database, watch)
            check_placed(run, target, rows)
            if is_loading:
                run.enter(target, Phase.INDEXING, rows=rows)
        if scope.data_only:
            done = FinishedDatabase(verify_keys(run, target, database))
        else:
            sequences = () if scope.schema_only else run.plan.sequences(target)
            done = finish_database(
                database,
                runs[shard],
                sequences,
                run.plan.moves(target),
                analyzes=scope.analyze,
                allows_refused=run.allows_refused,
            )
        if done.is_finished:
            run.enter(target, Phase.FINISHED, refused=tuple(one.label for one in done.refusals[:REFUSED_KEPT_MAX]))
        seconds[shard] = time.monotonic() - began
        return done

    seconds: dict[str, float] = {}
    targets = [target for target in run.plan.targets if target.shard in databases]
    for target in run.shards_in(Phase.INDEXING, Phase.FINISHED, Phase.PUBLISHED):
        check_placed(run, target, run.records[target.shard].rows)
    tallies = [
        indexes_tally(databases[one.shard].node, volume.indexes, volume.rows)
        for one in targets
        if (volume := run.volumes.get(one.shard)) and volume.indexes
    ]
    with tallying(run.progress, tallies):
        finished = dict(zip(targets, in_parallel(finish, targets, watch.end_all), strict=True))
    for done in finished.values():
        for problem in done.problems:
            run.progress.note(problem)
    run.report.nodes = [
        NodeReport(one.node.id, one.database, run.records[one.shard].rows, seconds.get(one.shard, 0.0))
        for one in run.plan.targets
    ]
    report_refused(run, finished)


def check_placed(run: RestoreRun, target: Target, rows: int) -> None:
    """Raise LoadError if a target has another number of `rows` than routes have led to it from all sources.

    A process that has loaded no rows knows nothing of that: it resumes what another one has checked.
    """
    if run.placed and rows != run.placed[target.shard]:
        raise LoadError(
            f"node {target.node.id}: {rows} rows are loaded, but the routes lead {run.placed[target.shard]} rows of"
            f" {', '.join(target.sources)} to it",
            hint="see whether something else writes to the restored database, then repeat the command",
            details={"node": target.node.id, "rows": rows, "placed": run.placed[target.shard]},
        )
