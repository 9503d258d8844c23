"""A fleet whose nodes have a limit for retained WAL, and how much they retain by PostgreSQL's own views."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import psycopg

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.listing.listing import list_store
from cutline.wal.drain.slots import slot_name
from tests.commands.snapshot_runs import Ready, Runs, slots_of
from tests.integration.refusing import execute

FILLER_BYTES = 12 << 20
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

    def find_one(self, *words: str) -> str:
        """The only note that contains all of the words."""
        (text,) = [text for text in self.texts if all(word in text for word in words)]
        return text


@dataclass(frozen=True, slots=True)
class GuardedFleet:
    """A fleet of a primary and its standby, with chains in its store, whose retained WAL can be limited."""

    fleet: Fleet
    spark: Ready

    def retained_bytes(self, chain: str) -> dict[str, int]:
        """The WAL that every node retains for a chain's slot, by PostgreSQL, once the standby has replayed all WAL."""
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

    def with_limit(self, limit_bytes: int, only: str = "") -> GuardedFleet:
        nodes = tuple(
            replace(node, retained_wal_bytes_max=limit_bytes) if only in ("", node.id) else node
            for node in self.fleet.nodes
        )
        return replace(self, fleet=replace(self.fleet, nodes=nodes))

    def write_filler(self, size_bytes: int = FILLER_BYTES) -> None:
        """Write that much WAL, then standby snapshots: the restart_lsn of a slot only advances at one."""
        execute(
            self.fleet.primaries[0].dsn,
            # The commit of any transaction flushes it; from 17 on the function could, too.
            f"SELECT pg_logical_emit_message(false, 'filler', repeat('x', {size_bytes})), pg_current_xact_id()",
            *["SELECT pg_log_standby_snapshot()"] * 2,
        )

    @property
    def runs(self) -> Runs:
        return Runs(self.fleet, self.spark)

    def increment(self, name: str, notes: Notes) -> None:
        create_increment(self.fleet, CreateRequest(name), self.spark, notes)

    def list_states(self) -> dict[str, str]:
        return {entry.name: entry.state for entry in list_store(self.fleet).entries}

    def slots(self) -> list[set[str]]:
        """Cutline's slots of every node."""
        return [set(slots_of(node.dsn)) for node in self.fleet.nodes]
