"""Two creators that compete: real processes, each stopped where a test wants it, and what is true of the store after.

The one that comes first is stopped at a point, and loses its lock or keeps it. The other one runs then, to its end or
to a point where it is stopped too. Then the first goes on, then the other.
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

from snapshots.operations.crash_points import FULL_POINTS, INCREMENT_POINTS, PER_NODE, CrashPoint
from snapshots.operations.deciding import has_committed
from snapshots.records.commit import VOID_FORMAT
from snapshots.records.operation_records import operation_key, read_intent
from storage.store import ObjectStore
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.faults.world import PROCESS_SECONDS_MAX, ROOT, World, eventually

POLL_SECONDS = 0.02
SESSIONS = "application_name LIKE 'cutline%' OR application_name = 'pg_dump'"
COMMIT_FILE = re.compile(r"snapshots/([^/]+)/(?:snapshot|increments/(\d{16}))(?:\.\d+)?\.json")

Truth = list[dict[str, bytes]]


@dataclass(frozen=True, slots=True)
class Stop:
    """A point of a create, reached for the `count`th time; `place` is its number among all of the command's."""

    point: str
    count: int
    place: int

    def __str__(self) -> str:
        return f"{self.point.replace(' ', '_')}-{self.count}"


def stops(*, incremental: bool, nodes: int) -> list[Stop]:
    """Every point of a create; of those that are reached on every node the first and the last."""
    found: list[Stop] = []
    reached: Counter[CrashPoint] = Counter()
    for point in INCREMENT_POINTS if incremental else FULL_POINTS:
        if point is CrashPoint.COMMITTED:
            found.append(Stop(ABOUT_TO_COMMIT, 1, len(found)))
        # A full create has Spark ready twice: for its copy and for its cut.
        reached[point] += 1
        counts = (1, nodes) if point in PER_NODE else (reached[point],)
        found += [Stop(str(point), count, len(found) + number) for number, count in enumerate(counts)]
    return found


def stop_at(point: str, *, incremental: bool) -> Stop:
    """The stop where the point is reached for the first time."""
    return next(one for one in stops(incremental=incremental, nodes=1) if one.point == point)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A create that competes: of which snapshot, and where it is stopped."""

    name: str
    stop: Stop | None
    incremental: bool = False

    def is_past(self, point: str) -> bool:
        """Whether the point is reached where it is stopped."""
        return self.stop is not None and self.stop.place >= stop_at(point, incremental=self.incremental).place

    def __str__(self) -> str:
        return f"{'increment' if self.incremental else 'full'}-{self.stop or 'to_its_end'}"


@dataclass(frozen=True, slots=True)
class Contest:
    """Two entrants; `lock_lost`: while the first is stopped its sessions are ended."""

    first: Entrant
    second: Entrant
    lock_lost: bool

    @property
    def same(self) -> bool:
        """Whether both want the same name and number."""
        return (self.first.name, self.first.incremental) == (self.second.name, self.second.incremental)

    def __str__(self) -> str:
        lock = "lost" if self.lock_lost else "kept"
        return f"{self.first}-{lock}-{self.second}{'-same' if self.same else ''}"


@dataclass(slots=True)
class Run:
    """An entrant's process. `before` and `after` are the truth when it was stopped and when it went on."""

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

    def go_on(self, truth: Truth) -> None:
        """Let it go on, if it was stopped."""
        self.after = truth
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Wait for its end, and read what it told."""
        out, _ = self.process.communicate(timeout=PROCESS_SECONDS_MAX)
        assert "{" in out, self.log.read_text()
        self.document = json.loads(out[out.index("{") :])

    def truth_at_cut(self) -> Truth:
        """What the shards held at the cut of its commit: nobody writes while a process runs."""
        is_after_cut = self.entrant.is_past(CrashPoint.STARTS_WRITTEN) and self.document["cut"]["attempts"] == 1
        return self.before if is_after_cut or not self.after else self.after

    def __str__(self) -> str:
        return f"{self.entrant}: {self.process.returncode} {self.document}\n{self.log.read_text()}"


@contextmanager
def running(world: World, entrant: Entrant, truth: Truth) -> Iterator[Run]:
    """Run the entrant's process for the block, up to its stop; whatever is left of it at the end is killed."""
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
    """The state of a process as Linux tells it; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def end_sessions(world: World) -> None:
    """End every session of ours on all nodes, as a server does with a peer that it has lost."""
    for node in world.place.servers.nodes:
        with psycopg.connect(node.dsn(), autocommit=True) as connection:
            connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {SESSIONS}".encode())

            def left(connection: psycopg.Connection[Any] = connection) -> list[Any]:
                return connection.execute(f"SELECT pid FROM pg_stat_activity WHERE {SESSIONS}".encode()).fetchall()

            eventually(left)


def held(world: World, contest: Contest) -> tuple[Run, Run]:
    """Let the two compete; both have ended then."""
    world.writers.write()
    with running(world, contest.first, world.truth()) as first:
        assert first.is_stopped, f"{contest.first.stop} was not reached: {first.log.read_text()}"
        if contest.lock_lost:
            end_sessions(world)
        world.writers.write()
        with running(world, contest.second, world.truth()) as second:
            if contest.second.stop is None:
                second.end()
            world.writers.write()
            first.go_on(world.truth())
            first.end()
            if second.is_stopped:
                world.writers.write()
                second.go_on(world.truth())
            if contest.second.stop is not None:
                second.end()
    return first, second


def commits_in(store: ObjectStore) -> dict[tuple[str, int], list[str]]:
    """By name and number, the operations of all commits that are in the store, in whatever turn; read without us."""
    found: dict[tuple[str, int], list[str]] = {}
    for key in store.list("snapshots"):
        if match := COMMIT_FILE.fullmatch(key):
            document = json.loads(store.read(key))
            if document["schema"] != VOID_FORMAT:
                found.setdefault((match[1], int(match[2] or 0)), []).append(document["operation"])
    return found


def failed_that_committed(store: ObjectStore) -> list[str]:
    """The operations that are said to have failed and have a commit."""
    outcomes = [key for key in store.list("operations") if key.endswith("/outcome.json")]
    failed = [key.split("/")[1] for key in outcomes if json.loads(store.read(key))["state"] == "failed"]
    every = {operation for found in commits_in(store).values() for operation in found}
    assert all(store.exists(operation_key(one, "intent")) for one in failed)
    return [one for one in failed if one in every or has_committed(store, read_intent(store, one))]
