"""A fleet whose connections go through proxies that can stop answering."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import psycopg

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.snapshot_runs import (
    Ready,
)
from tests.faults.pg_proxy import PgProxy
from tests.run.by_spark import in_driver

SILENCE_SECONDS = 2.0
GONE_SECONDS_MAX = 20.0
LEFT_QUERY = """
SELECT format('session %s: %s', pid, query) FROM pg_stat_activity
 WHERE (application_name LIKE 'cutline%' OR application_name = 'pg_dump') AND datname = current_database()
UNION ALL
SELECT 'temporary slot ' || slot_name FROM pg_replication_slots WHERE temporary
UNION ALL
SELECT 'prepared ' || gid FROM pg_prepared_xacts
"""


@dataclass(slots=True)
class Notes(Silent):
    """A Progress that keeps the notes."""

    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass(slots=True)
class Network:
    """The fleet, the same fleet with its second shard behind proxies, and commands through those proxies."""

    direct: Fleet
    proxied: Fleet
    proxies: dict[str, PgProxy]
    spark: Ready

    def create(self, name: str, *, full: bool) -> tuple[Commit, list[str]]:
        """Create a snapshot or increment through the proxies; return its commit and its notes."""
        noted = Notes()
        work = create_full if full else create_increment
        return work(self.proxied, CreateRequest(name), self.spark, noted), noted.notes

    def working_in_driver(self) -> Network:
        """The same, with commands whose tasks run in threads of this process."""
        return replace(self, spark=Ready(in_driver(self.spark.session())))

    def numbers(self, name: str) -> list[int]:
        """Return the numbers of a chain's commits."""
        return [c.increment for c in read_chain(self.direct.store.open(), name).commits]

    def assert_nothing_is_left(self) -> None:
        """Wait until the command has left no session, temporary slot or prepared transaction on any node."""
        deadline = time.monotonic() + GONE_SECONDS_MAX
        while True:
            left = [row for node in self.direct.nodes for row in rows_of(node.dsn, LEFT_QUERY)]
            if not left:
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def rows_of(dsn: str, query: str) -> list[str]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return [row[0] for row in connection.execute(query.encode())]


def execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(statement.encode())
