"""A cluster that runs slow tasks twice and takes executors away in between: nothing is lost, and nothing is doubled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.snapshot_runs import dropping_slots, sorted_copies
from tests.integration.test_executors import CODE, GIVEN, ROOT, fleet_on, run_command
from tests.spark.standalone_cluster import Worker, standalone_workers
from tests.stores.listed import base_objects_of

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet

SETTINGS = {
    "speculation": "true",
    "speculation.interval": "100ms",
    "speculation.multiplier": "1.1",
    "speculation.quantile": "0.5",
    "dynamicAllocation.enabled": "true",
    "dynamicAllocation.shuffleTracking.enabled": "true",
    "dynamicAllocation.minExecutors": "0",
    "dynamicAllocation.executorIdleTimeout": "1s",
}
# What the Python processes of a worker do besides: each attempt is written down, and those of the slow one stand still
# after their work until the other executor has done it as well, and Spark ends them.
NOTE_ATTEMPTS = """
import sys, time
from pathlib import Path

def note(what):
    from pyspark import TaskContext
    context = TaskContext.get()
    with Path({folder!r}, "attempts").open("a") as file:
        file.write(f"{{what}} {{context.partitionId()}} {{context.attemptNumber()}} {is_slow}\\n")
    if {is_slow} and context.attemptNumber() == 0:
        time.sleep(90)

if "pyspark.daemon" in " ".join(sys.orig_argv):
    import cutline.restore.rows.load, cutline.snapshots.base_copy.copy_ranges
    close = cutline.snapshots.base_copy.copy_ranges.ObjectWriter.close
    finish = cutline.restore.rows.load.Loaders.finish

    def close_and_note(writer):
        close(writer)
        note("copy")

    def finish_and_note(loaders):
        finish(loaders)
        note("load")

    cutline.snapshots.base_copy.copy_ranges.ObjectWriter.close = close_and_note
    cutline.restore.rows.load.Loaders.finish = finish_and_note
"""


def noting_worker(name: str, host: str, folder: Path, *, is_slow: bool) -> Worker:
    own = folder / name
    own.mkdir()
    (own / "sitecustomize.py").write_text(NOTE_ATTEMPTS.format(folder=str(folder), is_slow=is_slow))
    return Worker(name, CODE | {"PYTHONPATH": f"{own}:{ROOT}"}, host=host)


def stored_rows(chain: Chain) -> dict[str, int]:
    """The rows of each node's base copy, as the commit lists its objects."""
    rows = dict.fromkeys(chain.baseline, 0)
    for node in chain.baseline:
        rows[node] = sum(sum(one.rows.values()) for one in base_objects_of(chain, node))
    return rows


def test_slow_tasks_that_run_twice_count_once(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    workers = [
        noting_worker("slow", "127.0.0.1", tmp_path, is_slow=True),
        noting_worker("quick", "127.0.0.2", tmp_path, is_slow=False),
    ]
    with standalone_workers(tmp_path / "cluster", GIVEN, workers) as master:
        fleet = fleet_on(master, shared_fleet, tmp_path)
        file = tmp_path / "fleet.toml"
        settings = "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in SETTINGS.items())
        file.write_text(file.read_text().replace("[spark]\n", f"[spark]\n{settings}"))
        before = {node.id: sorted_copies(node.dsn) for node in fleet.primaries}
        with dropping_slots(fleet):
            code, found = run_command(tmp_path, "create", "twice")
            assert code == 0, found
            # A table has as many lines as rows.
            expected = {node: sum(copy.count(b"\n") for copy in copies.values()) for node, copies in before.items()}
            chain = read_chain(fleet.store.open(), "twice")
            rows = stored_rows(chain)
            assert rows == {node: expected[chain.shard_of(node)] for node in chain.baseline}
            for words in (("restore", "twice", "--replace"), ("restore-discard",)):
                code, found = run_command(tmp_path, *words, "--yes")
                assert code == 0, found
        assert {node.id: sorted_copies(node.dsn) for node in fleet.primaries} == before
        attempts = {tuple(line.split()) for line in (tmp_path / "attempts").read_text().splitlines()}
        slow = {(what, place) for what, place, attempt, is_slow in attempts if (attempt, is_slow) == ("0", "True")}
        # Spark may have granted the slow executor after the copy, or removed it before the load.
        assert slow, attempts
        assert slow <= {(what, place) for what, place, attempt, _ in attempts if attempt != "0"}, attempts
