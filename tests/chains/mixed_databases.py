"""Databases of a fleet whose shards differ in version and encoding: create and change them, drop their slots."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node
from cutline.nodes.connections import with_database
from cutline.wal.drain.slots import drop_slot
from tests.commands.snapshot_runs import configure_fleet
from tests.servers.installed import has
from tests.tables.encoded_tables import (
    CHANGES,
    EVIL,
    FOLDED_CHANGES,
    FOLDED_SCHEMA,
    SCHEMA,
    XML_CHANGES,
    XML_SCHEMA,
    Encoded,
    copies,
    run,
    session,
)

REPLAY_SECONDS_MAX = 30


def database_of(one: Encoded) -> str:
    return f"in_{one.encoding.lower()}"


def create_database(server: str, database: str, encoding: str) -> None:
    with session(server) as connection:
        options = f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'"
        connection.execute(f"DROP DATABASE IF EXISTS {database}".encode())
        connection.execute(f"CREATE DATABASE {database} {options}".encode())


def await_standbys(embedded: EmbeddedFleet) -> None:
    """Wait until every standby has all databases of its primary."""
    for primary in embedded.primaries:
        with psycopg.connect(primary.dsn("postgres")) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        for backup in embedded.backups_of(primary):
            with psycopg.connect(backup.dsn("postgres"), autocommit=True) as connection:
                deadline = time.monotonic() + REPLAY_SECONDS_MAX
                while connection.execute("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", row).fetchone() != (False,):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)


def create_fleet(embedded: EmbeddedFleet, directory: Path, case: tuple[Encoded, Encoded]) -> Fleet:
    """Create and fill the case's databases; return their fleet, with a new store."""
    fleet = configure_fleet(embedded, directory / "fleet.toml", f"file://{directory}/store")
    names = {node.id: database_of(one) for node, one in zip(embedded.primaries, case, strict=True)}
    nodes = tuple(with_database(node, names[node.shard]) for node in fleet.nodes)
    for node, one in zip(embedded.primaries, case, strict=True):
        create_database(node.dsn("postgres"), database_of(one), one.encoding)
        run(node.dsn(database_of(one)), [*one.script(EVIL), *one.script(SCHEMA), *one.rows()])
    other = embedded.primaries[1].dsn(database_of(case[1]))
    for schema, _ in optional_scripts(other, case[1]):
        run(other, case[1].script(schema))
    await_standbys(embedded)
    return replace(fleet, nodes=nodes)


def optional_scripts(dsn: str, one: Encoded) -> list[tuple[bytes, tuple[bytes, ...]]]:
    """Return the schemas and changes of features that only some servers have; the wheel's has neither ICU nor XML."""
    found = []
    with session(dsn) as connection:
        if one.encoding != "SQL_ASCII" and has(connection, "icu"):
            found.append((FOLDED_SCHEMA, FOLDED_CHANGES))
        if has(connection, "xml"):
            found.append((XML_SCHEMA, XML_CHANGES))
    return found


def change(fleet: Fleet, case: tuple[Encoded, Encoded], number: int) -> list[dict[bytes, bytes]]:
    """Make the changes before an increment; return the increment's expected state."""
    for node, one in zip(fleet.primaries, case, strict=True):
        run(node.dsn, one.script(CHANGES[number]))
    for _, changes in optional_scripts(fleet.primaries[1].dsn, case[1]):
        run(fleet.primaries[1].dsn, case[1].script(changes[number]))
    return [copies(node.dsn) for node in fleet.primaries]


@contextmanager
def slots_dropped(fleet: Fleet) -> Iterator[None]:
    """Drop the chains' slots on the servers at the end, in sessions without the role's settings."""
    try:
        yield
    finally:
        for node in fleet.nodes:
            with session(node.dsn) as connection:
                query = "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'"
                slots = [name.decode() for (name,) in connection.execute(query)]
            for slot in slots:
                assert drop_slot(node, slot)


@contextmanager
def targets_dropped(fleet: Fleet) -> Iterator[None]:
    """Drop the restored databases at the end, because they depend on roles of other cases."""
    try:
        yield
    finally:
        own = {node.id: session_database(node) for node in fleet.primaries}
        for node in fleet.primaries:
            with session(with_database(node, "postgres").dsn) as connection:
                query = "SELECT quote_ident(datname) FROM pg_database WHERE NOT datistemplate"
                names = {name.decode() for (name,) in connection.execute(query)}
                for name in names - {"postgres", own[node.id]}:
                    connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def session_database(node: Node) -> str:
    """Return the database that the node's dsn names."""
    return str(conninfo_to_dict(node.dsn)["dbname"])


def target_fleet(fleet: Fleet, database: str, *, one_server: bool = False) -> Fleet:
    """Return the target of a restore: a database on each server, or two databases on the first."""
    first, second = (with_database(node, f"{database}_{node.id}") for node in fleet.primaries)
    if one_server:
        second = Node(second.id, with_database(first, f"{database}_{second.id}").dsn)
    return replace(fleet, nodes=(first, second))
