"""Measure merges over 1, 10, 100 … increments, and restores before and after: time, memory, bytes read and written.

There is one shard with a standby, with realistic rows of which nine in ten never change. Before every increment, some
rows of the rest change. If the updates are scattered, one in a hundred rows of the whole table changes before every
merge, and other rows before the next. Every command is a process of its own, so its memory is its own as well. The
memory is that of its largest process. The bytes are those of all reads and writes of files and pipes; they include some
20 MB of Python's modules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg

from cutline.embedded.fleet import start_fleet, stop_fleet

SIZES = (1, 10, 100)
NAME, ROWS = "chain", 1_000_000
# The part of the rows that changes before each increment.
CHANGED = 200
# With scattered updates, one row in so many changes before a merge.
SCATTERED = 100
COMMAND = (sys.executable, "-c", "from cutline.cli.main import main; main()")
TABLES = """
CREATE TABLE item (id int PRIMARY KEY, n int, text text);
INSERT INTO item SELECT n, 0, repeat(md5(n::text), 3) FROM generate_series(1, {rows}) AS n;
CREATE TABLE log (id int, text text);
ALTER TABLE log REPLICA IDENTITY FULL;
INSERT INTO log SELECT n, md5(n::text) FROM generate_series(1, {rows} / 10) AS n;
"""


def measure_merges(
    sizes: Sequence[int] = SIZES, rows: int = ROWS, *, scattered: bool = False
) -> Iterator[dict[str, object]]:
    """Take increments until the chain reaches the last size; at each size, yield one row per command.

    Each merge removes everything before it, so the next merge covers only the increments since then.
    """
    with tempfile.TemporaryDirectory(prefix="cutline-merges-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        servers = start_fleet(folder / "fleet", shards=1, backups=1, settings={"fsync": "off"})
        try:
            (dsn,) = servers.dsns()
            _execute(dsn, TABLES.format(rows=rows))
            fleet = servers.fleet_toml
            target = fleet.with_name("target.toml")
            target.write_text(fleet.read_text().replace("/bank", "/back"))
            _run(fleet, "init")
            _run(fleet, "create", NAME)
            number = 0
            for stage, size in enumerate(sizes):
                for part in range(size):
                    number += 1
                    spread = f"id % {SCATTERED * size} = {stage + SCATTERED * part}"
                    _change(dsn, number, rows, spread if scattered else "")
                    _run(fleet, "create", NAME, "--incremental")
                restore = ("restore", NAME, "--to", str(target), "--replace", "--yes")
                for label, words in (
                    ("restore before", restore),
                    ("merge", ("merge", NAME)),
                    ("restore after", restore),
                    ("check after", ("check", NAME)),
                    ("drop", ("merge", NAME, "--drop-earlier", "--yes")),
                ):
                    yield {"increments": size, "command": label, **_run(fleet, *words)}
        finally:
            stop_fleet(folder / "fleet", delete=True)


def _change(dsn: str, number: int, rows: int, spread: str) -> None:
    """Change the rows that are `spread` over the table (a condition); if it is "", those of one in ten pages."""
    changed = rows // CHANGED
    first = (number * changed) % (rows // 10)
    which = spread or f"id BETWEEN {first} AND {first + changed - 1}"
    _execute(dsn, f"UPDATE item SET n = {number} WHERE {which}")
    _execute(dsn, f"INSERT INTO log SELECT {number}, md5(n::text) FROM generate_series(1, {changed // 10}) AS n")


def _run(fleet: Path, *words: str) -> dict[str, object]:
    """Run a command; return its seconds, processor time, bytes, and the peak memory of its largest process."""
    began = time.monotonic()
    with subprocess.Popen(
        [*COMMAND, "--fleet", str(fleet), "--json", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        output = process.stdout.read() if process.stdout else b""
        # The kernel has the counts of the process and of its children until somebody asks for its exit code.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
        transferred = {name: int(count) for name, count in (line.split(": ") for line in lines)}
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    document = json.loads(output)
    if process.returncode not in (0, 4):
        raise RuntimeError(f"{' '.join(words)}: {document}")
    counted = {
        name: document[name] for name in ("objects", "carried_objects", "bytes", "carried_bytes") if name in document
    }
    return {
        "seconds": round(time.monotonic() - began, 2),
        "CPU seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak MiB": usage.ru_maxrss >> 10,
        "MB read": transferred["rchar"] // 1_000_000,
        "MB written": transferred["wchar"] // 1_000_000,
        **(counted if words[0] == "merge" else {}),
    }


def _execute(dsn: str, statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statements.encode())


def main() -> None:
    """Print a row for each command and size.

    The optional arguments limit the increments, set the number of rows, and say that updates are `scattered`.
    """
    scattered, numbers = "scattered" in sys.argv, [word for word in sys.argv[1:] if word.isdigit()]
    most, rows = (*map(int, numbers), *(SIZES[-1], ROWS)[len(numbers) :])
    for row in measure_merges([size for size in SIZES if size <= most], rows, scattered=scattered):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
