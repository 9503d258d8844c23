"""The state of a restore in one process: the sessions that hold the targets' locks, and the databases' records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from msgspec import field, structs

from cutline.fleet.config import Node
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import News, Progress
from cutline.fleet.record import Time
from cutline.nodes.clocks import ClockReading, note_clocks, read_clock
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.sessions import in_parallel
from cutline.nodes.watch import Watch, watch_nodes
from cutline.restore.estimates.estimate import BegunShard, ShardVolume
from cutline.restore.estimates.pace import RestorePace, rows_tally
from cutline.restore.plan.plan import LockedTargets, RestorePlan
from cutline.restore.plan.report import RestoreReport
from cutline.restore.rows.filling import Filling
from cutline.restore.targets.databases import (
    DatabaseRecord,
    Phase,
    RestoreCrashPoint,
    close_quietly,
    drop_database,
    list_databases,
    lock_target_fleet,
    record_text,
    write_record,
)
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.swap import end_sessions, is_restored
from cutline.restore.targets.target import Target, lock_targets, place_of, server_of, start_of, suffix_of
from cutline.restore.targets.waits import TargetBlockedError, TargetWaits, bounding_waits
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import cut_time
from cutline.spark.needs import ExecutorNeeds
from cutline.storage.errors import SnapshotError


class RestoreRun(LockedTargets):
    """A restore in the process that runs it.

    Every database has a record (in `records`, keyed by shard) from the time it is created; `created` are the shards
    whose databases this process creates. `inside` are sessions in the existing databases, keyed by shard, that hold the
    fleet's lock there and write the records of tables being filled; `held` are the sessions whose locks keep others
    from altering these tables. `placed` is the number of rows that routes sent to each target. `unrehearsed` are the
    shards whose DDL this process did not rehearse before it created their tables. `pace` estimates the remaining time;
    `volumes` are keyed by shard. `is_closing`: databases may be closed; `is_deciding`: the decision may be stored;
    `is_decided`: it is stored. `undo_hint` are the lines that say what kept the restore from being undone.
    """

    watch: Watch
    waits: TargetWaits
    progress: Progress
    report: RestoreReport
    inside: Mapping[str, psycopg.Connection[Any]] = field(default_factory=dict)
    held: dict[str, psycopg.Connection[Any]] = field(default_factory=dict)
    records: dict[str, DatabaseRecord] = field(default_factory=dict)
    created: set[str] = field(default_factory=set)
    pace: RestorePace | None = None
    volumes: Mapping[str, ShardVolume] = field(default_factory=dict)
    placed: dict[str, int] = field(default_factory=dict)
    unrehearsed: set[str] = field(default_factory=set)
    in_store: bool = False
    is_closing: bool = False
    is_deciding: bool = False
    is_decided: bool = False
    is_published: bool = False
    undo_hint: list[str] = field(default_factory=list)
    version: str = field(default_factory=lambda: version("cutline"))

    @property
    def operation(self) -> str:
        """The operation's id."""
        return self.plan.intent.operation

    @property
    def allows_refused(self) -> bool:
        """Whether the restore is to continue without the statements that the targets refuse."""
        return self.plan.request.allow_refused_ddl

    @property
    def executor_needs(self) -> ExecutorNeeds:
        """What the restore's tasks need from executors; maintenance databases stand in for those not yet created."""
        is_filling = self.plan.request.scope.data_only
        return ExecutorNeeds(
            self.plan.store, tuple(target.node if is_filling else target.maintenance for target in self.plan.targets)
        )

    def row_count(self, shard: str) -> int:
        """Return the approximate number of the shard's rows."""
        return self.volumes[shard].row_count if shard in self.volumes else 0

    def enter(self, target: Target, phase: Phase, *, database: str | None = None, **changes: Any) -> None:
        """Record that a target's database has reached a phase, or only record the `changes` within the same phase."""
        before = self.records.get(target.shard)
        self.records[target.shard] = self.put_record(target, phase, database, changes)
        if before is None or before.phase != phase:
            self.progress.reached(RestoreCrashPoint(phase.value), node=target.node.id)

    def put_record(
        self, target: Target, phase: Phase, database: str | None, changes: Mapping[str, Any]
    ) -> DatabaseRecord:
        """Write a target's record, on its `database` or in its filling, and return it."""
        before = self.records.get(target.shard) or self._first_record()
        after = structs.replace(before, shard=target.shard, phase=phase, **changes)
        with raising_unreachable(target.node):
            if after.scope.data_only:
                self.filling(target).write(record_text(after))
            else:
                write_record(self.connections[target.shard], database or target.loading, after)
        return after

    def release_tables(self) -> None:
        """Let other sessions alter the filled tables again."""
        for connection in self.held.values():
            close_quietly(connection)
        self.held.clear()

    def filling(self, target: Target) -> Filling:
        """Return the filling of a target's database, in a restore with `--data-only`."""
        return Filling(target.node.id, self.inside[target.shard], suffix_of(self.operation))

    def loaded(self, target: Target) -> Node:
        """Return the database to load: a new database, or the existing database that is filled."""
        return target.node if self.plan.request.scope.data_only else target.loaded

    def end_loading(self, target: Target) -> None:
        """End a killed process's sessions that load a target; otherwise they might run until they have rows to send."""
        if self.plan.request.scope.data_only:
            self.filling(target).end_loading()
        else:
            end_sessions(self.connections[target.shard], target.loading)

    def _mark_undoing(self, target: Target) -> None:
        """Record that tables are being emptied; otherwise a missing object would count as lost."""
        if self.plan.request.scope.data_only and (record := self.records.get(target.shard)):
            self.enter(target, record.phase, undoing=True)

    def _undo(self, target: Target) -> None:
        if self.plan.request.scope.data_only:
            self.filling(target).undo()
        else:
            drop_database(target, self.connections[target.shard], target.loading)

    def undo_created(self) -> bool:
        """Undo what this process did, and note it; return whether nothing remains.

        If the session that holds a target's lock is lost, nothing is dropped there, because another process may have
        continued.
        """
        try:
            created = [target for target in self.plan.targets if target.shard in self.created]
            with self.waits.naming_blocked():
                for work in (self._mark_undoing, self._undo):
                    in_parallel(work, created, self.waits.hurry)
        except (SnapshotError, psycopg.Error) as error:
            self.progress.note(f"the restore could not be undone: {error}")
            self.undo_hint = error.hint.split("\n") if isinstance(error, TargetBlockedError) else []
            return False
        if self.created:
            is_filling = self.plan.request.scope.data_only
            what = (
                "the tables that it filled are empty again"
                if is_filling
                else "the databases that it created were dropped"
            )
            roles = self.report.roles_created
            stay = f"; roles that it created remain: {', '.join(roles)}" if roles else ""
            self.progress.note(News(f"the restore was undone: {what}{stay}"))
        return True

    def is_renamed(self, target: Target) -> bool:
        """Whether the restored database has its real name."""
        return is_restored(list_databases(self.connections[target.shard]), target, self.operation)

    def shards_in(self, *phases: Phase) -> list[Target]:
        """Return the targets whose databases are in one of the phases."""
        return [
            target
            for target in self.plan.targets
            if (record := self.records.get(target.shard)) and record.phase in phases
        ]

    def find_stale(self) -> list[Target]:
        """Return the targets that a different version loaded, whose tasks and DDL marks may differ from ours."""
        return [
            target
            for target in self.shards_in(Phase.LOADING, Phase.INDEXING)
            if self.records[target.shard].version != self.version
        ]

    def placed_intent(self) -> Intent:
        """Return the intent with the databases that the restore creates, and their servers."""
        targets = [(target, self.connections[target.shard]) for target in self.plan.targets]
        places = tuple(place_of(target, connection) for target, connection in targets)
        servers, started = (tuple(map(ask, (one for _, one in targets))) for ask in (server_of, start_of))
        return structs.replace(self.plan.intent, targets=places, servers=servers, started=started)

    def find_begun(self) -> dict[str, BegunShard]:
        """Return the work of earlier processes, keyed by shard."""
        begun: dict[str, BegunShard] = {}
        for target in self.shards_in(*Phase):
            record = self.records[target.shard]
            rows = record.rows
            if record.phase == Phase.LOADING and record.ledger:
                loaded = self.loaded(target)
                with raising_unreachable(target.node), connect(loaded) as connection:
                    rows = rows_tally(loaded, record.ledger, 0).ask(connection)
            begun[target.shard] = BegunShard(record.phase, rows, record.phase not in (Phase.CREATED, Phase.LOADING))
        return begun

    def _first_record(self) -> DatabaseRecord:
        plan = self.plan
        return DatabaseRecord(
            operation=self.operation,
            snapshot=plan.request.name,
            increment=plan.chain.last.increment,
            digest=plan.chain.digest,
            began_at=plan.intent.began_at,
            by=own_label("restore", plan.request.name),
            version=self.version,
            groups=plan.request.groups,
            routes=plan.request.routes,
            replace=plan.request.replace,
            create_roles=plan.request.create_roles,
            allow_refused_ddl=plan.request.allow_refused_ddl,
            scope=plan.request.scope,
            exact_at=Time.exactly(plan.request.exact_at) if plan.request.exact_at else None,
            in_store=self.in_store,
            phase=Phase.CREATED,
            shards=tuple(target.shard for target in plan.targets),
            borrowed={node: tuple(sorted(numbers)) for node, numbers in plan.copies.borrowed.items()},
        )


@contextmanager
def running(
    plan: RestorePlan,
    progress: Progress,
    locked: Mapping[str, psycopg.Connection[Any]] | None = None,
    watch: Watch | None = None,
) -> Iterator[RestoreRun]:
    """Lock the targets and their fleet, and watch their nodes, while the block runs the restore.

    `locked` are the sessions that already hold the targets' locks, if any, and `watch` watches their nodes. Raises any
    error of lock_targets and lock_target_fleet.
    """
    progress.step("check targets")
    with ExitStack() as stack:
        watch = watch or stack.enter_context(watch_nodes(target.maintenance for target in plan.targets))
        obstacles = Obstacles()
        connections = locked or stack.enter_context(lock_targets(plan.targets, obstacles))
        reached = [target for target in plan.targets if target.shard in connections]
        waits = stack.enter_context(bounding_waits(watch, reached, connections, progress))
        inside = stack.enter_context(lock_target_fleet(plan.target_fleet, reached, connections))
        for target in reached:
            if target.shard in inside:
                waits.bound(target, inside[target.shard], math.inf)
        folder = stack.enter_context(TemporaryDirectory(prefix="cutline-ddl-"))
        progress.reached(RestoreCrashPoint.LOCKED)
        note_clocks(_read_clocks(reached, connections), progress, cut_time(plan.chain.last))
        run = RestoreRun(plan, connections, Path(folder), obstacles, watch, waits, progress, plan.report(), inside)
        stack.callback(run.release_tables)
        yield run


def _read_clocks(targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> list[ClockReading]:
    def read(target: Target) -> ClockReading:
        with raising_unreachable(target.node):
            return read_clock(target.node.id, connections[target.shard])

    return in_parallel(read, targets)
