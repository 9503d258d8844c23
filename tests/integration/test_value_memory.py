"""The memory of a worker that copies, drains, hashes or loads large values: a few times the largest row, however many.

Every task runs in a process of its own kind, after one of small rows, and its growth is counted in rows as COPY prints
them. CUTLINE_SOAK chooses values of 500 MB, which is as much of a bytea as COPY can print; otherwise rows of 80 MB show
when another copy is made. Smaller rows would not: of these the drain holds one while it stores another.
`test_large_rows.py` runs whole commands.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cutline.check.base_hashes import BaseHashReport, BaseHashTask, NodeBase, hash_base
from cutline.check.table_forms import TableForms
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import connect
from cutline.restore.rows.load import BaseLoadTask, Feed, LoadTarget, SegmentLoadTask, create_ledger, load_task
from cutline.snapshots.base_copy.copy_ranges import CopyDestination, CopyReport, CopyTask, PageRange, copy_ranges
from cutline.snapshots.fold.sources import BaseSource, SegmentSource, Source
from cutline.spark.task_processes import InDriver
from cutline.storage.location import StoreLocation
from cutline.wal.drain.drain import LARGE_BYTES, drain
from tests.integration.wal_place import Place, groups_of, place
from tests.run.soak import SOAK_SECONDS, first

__all__ = ["place"]  # the fixture

ROOT = Path(__file__).parent.parent.parent
VALUE_BYTES = (
    dict.fromkeys(("bytea", "text"), 500_000_000) if SOAK_SECONDS else {"bytea": 40_000_000, "text": 80_000_000}
)
ROWS = 2
# What does not grow with the row: what waits to be written, and an object of 64 MiB to which the row is added.
FIXED_BYTES = 80_000_000
# In rows; one copy more exceeds them. Of smaller values an object has several, which are read as one.
DRAINED_MAX, COPIED_MAX, READ_MAX = (4.8, 4.8, 3.0) if SOAK_SECONDS else (4.2, 4.8, 3.5)
WORKER_SECONDS_MAX = 3600
# Runs a function on tasks one after the other; prints the results, and by how much memory grew at most after the first.
WORKER = """
import base64, pickle, sys
from pathlib import Path
from cutline.columns.allocator import choose_allocator

choose_allocator()

def held(what):
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(what)) << 10

function, tasks = pickle.loads(base64.b64decode(sys.stdin.read()))
results = [function(tasks[0])]
Path("/proc/self/clear_refs").write_text("5")
before = held("VmRSS:")
results += map(function, tasks[1:])
print(base64.b64encode(pickle.dumps((results, held("VmHWM:") - before))).decode())
"""


def run_measured(function: Callable[[Any], Any], tasks: Sequence[Any], printed_bytes: int) -> tuple[list[Any], float]:
    """Run the tasks in a process; return their results, and how many times `printed_bytes` all but the first took."""
    worker = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=base64.b64encode(pickle.dumps((function, tasks))).decode(),
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS_MAX,
        cwd=ROOT,
    )
    assert worker.returncode == 0, worker.stderr
    results, grown = pickle.loads(base64.b64decode(worker.stdout))
    assert all(one.problem is None for one in results), results
    times = max(grown - FIXED_BYTES, 0) / printed_bytes
    print(f"{function.__name__}: {grown >> 20} MiB, {times:.2f} rows of {printed_bytes >> 20} MiB")  # noqa: T201  # figures
    return results, times


def hash_only_base(task: BaseHashTask) -> BaseHashReport:
    """Hash the only object of the task."""
    (report,) = hash_base(task)
    return report


@contextmanager
def exported(place: Place) -> Iterator[str]:
    with connect(place.primary) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        (name,) = holder.execute("SELECT pg_export_snapshot()").fetchone() or ("",)
        yield name


def oid_of(place: Place, table: str) -> int:
    (oid,) = place.connection.execute("SELECT %s::regclass::oid::int", (table,)).fetchone() or (0,)
    return int(oid)


def digests(place: Place) -> list[Any]:
    return place.connection.execute("SELECT id, length(v), md5(v) FROM large ORDER BY id").fetchall()


def values_of(kind: str) -> Iterator[bytes | str]:
    """Values that compress badly; of the text COPY escapes every 21st character, which need no escape in WAL."""
    for _ in range(ROWS):
        drawn = os.urandom(VALUE_BYTES[kind] if kind == "bytea" else VALUE_BYTES[kind] // 2)
        yield drawn if kind == "bytea" else drawn.hex("\n", 10)


@pytest.mark.timeout(7200)
@pytest.mark.skipif(sys.platform != "linux", reason="high-water marks can be reset on Linux alone")
@pytest.mark.parametrize("kind", first(["bytea", "text"]))
def test_a_large_value_takes_a_few_times_its_row_through_every_task(place: Place, kind: str) -> None:
    place.connection.execute(f"CREATE TABLE small (id int PRIMARY KEY, v {kind}); CREATE TABLE large (LIKE small)")
    place.connection.execute("ALTER TABLE large ADD PRIMARY KEY (id), ALTER v SET STORAGE EXTERNAL")
    groups = groups_of(place)
    follower = place.follow(groups)
    place.connection.execute("INSERT INTO small VALUES (1, 'few')")
    finishes = [place.write_finish()]
    for number, value in enumerate(values_of(kind)):
        place.connection.execute("INSERT INTO large VALUES (%s, %b)", (number, value))
    finishes.append(place.write_finish())
    expected = digests(place)
    # Of the text, every 20 characters are followed by a newline, which COPY prints as two characters.
    printed = VALUE_BYTES[kind] * 2 if kind == "bytea" else VALUE_BYTES[kind] * 22 // 20
    assert printed > LARGE_BYTES
    times: dict[str, float] = {}

    tasks = [replace(follower.task, finish=Lsn(finish)) for finish in finishes]
    Path(follower.task.store.url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    drained, times["drain"] = run_measured(drain, tasks, printed)
    segments = [one.segment for one in drained[-1].segments]
    assert sum(one.changes for one in segments) == 1 + ROWS

    store = StoreLocation(f"file://{place.stores / 'copies'}")
    Path(place.stores / "copies").mkdir(parents=True, exist_ok=True)
    with exported(place) as name:
        ranges = [PageRange(groups[f"public.{table}"], oid_of(place, table)) for table in ("small", "large")]
        copies = [
            CopyTask(place.primary, number, name, (one,), CopyDestination("s", "o", store), 0)
            for number, one in enumerate(ranges)
        ]
        copied, times["copy"] = run_measured(copy_ranges, copies, printed)

    bases = [base_sources(report) for report in copied]
    forms = InDriver(TableForms.of(groups.values()))
    hashes = [BaseHashTask((NodeBase(one),), forms, store) for one in (*bases[0], *bases[1])]
    hashed, times["hash"] = run_measured(hash_only_base, hashes, printed)
    assert sum(report.rows for report in hashed) == 1 + ROWS

    ledger = create_ledger(place.connection)
    feed = Feed({0: LoadTarget(place.primary, {one.number: one for one in groups.values()}, ledger)})
    place.connection.execute("TRUNCATE small, large")
    loads = [BaseLoadTask(one, feed, None, store) for one in (*bases[0], *bases[1])]
    _, times["load of a copy"] = run_measured(load_task, loads, printed)
    assert digests(place) == expected

    place.connection.execute("TRUNCATE small, large")
    sources = [Source(one.key, one.node, 0, one.size, one.digest, segment=one) for one in segments]
    changes = [
        SegmentLoadTask(
            SegmentSource(source, one, Lsn(finishes[-1]), frozenset(), {}), feed, b"\xff", follower.task.store
        )
        for source, one in zip(sources, segments, strict=True)
    ]
    _, times["load of changes"] = run_measured(load_task, changes, printed)
    assert digests(place) == expected
    # Nobody holds another copy of a row: that would be 1 more.
    assert times["drain"] < DRAINED_MAX, times
    assert times["copy"] < COPIED_MAX, times
    assert max(times["hash"], times["load of a copy"], times["load of changes"]) < READ_MAX, times


def base_sources(report: CopyReport) -> list[BaseSource]:
    found = []
    for one in report.entries:
        rows = getattr(one, "rows", {})
        found.append(BaseSource(Source(one.key, one.node, 0, one.size, one.digest, rows), rows))
    return found
