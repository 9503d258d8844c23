"""Contests of two creates: real processes, each stopped where a test wants it, and the state of the store afterwards.

The first create is stopped at a point, and keeps its lock or loses it. Then the second runs to its end, or to a point
where it is stopped, too. Then the first continues, and after it the second.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from cutline.fleet.crash_points import CrashPoint
from cutline.snapshots.operations.committing import has_committed
from cutline.snapshots.records.commit import VOID_FORMAT
from cutline.snapshots.records.operation_records import operation_key, read_intent
from cutline.storage.store import ObjectStore
from tests.faults.awaited import await_none
from tests.faults.points import FULL_POINTS, INCREMENT_POINTS, PER_NODE
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.faults.world import PROCESS_SECONDS_MAX, ROOT, World

POLL_SECONDS = 0.02
SESSIONS = "application_name LIKE 'cutline%' OR application_name = 'pg_dump'"
COMMIT_FILE = re.compile(r"snapshots/([^/]+)/(?:snapshot|increments/(\d{16}))(?:\.\d+)?\.json")

Truth = list[dict[str, bytes]]


@dataclass(frozen=True, slots=True)
class Stop:
    """A point of a create, reached for the `count`th time; `position` is its index among all points of the command."""

    point: str
    count: int
    position: int

    def __str__(self) -> str:
        return f"{self.point.replace(' ', '_')}-{self.count}"


def all_stops(*, incremental: bool, nodes: int) -> list[Stop]:
    """Every point of a create; a point that is reached on every node for the first and the last of them."""
    found: list[Stop] = []
    reached: Counter[CrashPoint] = Counter()
    for point in INCREMENT_POINTS if incremental else FULL_POINTS:
        if point is CrashPoint.COMMITTED:
            found.append(Stop(ABOUT_TO_COMMIT, 1, len(found)))
        reached[point] += 1
        counts = (1, nodes) if point in PER_NODE else (reached[point],)
        found += [Stop(str(point), count, len(found) + number) for number, count in enumerate(counts)]
    return found


def stop_at(point: str, *, incremental: bool) -> Stop:
    """The stop at which the point is reached for the first time."""
    return next(one for one in all_stops(incremental=incremental, nodes=1) if one.point == point)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A competing create: the name of its snapshot, and where it is stopped."""

    name: str
    stop: Stop | None
    incremental: bool = False

    def is_past(self, point: str) -> bool:
        """Whether the create has reached the point when it is stopped."""
        return self.stop is not None and self.stop.position >= stop_at(point, incremental=self.incremental).position

    def __str__(self) -> str:
        return f"{'increment' if self.incremental else 'full'}-{self.stop or 'to_its_end'}"


@dataclass(frozen=True, slots=True)
class Contest:
    """Two entrants; `lock_lost`: the sessions of the first are ended while it is stopped."""

    first: Entrant
    second: Entrant
    lock_lost: bool

    @property
    def is_for_same_commit(self) -> bool:
        """Whether both would create the same snapshot or increment."""
        return (self.first.name, self.first.incremental) == (self.second.name, self.second.incremental)

    def __str__(self) -> str:
        lock = "lost" if self.lock_lost else "kept"
        return f"{self.first}-{lock}-{self.second}{'-same' if self.is_for_same_commit else ''}"


@dataclass(slots=True)
class Run:
    """An entrant's process. `before` and `after` are what the shards held when it was started and when it continued."""

    entrant: Entrant
    process: subprocess.Popen[str]
    log: Path
    before: Truth
    after: Truth = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> int:
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def is_stopped(self) -> bool:
        return state_of(self.process.pid) == "T"

    def await_stop_or_end(self) -> None:
        deadline = time.monotonic() + PROCESS_SECONDS_MAX
        while not self.is_stopped and self.process.poll() is None:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(POLL_SECONDS)

    def resume(self, truth: Truth) -> None:
        """Continue the process if it was stopped; `truth` is what the shards hold now."""
        self.after = truth
        self.process.send_signal(signal.SIGCONT)

    def await_end(self) -> None:
        """Wait for its end, and read the document that it printed."""
        out, _ = self.process.communicate(timeout=PROCESS_SECONDS_MAX)
        assert "{" in out, self.log.read_text()
        self.document = json.loads(out[out.index("{") :])

    def truth_at_cut(self) -> Truth:
        """What the shards held at the cut of its commit; nobody writes while a process runs."""
        is_after_cut = self.entrant.is_past(CrashPoint.STARTS_WRITTEN) and self.document["cut"]["attempts"] == 1
        return self.before if is_after_cut or not self.after else self.after

    def __str__(self) -> str:
        return f"{self.entrant}: {self.process.returncode} {self.document}\n{self.log.read_text()}"


@contextmanager
def running(world: World, entrant: Entrant, truth: Truth) -> Iterator[Run]:
    """Run the entrant's process up to its stop or its end, then the block; kill the process if it still runs."""
    stop = entrant.stop
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGSTOP"]
    program += [stop.point, str(stop.count), "--"] if stop else ["no point", "1", "--"]
    words = ["--fleet", str(world.fleet.path), "create", entrant.name, "--json", "--wait", "15"]
    log = world.fleet.path.with_name(f"{time.monotonic_ns()}.log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*program, *words, *(["--incremental"] if entrant.incremental else [])],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=os.environ,
        )  # fmt: skip
    run = Run(entrant, process, log, truth)
    try:
        run.await_stop_or_end()
        yield run
    finally:
        if process.poll() is None:
            process.kill()
            process.send_signal(signal.SIGCONT)
        process.wait()
        if process.stdout:
            process.stdout.close()


def state_of(pid: int) -> str:
    """The state of a process by /proc; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def end_sessions(world: World) -> None:
    """End all of Cutline's sessions on all nodes, as a server does when it has lost the client."""
    for node in world.targets.servers.nodes:
        with psycopg.connect(node.dsn(), autocommit=True) as connection:
            connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {SESSIONS}".encode())

            def left(connection: psycopg.Connection[Any] = connection) -> list[Any]:
                return connection.execute(f"SELECT pid FROM pg_stat_activity WHERE {SESSIONS}".encode()).fetchall()

            await_none(left)


def hold_contest(world: World, contest: Contest) -> tuple[Run, Run]:
    """Run both creates of the contest to their ends."""
    world.writers.write()
    with running(world, contest.first, world.truth()) as first:
        assert first.is_stopped, f"{contest.first.stop} was not reached: {first.log.read_text()}"
        if contest.lock_lost:
            end_sessions(world)
        world.writers.write()
        with running(world, contest.second, world.truth()) as second:
            if contest.second.stop is None:
                second.await_end()
            world.writers.write()
            first.resume(world.truth())
            first.await_end()
            if second.is_stopped:
                world.writers.write()
                second.resume(world.truth())
            if contest.second.stop is not None:
                second.await_end()
    return first, second


def commits_in(store: ObjectStore) -> dict[tuple[str, int], list[str]]:
    """The operations of all commits in the store, by name and number, of all turns; read without Cutline's code."""
    found: dict[tuple[str, int], list[str]] = {}
    for key in store.list("snapshots"):
        if match := COMMIT_FILE.fullmatch(key):
            document = json.loads(store.read(key))
            if document["schema"] != VOID_FORMAT:
                found.setdefault((match[1], int(match[2] or 0)), []).append(document["operation"])
    return found


def failed_that_committed(store: ObjectStore) -> list[str]:
    """The operations that have a commit although their outcome is failed."""
    outcomes = [key for key in store.list("operations") if key.endswith("/outcome.json")]
    failed = [key.split("/")[1] for key in outcomes if json.loads(store.read(key))["state"] == "failed"]
    every = {operation for found in commits_in(store).values() for operation in found}
    assert all(store.exists(operation_key(one, "intent")) for one in failed)
    return [one for one in failed if one in every or has_committed(store, read_intent(store, one))]
