"""A quiet chain of two increments with tables of every kind, whose rows at each cut PostgreSQL has told."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg

from cutline.embedded.bank import INITIAL_BALANCE
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.connections import with_database
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.integration.refusing import execute
from tests.stores.listed import objects_of

NAME, DATABASE = "copied", "copies"
TABLES = ("item", "log", "cleared", "first", "second")
# Large values, a table without a key, one that is truncated, and two that are copied again, each by another increment.
BEGIN = """
CREATE TABLE item (id int PRIMARY KEY, n int, body text);
ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
INSERT INTO item SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 300) AS i;
CREATE TABLE log (what text);
ALTER TABLE log REPLICA IDENTITY FULL;
INSERT INTO log SELECT 'line ' || i % 20 FROM generate_series(1, 200) AS i;
CREATE TABLE cleared (id int PRIMARY KEY);
INSERT INTO cleared SELECT generate_series(1, 50);
CREATE TABLE first (id int PRIMARY KEY, v int, body text);
ALTER TABLE first ALTER body SET STORAGE EXTERNAL;
INSERT INTO first SELECT i, i, repeat(md5(i::text), 100) FROM generate_series(1, 100) AS i;
CREATE TABLE second (id int PRIMARY KEY, v int);
INSERT INTO second SELECT i, i FROM generate_series(1, 100) AS i;
CREATE SEQUENCE numbers;
SELECT setval('numbers', 7)
"""
# Without what tests before have left in the shared databases; tests after this check the bank's books.
EMPTY = f"""
TRUNCATE transfer;
UPDATE account SET balance = {INITIAL_BALANCE};
DROP TABLE IF EXISTS wide
"""
CHANGES = [
    """
UPDATE item SET n = n + 1 WHERE id % 3 = 0;
UPDATE item SET id = id + 1000 WHERE id % 50 = 0;
DELETE FROM log WHERE what = 'line 3';
INSERT INTO log VALUES ('more'), ('more');
TRUNCATE cleared;
INSERT INTO cleared VALUES (77);
ALTER TABLE first ALTER v TYPE bigint;
UPDATE first SET v = -v WHERE id < 10;
SELECT setval('numbers', 77)
""",
    """
UPDATE item SET n = n + 1 WHERE id % 7 = 0;
DELETE FROM log WHERE what = 'more';
ALTER TABLE second ALTER v TYPE bigint;
UPDATE first SET v = 5 WHERE id = 50;
UPDATE second SET v = -v WHERE id > 90;
SELECT setval('numbers', 99)
""",
]


@dataclass(frozen=True, slots=True)
class CopiedChain:
    """The chain, a copy of its store to damage, and every shard's rows at each increment, by table."""

    chain: Chain
    fleet: Fleet
    target: Fleet
    store: Path
    spark: Ready
    truth: list[list[dict[str, bytes]]]

    def base(self, node: str, increment: int = 0) -> str:
        """The largest base object of the node's copy in the increment's commit."""
        objects = [o for o in objects_of(self.chain.commits[increment]) if (o.kind, o.node) == (BASE, node)]
        return max(objects, key=lambda one: one.size).key

    def segment(self, node: str, increment: int) -> str:
        """The largest segment of the node's archive in the increment's commit."""
        return max(self.chain.commits[increment].segments[node], key=lambda one: one.size).key

    def damage(self, damages: Mapping[str, Callable[[Path], None]]) -> None:
        for key, damage in damages.items():
            damage(self.store / key)

    def restored(self) -> list[dict[str, bytes]]:
        return [sorted_copies(node.dsn) for node in self.target.primaries]

    def sequences(self) -> list[int]:
        found = []
        for node in self.target.primaries:
            with psycopg.connect(node.dsn) as connection:
                found.append(connection.execute("SELECT last_value FROM numbers").fetchall()[0][0])
        return found

    def databases(self) -> set[str]:
        """The databases that restores have left."""
        found: set[str] = set()
        for node in self.target.primaries:
            with psycopg.connect(with_database(node, "postgres").dsn) as connection:
                query = "SELECT datname FROM pg_database WHERE starts_with(datname, %s)"
                found |= {name for (name,) in connection.execute(query, (DATABASE,))}
        return found

    def drop_databases(self) -> None:
        for node in self.target.primaries:
            with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
                query = "SELECT datname FROM pg_database WHERE starts_with(datname, %s)"
                for (name,) in connection.execute(query, (DATABASE,)).fetchall():
                    connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


@contextmanager
def copied_chain(servers: EmbeddedFleet, directory: Path, spark: Ready) -> Iterator[CopiedChain]:
    """Take a full snapshot and two increments while nothing else writes."""
    fleet = configure_fleet(servers, directory / "fleet.toml", f"file://{directory}/store")
    runs = Runs(fleet, spark)
    truth = []
    try:
        for dsn in servers.dsns():
            execute(dsn, EMPTY, BEGIN)
        with dropping_slots(fleet):
            runs.init()
            runs.full(NAME)
            truth.append([sorted_copies(dsn) for dsn in servers.dsns()])
            for changes in CHANGES:
                for dsn in servers.dsns():
                    execute(dsn, changes)
                runs.increment(NAME)
                truth.append([sorted_copies(dsn) for dsn in servers.dsns()])
        path = directory / "target.toml"
        path.write_text(fleet.path.read_text().replace("/bank", f"/{DATABASE}"))
        chain = read_chain(fleet.store.open(), NAME)
        yield CopiedChain(chain, fleet, load_fleet(path), directory / "store", spark, truth)
    finally:
        for dsn in servers.dsns():
            execute(dsn, f"DROP TABLE IF EXISTS {', '.join(TABLES)}; DROP SEQUENCE IF EXISTS numbers")


def copy_chain(original: CopiedChain, directory: Path) -> CopiedChain:
    """The chain with a copy of its store in `directory`, for one test to damage."""
    store, path = directory / "store", directory / "fleet.toml"
    shutil.copytree(original.store, store)
    path.write_text(original.fleet.path.read_text().replace(str(original.store), str(store)))
    fleet = replace(original.fleet, path=path, store=StoreLocation(f"file://{store}"))
    return replace(original, fleet=fleet, store=store)
