"""Measure commands on a fleet of many shards: time, memory, threads, descriptors, the cut, and requests to the store.

The servers are real but tiny (benchmarks/tiny_servers.py), and share the machine with the command. Every command is a
process of its own. With `--s3`, the store is moto's S3 server, which counts requests and serves one at a time.

`--sessions N` also measures the markers of a cut alone, with N sessions spread over the primaries: as many as a fleet
of N primaries has.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer

from benchmarks.chain_growth import CountingServer, counting_server, store_lines
from benchmarks.cutline import COMMAND
from benchmarks.machine import PROCESSES
from benchmarks.processes import run_measured
from benchmarks.tiny_servers import TinyServers, execute_on, tiny_servers
from cutline.fleet.config import load_fleet
from cutline.nodes.connections import connect
from cutline.nodes.sessions import in_parallel
from cutline.wal.cut.markers import Marker, write_markers

NAME, TARGET_DATABASE = "chain", "back"
IDLE_INCREMENTS, MARKER_ROUNDS = 3, 5


@dataclass(slots=True)
class Peaks:
    """The most threads and descriptors that a command's own process has had."""

    threads: int = 0
    descriptors: int = 0

    def sample(self, pid: int) -> None:
        """Note how many it has now; the process may have ended."""
        process = PROCESSES / str(pid)
        with suppress(OSError):
            self.threads = max(self.threads, len(list((process / "task").iterdir())))
            self.descriptors = max(self.descriptors, len(list((process / "fd").iterdir())))


@dataclass(frozen=True, slots=True)
class Bench:
    """The fleet's servers and files, and the counting server if the store is S3."""

    servers: TinyServers
    folder: Path
    fleet: Path
    s3: CountingServer | None

    def measure(self, label: str, *words: str) -> dict[str, object]:
        """Run `snapshot` with these words, and return the row for it."""
        before, peaks = self._stored(), Peaks()
        command = [sys.executable, "-c", COMMAND, "--fleet", str(self.fleet), "--json", *words]
        environment = {"XDG_CACHE_HOME": str(self.folder), "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        ran = run_measured(command, self.folder, environment, peaks.sample)
        after = self._stored()
        document: dict[str, Any] = json.loads(ran.output)
        row: dict[str, object] = {
            "nodes": len(self.servers.nodes),
            "command": label,
            "seconds": round(ran.seconds, 2),
            "CPU seconds": round(ran.cpu_seconds, 2),
            "MiB": round(ran.peak_bytes["driver"] / 2**20),
            "threads": peaks.threads,
            "descriptors": peaks.descriptors,
            "stored": {name: after[name] - before.get(name, 0) for name in after},
            "stderr lines": len(ran.messages.splitlines()),
            "steps": ran.steps,
        }
        if cut := document.get("cut"):
            row["cut seconds"] = round(cut["seconds"], 3)
        return row

    def _stored(self) -> Mapping[str, int]:
        if self.s3:
            return self.s3.counts()
        sizes = [path.stat().st_size for path in (self.folder / "store").rglob("*") if path.is_file()]
        return {"objects": len(sizes), "bytes": sum(sizes)}


def measure_commands(bench: Bench) -> Iterator[dict[str, object]]:
    """Run the commands in order; yield a row for each."""
    yield bench.measure("init", "init")
    yield bench.measure("create", "create", NAME)
    for _ in range(IDLE_INCREMENTS):
        yield bench.measure("create --incremental, idle", "create", NAME, "--incremental")
    execute_on(bench.servers.primaries, "UPDATE item SET n = n + 1 WHERE id = 1")
    yield bench.measure("create --incremental, a row of each shard", "create", NAME, "--incremental")
    yield bench.measure("list", "list")
    yield bench.measure("check", "check", NAME)
    target = bench.fleet.with_name("target.toml")
    target.write_text(re.sub(r"/bank\?", f"/{TARGET_DATABASE}?", bench.fleet.read_text()))
    yield bench.measure("restore", "restore", NAME, "--to", str(target))


def measure_markers(bench: Bench, count: int) -> Iterator[dict[str, object]]:
    """Write the markers of cuts with `count` sessions spread over the primaries; yield a row for each cut."""
    primaries = load_fleet(bench.fleet).primaries
    nodes = [replace(primaries[n % len(primaries)], id=f"session {n}") for n in range(count)]
    with ExitStack() as stack:
        began = time.monotonic()
        opened = in_parallel(connect, nodes)
        connections: dict[str, psycopg.Connection[Any]] = {}
        for node, connection in zip(nodes, opened, strict=True):
            connections[node.id] = stack.enter_context(connection)
        connecting = time.monotonic() - began
        for number in range(MARKER_ROUNDS):
            own, began = time.process_time(), time.monotonic()
            for kind in ("start", "finish"):
                write_markers(connections, Marker("benchmark", f"cut {number}", kind))
            seconds, spent = time.monotonic() - began, time.process_time() - own
            yield {
                "command": "the markers of a cut alone",
                "sessions": count,
                "servers": len(primaries),
                "seconds to connect": round(connecting, 2),
                "cut seconds": round(seconds, 3),
                "CPU seconds of the driver": round(spent, 3),
            }


def main(
    *,
    shards: Annotated[int, typer.Option(min=1, help="Number of primaries.")] = 50,
    standbys: Annotated[int, typer.Option(min=0, help="Number of standbys of each primary.")] = 0,
    s3: Annotated[bool, typer.Option("--s3", help="Store to a counting S3 server instead of a folder.")] = False,
    sessions: Annotated[int, typer.Option(min=0, help="Also write markers with this many sessions.")] = 0,
    only_markers: Annotated[bool, typer.Option("--only-markers", help="Run no commands.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where to put the servers' data; it must be short.")] = None,
) -> None:
    """Print a row for each command."""
    # On SIGTERM, stop the servers, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with ExitStack() as stack:
        # The path of a socket is limited in length, and the servers' account must be able to enter the folder.
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cutline-shards-", dir=folder)))
        work.chmod(0o755)
        (work / "nodes").mkdir()
        began = time.monotonic()
        servers = stack.enter_context(tiny_servers(work / "nodes", shards=shards, standbys=standbys))
        print(json.dumps({"servers": len(servers.nodes), "seconds": round(time.monotonic() - began, 1)}), flush=True)
        counting = stack.enter_context(counting_server()) if s3 else None
        more = "" if standbys else '[check]\nallow = ["one-copy"]'
        store = f"file://{work / 'store'}"
        if counting:
            store, options = store_lines(counting.port)
            more += f"\n{options}"
        bench = Bench(servers, work, servers.write_fleet(work / "fleet.toml", store, more), counting)
        for row in () if only_markers else measure_commands(bench):
            print(json.dumps(row), flush=True)
        for row in measure_markers(bench, sessions) if sessions else ():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    typer.run(main)
