"""What signs of life cost: full snapshots and restores with and without them in turns, on a folder and an S3 server.

Sides: `off`, `on`, and `often`: sixty times as many requests and signs as usual, whose cost is large enough to be seen.
A figure is the median of the rounds. `resolution` is how much the rounds of one side differ (half of their range, as a
share): a ratio that is nearer to 1 says nothing. The processor time is that of the command's process, without Spark's;
that of the thread which stores signs is measured by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

import cutline.snapshots.operations.activity as activities
from benchmarks.cutline import Cutline, warm_session
from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Progress, Silent
from cutline.snapshots.operations.activity import Activity, Command
from cutline.snapshots.records.operation_records import CancelRequest
from cutline.snapshots.records.store_identity import open_own_store

ROWS, ROUNDS = 2_000_000, 5
OFTEN_TIMES = 60
SIDES = ("off", "on", "often")
TABLE = """
CREATE TABLE item (id bigint PRIMARY KEY, n bigint NOT NULL, body text);
INSERT INTO item SELECT i, i * 7919 % 100003, md5(i::text) || md5((i + 1)::text)
  FROM generate_series(1, {}::bigint) AS i
"""
RESTORED, BUCKET, KEY, SERVER_SECONDS_MAX = "restored", "signs", "benchmark", 60.0
NAMES = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")


def main() -> None:
    """Measure and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="of the table")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each side")
    parser.add_argument("--endpoint", help="an S3 server with these keys in the environment; by default one of moto's")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cutline-signs-") as folder:
        servers = start_fleet(Path(folder) / "fleet", shards=1, backups=0, settings={"fsync": "off"})
        try:
            found = measure(servers, Path(folder), given.rows, given.rounds, given.endpoint)
        finally:
            stop_fleet(servers.directory, delete=True)
    sys.stdout.write(json.dumps({"rows": given.rows, "rounds": given.rounds} | found, indent=1) + "\n")


def measure(servers: EmbeddedFleet, folder: Path, rows: int, rounds: int, endpoint: str | None) -> dict[str, Any]:
    """The figures by store."""
    (node,) = servers.primaries
    with psycopg.connect(node.dsn("bank"), autocommit=True) as connection:
        connection.execute(TABLE.format(rows).encode())
        connection.execute("VACUUM ANALYZE item")
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        given = servers.fleet_toml.read_text()
        lines = [line for line in given.splitlines() if not line.startswith("store =")]
        for name, store in {"folder": f'store = "file://{folder}/store"', "s3": ""}.items():
            path = folder / f"{name}.toml"
            options = "" if store else stack.enter_context(s3_options(endpoint))
            first = store or f'store = "s3://{BUCKET}"'
            path.write_text("\n".join([first, *lines, options]))
            target = folder / f"{name}-target.toml"
            target.write_text(path.read_text().replace("/bank", f"/{RESTORED}"))
            with warm_session(path) as cutline:
                found[name] = summary(measure_store(cutline, target, rounds))
    return found


@contextmanager
def s3_options(endpoint: str | None) -> Iterator[str]:
    """A bucket of the S3 server, by default of a local one; yields the store_options that reach it."""
    import boto3

    with ExitStack() as stack:
        url = endpoint or stack.enter_context(moto_server())
        key, secret = (os.environ.get(f"AWS_{name}", KEY) if endpoint else KEY for name in NAMES)
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1"
        )
        client.create_bucket(Bucket=BUCKET)
        yield f'[store_options]\nendpoint_url = "{url}"\nkey = "{key}"\nsecret = "{secret}"\n'


@contextmanager
def moto_server() -> Iterator[str]:
    """A local S3 server; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + SERVER_SECONDS_MAX
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > deadline:
                raise RuntimeError("the S3 server does not start")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class MeasuredActivity(Activity):
    """An Activity that measures the processor time of its thread and its own end, and counts the signs made."""

    thread_seconds, end_seconds, signs = 0.0, 0.0, 0

    def __exit__(self, *error: Any) -> None:
        began = time.monotonic()
        super().__exit__(*error)
        self.end_seconds = time.monotonic() - began

    def _run(self) -> None:
        super()._run()
        self.thread_seconds = time.thread_time()

    def _sign(self, *arguments: Any) -> Any:
        self.signs += 1
        return super()._sign(*arguments)


@dataclass(slots=True)
class Sides:
    """By command and side the seconds, processor seconds, those of the thread, of its end, and signs of the rounds."""

    rounds: dict[tuple[str, str], list[tuple[float, ...]]] = field(default_factory=dict)

    def run(self, command: str, side: str, cutline: Cutline, work: Callable[[Progress], Any]) -> Any:
        """Run and measure one round."""
        began, cpu = time.monotonic(), time.process_time()
        activity: MeasuredActivity | None = None
        if side == "off":
            result = work(Silent())
        else:
            with frequency(OFTEN_TIMES if side == "often" else 1):
                activity = MeasuredActivity(
                    Silent(), Command(command), lambda: open_own_store(cutline.fleet), stop_nothing
                )
                with activity:
                    result = work(activity)
        of_thread = (activity.thread_seconds, activity.end_seconds, activity.signs) if activity else (0.0, 0.0, 0)
        measured = (time.monotonic() - began, time.process_time() - cpu, *of_thread)
        self.rounds.setdefault((command, side), []).append(measured)
        return result


def stop_nothing(_: CancelRequest) -> None:
    """Nobody cancels a benchmark."""


@contextmanager
def frequency(times: float) -> Iterator[None]:
    """Look and store signs so many times as often as usual."""
    before = activities.LOOK_SECONDS, activities.SIGN_SECONDS
    activities.LOOK_SECONDS, activities.SIGN_SECONDS = (seconds / times for seconds in before)
    try:
        yield
    finally:
        activities.LOOK_SECONDS, activities.SIGN_SECONDS = before


def measure_store(cutline: Cutline, target: Path, rounds: int) -> Sides:
    """Create and restore in rounds; each begins with another side, after one that is not counted."""
    from cutline.restore.plan.plan import plan_restore
    from cutline.restore.plan.request import RestoreRequest
    from cutline.restore.run.restore import restore_fleet
    from cutline.snapshots.create.context import CreateRequest
    from cutline.snapshots.create.full import create_full

    sides, warming = Sides(), Sides()
    for number in range(-1, rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            taken, name = sides if number >= 0 else warming, f"round-{number + 1}-{side}"

            def create(progress: Progress, name: str = name) -> Any:
                return create_full(cutline.fleet, CreateRequest(name), cutline.spark, progress)

            def restore(progress: Progress, name: str = name) -> Any:
                plan = plan_restore(cutline.fleet, load_fleet(target), RestoreRequest(name, 0))
                return restore_fleet(plan, cutline.spark, progress)

            cutline.forget(taken.run("create", side, cutline, create))
            taken.run("restore", side, cutline, restore)
            server = cutline.fleet.primaries[0].dsn.replace("/bank", "/postgres")
            with psycopg.connect(server, autocommit=True) as connection:
                connection.execute(f"DROP DATABASE {RESTORED}".encode())
    return sides


def summary(sides: Sides) -> dict[str, Any]:
    """The medians by command and side, the ratios to `off`, and what the thread takes of the command's time."""
    found: dict[str, Any] = {}
    for (command, side), rounds in sides.rounds.items():
        seconds, cpu, thread, end, signs = (median(column) for column in zip(*rounds, strict=True))
        all_seconds = sorted(one[0] for one in rounds)
        found.setdefault(command, {})[side] = {
            "seconds": round(seconds, 3),
            "resolution": round((all_seconds[-1] - all_seconds[0]) / 2 / seconds, 3),
            "processor_seconds": round(cpu, 3),
            "thread_processor_seconds": round(thread, 4),
            "thread_share": round(thread / seconds, 5),
            "end_seconds": round(end, 3),
            "signs": signs,
        }
    for sides_of in found.values():
        for side in ("on", "often"):
            for what in ("seconds", "processor_seconds"):
                sides_of[side][f"{what}_ratio"] = round(sides_of[side][what] / sides_of["off"][what], 3)
    return found


if __name__ == "__main__":
    main()
