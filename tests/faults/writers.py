"""The applications that write to a fleet under faults.

Every row is written once and never changed, so that a loss stays visible to the end. The rows of the journal have no
key, so that a row that was stored twice is visible, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.snapshot_runs import removing_new_transfers

JOURNAL = """
CREATE TABLE journal (tag text, shard int, number int);
ALTER TABLE journal REPLICA IDENTITY FULL;
"""


@dataclass(frozen=True, slots=True)
class Writers:
    """The applications of these servers."""

    servers: EmbeddedFleet

    def write(self) -> None:
        """Write rows on each shard in a local transaction, and on all shards in a global one."""
        self.write_where_possible()
        tag = uuid.uuid4().hex
        self.prepare(tag)
        self.commit_prepared(tag)

    def write_where_possible(self) -> None:
        """Write rows on the shards that are up and writable."""
        tag = uuid.uuid4().hex
        for number, dsn in enumerate(self.servers.dsns()):
            try:
                with psycopg.connect(dsn, autocommit=True, options="-c statement_timeout=5000") as connection:
                    query = "INSERT INTO journal SELECT %s, %s, n FROM generate_series(1, 3) AS n"
                    connection.execute(query, (tag, number))
            except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction):
                continue

    def add_table(self, name: str) -> None:
        """Create a table with rows on all shards; it is in no publication yet."""
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)".encode())
                connection.execute(f"INSERT INTO {name} SELECT generate_series(1, 5)".encode())

    def prepare(self, tag: str) -> None:
        """Prepare one transaction on all shards."""
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute("INSERT INTO transfer VALUES (%s, 1, 2, 3)", (uuid.UUID(hex=tag),))
                connection.execute(f"PREPARE TRANSACTION '{tag}'".encode())

    def commit_prepared(self, tag: str) -> None:
        """Commit the prepared transaction on all shards."""
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(f"COMMIT PREPARED '{tag}'".encode())


@contextmanager
def journal_tables(servers: EmbeddedFleet) -> Iterator[None]:
    """Create the journal on all shards for the block; remove it and all new transfers afterwards."""
    for dsn in servers.dsns():
        with psycopg.connect(dsn) as connection:
            connection.execute(JOURNAL)
    try:
        with removing_new_transfers(servers.dsns()):
            yield
    finally:
        for dsn in servers.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute("DROP TABLE journal")
