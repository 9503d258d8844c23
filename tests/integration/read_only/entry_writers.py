"""Clients that keep writing to a fleet that becomes read-only, and what its last snapshot must then contain."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psycopg

from cutline.embedded.bank import read_invariants
from cutline.nodes.connections import with_database
from tests.commands.snapshot_runs import Runs, sorted_copies
from tests.integration.read_only.frozen_nodes import execute

if TYPE_CHECKING:
    from cutline.fleet.config import Node

RESTORED = "restored"
TABLE = "CREATE TABLE entry (id uuid PRIMARY KEY, number bigserial)"
ENTRY = "INSERT INTO public.entry VALUES (%s)"


@dataclass(slots=True)
class Writer:
    """Inserts one row after another, reconnects when a session is lost, and keeps what was acknowledged."""

    dsn: str
    options: str = ""
    acknowledged: list[uuid.UUID] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.is_set():
            with suppress(psycopg.Error), psycopg.connect(self.dsn, options=self.options, autocommit=True) as session:
                self._write(session)

    def _write(self, session: psycopg.Connection[Any]) -> None:
        while not self.stop.is_set():
            entry = uuid.uuid4()
            try:
                session.execute(ENTRY, (entry,))
            except psycopg.Error as error:
                self.errors[type(error).__name__] += 1
                # Retry soon, but not at once: a session that is refused costs the server a process.
                self.stop.wait(0.1)
                raise
            self.acknowledged.append(entry)
            self.stop.wait(0.01)


@contextmanager
def writing(*dsns: str, options: str = "") -> Iterator[list[Writer]]:
    writers = [Writer(dsn, options) for dsn in dsns]
    threads = [threading.Thread(target=writer.run) for writer in writers]
    for thread in threads:
        thread.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def restored(runs: Runs, name: str) -> Iterator[list[Node]]:
    """Restore the newest state of the snapshot into databases beside those of the fleet; yield their nodes."""
    nodes = tuple(with_database(node, RESTORED) for node in runs.fleet.primaries)
    try:
        runs.restore(name, replace(runs.fleet, nodes=nodes))
        yield list(nodes)
    finally:
        for node in nodes:
            execute(with_database(node, "postgres"), f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)")


def assert_final(runs: Runs, name: str, writers: list[Writer]) -> None:
    """Check that the snapshot restores to the fleet's state, while writers still try, with all acknowledged rows."""
    with restored(runs, name) as copies:
        for node, copy in zip(runs.fleet.primaries, copies, strict=True):
            assert sorted_copies(node.dsn) == sorted_copies(copy.dsn)
            assert read_value(node, "SELECT last_value FROM entry_number_seq") == read_value(
                copy, "SELECT last_value FROM entry_number_seq"
            )
        for writer, copy in zip(writers, copies, strict=True):
            assert writer.acknowledged
            with psycopg.connect(copy.dsn) as connection:
                found = {row[0] for row in connection.execute("SELECT id FROM entry")}
            assert found >= set(writer.acknowledged)
            assert writer.errors["ReadOnlySqlTransaction"] > 0
            # A terminated session gets AdminShutdown, or just loses its connection.
            assert set(writer.errors) <= {"ReadOnlySqlTransaction", "AdminShutdown", "OperationalError"}
        assert read_invariants([copy.dsn for copy in copies]).hold


def read_value(node: Node, query: str) -> Any:
    with psycopg.connect(node.dsn) as connection:
        (found,) = connection.execute(query.encode()).fetchone() or (None,)
        return found
