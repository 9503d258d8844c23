"""A fleet under faults: run commands on it, and check its state after each of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.read_only import read_record, resume_fleet
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.records.proven_chains import increment_numbers, read_chain
from cutline.storage.errors import BusyError, SnapshotError
from cutline.wal.drain.slots import drop_slot, slot_name
from tests.commands.snapshot_runs import Ready, Runs, names_of_snapshots, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.faults.awaited import QUIET_SECONDS_MAX, await_none, is_running
from tests.faults.cancelled_command import CancelledRun, Canceller, cancel_at
from tests.faults.injection import repaired_after
from tests.faults.sights import TaskEffect, on_effect
from tests.faults.signalled_command import BY_SPARK
from tests.faults.writers import Writers
from tests.run.by_spark import archiving_by_spark, in_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.fleet.config import Fleet
    from cutline.snapshots.records.commit import Commit
    from cutline.snapshots.records.operation_records import Intent
    from cutline.storage.store import ObjectStore
    from tests.faults.injection import FaultTargets, Repair

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS_MAX = 60
# A process also starts Spark, and the machine may be busy.
PROCESS_SECONDS_MAX = 600
RETRIES, WAIT_SECONDS = 1, 15.0
RESTORED = "restored"
COMMAND = "from cutline.cli.main import main; main()"
BY_SPARK_COMMAND = f"from tests.run.by_spark import work_by_spark; work_by_spark(); {COMMAND}"
SESSIONS_QUERY = """
SELECT format('%s %s %s', pid, state, left(query, 60)) FROM pg_stat_activity
 WHERE application_name LIKE 'cutline%' OR application_name = 'pg_dump'
"""
SLOTS_QUERY = "SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical' OR temporary"


@dataclass(frozen=True, slots=True)
class CreateResult:
    """How a create in this process ended; `hung` if it did so only after the fault was repaired."""

    commit: Commit | None
    error: SnapshotError | None
    watching: Watching
    hung: bool


@dataclass(slots=True)
class World:
    """A fleet that commands reach through proxies, and applications directly, by `targets.servers`.

    `slots` are those of the chains that continue, in all worlds on these servers.
    """

    fleet: Fleet
    spark: SparkSession
    targets: FaultTargets
    slots: set[str]
    publications: dict[str, list[str]] = field(default_factory=dict)

    @property
    def store(self) -> ObjectStore:
        return self.fleet.store.open()

    @property
    def runs(self) -> Runs:
        return Runs(self.fleet, Ready(self.spark))

    @property
    def writers(self) -> Writers:
        return Writers(self.targets.servers)

    # What an operator does.

    def create(
        self, name: str, watching: Watching, *, incremental: bool, terminal: bool = False, by_spark: bool = False
    ) -> Commit:
        """Run the command in this process."""
        request = CreateRequest(name, retries=RETRIES, wait_seconds=WAIT_SECONDS, terminal=terminal)
        source = Ready(self.spark if by_spark else in_driver(self.spark))
        with archiving_by_spark(wanted=by_spark):
            return (create_increment if incremental else create_full)(self.fleet, request, source, watching)

    def create_with_fault(
        self, name: str, at: tuple[str, int] | TaskEffect, fault: Callable[[FaultTargets], Repair], **options: bool
    ) -> CreateResult:
        """Run the command in this process with the fault, from a point or effect on; repair it after the command."""
        repairs: list[Repair] = []

        def begin() -> None:
            self.writers.write_where_possible()
            repairs.append(fault(self.targets))
            self.writers.write_where_possible()

        def then(reached: Reached) -> None:
            if (reached.point, reached.count) == at:
                begin()

        watching = Watching(then)
        commit, error = None, None
        with ExitStack() as stack:
            hung = stack.enter_context(repaired_after(repairs, COMMAND_SECONDS_MAX))
            if isinstance(at, TaskEffect):
                stack.enter_context(on_effect(at, self.targets.servers, self.store, begin))
            try:
                commit = self.create(name, watching, **options)
            except SnapshotError as raised:
                error = raised
        assert repairs, f"{at} was not reached: {error}"
        return CreateResult(commit, error, watching, hung.is_set())

    def create_killed(
        self, name: str, at: tuple[str, int], signal_name: str, *, by_spark: bool, **options: bool
    ) -> int:
        """Run the command as a process that gets the signal at a point; return its code when all its children ended."""
        words = ["create", name, *(f"--{option}" for option, is_so in options.items() if is_so)]
        words += ["--wait", str(WAIT_SECONDS)]
        program = [sys.executable, "-m", "tests.faults.signalled_command", signal_name, at[0], str(at[1]), "--"]
        done = subprocess.run(
            [*program, "--fleet", str(self.fleet.path), *words],
            capture_output=True, text=True, timeout=PROCESS_SECONDS_MAX, cwd=ROOT, check=False,
            env=os.environ | ({BY_SPARK: "1"} if by_spark else {}),
        )  # fmt: skip
        children = done.stdout.split("\n", 1)[0].split()
        assert "\n" in done.stdout, done.stderr
        await_none(lambda: [pid for pid in children if is_running(int(pid))])
        return done.returncode

    def create_killed_on_effect(self, name: str, effect: TaskEffect, *, incremental: bool, by_spark: bool) -> int:
        """Run the command as a process, and kill it as soon as the effect is seen."""
        words = ["create", name, *(["--incremental"] if incremental else [])]
        program = BY_SPARK_COMMAND if by_spark else COMMAND
        with subprocess.Popen(
            [sys.executable, "-c", program, "--fleet", str(self.fleet.path), *words],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
        ) as process:  # fmt: skip
            with on_effect(effect, self.targets.servers, self.store, process.kill) as seen:
                process.wait(PROCESS_SECONDS_MAX)
            assert seen.is_set(), f"there was no {effect}"
            return process.returncode

    def create_cancelled(
        self, name: str, at: tuple[str, int] | TaskEffect, *, by_spark: bool, **options: bool
    ) -> CancelledRun:
        """Run the command in this process, and cancel it at a point or as soon as an effect is seen."""
        words = ["create", name, *(f"--{option}" for option, is_so in options.items() if is_so)]
        words += ["--wait", str(WAIT_SECONDS), "--retries", str(RETRIES)]
        session = self.spark if by_spark else in_driver(self.spark)
        with archiving_by_spark(wanted=by_spark):
            if not isinstance(at, TaskEffect):
                return cancel_at(self.fleet, at, *words, spark=session)
            canceller = Canceller(self.fleet)
            with on_effect(at, self.targets.servers, self.store, canceller.cancel):
                return canceller.run(*words, spark=session)

    def create_next(self, name: str) -> tuple[Commit, list[str]]:
        """Create the chain's next commit, as soon as nothing of a killed command runs; return it and the notes."""
        watching = Watching()
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        while True:
            try:
                return self.create(name, watching, incremental=self.newest_increment(name) is not None), watching.notes
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def resume(self) -> list[str]:
        """Make the fleet writable, as soon as nothing of a killed command runs; return the nodes that were not."""
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        while True:
            try:
                return [result.node for result in resume_fleet(self.fleet, Silent()).results]
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    # The state of the fleet.

    def frozen_primaries(self) -> list[str]:
        """The primaries that are read-only."""
        found: list[str] = []
        for node in self.targets.servers.primaries:
            with psycopg.connect(node.dsn()) as connection:
                found += [node.id] if read_record(node, connection) else []
        return found

    def newest_increment(self, name: str) -> int | None:
        """The newest increment of a snapshot, 0 for the full one; None if `list` does not show the snapshot."""
        if name not in names_of_snapshots(self.fleet):
            return None
        return max(increment_numbers(self.store, name), default=0)

    def open_operations(self) -> list[Intent]:
        """The operations that the next command has to settle."""
        return read_open_intents(self.store)

    def keep_chain(self, name: str) -> None:
        """Expect the slots of the chain from now on."""
        self.slots.add(slot_name(read_chain(self.store, name, 0).full.operation))

    def end_chain(self, name: str) -> None:
        """Drop the slots of the chain, and don't expect them any more."""
        slot = slot_name(read_chain(self.store, name, 0).full.operation)
        self.slots.discard(slot)
        for node in self.fleet.nodes:
            assert drop_slot(node, slot)

    def lose_slot(self, name: str, node: str) -> None:
        """Drop the chain's slot on a node, as somebody does by mistake; the next increment copies the node again."""
        slot = slot_name(read_chain(self.store, name, 0).full.operation)
        assert drop_slot(self.fleet.node(node), slot)

    def last_renewal(self, name: str, node: str) -> int:
        """The number of the last increment that has copied the node again; 0 if none has."""
        return read_chain(self.store, name).begun(node)

    def await_healthy(self) -> None:
        """Wait until the standbys are connected; all servers must be running."""
        for node in self.targets.servers.nodes:
            assert node in self.targets.servers.running(), f"{node.id} is down"
            if node.backup_of:
                dsn = node.dsn("postgres")
                await_none(lambda dsn=dsn: not read_value(dsn, "SELECT count(*) FROM pg_stat_wal_receiver"))

    def find_leftovers(self) -> list[str]:
        """Find what commands have left on the nodes, and chains' slots that are missing."""
        found = [f"{node}: read-only" for node in self.frozen_primaries()]
        for node in self.targets.servers.nodes:
            with psycopg.connect(node.dsn(), autocommit=True) as connection:
                found += [f"{node.id}: session {row[0]}" for row in connection.execute(SESSIONS_QUERY)]
                slots = {row[0] for row in connection.execute(SLOTS_QUERY)}
                found += [f"{node.id}: slot {slot}" for slot in sorted(slots ^ self.slots)]
                gids = connection.execute("SELECT gid FROM pg_prepared_xacts").fetchall()
                found += [f"{node.id}: prepared {gid}" for (gid,) in gids]
                now = [row[0] for row in connection.execute("SELECT pubname FROM pg_publication ORDER BY 1")]
                if now != self.publications.setdefault(node.id, now):
                    found.append(f"{node.id}: publications {now}")
        return found

    def create_next_and_compare(self, name: str) -> None:
        """Take an increment, and assert that it restores to what the shards hold now."""
        self.create_next(name)
        self.check_restored(name)

    def truth(self) -> list[dict[str, bytes]]:
        """The rows that every shard holds now, as PostgreSQL prints them."""
        return [sorted_copies(node.dsn) for node in self.fleet.primaries]

    def check_restored(
        self, name: str, increment: int | None = None, truth: list[dict[str, bytes]] | None = None
    ) -> None:
        """Assert that the increment (None: the newest) restores to `truth` (None: what the shards hold now)."""
        nodes = tuple(with_database(node, RESTORED) for node in self.fleet.primaries)
        target = replace(self.fleet, nodes=nodes)
        try:
            self.runs.restore(name, target, increment)
            found = [sorted_copies(copy.dsn) for copy in target.primaries]
            assert found == (self.truth() if truth is None else truth), f"{name} at {increment}"
        finally:
            for node in self.targets.servers.primaries:
                with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
                    connection.execute(f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)".encode())


def read_value(dsn: str, query: str) -> object:
    """The only value that the query returns."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(query.encode()).fetchone()
        return row and row[0]
