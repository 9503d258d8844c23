"""Rows of 100 MB are copied, archived, folded, loaded and checked with driver and executors held to 1 GiB each.

Rows of some MB are in `exact/test_rows.py`, and what a fold holds of long lines in `tests/spark/test_long_lines.py`:
this one takes a process for every command.
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
from tests.integration.own_shard import database_on
from tests.snapshot_runs import chains_dropped, command_line
from tests.soak import SOAK_SECONDS

# Of a row as COPY prints it, which is more than it takes in the server.
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
# A text of which every fourth character is one that COPY escapes, and bytes that are two characters each.
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
def test_rows_of_100_mb_that_change_come_back_within_a_gibibyte(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    with database_on(shared_fleet, "large_rows", tmp_path, more=SPARK) as fleet, chains_dropped(fleet):
        source = shared_fleet.primaries[0].dsn("large_rows")
        execute(source, SCHEMA)
        execute(source, FIRST)
        peaks = [measured(fleet, "init")]
        peaks.append(measured(fleet, "create", "large"))
        states = [rows_of(source)]
        execute(source, CHANGES)
        peaks.append(measured(fleet, "create", "large", "--incremental"))
        states.append(rows_of(source))
        for increment, state in enumerate(states):
            back = f"large_rows_back_{increment}"
            target = tmp_path / f"target{increment}.toml"
            target.write_text(fleet.path.read_text().replace("dbname=large_rows", f"dbname={back}"))
            words = ("restore", "large", "--increment", str(increment), "--to", str(target))
            peaks.append(measured(fleet, *words))
            assert rows_of(make_conninfo(source, dbname=back)) == state
        peaks.append(measured(fleet, "check", "large"))
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


def measured(fleet: Fleet, *words: str) -> dict[str, int]:
    """Run the command; the most memory that its own process, its JVM and its largest Python worker held."""
    began = time.monotonic()
    peak = {"command": 0, "java": 0, "worker": 0}
    with subprocess.Popen(
        [*command_line(fleet, *words), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        while process.poll() is None:
            for kind, held in held_below(process.pid):
                peak[kind] = max(peak[kind], held)
            # The system keeps the high-water marks itself; looking more often would only take the processor away.
            time.sleep(0.5)
        out, err = process.communicate()
    assert process.returncode == 0, (out, err.decode())
    print(json.dumps({"words": words[:3], "seconds": round(time.monotonic() - began, 1)} | peak))  # noqa: T201  # figures
    return peak


def held_below(pid: int) -> list[tuple[str, int]]:
    """The high-water marks of the process and of all below it, by kind."""
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
