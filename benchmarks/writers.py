"""What commands cost the writers of a fleet: latencies of pgbench's transactions with and without a running command.

The same is measured during dumps of pg_dump, which read all rows as a full snapshot does.

The transactions are due at a fixed rate, far below the server's capacity, and each latency includes the time that its
transaction began late. The server and the clients have one core of this machine and the commands another, as if they
ran on another machine; with a single core, they share it. Full snapshots are also taken with a limit.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.parts import take_turns
from benchmarks.results import Results
from benchmarks.shard import Shard, running_shard
from benchmarks.users import DUMP, allow_one_copy, run_command
from cutline.nodes.programs import run_tool

# In 20 s, p99.9 was the sixth slowest of 6,000 transactions, and varied threefold without any command.
ACCOUNTS, RATE, SECONDS, ROUNDS, CLIENTS = 2_000_000, 300, 60, 3, 4
CHAIN, LIMIT = "writers", "10MB/s"
ALONE, DURING_CREATE, DURING_INCREMENTS = "alone", "during create", "during increments"
DURING_LIMITED, DURING_DUMP = "during create with a limit", "during pg_dump"


def writers_part(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    """Measure the latencies alone, and during full snapshots, dumps and increments, in turns."""
    cores = sorted(os.sched_getaffinity(0))
    say(f"starting a server with {ACCOUNTS} accounts on core {cores[0]}; commands run on core {cores[-1]}")
    # A process that this thread starts has the thread's cores.
    os.sched_setaffinity(0, {cores[0]})
    try:
        _measure_all(results, folder, cores[0], cores[-1], say)
    finally:
        os.sched_setaffinity(0, cores)


def _measure_all(results: Results, folder: Path, core: int, other_core: int, say: Callable[[str], None]) -> None:
    with running_shard(folder / "writers", rows=ACCOUNTS, backups=0) as shard:
        allow_one_copy(shard.fleet)
        limited = shard.fleet.fleet_toml.with_name("limited.toml")
        limited.write_text(f'{shard.fleet.fleet_toml.read_text()}\n[limits]\nread = "{LIMIT}"\n')
        os.sched_setaffinity(0, {other_core})
        writers = Writers(shard, results, folder, core, say)
        writers.command("init")
        writers.command("create", CHAIN)
        numbers = itertools.count()

        def create(fleet_toml: Path = shard.fleet.fleet_toml) -> None:
            name = f"full-{next(numbers)}"
            writers.command("create", name, fleet_toml=fleet_toml)
            writers.command("delete", name, "--yes")

        def dump() -> None:
            stored = folder / "dump"
            run_tool("pg_dump", *DUMP, f"--file={stored}", shard.dsn)
            shutil.rmtree(stored)

        take_turns(
            ROUNDS,
            [
                lambda _: writers.measure(ALONE, None),
                lambda _: writers.measure(DURING_CREATE, create),
                lambda _: writers.measure(DURING_LIMITED, lambda: create(limited)),
                lambda _: writers.measure(DURING_DUMP, dump),
                lambda _: writers.measure(DURING_INCREMENTS, lambda: writers.command("create", CHAIN, "--incremental")),
            ],
        )


class Writers:
    """Clients of the shard, whose latencies are recorded in `results`."""

    def __init__(self, shard: Shard, results: Results, folder: Path, core: int, say: Callable[[str], None]) -> None:
        self._shard, self._results, self._folder, self._core, self._say = shard, results, folder, core, say

    def command(self, *words: str, fleet_toml: Path | None = None) -> None:
        """Run `snapshot` in a process of its own."""
        task = "writers: increment" if "--incremental" in words else f"writers: {words[0]}"
        file = fleet_toml or self._shard.fleet.fleet_toml
        task += " with a limit" if file != self._shard.fleet.fleet_toml else ""
        run_command(self._results, task, file, self._folder / "cache", words)

    def measure(self, condition: str, beside: Callable[[], None] | None) -> None:
        """Run the clients for SECONDS; until they end, call `beside` again and again."""
        self._say(f"writers {condition}")
        logs = self._folder / "pgbench"
        logs.mkdir(exist_ok=True)
        options = [
            "--builtin=simple-update", "--no-vacuum", f"--rate={RATE}", f"--client={CLIENTS}", "--jobs=2",
            f"--time={SECONDS}", "--log", f"--log-prefix={logs / 'latency'}",
        ]  # fmt: skip

        def run_clients() -> None:
            os.sched_setaffinity(0, {self._core})
            run_tool("pgbench", *options, self._shard.dsn)

        clients = threading.Thread(target=run_clients)
        clients.start()
        while beside is not None and clients.is_alive():
            beside()
        clients.join()
        # Client, transaction, latency in microseconds, and more.
        latencies = np.concatenate([np.loadtxt(log, usecols=2, ndmin=1) for log in logs.iterdir()]) / 1e6
        for log in logs.iterdir():
            log.unlink()
        if len(latencies) < RATE * SECONDS * 0.9:
            raise RuntimeError(f"{len(latencies)} transactions in {SECONDS} s: the server was too slow for the rate")
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            self._results.add(f"writers: {name} {condition}", float(np.quantile(latencies, share)))
        self._shard.checkpoint()
