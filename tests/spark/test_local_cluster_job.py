"""One whole create, restore and check on a cluster: executors are processes of their own, which share nothing.

In a subprocess, because a process has one Spark session at a time, and the tests' own is local.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.bank import read_invariants
from fleet.config import load_fleet
from fleet.embedded import EmbeddedFleet, start_fleet, stop_fleet
from tests.snapshot_runs import described, sorted_copies

MASTER = "local-cluster[2,1,1024]"
ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 240

# Prints one JSON line: how many executors there were, and what the commands reported.
JOB = """
import json, sys
from pathlib import Path
from cli.spark_session import SparkOnDemand
from fleet.bank_workload import BankWorkload
from fleet.config import load_fleet
from tests.snapshot_runs import Ready, Runs

source, target = (load_fleet(Path(name)) for name in sys.argv[1:])
with SparkOnDemand(source, "test") as start:
    session = start.session()
    runs = Runs(source, Ready(session))
    runs.init()
    with BankWorkload([node.dsn for node in source.primaries], clients=2, pause_seconds=0.01) as bank:
        full = runs.full("cluster")
        while bank.committed.total < 50:
            assert bank.wait(0.05)
    runs.increment("cluster")
    checked = runs.check("cluster")
    restored = runs.restore("cluster", target)
    executors = session._jsc.sc().getExecutorMemoryStatus().size() - 1
print(json.dumps({"executors": executors, "check": checked.to_json(), "rows": restored.rows}))
"""


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedFleet]:
    """Two shards with a standby each, and the bank's tables."""
    directory = tmp_path / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=1)
    finally:
        stop_fleet(directory, delete=True)


def test_a_whole_run_on_a_cluster(embedded: EmbeddedFleet, tmp_path: Path) -> None:
    spark = f'[spark]\nmaster = "{MASTER}"\n'
    source = described(embedded, tmp_path / "source.toml", f"file://{tmp_path}/store", more=spark)
    target = tmp_path / "target.toml"
    target.write_text(source.path.read_text().replace("/bank", "/bank_again"))
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(source.path), str(target)],
        capture_output=True, text=True, timeout=SECONDS_MAX, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["executors"] == 2
    assert report["check"]["result"] == "valid", report["check"]
    (checked,) = report["check"]["snapshots"]
    assert (checked["increment"], checked["skipped"]) == (1, [])
    assert min(checked["compared"].values()) > 0
    restored = load_fleet(target)
    assert read_invariants([node.dsn for node in restored.primaries]).hold
    for node, copy in zip(source.primaries, restored.primaries, strict=True):
        assert sorted_copies(copy.dsn) == sorted_copies(node.dsn)
    assert report["rows"] == sum(read_invariants([n.dsn for n in source.primaries]).transfers) + 20_000
