"""A separate database for a test of decoding, on the shared fleet's first shard and its standby."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

import cutline.wal.drain.drain
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.nodes.connections import NodeUnreachableError, connect, with_database
from cutline.nodes.groups import Group
from cutline.wal.cut.markers import Marker
from cutline.wal.drain.slots import drop_slot
from tests.integration.wal_follower import Follower, copy_lines, follow, prepare_groups
from tests.wal.markers import write_marker

NUMBERS = count(1)
APPLICATION = "-c datestyle=German -c intervalstyle=sql_standard -c timezone=Asia/Kathmandu -c bytea_output=escape"
ONE_TABLE = "CREATE TABLE t (id integer PRIMARY KEY, v text)"


@dataclass(slots=True)
class Place:
    """One test's database on one shard: its primary, its standby, and a session on the primary."""

    primary: Node
    standby: Node
    connection: psycopg.Connection[Any]
    stores: Path

    def follow(self, groups: dict[str, Group], *, standby: bool = False) -> Follower:
        """Create a slot with an empty archive."""
        node = self.standby if standby else self.primary
        number = next(NUMBERS)
        store = f"file://{self.stores / str(number)}"
        return follow(node, self.primary, groups, f"cutline_decoding_{number}", store)

    def lines(self, groups: dict[str, Group]) -> dict[str, list[bytes]]:
        """The current rows as PostgreSQL's own COPY prints them, sorted, by group."""
        with connect(self.primary) as connection:
            return {name: sorted(copy_lines(connection, group)) for name, group in groups.items()}

    def write_finish(self) -> int:
        """Write a finish marker; return the position where it ends."""
        return write_marker(self.connection, Marker("c", f"{next(NUMBERS)}", "finish"))


@pytest.fixture
def place(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Place]:
    database = f"decoding_{next(NUMBERS)}"
    server = shared_fleet.primaries[0]
    nodes = [
        Node(id=one.id, dsn=one.dsn("postgres"), backup_of=one.backup_of)
        for one in (server, *shared_fleet.backups_of(server))
    ]
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {database}".encode())
        primary, standby = (with_database(node, database) for node in nodes)
        try:
            await_database(standby)
            # The settings of an application's session change how it prints values. Decoding must not depend on them.
            with psycopg.connect(primary.dsn, autocommit=True, options=APPLICATION) as connection:
                yield Place(primary, standby, connection, tmp_path / "stores")
        finally:
            drop_slots(*nodes)
            gids = admin.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", [database]).fetchall()
            with psycopg.connect(primary.dsn, autocommit=True) as last:
                for (gid,) in gids:
                    last.execute(f"ROLLBACK PREPARED '{gid}'".encode())
            admin.execute(f"DROP DATABASE {database} WITH (FORCE)".encode())


def await_database(standby: Node) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            connect(standby).close()
            return
        except NodeUnreachableError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def drop_slots(*nodes: Node) -> None:
    query = "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline_decoding_%'"
    for node in nodes:
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            names = [row[0] for row in connection.execute(query)]
        for name in names:
            assert drop_slot(node, name)


def create_one_table(place: Place, *statements: str) -> dict[str, Group]:
    place.connection.execute(ONE_TABLE)
    for statement in statements:
        place.connection.execute(statement.encode())
    return groups_of(place)


def groups_of(place: Place) -> dict[str, Group]:
    with connect(place.primary) as connection:
        return prepare_groups(connection)


def shrink_chunks(monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    for name in ("FIRST_CHUNK_MESSAGES", "CHUNK_MESSAGES_MIN", "CHUNK_MESSAGES_MAX"):
        monkeypatch.setattr(cutline.wal.drain.drain, name, messages)
