"""A database with thousands of tables, as with a schema for each tenant; each command in a separate process.

Every table has eight columns, a key, an index and ten rows. An increment contains a row of each of twenty tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import psycopg

from benchmarks.parts import CUTLINE_DATABASE, PEER_DATABASE, take_turns
from benchmarks.results import Results
from benchmarks.shard import Shard
from benchmarks.users import allow_one_copy, run_command
from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.embedded.folder import DATABASE
from cutline.nodes.programs import run_tool

TABLES_PER_SCHEMA, ROWS, CHANGED, INCREMENTS, REPEATS = 100, 10, 20, 3, 3
# Dumps and restores lock every table in one transaction.
SETTINGS = {"max_locks_per_transaction": "1024", "shared_buffers": "512MB", "autovacuum": "off"}
SECONDS_MAX = 3600.0
TABLES_QUERY = """
DO $$ BEGIN
  CREATE SCHEMA tenant_{schema};
  FOR i IN 1..{tables} LOOP
    EXECUTE format(
      'CREATE TABLE tenant_{schema}.table_%s (id bigint PRIMARY KEY, name text NOT NULL, note text, kind int,'
      ' amount numeric(12,2), other uuid, data jsonb, made_at timestamptz)', i);
    EXECUTE format('CREATE INDEX ON tenant_{schema}.table_%s (made_at)', i);
    EXECUTE format(
      'INSERT INTO tenant_{schema}.table_%s (id, name, made_at)'
      ' SELECT n, md5(n::text), ''2026-01-01''::timestamptz FROM generate_series(1, {rows}) AS n', i);
  END LOOP;
END $$
"""
CHANGE_QUERY = "INSERT INTO tenant_0.table_{table} (id, name) VALUES ({id}, 'new')"


def tables_part(results: Results, tables: int, folder: Path, say: Callable[[str], None]) -> None:
    """Measure the commands, pg_dump and pg_restore on a database with so many tables."""
    say(f"starting a server with {tables} tables")
    fleet = start_fleet(folder / "tables", shards=1, backups=0, settings=SETTINGS, schema=False)
    try:
        allow_one_copy(fleet)
        shard = Shard(fleet, folder)
        shard.create_database(DATABASE)
        with psycopg.connect(shard.dsn, autocommit=True) as connection:
            for schema in range(-(-tables // TABLES_PER_SCHEMA)):
                count = min(TABLES_PER_SCHEMA, tables - schema * TABLES_PER_SCHEMA)
                connection.execute(TABLES_QUERY.format(schema=schema, tables=count, rows=ROWS).encode())
            connection.execute("ANALYZE")
        shard.checkpoint()
        _measure(results, shard, folder, say)
    finally:
        stop_fleet(folder / "tables", delete=True)


def _measure(results: Results, shard: Shard, folder: Path, say: Callable[[str], None]) -> None:
    def command(task: str, *words: str) -> None:
        say(task)
        run_command(results, f"tables: {task}", shard.fleet.fleet_toml, folder / "cache", words)

    def tool(name: str, *words: str) -> None:
        say(name)
        results.measure(f"tables: {name}", lambda: run_tool(name, *words, seconds_max=SECONDS_MAX))

    command("init", "init")
    dump = folder / "tables-dump"

    def create(number: int) -> None:
        command("create", "create", "many" if number == REPEATS - 1 else f"many-{number}")
        # The deletion of the last snapshot would drop the publications, too.
        if number > 0:
            command("delete", "delete", f"many-{number - 1}", "--force", "--yes")

    def take_dump(_: int) -> None:
        shutil.rmtree(dump, ignore_errors=True)
        tool("pg_dump", "--format=directory", "--jobs=2", "--compress=1", f"--file={dump}", shard.dsn)

    take_turns(REPEATS, [create, take_dump])
    for number in range(INCREMENTS):
        with psycopg.connect(shard.dsn, autocommit=True) as connection:
            for table in range(1, CHANGED + 1):
                connection.execute(CHANGE_QUERY.format(table=table, id=ROWS + 1 + number).encode())
        command("increment", "create", "many", "--incremental")
    command("check", "check", "many")
    # No increment follows: the slot would retain the WAL of all restores.
    shard.ask("SELECT count(pg_drop_replication_slot(slot_name)) FROM pg_replication_slots")
    target = folder / "tables-target.toml"
    target.write_text(shard.fleet.fleet_toml.read_text().replace(shard.dsn, shard.primary.dsn(CUTLINE_DATABASE)))

    def restore(_: int) -> None:
        command("restore", "restore", "many", "--to", str(target), "--yes")
        shard.drop_database(CUTLINE_DATABASE)
        shard.checkpoint()

    def restore_dump(_: int) -> None:
        dsn = shard.create_database(PEER_DATABASE)
        tool("pg_restore", "--jobs=2", "--exit-on-error", f"--dbname={dsn}", str(dump))
        shard.drop_database(PEER_DATABASE)
        shard.checkpoint()

    take_turns(REPEATS, [restore, restore_dump])
    shutil.rmtree(dump, ignore_errors=True)
