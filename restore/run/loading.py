"""Load a restore's databases: create them and their tables, load the rows, and create the objects that follow.

A restore into existing tables can be undone, by emptying the tables, until the decision to keep the rows. Until then
nothing else in these databases changes; sequences get their values afterwards.

Steps that are complete according to the databases' records (restore/targets/databases.py) are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from msgspec import structs
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import Node, restore_limit
from cutline.fleet.messages import CHECK_NAMED, IN_STEPS, SAME_TARGET, check_command
from cutline.nodes.connections import NodeUnreachableError, connect, raising_unreachable
from cutline.nodes.daemon_threads import THREADS_MAX
from cutline.nodes.encodings import raw_text
from cutline.nodes.free_connections import task_sessions
from cutline.nodes.groups import qualify
from cutline.nodes.problems import find_connect_problems
from cutline.nodes.sessions import in_parallel, let_end
from cutline.restore.ddl.ddl import Ddl, Refusal, SchemaLoadError, ending, find_settable, set_sequences
from cutline.restore.ddl.entries import ROWS_OF_VIEW
from cutline.restore.ddl.running import DdlRun
from cutline.restore.ddl.session_settings import settings_for_rows
from cutline.restore.estimates.estimate import RestoreStep
from cutline.restore.estimates.pace import indexes_tally, rows_tally, tallying
from cutline.restore.plan.checked_ddl import CheckedDdl, count_views
from cutline.restore.plan.copies import explain_damage, verify_copies
from cutline.restore.plan.plan import LockedTargets, RestorePlan
from cutline.restore.plan.report import NodeReport
from cutline.restore.plan.roles import BOOTSTRAP, check_memberships, create_roles, name_bytes
from cutline.restore.plan.topology import find_feeds
from cutline.restore.rows.expected_tasks import ExpectedTasks
from cutline.restore.rows.fill_checks import (
    WantedRows,
    check_tables,
    find_unfilled,
    find_unvalidated,
    find_used,
    find_views,
)
from cutline.restore.rows.filled_tables import TablesUnfitError, find_filled, named, oids_of
from cutline.restore.rows.filling import Filling
from cutline.restore.rows.generated_columns import Recomputed, recompute_generated
from cutline.restore.rows.held_tables import await_writers, hold_tables, in_use, refusing_waiting
from cutline.restore.rows.jobs import find_roots
from cutline.restore.rows.load import LoadError, LoadTarget, find_load_paths
from cutline.restore.rows.references import LOCK_SECONDS_MAX, find_empty_referenced, verify_references
from cutline.restore.run.build import (
    FinishedDatabase,
    analyze,
    count_rows,
    create_tables,
    find_load_target,
    finish_database,
)
from cutline.restore.run.refused import REFUSED_KEPT_MAX, report_refused
from cutline.restore.run.rehearsal import is_worthwhile, refuse, rehearse
from cutline.restore.run.run import RestoreRun
from cutline.restore.scope.scope import RoleChanges
from cutline.restore.targets.databases import Phase, RestoreCrashPoint, create_database, drop_rehearsals, write_record
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.target import Target, check_xml, databases, find_xml_columns, suffix_of
from cutline.snapshots.ddl.database_facts import having_path, read_search_path, read_session_settings
from cutline.snapshots.ddl.ddl_archive import SEQUENCE
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.ddl.server_globals_object import read_stored_globals
from cutline.snapshots.records.commit import Sequence, count_by_node
from cutline.snapshots.records.server_globals import ServerGlobals
from cutline.spark.driver_session import cancel_jobs
from cutline.spark.spark_jobs import SparkSource, sessions_for, start_session
from cutline.storage.errors import SnapshotError
from cutline.wal.segments.damage import ObjectDamagedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

IN_RECOVERY = "SELECT pg_is_in_recovery()"
# Load tasks may use at least this many sessions before one of them goes to indexes of tables that are complete.
EARLY_SESSIONS_FROM = 4


def check_existing(locked: LockedTargets, targets: Iterable[Target]) -> CheckedDdl:
    """Add an obstacle for everything that prevents loading into the targets' tables; return the omissions."""
    checked = CheckedDdl(entries={target.shard: () for target in targets})
    plan, obstacles = locked.plan, locked.obstacles
    for target in targets:
        node, connection = target.node, locked.connections[target.shard]
        if connection.execute(IN_RECOVERY).fetchone() == (True,):
            what = f"node {node.id} is a standby"
            obstacles.add(TablesUnfitError(what, hint="name its primary in the target's fleet.toml"), node.id)
            continue
        groups, source = plan.groups_of(target), plan.chain.baseline[target.source]
        with obstacles.collecting(node.id):
            check_xml(target, connection, source, find_xml_columns(groups, plan.chain.tables(target.source)))
        with obstacles.collecting(node.id), raising_unreachable(node), _enter(plan, target, connection) as session:
            has_begun = Filling(node.id, session, suffix_of(plan.intent.operation)).exists
            sequences, unset = _sequences_of(plan, target, session)
            checked.left_out.extend(_unset_lines(target, unset))
            wanted = WantedRows(groups, sequences, source.encoding, has_begun)
            with limiting_locks(node, session):
                oid_of = check_tables(node, session, wanted, obstacles)
                oids = list(oid_of.values())
                if empty := find_empty_referenced(session, oids):
                    obstacles.warnings.append(
                        f"{node.id}: foreign keys reference empty tables that are not restored; if a row has such a"
                        f" key, the restore fails after the load: {named(empty)}"
                    )
            if unvalidated := find_unvalidated(session, oids):
                obstacles.warnings.append(
                    f"{node.id}: NOT VALID constraints check every row that is loaded; if the snapshot has rows that"
                    f" violate them, run before the restore: {' '.join(unvalidated)}"
                )
            where = f"on {target.shard}: "
            if unfilled := find_unfilled(session, groups, oid_of):
                checked.left_out.append(
                    f"values of columns {named(unfilled)} {where}the snapshot has none; they are NULL"
                )
            views = [f"{ROWS_OF_VIEW} {name} {where}the view is not refreshed" for name in find_views(session)]
            checked.left_out.extend(views)
            checked.counted.update(count_views(views, f"{where}they are not refreshed"))
    return checked


def _enter(plan: RestorePlan, target: Target, connection: psycopg.Connection[object]) -> psycopg.Connection[object]:
    """Open a session in the target's database; raise TablesUnfitError if it doesn't exist or refuses our role."""
    node, name = target.node, target.database
    if name not in databases(connection):
        scope = structs.replace(plan.request.scope, nodes=(target.shard,))
        steps = structs.replace(plan, request=structs.replace(plan.request, scope=scope)).steps
        raise TablesUnfitError(
            f"node {node.id}: there is no database {name}, but --data-only needs its tables",
            hint=[*([f"to create it, without rows: {steps[0]}"] if steps else []), SAME_TARGET],
            details={"database": name},
        )
    try:
        return connect(node)
    except NodeUnreachableError as error:
        if problems := list(find_connect_problems(node)):
            raise TablesUnfitError(
                f"node {node.id}: {problems[0].problem}", hint=problems[0].remedy, details={"database": name}
            ) from error
        raise


@contextmanager
def limiting_locks(node: Node, session: psycopg.Connection[object]) -> Iterator[None]:
    """Raise TablesInUseError if the block waits for a lock longer than LOCK_SECONDS_MAX."""
    session.execute(f"SET lock_timeout = '{LOCK_SECONDS_MAX}s'")
    try:
        yield
    except (psycopg.errors.LockNotAvailable, SchemaLoadError) as error:
        if not any(isinstance(exception, psycopg.errors.LockNotAvailable) for exception in (error, error.__cause__)):
            raise
        why = f"other sessions have held locks on them, or on sequences, for {LOCK_SECONDS_MAX} s"
        raise in_use(node, session.info.dbname, why) from error
    finally:
        with suppress(psycopg.Error):
            session.execute("SET lock_timeout = 0")


def _sequences_of(
    plan: RestorePlan, target: Target, session: psycopg.Connection[object]
) -> tuple[list[Sequence], dict[str, str]]:
    """Return the sequences to set: all in the snapshot, or those used by columns in the chosen tables.

    Other sequences are left alone, because tables that are not restored may use them. Also returns the reasons why some
    extension sequences are not set, keyed by name.
    """
    sequences = list(plan.sequences(target))
    if plan.request.tables.is_partial:
        sequences = find_used(session, plan.groups_of(target), sequences)
    settable, left = find_settable(session, sequences, some_lack=True)
    if not left:
        return settable, left
    # Sequences that the DDL creates must exist; extension sequences may be missing, because they can't be created
    # separately.
    own = _find_created(plan, target, session, sequences)
    settable, left = find_settable(session, [sequence for sequence in sequences if sequence not in own], some_lack=True)
    return [*own, *settable], left


def _unset_lines(target: Target, unset: Mapping[str, str]) -> list[str]:
    return [f"value of sequence {name} on {target.shard}: {why}" for name, why in unset.items()]


def _find_created(
    plan: RestorePlan, target: Target, session: psycopg.Connection[object], sequences: Iterable[Sequence]
) -> set[Sequence]:
    """Return the sequences that the snapshot's DDL creates (others belong to extensions), or all if it is damaged."""
    store, created = plan.store.open(), set[tuple[str, str]]()
    try:
        for source in target.sources or (target.source,):
            entries = read_stored_ddl(store, plan.chain, source).contents.entries
            created |= {(entry.schema, entry.name) for entry in entries if entry.kind == SEQUENCE}
    except ObjectDamagedError:
        return set(sequences)
    encoding = plan.chain.baseline[target.source].encoding
    schemas = map(raw_text, name_bytes(session, [sequence.schema for sequence in sequences], encoding))
    names = map(raw_text, name_bytes(session, [sequence.name for sequence in sequences], encoding))
    return {one for one, *name in zip(sequences, schemas, names, strict=True) if tuple(name) in created}


def open_tables(run: RestoreRun) -> dict[str, LoadTarget]:
    """Start filling databases where filling has not started; return the databases to load or finish, keyed by shard."""

    def open_one(target: Target) -> LoadTarget:
        groups, filling = run.plan.groups_of(target), run.filling(target)
        with raising_unreachable(target.node):
            has_begun = target.shard in run.records
            if is_again := has_begun and run.records[target.shard].phase == Phase.CREATED:
                # The ledger's tasks were named by a different version.
                filling.start_again()
            _hold(run, target, has_begun=has_begun)
            if is_again:
                run.enter(target, Phase.LOADING, version=run.version, parts=0, rows=0)
            elif not has_begun:
                _begin(run, target, filling)
            roots = find_roots(filling.connection, groups)
            paths = find_load_paths(filling.connection, groups, read_search_path(filling.connection))
            settings = settings_for_rows(read_session_settings(target.node, filling.connection))
        numbered = {group.number: group for group in groups}
        node = _as_replica(run.loaded(target))
        return LoadTarget(node, numbered, filling.ledger, roots, *paths, settings, is_in_use=True)

    done = run.shards_in(Phase.FINISHED, Phase.PUBLISHED)
    targets = [target for target in run.plan.targets if target not in done]
    shards = [target.shard for target in targets]
    return dict(zip(shards, in_parallel(open_one, targets, run.watch.end_all), strict=True))


def _hold(run: RestoreRun, target: Target, *, has_begun: bool) -> None:
    """Lock the tables against alteration until `run.release_tables`, and repeat the checks made without the lock."""
    groups, obstacles = run.plan.groups_of(target), Obstacles()
    run.held[target.shard] = session = connect(target.node)
    with ending(run.watch, session):
        hold_tables(target.node, session, groups)
        sequences, _ = _sequences_of(run.plan, target, session)
        encoding = run.plan.chain.baseline[target.source].encoding
        wanted = WantedRows(groups, sequences, encoding, has_begun=True)
        check_tables(target.node, session, wanted, obstacles)
        obstacles.raise_found()
        if has_begun:
            _check_same(run, target, session)
        else:
            # Rows of open transactions become visible only when they end, and tables with rows must not be touched.
            await_writers(target.node, session, groups, run.progress)


def _check_same(run: RestoreRun, target: Target, session: psycopg.Connection[object]) -> None:
    """Raise TablesUnfitError if the tables that the restore started to fill have been replaced."""
    if set(oids_of(session, run.plan.groups_of(target))) != run.filling(target).oids():
        raise TablesUnfitError(
            f"node {target.node.id}: tables of database {target.database} were replaced after the restore began to fill"
            " them",
            hint=f"undo the restore: {run.records[target.shard].abandon_command}",
            details={"node": target.node.id, "database": target.database},
        )


@contextmanager
def keeping_held(run: RestoreRun) -> Iterator[None]:
    """Stop the block (load and verification) and raise TablesInUseError if a session is waiting to alter the tables."""
    held = [(target.node, run.held[target.shard]) for target in run.plan.targets if target.shard in run.held]
    with ExitStack() as stack:
        for _, session in held:
            # Don't wait for a node that has stopped answering.
            stack.enter_context(ending(run.watch, session))
        if held:
            stack.enter_context(refusing_waiting(held, run.watch.end_all))
        yield


def verify_rows(run: RestoreRun, target: Target, database: LoadTarget) -> int:
    """Wait for concurrent writers, then compare the row counts with the ledger; return the number of rows.

    Raises LoadError and TablesInUseError.
    """
    session = run.held[target.shard]
    with raising_unreachable(target.node):
        await_writers(target.node, session, database.groups.values(), run.progress)
    rows = count_rows(database, run.watch)
    # Rows were loaded and counted by name, but a schema can be renamed even while its tables are locked.
    with raising_unreachable(target.node):
        _check_same(run, target, session)
    return rows


def verify_keys(run: RestoreRun, target: Target, database: LoadTarget) -> list[str]:
    """Verify the tables' foreign keys, then let others alter the tables; collect planner statistics if requested.

    Returns the problems of `analyze`. Raises ForeignKeyViolatedError, and NodeUnreachableError if the locks were lost.
    """
    session = run.held[target.shard]
    try:
        verify_references(database, run.watch)
    except psycopg.errors.LockNotAvailable as error:
        where = "on tables at the other ends of their foreign keys"
        why = f"other sessions have held locks {where} for {LOCK_SECONDS_MAX} s"
        raise in_use(target.node, target.database, why) from error
    with raising_unreachable(target.node):
        session.execute("COMMIT")
        if not run.plan.request.scope.analyze:
            return []
        path = read_search_path(session)

        def run_one(statement: bytes) -> None:
            with having_path(session, path):
                session.execute(statement)

        return analyze(target.node, session, run_one, database.groups.values())


def _begin(run: RestoreRun, target: Target, filling: Filling) -> None:
    """Check that the tables are empty and record them in one transaction; raise TablesUnfitError if some are not."""
    groups = run.plan.groups_of(target)
    with filling.connection.transaction():
        if filled := find_filled(filling.connection, groups):
            raise TablesUnfitError(
                f"node {target.node.id}: tables of database {target.database} are no longer empty: {named(filled)}",
                hint="find out what writes to them, then repeat the command",
                details={"node": target.node.id, "groups": filled},
            )
        run.created.add(target.shard)
        filling.begin(groups)
        record = run.put_record(target, Phase.LOADING, None, {"ledger": filling.ledger})
    run.records[target.shard] = record
    run.progress.reached(RestoreCrashPoint.LOADING, node=target.node.id)


def _as_replica(node: Node) -> Node:
    """Return the node with a DSN whose sessions fire no triggers and check no foreign keys."""
    given = conninfo_to_dict(node.dsn).get("options") or ""
    return replace(node, dsn=make_conninfo(node.dsn, options=f"{given} -c session_replication_role=replica".strip()))


def publish_rows(run: RestoreRun) -> None:
    """Set the sequences, then record on all nodes that the restore is complete, then remove the records."""
    run.progress.step("set sequences")

    def set_values(target: Target) -> list[str]:
        """Set a target's sequences; return lines about sequences that can't be set."""
        session = run.inside[target.shard]
        if run.records[target.shard].sequences_set:
            # Applications may have used sequences since then.
            return []
        try:
            with raising_unreachable(target.node), ending(run.watch, session), limiting_locks(target.node, session):
                sequences, unset = _sequences_of(run.plan, target, session)
                set_sequences(session, sequences)
        except SchemaLoadError as error:
            raise TablesUnfitError(
                f"node {target.node.id}: the rows are restored, but {error.message}",
                hint=f"create or alter the sequence, then: {run.records[target.shard].resume_command}",
                details={"node": target.node.id, "database": target.database},
            ) from error
        run.enter(target, Phase.FINISHED, sequences_set=True)
        return _unset_lines(target, unset)

    lines = in_parallel(
        set_values, [target for target in run.plan.targets if target not in run.shards_in(Phase.PUBLISHED)]
    )
    # If an extension was dropped after the plan was made, there are more omissions.
    run.report.left_out += [line for some in lines for line in some if line not in run.report.left_out]
    # Don't remove any record before all sequences are set, because a target without a record counts as complete.
    for target in run.plan.targets:
        run.enter(target, Phase.PUBLISHED)
    remove_fillings(run.plan.targets, suffix_of(run.operation))


def remove_fillings(targets: Iterable[Target], suffix: str) -> None:
    """Remove a finished restore's bookkeeping objects from the databases."""

    def remove(target: Target) -> None:
        with raising_unreachable(target.node), connect(target.node) as connection:
            Filling(target.node.id, connection, suffix).remove()

    in_parallel(remove, targets)


def load_all(
    run: RestoreRun,
    ddl: Mapping[str, Ddl],
    missing: Mapping[str, list[str]],
    server_globals: Mapping[str, ServerGlobals],
    spark: SparkSource,
) -> None:
    """Bring every database to the FINISHED phase; `missing` are the roles to create, by shard."""
    plan, progress, runs = run.plan, run.progress, dict[str, DdlRun]()
    check_sources_apart(run, spark)
    if plan.request.scope.data_only:
        progress.step("prepare tables")
        databases = open_tables(run)
        # Filling has now started everywhere, so from here on a missing object counts as lost.
        for target in plan.targets:
            if run.records[target.shard].undoing:
                run.enter(target, run.records[target.shard].phase, undoing=False)
    else:
        progress.step("create databases")
        make_databases(run, missing, server_globals, ddl)
        databases, runs = create_all_tables(run, ddl)
    with keeping_held(run), ending_early(runs):
        _load_and_finish(run, databases, runs, spark)


@contextmanager
def ending_early(runs: Mapping[str, DdlRun]) -> Iterator[None]:
    """After the block, end the sessions that create indexes during the load: no database can be dropped before that."""
    try:
        yield
    finally:
        in_parallel(DdlRun.end_early, runs.values(), let_end)


def _load_and_finish(
    run: RestoreRun, databases: Mapping[str, LoadTarget], runs: Mapping[str, DdlRun], spark: SparkSource
) -> None:
    plan, progress = run.plan, run.progress
    began = time.monotonic()
    loaded: Mapping[str, float] = {}
    if run.shards_in(Phase.LOADING) and not plan.request.scope.schema_only:
        session = start_session(spark, progress)
        tallies = [rows_tally(target.node, target.ledger, run.row_count(shard)) for shard, target in databases.items()]
        # Cancel the jobs if a target stops answering.
        with run.watch.on_silence(partial(cancel_jobs, session)), tallying(progress, tallies) as loaded:
            check_large_objects(session, run, runs)
            load_databases(session, run, databases, runs)
        for ddl_run in runs.values():
            ddl_run.stop_early()
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
    """Verify every needed object, and choose the copies from which rows are taken."""
    plan = run.plan
    session = start_session(spark, run.progress)
    with run.watch.on_silence(partial(cancel_jobs, session)):
        copies = verify_copies(session, plan.chain, plan.wanted, plan.store, run.progress)
    run.plan = structs.replace(plan, copies=copies)
    run.report.borrowed, run.report.damaged = run.plan.borrowed_rows, copies.damaged


@contextmanager
def naming_lost_rows(run: RestoreRun) -> Iterator[None]:
    """Explain the error for a damaged object: the losses that it causes and the increments that can be restored."""
    try:
        yield
    except ObjectDamagedError as error:
        plan = run.plan
        explained = explain_damage(plan.store.open(), plan.chain, plan.wanted, error)
        if explained is error:
            raise
        raise explained from error


@contextmanager
def naming_commands(run: RestoreRun) -> Iterator[None]:
    """Complete the commands in an error's hint, which may come from a task: see `complete_hint`."""
    try:
        yield
    except SnapshotError as error:
        error.hint = complete_hint(error.hint, run.plan)
        raise


def complete_hint(hint: str, plan: RestorePlan) -> str:
    """Fill in the snapshot and increment to check, and how to change a table before its rows are loaded."""
    in_steps = IN_STEPS
    if plan.request.scope.data_only:
        in_steps = "after the change, repeat the command"
    elif steps := plan.steps:
        in_steps = f"in steps: {steps[0]}; change the table by hand; then: {steps[1]}"
    hint = hint.replace(IN_STEPS, in_steps)
    return hint.replace(CHECK_NAMED, check_command(plan.chain.name, plan.chain.last.increment))


def check_sources_apart(run: RestoreRun, spark: SparkSource) -> None:
    """Raise KeyConflictError, before anything is created, if rows from several sources conflict in a target.

    A resumed restore that has already created a database has passed this check.
    """
    topology = run.plan.topology
    if topology is None or len(topology.sources) == 1 or run.records:
        return
    from cutline.restore.run.conflicts import check_conflicts

    session = start_session(spark, run.progress)
    with run.watch.on_silence(partial(cancel_jobs, session)):
        check_conflicts(session, run.plan.chain, topology, run.plan.store, run.progress)


def make_databases(
    run: RestoreRun,
    missing: Mapping[str, list[str]],
    server_globals: Mapping[str, ServerGlobals],
    ddl: Mapping[str, Ddl],
) -> None:
    """Create the empty databases and the missing roles, and rehearse the DDL, then recreate the databases it ran in.

    Raises TargetUnfitError or SchemaLoadError listing the refused statements, unless the request allows them.
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
        return rehearse(target, ddl[target.shard], run.watch, sessions[target.node.id])

    in_parallel(create, targets)
    for target in targets:
        former = find_former_superusers(run.plan, target) if superusers is not None else ()
        created, notes = create_roles(
            target, missing[target.shard], superusers, server_globals.get(target.shard), former
        )
        run.report.roles_created += created
        run.report.warnings += notes
    run.progress.reached(RestoreCrashPoint.ROLES_CREATED)
    sessions = _share_sessions(run, targets)
    tried = [target for target in targets if not (volume := run.volumes.get(target.shard)) or is_worthwhile(volume)]
    run.unrehearsed = {target.shard for target in targets} - {target.shard for target in tried}
    refused = dict(zip(tried, in_parallel(try_first, tried, run.watch.end_all), strict=True))
    if not run.allows_refused:
        refuse(refused, run.connections, run.plan.steps)
    in_parallel(create, tried)


def find_former_superusers(plan: RestorePlan, target: Target) -> list[str]:
    """Return the roles in the place of those that were superusers on the snapshot's server, in the order of rank.

    If its roles are not stored, there is only the usual one.
    """
    found, names = [BOOTSTRAP], dict(plan.request.scope.role_map)
    with suppress(ObjectDamagedError):
        if (stored := read_stored_globals(plan.store.open(), plan.chain, target.source)) is not None:
            found = [role.name for role in stored.roles if role.superuser]
    return [names.get(role, role) for role in sorted(found, key=lambda role: (role != BOOTSTRAP, role))]


def _share_sessions(run: RestoreRun, targets: Iterable[Target]) -> dict[str, int]:
    """Return the number of sessions for the work on each target, keyed by node; targets on one server share its own."""
    return task_sessions({target.node: run.connections[target.shard] for target in targets})


def _ending_of(ddl: Ddl) -> dict[str, Any]:
    """Return the record fields for the properties that the database gets at the end."""
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
    """Create the tables of every empty database; return the load targets and DDL of unfinished databases, by shard.

    If statements are refused that were not rehearsed, raises the same errors as make_databases.
    """
    chain, groups = run.plan.chain, run.plan.groups

    def create(target: Target) -> tuple[LoadTarget, DdlRun]:
        shard = target.shard
        ledger = run.records[shard].ledger
        if run.records[shard].phase != Phase.CREATED and ledger:
            return find_load_target(target.loaded, ddl[shard], groups[shard], ledger, run.watch)
        of_source = (chain, target.source, groups[shard])
        created, ddl_run = create_tables(target.loaded, ddl[shard], *of_source, run.watch)
        run.enter(target, Phase.LOADING, ledger=created.ledger)
        return created, ddl_run

    targets = run.shards_in(Phase.CREATED, Phase.LOADING, Phase.INDEXING)
    made = dict(zip((target.shard for target in targets), in_parallel(create, targets, run.watch.end_all), strict=True))
    if not run.allows_refused:
        untried = [target for target in targets if target.shard in run.unrehearsed]
        refused = {target: list(made[target.shard][1].refusals.values()) for target in untried}
        refuse(refused, run.connections, run.plan.steps)
    return {shard: load_target for shard, (load_target, _) in made.items()}, {
        shard: one for shard, (_, one) in made.items()
    }


def load_databases(
    session: SparkSession, run: RestoreRun, databases: Mapping[str, LoadTarget], runs: Mapping[str, DdlRun]
) -> None:
    """Load the rows and, unless the restore is partial, the large objects; `runs` may begin to create indexes."""
    # Import these late: if the checks refuse the restore, the user must not have to wait for Arrow.
    from cutline.restore.rows.jobs import count_parts, load_rows
    from cutline.restore.rows.large_objects import load_large_objects

    plan, targets = run.plan, run.shards_in(Phase.LOADING)
    sessions = _share_sessions(run, targets)
    early = _choose_early(run, sessions)
    sessions |= {target.node.id: sessions[target.node.id] - 1 for target in early}
    sessions = sessions_for(sessions, restore_limit(target.node for target in targets))
    parts = max(run.records[target.shard].parts for target in targets) or count_parts(
        session, len(plan.topology.sources if plan.topology else plan.targets), sessions, is_routed=bool(plan.topology)
    )
    for target in targets:
        if run.records[target.shard].parts != parts:
            run.enter(target, Phase.LOADING, parts=parts)
    databases = {
        target.shard: structs.replace(databases[target.shard], task_sessions=sessions[target.node.id])
        for target in targets
    }
    shards = tuple(target.shard for target in plan.targets)
    loads = find_feeds(plan.chain, shards, plan.topology, databases, parts)
    loads = structs.replace(loads, chosen=plan.chosen)
    begin = partial(_begin_early, run, runs, early) if early else None
    placed = load_rows(session, plan.chain, loads, plan.store, run.progress, begin)
    if plan.topology:
        run.placed = {one.shard: placed[number] for number, one in enumerate(plan.targets)}
    if count_by_node(plan.chain.full) and plan.request.is_with_all_rows:
        scope = plan.request.scope
        roles = RoleChanges(dict(scope.role_map), scope.no_owner)
        run.report.warnings += load_large_objects(session, plan.chain.full, databases, plan.store, run.progress, roles)


def _choose_early(run: RestoreRun, sessions: Mapping[str, int]) -> list[Target]:
    """Choose the targets that get indexes of complete tables during the load; `sessions` are those for tasks, by node.

    With routes, every task may bring rows to every target.
    """
    if run.plan.request.scope.data_only or run.plan.topology is not None:
        return []
    targets = [target for target in run.shards_in(Phase.LOADING) if sessions[target.node.id] >= EARLY_SESSIONS_FROM]
    # Each has a thread.
    return targets[:THREADS_MAX]


def _begin_early(
    run: RestoreRun, runs: Mapping[str, DdlRun], targets: Iterable[Target], expected: Mapping[int, ExpectedTasks]
) -> None:
    numbers = {target.shard: number for number, target in enumerate(run.plan.targets)}

    def begin(target: Target) -> None:
        tasks, volume = expected[numbers[target.shard]], run.volumes.get(target.shard)
        groups = tasks.target.groups.values()
        names = {group.number: qualify(group) for group in groups}
        rows = {group.number: volume.rows.get(group.name, 0) for group in groups} if volume else {}
        runs[target.shard].begin_early(names, rows, tasks.find_complete)

    in_parallel(begin, targets, run.watch.end_all)
    if run.pace:
        run.pace.has_early_indexes = True


def check_large_objects(session: SparkSession, run: RestoreRun, runs: Mapping[str, DdlRun]) -> None:
    """Raise TargetUnfitError if our role may not act as an owner or grantor of the large objects to restore.

    Only the stored objects name these roles, so Spark tasks read the objects. A superuser needs no check.
    """
    plan = run.plan
    shards = count_by_node(plan.chain.full).keys() & {
        shard for shard, ddl_run in runs.items() if ddl_run.ddl.is_adapted
    }
    if not plan.request.is_with_all_rows or plan.request.scope.no_owner or not shards:
        return
    from cutline.restore.rows.large_objects import find_actors

    actors = find_actors(session, plan.chain.full, shards, plan.store, run.progress)
    names = dict(plan.request.scope.role_map)
    for target in plan.targets:
        connection, owners = run.connections[target.shard], dict[str, list[str]]()
        for role, things in actors.get(target.shard, {}).items():
            owners.setdefault(names.get(role, role), []).extend(things)
        stored = name_bytes(connection, owners, plan.chain.baseline[target.source].encoding)
        check_memberships(target, connection, dict(zip(map(raw_text, stored), owners.values(), strict=True)))


def finish_databases(run: RestoreRun, databases: Mapping[str, LoadTarget], runs: Mapping[str, DdlRun]) -> None:
    """Check every loaded database's row counts, then create its indexes and everything else that follows the rows.

    Before the indexes, computes generated columns again that may have been computed before all rows were loaded.
    Reports such columns whose values may be wrong, each materialized view that could not be populated and each sequence
    that could not be set, and notes each table that could not be analyzed, with the reason.
    If statements are refused and the request doesn't allow that, raises DdlRefusedError after everything else is done.
    """
    targets = [target for target in run.plan.targets if target.shard in databases]
    if not _lack_tables(run, databases):
        for target in run.shards_in(Phase.INDEXING, Phase.FINISHED, Phase.PUBLISHED):
            check_placed(run, target, run.records[target.shard].rows)
    if runs:
        sessions = _share_sessions(run, targets)
        for target in targets:
            runs[target.shard].sessions_max = sessions[target.node.id]
    tallies = [
        indexes_tally(databases[target.shard].node, volume.indexes, volume.rows)
        for target in targets
        if (volume := run.volumes.get(target.shard)) and volume.indexes
    ]
    seconds: dict[str, float] = {}

    def finish(target: Target) -> FinishedDatabase:
        began = time.monotonic()
        found = _check_rows(run, target, databases[target.shard])
        done = _finish_loaded(run, target, databases[target.shard], runs.get(target.shard))
        done.warnings, done.problems = [*found.wrong, *done.warnings], [*found.changed, *done.problems]
        seconds[target.shard] = time.monotonic() - began
        return done

    with tallying(run.progress, tallies):
        finished = dict(zip(targets, in_parallel(finish, targets, run.watch.end_all), strict=True))
    for done in finished.values():
        run.report.warnings += done.warnings
        for problem in done.problems:
            run.progress.note(problem)
    run.report.nodes = [
        NodeReport(target.node.id, target.database, run.records[target.shard].rows, seconds.get(target.shard, 0.0))
        for target in run.plan.targets
    ]
    report_refused(run, finished)


def _check_rows(run: RestoreRun, target: Target, database: LoadTarget) -> Recomputed:
    """Check the row counts of a database that was just loaded, and record that its indexes are next.

    Returns what was found in its generated columns. Existing tables are counted again: other sessions may have written
    to them since an earlier process counted.
    """
    is_filling = run.plan.request.scope.data_only
    is_loading = run.records[target.shard].phase == Phase.LOADING
    if not is_loading and not is_filling:
        return Recomputed()
    rows = verify_rows(run, target, database) if is_filling else count_rows(database, run.watch)
    check_placed(run, target, rows)
    found = recompute_generated(database, run.watch) if rows else Recomputed()
    if is_loading:
        run.enter(target, Phase.INDEXING, rows=rows)
    return found


def _finish_loaded(run: RestoreRun, target: Target, database: LoadTarget, ddl_run: DdlRun | None) -> FinishedDatabase:
    """Create what follows the rows, and record that the database is finished; existing tables have no `ddl_run`."""
    scope = run.plan.request.scope
    if ddl_run is None:
        done = FinishedDatabase(verify_keys(run, target, database))
    else:
        done = finish_database(
            database,
            ddl_run,
            () if scope.schema_only else run.plan.sequences(target),
            run.plan.moves(target),
            analyzes=scope.analyze,
            allows_refused=run.allows_refused,
            record=partial(_record_finished, run, target),
        )
    if done.is_finished:
        refused = run.records[target.shard].refused if done.is_earlier else _labels_of(done.refusals)
        run.enter(target, Phase.FINISHED, refused=refused)
    return done


def _record_finished(
    run: RestoreRun, target: Target, connection: psycopg.Connection[Any], refusals: list[Refusal]
) -> None:
    """Record that a target's database is finished, in the transaction that drops the ledger and sets its properties."""
    record = run.records[target.shard]
    write_record(connection, target.loading, record, phase=Phase.FINISHED, refused=_labels_of(refusals))


def _labels_of(refusals: list[Refusal]) -> tuple[str, ...]:
    return tuple(refusal.label for refusal in refusals[:REFUSED_KEPT_MAX])


def _lack_tables(run: RestoreRun, databases: Mapping[str, LoadTarget]) -> bool:
    """Whether targets may have refused tables; then rows for targets that were loaded before are not all counted."""
    return any(
        run.records[target.shard].refused
        or (target.shard in databases and len(databases[target.shard].groups) < len(run.plan.groups_of(target)))
        for target in run.plan.targets
    )


def check_placed(run: RestoreRun, target: Target, rows: int) -> None:
    """Raise LoadError if a target's number of `rows` differs from the number that routes sent to it.

    A process that loaded no rows has no such numbers; it resumes work that an earlier process checked.
    """
    if run.placed and rows != run.placed[target.shard]:
        raise LoadError(
            f"node {target.node.id}: {rows} rows were loaded, but the routes sent {run.placed[target.shard]} rows of"
            f" {', '.join(target.sources)} to it",
            hint="check whether something else writes to the restored database, then repeat the command",
            details={"node": target.node.id, "rows": rows, "placed": run.placed[target.shard]},
        )
