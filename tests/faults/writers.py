"""What the applications write to a fleet under faults.

Every row is written once and never changed again, so that a loss stays visible to the end; the rows of the journal
have no key, so that a row that was stored twice shows too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from embedded.fleet import EmbeddedFleet
from tests.snapshot_runs import transfers_taken_back

JOURNAL = """
CREATE TABLE journal (tag text, shard int, number int);
ALTER TABLE journal REPLICA IDENTITY FULL;
"""


@dataclass(frozen=True, slots=True)
class Writers:
    """The applications of these servers."""

    servers: EmbeddedFleet

    def write(self) -> None:
        """Rows of each shard alone, and of all of them in one transaction."""
        self.write_where_possible()
        tag = uuid.uuid4().hex
        self.prepare(tag)
        self.commit_prepared(tag)

    def write_where_possible(self) -> None:
        """Rows of the shards that are up."""
        tag = uuid.uuid4().hex
        for number, dsn in enumerate(self.servers.dsns()):
            try:
                with psycopg.connect(dsn, autocommit=True, options="-c statement_timeout=5000") as connection:
                    query = "INSERT INTO journal SELECT %s, %s, n FROM generate_series(1, 3) AS n"
                    connection.execute(query, (tag, number))
            except (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction):
                continue

    def add_table(self, name: str) -> None:
        """A table that no publication has yet, with rows."""
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)".encode())
                connection.execute(f"INSERT INTO {name} SELECT generate_series(1, 5)".encode())

    def prepare(self, tag: str) -> None:
        """One transaction, prepared on all shards."""
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute("INSERT INTO transfer VALUES (%s, 1, 2, 3)", (uuid.UUID(hex=tag),))
                connection.execute(f"PREPARE TRANSACTION '{tag}'".encode())

    def commit_prepared(self, tag: str) -> None:
        """Commit it everywhere."""
        for dsn in self.servers.dsns():
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(f"COMMIT PREPARED '{tag}'".encode())


@contextmanager
def journalled(servers: EmbeddedFleet) -> Iterator[None]:
    """Have the journal on all shards for the block."""
    for dsn in servers.dsns():
        with psycopg.connect(dsn) as connection:
            connection.execute(JOURNAL)
    try:
        with transfers_taken_back(servers.dsns()):
            yield
    finally:
        for dsn in servers.dsns():
            with psycopg.connect(dsn) as connection:
                connection.execute("DROP TABLE journal")
