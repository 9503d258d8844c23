"""How right a restore's time left is: what it said at 25, 50 and 75 % of its run, against what it took.

Two shards on one machine, three sizes, each restored twice: first estimated by constants or by a restore of another
size, then by one of its own. What it says is read as a program reads it: from the JSON lines on stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet

ROWS = (8_000_000, 20_000_000, 40_000_000)
SHARES = (0.25, 0.5, 0.75)
SHARDS = 2
TABLES = """
CREATE TABLE item (id bigint PRIMARY KEY, owner int NOT NULL, n bigint NOT NULL, body text);
CREATE INDEX item_owner ON item (owner);
INSERT INTO item SELECT i, i * 7919 % 100003, i * i % 1000003, md5(i::text) || md5((i + 1)::text)
  FROM generate_series(1, {}::bigint) AS i
"""
CHANGES = "UPDATE item SET n = n + 1 WHERE id % 50 = 0; DELETE FROM item WHERE id % 97 = 0"


def measure_time_left(sizes: Sequence[int] = ROWS) -> Iterator[dict[str, Any]]:
    """Restore each size twice; yield a row for each restore, with what it said at the SHARES."""
    with tempfile.TemporaryDirectory(prefix="cutline-left-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        servers = start_fleet(folder / "fleet", shards=SHARDS, backups=0, settings={"fsync": "off"})
        try:
            for number, rows in enumerate(sizes):
                yield from _measure(servers, folder, number, rows)
        finally:
            stop_fleet(folder / "fleet", delete=True)


def _measure(servers: EmbeddedFleet, folder: Path, number: int, rows: int) -> Iterator[dict[str, Any]]:
    """Take a full snapshot and an increment of a database of this size, and restore it into another, twice."""
    database, snapshot = f"rows_{number}", f"rows-{number}"
    for primary in servers.primaries:
        _execute(primary.dsn("postgres"), f"CREATE DATABASE {database}")
        _execute(primary.dsn(database), TABLES.format(rows // SHARDS))
    source, target = (_write_fleet(servers, folder, name) for name in (database, f"back_{number}"))
    for words in (["init"], ["create", snapshot]):
        _run(source, words)
    for primary in servers.primaries:
        _execute(primary.dsn(database), CHANGES)
    _run(source, ["create", snapshot, "--incremental"])
    for basis in ("another size" if number else "constants", "its own size"):
        lines = list(_run(source, ["restore", snapshot, "--to", str(target)]))
        for primary in servers.primaries:
            _execute(primary.dsn("postgres"), f"DROP DATABASE back_{number}")
        yield {"rows": rows, "by": basis, **_judge(lines)}
    # Its slots would keep the WAL of the sizes that follow.
    _run(source, ["delete", snapshot, "--force"])
    for primary in servers.primaries:
        _execute(primary.dsn("postgres"), f"DROP DATABASE {database}")


def _judge(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What was said at the SHARES, in per cent of what was really left."""
    told = [one for one in lines if one.get("operation_seconds_left") is not None]
    times = [datetime.fromisoformat(one["at"]).timestamp() for one in told]
    first, last = times[0], times[-1]
    found: dict[str, Any] = {"seconds": round(last - first, 1)}
    for share in SHARES:
        moment = first + share * (last - first)
        index = max(number for number, one in enumerate(times) if one <= moment)
        # A reader counts down between two lines.
        said = max(told[index]["operation_seconds_left"] - (moment - times[index]), 0.0)
        real = last - moment
        found[f"{share:.0%}"] = {"left": round(said, 1), "real": round(real, 1), "off": round(said / real - 1, 3)}
        found["is_rough"] = told[index]["operation_seconds_left_is_rough"]
    return found


def _write_fleet(servers: EmbeddedFleet, folder: Path, database: str) -> Path:
    path = folder / f"{database}.toml"
    # One store, which has the figures of all.
    text = ['name = "left"', f'store = "file://{folder}/store"']
    for primary in servers.primaries:
        text += ["[[node]]", f'id = "{primary.id}"', f'dsn = "{make_conninfo(primary.dsn(database))}"']
    path.write_text("\n".join(text) + "\n")
    return path


def _run(fleet: Path, words: list[str]) -> Iterator[dict[str, Any]]:
    command = [
        sys.executable,
        "-c",
        "from cutline.cli.main import main; main()",
        "--fleet",
        str(fleet),
        "--json",
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, 4):
        raise RuntimeError(done.stdout)
    return (json.loads(line) for line in done.stderr.splitlines() if line.startswith("{"))


def _execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def main() -> None:
    """Print the figures."""
    load = os.getloadavg()[0]
    print(f"load of the machine before: {load:.1f}, on {os.cpu_count()} processors")
    for row in measure_time_left():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
