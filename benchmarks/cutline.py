"""The commands of Cutline that the benchmark runs.

A warm session runs them in one Python process with one Spark session, as in a long-running tool. Cold runs start the
command as a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.wal.drain.slots import drop_slot, slot_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.snapshots.records.commit import Commit
    from cutline.spark.start import SparkStart

COMMAND = "from cutline.cli.main import main; main()"
COLD_SECONDS_MAX = 600


@dataclass(frozen=True, slots=True)
class WarmSpark:
    """A SparkSource for a session that is already running."""

    started: SparkStart

    @property
    def is_small(self) -> bool:
        return False

    def begin(self, *_: object) -> None:
        """Do nothing, because the session is already running."""

    def session(self) -> SparkSession:
        return self.started.session()


@dataclass(frozen=True, slots=True)
class Cutline:
    """The commands on one fleet, in one warm session."""

    fleet: Fleet
    spark: WarmSpark

    def create(self, name: str) -> Commit:
        """Run `create NAME`."""
        from cutline.snapshots.create.context import CreateRequest
        from cutline.snapshots.create.full import create_full

        return create_full(self.fleet, CreateRequest(name), self.spark, Silent())

    def create_incremental(self, name: str) -> Commit:
        """Run `create NAME --incremental`."""
        from cutline.snapshots.create.context import CreateRequest
        from cutline.snapshots.create.increment import create_increment

        return create_increment(self.fleet, CreateRequest(name), self.spark, Silent())

    def check(self, name: str, increment: int) -> Any:
        """Run `check NAME --increment N`; raise RuntimeError if it finds a conflict or reads no rows.

        Without standbys, there is no other copy to compare with, so the check is inconclusive.
        """
        from cutline.check.verify import CheckRequest, check_snapshots

        report = check_snapshots(self.fleet, CheckRequest(name, increment), self.spark, Silent())
        if any(snapshot.conflicts or not snapshot.compared.rows for snapshot in report.snapshots):
            raise RuntimeError(f"the check reported {report.to_json()}")
        return report

    def restore(self, name: str, increment: int, target: Path) -> Any:
        """Run `restore NAME --increment N --to FILE`."""
        from cutline.restore.plan.plan import plan_restore
        from cutline.restore.plan.request import RestoreRequest
        from cutline.restore.run.restore import restore_fleet

        planned = plan_restore(self.fleet, load_fleet(target), RestoreRequest(name, increment))
        return restore_fleet(planned, self.spark, Silent())

    def forget(self, commit: Commit) -> None:
        """Drop a chain's slots, so that they stop retaining WAL."""
        for node in self.fleet.nodes:
            drop_slot(node, slot_name(commit.chain))


@contextmanager
def warm_session(fleet_toml: Path) -> Iterator[Cutline]:
    """Start Spark, run `init`, and yield the commands; stop Spark at the end."""
    from cutline.snapshots.create.initialise import initialise
    from cutline.spark.start import start_spark

    fleet = load_fleet(fleet_toml)
    with start_spark(fleet, "benchmark") as spark:
        initialise(fleet, Silent())
        spark.session()
        yield Cutline(fleet, WarmSpark(spark))


def size_bytes(commit: Commit) -> int:
    """Return how many bytes a commit added to the store, not counting the commit file."""
    return commit.counts["bytes"]


def run_cold(fleet: EmbeddedFleet, command: list[str], cache: Path) -> dict[str, Any]:
    """Run `snapshot` with these arguments in a separate process; return its JSON document."""
    fleet_toml = fleet.fleet_toml
    words = ["--fleet", str(fleet_toml), "--json", *command]
    completed = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=COLD_SECONDS_MAX,
        check=False,
        cwd=fleet_toml.parent,
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    if completed.returncode:
        output = (completed.stdout + completed.stderr).strip()[-2000:]
        raise RuntimeError(f"the command exited with {completed.returncode}: {output}")
    document: dict[str, Any] = json.loads(completed.stdout)
    return document
