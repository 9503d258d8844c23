"""A fleet whose nodes may keep only so much WAL, and what PostgreSQL says that they keep."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import psycopg

from fleet.config import Fleet
from fleet.progress import Silent
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.listing.listing import list_store
from tests.integration.refusing import execute
from tests.snapshot_runs import Ready, Runs, slots_of
from wal.slots.slots import slot_name

FILLER_BYTES = 4 << 20
REPLAY_SECONDS_MAX = 30
RETAINED_QUERY = """
SELECT slot_name, pg_wal_lsn_diff(
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, restart_lsn)::bigint
  FROM pg_replication_slots WHERE slot_type = 'logical'
"""


@dataclass(slots=True)
class Notes(Silent):
    texts: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.texts.append(text)

    def only(self, *words: str) -> str:
        """The one note with all of the words."""
        (text,) = [text for text in self.texts if all(word in text for word in words)]
        return text


@dataclass(frozen=True, slots=True)
class Guarded:
    """A fleet of a primary and its standby with chains in its store, and how much its nodes may keep."""

    fleet: Fleet
    spark: Ready

    def kept(self, chain: str) -> dict[str, int]:
        """What PostgreSQL says that every node keeps for a chain's slot, once the standby has replayed all."""
        with psycopg.connect(self.fleet.primaries[0].dsn) as connection:
            (end,) = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone() or ("",)
        found: dict[str, int] = {}
        for node in self.fleet.nodes:
            with psycopg.connect(node.dsn, autocommit=True) as connection:
                deadline = time.monotonic() + REPLAY_SECONDS_MAX
                behind = f"SELECT pg_is_in_recovery() AND pg_last_wal_replay_lsn() < '{end}'"
                while (connection.execute(behind.encode()).fetchone() or (True,))[0]:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                kept = dict(connection.execute(RETAINED_QUERY).fetchall())
            if slot_name(chain) in kept:
                found[node.id] = kept[slot_name(chain)]
        return found

    def limited(self, limit_bytes: int, only: str = "") -> Guarded:
        nodes = tuple(
            replace(node, retained_wal_bytes_max=limit_bytes) if only in ("", node.id) else node
            for node in self.fleet.nodes
        )
        return replace(self, fleet=replace(self.fleet, nodes=nodes))

    def fill(self, size_bytes: int = FILLER_BYTES) -> None:
        """Write that much WAL, and what lets a slot that is advanced past it forget it (PostgreSQL's next look)."""
        execute(
            self.fleet.primaries[0].dsn,
            f"SELECT pg_logical_emit_message(false, 'filler', repeat('x', {size_bytes}), true)",
            *["SELECT pg_log_standby_snapshot()"] * 2,
        )

    @property
    def runs(self) -> Runs:
        return Runs(self.fleet, self.spark)

    def increment(self, name: str, notes: Notes) -> None:
        create_increment(self.fleet, CreateRequest(name), self.spark, notes)

    def listed(self) -> dict[str, str]:
        return {entry.name: entry.state for entry in list_store(self.fleet).entries}

    def slots(self) -> list[set[str]]:
        """Cutline's slots of every node."""
        return [set(slots_of(node.dsn)) for node in self.fleet.nodes]
