"""A fleet under faults: the commands on it, and how it must be after each of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from fleet.nodes.connections import with_database
from fleet.progress import Silent
from fleet.read_only.frozen import read_record
from fleet.read_only.resume import resume_fleet
from snapshots.create.full import create_full
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.operations.operation import pending_operations
from snapshots.records.commits import increment_numbers, read_chain
from storage.errors import BusyError, SnapshotError
from tests.faults.injection import mended_after
from tests.faults.sights import Sight, sighting
from tests.faults.writers import Writers
from tests.snapshot_runs import Ready, Runs, command_line, names_of_snapshots, sorted_copies
from tests.watching import Reached, Watching
from wal.slots.slots import drop_slot, slot_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fleet.config import Fleet
    from snapshots.records.commit import Commit
    from snapshots.records.operation_records import Intent
    from storage.store import ObjectStore
    from tests.faults.injection import Mend, Place

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS_MAX = 60
# A process starts Spark too, on a machine that may be doing other things.
PROCESS_SECONDS_MAX = 150
QUIET_SECONDS_MAX = 60
RETRIES, WAIT_SECONDS = 1, 15.0
RESTORED = "restored"
SESSIONS_QUERY = """
SELECT format('%s %s %s', pid, state, left(query, 60)) FROM pg_stat_activity
 WHERE application_name LIKE 'cutline%' OR application_name = 'pg_dump'
"""
SLOTS_QUERY = "SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical' OR temporary"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command in this process ended; `hung` if it did so only once the fault was mended."""

    commit: Commit | None
    error: SnapshotError | None
    watching: Watching
    hung: bool


@dataclass(slots=True)
class World:
    """A fleet as the commands see it, through proxies, and `place.servers` as the applications do.

    `slots` are those of the chains that go on, of all worlds on these servers.
    """

    fleet: Fleet
    spark: SparkSession
    place: Place
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
        return Writers(self.place.servers)

    # What the operator does.

    def create(self, name: str, watching: Watching, *, incremental: bool, terminal: bool = False) -> Commit:
        """Run the command in this process."""
        request = CreateRequest(name, retries=RETRIES, wait_seconds=WAIT_SECONDS, terminal=terminal)
        return (create_increment if incremental else create_full)(self.fleet, request, Ready(self.spark), watching)

    def create_under(
        self, name: str, at: tuple[str, int] | Sight, fault: Callable[[Place], Mend], **kind: bool
    ) -> Ended:
        """Run the command in this process, with the fault from a point or sight on; mend it when all is over."""
        mends: list[Mend] = []

        def begin() -> None:
            self.writers.write_where_possible()
            mends.append(fault(self.place))
            self.writers.write_where_possible()

        def then(reached: Reached) -> None:
            if (reached.point, reached.count) == at:
                begin()

        watching = Watching(then)
        commit, error = None, None
        with ExitStack() as stack:
            hung = stack.enter_context(mended_after(mends, COMMAND_SECONDS_MAX))
            if isinstance(at, Sight):
                stack.enter_context(sighting(at, self.place.servers, self.store, begin))
            try:
                commit = self.create(name, watching, **kind)
            except SnapshotError as raised:
                error = raised
        assert mends, f"{at} was not reached: {error}"
        return Ended(commit, error, watching, hung.is_set())

    def create_killed(self, name: str, at: tuple[str, int], number: str, **kind: bool) -> int:
        """Run the command as a process that gets the signal at a point; its exit code, once all it started ended."""
        words = ["create", name, *(f"--{option}" for option, is_so in kind.items() if is_so)]
        words += ["--wait", str(WAIT_SECONDS)]
        program = [sys.executable, "-m", "tests.faults.signalled_command", number, at[0], str(at[1]), "--"]
        done = subprocess.run(
            [*program, "--fleet", str(self.fleet.path), *words],
            capture_output=True, text=True, timeout=PROCESS_SECONDS_MAX, cwd=ROOT, check=False,
        )  # fmt: skip
        told = done.stdout.split("\n", 1)[0].split()
        assert "\n" in done.stdout, done.stderr
        eventually(lambda: [pid for pid in told if is_running(int(pid))])
        return done.returncode

    def create_killed_on_sight(self, name: str, sight: Sight, *, incremental: bool) -> int:
        """Run the command as a process that is killed, with no more notice, as soon as something is seen."""
        words = ["create", name, *(["--incremental"] if incremental else [])]
        with subprocess.Popen(
            command_line(self.fleet, *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            with sighting(sight, self.place.servers, self.store, process.kill) as seen:
                process.wait(PROCESS_SECONDS_MAX)
            assert seen.is_set(), f"there was no {sight}"
            return process.returncode

    def next(self, name: str) -> tuple[Commit, list[str]]:
        """The next command of the chain, as soon as nothing of a killed one is left, and what it said."""
        watching = Watching()
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        while True:
            try:
                return self.create(name, watching, incremental=self.newest(name) is not None), watching.notes
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def resume(self) -> list[str]:
        """Let the fleet accept writes again, as soon as nothing of a killed command is left; the nodes that did not."""
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        while True:
            try:
                return [one.node for one in resume_fleet(self.fleet, Silent()).results]
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    # How it is.

    def frozen(self) -> list[str]:
        """The primaries that accept no writes."""
        found: list[str] = []
        for node in self.place.servers.primaries:
            with psycopg.connect(node.dsn()) as connection:
                found += [node.id] if read_record(connection) else []
        return found

    def newest(self, name: str) -> int | None:
        """The newest increment of a snapshot that `list` would show; None if it does not show it."""
        if name not in names_of_snapshots(self.fleet):
            return None
        return max(increment_numbers(self.store, name), default=0)

    def left_open(self) -> list[Intent]:
        """The operations that the next command has to settle."""
        return pending_operations(self.store)

    def keep(self, name: str) -> None:
        """The chain goes on: its slots stay."""
        self.slots.add(slot_name(read_chain(self.store, name, 0).full.operation))

    def end(self, name: str) -> None:
        """Nobody continues the chain any more."""
        slot = slot_name(read_chain(self.store, name, 0).full.operation)
        self.slots.discard(slot)
        for node in self.fleet.nodes:
            assert drop_slot(node, slot)

    def await_whole(self) -> None:
        """Wait until all servers run and the standbys follow."""
        for node in self.place.servers.nodes:
            assert node in self.place.servers.running(), f"{node.id} is down"
            if node.backup_of:
                dsn = node.dsn("postgres")
                eventually(lambda dsn=dsn: not one(dsn, "SELECT count(*) FROM pg_stat_wal_receiver"))

    def left_behind(self) -> list[str]:
        """What a command has left on the nodes that no chain needs."""
        found = [f"{node}: read-only" for node in self.frozen()]
        for node in self.place.servers.nodes:
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
        """Take an increment; what it restores to is what the shards hold now."""
        self.next(name)
        self.check_restored(name)

    def truth(self) -> list[dict[str, bytes]]:
        """What every shard holds now, as PostgreSQL prints it."""
        return [sorted_copies(node.dsn) for node in self.fleet.primaries]

    def check_restored(
        self, name: str, increment: int | None = None, truth: list[dict[str, bytes]] | None = None
    ) -> None:
        """The chain at the increment (None: the newest) is the truth (None: what the shards hold now)."""
        nodes = tuple(with_database(node, RESTORED) for node in self.fleet.primaries)
        target = replace(self.fleet, nodes=nodes)
        try:
            self.runs.restore(name, target, increment)
            found = [sorted_copies(copy.dsn) for copy in target.primaries]
            assert found == (self.truth() if truth is None else truth), f"{name} at {increment}"
        finally:
            for node in self.place.servers.primaries:
                with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
                    connection.execute(f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)".encode())


def eventually(left: Callable[[], object]) -> None:
    """Wait until `left` says that nothing is left."""
    deadline = time.monotonic() + QUIET_SECONDS_MAX
    while found := left():
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def one(dsn: str, query: str) -> object:
    """The one value that the query has."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(query.encode()).fetchone()
        return row and row[0]


def is_running(pid: int) -> bool:
    """Whether the process runs; one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
