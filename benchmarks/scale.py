"""Sizes: thousands of tables, one huge transaction, many rows; every command as a separate process.

The time of every command is measured, and the peak memory of its processes. A restore counts only if the restored
database has the content that the source had when the increment was taken.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import scale_databases as databases
from benchmarks.memory import cpu_seconds, watched_memory
from benchmarks.peers import size_bytes
from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.embedded.folder import DATABASE
from cutline.embedded.server import running_pid
from cutline.nodes.programs import run_tool

COMMAND = "from cutline.cli.main import main; main()"
TABLES, CHANGES, BYTES, ROWS = PARTS = ("tables", "changes", "bytes", "rows")
SECONDS_MAX = 7200
DONE, INCONCLUSIVE = 0, 4
CHANGED_TABLES = 200
ROW_BYTES = 1 << 10
RESTORED, PEER = "restored_by_cutline", "restored_by_peer"
# What runs are called that others compare.
RESTORE_TABLES, PEER_TABLES = "restore 0", "pg_restore -j2"
RESTORE_BYTES, PEER_BYTES = "restore 1", "COPY of the same rows"
COPIED_AT_ONCE = 1 << 20
# pg_dump locks all tables at once; the other settings keep checkpoints and vacuum out of the figures.
SETTINGS = {
    "max_locks_per_transaction": "256",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "256MB",
    "maintenance_work_mem": "256MB",
    "autovacuum": "off",
    "fsync": "off",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes to measure; `master` is Spark's."""

    tables: int = 10_000
    changes: int = 5_000_000
    bytes: int = 2 << 30
    rows: int = 10_000_000
    backups: int = 0
    master: str = "local-cluster[2,1,1024]"


@dataclass(frozen=True, slots=True)
class Run:
    """One command or tool: its seconds, the peak memory of its processes by kind, and what it stored or reported.

    `cpu_seconds` is the processor time of its processes, `server_seconds` the servers': a busy machine affects them
    little.
    """

    task: str
    seconds: float
    cpu_seconds: float = 0
    server_seconds: float = 0
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    size_bytes: int | None = None
    remark: str = ""

    def to_json(self) -> dict[str, Any]:
        """The run in the document of all figures."""
        return asdict(self)


@dataclass(slots=True)
class Scale:
    """One part, with its own fleet."""

    fleet: EmbeddedFleet
    work: Path
    sizes: Sizes
    say: Callable[[str], None]
    runs: list[Run]

    @property
    def dsn(self) -> str:
        """The database under test."""
        return self.fleet.primaries[0].dsn()

    def command(self, task: str, *words: str, accepted: tuple[int, ...] = (DONE,)) -> dict[str, Any]:
        """Run `snapshot WORDS` and record its figures; return its document. Raises RuntimeError if it fails."""
        self.say(task)
        environment = os.environ | {
            "XDG_CACHE_HOME": str(self.work / "cache"),
            "TMPDIR": str(self.work / "tmp"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        line = [sys.executable, "-c", COMMAND, "--fleet", str(self.fleet.fleet_toml), "--json", "--quiet", *words]
        began = self._times()
        with (
            subprocess.Popen(
                line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=self.work
            ) as process,
            watched_memory(process.pid) as peaks,
        ):
            output, errors = process.communicate(timeout=SECONDS_MAX)
        times = self._since(began)
        if process.returncode not in accepted:
            raise RuntimeError(f"{task} ended with {process.returncode}: {(output + errors).strip()[-2000:]}")
        document: dict[str, Any] = json.loads(output)
        self.keep(Run(task, *times, dict(peaks), document.get("bytes"), remark_of(document)))
        return document

    def tool(self, task: str, name: str, *arguments: str) -> None:
        """Run one of PostgreSQL's tools and record its time."""
        self.say(task)
        began = self._times()
        run_tool(name, *arguments, seconds_max=SECONDS_MAX)
        self.keep(Run(task, *self._since(began)))

    def _times(self) -> tuple[float, float, float]:
        """The clock, and the processor times of the ended children of this process and of the servers."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        servers = sum(cpu_seconds(pid) for node in self.fleet.nodes if (pid := running_pid(node)))
        return time.perf_counter(), used.ru_utime + used.ru_stime, servers

    def _since(self, began: tuple[float, float, float]) -> tuple[float, float, float]:
        clock, own, servers = (now - then for now, then in zip(self._times(), began, strict=True))
        return clock, own, servers

    def keep(self, run: Run) -> None:
        """Add a run, and print its figures at once."""
        self.runs.append(run)
        peaks = ", ".join(f"{kind} {size >> 20}" for kind, size in run.peak_bytes.items())
        times = f"{run.seconds:.1f} s, CPU {run.cpu_seconds:.1f} s, server's {run.server_seconds:.1f} s"
        self.say(f"  {run.task}: {times}; MiB: {peaks} {run.remark}")

    def restore(self, increment: int, expected: Mapping[str, tuple[int, int]]) -> None:
        """Restore an increment beside the source and compare the two."""
        target = self.work / "target.toml"
        source = self.fleet.fleet_toml.read_text()
        target.write_text(source.replace(self.dsn, self.fleet.primaries[0].dsn(RESTORED)))
        self.command(f"restore {increment}", "restore", "big", "--increment", str(increment), "--to", str(target))
        self.expect(RESTORED, expected)

    def expect(self, database: str, expected: Mapping[str, tuple[int, int]]) -> None:
        """Raise unless the database has exactly this content; then drop it."""
        found = databases.contents(self.fleet.primaries[0].dsn(database))
        if found != expected:
            wrong = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
            raise RuntimeError(f"{database} differs from the source in {len(wrong)} tables, among them {wrong[:3]}")
        self.ask(f"DROP DATABASE {database} WITH (FORCE)")

    def ask(self, statement: str) -> None:
        """Execute a statement in the maintenance database."""
        with psycopg.connect(self.fleet.primaries[0].dsn("postgres"), autocommit=True) as connection:
            connection.execute(statement)


def remark_of(document: Mapping[str, Any]) -> str:
    """The amounts in a command's document, as text."""
    counts = {name: document[name] for name in ("rows", "changes", "transactions") if name in document}
    return " ".join(f"{name}={count}" for name, count in counts.items())


def measure(parts: tuple[str, ...], sizes: Sizes, folder: Path, runs: list[Run], say: Callable[[str], None]) -> None:
    """Run the parts, each on its own fleet; add the results to `runs`."""
    work = {TABLES: many_tables, CHANGES: many_changes, BYTES: many_bytes, ROWS: many_rows}
    for part in parts:
        place = folder / part
        (place / "tmp").mkdir(parents=True)
        with running_scale(place, sizes, say, runs) as scale:
            work[part](scale)


@contextmanager
def running_scale(place: Path, sizes: Sizes, say: Callable[[str], None], runs: list[Run]) -> Iterator[Scale]:
    """A fleet of one shard with an empty database; stopped and deleted at the end."""
    fleet = start_fleet(place / "fleet", shards=1, backups=sizes.backups, settings=SETTINGS, schema=False)
    try:
        scale = Scale(fleet, place, sizes, say, runs)
        scale.ask(f"CREATE DATABASE {DATABASE}")
        spark = f'[spark]\nmaster = "{sizes.master}"\n"driver.memory" = "1g"\n"executor.memory" = "1g"\n'
        fleet.fleet_toml.write_text(f"{fleet.fleet_toml.read_text()}\n{spark}")
        yield scale
    finally:
        stop_fleet(place / "fleet", delete=True)


def many_tables(scale: Scale) -> None:
    """Thousands of small tables: every command, compared with pg_dump and pg_restore of the same database."""
    count = scale.sizes.tables
    scale.say(f"{count} tables")
    databases.make_tables(scale.dsn, count)
    full = databases.contents(scale.dsn)
    scale.command("init", "init")
    scale.command("create", "create", "big")
    dump = scale.work / "dump"
    scale.tool("pg_dump -Fd -j2", "pg_dump", "--format=directory", "--jobs=2", f"--file={dump}", scale.dsn)
    databases.change_tables(scale.dsn, CHANGED_TABLES, count)
    changed = databases.contents(scale.dsn)
    scale.command(f"increment, changes in {CHANGED_TABLES} tables", "create", "big", "--incremental")
    scale.command("increment without changes", "create", "big", "--incremental")
    scale.restore(0, full)
    scale.restore(2, changed)
    scale.ask(f"CREATE DATABASE {PEER}")
    into = f"--dbname={scale.fleet.primaries[0].dsn(PEER)}"
    scale.tool(PEER_TABLES, "pg_restore", "--jobs=2", "--exit-on-error", into, str(dump))
    scale.expect(PEER, full)
    _inspect(scale)
    for file in sorted((scale.fleet.store / "snapshots" / "big").rglob("*.json")):
        scale.runs.append(Run(f"commit {file.name}", 0, size_bytes=file.stat().st_size))
    objects = sum(1 for file in (scale.fleet.store / "snapshots" / "big" / "base").rglob("*") if file.is_file())
    scale.runs.append(Run("base copies", 0, size_bytes=size_bytes(scale.fleet.store), remark=f"objects={objects}"))


def many_changes(scale: Scale) -> None:
    """A transaction that changes every one of millions of narrow rows."""
    databases.make_narrow(scale.dsn, scale.sizes.changes)
    scale.command("init", "init")
    scale.command("create", "create", "big")
    databases.change_narrow(scale.dsn)
    scale.command(f"increment of {scale.sizes.changes} updates", "create", "big", "--incremental")
    scale.restore(1, databases.contents(scale.dsn))
    _inspect(scale)


def many_bytes(scale: Scale) -> None:
    """A transaction that inserts gigabytes, and one that updates them."""
    databases.make_wide(scale.dsn)
    scale.command("init", "init")
    scale.command("create", "create", "big")
    databases.fill_wide(scale.dsn, scale.sizes.bytes // ROW_BYTES)
    scale.command("increment of inserts", "create", "big", "--incremental")
    _copy(scale)
    scale.restore(1, databases.contents(scale.dsn))
    databases.change_wide(scale.dsn)
    scale.command("increment of updates", "create", "big", "--incremental")
    scale.restore(2, databases.contents(scale.dsn))
    _inspect(scale)


def _copy(scale: Scale) -> None:
    """Copy the wide table's rows from a file into an empty table with the same key, in one stream."""
    rows = scale.work / "rows"
    with psycopg.connect(scale.dsn, autocommit=True) as connection:
        with rows.open("wb") as file, connection.cursor().copy("COPY wide TO STDOUT") as found:
            for data in found:
                file.write(data)
        connection.execute("CREATE TABLE again (LIKE wide INCLUDING ALL)")
        scale.say(PEER_BYTES)
        began = time.perf_counter()
        with rows.open("rb") as file, connection.cursor().copy("COPY again FROM STDIN") as sent:
            while data := file.read(COPIED_AT_ONCE):
                sent.write(data)
        scale.keep(Run(PEER_BYTES, time.perf_counter() - began))
        connection.execute("DROP TABLE again")
    rows.unlink()


def many_rows(scale: Scale) -> None:
    """A table of many narrow rows, one in a hundred of which changes."""
    databases.make_narrow(scale.dsn, scale.sizes.rows)
    scale.command("init", "init")
    scale.command("create", "create", "big")
    databases.change_narrow(scale.dsn, every=100)
    scale.command("increment", "create", "big", "--incremental")
    scale.restore(1, databases.contents(scale.dsn))
    _inspect(scale)


def _inspect(scale: Scale) -> None:
    # Without standbys there is no other copy to compare with.
    scale.command("check", "check", "big", accepted=(DONE, INCONCLUSIVE))
    scale.command("list", "list")
    scale.command("show", "show", "big")
