"""The memory of a worker while it drains: large transactions and large rows are decoded in bounded memory.

The worker is a separate process, so that its peak memory is that of draining and of nothing else. CUTLINE_SOAK chooses
transactions of 4 million small changes or 1.5 GB, and rows of 100 MB; without it, a tenth of that suffices.
"""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Group
from tests.integration.wal_follower import Follower
from tests.integration.wal_place import Place, groups_of, place
from tests.run.soak import SOAK_SECONDS

__all__ = ["place"]  # the fixture

ROOT = Path(__file__).parent.parent.parent
# Prints the process's peak memory before and after the drain, in MiB, and the drain's result.
WORKER = """
import base64, json, pickle, sys
from cutline.wal.drain import drain as module
from cutline.wal.drain.drain import drain

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:")) >> 10

task = pickle.loads(base64.b64decode(sys.stdin.read()))
module.reads_with_psycopg = lambda *_: sys.argv[1] == "psycopg"
before = peak()
report = drain(task)
print(json.dumps({"before": before, "peak": peak(), "problem": report.problem, "segments": len(report.segments),
                  "changes": sum(one.segment.changes for one in report.segments)}))
"""
WORKER_SECONDS_MAX = 1800
# Text that does not compress well.
RANDOM = """
(SELECT string_agg(encode(sha512(convert_to(random()::text || n || i, 'UTF8')), 'hex'), '')
   FROM generate_series(1, {kibibytes} * 8) i)"""
SCALE = 10 if SOAK_SECONDS else 1


both_readers = pytest.mark.parametrize("reader", ["psycopg", "adbc"])


def drain_in_subprocess(follower: Follower, finish: int, reader: str) -> dict[str, int]:
    """Drain in a subprocess; return its peak memory, and the number of segments and changes that it stored."""
    task = replace(follower.task, finish=Lsn(finish))
    # A task makes no folder: `init` has made it.
    Path(task.store.url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    worker = subprocess.run(
        [sys.executable, "-c", WORKER, reader],
        input=base64.b64encode(pickle.dumps(task)).decode(),
        capture_output=True,
        text=True,
        timeout=WORKER_SECONDS_MAX,
        check=True,
        cwd=ROOT,
    )
    found: dict[str, int] = json.loads(worker.stdout)
    assert found["problem"] is None, found
    print(found)  # noqa: T201  # measurements of a long run
    return found


@pytest.mark.timeout(3600)
@both_readers
@pytest.mark.parametrize(
    ("columns", "row", "rows"),
    [("id int PRIMARY KEY, v int", "n, n", 400_000), ("id int PRIMARY KEY, v text", f"n, {RANDOM}", 150_000)],
    ids=["narrow", "1 KB"],
)
def test_one_large_transaction_is_decoded_in_bounded_memory(
    place: Place, columns: str, row: str, rows: int, reader: str
) -> None:
    place.connection.execute(f"CREATE TABLE t ({columns})".encode())
    follower = place.follow(groups_of(place))
    count = rows * SCALE
    place.connection.execute(
        f"INSERT INTO t SELECT {row.format(kibibytes=1)} FROM generate_series(1, {count}) n".encode()
    )
    found = drain_in_subprocess(follower, place.write_finish(), reader)
    assert found["changes"] == count
    # With more than one segment, a larger transaction would need no more memory.
    assert found["segments"] > (1 if "text" in columns or SOAK_SECONDS else 0)
    assert found["peak"] - found["before"] < 250


@pytest.mark.timeout(3600)
@both_readers
def test_a_large_row_is_decoded_with_a_few_copies_of_it(place: Place, reader: str) -> None:
    groups = wide_tables(place)
    follower = place.follow(groups)
    mebibytes = 10 * SCALE
    large = RANDOM.format(kibibytes=1024 * mebibytes).replace("|| n ", "")
    place.connection.execute(f"INSERT INTO keyed SELECT 1, {large}".encode())
    place.connection.execute("INSERT INTO bag SELECT v FROM keyed")
    place.connection.execute(r"UPDATE keyed SET v = E'\t\\' || v || E'\n'")
    place.connection.execute("DELETE FROM bag")
    finish = place.write_finish()
    found = drain_in_subprocess(follower, finish, reader)
    # A row deleted from a multiset is decoded whole, too.
    assert found["changes"] == 4
    assert found["peak"] - found["before"] < 200 + 7 * mebibytes
    follower.drain_fully(finish)
    assert follower.state() == place.lines(groups)


def wide_tables(place: Place) -> dict[str, Group]:
    place.connection.execute("CREATE TABLE keyed (id int PRIMARY KEY, v text); CREATE TABLE bag (v text)")
    place.connection.execute("ALTER TABLE bag REPLICA IDENTITY FULL")
    return groups_of(place)


def test_rows_of_1600_columns_are_decoded(place: Place) -> None:
    columns = ", ".join(f"c{number} {'int' if number % 2 else 'text'}" for number in range(1600))
    place.connection.execute(f"CREATE TABLE wide ({columns}, PRIMARY KEY (c1599, c1))".encode())
    groups = groups_of(place)
    follower = place.follow(groups)
    values = ", ".join("n" if number % 2 else r"nullif(E'\t', repeat(E'\t', n % 3))" for number in range(1600))
    place.connection.execute(f"INSERT INTO wide SELECT {values} FROM generate_series(1, 200) n".encode())
    place.connection.execute("UPDATE wide SET c1599 = c1599 + 1000, c0 = NULL WHERE c1599 < 100")
    place.connection.execute("DELETE FROM wide WHERE c1599 > 150 AND c1599 < 200")
    follower.drain_fully(place.write_finish())
    assert follower.state() == place.lines(groups)
    assert len(place.lines(groups)["public.wide"]) == 151
