"""One chain for an hour, as for years: servers are promoted, rebuilt, paused and killed, slots lost, creates killed.

    python -m tests.soak.years SECONDS [EVENT_SECONDS]

Two shards have a primary and two standbys each, and every commit waits for one of them. Increments are taken all the
time, while a writer makes transactions on one shard and on both. fleet.toml is never edited. The run fails if an
increment is refused although its primaries are there, if a restore does not have the rows that the primaries had at its
cut, if a transaction is torn, or if the check at the end finds a conflict or names a copy that was there all the time.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.embedded.server import create_standby, delete_server, running_pid, stop_server
from cutline.fleet.config import Fleet
from tests.commands.snapshot_runs import command_line, configure_fleet, run_command, slots_of, sorted_copies
from tests.servers.disasters import kill_server

NAME = "chain"
SHARDS = ("s1", "s2")
CAUGHT_UP_SECONDS_MAX, EVERY_SECONDS = 60.0, 5.0
# How often an increment may be repeated while a server is away, before that counts as a fault.
TRIES = 12
SETTINGS = {"wal_receiver_status_interval": "1s", "wal_retrieve_retry_interval": "200ms", "wal_keep_size": "256MB"}


def say(text: str) -> None:
    sys.stdout.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")
    sys.stdout.flush()


@dataclass
class Years:
    """The fleet, its chain, who the primaries are now, and what the primaries held at quiet cuts."""

    servers: EmbeddedFleet
    fleet: Fleet
    target: Fleet
    live: dict[str, str] = field(default_factory=lambda: {shard: shard for shard in SHARDS})
    truths: dict[int, list[dict[str, bytes]]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    absent: Counter[str] = field(default_factory=Counter)
    first: int = 0
    written: int = 0
    writing: threading.Event = field(default_factory=threading.Event)
    idle: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    chance: random.Random = field(default_factory=lambda: random.Random(36))

    def dsn(self, node: str) -> str:
        return self.fleet.node(node).dsn

    def standbys(self, shard: str) -> list[str]:
        """The nodes of the shard that are standbys now."""
        return [node.id for node in self.fleet.nodes if node.shard == shard and node.id != self.live[shard]]

    def ask(self, node: str, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn(node), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    # The writer

    def write(self) -> None:
        """Write until the end: one row on a shard, or a pair of rows on both by two-phase commit."""
        sessions: dict[str, psycopg.Connection[Any]] = {}
        while not self.ended.is_set():
            if not self.writing.is_set():
                self.idle.set()
                self.writing.wait(0.2)
                continue
            self.idle.clear()
            try:
                for shard in SHARDS:
                    if shard not in sessions or sessions[shard].closed:
                        sessions[shard] = psycopg.connect(
                            self.dsn(self.live[shard]), autocommit=True, connect_timeout=2
                        )
                self._transact(sessions)
                self.ended.wait(0.02)
            except psycopg.Error:
                for session in sessions.values():
                    session.close()
                sessions.clear()
                self.ended.wait(0.5)
        for session in sessions.values():
            session.close()

    def _transact(self, sessions: dict[str, psycopg.Connection[Any]]) -> None:
        self.written += 1
        number = self.written
        if number % 5:
            session = sessions[self.chance.choice(SHARDS)]
            session.execute("INSERT INTO written VALUES (%s, 'one')", [number])
            session.execute("UPDATE written SET text = text || '+' WHERE id = %s", [number - 7])
            session.execute("DELETE FROM written WHERE id = %s AND id %% 3 = 0", [number - 20])
            return
        for session in sessions.values():
            session.execute("BEGIN")
            session.execute("INSERT INTO written VALUES (%s, 'pair')", [-number])
            session.execute(f"PREPARE TRANSACTION 'pair-{number}'")
        for session in sessions.values():
            session.execute(f"COMMIT PREPARED 'pair-{number}'")

    def pause(self) -> None:
        """Stop the writer, and finish the pairs that were interrupted."""
        self.writing.clear()
        assert self.idle.wait(60), "the writer does not stop"
        self.settle()

    def settle(self) -> None:
        """Commit the prepared pairs that are committed on the other shard, and roll back the others."""
        prepared = {shard: {gid for (gid,) in self.ask(self.live[shard], PREPARED)} for shard in SHARDS}
        for gid in set().union(*prepared.values()):
            number = int(gid.removeprefix("pair-"))
            is_committed = any(
                self.ask(self.live[shard], f"SELECT 1 FROM written WHERE id = {-number}") for shard in SHARDS
            )
            for shard in SHARDS:
                if gid in prepared[shard]:
                    self.ask(self.live[shard], f"{'COMMIT' if is_committed else 'ROLLBACK'} PREPARED '{gid}'")

    # Increments

    def increment(self, why: str) -> dict[str, Any] | None:
        """Take an increment; repeat it while a server that it needs is away."""
        for _ in range(TRIES):
            code, document = run_command(self.fleet, "create", NAME, "--incremental")
            self.codes[f"{code} {document.get('error', '')}".strip()] += 1
            if code == 0:
                for out in document["left_out"]:
                    if out["kind"] == "absent_copy":
                        self.absent[out["name"]] += 1
                return document
            if code not in (6, 7, 9):
                self.faults.append(f"{why}: create ended with {code}: {document.get('message')}")
                say(self.faults[-1])
                return None
            time.sleep(2)
        self.faults.append(f"{why}: no increment after {TRIES} tries: {document.get('message')}")
        say(self.faults[-1])
        return None

    def quiet_increment(self) -> None:
        """Take an increment while nobody writes, and keep what the primaries hold."""
        self.pause()
        try:
            if (document := self.increment("quiet")) is not None:
                self.keep_truth(document["increment"])
        finally:
            self.writing.set()

    def keep_truth(self, increment: int) -> None:
        """Keep what the primaries hold, while nobody writes."""
        self.truths[increment] = [sorted_copies(self.dsn(self.live[shard])) for shard in SHARDS]

    # Events

    def await_caught_up(self, node: str) -> None:
        """Wait until the standby has replayed all that its primary has flushed."""
        shard = self.fleet.node(node).shard
        ((position,),) = self.ask(self.live[shard], "SELECT pg_current_wal_flush_lsn()::text")
        deadline = time.monotonic() + CAUGHT_UP_SECONDS_MAX
        while time.monotonic() < deadline:
            with suppress(psycopg.OperationalError):
                if self.ask(node, f"SELECT 1 FROM pg_stat_wal_receiver WHERE '{position}' <= pg_last_wal_replay_lsn()"):
                    return
            time.sleep(0.2)
        raise AssertionError(f"{node} does not catch up with {self.live[shard]}")

    def promote(self, shard: str, node: str) -> None:
        """Promote a standby whose primary is down; the shard's other running standbys follow it."""
        self.ask(node, "SELECT pg_promote(true, 60)")
        self.live[shard] = node
        for other in self.standbys(shard):
            if running_pid(self.servers.node(other)) is not None:
                for statement in following(self.servers, other, node):
                    self.ask(other, statement)

    def follow(self, node: str) -> None:
        """Start a server that was shut down cleanly as a standby of its shard's primary."""
        server, leader = self.servers.node(node), self.live[self.fleet.node(node).shard]
        with (server.data_directory / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = '{conninfo(self.servers, node, leader)}'\nprimary_slot_name = ''\n")
        (server.data_directory / "standby.signal").touch()
        self.servers.start_node(server)
        self.await_caught_up(node)

    def rebuild(self, node: str) -> None:
        """Copy the shard's primary again into a server."""
        server, leader = self.servers.node(node), self.servers.node(self.live[self.fleet.node(node).shard])
        delete_server(server)
        create_standby(self.servers._programs(server), server, leader)
        self.servers.start_node(server)
        self.await_caught_up(node)

    def choose(self) -> tuple[str, str]:
        """A shard, and one of its standbys."""
        shard = self.chance.choice(SHARDS)
        return shard, self.chance.choice(self.standbys(shard))

    def switchover(self) -> str:
        """The primary is shut down, a standby takes its place, and the old primary follows it."""
        shard, node = self.choose()
        old = self.live[shard]
        self.pause()
        for standby in self.standbys(shard):
            self.await_caught_up(standby)
        stop_server(self.servers.node(old))
        self.promote(shard, node)
        self.writing.set()
        self.follow(old)
        return f"{shard}: {old} → {node}"

    def failover(self) -> str:
        """The primary dies, the standby with the most WAL takes its place, and the dead server is rebuilt later."""
        shard = self.chance.choice(SHARDS)
        old = self.live[shard]
        kill_server(self.servers.node(old))
        time.sleep(1)
        received = "SELECT pg_wal_lsn_diff(pg_last_wal_receive_lsn(), '0/0')"
        node = max(self.standbys(shard), key=lambda one: self.ask(one, received)[0][0])
        self.promote(shard, node)
        self.increment("after a failover")
        self.rebuild(old)
        return f"{shard}: {old} → {node}"

    def lossy_failover(self) -> str:
        """The primary dies with transactions that are archived and that no standby has."""
        shard = self.chance.choice(SHARDS)
        old, standbys = self.live[shard], self.standbys(shard)
        self.pause()
        for standby in standbys:
            stop_server(self.servers.node(standby))
        self.ask(old, f"SET synchronous_commit = local; INSERT INTO written VALUES ({next(NUMBERS)}000000, 'lost')")
        if (document := self.increment("both standbys are away")) is not None:
            self.keep_truth(document["increment"])
        kill_server(self.servers.node(old))
        for standby in standbys:
            self.servers.start_node(self.servers.node(standby))
        self.promote(shard, standbys[0])
        for standby in self.standbys(shard):
            if running_pid(self.servers.node(standby)) is not None:
                self.await_caught_up(standby)
        self.writing.set()
        self.increment("after a failover that lost transactions")
        self.rebuild(old)
        return f"{shard}: {old} → {standbys[0]}"

    def rebuild_standby(self) -> str:
        _, node = self.choose()
        self.rebuild(node)
        return node

    def stop_standby(self) -> str:
        """A standby is away for some increments."""
        _, node = self.choose()
        stop_server(self.servers.node(node), immediate=self.chance.random() < 0.5)
        for _ in range(2):
            self.increment("a standby is away")
        self.servers.start_node(self.servers.node(node))
        self.await_caught_up(node)
        return node

    def pause_replay(self) -> str:
        """A standby receives WAL and does not replay it."""
        _, node = self.choose()
        self.ask(node, "SELECT pg_wal_replay_pause()")
        self.increment("replay is paused")
        self.ask(node, "SELECT pg_wal_replay_resume()")
        return node

    def kill_primary(self) -> str:
        """A primary crashes and is started again."""
        node = self.live[self.chance.choice(SHARDS)]
        kill_server(self.servers.node(node))
        time.sleep(self.chance.random() * 3)
        self.servers.start_node(self.servers.node(node))
        return node

    def kill_create(self) -> str:
        """A create is killed somewhere, and so is a primary while another one runs."""
        process = subprocess.Popen(
            command_line(self.fleet, "create", NAME, "--incremental"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        seconds = self.chance.uniform(0.5, 4)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return f"after {seconds:.1f} s"

    def lose_slot_of_standby(self) -> str:
        _, node = self.choose()
        return self.drop_slots(node)

    def lose_slot_of_primary(self) -> str:
        return self.drop_slots(self.live[self.chance.choice(SHARDS)])

    def drop_slots(self, node: str) -> str:
        for slot in slots_of(self.dsn(node)):
            self.ask(node, f"SELECT pg_drop_replication_slot('{slot}')")
        return node

    def merge(self) -> str:
        """The chain begins at its newest increment from now on; earlier ones stay."""
        code, document = run_command(self.fleet, "merge", NAME)
        assert code == 0, document
        return f"at increment {document['increment']}"

    def drop_earlier(self) -> str:
        """The restore points before a merge are given up."""
        code, document = run_command(self.fleet, "merge", NAME, "--drop-earlier", "--yes")
        assert code == 0, document
        self.first = document["increment"]
        self.truths = {number: truth for number, truth in self.truths.items() if number >= self.first}
        return f"before increment {self.first}"

    def change_tables(self) -> str:
        """A table gets a column, and another one is created on all shards."""
        number = next(NUMBERS)
        for shard in SHARDS:
            self.ask(self.live[shard], f"ALTER TABLE written ADD COLUMN more_{number} int DEFAULT {number}")
            self.ask(self.live[shard], f"CREATE TABLE new_{number} (id int PRIMARY KEY, v text DEFAULT 'v')")
            self.ask(self.live[shard], f"INSERT INTO new_{number} SELECT generate_series(1, 100)")
        return str(number)

    # The end

    def judge(self) -> None:
        """Check the chain, and restore every quiet increment and some of the others."""
        code, document = run_command(self.fleet, "check", NAME)
        say(f"check: exit code {code}, {document.get('result')}")
        if code not in (0, 4) or any(one["conflicts"] for one in document["snapshots"]):
            self.faults.append(f"check: {json.dumps(document)[:2000]}")
        last = self.restore(None)
        for number in sorted({*self.truths, *range(self.first, last, max(last // 10, 1))}):
            self.restore(number)
        for options in (("--use-backup-copies",),):
            self.restore(max(self.truths), *options)

    def restore(self, number: int | None, *options: str) -> int:
        """Restore an increment, the newest if it is None, and compare its rows; return its number."""
        chosen = [] if number is None else ["--increment", str(number)]
        words = ["restore", NAME, *chosen, "--to", str(self.target.path), "--replace", "--yes", *options]
        code, document = run_command(self.fleet, *words)
        if code != 0:
            self.faults.append(f"restore {number} {options}: {code} {document.get('message')}")
            say(self.faults[-1])
            return number or 0
        found = document["increment"]
        pairs = []
        for node in self.target.primaries:
            with psycopg.connect(node.dsn) as connection:
                pairs.append(
                    connection.execute("SELECT array_agg(id ORDER BY id) FROM written WHERE id < 0").fetchone()
                )
        if pairs[0] != pairs[1]:
            self.faults.append(f"restore {found}: a pair is torn")
        if found in self.truths and [sorted_copies(node.dsn) for node in self.target.primaries] != self.truths[found]:
            self.faults.append(f"restore {found} {options}: rows differ from those at its cut")
        return int(found)


NUMBERS = itertools.count(1)
PREPARED = "SELECT gid FROM pg_prepared_xacts WHERE gid ^@ 'pair-' AND database = current_database()"


def conninfo(servers: EmbeddedFleet, node: str, leader: str) -> str:
    folder = servers.node(leader).socket_folder
    return f"host={folder} port=5432 user=postgres application_name={node.replace('-', '_')}"


def following(servers: EmbeddedFleet, node: str, leader: str) -> list[str]:
    """The statements by which a running standby follows another primary."""
    value = conninfo(servers, node, leader)
    return [
        f"ALTER SYSTEM SET primary_conninfo = '{value}'",
        "ALTER SYSTEM SET primary_slot_name = ''",
        "SELECT pg_reload_conf()",
    ]


@contextmanager
def started(place: Path) -> Iterator[Years]:
    """The fleet with a full snapshot, and its writer."""
    with ExitStack() as stack:
        servers = start_fleet(place / "fleet", shards=len(SHARDS), backups=2, settings=SETTINGS)
        stack.callback(stop_fleet, place / "fleet", delete=True)
        other = start_fleet(place / "target", shards=len(SHARDS), backups=0)
        stack.callback(stop_fleet, place / "target", delete=True)
        fleet = configure_fleet(servers, place / "fleet.toml", f"file://{place}/store")
        target = configure_fleet(other, place / "target.toml", f"file://{place}/other-store")
        years = Years(servers, fleet, target)
        for shard in SHARDS:
            for statement in (
                "CREATE TABLE written (id bigint PRIMARY KEY, text text)",
                "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'",
                "SELECT pg_reload_conf()",
            ):
                years.ask(shard, statement)
        for words in (["init"], ["create", NAME]):
            code, document = run_command(fleet, *words)
            assert code == 0, document
        writer = threading.Thread(target=years.write, daemon=True)
        writer.start()
        years.writing.set()
        try:
            yield years
        finally:
            years.ended.set()
            writer.join(30)


def run(seconds: float, event_seconds: float) -> int:
    """Run for so long, with an event now and then; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="years-") as folder, started(Path(folder)) as years:
        deadline = time.monotonic() + seconds
        events: list[Callable[[], str]] = [
            years.switchover, years.stop_standby, years.kill_primary, years.pause_replay, years.rebuild_standby,
            years.kill_create, years.failover, years.change_tables, years.lose_slot_of_standby, years.switchover,
            years.lose_slot_of_primary, years.merge, years.lossy_failover, years.drop_earlier,
        ]  # fmt: skip
        for event in itertools.cycle(events):
            if time.monotonic() >= deadline:
                break
            begun = time.monotonic()
            say(f"{event.__name__} …")
            try:
                say(f"{event.__name__} {event()}")
            except (AssertionError, psycopg.Error) as error:
                years.faults.append(f"{event.__name__}: {error}")
                say(years.faults[-1])
                break
            years.quiet_increment()
            while time.monotonic() < min(begun + event_seconds, deadline):
                years.increment("between events")
                time.sleep(EVERY_SECONDS)
        years.quiet_increment()
        years.pause()
        years.judge()
        say(f"creates by exit code: {dict(years.codes)}; {years.written} transactions; {len(years.truths)} quiet cuts")
        say(f"increments without a copy: {dict(years.absent)}")
        for fault in years.faults:
            say(f"FAULT {fault}")
        return 1 if years.faults else 0


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 120.0))
