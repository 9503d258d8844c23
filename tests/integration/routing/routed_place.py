"""A chain of three shards, and one of a single shard, with tables for every kind of route."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import RestorePlan, plan_restore
from cutline.restore.plan.report import RestoreReport
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARDS, NAME, SINGLE = 3, "daily", "single"
# The increments: with what can't be restored elsewhere, without that, and with other definitions on the second shard.
BAD, GOOD, DIFFERENT = 0, 1, 2
TABLES = ("account", "entry", "person", "rate", "badge", "log")
# Routes by a column of the key and by one that is not, by text and by uuid, and a table that is the same everywhere.
ROUTES = (
    "public.account=hash(id)",
    "public.entry=hash(account)",
    "public.person=hash(name)",
    "public.badge=hash(id)",
    "public.rate=all",
    "*.log=hash(what)",
)
# PostgreSQL's own formula for each table with a hash, as docs/restore.md has it.
FORMULAS = {
    "account": "hashint8(id)",
    "entry": "hashint8(account)",
    "person": "hashtext(name)",
    "badge": "uuid_hash(id)",
    "log": "hashtext(what)",
}
DEFINITIONS = """
CREATE TABLE account (id bigint PRIMARY KEY, region text, balance bigint NOT NULL);
CREATE TABLE rate (code varchar(8) PRIMARY KEY, value numeric NOT NULL);
CREATE TABLE person (name text PRIMARY KEY, note text, account bigint REFERENCES account (id));
CREATE TABLE entry (
    amount int, id int, account bigint REFERENCES account (id), rate varchar(8) REFERENCES rate (code),
    made timestamptz DEFAULT '2026-01-01', PRIMARY KEY (id, account));
CREATE TABLE badge (id uuid PRIMARY KEY, code int UNIQUE);
CREATE TABLE log (at int, what text);
ALTER TABLE log REPLICA IDENTITY FULL;
ALTER TABLE person ALTER note SET STORAGE EXTERNAL;
CREATE SEQUENCE upward;
CREATE SEQUENCE downward INCREMENT -1;
CREATE MATERIALIZED VIEW total AS SELECT sum(balance) AS sum FROM account;
"""
# Keys are different on every shard; texts have what COPY escapes. One note is longer than 64 KiB.
ROWS = """
INSERT INTO account SELECT {shard} * 1000 + i, 't' || 1 + i % 3, i FROM generate_series(1, 300) AS i;
INSERT INTO rate SELECT 'r' || i, i FROM generate_series(1, 5) AS i;
INSERT INTO person SELECT format(E'%s\\t\\\\ %s\\n ü %s', {shard}, i, repeat('x', i % 30)), repeat(md5(i::text), 80),
                          {shard} * 1000 + i FROM generate_series(1, 200) AS i;
INSERT INTO person VALUES ('long {shard}', repeat('y', 100000), NULL);
INSERT INTO entry SELECT i, i, {shard} * 1000 + 1 + i % 300, 'r' || 1 + i % 5 FROM generate_series(1, 900) AS i;
INSERT INTO badge SELECT md5('{shard} ' || i)::uuid, {shard} * 1000 + i FROM generate_series(1, 100) AS i;
INSERT INTO log SELECT i, 'line ' || i % 7 FROM generate_series(1, 100 + {shard}) AS i;
SELECT setval('upward', 10 + {shard}), setval('downward', -10 - {shard});
REFRESH MATERIALIZED VIEW total;
"""
# A region that is no target, a code that two shards have, and a rate that differs.
FAULTS = """
UPDATE account SET region = CASE {shard} WHEN 0 THEN 'nowhere' END WHERE id = {shard} * 1000 + 7;
INSERT INTO badge VALUES (md5('bad {shard}')::uuid, -5);
INSERT INTO rate VALUES ('odd', {shard});
"""
CHANGES = """
DELETE FROM badge WHERE code = -5; DELETE FROM rate WHERE code = 'odd';
UPDATE account SET region = 't2' WHERE region IS NULL OR region = 'nowhere';
UPDATE account SET balance = balance + 1, region = 't3' WHERE id % 5 = 0;
UPDATE person SET note = note || '!' WHERE name LIKE 'long%';
UPDATE person SET account = account WHERE account % 3 = 0;
UPDATE entry SET account = account + 1 WHERE id % 10 = 0 AND account % 1000 < 300;
DELETE FROM entry WHERE id % 9 = 0;
DELETE FROM log WHERE what = 'line 3';
INSERT INTO log VALUES (1, 'more'), (1, 'more');
SELECT setval('upward', 100 + {shard}), setval('downward', -100 - {shard});
"""
OTHER_DEFINITIONS = """
ALTER TABLE badge ADD remark text;
CREATE FUNCTION helper() RETURNS int LANGUAGE sql RETURN 2;
ALTER TABLE log OWNER TO other;
"""

Lines = list[bytes]


@dataclass(frozen=True, slots=True)
class RoutedPlace:
    """The runs of the three shards and of the first alone, and their rows at GOOD: by shard and table."""

    servers: EmbeddedFleet
    folder: Path
    runs: Runs
    single: Runs
    truth: list[dict[str, Lines]]

    def target(self, count: int) -> Fleet:
        """A fleet t1, t2, … of `count` nodes, on the same servers."""
        nodes = "".join(
            f'\n[[node]]\nid = "t{number}"\ndsn = "{with_database_name(dsn)}"\n'
            for number, dsn in enumerate(self.servers.dsns()[:count], 1)
        )
        path = self.folder / f"target{count}.toml"
        path.write_text(f'name = "elsewhere"\nstore = "file://{self.folder}/store"\n{nodes}')
        return load_fleet(path)

    def plan(self, count: int, *routes: str, increment: int = GOOD, groups: tuple[str, ...] = ()) -> RestorePlan:
        request = RestoreRequest(NAME, increment, groups=groups, routes=routes)
        return plan_restore(self.runs.fleet, self.target(count), request)

    def plan_into(self, path: Path, increment: int) -> RestorePlan:
        return plan_restore(self.runs.fleet, load_fleet(path), RestoreRequest(NAME, increment))

    def restore(self, plan: RestorePlan) -> RestoreReport:
        return restore_fleet(plan, self.runs.spark, Silent())

    def rows(self, number: int) -> dict[str, Lines]:
        """The rows of the target t`number`."""
        return lines_of(with_database_name(self.servers.dsns()[number - 1]))

    def query(self, number: int, query: str) -> list[tuple[object, ...]]:
        with psycopg.connect(with_database_name(self.servers.dsns()[number - 1])) as connection:
            return connection.execute(query.encode()).fetchall()

    def databases(self) -> set[str]:
        """The databases that restores have made."""
        found: set[str] = set()
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn) as connection:
                query = "SELECT datname FROM pg_database WHERE datname LIKE 'elsewhere%'"
                found |= {name for (name,) in connection.execute(query)}
        return found

    def drop_targets(self) -> None:
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn, autocommit=True) as connection:
                names = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'elsewhere%'").fetchall()
                for (name,) in names:
                    connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())

    def expected(self, targets: int, shards: Iterable[int] = range(SHARDS)) -> list[dict[str, Lines]]:
        """The rows of each target by ROUTES, as PostgreSQL places those of the sources."""
        placed: list[dict[str, Lines]] = [{table: [] for table in TABLES} for _ in range(targets)]
        for shard in shards:
            for number, rows in enumerate(placed):
                of_shard = lines_of(
                    self.servers.dsns()[shard],
                    {
                        table: f"({formula}::bigint & 2147483647) % {targets} = {number}"
                        for table, formula in FORMULAS.items()
                    },
                )
                for table in TABLES:
                    # Reference rows are the same on all shards.
                    rows[table] += of_shard[table] if table != "rate" or shard == 0 else []
        return [{table: sorted(lines) for table, lines in rows.items()} for rows in placed]


def with_database_name(dsn: str) -> str:
    return re.sub("/bank", "/elsewhere", dsn)


def lines_of(dsn: str, conditions: Mapping[str, str] | None = None) -> dict[str, Lines]:
    """The rows of each table that PostgreSQL prints, sorted."""
    found: dict[str, Lines] = {}
    with psycopg.connect(dsn) as connection:
        for table in TABLES:
            condition = (conditions or {}).get(table, "true")
            with connection.cursor().copy(f"COPY (SELECT * FROM {table} WHERE {condition}) TO STDOUT".encode()) as copy:
                found[table] = sorted(b"".join(bytes(piece) for piece in copy).splitlines(keepends=True))
    return found


def make_routed_place(servers: EmbeddedFleet, folder: Path, spark: SparkSession) -> RoutedPlace:
    """Take the chain NAME, and a full snapshot SINGLE of the first shard in a store of its own."""
    fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store")
    runs = Runs(fleet, Ready(spark))
    for shard, dsn in enumerate(servers.dsns()):
        execute(
            dsn,
            "DROP TABLE account, transfer",
            "CREATE ROLE other",
            DEFINITIONS,
            *(text.format(shard=shard) for text in (ROWS, FAULTS)),
        )
    runs.init()
    runs.full(NAME)
    for shard, dsn in enumerate(servers.dsns()):
        execute(dsn, CHANGES.format(shard=shard))
    runs.increment(NAME)
    truth = [lines_of(dsn) for dsn in servers.dsns()]
    first, *_ = fleet.path.read_text().replace("[[node]]", "@[[node]]", 1).partition("@")
    nodes = re.findall(r"(?ms)^\[\[node\]\].*?(?=^\[|\Z)", fleet.path.read_text())
    path = folder / "single.toml"
    path.write_text(first.replace(f"{folder}/store", f"{folder}/single-store") + nodes[0])
    single = Runs(load_fleet(path), Ready(spark))
    single.init()
    single.full(SINGLE)
    return RoutedPlace(servers, folder, runs, single, truth)
