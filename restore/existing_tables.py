"""Load rows into tables that exist: `--data-only`. The counterpart of restore/loading.py for databases that others use.

Until it is decided that the rows stay, they may be undone: the tables are empty again. Nothing else of the databases is
changed before; sequences get their values after the decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import psycopg
from msgspec import structs
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import Node
from cutline.fleet.hints import SAME_TARGET
from cutline.fleet.nodes.connections import (
    NodeUnreachableError,
    connect,
    raising_unreachable,
)
from cutline.fleet.nodes.encodings import raw_text
from cutline.fleet.nodes.privileges import find_connect_problems
from cutline.fleet.nodes.sessions import in_parallel
from cutline.restore.build import analyze, count_rows
from cutline.restore.crash_points import RestoreCrashPoint
from cutline.restore.data_only.checker import TablesUnfitError, named
from cutline.restore.data_only.checks import WantedRows, check_tables, find_views
from cutline.restore.data_only.filled_tables import find_filled, oids_of
from cutline.restore.data_only.filling import Filling
from cutline.restore.data_only.held_tables import await_writers, hold_tables, in_use, refusing_waiting
from cutline.restore.data_only.references import LOCK_SECONDS_MAX, find_empty_referenced, verify_references
from cutline.restore.data_only.sequences import find_used
from cutline.restore.ddl.ddl import SchemaLoadError, ending, find_settable, set_sequences
from cutline.restore.obstacles.obstacles import Obstacles
from cutline.restore.plan import RestorePlan
from cutline.restore.roles import name_bytes
from cutline.restore.rows.load_target import LoadTarget, find_load_paths
from cutline.restore.rows.partition_roots import find_roots
from cutline.restore.run import RestoreRun
from cutline.restore.targets.database_records import Phase
from cutline.restore.targets.target import Connections, Target, databases, suffix_of
from cutline.restore.targets.target_checks import check_xml, find_xml_columns
from cutline.snapshots.ddl.archive import SEQUENCE, read_contents
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.ddl.search_path import having_path, read_search_path
from cutline.snapshots.records.commit import Sequence
from cutline.wal.segments.damage import ObjectDamagedError

IN_RECOVERY = "SELECT pg_is_in_recovery()"


def check_existing(
    plan: RestorePlan, targets: Iterable[Target], connections: Connections, obstacles: Obstacles
) -> list[str]:
    """Add what keeps the targets' tables from taking the rows; return what is left out."""
    left_out: list[str] = []
    for target in targets:
        node, connection = target.node, connections[target.shard]
        if connection.execute(IN_RECOVERY).fetchone() == (True,):
            what = f"node {node.id} is a standby"
            obstacles.add(TablesUnfitError(what, hint="name its primary in the target's fleet.toml"), node.id)
            continue
        groups, source = plan.groups[target.shard], plan.chain.baseline[target.source]
        with obstacles.collecting(node.id):
            check_xml(target, connection, source, find_xml_columns(groups, plan.chain.tables(target.source)))
        with obstacles.collecting(node.id), raising_unreachable(node), _enter(plan, target, connection) as session:
            has_begun = Filling(node.id, session, suffix_of(plan.intent.operation)).exists
            sequences, unset = _sequences_of(plan, target, session)
            left_out += _unset_lines(target, unset)
            wanted = WantedRows(groups, sequences, source.encoding, has_begun)
            with limiting_locks(node, session):
                oids = list(check_tables(node, session, wanted, obstacles).values())
                if empty := find_empty_referenced(session, oids):
                    obstacles.warnings.append(
                        f"{node.id}: foreign keys refer to empty tables that are not restored; a row with such a key"
                        f" ends the restore after the load: {named(empty)}"
                    )
            views = find_views(session)
            left_out += [f"rows of materialized view {name} on {target.shard}: it is not refreshed" for name in views]
    return left_out


def _enter(plan: RestorePlan, target: Target, connection: psycopg.Connection[object]) -> psycopg.Connection[object]:
    """A session in the target's database; raise TablesUnfitError if there is none, or if our role may not enter it."""
    node, name = target.node, target.database
    if name not in databases(connection):
        scope = structs.replace(plan.request.scope, nodes=(target.shard,))
        steps = replace(plan, request=replace(plan.request, scope=scope)).steps
        raise TablesUnfitError(
            f"node {node.id}: there is no database {name}, whose tables --data-only needs",
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
    """Raise TablesInUseError when a lock is waited for in the block for LOCK_SECONDS_MAX."""
    session.execute(f"SET lock_timeout = '{LOCK_SECONDS_MAX}s'")
    try:
        yield
    except (psycopg.errors.LockNotAvailable, SchemaLoadError) as error:
        if not any(isinstance(one, psycopg.errors.LockNotAvailable) for one in (error, error.__cause__)):
            raise
        why = f"others have had them, or sequences, locked for {LOCK_SECONDS_MAX} s"
        raise in_use(node, session.info.dbname, why) from error
    finally:
        with suppress(psycopg.Error):
            session.execute("SET lock_timeout = 0")


def _sequences_of(
    plan: RestorePlan, target: Target, session: psycopg.Connection[object]
) -> tuple[list[Sequence], dict[str, str]]:
    """The sequences that get their values: all of the snapshot, or with some tables those that their columns use.

    Others may go on with theirs: tables that are not restored use them. Also returns why some of extensions do not get
    theirs, by name.
    """
    sequences = list(plan.sequences(target))
    if plan.request.is_partial:
        sequences = find_used(session, plan.groups[target.shard], sequences)
    settable, left = find_settable(session, sequences, some_lack=True)
    if not left:
        return settable, left
    # What the DDL creates and the database lacks is an obstacle; a sequence of an extension nobody can create alone.
    own = _find_created(plan, target, session, sequences)
    settable, left = find_settable(session, [one for one in sequences if one not in own], some_lack=True)
    return [*own, *settable], left


def _unset_lines(target: Target, unset: Mapping[str, str]) -> list[str]:
    return [f"value of sequence {name} on {target.shard}: {why}" for name, why in unset.items()]


def _find_created(
    plan: RestorePlan, target: Target, session: psycopg.Connection[object], sequences: Iterable[Sequence]
) -> set[Sequence]:
    """The sequences that the snapshot's DDL creates: the others belong to extensions. All, if it can't be read."""
    store, created = plan.store.open(), set[tuple[str, str]]()
    try:
        for source in target.sources or (target.source,):
            entries = read_contents(read_stored_ddl(store, plan.chain, source)).entries
            created |= {(entry.schema, entry.name) for entry in entries if entry.kind == SEQUENCE}
    except ObjectDamagedError:
        return set(sequences)
    encoding = plan.chain.baseline[target.source].encoding
    schemas = map(raw_text, name_bytes(session, [one.schema for one in sequences], encoding))
    names = map(raw_text, name_bytes(session, [one.name for one in sequences], encoding))
    return {one for one, *name in zip(sequences, schemas, names, strict=True) if tuple(name) in created}


def open_tables(run: RestoreRun) -> dict[str, LoadTarget]:
    """Begin to fill the databases that have not begun; return those to load or to finish, by shard."""

    def open_one(target: Target) -> LoadTarget:
        groups, filling = run.plan.groups[target.shard], run.filling(target)
        with raising_unreachable(target.node):
            has_begun = target.shard in run.records
            if is_again := has_begun and run.records[target.shard].phase == Phase.CREATED:
                # The tasks in its ledger are those of another version.
                filling.start_again()
            _hold(run, target, has_begun=has_begun)
            if is_again:
                run.enter(target, Phase.LOADING, version=run.version, parts=0, rows=0)
            elif not has_begun:
                _begin(run, target, filling)
            roots = find_roots(filling.connection, groups)
            paths = find_load_paths(filling.connection, groups, read_search_path(filling.connection))
        numbered = {one.number: one for one in groups}
        return LoadTarget(_as_replica(run.loaded(target)), numbered, filling.ledger, roots, *paths, is_in_use=True)

    done = run.shards_in(Phase.FINISHED, Phase.PUBLISHED)
    targets = [target for target in run.plan.targets if target not in done]
    shards = [target.shard for target in targets]
    return dict(zip(shards, in_parallel(open_one, targets, run.watch.end_all), strict=True))


def _hold(run: RestoreRun, target: Target, *, has_begun: bool) -> None:
    """Let nobody alter the tables until `run.release_tables`, and check again what was checked without the lock."""
    groups, obstacles = run.plan.groups[target.shard], Obstacles()
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
            # Rows that they have written are seen only then, and a table with rows is not touched.
            await_writers(target.node, session, groups)


def _check_same(run: RestoreRun, target: Target, session: psycopg.Connection[object]) -> None:
    """Raise TablesUnfitError if other tables have the names of those that the restore has begun to fill."""
    if set(oids_of(session, run.plan.groups[target.shard])) != run.filling(target).oids():
        raise TablesUnfitError(
            f"node {target.node.id}: tables of database {target.database} were replaced since the restore began to fill"
            " them",
            hint=f"undo it: {run.records[target.shard].command} --abandon",
            details={"node": target.node.id, "database": target.database},
        )


@contextmanager
def keeping_held(run: RestoreRun) -> Iterator[None]:
    """While the block loads and verifies, end it when a session waits to alter the tables; raise TablesInUseError."""
    held = [(one.node, run.held[one.shard]) for one in run.plan.targets if one.shard in run.held]
    with ExitStack() as stack:
        for _, session in held:
            # Of a node that falls silent no answer is waited for.
            stack.enter_context(ending(run.watch, session))
        if held:
            stack.enter_context(refusing_waiting(held, run.watch.end_all))
        yield


def verify_rows(run: RestoreRun, target: Target, database: LoadTarget) -> int:
    """Compare the row counts with the ledger, once nobody is writing; return the number of rows.

    Raises LoadError, TablesInUseError.
    """
    session = run.held[target.shard]
    with raising_unreachable(target.node):
        await_writers(target.node, session, database.groups.values())
    rows = count_rows(database, run.watch)
    # A schema can get another name, whatever is locked: rows were loaded and counted by name.
    with raising_unreachable(target.node):
        _check_same(run, target, session)
    return rows


def verify_keys(run: RestoreRun, target: Target, database: LoadTarget) -> list[str]:
    """Verify the tables' foreign keys, and then let others alter them; collect the planner's statistics if wanted.

    Returns what `analyze` does. Raises ForeignKeyViolatedError, and NodeUnreachableError if the locks were lost.
    """
    session = run.held[target.shard]
    try:
        verify_references(database, run.watch)
    except psycopg.errors.LockNotAvailable as error:
        why = f"others have had tables at the other ends of their foreign keys locked for {LOCK_SECONDS_MAX} s"
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
    """Record, in one transaction, which tables are filled, and that they are empty; raise TablesUnfitError if not."""
    groups = run.plan.groups[target.shard]
    with filling.connection.transaction():
        if filled := find_filled(filling.connection, groups):
            raise TablesUnfitError(
                f"node {target.node.id}: tables of database {target.database} are not empty any more: {named(filled)}",
                hint="see what writes to them, then repeat the command",
                details={"node": target.node.id, "groups": filled},
            )
        run.created.add(target.shard)
        filling.begin(groups)
        record = run.put_record(target, Phase.LOADING, None, {"ledger": filling.ledger})
    run.records[target.shard] = record
    run.progress.reached(RestoreCrashPoint.LOADING, node=target.node.id)


def _as_replica(node: Node) -> Node:
    """The node, in whose sessions neither triggers nor foreign keys act."""
    given = conninfo_to_dict(node.dsn).get("options") or ""
    return replace(node, dsn=make_conninfo(node.dsn, options=f"{given} -c session_replication_role=replica".strip()))


def publish_rows(run: RestoreRun) -> None:
    """Give the sequences their values, then record that all is done, on all nodes, then remove the records."""
    run.progress.step("set sequences")

    def set_values(target: Target) -> list[str]:
        """Also returns lines about those that can't be set."""
        session = run.inside[target.shard]
        if run.records[target.shard].sequences_set:
            # Applications may have taken values since.
            return []
        try:
            with raising_unreachable(target.node), ending(run.watch, session), limiting_locks(target.node, session):
                sequences, unset = _sequences_of(run.plan, target, session)
                set_sequences(session, sequences)
        except SchemaLoadError as error:
            raise TablesUnfitError(
                f"node {target.node.id}: the rows are restored, but {error.message}",
                hint=f"create or alter the sequence, then: {run.records[target.shard].command} --resume",
                details={"node": target.node.id, "database": target.database},
            ) from error
        run.enter(target, Phase.FINISHED, sequences_set=True)
        return _unset_lines(target, unset)

    lines = in_parallel(set_values, [one for one in run.plan.targets if one not in run.shards_in(Phase.PUBLISHED)])
    # An extension may have been dropped since these were planned.
    run.report.left_out += [line for some in lines for line in some if line not in run.report.left_out]
    # Only when all have their values: what has no record any more is done.
    for target in run.plan.targets:
        run.enter(target, Phase.PUBLISHED)
    remove_fillings(run.plan.targets, suffix_of(run.operation))


def remove_fillings(targets: Iterable[Target], suffix: str) -> None:
    """Remove what a restore that is done keeps in the databases."""

    def remove(target: Target) -> None:
        with raising_unreachable(target.node), connect(target.node) as connection:
            Filling(target.node.id, connection, suffix).remove()

    in_parallel(remove, targets)
