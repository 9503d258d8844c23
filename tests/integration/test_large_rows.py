"""Rows of 100 MB are copied, archived, folded, loaded and checked with driver and executors limited to 1 GiB each.

`exact/test_rows.py` tests rows of a few MB, and `tests/spark/test_long_lines.py` the memory that a fold needs for long
lines. This test runs every command in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from tests.commands.snapshot_runs import command_line, dropping_slots
from tests.integration.own_shard import database_on
from tests.run.soak import SOAK_SECONDS

# The size of a row as COPY prints it, which is more than the server needs for it.
ROW_BYTES = 100_000_000
MEMORY_BYTES_MAX = 1 << 30
SPARK = '[spark]\nmaster = "local[2]"\n"spark.driver.memory" = "1g"\n'
SCHEMA = """
CREATE TABLE large (id int PRIMARY KEY, n int, t text, b bytea);
ALTER TABLE large ALTER t SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL;
CREATE TABLE bag (n int, t text);
ALTER TABLE bag REPLICA IDENTITY FULL;
ALTER TABLE bag ALTER t SET STORAGE EXTERNAL
"""
# Text of which COPY escapes about a quarter of the characters, and bytes of which it prints two characters each.
TEXT = f"repeat(E'{{}}\\t\\n\\\\', {ROW_BYTES * 6 // 10 // 15})"
BYTES = f"decode(repeat('5c0a{{}}', {ROW_BYTES * 4 // 10 // 6}), 'hex')"
FIRST = f"""
INSERT INTO large SELECT i, 0, {TEXT.format("first row")}, {BYTES.format("01")} FROM generate_series(1, 2) i;
INSERT INTO bag VALUES (1, {TEXT.format("bag")})
"""
CHANGES = f"""
INSERT INTO large VALUES (3, 0, {TEXT.format("third row")}, {BYTES.format("03")});
UPDATE large SET n = 1 WHERE id = 1;
UPDATE large SET t = {TEXT.format("other row")} WHERE id = 2;
UPDATE large SET id = 4 WHERE id = 3;
UPDATE bag SET n = 2
"""
STATES = (
    "SELECT id, n, length(t), md5(t), length(b), md5(b) FROM large UNION ALL SELECT 0, n, 0, md5(t), 0, '' FROM bag"
)


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
@pytest.mark.timeout(3600)
def test_changed_rows_of_100_mb_are_restored_within_a_gibibyte_of_memory(
    shared_fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    with database_on(shared_fleet, "large_rows", tmp_path, more=SPARK) as fleet, dropping_slots(fleet):
        source = shared_fleet.primaries[0].dsn("large_rows")
        execute(source, SCHEMA)
        execute(source, FIRST)
        peaks = [run_measured(fleet, "init")]
        peaks.append(run_measured(fleet, "create", "large"))
        states = [rows_of(source)]
        execute(source, CHANGES)
        peaks.append(run_measured(fleet, "create", "large", "--incremental"))
        states.append(rows_of(source))
        for increment, state in enumerate(states):
            restored = f"large_rows_back_{increment}"
            target = tmp_path / f"target{increment}.toml"
            target.write_text(fleet.path.read_text().replace("dbname=large_rows", f"dbname={restored}"))
            words = ("restore", "large", "--increment", str(increment), "--to", str(target))
            peaks.append(run_measured(fleet, *words))
            assert rows_of(make_conninfo(source, dbname=restored)) == state
        peaks.append(run_measured(fleet, "check", "large"))
        for peak in peaks:
            assert peak["worker"] < MEMORY_BYTES_MAX, peaks
            assert peak["command"] < MEMORY_BYTES_MAX, peaks


def execute(dsn: str, script: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in script.split(";\n"):
            connection.execute(statement.encode())


def rows_of(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as connection:
        return sorted(connection.execute(STATES.encode()).fetchall())


def run_measured(fleet: Fleet, *words: str) -> dict[str, int]:
    """Run the command; return the peak memory of its own process, its JVM and its largest Python worker."""
    began = time.monotonic()
    peak = {"command": 0, "java": 0, "worker": 0}
    with subprocess.Popen(
        [*command_line(fleet, *words), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        while process.poll() is None:
            for kind, held in peaks_below(process.pid):
                peak[kind] = max(peak[kind], held)
            # The kernel keeps the high-water marks, so reading them more often would only waste processor time.
            time.sleep(0.5)
        stdout, stderr = process.communicate()
    assert process.returncode == 0, (stdout, stderr.decode())
    print(json.dumps({"words": words[:3], "seconds": round(time.monotonic() - began, 1)} | peak))  # noqa: T201  # figures
    return peak


def peaks_below(pid: int) -> list[tuple[str, int]]:
    """The memory high-water marks of the process and of all its descendants, with their kind."""
    found: dict[int, tuple[int, str, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            held = int(status.get("VmHWM", "0 kB").split()[0]) << 10
            found[int(folder.name)] = int(status["PPid"]), status["Name"].strip(), held

    def is_below(one: int) -> bool:
        return one in found and (found[one][0] == pid or is_below(found[one][0]))

    below = [("java" if "java" in found[one][1] else "worker", found[one][2]) for one in found if is_below(one)]
    return [*below, *([("command", found[pid][2])] if pid in found else [])]
