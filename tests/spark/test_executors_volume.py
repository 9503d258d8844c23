"""Many changed rows on executors with a cluster's settings: what is sent to them, shuffled and spilled comes back.

Runs in a subprocess, because a process has one Spark session at a time and the tests' own has no executors. The short
form changes so many rows that their keys are large arrays, and folds them in one way; the long form changes a million,
and folds them in each. Executors have so little memory for rows that whatever is shuffled is spilled in both. What is
restored is compared with the sources by PostgreSQL's own COPY.
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
from tests.commands.snapshot_runs import configure_fleet
from tests.run.quick_spark import QUICK
from tests.run.soak import SOAK_SECONDS, first
from tests.servers.dealt import start_fleet

ROOT = Path(__file__).resolve().parents[2]
ROWS = 1_000_000 if SOAK_SECONDS else 20_000
SECONDS_MAX = 3600 if SOAK_SECONDS else 900
# The optimising compiler is worth its time where there are many rows.
JAVA_OPTIONS = "" if SOAK_SECONDS else QUICK
# Nothing but the sizes of a small machine, few partitions, and what makes Spark spill: all else is what a cluster gets.
SPARK = f"""[spark]
master = "local-cluster[2,1,1024]"
"driver.memory" = "1g"
"driver.extraJavaOptions" = "{JAVA_OPTIONS}"
"executor.memory" = "512m"
"executor.extraJavaOptions" = "{JAVA_OPTIONS}"
"sql.shuffle.partitions" = "4"
"memory.fraction" = "0.1"
"shuffle.spill.numElementsForceSpillThreshold" = "{ROWS // 20}"
"""
TABLES = """
DROP TABLE transfer, account;
CREATE TABLE item (id uuid PRIMARY KEY, n int, t text);
CREATE TABLE wide (id uuid, n int, t text, PRIMARY KEY (n, id));
CREATE TABLE part (id uuid PRIMARY KEY, n int, t text);
ALTER TABLE part ALTER t SET STORAGE EXTERNAL;
CREATE TABLE line (n int, t text);
ALTER TABLE line REPLICA IDENTITY FULL
"""
LOADED = """
INSERT INTO item SELECT md5(n::text)::uuid, n, md5(n::text) FROM generate_series(1, ROWS) n;
INSERT INTO wide SELECT md5(n::text)::uuid, n, repeat('x', 100000) FROM generate_series(1, 40) n;
INSERT INTO part SELECT md5(n::text)::uuid, n, repeat(md5(n::text), 80) FROM generate_series(1, ROWS / 40) n;
INSERT INTO line SELECT n, md5(n::text) FROM generate_series(1, ROWS / 10) n
"""
# Nine of ten rows are updated, one and a hundredth are deleted, and a tenth is added; on the other shard is one row.
CHANGED = """
UPDATE item SET n = -n WHERE n % 10 <> 0;
DELETE FROM item WHERE n = -1 OR n % 100 = 0;
INSERT INTO item SELECT md5('new ' || n)::uuid, n, 'new' FROM generate_series(1, ROWS / 10) n
"""
CHANGES = ROWS * 9 // 10 + 1 + ROWS // 100 + ROWS // 10
HELD = ROWS + ROWS // 10 - 1 - ROWS // 100 + 40 + ROWS // 40 + ROWS // 10
# By a name: what is changed before the changes are folded, which amounts are set to 0 so that they are folded in this
# way, and whether the shards become one database.
DRIVER, SEGMENTS = "cutline.snapshots.fold.limits.CHANGES_MAX", "cutline.snapshots.fold.limits.CHOSEN_CHANGES_MAX"
KEYS, COUNTED = "cutline.snapshots.fold.changed_keys.KEYS_BYTES_MAX", "cutline.snapshots.fold.changed_keys.COUNTED_FROM"
WAYS: dict[str, tuple[str, list[str], bool]] = {
    "by the driver": ("", ["cutline.check.verify.STORED_BYTES_MAX"] if SOAK_SECONDS else [], False),
    "by segment": ("", [DRIVER, "cutline.check.verify.STORED_BYTES_MAX"], False),
    "by rows": ("", [DRIVER, SEGMENTS, "cutline.check.verify.STORED_BYTES_MAX"], False),
    "with filters": ("", [DRIVER, SEGMENTS, KEYS, COUNTED], False),
    "into one database": ("", [], True),
    "long lines": ("UPDATE wide SET t = t || n, n = n + 1000", [DRIVER, SEGMENTS], False),
    "unchanged values": ("UPDATE part SET n = -n, id = md5('moved' || n)::uuid", [DRIVER, SEGMENTS], False),
    "without a key": ("DELETE FROM line WHERE n % 2 = 0", [DRIVER, SEGMENTS], False),
}

# These are folded by Spark, which sorts what it has shuffled. The driver folds the others: only keys of several sources
# that become one database are shuffled then, and spill if there are very many.
SPILLING = {"by rows", "with filters", "long lines", "unchanged values", "without a key"}
SPILLING |= {"into one database"} if SOAK_SECONDS else set()

# Prints one JSON line: by way what the commands reported, and how many bytes its tasks have spilled.
JOB = """
import importlib, json, sys
from pathlib import Path
from tests.run.by_spark import work_by_spark
work_by_spark()
import psycopg
import pytest
import cutline.snapshots.fold.limits
from cutline.spark.on_demand import SparkOnDemand
from cutline.fleet.config import load_fleet
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies

source, single, double = (load_fleet(Path(name)) for name in sys.argv[1:4])
ways, changed = json.loads(sys.stdin.read())
cutline.snapshots.fold.limits.CHANGES_PER_SEGMENT = 0

def change(statements):
    with psycopg.connect(source.primaries[0].dsn) as connection:
        connection.execute(statements)
    return runs.increment("v").counts["changes"]

def lines(fleet):
    found = {}
    for node in fleet.primaries:
        for table, copy in sorted_copies(node.dsn).items():
            found.setdefault(table, []).extend(copy.splitlines())
    return {table: sorted(of_table) for table, of_table in found.items()}

def run(statements, limits, is_routed):
    before = spilled(session)
    if statements:
        change(statements)
    target = single if is_routed else double
    with pytest.MonkeyPatch.context() as patch:
        for limit in limits:
            patch.setattr(limit, 0)
        checked = runs.check_one("v")
        restored = runs.restore("v", target)
    same = lines(target) == lines(source)
    return {"check": checked.result, "rows": restored.rows, "same": same, "spilled": spilled(session) - before}

def spilled(session):
    gateway = session.sparkContext._gateway
    stages = session._jsc.sc().statusStore().stageList(
        None, False, False, gateway.new_array(gateway.jvm.double, 0), gateway.jvm.java.util.ArrayList()
    )
    return sum(stages.apply(number).diskBytesSpilled() for number in range(stages.size()))

with SparkOnDemand(source, "test") as start:
    session = start.session()
    runs = Runs(source, Ready(session))
    runs.init()
    full = runs.full("v")
    changes = change(changed)
    found = {way: run(*how) for way, how in ways.items()}
    print(json.dumps({"changes": changes, "found": found}))
"""


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedFleet]:
    """Two shards with a standby each, and the tables; the second shard has a row in one of them."""
    directory = tmp_path / "fleet"
    try:
        fleet = start_fleet(directory, shards=2, backups=1, settings={"fsync": "off"})
        first, second = fleet.dsns()
        for dsn, rows in ((first, LOADED), (second, "INSERT INTO line VALUES (0, 'here')")):
            with psycopg.connect(dsn) as connection:
                connection.execute(f"{TABLES}; {rows}".replace("ROWS", str(ROWS)).encode())
        yield fleet
    finally:
        stop_fleet(directory, delete=True)


@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.parametrize("chosen", first([["by segment"], [way for way in WAYS if way != "by segment"]]), ids=" ".join)
def test_many_changed_rows_are_checked_and_restored_by_executors(
    embedded: EmbeddedFleet, tmp_path: Path, chosen: list[str]
) -> None:
    source = configure_fleet(embedded, tmp_path / "source.toml", f"file://{tmp_path}/store", more=SPARK)
    double = source.path.read_text().replace("/bank", "/bank_again")
    (tmp_path / "double.toml").write_text(double)
    head, first, *_ = double.split("[[node]]")
    (tmp_path / "single.toml").write_text(f"{head}[[node]]{first}")
    ways = {way: WAYS[way] for way in chosen}
    done = subprocess.run(
        [sys.executable, "-c", JOB, *(str(tmp_path / f"{name}.toml") for name in ("source", "single", "double"))],
        input=json.dumps([ways, CHANGED.replace("ROWS", str(ROWS))]),
        capture_output=True, text=True, timeout=SECONDS_MAX, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["changes"] == CHANGES
    deleted = {way: ROWS // 20 if way == "without a key" else 0 for way in ways}
    spilled = {way: found.pop("spilled") for way, found in report["found"].items()}
    assert report["found"] == {way: {"check": "valid", "rows": HELD + 1 - deleted[way], "same": True} for way in ways}
    assert {way for way, size in spilled.items() if size > 0} >= SPILLING & ways.keys()
