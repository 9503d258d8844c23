"""One chain for an hour, as for years: servers are promoted, rebuilt, paused and killed, slots lost, creates killed.

    python -m tests.soak.years SECONDS [EVENT_SECONDS [JUDGE_SECONDS]]

Two shards are there all the time, and a third one comes and goes. Each has a primary and two standbys, and every commit
waits for one of them. Increments are taken all the time, while a writer makes transactions on one shard and on all.
fleet.toml is edited only when a shard comes or goes. The run fails if an increment is refused although its primaries
are there, if a restore does not have the shards, and on them the rows, that the fleet had at its cut, if a transaction
is torn, if a check finds a conflict, or if an increment or a check of it names other copies as left out than those of
the servers that were down or did not replay then.

At the end, an increment of every kind of event is checked and restored, and then others for about JUDGE_SECONDS. With
16 events, a short run is `python -m tests.soak.years 480 30 120`.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from msgspec.structs import replace

from cutline.embedded.fleet import EmbeddedFleet, _make_shard, _record, start_fleet, stop_fleet
from cutline.embedded.folder import describe
from cutline.embedded.server import EmbeddedNode, create_standby, delete_server, running_pid, stop_server
from cutline.fleet.config import Fleet, load_fleet
from cutline.storage.errors import SnapshotError
from tests.commands.snapshot_runs import command_line, configure_fleet, run_command, slots_of, sorted_copies
from tests.servers.disasters import kill_server

NAME = "chain"
# The shards that are there all the time, and the standbys of each shard.
SHARDS, STANDBYS = ("s1", "s2"), 2
CAUGHT_UP_SECONDS_MAX, COMMAND_SECONDS_MAX, EVERY_SECONDS = 60.0, 900.0, 5.0
# How often an increment may be repeated while a server is away, before that counts as a fault.
TRIES = 12
SETTINGS = {"wal_receiver_status_interval": "1s", "wal_retrieve_retry_interval": "200ms", "wal_keep_size": "256MB"}


def say(text: str) -> None:
    sys.stdout.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")
    sys.stdout.flush()


@dataclass
class Years:
    """The fleet, its chain, who the primaries are now, and what the primaries held at quiet cuts.

    `servers` and `others` include the servers of shards that have left. `pairs_before` are the numbers of the last
    pairs that a shard does not have, because it came later.
    """

    servers: EmbeddedFleet
    others: EmbeddedFleet
    fleet: Fleet
    target: Fleet
    live: dict[str, str] = field(default_factory=lambda: {shard: shard for shard in SHARDS})
    pairs_before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SHARDS, 0))
    truths: dict[int, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    absent: Counter[str] = field(default_factory=Counter)
    # The standbys whose replay is paused, the copies that each increment leaves out, and the increments by their event.
    paused: set[str] = field(default_factory=set)
    left_out: dict[int, set[str]] = field(default_factory=dict)
    kinds: dict[str, list[int]] = field(default_factory=dict)
    event: str = "the beginning"
    first: int = 0
    written: int = 0
    writing: threading.Event = field(default_factory=threading.Event)
    idle: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    chance: random.Random = field(default_factory=lambda: random.Random(36))

    @property
    def shards(self) -> list[str]:
        """The shards that are there now."""
        return list(self.live)

    def dsn(self, node: str) -> str:
        return self.servers.node(node).dsn()

    def standbys(self, shard: str) -> list[str]:
        """The nodes of the shard that are standbys now."""
        return [node.id for node in self.fleet.nodes if node.shard == shard and node.id != self.live[shard]]

    def ask(self, node: str, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn(node), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(query.encode())
            return cursor.fetchall() if cursor.description else []

    # The writer

    def write(self) -> None:
        """Write until the end: one row on a shard, or a row on each of them by two-phase commit, called a pair.

        A pair that an error interrupted is decided before the next transaction, as a transaction manager would.
        """
        sessions: dict[str, psycopg.Connection[Any]] = {}
        is_interrupted = False
        while not self.ended.is_set():
            if not self.writing.is_set():
                self.idle.set()
                self.writing.wait(0.2)
                continue
            self.idle.clear()
            try:
                for gone in sessions.keys() - self.live.keys():
                    sessions.pop(gone).close()
                for shard in self.shards:
                    if shard not in sessions or sessions[shard].closed:
                        sessions[shard] = psycopg.connect(
                            self.dsn(self.live[shard]), autocommit=True, connect_timeout=2
                        )
                if is_interrupted:
                    self.settle()
                is_interrupted = True
                self._transact(sessions)
                is_interrupted = False
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
            session = sessions[self.chance.choice(self.shards)]
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
        # Perhaps set since the last pause: the writer sets it again, unless it is in a transaction.
        self.idle.clear()
        assert self.idle.wait(60), "the writer does not stop"
        self.settle()

    def settle(self) -> None:
        """Commit the prepared pairs that are committed on another shard, and roll back the others."""
        prepared = {shard: {gid for (gid,) in self.ask(self.live[shard], PREPARED)} for shard in self.shards}
        for gid in set().union(*prepared.values()):
            number = int(gid.removeprefix("pair-"))
            is_committed = any(
                self.ask(self.live[shard], f"SELECT 1 FROM written WHERE id = {-number}") for shard in self.shards
            )
            for shard in self.shards:
                if gid in prepared[shard]:
                    self.ask(self.live[shard], f"{'COMMIT' if is_committed else 'ROLLBACK'} PREPARED '{gid}'")

    # Increments

    def increment(self, why: str) -> dict[str, Any] | None:
        """Take an increment; repeat it while a server that it needs is away."""
        for _ in range(TRIES):
            code, document = run_command(self.fleet, "create", NAME, "--incremental", seconds_max=COMMAND_SECONDS_MAX)
            self.codes[f"{code} {document.get('error', '')}".strip()] += 1
            if code == 0:
                self.keep_names(document, why)
                return document
            if code not in (6, 7, 9):
                self.faults.append(f"{why}: create ended with {code}: {document.get('message')}")
                say(self.faults[-1])
                return None
            time.sleep(2)
        self.faults.append(f"{why}: no increment after {TRIES} tries: {document.get('message')}")
        say(self.faults[-1])
        return None

    def away(self) -> set[str]:
        """The copies that an increment leaves out now: of the standbys that are down, or whose replay is paused.

        A copy belongs to a role, and the roles of a promoted standby and of its primary are exchanged.
        """
        lacking = {
            (shard, node)
            for shard in self.shards
            for node in self.standbys(shard)
            if running_pid(self.servers.node(node)) is None or node in self.paused
        }
        return {self.live[shard] if node == shard else node for shard, node in lacking}

    def keep_names(self, document: dict[str, Any], why: str) -> None:
        """Keep which copies an increment leaves out; they must be those that are away, or late on a busy machine."""
        number, expected = int(document["increment"]), self.away()
        found = {out["name"]: out["why"] for out in document["left_out"] if out["kind"] == "absent_copy"}
        late = {name for name, reason in found.items() if name not in expected and LATE in reason}
        if found.keys() - late != expected:
            self.faults.append(f"increment {number} ({self.event}, {why}) leaves out {found}, and {expected} are away")
            say(self.faults[-1])
        self.absent.update(found.keys())
        self.absent.update(f"{name}, late" for name in late)
        self.left_out[number] = {*found}
        kind = self.event if why in USUAL else f"{self.event}, {why}"
        self.kinds.setdefault(kind, []).append(number)

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
        self.truths[increment] = {shard: sorted_copies(self.dsn(self.live[shard])) for shard in self.shards}

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
        shard = self.chance.choice(self.shards)
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
        shard = self.chance.choice(self.shards)
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
        shard = self.chance.choice(self.shards)
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
        self.paused.add(node)
        self.increment("replay is paused")
        self.ask(node, "SELECT pg_wal_replay_resume()")
        self.paused.discard(node)
        return node

    def kill_primary(self) -> str:
        """A primary crashes and is started again."""
        node = self.live[self.chance.choice(self.shards)]
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
        return self.drop_slots(self.live[self.chance.choice(self.shards)])

    def drop_slots(self, node: str) -> str:
        for slot in slots_of(self.dsn(node)):
            self.ask(node, f"SELECT pg_drop_replication_slot('{slot}')")
        return node

    def merge(self) -> str:
        """The chain begins at its newest increment from now on; earlier ones stay."""
        document = self.command("merge", NAME)
        return f"at increment {document['increment']}"

    def drop_earlier(self) -> str:
        """The restore points before a merge are given up."""
        document = self.command("merge", NAME, "--drop-earlier", "--yes")
        self.first = document["increment"]
        self.truths = {number: truth for number, truth in self.truths.items() if number >= self.first}
        return f"before increment {self.first}"

    def change_tables(self) -> str:
        """A table gets a column, and another one is created on all shards."""
        number = next(NUMBERS)
        for shard in self.shards:
            self.ask(self.live[shard], f"ALTER TABLE written ADD COLUMN more_{number} int DEFAULT {number}")
            self.ask(self.live[shard], f"CREATE TABLE new_{number} (id int PRIMARY KEY, v text DEFAULT 'v')")
            self.ask(self.live[shard], f"INSERT INTO new_{number} SELECT generate_series(1, 100)")
        return str(number)

    # Shards that come and go

    def add_shard(self) -> str:
        """A shard comes, with an id that no shard has had, and is written on before the next increment copies it."""
        shard = f"s{len(self.servers.primaries) + 1}"
        self.servers = with_shard(self.servers, shard, STANDBYS)
        self.others = with_shard(self.others, shard, 0)
        self.target = describe_fleet(self.others, self.target, self.others.nodes)
        open_shard(self, shard)
        self.pause()
        self.pairs_before[shard] = self.written
        self.live[shard] = shard
        self.describe()
        self.command("init")
        self.writing.set()
        if (document := self.increment("a shard comes")) is not None:
            found = {row["node"] for row in document["renewed"] if row["new"]}
            if not found >= {shard}:
                self.faults.append(f"{shard} came, but increment {document['increment']} renews {sorted(found)}")
        return shard

    def retire_shard(self) -> str:
        """A shard leaves: its servers go after the increment that drops their slots, or before it; then its nodes."""
        shard = self.shards[-1]
        assert shard not in SHARDS, "no shard has come"
        nodes = [node for node in self.servers.nodes if shard in (node.id, node.backup_of)]
        is_gone_before = len(self.servers.primaries) % 2 == 0
        self.pause()
        before = self.increment("a shard is about to leave")
        if before is not None:
            self.keep_truth(before["increment"])
        del self.live[shard]
        self.writing.set()
        if is_gone_before:
            for node in nodes:
                delete_server(node)
            self.describe(retired=shard)
        else:
            self.describe(*nodes, retired=shard)
        document = self.increment("a shard leaves")
        if document is not None and document["retired"] != [shard]:
            self.faults.append(f"{shard} left, but increment {document['increment']} retires {document['retired']}")
        if not is_gone_before:
            for node in nodes:
                assert not slots_of(node.dsn()), f"{node.id} has left, and still has the chain's slot"
                delete_server(node)
        self.describe()
        # The locks of more than half of the recorded primaries are needed.
        self.command("init", "--forget-nodes")
        for number in (before["increment"] if before is not None else None, None):
            self.restore(number)
        return f"{shard}, its servers {'before' if is_gone_before else 'after'} the increment"

    def describe(self, *more: EmbeddedNode, retired: str = "") -> None:
        """Write the nodes of the shards that are there, and `more` nodes, into fleet.toml."""
        nodes = [node for node in self.servers.nodes if (node.backup_of or node.id) in self.live]
        self.fleet = describe_fleet(self.servers, self.fleet, [*nodes, *more], retired)

    def command(self, *words: str) -> dict[str, Any]:
        """Run a command that must succeed; return its document."""
        code, document = run_command(self.fleet, *words, seconds_max=COMMAND_SECONDS_MAX)
        assert code == 0, document
        return document

    # The end

    def judge(self, seconds: float) -> None:
        """Check the chain; check and restore an increment of every kind of event, and others for so many seconds."""
        code, document = run_command(self.fleet, "check", NAME, seconds_max=COMMAND_SECONDS_MAX)
        say(f"check: exit code {code}, {document.get('result')}")
        if code not in (0, 4) or any(one["conflicts"] for one in document["snapshots"]):
            self.faults.append(f"check: {json.dumps(document)[:2000]}")
        self.check_names(document, max(self.left_out))
        self.restore(None)
        self.restore(max(self.truths), "--use-backup-copies")
        deadline = time.monotonic() + seconds
        there = [[number for number in numbers if number >= self.first] for numbers in self.kinds.values()]
        chosen = {self.chance.choice(numbers) for numbers in there if numbers}
        # What was quiet is compared row by row; of the others, any.
        quiet = [*self.truths.keys() - chosen]
        others = [number for numbers in there for number in numbers if number not in {*chosen, *quiet}]
        for numbers in (quiet, others):
            self.chance.shuffle(numbers)
        judged = 0
        for number in (*sorted(chosen), *quiet, *others):
            if number not in chosen and time.monotonic() > deadline:
                break
            self.restore(number)
            _, document = run_command(
                self.fleet, "check", NAME, "--increment", str(number), seconds_max=COMMAND_SECONDS_MAX
            )
            self.check_names(document, number)
            judged += 1
        say(f"{judged} of {sum(map(len, there))} increments restored and checked, of {len(chosen)} kinds")

    def check_names(self, document: dict[str, Any], number: int) -> None:
        """A check of an increment finds nothing wrong, and names exactly the copies that the increment leaves out."""
        (snapshot,) = document["snapshots"]
        found = {one["what"].removeprefix("the copy of ") for one in snapshot["skipped"] if one["is_absent"]}
        if snapshot["conflicts"] or found != self.left_out[number]:
            self.faults.append(
                f"check of {number}: {snapshot['conflicts'][:3]}, {found} named, {self.left_out[number]} left out"
            )
            say(self.faults[-1])

    def restore(self, number: int | None, *options: str) -> int:
        """Restore an increment, the newest if it is None, and compare its rows; return its number."""
        chosen = [] if number is None else ["--increment", str(number)]
        words = ["restore", NAME, *chosen, "--to", str(self.target.path), "--replace", "--yes", *options]
        code, document = run_command(self.fleet, *words, seconds_max=COMMAND_SECONDS_MAX)
        if code != 0:
            self.faults.append(f"restore {number} {options}: {code} {document.get('message')}")
            say(self.faults[-1])
            return number or 0
        found = int(document["increment"])
        nodes = [self.target.node(row["node"]) for row in document["nodes"]]
        pairs = {}
        for node in nodes:
            with psycopg.connect(node.dsn) as connection:
                pairs[node.id] = {-number for (number,) in connection.execute("SELECT id FROM written WHERE id < 0")}
        for shard, numbers in pairs.items():
            if numbers != {number for number in pairs["s1"] if number > self.pairs_before[shard]}:
                self.faults.append(f"restore {found}: a pair is torn on {shard}")
        if found in self.truths and {node.id: sorted_copies(node.dsn) for node in nodes} != self.truths[found]:
            self.faults.append(f"restore {found} {options}: shards or rows differ from those at its cut")
        return found


NUMBERS = itertools.count(1)
# Why increments are taken after every event.
USUAL = ("quiet", "between events")
# In the reason for which an increment does without a standby that replays, but not in time.
LATE = "it has not caught up yet"
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


def with_shard(servers: EmbeddedFleet, shard: str, standbys: int) -> EmbeddedFleet:
    """The fleet with the servers of another shard, which are started."""
    primary = servers.places.node(shard, None, None)
    added = [servers.places.node(f"{shard}-b{number}", shard, None) for number in range(1, standbys + 1)]
    servers = replace(servers, nodes=(*servers.nodes, primary, *added))
    # From now on, stop_fleet stops and deletes these as well.
    _record(servers, complete=True)
    _make_shard(servers, primary, SETTINGS, schema=True)
    return servers


def open_shard(years: Years, shard: str) -> None:
    """Create the table of a new shard; its commits wait for a standby from now on."""
    for statement in (
        "CREATE TABLE written (id bigint PRIMARY KEY, text text)",
        "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'",
        "SELECT pg_reload_conf()",
    ):
        years.ask(shard, statement)


def describe_fleet(servers: EmbeddedFleet, fleet: Fleet, nodes: Sequence[EmbeddedNode], retired: str = "") -> Fleet:
    """Write these nodes into the fleet's fleet.toml, and the id of a shard that has left; return the fleet."""
    describe(servers.directory, nodes)
    configure_fleet(servers, fleet.path, fleet.store.url)
    if retired:
        fleet.path.write_text(f"retired = [{json.dumps(retired)}]\n{fleet.path.read_text()}")
    return load_fleet(fleet.path)


@contextmanager
def started(place: Path) -> Iterator[Years]:
    """The fleet with a full snapshot, and its writer."""
    with ExitStack() as stack:
        servers = start_fleet(place / "fleet", shards=len(SHARDS), backups=STANDBYS, settings=SETTINGS)
        stack.callback(stop_fleet, place / "fleet", delete=True)
        other = start_fleet(place / "target", shards=len(SHARDS), backups=0)
        stack.callback(stop_fleet, place / "target", delete=True)
        fleet = configure_fleet(servers, place / "fleet.toml", f"file://{place}/store")
        target = configure_fleet(other, place / "target.toml", f"file://{place}/other-store")
        years = Years(servers, other, fleet, target)
        for shard in SHARDS:
            open_shard(years, shard)
        for words in (["init"], ["create", NAME]):
            years.command(*words)
        writer = threading.Thread(target=years.write, daemon=True)
        writer.start()
        years.writing.set()
        try:
            yield years
        finally:
            years.ended.set()
            writer.join(30)


def run(seconds: float, event_seconds: float = 120.0, judge_seconds: float = 600.0) -> int:
    """Run for so long, with an event now and then; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="years-") as folder, chdir(folder), started(Path(folder)) as years:
        # A restore leaves the list of the transactions in doubt in the current folder.
        begun = time.monotonic()
        deadline = begun + seconds
        events: list[Callable[[], str]] = [
            years.switchover, years.stop_standby, years.kill_primary, years.add_shard, years.pause_replay,
            years.rebuild_standby, years.kill_create, years.failover, years.change_tables, years.lose_slot_of_standby,
            years.switchover, years.lose_slot_of_primary, years.merge, years.retire_shard, years.lossy_failover,
            years.drop_earlier,
        ]  # fmt: skip
        for number, event in enumerate(itertools.cycle(events), start=1):
            if time.monotonic() >= deadline:
                break
            say(f"{event.__name__} …")
            years.event = event.__name__
            try:
                say(f"{event.__name__} {event()}")
            except (AssertionError, psycopg.Error, SnapshotError, subprocess.SubprocessError) as error:
                years.faults.append(f"{event.__name__}: {error}")
                say(years.faults[-1])
                break
            years.quiet_increment()
            while time.monotonic() < min(begun + number * event_seconds, deadline):
                years.increment("between events")
                time.sleep(EVERY_SECONDS)
        years.quiet_increment()
        years.pause()
        years.judge(judge_seconds)
        say(f"creates by exit code: {dict(years.codes)}; {years.written} transactions; {len(years.truths)} quiet cuts")
        say(f"increments without a copy: {dict(years.absent)}")
        for fault in years.faults:
            say(f"FAULT {fault}")
        return 1 if years.faults else 0


if __name__ == "__main__":
    sys.exit(run(*map(float, sys.argv[1:])))
