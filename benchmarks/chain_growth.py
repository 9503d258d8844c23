"""Measure the cost of commands as a chain grows: requests, bytes and processor time at 1, 10, 100 … small increments.

There are two shards with one standby each. Before every increment, one row changes on each shard. The store is moto's
S3 server in a process that counts requests. Commands run in one warm session, and their processor time includes Spark
but not the servers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.cutline import Cutline, warm_session
from benchmarks.machine import cpu_seconds
from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet

SIZES = (1, 10, 100, 1000)
NAME, BUCKET, ROWS = "chain", "growth", 1000
# Counts requests by method, and the bytes in request and response bodies; prints the counts for each line on stdin.
# It serves one request at a time: concurrent conditional puts of one key may all succeed in moto.
SERVER = """
import json, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

serving, lock, counts = threading.Lock(), threading.Lock(), {"in": 0, "out": 0}

def counted(application):
    def call(environ, start):
        with serving:
            body = b"".join(application(environ, start))
        with lock:
            method = environ["REQUEST_METHOD"]
            counts[method] = counts.get(method, 0) + 1
            counts["in"] += int(environ.get("CONTENT_LENGTH") or 0)
            counts["out"] += len(body)
        return [body]
    return call

server = make_server("127.0.0.1", 0, counted(DomainDispatcherApplication(create_backend_app)), threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.port, flush=True)
for _ in sys.stdin:
    with lock:
        print(json.dumps(counts), flush=True)
"""


@dataclass(frozen=True, slots=True)
class CountingServer:
    """moto's server in a separate process."""

    process: subprocess.Popen[str]
    port: int

    def counts(self) -> dict[str, int]:
        """Return the requests and bytes served so far."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the server was started without pipes")
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        counts: dict[str, int] = json.loads(self.process.stdout.readline())
        return counts


@contextmanager
def counting_server() -> Iterator[CountingServer]:
    """Run the server while the block runs."""
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True) as process:
        try:
            yield CountingServer(process, int(process.stdout.readline() if process.stdout else 0))
        finally:
            process.kill()


def measure_growth(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, object]]:
    """Take increments until the chain reaches the last size; at each size, yield one row per command."""
    with tempfile.TemporaryDirectory(prefix="cutline-growth-") as name, counting_server() as server:
        folder = Path(name)
        folder.chmod(0o755)
        servers = start_fleet(folder / "fleet", shards=2, backups=1, settings={"fsync": "off"})
        try:
            for dsn in servers.dsns():
                _execute(dsn, f"CREATE TABLE item AS SELECT n AS id, 0 AS n FROM generate_series(1, {ROWS}) AS n")
                _execute(dsn, "ALTER TABLE item ADD PRIMARY KEY (id)")
            with warm_session(_write_fleet(servers, folder, server.port)) as cutline:
                yield from _measure(cutline, servers, server, sizes)
        finally:
            stop_fleet(folder / "fleet", delete=True)


def _measure(
    cutline: Cutline, servers: EmbeddedFleet, server: CountingServer, sizes: Sequence[int]
) -> Iterator[dict[str, object]]:
    from cutline.snapshots.listing.listing import list_store

    target = cutline.fleet.path.with_name("target.toml")
    target.write_text(cutline.fleet.path.read_text().replace("/bank", "/back"))
    cutline.create(NAME)
    for number in range(1, sizes[-1] + 1):
        for dsn in servers.dsns():
            _execute(dsn, f"UPDATE item SET n = {number} WHERE id = {number % ROWS + 1}")
        if number not in sizes:
            cutline.create_incremental(NAME)
            continue
        commands: dict[str, Callable[[], object]] = {
            "create --incremental": lambda: cutline.create_incremental(NAME),
            "list": lambda: list_store(cutline.fleet),
            "check": lambda number=number: cutline.check(NAME, number),  # type: ignore[misc]
            "restore": lambda number=number: cutline.restore(NAME, number, target),  # type: ignore[misc]
        }
        for command, run in commands.items():
            before, cpu, began = server.counts(), _cpu(server), time.monotonic()
            run()
            seconds, spent, after = time.monotonic() - began, _cpu(server) - cpu, server.counts()
            served = {name: after[name] - before.get(name, 0) for name in after}
            yield {
                "increments": number,
                "command": command,
                "GET and HEAD": served.get("GET", 0) + served.get("HEAD", 0),
                "PUT": served.get("PUT", 0),
                "bytes read": served["out"],
                "bytes written": served["in"],
                "seconds": round(seconds, 2),
                "CPU seconds": round(spent, 2),
            }
        for primary in servers.primaries:
            _execute(primary.dsn("postgres"), "DROP DATABASE back")


def _cpu(server: CountingServer) -> float:
    return cpu_seconds(os.getpid()) - cpu_seconds(server.process.pid)


def store_lines(port: int) -> tuple[str, str]:
    """Create a bucket on the server; return the `store` of a fleet file, and its `[store_options]`."""
    import boto3

    access = {"aws_access_key_id": "growth", "aws_secret_access_key": "growth"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1", **access)
    client.create_bucket(Bucket=BUCKET)
    options = f'[store_options]\nkey = "growth"\nsecret = "growth"\nendpoint_url = "http://127.0.0.1:{port}"\n'
    return f"s3://{BUCKET}/store", options


def _write_fleet(servers: EmbeddedFleet, folder: Path, port: int) -> Path:
    given = servers.fleet_toml.read_text()
    rest = given[given.index("[[node]]") :]
    path, (store, options) = folder / "growth.toml", store_lines(port)
    path.write_text(f'name = "growth"\nstore = "{store}"\n{options}{rest}')
    return path


def _execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())


def main() -> None:
    """Print a row for each command and size; the optional argument limits the number of increments."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES[-1]
    for row in measure_growth([size for size in SIZES if size <= most]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
