"""A drain is killed at four fifths: the next increment archives only the rest, and loses nothing.

The short form uses small chunks, and the drain pauses where it is to be killed. The long form (CUTLINE_SOAK) archives
20 million changes in chunks of the normal size, and prints its measurements.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.fleet.config import Fleet
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import with_database
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import BusyError, SnapshotError
from cutline.storage.local import LocalStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import read_metadata
from tests.commands.snapshot_runs import Ready, Runs, command_line, configure_fleet, sorted_copies
from tests.integration.conftest import FleetFactory
from tests.run.soak import SOAK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARD = "s1"
SHARE = 0.8
TRANSACTIONS = 30
ROWS_EACH = 10_000
LONG_TRANSACTIONS, LONG_ROWS_EACH = 200, 100_000
KILL_SECONDS_MAX, LONG_KILL_SECONDS_MAX = 300, 1800
FREE_SECONDS_MAX = 60
SHORT_SECONDS_MAX, LONG_SECONDS_MAX = 600, 3600

# Every Python process of the command to be killed loads this, Spark's workers included. A chunk is one transaction, and
# a worker pauses after segment `last`.
PAUSE_AFTER_LAST = """
import time
import cutline.wal.drain.drain

create = cutline.wal.drain.drain.create_segment

def create_some(store, prefix, number, held, *rest, **more):
    while number > {last}:
        time.sleep(1)
    return create(store, prefix, number, held, *rest, **more)

cutline.wal.drain.drain.create_segment = create_some
for name in ("FIRST_CHUNK_MESSAGES", "CHUNK_MESSAGES_MIN", "CHUNK_MESSAGES_MAX"):
    setattr(cutline.wal.drain.drain, name, {messages})
"""


@dataclass(slots=True)
class Sampler:
    """Repeatedly reads the slot's position, and after it the archive's end."""

    dsn: str
    archive: Path
    pairs: list[tuple[int, int]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self.done.wait(0.01):
                (confirmed,) = connection.execute(query).fetchone() or ("",)
                newest = max(path.name for path in self.archive.glob("*.parquet"))
                self.pairs.append((Lsn.parse(confirmed), stored(self.archive, newest).through))


@contextmanager
def sampled(dsn: str, archive: Path) -> Iterator[Sampler]:
    """Sample while the block runs."""
    sampler = Sampler(dsn, archive)
    thread = threading.Thread(target=sampler.sample)
    thread.start()
    try:
        yield sampler
    finally:
        sampler.done.set()
        thread.join()


def execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def change_rows(dsn: str, transactions: int, rows_each: int) -> None:
    """Run transactions, two of inserts and one of updates in every three."""
    for number in range(transactions):
        low = (number // 3 * 2 + number % 3) * rows_each
        if number % 3 < 2:
            execute(dsn, f"INSERT INTO t SELECT n, md5(n::text) FROM generate_series({low}, {low + rows_each - 1}) n")
        else:
            low -= rows_each
            execute(dsn, f"UPDATE t SET v = v || 'x' WHERE id BETWEEN {low} AND {low + rows_each - 1}")


def files_of(archive: Path) -> dict[str, tuple[int, int, int]]:
    """Every segment's inode, time and size, which differ if it is written again."""
    found = {path.name: path.stat() for path in sorted(archive.glob("*.parquet"))}
    return {name: (status.st_ino, status.st_mtime_ns, status.st_size) for name, status in found.items()}


@cache
def stored(archive: Path, name: str) -> Segment:
    """Read a segment's metadata, which never changes."""
    # The archive is snapshots/chain/wal/<node>/<chain> in the store; a segment's metadata has its key.
    root = archive.parents[4]
    key, number = str((archive / name).relative_to(root)), int(name.split(".")[0])
    return read_metadata(LocalStore(root), archive.parent.name, key, number).segment


def changes_archived(archive: Path) -> int:
    return sum(stored(archive, path.name).changes for path in archive.glob("*.parquet"))


def kill_command(
    fleet: Fleet, python_path: str, is_time: Callable[[], bool], seconds_max: float
) -> tuple[float, dict[str, int]]:
    """Take an increment in a subprocess and kill it when `is_time`; return the seconds until then, and its memory."""
    peak: dict[str, int] = {}
    began = time.monotonic()
    with subprocess.Popen(
        command_line(fleet, "create", "chain", "--incremental"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": python_path},
    ) as process:  # fmt: skip
        try:
            while not is_time():
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() - began < seconds_max
                time.sleep(0.02)
            peak = peak_bytes(process.pid)
        finally:
            process.send_signal(signal.SIGKILL)
    return time.monotonic() - began, peak


def peak_bytes(pid: int) -> dict[str, int]:
    """Peak memory of the command's own process, and of the largest Python process below it."""
    parents: dict[int, int] = {}
    held: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            if "python" in status["Name"]:
                held[int(folder.name)] = int(status.get("VmHWM", "0 kB").split()[0]) << 10
            parents[int(folder.name)] = int(status["PPid"])

    def is_below(one: int) -> bool:
        return one == pid or (one in parents and is_below(parents[one]))

    workers = [size for one, size in held.items() if one != pid and is_below(one)]
    return {"command": held.get(pid, 0), "worker": max(workers, default=0)}


def retry_while_busy(work: Callable[[], Commit]) -> Commit:
    """Do `work` as soon as the server has noticed the end of the killed command's sessions."""
    deadline = time.monotonic() + FREE_SECONDS_MAX
    while True:
        try:
            return work()
        except SnapshotError as error:
            if error.exit_code != BusyError.exit_code or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.timeout(LONG_SECONDS_MAX if SOAK_SECONDS else SHORT_SECONDS_MAX)
def test_a_drain_killed_at_four_fifths_is_resumed_there(
    fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path
) -> None:
    embedded = fleet_factory(shards=1, schema=False)
    transactions, rows_each = (LONG_TRANSACTIONS, LONG_ROWS_EACH) if SOAK_SECONDS else (TRANSACTIONS, ROWS_EACH)
    changes = transactions * rows_each
    (server,) = embedded.primaries
    execute(server.dsn("postgres"), "CREATE DATABASE bank")
    execute(server.dsn(), "CREATE TABLE t (id integer PRIMARY KEY, v text)")
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(fleet, Ready(spark))
    runs.init()
    runs.full("chain")
    began = time.monotonic()
    change_rows(server.dsn(), transactions, rows_each)
    print(f"{changes:,} changes made in {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201
    (archive,) = (tmp_path / "store" / "snapshots" / "chain" / "wal" / SHARD).iterdir()
    before = files_of(archive)
    if SOAK_SECONDS:
        python_path, seconds_max = os.environ.get("PYTHONPATH", ""), LONG_KILL_SECONDS_MAX
    else:
        last = len(before) + int(transactions * SHARE)
        (tmp_path / "sitecustomize.py").write_text(PAUSE_AFTER_LAST.format(last=last, messages=rows_each))
        python_path, seconds_max = f"{tmp_path}:{Path(__file__).parents[2]}", KILL_SECONDS_MAX

    def is_time() -> bool:
        return changes_archived(archive) >= SHARE * changes

    with sampled(server.dsn(), archive) as sampler:
        killed_after, peak = kill_command(fleet, python_path, is_time, seconds_max)
        kept = files_of(archive)
        began = time.monotonic()
        # Tasks of the killed command may still be ending.
        commit = retry_while_busy(lambda: runs.increment("chain"))
        resumed_after = time.monotonic() - began
    print_figures(sampler, commit, (killed_after, resumed_after), peak)
    assert kept.items() <= files_of(archive).items()
    assert commit.counts["changes"] == changes
    assert_resumed(fleet, archive, before, commit)
    # The slot never passed the end of the archive.
    assert all(confirmed <= through for confirmed, through in sampler.pairs)
    assert len({confirmed for confirmed, _ in sampler.pairs}) >= (8 if SOAK_SECONDS else 20)
    target = replace(fleet, nodes=tuple(with_database(node, "again") for node in fleet.primaries))
    runs.restore("chain", target)
    if SOAK_SECONDS:
        assert row_sums(server.dsn("again")) == row_sums(server.dsn())
    else:
        assert sorted_copies(server.dsn("again")) == sorted_copies(server.dsn())


def row_sums(dsn: str) -> tuple[object, ...]:
    """The row count, and the sum of PostgreSQL's hashes of all rows: they are too many to compare one by one."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*), sum(hashtextextended(t::text, 0)::numeric) FROM t").fetchone()
    assert row is not None
    return row


def print_figures(sampler: Sampler, commit: Commit, seconds: tuple[float, float], peak: dict[str, int]) -> None:
    """Print what the long form measures; pytest shows it with -s."""
    own = sum(one.changes for one in commit.segments[SHARD] if one.operation == commit.operation)
    memory = ", ".join(f"{name} {size >> 20} MiB" for name, size in peak.items())
    print(  # noqa: T201
        f"{commit.counts['changes']:,} changes: killed after {seconds[0]:.1f} s ({memory}),"
        f" resumed in {seconds[1]:.1f} s, archiving {own:,} more; {len(commit.segments[SHARD])} segments in all;"
        f" {len(sampler.pairs)} samples at {len({slot for slot, _ in sampler.pairs})} positions"
    )


def assert_resumed(fleet: Fleet, archive: Path, before: dict[str, tuple[int, int, int]], commit: Commit) -> None:
    """The killed command archived at least four fifths, the next one the rest, and neither archived anything twice."""
    segments = commit.segments[SHARD]
    assert [segment.number for segment in segments] == list(range(len(before) + 1, len(before) + len(segments) + 1))
    own = [segment.operation == commit.operation for segment in segments]
    # First all segments of the killed command, then all of the next one's.
    assert own == sorted(own)
    assert len({segment.operation for segment in segments}) == 2
    total = sum(segment.changes for segment in segments)
    earlier = sum(segment.changes for segment, is_own in zip(segments, own, strict=True) if not is_own)
    assert SHARE * total <= earlier < total
    chain = read_chain(fleet.store.open(), "chain")
    assert [segment.key.rsplit("/", 1)[-1] for segment in chain.segments(SHARD)] == list(files_of(archive))
