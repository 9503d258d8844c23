"""Rows of 100 MB are copied, archived, folded, loaded and checked with driver and executors limited to 1 GiB each.

Values of 500 MB take up to five times their row as COPY prints it. `exact/test_rows.py` tests rows of a few MB,
`test_value_memory.py` the memory of single tasks, and `tests/spark/test_long_lines.py` that of a fold of long lines.
These tests run every command in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
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


# COPY prints 1,000,000,002 bytes of the bytea, almost as much as it can. A jsonb has 256 MB of strings at most.
VALUE_BYTES = {"bytea": 500_000_000, "text": 500_000_000, "jsonb": 250_000_000}
LARGEST_ROW_BYTES = 1_000_000_002
FIXED_BYTES = 300 << 20
VALUE_STATES = " UNION ALL ".join(f"SELECT '{kind}', id, n, md5(v::text) FROM of_{kind}" for kind in VALUE_BYTES)


def draw_value(kind: str) -> bytes | str:
    """A value that compresses badly; COPY escapes each 21st character of the text."""
    size = VALUE_BYTES[kind]
    match kind:
        case "bytea":
            return os.urandom(size)
        case "text":
            return os.urandom(size * 10 // 21).hex("\n", 10)
        case _:
            return f'{{"a": "{os.urandom(size // 2 - 10).hex()}", "b": [1, null]}}'


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1; the server needs 6 GB, a worker 5 GB")
@pytest.mark.timeout(7200)
def test_values_of_500_mb_come_back_within_five_times_their_row(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    one_worker = SPARK.replace("local[2]", "local[1]")
    with database_on(shared_fleet, "large_values", tmp_path, more=one_worker) as fleet, dropping_slots(fleet):
        source = shared_fleet.primaries[0].dsn("large_values")
        for kind in VALUE_BYTES:
            execute(source, f"CREATE TABLE of_{kind} (id int PRIMARY KEY, n int, v {kind})")
            execute(source, f"ALTER TABLE of_{kind} ALTER v SET STORAGE EXTERNAL")
            store_value(source, f"INSERT INTO of_{kind} VALUES (1, 0, %s)", kind)
        peaks = [run_measured(fleet, "init"), run_measured(fleet, "create", "large")]
        states = [rows_of(source, VALUE_STATES)]
        for kind in VALUE_BYTES:
            store_value(source, f"INSERT INTO of_{kind} VALUES (2, 0, %s)", kind)
            store_value(source, f"UPDATE of_{kind} SET v = %s WHERE id = 1", kind)
            # The value is left out of WAL.
            execute(source, f"UPDATE of_{kind} SET n = 1 WHERE id = 2")
        peaks.append(run_measured(fleet, "create", "large", "--incremental"))
        states.append(rows_of(source, VALUE_STATES))
        peaks.append(run_measured(fleet, "check", "large"))
        for increment in (1, 0):
            restored = f"large_values_back_{increment}"
            target = tmp_path / f"target{increment}.toml"
            target.write_text(fleet.path.read_text().replace("dbname=large_values", f"dbname={restored}"))
            peaks.append(run_measured(fleet, "restore", "large", "--increment", str(increment), "--to", str(target)))
            assert rows_of(make_conninfo(source, dbname=restored), VALUE_STATES) == states[increment]
            execute(source, f"DROP DATABASE {restored} WITH (FORCE)")
        for peak in peaks:
            assert peak["worker"] < 5 * LARGEST_ROW_BYTES + FIXED_BYTES, peaks
            assert peak["command"] < MEMORY_BYTES_MAX, peaks


def store_value(dsn: str, statement: str, kind: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        placeholder = "%b" if kind == "bytea" else "%s"
        connection.execute(statement.replace("%s", placeholder).encode(), (draw_value(kind),))


def execute(dsn: str, script: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in script.split(";\n"):
            connection.execute(statement.encode())


def rows_of(dsn: str, query: str = STATES) -> list[Any]:
    with psycopg.connect(dsn) as connection:
        return sorted(connection.execute(query.encode()).fetchall())


def run_measured(fleet: Fleet, *words: str) -> dict[str, int]:
    """Run the command; return the peak memory of its own process, its JVM and its largest Python worker."""
    began = time.monotonic()
    peak = {"command": 0, "java": 0, "worker": 0}
    # A file: nobody reads a pipe meanwhile, and the command would wait once it is full of progress.
    with tempfile.TemporaryFile() as said:
        with subprocess.Popen([*command_line(fleet, *words), "--json"], stdout=said, stderr=said) as process:
            while process.poll() is None:
                for kind, held in peaks_below(process.pid):
                    peak[kind] = max(peak[kind], held)
                # The kernel keeps the high-water marks, so reading them more often would only waste processor time.
                time.sleep(0.5)
        said.seek(0)
        assert process.returncode == 0, said.read().decode()
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
