"""Executors of real clusters that can't take part are named before anything is made on a node or in the store."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.spark.settings import PROTECTION, SECRET
from tests.commands.snapshot_runs import configure_fleet, slots_of
from tests.integration.refusing import read_changeable
from tests.run.quick_spark import QUICK
from tests.spark.standalone_cluster import Worker, running_worker, standalone_master, standalone_workers

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.fleet.config import Fleet

ROOT = Path(__file__).parents[2]
GIVEN = PROTECTION | {SECRET: "the secret of this cluster"}
CODE = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
COMMAND_SECONDS_MAX = 600
# Checks the executors, waits for one more, and runs tasks on both. Prints the error.
LATE_JOB = """
import json, sys, time
from pathlib import Path
from cutline.spark.amount import Amount
from cutline.spark.on_demand import SparkOnDemand
from cutline.columns.python_workers import first_work
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.preflight import count_executors
from cutline.spark.spark_jobs import run_tasks
from cutline.storage.errors import SnapshotError, report_of

fleet = load_fleet(Path(sys.argv[1]))
with SparkOnDemand(fleet, "test") as spark:
    spark.begin(ExecutorNeeds(fleet.store, fleet.nodes, writes=True), Silent(), Amount())
    print("checked", [node.id for node in first_work().args[1].nodes], flush=True)
    sys.stdin.readline()
    while count_executors(spark.session()) < 2:
        time.sleep(0.1)
    def sees_store(place):
        time.sleep(1)
        return Path(place, "fleet.json").exists()
    try:
        saw = run_tasks(spark.session(), sees_store, [fleet.store.url.removeprefix("file://")] * 8, Silent())
        print(json.dumps({"slug": "none", "message": "", "saw": saw}), flush=True)
    except SnapshotError as error:
        print(json.dumps(report_of(error)), flush=True)
"""
can_hide = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root and unshare(1): folders that a worker does not share",
)


def spark_table(master: str) -> str:
    settings = {
        "authenticate.secret": GIVEN[SECRET],
        "executor.memory": "512m",
        "executor.cores": "1",
        "driver.memory": "1g",
        "driver.extraJavaOptions": QUICK,
        "executor.extraJavaOptions": QUICK,
    }
    lines = "".join(f'"{name}" = {json.dumps(value)}\n' for name, value in settings.items())
    return f'[spark]\nmaster = "{master}"\n{lines}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path


def fleet_on(master: str, embedded: EmbeddedFleet, folder: Path) -> Fleet:
    fleet = configure_fleet(embedded, folder / "fleet.toml", f"file://{folder}/store", more=spark_table(master))
    assert run_command(folder, "init")[0] == 0
    return fleet


def run_command(folder: Path, *words: str) -> tuple[int, dict[str, object]]:
    """Run a command in a process of its own; return its exit code and its JSON."""
    code = "from cutline.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--fleet", str(folder / "fleet.toml"), "--json", *words],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False, env=os.environ | CODE,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def other_build(folder: Path) -> Path:
    """A copy of the code, in which one comment is added."""
    shutil.copytree(ROOT / "cutline", folder / "cutline", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "cutline" / "wal" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("# another build\n")
    return folder


@can_hide
def test_a_store_that_is_not_shared_and_another_build_are_named_and_nothing_is_made(
    shared_fleet: EmbeddedFleet, folder: Path
) -> None:
    old = other_build(folder / "old")
    workers = [
        Worker("right", CODE),
        Worker("alone", CODE, hidden=[folder / "store"]),
        Worker("old", CODE | {"PYTHONPATH": str(old)}),
    ]
    with standalone_workers(folder / "cluster", GIVEN, workers) as master:
        fleet = fleet_on(master, shared_fleet, folder)
        before = read_changeable(fleet)
        code, found = run_command(folder, "create", "never")
        assert code == 3, found
        message = str(found["message"])
        assert message.startswith("2 of 3 executors can't be used: ")
        parts = message.partition(": ")[2].split("; ")
        assert sorted(re.sub(r"executor on \S+ \(process \d+\): ", "", part) for part in parts) == [
            "it has a different build of Cutline",
            f"what it sees at file://{folder}/store is not this machine's store",
        ]
        # The lock has recorded the primaries that granted it.
        assert {key: one for key, one in read_changeable(fleet).items() if not key.startswith("baselines/")} == before


def test_without_executors_the_command_says_so_and_ends_with_nothing_made(
    shared_fleet: EmbeddedFleet, folder: Path
) -> None:
    with standalone_master(folder / "cluster", GIVEN) as master:
        fleet = fleet_on(master, shared_fleet, folder)
        code, found = run_command(folder, "create", "never", "--wait", "3")
        assert code == 6, found
        granted = f"{master} has not granted any executor with 512m memory and 1 cores in 3 s"
        assert found["message"] == f"{granted}; it has no workers"
        assert "operations" not in fleet.store.open().list_children("")
        assert not any(slots_of(node.dsn) for node in fleet.nodes)


def test_without_room_for_an_executor_the_command_says_what_workers_have_free(
    shared_fleet: EmbeddedFleet, folder: Path
) -> None:
    with standalone_workers(folder / "cluster", GIVEN, [Worker("small", CODE)]) as master:
        fleet_on(master, shared_fleet, folder)
        file = folder / "fleet.toml"
        file.write_text(file.read_text().replace("512m", "4g"))
        code, found = run_command(folder, "create", "never", "--wait", "3")
        assert code == 6, found
        granted = f"{master} has not granted any executor with 4g memory and 1 cores in 3 s"
        assert found["message"] == f"{granted}; free on its workers: 1 of 1 cores and 1024 of 1024 MiB on 127.0.0.1"


@can_hide
def test_an_executor_that_comes_later_is_asked_before_its_first_task(shared_fleet: EmbeddedFleet, folder: Path) -> None:
    with standalone_workers(folder / "cluster", GIVEN, [Worker("right", CODE)]) as master:
        fleet_on(master, shared_fleet, folder)
        with subprocess.Popen(
            [sys.executable, "-c", LATE_JOB, str(folder / "fleet.toml")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | CODE,
        ) as job:  # fmt: skip
            assert job.stdout is not None
            assert job.stdin is not None
            try:
                # What travels with every task has no node with its password.
                assert job.stdout.readline() == "checked []\n"
                with running_worker(folder / "cluster", master, Worker("alone", CODE, hidden=[folder / "store"])):
                    job.stdin.write("\n")
                    job.stdin.flush()
                    found = json.loads(job.stdout.readline())
            finally:
                # Its JVM ends with it.
                job.kill()
        if found["slug"] == "none":
            # The other executor has done all tasks, also those that this one had refused.
            assert found["saw"] == [True] * 8
            return
        assert found["slug"] == "store-not-shared"
        assert f"what it sees at file://{folder}/store is not this machine's store" in found["message"]
        assert found["message"].startswith("executor on ")
