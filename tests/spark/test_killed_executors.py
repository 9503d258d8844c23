"""If an executor or Python worker is killed in the middle of a task, Spark repeats it; nothing is lost or duplicated.

Runs in a subprocess, because a process has one Spark session at a time and the tests' own is local: here the executors
are separate processes, which share nothing. The first attempt of a task pauses after it has stored an object, has sent
rows to a database, has committed them, or has hashed them, and before it has reported that; then its executor, or its
Python process, is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import load_fleet
from tests.commands.snapshot_runs import configure_fleet, sorted_copies
from tests.run.quick_spark import LINES
from tests.servers.dealt import start_fleet

MASTER = "local-cluster[2,1,1024]"
ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 600
CHANGED = 7_000
# Of a restore, what is killed while it loads rows and what once it has loaded them, and whether that is an executor.
RESTORES = {
    "(executor_of, itself)": [("load", True), ("loaded", False)],
    "(itself, executor_of)": [("load", False), ("loaded", True)],
}

# Run by every Python process of the cluster: files in {folder} say which kinds of task are to pause, and which do.
PAUSE_TASKS = """
import os, time
from pathlib import Path
import cutline.check.base_hashes, cutline.check.segment_hashes, cutline.restore.rows.load, cutline.restore.rows.load
import cutline.snapshots.base_copy.copy_ranges, cutline.wal.drain.drain

def stand_still(what, node):
    from pyspark import TaskContext
    context = TaskContext.get()
    folder = Path({folder!r})
    if node == "s1" and context and context.attemptNumber() == 0 and (folder / what).exists():
        try:
            (folder / f"{{what}}.taken").touch(exist_ok=False)
        except FileExistsError:
            return
        (folder / f"{{what}}.new").write_text(str(os.getpid()))
        (folder / f"{{what}}.new").rename(folder / f"{{what}}.pid")
        time.sleep(300)

create, close = cutline.wal.drain.drain.create_segment, cutline.snapshots.base_copy.copy_ranges.ObjectWriter.close

def create_segment(store, prefix, number, held, *rest, continued):
    made = create(store, prefix, number, held, *rest, continued=continued)
    stand_still("drain", held.node)
    return made

def close_object(writer):
    close(writer)
    stand_still("copy", writer.node)

finish = cutline.restore.rows.load.Loaders.finish

def finish_load(loaders):
    finish(loaders)
    stand_still("load", "s1")

def pausing(what, work):
    def run(task):
        report = work(task)
        stand_still(what, "s1")
        return report
    return run

cutline.restore.rows.load.Loaders.finish = finish_load
cutline.restore.rows.load.load_task = pausing("loaded", cutline.restore.rows.load.load_task)
cutline.check.segment_hashes.hash_run = pausing("hash WAL", cutline.check.segment_hashes.hash_run)
cutline.check.base_hashes.hash_base = pausing("hash base", cutline.check.base_hashes.hash_base)
cutline.wal.drain.drain.create_segment = create_segment
cutline.snapshots.base_copy.copy_ranges.ObjectWriter.close = close_object
"""

# Prints one JSON line: what was killed, and what the commands reported.
JOB = """
import json, os, signal, sys, threading, time
from tests.run.by_spark import work_by_spark
work_by_spark()
from contextlib import contextmanager
from pathlib import Path
import psycopg
import cutline.check.verify
from cutline.spark.on_demand import SparkOnDemand
from cutline.fleet.config import load_fleet
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies

source, target = (load_fleet(Path(name)) for name in sys.argv[1:3])
folder = Path(sys.argv[3])
killed = []

def executor_of(pid):
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1
    return pid

@contextmanager
def killing(what, find):
    def kill():
        deadline = time.monotonic() + 300
        while not (folder / f"{what}.pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = find(int((folder / f"{what}.pid").read_text()))
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        os.kill(pid, signal.SIGKILL)
        killed.append([what, name])
        (folder / what).unlink()
        (folder / f"{what}.pid").unlink()
        (folder / f"{what}.taken").unlink()
    (folder / what).touch()
    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()

def itself(pid):
    return pid

with SparkOnDemand(source, "test") as start:
    runs = Runs(source, Ready(start.session()))
    runs.init()
    with killing("copy", executor_of), killing("drain", itself):
        full = runs.full("cluster")
    with psycopg.connect(source.primaries[0].dsn, autocommit=True) as connection:
        some = "SELECT id FROM account ORDER BY id LIMIT CHANGED"
        connection.execute(f"UPDATE account SET balance = balance + 1 WHERE id IN ({some})")
    with killing("drain", executor_of):
        increment = runs.increment("cluster")
    with killing("copy", itself):
        again = runs.full("again")
    restored = []
    for before, after in RESTORES:
        with killing("load", before), killing("loaded", after):
            restored.append(runs.restore("cluster", target).rows)
        assert sorted_copies(target.primaries[0].dsn) == sorted_copies(source.primaries[0].dsn)
    # As if the archive were too large for the driver.
    cutline.check.verify.STORED_BYTES_MAX = 0
    with killing("hash WAL", executor_of), killing("hash base", itself):
        checked = runs.check("cluster")

def base(commit):
    return [one for one in commit.copied if one.kind == "base" and one.node == "s1"]

print(json.dumps({
    "killed": killed, "check": checked.to_json(), "changes": increment.counts["changes"],
    "restored": restored,
    "segments": [[s.number, s.key] for s in (*full.segments["s1"], *increment.segments["s1"])],
    "base": [[one.key for one in base(commit)] for commit in (full, again)],
    "rows": [sum(sum(one.rows.values()) for one in base(commit)) for commit in (full, again)],
}))
"""


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedFleet]:
    """A shard with a standby, and the bank's tables."""
    directory = tmp_path / "fleet"
    try:
        yield start_fleet(directory, shards=1, backups=1)
    finally:
        stop_fleet(directory, delete=True)


@pytest.mark.timeout(SECONDS_MAX + 60)
def test_a_task_whose_executor_is_killed_is_repeated_and_nothing_is_duplicated(
    embedded: EmbeddedFleet, tmp_path: Path
) -> None:
    folder = tmp_path / "standing"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PAUSE_TASKS.format(folder=str(folder)))
    spark = f'[spark]\nmaster = "{MASTER}"\n"spark.executorEnv.PYTHONPATH" = "{folder}:{ROOT}"\n{LINES}'
    source = configure_fleet(embedded, tmp_path / "source.toml", f"file://{tmp_path}/store", more=spark)
    target = tmp_path / "target.toml"
    target.write_text(source.path.read_text().replace("/bank", "/bank_again"))
    (primary,) = source.primaries
    with psycopg.connect(primary.dsn) as connection:
        (rows,) = connection.execute(
            "SELECT (SELECT count(*) FROM account) + (SELECT count(*) FROM transfer)"
        ).fetchone() or (0,)
    job = JOB.replace("CHANGED", str(CHANGED)).replace("RESTORES", f"[{', '.join(RESTORES)}]")
    done = subprocess.run(
        [sys.executable, "-c", job, str(source.path), str(target), str(folder)],
        capture_output=True, text=True, timeout=SECONDS_MAX, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    killed = [(what, name.startswith("java")) for what, name in report["killed"]]
    assert killed[:4] == [("copy", True), ("drain", False), ("drain", True), ("copy", False)]
    checked = 4 + 2 * len(RESTORES)
    of_restores = [one for how in RESTORES for one in RESTORES[how]]
    assert sorted(killed[4:checked]) == sorted(of_restores)
    assert sorted(killed[checked:]) == [("hash WAL", True), ("hash base", False)]
    assert report["restored"] == [rows] * len(RESTORES)
    assert report["changes"] == CHANGED
    assert report["rows"] == [rows, rows]
    numbers = [number for number, _ in report["segments"]]
    assert numbers == list(range(1, len(numbers) + 1))
    archived = {path.name for path in (tmp_path / "store/snapshots/cluster/wal/s1").glob("*/*.parquet")}
    assert archived == {key.rsplit("/", 1)[-1] for _, key in report["segments"]}
    # What the killed attempt stored is in the store under another name, and no commit lists it.
    for name, listed in zip(("cluster", "again"), report["base"], strict=True):
        stored = {
            str(path.relative_to(tmp_path / "store"))
            for path in (tmp_path / "store").glob(f"snapshots/{name}/base/s1/*/*.parquet")
        }
        assert set(listed) < stored
    assert report["check"]["result"] == "valid", report["check"]
    (copy,) = load_fleet(target).primaries
    assert sorted_copies(copy.dsn) == sorted_copies(primary.dsn)
