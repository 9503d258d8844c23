"""A fleet whose standbys come and go while a chain goes on: its servers, its commands, and its state at each cut."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from msgspec.structs import replace

from cutline.check.report import SnapshotReport
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import create_standby, delete_server, stop_server
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.commit import Commit
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 30.0
PAGE_BYTES = 8192
# The table that `write` changes, and no table of an earlier test.
SEEN = (
    "DROP TABLE IF EXISTS seen, added, empty",
    "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
)


@dataclass
class ChangingFleet:
    """Shards with a standby each, their store, and an empty fleet to restore into."""

    servers: EmbeddedFleet
    target: Fleet
    runs: Runs
    folder: Path
    states: dict[int, list[dict[str, bytes]]] = field(default_factory=dict)
    written: int = 0
    # The node of fleet.toml whose server is the shard's primary now, if it is another.
    promoted: dict[str, str] = field(default_factory=dict)

    @property
    def fleet(self) -> Fleet:
        return self.runs.fleet

    @property
    def live(self) -> list[str]:
        """The nodes whose servers are the shards' primaries now."""
        return [self.promoted.get(node.id, node.id) for node in self.fleet.primaries]

    def live_state(self) -> list[dict[str, bytes]]:
        """The rows of the shards now."""
        return [sorted_copies(self.fleet.node(node).dsn) for node in self.live]

    def execute(self, node: str, *statements: str) -> None:
        with psycopg.connect(self.fleet.node(node).dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def write(self) -> None:
        """Change rows of all shards."""
        self.written += 1
        first = self.written * 100
        for node in self.live:
            self.execute(
                node,
                f"INSERT INTO seen SELECT n, 'new' FROM generate_series({first}, {first + 9}) n",
                f"UPDATE seen SET text = 'round {self.written}' WHERE id % 3 = 0",
                f"DELETE FROM seen WHERE id = {self.written}",
            )

    def increment(self, name: str = "chain", **options: Any) -> Commit:
        """Take an increment, and keep the state of the quiet primaries."""
        commit = create_increment(self.fleet, replace(CreateRequest(name), **options), self.runs.spark, Silent())
        self.states[commit.increment] = self.live_state()
        return commit

    def check(self, increment: int | None = None, name: str = "chain", *, since_last: bool = False) -> SnapshotReport:
        request = CheckRequest(name, increment, since_last=since_last)
        (report,) = check_snapshots(self.fleet, request, self.runs.spark, Silent()).snapshots
        return report

    def stop(self, standby: str) -> None:
        stop_server(self.servers.node(standby), immediate=True)

    def start(self, standby: str) -> None:
        """Start the standby, and wait until it has replayed what its primary has written."""
        self.servers.start_node(self.servers.node(standby))
        self.await_replay(standby)

    def drop_slot(self, node: str) -> str:
        """Drop the only replication slot on the node's server; return its name."""
        (slot,) = slots_of(self.fleet.node(node).dsn)
        self.execute(node, f"SELECT pg_drop_replication_slot('{slot}')")
        return slot

    def rebuild(self, standby: str) -> None:
        """Replace the standby's server by a new base backup of its primary."""
        node, shard = self.servers.node(standby), self.fleet.node(standby).shard
        delete_server(node)
        self.execute(shard, f"SELECT pg_drop_replication_slot('{node.slot}')")
        create_standby(self.servers._programs(node), node, self.servers.node(shard))
        self.start(standby)

    def damage(self, standby: str, table: str, *, toast: bool = False) -> None:
        """Overwrite the second page of the table, or of its TOAST table, on the disk of the standby alone.

        If the page changes on the primary afterwards, the standby may get it back from the WAL.
        """
        shard, server = self.fleet.node(standby).shard, self.servers.node(standby)
        # Otherwise, a reader on the primary would write hint bits, and with them the page, into the WAL.
        self.execute(shard, f"ALTER TABLE {table} SET (autovacuum_enabled = off)", f"VACUUM FREEZE {table}")
        self.execute(shard, f"SELECT max(t::text) FROM {table} t", "CHECKPOINT")
        self.await_replay(standby)
        self.execute(standby, "CHECKPOINT")
        relation = f"(SELECT reltoastrelid FROM pg_class WHERE oid = '{table}'::regclass)" if toast else f"'{table}'"
        with psycopg.connect(self.fleet.node(standby).dsn) as connection:
            row = connection.execute(f"SELECT pg_relation_filepath({relation})".encode()).fetchone()
        assert row
        stop_server(server)
        path = server.data_directory / str(row[0])
        body = path.read_bytes()
        assert len(body) > 2 * PAGE_BYTES
        path.write_bytes(body[:PAGE_BYTES] + b"\xa5" * PAGE_BYTES + body[2 * PAGE_BYTES :])
        self.start(standby)

    def await_replay(self, standby: str) -> None:
        shard = self.fleet.node(standby).shard
        live = self.fleet.node(self.promoted.get(shard, shard))
        with psycopg.connect(live.dsn, autocommit=True) as primary:
            (position,) = primary.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone() or ("",)
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            try:
                with psycopg.connect(self.fleet.node(standby).dsn, autocommit=True) as connection:
                    row = connection.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (position,)).fetchone()
                    if row == (True,):
                        return
            except psycopg.OperationalError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"{standby} does not catch up")

    def check_restores(self, *increments: int) -> None:
        """Restore each increment, and compare its rows with those of the primaries at its cut."""
        for number in increments:
            self.runs.restore("chain", self.target, number, use_backup_copies=True)
            assert [sorted_copies(node.dsn) for node in self.target.primaries] == self.states[number]

    def check_restores_without(self, primary: str, *increments: int) -> None:
        """Do the same while the store lacks all rows of a primary's copy: they come from its standby's."""
        folders = [self.folder / "store/snapshots/chain" / part / primary for part in ("base", "wal")]
        for folder in folders:
            folder.rename(folder.with_suffix(".away"))
        try:
            self.check_restores(*increments)
        finally:
            for folder in folders:
                folder.with_suffix(".away").rename(folder)


@contextmanager
def changing_fleet(
    servers: EmbeddedFleet,
    target: EmbeddedFleet,
    folder: Path,
    spark: SparkSession,
    *,
    tables: tuple[str, ...] = SEEN,
    more: str = "",
) -> Iterator[ChangingFleet]:
    """Servers whose standbys run and have replayed the `tables`, with a store in `folder`; `more` is for fleet.toml.

    Cutline's slots are dropped at the end.
    """
    fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store", more=more)
    into = configure_fleet(target, folder / "target.toml", f"file://{folder}/other-store")
    found = ChangingFleet(servers, into, Runs(fleet, Ready(spark)), folder)
    standbys = [node.id for node in fleet.nodes if node.backup_of is not None]
    for standby in standbys:
        found.start(standby)
    for node in fleet.primaries:
        found.execute(node.id, *tables)
    for standby in standbys:
        found.await_replay(standby)
    with dropping_slots(fleet):
        found.runs.init()
        yield found


def absent_names(commit: Commit) -> set[str]:
    """The standbys that the commit names as left out."""
    return {out.name for out in commit.left_out if out.kind == LeftOutKind.ABSENT_COPY}
