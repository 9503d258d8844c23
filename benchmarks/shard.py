"""The shard under test: one embedded primary with pgbench's tables, its load, and a hash of its state.

pgbench_history has no key, so every tool leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.embedded.folder import DATABASE
from cutline.embedded.server import EmbeddedNode
from cutline.nodes.programs import run_tool

ROWS_PER_SCALE = 100_000
CLIENTS = 4
LOAD_SECONDS_MAX = 3600
EXCLUDED = "public.pgbench_history"
# pg_basebackup --incremental needs summarize_wal; the other settings keep checkpoints out of the figures.
SETTINGS = {
    "summarize_wal": "on",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "1GB",
    "maintenance_work_mem": "256MB",
    "autovacuum": "off",
}
DATABASE_QUERY = f"SELECT datname FROM pg_database WHERE datname = '{DATABASE}'"
STATE_QUERY = """
SELECT count(*), sum(abalance), sum(hashtextextended(t::text, 0)) FROM public.pgbench_accounts t
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard of a running fleet (its only one, without an `id`), and the folder `work` for the output of the tools."""

    fleet: EmbeddedFleet
    work: Path
    id: str = ""

    @property
    def primary(self) -> EmbeddedNode:
        """The shard's primary."""
        return next(node for node in self.fleet.primaries if self.id in ("", node.id))

    @property
    def dsn(self) -> str:
        """The connection string of the database under test."""
        return self.primary.dsn()

    def ask(self, statement: str, database: str | None = None) -> tuple[Any, ...]:
        """Execute a statement and return its first row, or () if it returns no rows."""
        with psycopg.connect(self.primary.dsn(database) if database else self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchone() or () if cursor.description else ()

    def checkpoint(self) -> None:
        """Write dirty pages out now, so that one tool's writes don't slow down the next."""
        self.ask("CHECKPOINT")

    def run_transactions(self, count: int) -> None:
        """Run `count` transactions of pgbench's simple-update script."""
        # The load is not measured, so its commits don't wait for the disk.
        dsn = make_conninfo(self.dsn, options="-c synchronous_commit=off")
        each = str(-(-count // CLIENTS))
        load = ["--builtin=simple-update", "--no-vacuum", f"--client={CLIENTS}", "--jobs=2"]
        run_tool("pgbench", *load, f"--transactions={each}", dsn, seconds_max=LOAD_SECONDS_MAX)
        self.checkpoint()

    def state(self, database: str | None = None) -> tuple[Any, ...]:
        """Return a value that identifies the state of the accounts."""
        return self.ask(STATE_QUERY, database)

    def create_database(self, name: str) -> str:
        """Create an empty database on the primary and return its connection string."""
        self.drop_database(name)
        self.ask(f"CREATE DATABASE {name}", "postgres")
        return self.primary.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, if it exists."""
        self.ask(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", "postgres")


@contextmanager
def running_shard(directory: Path, *, rows: int, backups: int) -> Iterator[Shard]:
    """Start a one-shard fleet in `directory` with `rows` accounts; stop and delete it at the end."""
    fleet = start_fleet(directory / "fleet", shards=1, backups=backups, settings=SETTINGS, schema=False)
    try:
        shard = Shard(fleet, directory)
        scale = max(1, round(rows / ROWS_PER_SCALE))
        if not shard.ask(DATABASE_QUERY, "postgres"):
            shard.create_database(DATABASE)
        steps = ["--initialize", "--init-steps=dtGvp", "--quiet", f"--scale={scale}"]
        run_tool("pgbench", *steps, shard.dsn, seconds_max=LOAD_SECONDS_MAX)
        shard.checkpoint()
        description = fleet.fleet_toml.read_text()
        fleet.fleet_toml.write_text(f'{description}\n[groups]\nexclude = ["{EXCLUDED}"]\n')
        yield shard
    finally:
        stop_fleet(directory / "fleet", delete=True)
