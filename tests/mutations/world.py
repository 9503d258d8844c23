"""A small fleet whose store has every kind of document, to change each of them.

Two shards with a standby each. The chain has a full snapshot with large objects, an increment that continues some
tables, copies one again and drops one, and an increment after it. Copies of the chain under other names carry a
tombstone, a mark that only the full snapshot is left, and a mark that the chain has ended.

A second world (`made_merged_world`) has a chain that begins with a merge, what lies before it is given up, restore
points are pinned, and an increment after the merge has copied a standby and a primary again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
from msgspec import structs
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.check.merge_proof import prove_merge
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.merge import rewriting
from cutline.snapshots.merge.running import plan_merge, run_merge
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.end_marks import EndMark, end_key
from cutline.snapshots.records.operation_records import LeaseRenewal, operation_key
from cutline.snapshots.records.proven_chains import read_chain, read_full
from cutline.snapshots.records.tombstones import DELETED, ONLY_FULL, Mark, RestorePoint
from cutline.snapshots.removal.earlier_objects import drop_earlier_objects, plan_drop
from cutline.snapshots.removal.pinning import pin_in_store, release_in_store
from cutline.storage.ids import new_operation_id
from cutline.wal.drain.slots import drop_slots, slot_name
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import roll_back_prepared
from tests.integration.wal_place import await_database
from tests.mutations.sealing import resealed, write_all
from tests.run.quick_spark import with_spark

NAME, DATABASE = "chain", "mutated"
DELETED_NAME, PRUNED_NAME, ENDED_NAME = "gone", "pruned", "given-up"
SCHEMA = """
CREATE SEQUENCE counter;
CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL, note text);
INSERT INTO account SELECT i, 100, 'note ' || i FROM generate_series(1, 40) AS i;
CREATE TABLE journal (at int, what text);
ALTER TABLE journal REPLICA IDENTITY FULL;
INSERT INTO journal SELECT i % 7, 'entry' FROM generate_series(1, 20) AS i;
CREATE TABLE wide (id int PRIMARY KEY, n int, a text);
ALTER TABLE wide ALTER a SET STORAGE EXTERNAL;
INSERT INTO wide SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 5) AS i;
CREATE TABLE leaving (id int PRIMARY KEY);
INSERT INTO leaving SELECT generate_series(1, 3);
CREATE TABLE events (id int PRIMARY KEY, kind text);
INSERT INTO events SELECT i, 'k' FROM generate_series(1, 10) AS i;
SELECT lo_from_bytea(0, 'large object'), nextval('counter');
"""
BEFORE = """
UPDATE account SET balance = 90 WHERE id <= 5;
INSERT INTO journal VALUES (1, 'before');
INSERT INTO leaving VALUES (4);
UPDATE events SET kind = 'old' WHERE id = 1;
"""
CHANGES = """
ALTER TABLE account ADD level int NOT NULL DEFAULT 3;
ALTER TABLE journal ADD who text DEFAULT 'somebody';
ALTER TABLE events ALTER kind TYPE varchar(10), ADD late uuid DEFAULT gen_random_uuid();
DROP TABLE leaving;
CREATE TABLE coming (id int PRIMARY KEY, v text);
INSERT INTO coming SELECT i, 'new' FROM generate_series(1, 6) AS i;
"""
AFTER = """
UPDATE account SET note = 'later' WHERE id = 7;
DELETE FROM account WHERE id = 8;
UPDATE wide SET n = 1 WHERE id < 4;
DELETE FROM journal WHERE what = 'before';
SELECT nextval('counter');
"""
LAST = """
UPDATE account SET level = 4 WHERE id IN (9, 10);
INSERT INTO coming VALUES (7, 'newer');
INSERT INTO journal VALUES (2, 'last', 'us');
TRUNCATE events;
INSERT INTO events (id, kind) VALUES (11, 'after');
SELECT nextval('counter');
"""


LATER = """
UPDATE account SET note = 'latest' WHERE id IN (1, 9);
DELETE FROM account WHERE id = 12;
INSERT INTO coming VALUES (8, 'newest');
SELECT nextval('counter');
"""
RENEWED = ("s1-b1", "s2")


@dataclass(frozen=True, slots=True)
class World:
    """The fleet with the store, the chain in it, and the fleet to restore into."""

    fleet: Fleet
    target: Fleet
    store: Path
    spark: Ready

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the chain and its copies, as far as they are stored."""
        names = (NAME, DELETED_NAME, PRUNED_NAME, ENDED_NAME)
        return tuple(name for name in names if (self.store / "snapshots" / name).exists())

    @property
    def chain(self) -> Chain:
        """The chain as it is stored now."""
        return read_chain(self.fleet.store.open(), NAME)


@contextmanager
def made_world(servers: EmbeddedFleet, folder: Path, spark: Ready) -> Iterator[World]:
    """Make databases on the servers, take the chain, and plant the marks; delete the databases at the end."""
    with ExitStack() as stack:
        for primary in servers.primaries:
            stack.enter_context(_database(primary.dsn("postgres")))
        fleet = _described(servers, folder / "fleet.toml", DATABASE, f"file://{folder}/store")
        target = _described(servers, folder / "target.toml", f"{DATABASE}_back", f"file://{folder}/store")
        for node in fleet.nodes:
            await_database(node)
        stack.enter_context(dropping_slots(fleet))
        _take_chain(Runs(fleet, spark))
        world = World(fleet, target, folder / "store", spark)
        _plant(world)
        yield world


@contextmanager
def _database(maintenance: str) -> Iterator[None]:
    with psycopg.connect(maintenance, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {DATABASE}".encode())
        try:
            yield
        finally:
            query = "SELECT datname FROM pg_database WHERE datname ^@ %s"
            for (database,) in admin.execute(query, (DATABASE,)).fetchall():
                roll_back_prepared(make_conninfo(maintenance, dbname=database))
                admin.execute(f'DROP DATABASE "{database}" WITH (FORCE)'.encode())


def _described(servers: EmbeddedFleet, path: Path, database: str, store: str) -> Fleet:
    lines = ['name = "mutated"', f"store = {json.dumps(store)}"]
    for node in servers.nodes:
        lines += ["", "[[node]]", f'id = "{node.id}"', *([f'backup_of = "{node.backup_of}"'] if node.backup_of else [])]
        lines += [f"dsn = {json.dumps(make_conninfo(node.dsn('postgres'), dbname=database))}"]
    path.write_text("\n".join([*lines, with_spark("")]) + "\n")
    return load_fleet(path)


def _take_chain(runs: Runs) -> None:
    fleet = runs.fleet
    for node in fleet.primaries:
        _run(node.dsn, SCHEMA)
    runs.init()
    runs.full(NAME, large_objects=True, comment="the whole")
    _everywhere(fleet, BEFORE)
    with _prepared(fleet, "shared", commits=True):
        _everywhere(fleet, CHANGES)
    _everywhere(fleet, AFTER)
    runs.increment(NAME)
    _everywhere(fleet, LAST)
    with _prepared(fleet, "waiting", commits=False):
        runs.increment(NAME)


def _everywhere(fleet: Fleet, script: str) -> None:
    for node in fleet.primaries:
        _run(node.dsn, script)


def _run(dsn: str, script: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in script.split(";\n"):
            connection.execute(statement.encode())


@contextmanager
def _prepared(fleet: Fleet, name: str, *, commits: bool) -> Iterator[None]:
    """A transaction of two phases on all shards, in progress while the block runs."""
    for number, node in enumerate(fleet.primaries, start=1):
        with psycopg.connect(node.dsn) as connection:
            connection.execute("INSERT INTO wide VALUES (%s, 5, 'two phases')", (100 + len(name),))
            connection.execute(f"PREPARE TRANSACTION '{name}-{number}'".encode())
    if not commits:
        yield
    for number, node in enumerate(fleet.primaries, start=1):
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            connection.execute(f"COMMIT PREPARED '{name}-{number}'".encode())
    if commits:
        yield


@contextmanager
def made_merged_world(servers: EmbeddedFleet, folder: Path, spark: Ready) -> Iterator[World]:
    """Make databases on the servers, and take a chain with a merge, pins and renewals; delete the databases at the end.

    Increment 2 is merged and is the first that is kept, 3 renews s1-b1 and s2, and 4 follows it.
    """
    with ExitStack() as stack:
        for primary in servers.primaries:
            stack.enter_context(_database(primary.dsn("postgres")))
        fleet = _described(servers, folder / "fleet.toml", DATABASE, f"file://{folder}/store")
        target = _described(servers, folder / "target.toml", f"{DATABASE}_back", f"file://{folder}/store")
        for node in fleet.nodes:
            await_database(node)
        stack.enter_context(dropping_slots(fleet))
        runs = Runs(fleet, spark)
        _take_chain(runs)
        # The tables are so small that most of their rows have changed.
        with patch.object(rewriting, "DEAD_SHARE_MAX", 1):
            run_merge(fleet, plan_merge(fleet, NAME, 2, Silent()), spark, Silent(), prove_merge)
        store = fleet.store.open()
        drop_earlier_objects(store, plan_drop(store, NAME), Silent())
        slot = slot_name(read_full(store, NAME).operation)
        assert drop_slots([node for node in fleet.nodes if node.id in RENEWED], slot) == []
        _everywhere(fleet, LATER)
        assert runs.increment(NAME).renewed.keys() == {*RENEWED}
        _everywhere(fleet, "INSERT INTO journal VALUES (3, 'latest', 'us')")
        runs.increment(NAME)
        pin_in_store(store, NAME, 3, reason="audit")
        pin_in_store(store, NAME, 2)
        release_in_store(store, NAME, 2)
        yield World(fleet, target, folder / "store", spark)


def _plant(world: World) -> None:
    chain = world.chain
    for name in (DELETED_NAME, PRUNED_NAME, ENDED_NAME):
        _copy_chain(world.store, name)
    at = Time("2026-11-20T01:02:03.000Z")
    for format_, name in ((DELETED, DELETED_NAME), (ONLY_FULL, PRUNED_NAME)):
        mark = Mark(
            format_, name, new_operation_id(datetime.fromisoformat(at)), at, "ops@db7:1", chain.full.chain,
            ("cutline_slot",), tuple(chain.baseline), (RestorePoint(0, at, at), RestorePoint(1, at, at)), 7, 7000,
        )  # fmt: skip
        _put(world.store, mark.key, seal(mark))
    ended = EndMark(ENDED_NAME, chain.full.chain, 2, "s1", at, successor="next")
    _put(world.store, end_key(ENDED_NAME, chain.full.chain), seal(ended))
    intent = new_operation("restore", NAME, 2, tuple(node.id for node in world.fleet.primaries))
    lease = structs.replace(intent, expires_at=Time("2126-11-20T01:02:03.000Z"), by="ops@db7:2")
    _put(world.store, operation_key(intent.operation, "intent"), seal(lease))
    renewal = LeaseRenewal(intent.operation, Time("2126-11-20T02:02:03.000Z"))
    _put(world.store, operation_key(intent.operation, "lease-1"), seal(renewal))
    # An operation that is still open, besides: what somebody else began.
    begun = new_operation("create", "other", 0, tuple(node.id for node in world.fleet.primaries))
    _put(world.store, operation_key(begun.operation, "intent"), seal(begun))


def _copy_chain(store: Path, name: str) -> None:
    """Copy the chain's commits under another name, with the keys of the objects changed too."""
    source, copy = store / "snapshots" / NAME, store / "snapshots" / name
    documents: dict[str, Any] = {}
    for path in sorted(source.rglob("*.json")):
        text = path.read_text().replace(f'"snapshots/{NAME}/', f'"snapshots/{name}/')
        document = json.loads(text) | {"snapshot": name}
        document.pop("digest")
        documents[str(path.relative_to(store)).replace(f"snapshots/{NAME}/", f"snapshots/{name}/")] = document
    shutil.copytree(source, copy)
    full = f"snapshots/{name}/snapshot.json"
    write_all(store, resealed(documents, full, documents[full]))


def _put(store: Path, key: str, body: bytes) -> None:
    path = store / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def copies_of(fleet: Fleet) -> dict[str, dict[str, bytes]]:
    """Every table's rows on every primary, as PostgreSQL prints them."""
    return {node.id: sorted_copies(node.dsn) for node in fleet.primaries}


def restore_and_read(world: World) -> Any:
    """Restore the chain, and return every table's rows and every sequence's value; the databases are dropped again."""
    runs = Runs(world.fleet, world.spark)
    try:
        runs.restore(NAME, world.target)
        return copies_of(world.target), {node.id: _sequences_of(node.dsn) for node in world.target.primaries}
    finally:
        for node in world.target.primaries:
            name = str(conninfo_to_dict(node.dsn)["dbname"])
            with psycopg.connect(make_conninfo(node.dsn, dbname="postgres"), autocommit=True) as connection:
                connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())


def _sequences_of(dsn: str) -> list[tuple[Any, ...]]:
    query = "SELECT schemaname, sequencename, last_value FROM pg_sequences ORDER BY 1, 2"
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()
