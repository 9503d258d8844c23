"""Changes of several kinds, as many of each: the fold takes them in different ways, and none should take much longer.

Each kind has a shard with a million base rows. Check and restore of one increment run in separate processes. The
figures of the other kinds are compared with those of updates in a table with a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.parts import CUTLINE_DATABASE
from benchmarks.results import Results
from benchmarks.shard import SETTINGS, Shard
from benchmarks.users import allow_one_copy, expect, run_command
from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.embedded.folder import DATABASE

BASE_ROWS, CHANGES, LARGE_ROWS = 1_000_000, 600_000, 60_000
KEYED = "CREATE TABLE t (id bigint PRIMARY KEY, at timestamptz, what text)"
KEYLESS = "CREATE TABLE t (id bigint, at timestamptz, what text); ALTER TABLE t REPLICA IDENTITY FULL"
FILL_QUERY = """
INSERT INTO t SELECT i, timestamptz '2026-01-01' + i * interval '1 second', md5(i::text)
  FROM generate_series({first}, {last}) AS i
"""
STATE_QUERY = "SELECT count(*), sum(hashtextextended(t::text, 0)) FROM t"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of changes: the statements that create a table with base rows, and that change it."""

    name: str
    schema: str
    fill: str
    change: str


# Values of 2,240 bytes, which stay out of the row; an UPDATE of another column leaves them out of the WAL.
LARGE = "CREATE TABLE t (id bigint PRIMARY KEY, n int, what text); ALTER TABLE t ALTER what SET STORAGE EXTERNAL"
FILL_LARGE = f"INSERT INTO t SELECT i, 0, repeat(md5(i::text), 70) FROM generate_series(1, {LARGE_ROWS}) AS i"
FILL = FILL_QUERY.format(first=1, last=BASE_ROWS)
KINDS = (
    Kind("updates", KEYED, FILL, f"UPDATE t SET at = now() WHERE id <= {CHANGES}"),
    Kind("lines added", KEYLESS, FILL, FILL_QUERY.format(first=BASE_ROWS + 1, last=BASE_ROWS + CHANGES)),
    # Without a key, an UPDATE deletes a line and adds one.
    Kind("lines updated", KEYLESS, FILL, f"UPDATE t SET at = now() WHERE id <= {CHANGES // 2}"),
    Kind("values left out", LARGE, FILL_LARGE, "UPDATE t SET n = n + 1"),
)


def changes_part(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    """Measure check and restore for each kind of changes."""
    for number, kind in enumerate(KINDS):
        say(f"starting a server for {kind.name}")
        fleet = start_fleet(folder / f"changes-{number}", shards=1, backups=0, settings=SETTINGS, schema=False)
        try:
            allow_one_copy(fleet)
            shard = Shard(fleet, folder)
            shard.create_database(DATABASE)
            _measure(results, kind, shard, folder, say)
        finally:
            stop_fleet(folder / f"changes-{number}", delete=True)


def _measure(results: Results, kind: Kind, shard: Shard, folder: Path, say: Callable[[str], None]) -> None:
    def command(task: str, *words: str) -> None:
        say(task)
        run_command(results, f"changes: {task}", shard.fleet.fleet_toml, folder / "cache", words)

    def run(*statements: str) -> None:
        with psycopg.connect(shard.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())
        shard.checkpoint()

    run(kind.schema, kind.fill)
    command("init", "init")
    command("create", "create", "one")
    run(kind.change)
    command(f"increment of {kind.name}", "create", "one", "--incremental")
    command(f"check of {kind.name}", "check", "one")
    target = folder / "changes-target.toml"
    target.write_text(shard.fleet.fleet_toml.read_text().replace(shard.dsn, shard.primary.dsn(CUTLINE_DATABASE)))
    command(f"restore of {kind.name}", "restore", "one", "--to", str(target), "--yes")
    restored = f"restore of {kind.name}"
    results.attempt(restored, lambda: expect(shard.ask(STATE_QUERY, CUTLINE_DATABASE), shard.ask(STATE_QUERY)))
