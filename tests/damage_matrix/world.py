"""The clean chains: one with a standby for each shard, one of primaries alone, one with merges, and a restore point.

All are of the same two databases, with a table for each way in which rows are stored, and of one store, so that objects
can be exchanged between snapshots. The chain without standbys has its base copies in object lists. The last increment
finds one shard idle; in the one before, a global transaction is in progress.

The chain with merges has standbys. What lies before its merge at increment 1 is given up, and its newest merge is at
increment 2, has its base in object lists, and carries objects with dead rows. Increment 3 follows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.check.merge_proof import prove_merge
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.merge import rewriting, running
from cutline.snapshots.merge.running import plan_merge, run_merge
from cutline.snapshots.operations import object_lists
from cutline.snapshots.removal.earlier_objects import drop_earlier_objects, plan_drop
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.damage_matrix.kinds import CHAINS, MERGED, PAIRS, POINT, SINGLE, FleetName
from tests.integration.own_shard import roll_back_prepared
from tests.integration.wal_place import await_database
from tests.run.quick_spark import with_spark

DATABASE = "matrix"
OWNER, READER = "matrix_owner", "matrix_reader"
# What a check says of each clean chain.
RESULTS: Mapping[FleetName, str] = {PAIRS: "valid", SINGLE: "one-copy", POINT: "valid", MERGED: "valid"}
SETTINGS = '[groups]\nappend_only = ["public.log"]\n[check]\nallow = ["one-copy"]\n'
# More than one part of a large object.
LARGE_BYTES = 260 << 10

BEFORE_FULL = f"""
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE pair AS (x int, y text);
CREATE FUNCTION twice(int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT $1 * 2';
CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TABLE account (id bigint PRIMARY KEY, owner varchar(20) NOT NULL UNIQUE, balance bigint NOT NULL DEFAULT 0,
 CONSTRAINT not_overdrawn CHECK (balance >= 0));
INSERT INTO account SELECT i, 'owner ' || i, 100 FROM generate_series(1, 12) AS i;
CREATE TABLE transfer (id bigserial PRIMARY KEY, from_account bigint NOT NULL REFERENCES account,
 to_account bigint NOT NULL REFERENCES account, amount bigint NOT NULL);
INSERT INTO transfer (from_account, to_account, amount) SELECT i, i + 1, 5 FROM generate_series(1, 6) AS i;
CREATE INDEX transfer_from ON transfer (from_account);
CREATE TABLE typed (id int PRIMARY KEY, flag bool, small int2, big int8, amount numeric(6,2), ratio float8,
 code char(3) CONSTRAINT spelled CHECK (code ~ '^[a-z]'), label varchar(8), note text, day date, at timestamp,
 at_tz timestamptz, tag uuid, mood mood, info jsonb, raw bytea, list int[], net inet, span interval, dom positive,
 comp pair, needed text NOT NULL);
INSERT INTO typed SELECT i, true, 7, 70, 1.50, 0.5, 'abc', 'label', 'a note', '2026-01-02', '2026-01-02 03:04:05',
 '2026-01-02 03:04:05+00', '00000000-0000-0000-0000-000000000001', 'ok', '{{"a": 1}}', '\\x0102', '{{1,2}}',
 '10.0.0.1', '1 day', 5, '(1,one)', 'needed' FROM generate_series(1, 8) AS i;
CREATE TABLE pairkey (a int, b text, v int, PRIMARY KEY (a, b));
INSERT INTO pairkey SELECT i, E'tab\\there ' || i, i FROM generate_series(1, 6) AS i;
CREATE TABLE journal (at int, what text);
ALTER TABLE journal REPLICA IDENTITY FULL;
INSERT INTO journal SELECT i % 4, 'entry ' || i FROM generate_series(1, 10) AS i;
CREATE TABLE log (at int, what text);
INSERT INTO log SELECT i, 'line ' || i FROM generate_series(1, 6) AS i;
CREATE TABLE byindex (a int NOT NULL, v text);
CREATE UNIQUE INDEX byindex_a ON byindex (a);
ALTER TABLE byindex REPLICA IDENTITY USING INDEX byindex_a;
INSERT INTO byindex SELECT i, 'v' || i FROM generate_series(1, 6) AS i;
CREATE TABLE wide (id int PRIMARY KEY, n int, a text);
ALTER TABLE wide ALTER a SET STORAGE EXTERNAL;
INSERT INTO wide SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 6) AS i;
CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (10) TO (20);
INSERT INTO parted VALUES (1, 'low'), (2, 'low'), (11, 'high'), (12, 'high');
CREATE TABLE cleared (id int PRIMARY KEY);
INSERT INTO cleared SELECT generate_series(1, 6);
CREATE TABLE again (id int PRIMARY KEY, v int);
INSERT INTO again SELECT i, i FROM generate_series(1, 6) AS i;
CREATE TABLE grown (id int PRIMARY KEY, v text);
INSERT INTO grown SELECT i, 'v' || i FROM generate_series(1, 6) AS i;
CREATE TABLE leaving (id int PRIMARY KEY);
INSERT INTO leaving SELECT generate_series(1, 3);
CREATE TABLE twin_a (id int PRIMARY KEY, v text);
INSERT INTO twin_a SELECT i, 'a' || i FROM generate_series(1, 4) AS i;
CREATE TABLE twin_b (id int PRIMARY KEY, v text);
INSERT INTO twin_b SELECT i, 'b' || i FROM generate_series(1, 4) AS i;
CREATE TABLE ticket (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, v text);
INSERT INTO ticket (v) SELECT 'ticket ' || i FROM generate_series(1, 5) AS i;
CREATE UNLOGGED TABLE scratch (id int, v text);
INSERT INTO scratch VALUES (1, 'lost in a crash');
CREATE SEQUENCE counter;
CREATE SEQUENCE ring MINVALUE 1 MAXVALUE 10 CYCLE;
SELECT nextval('counter'), nextval('ring');
CREATE VIEW rich AS SELECT id FROM account WHERE balance > 100;
CREATE TRIGGER stamped BEFORE INSERT ON account FOR EACH ROW EXECUTE FUNCTION stamp();
ALTER TABLE account ENABLE ROW LEVEL SECURITY;
CREATE POLICY seen ON account FOR SELECT USING (true);
COMMENT ON TABLE account IS 'the accounts';
ALTER TABLE account OWNER TO {OWNER};
GRANT SELECT ON account TO {READER};
ALTER DATABASE {DATABASE} SET work_mem = '8MB';
COMMENT ON DATABASE {DATABASE} IS 'of the matrix';
GRANT CREATE ON DATABASE {DATABASE} TO {READER};
SELECT lo_from_bytea(4711, '\\xcafe'), lo_from_bytea(4712, convert_to(repeat('large ', {LARGE_BYTES // 6}), 'UTF8'));
GRANT SELECT ON LARGE OBJECT 4711 TO {READER};
COMMENT ON LARGE OBJECT 4711 IS 'the small one'
"""
# Shards need not be the same.
OF_SECOND = """
UPDATE twin_a SET v = 'second ' || id;
COMMENT ON TABLE twin_b IS 'of the second shard'
"""
BEFORE_FIRST = """
UPDATE account SET balance = 90 WHERE id <= 2;
DELETE FROM account WHERE id = 12;
ALTER TABLE grown ADD level int NOT NULL DEFAULT 3;
UPDATE grown SET level = 4 WHERE id = 1;
ALTER TABLE again ALTER v TYPE bigint;
DROP TABLE leaving;
CREATE TABLE coming (id int PRIMARY KEY, v text);
INSERT INTO coming SELECT i, 'new' || i FROM generate_series(1, 6) AS i;
TRUNCATE cleared;
INSERT INTO cleared VALUES (77), (78);
UPDATE wide SET n = 1 WHERE id < 4;
DELETE FROM journal WHERE what = 'entry 3';
INSERT INTO journal VALUES (9, 'added'), (9, 'added');
INSERT INTO log VALUES (7, 'line 7');
BEGIN; UPDATE typed SET note = 'first' WHERE id = 2; UPDATE typed SET note = 'second' WHERE id = 2; COMMIT;
UPDATE typed SET small = 8 WHERE id = 3
"""
BOTH = ("UPDATE account SET balance = balance + 7 WHERE id = 4", "INSERT INTO twin_a VALUES (50, 'of both')")
BEFORE_SECOND = """
CREATE INDEX account_balance ON account (balance);
UPDATE pairkey SET v = 60 WHERE a = 6;
UPDATE byindex SET v = 'changed' WHERE a = 3;
UPDATE twin_b SET v = 'changed' WHERE id = 2;
DELETE FROM twin_b WHERE id = 4;
INSERT INTO coming VALUES (7, 'newer');
UPDATE again SET v = 60 WHERE id = 6;
UPDATE wide SET n = 2 WHERE id = 5;
INSERT INTO ticket (v) VALUES ('later');
SELECT nextval('counter')
"""
# Only on the first shard.
BEFORE_THIRD = """
UPDATE account SET balance = balance + 1 WHERE id = 3;
INSERT INTO ticket (v) VALUES ('last');
DELETE FROM twin_a WHERE id = 1;
SELECT nextval('counter')
"""
WAITING = ("INSERT INTO twin_b VALUES (60, 'waits')",)
UNDONE = ("INSERT INTO twin_b VALUES (70, 'undone')",)


@dataclass(frozen=True, slots=True)
class World:
    """The fleet and its store, the programs' session, and a folder for the trials."""

    fleet: Fleet
    store: Path
    spark: Ready
    folder: Path


@contextmanager
def made_world(servers: EmbeddedFleet, folder: Path, spark: Ready) -> Iterator[World]:
    """Create databases on the servers, take the chains, and drop everything at the end."""
    with ExitStack() as stack:
        for primary in servers.primaries:
            stack.enter_context(_database(primary.dsn("postgres")))
        fleet = _describe(servers, folder / "fleet.toml", f"file://{folder}/store")
        for node in fleet.nodes:
            await_database(node)
        # Thousands of restores follow, whose WAL the slots would retain: five gigabytes, in memory.
        with dropping_slots(fleet):
            _take_chains(Runs(fleet, spark))
        yield World(fleet, folder / "store", spark, folder)


@contextmanager
def _database(maintenance: str) -> Iterator[None]:
    with psycopg.connect(maintenance, autocommit=True) as admin:
        for role in (OWNER, READER):
            admin.execute(f"CREATE ROLE {role}".encode())
        try:
            admin.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0 ENCODING 'UTF8'".encode())
            yield
        finally:
            query = "SELECT datname FROM pg_database WHERE datname ^@ %s"
            for (database,) in admin.execute(query, (DATABASE,)).fetchall():
                roll_back_prepared(make_conninfo(maintenance, dbname=database))
                admin.execute(f'DROP DATABASE "{database}" WITH (FORCE)'.encode())
            for role in (OWNER, READER):
                admin.execute(f"DROP ROLE {role}".encode())


def _describe(servers: EmbeddedFleet, path: Path, store: str) -> Fleet:
    lines = ['name = "matrix"', f"store = {json.dumps(store)}"]
    for node in servers.nodes:
        lines += ["", "[[node]]", f'id = "{node.id}"', *([f'backup_of = "{node.backup_of}"'] if node.backup_of else [])]
        lines += [f"dsn = {json.dumps(make_conninfo(node.dsn('postgres'), dbname=DATABASE))}"]
    path.write_text("\n".join([*lines, with_spark(SETTINGS)]) + "\n")
    return load_fleet(path)


def _take_chains(runs: Runs) -> None:
    """Take all chains in turn, so that they have the same states, and the restore point between them."""
    names, store = (*CHAINS, MERGED), runs.fleet.store.open()
    dsns = [node.dsn for node in runs.fleet.primaries]

    def take(name: str, *, is_full: bool = False) -> None:
        # The chain without standbys has lists, however few objects they contain.
        bound = 0 if name == SINGLE else object_lists.OWN_OBJECTS_MAX
        with patch.object(object_lists, "OWN_OBJECTS_MAX", bound):
            if is_full:
                runs.full(name, only_primary=name == SINGLE, large_objects=True, comment="clean")
            else:
                runs.increment(name)

    _run(dsns, BEFORE_FULL)
    _run(dsns[1:], OF_SECOND)
    runs.init()
    for name in names:
        take(name, is_full=True)
    _run(dsns, BEFORE_FIRST)
    for name in names:
        take(name)
    _merge(runs, 1, running.OWN_OBJECTS_MAX)
    drop_earlier_objects(store, plan_drop(store, MERGED), Silent())
    # A full snapshot would wait for the transaction that is prepared later.
    runs.full(POINT, only_cut=True)
    _run(dsns, BEFORE_SECOND)
    _prepare(dsns, BOTH, "both")
    _end(dsns, "COMMIT PREPARED 'both'")
    _prepare(dsns, UNDONE, "undone")
    _end(dsns, "ROLLBACK PREPARED 'undone'")
    _prepare(dsns, WAITING, "waiting")
    for name in names:
        take(name)
    _merge(runs, 2, 0)
    _run(dsns[:1], BEFORE_THIRD)
    for name in names:
        take(name)


def _merge(runs: Runs, increment: int, objects_max: int) -> None:
    """Let the merged chain begin at the increment, with its base in lists if there are more objects."""
    # In tables this small, most of an object's rows are dead.
    with patch.object(rewriting, "DEAD_SHARE_MAX", 1), patch.object(running, "OWN_OBJECTS_MAX", objects_max):
        run_merge(runs.fleet, plan_merge(runs.fleet, MERGED, increment, Silent()), runs.spark, Silent(), prove_merge)


def _run(dsns: Sequence[str], script: str) -> None:
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in script.split(";\n"):
                connection.execute(statement.encode())


def _prepare(dsns: Sequence[str], statements: Sequence[str], gid: str) -> None:
    """Prepare one global transaction on all shards."""
    for dsn in dsns:
        with psycopg.connect(dsn) as connection:
            for statement in statements:
                connection.execute(statement.encode())
            connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())


def _end(dsns: Sequence[str], statement: str) -> None:
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(statement.encode())
