"""Write the kept stores anew with this version: `make kept`. It needs PostgreSQL 16 (`make servers`).

The oldest version whose standbys decode WAL is the source, because every newer server must be able to restore it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from tests.commands.snapshot_runs import run_command, sorted_copies
from tests.kept.stores import CHAIN, DELETED, FLEET, KEPT, KEY, RESTORE_POINT, ROWS, STORES, encryption_of
from tests.run.quick_spark import with_spark
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

PAUSE_SECONDS = 3
MAJOR = 16
ACROSS = "across both shards"
# Every kind of object and column whose stored form differs from the others'.
BEFORE_FULL = (
    "CREATE TYPE mood AS ENUM ('sad', 'happy')",
    "CREATE TABLE account (id int PRIMARY KEY, owner text, balance numeric, mood mood, tags text[], raw bytea)",
    "INSERT INTO account SELECT n, 'owner ' || n, n * 1.5, 'happy', ARRAY['a', NULL], '\\x00ff' FROM"
    " generate_series(1, 25) AS n",
    "CREATE TABLE entry (id bigserial PRIMARY KEY, account int REFERENCES account, note text)",
    "INSERT INTO entry (account, note) SELECT n, E'tab\\there, \\\\ and ä' FROM generate_series(1, 20) AS n",
    "CREATE TABLE unkeyed (v text, w int)",
    "ALTER TABLE unkeyed REPLICA IDENTITY FULL",
    "INSERT INTO unkeyed VALUES ('twice', 1), ('twice', 1), (NULL, NULL)",
    "CREATE TABLE long (id int PRIMARY KEY, v text, n int)",
    "ALTER TABLE long ALTER v SET STORAGE EXTERNAL",
    "INSERT INTO long VALUES (1, repeat('long ', 500), 0)",
    "CREATE TABLE parts (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (10) TO (20)",
    "INSERT INTO parts VALUES (1, 'low'), (11, 'high')",
    "CREATE MATERIALIZED VIEW total AS SELECT sum(balance) FROM account",
    "CREATE FUNCTION twice(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 * 2'",
    "CREATE INDEX account_twice ON account (twice(id))",
    "SELECT lo_from_bytea(4711, '\\xcafe')",
)
BEFORE_FIRST = (
    "UPDATE account SET balance = balance + 1 WHERE id <= 10",
    "DELETE FROM entry WHERE id = 3",
    "UPDATE unkeyed SET w = 2 WHERE v IS NULL",
    # The long value stays as it is, so WAL does not have it.
    "UPDATE long SET n = 1",
    "ALTER TABLE account ADD later text DEFAULT 'for all rows'",
    "ALTER TABLE entry RENAME note TO remark",
    "UPDATE account SET id = 1000 WHERE id = 25",
    # Both are copied again.
    "ALTER TABLE entry ALTER account TYPE bigint",
    "CREATE TABLE novel (id int PRIMARY KEY, v text)",
    "INSERT INTO novel VALUES (1, 'one')",
)
# No table is copied again after this: a copy would wait for the transaction in doubt.
BEFORE_SECOND = (
    "TRUNCATE parts_high",
    "INSERT INTO parts VALUES (12, 'after')",
    "DROP TABLE novel",
    "INSERT INTO entry (account, remark) VALUES (1, 'last')",
)
IN_DOUBT = "INSERT INTO account (id, owner) VALUES (5000, 'in doubt')"
TOGETHER = "INSERT INTO account (id, owner) VALUES (4000, 'on both shards')"


def execute(dsns: Sequence[str], *statements: str) -> None:
    """Run the statements in each database, each in a transaction of its own."""
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


def prepare(dsns: Sequence[str], statement: str, gid: str) -> None:
    """Prepare one global transaction on all shards."""
    execute(dsns, f"BEGIN; {statement}; PREPARE TRANSACTION '{gid}'")


def run(fleet: Fleet, *words: str) -> None:
    """Run a command, which must succeed."""
    code, document = run_command(fleet, *words)
    if code:
        raise SystemExit(f"snapshot {' '.join(words)} ended with {code}: {document}")


def describe(embedded: EmbeddedFleet, folder: Path, store: str) -> Fleet:
    """Write and load the fleet.toml of a kept store."""
    text = re.sub(r"(?m)^name = .*$", f"name = {json.dumps(FLEET)}", embedded.fleet_toml.read_text())
    text = re.sub(r"(?m)^store = .*$", f"store = {json.dumps(f'file://{folder / store}')}", text)
    path = folder / f"{store}.toml"
    # A clone does not keep these permissions, and a command insists on them.
    KEY.chmod(0o600)
    path.write_text(f"{text}\n{encryption_of(store, KEY)}{with_spark('')}\n")
    return load_fleet(path)


def write_store(fleet: Fleet) -> list[dict[str, dict[str, str]]]:
    """A chain of two increments, a restore point, a deleted snapshot and a check; the rows at each increment."""
    dsns = [node.dsn for node in fleet.primaries]

    def rows() -> dict[str, dict[str, str]]:
        return {
            node.id: {table: body.decode() for table, body in sorted_copies(node.dsn).items()}
            for node in fleet.primaries
        }

    execute(dsns, *BEFORE_FULL)
    run(fleet, "init")
    run(fleet, "create", CHAIN, "--large-objects", "--comment", "kept")
    found = [rows()]
    execute(dsns, *BEFORE_FIRST)
    prepare(dsns, TOGETHER, "together")
    execute(dsns, "COMMIT PREPARED 'together'")
    run(fleet, "create", CHAIN, "--incremental")
    found.append(rows())
    # DDL that was dumped within two seconds may be the same, byte for byte.
    time.sleep(PAUSE_SECONDS)
    execute(dsns, *BEFORE_SECOND)
    prepare(dsns, IN_DOUBT, ACROSS)
    run(fleet, "create", CHAIN, "--incremental")
    found.append(rows())
    execute(dsns, f"ROLLBACK PREPARED '{ACROSS}'")
    run(fleet, "create", RESTORE_POINT, "--only-cut")
    run(fleet, "create", DELETED, "--only-cut")
    run(fleet, "delete", DELETED, "--yes")
    run(fleet, "check", CHAIN)
    return found


def main() -> None:
    """Write the stores, and the rows that each of their restore points has."""
    server = require_server(MAJOR)
    rows = {}
    with tempfile.TemporaryDirectory(prefix="cutline-kept-") as name:
        for store in STORES:
            folder = Path(name) / store
            folder.mkdir()
            with fleet_of(folder / "fleet", [server, server], backups=1, schema=False) as embedded:
                execute([node.dsn("postgres") for node in embedded.primaries], "CREATE DATABASE bank")
                rows[store] = write_store(describe(embedded, folder, store))
            shutil.rmtree(KEPT / store, ignore_errors=True)
            shutil.copytree(folder / store, KEPT / store)
    ROWS.write_text(json.dumps(rows, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    sys.stdout.write(f"written to {', '.join(str(KEPT / store) for store in STORES)}\n")


if __name__ == "__main__":
    main()
