"""`snapshot watch` for an hour, while servers are killed and promoted, the store is away, and watches are killed.

    python -m tests.soak.watching SECONDS

Two watches run all the time: one works, the other stands by. The run fails if between two cuts there was a longer time
than the schedule allows without a word about it, if the memory of the working watch grew by more than a twentieth after
its first ten minutes, or if what was stored at the end is not whole.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.fleet.config import load_fleet
from tests.commands.snapshot_runs import configure_fleet, run_command
from tests.s3.proxy import ANSWER_LOST, REQUEST_LOST, S3Proxy, s3_proxy
from tests.s3.server import s3_server
from tests.servers.disasters import kill_server

EVERY_SECONDS = 20.0
# A cut may come that much later than the schedule says without a word.
LATE_SECONDS = 25.0
WARM_UP_SECONDS, SAMPLE_SECONDS = 600.0, 10.0
GROWTH_MAX = 0.05
WATCH = f"""
[watch]
every = "{EVERY_SECONDS:.0f}s"
full = "weekly"
check = "15min"

[retention]
last = 3

[notify]
command = ["sh", "-c", "cat >> $NOTIFIED; echo >> $NOTIFIED"]
"""


def say(text: str) -> None:
    sys.stdout.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")
    sys.stdout.flush()


@dataclass(slots=True)
class Watching:
    """The fleet, its two watches, and what was done to them.

    `kills`: when the working one was killed; `worked`: the process ids of those, in order.
    """

    place: Path
    embedded: EmbeddedFleet
    proxy: S3Proxy
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    primaries: dict[str, str] = field(default_factory=dict)
    kills: list[datetime] = field(default_factory=list)
    worked: list[int] = field(default_factory=list)
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    written: int = 0

    @property
    def fleet_file(self) -> Path:
        return self.place / "fleet.toml"

    @property
    def logs(self) -> list[Path]:
        return sorted(self.place.glob("watch-*.log"))

    def start_watch(self) -> None:
        """Start one more watch, which stands by if another one works."""
        log = self.place / f"watch-{time.time_ns()}.log"
        program = [
            sys.executable,
            "-c",
            "from cutline.cli.main import main; main()",
            "--fleet",
            str(self.fleet_file),
            "--json",
        ]
        environment = os.environ | {"NOTIFIED": str(self.place / "notified")}
        with log.open("wb") as out:
            self.processes.append(
                subprocess.Popen([*program, "watch"], stdout=subprocess.DEVNULL, stderr=out, env=environment)
            )

    def working(self) -> subprocess.Popen[bytes]:
        """The watch that has logged an increment last."""
        newest = max(zip(self.processes, self.logs, strict=True), key=lambda one: last_increment(one[1]))
        return newest[0]

    def kill_working(self) -> None:
        """Kill the watch that works; the other takes over, and a new one stands by."""
        process = self.working()
        self.kills.append(datetime.now(UTC))
        self.worked.append(process.pid)
        process.kill()
        process.wait()
        self.start_watch()

    def stop_server(self) -> None:
        """A primary is away for a while."""
        node = self.embedded.node("s2")
        kill_server(node)
        time.sleep(45)
        self.embedded.start_node(node)

    def promote(self) -> None:
        """The primary of s1 is lost, its standby takes its place, and fleet.toml says so."""
        standby = next((one for one in self.embedded.nodes if one.id == "s1-b1"), None)
        if standby is None or self.primaries["s1"] == standby.dsn():
            self.stop_server()
            return
        kill_server(self.embedded.node("s1"))
        with psycopg.connect(standby.dsn(), autocommit=True) as session:
            session.execute("SELECT pg_promote()")
        text = self.fleet_file.read_text()
        begin = text.index('[[node]]\nid = "s1-b1"')
        end = text.find("[[node]]", begin + 1)
        end = end if end > 0 else text.find("\n[", begin + 10)
        text = text[:begin] + text[end:]
        self.fleet_file.write_text(text.replace(self.primaries["s1"], standby.dsn()))
        self.primaries["s1"] = standby.dsn()

    def lose_store(self) -> None:
        """The store does not answer for a minute."""
        self.proxy.outage = REQUEST_LOST
        time.sleep(60)
        self.proxy.outage = None

    def lose_answers(self) -> None:
        """The store does what it is asked, and its answers are lost."""
        self.proxy.outage = ANSWER_LOST
        time.sleep(15)
        self.proxy.outage = None

    def write(self) -> None:
        """Write to all primaries until the end; two-phase now and then."""
        sessions: dict[str, psycopg.Connection[Any]] = {}
        while not self.ended.wait(0.1):
            for shard, dsn in dict(self.primaries).items():
                with suppress(psycopg.Error):
                    if shard not in sessions or sessions[shard].closed or sessions[shard].info.dsn == "":
                        sessions[shard] = psycopg.connect(dsn, autocommit=True, connect_timeout=2)
                    session = sessions[shard]
                    self.written += 1
                    session.execute("INSERT INTO written VALUES (%s, now())", [self.written])
                    if self.written % 50 == 0:
                        session.execute("BEGIN")
                        session.execute("INSERT INTO written VALUES (%s, now())", [-self.written])
                        session.execute(f"PREPARE TRANSACTION 'g{self.written}'")
                        session.execute(f"COMMIT PREPARED 'g{self.written}'")

    def sample(self) -> None:
        """Note the memory of the watches."""
        while not self.ended.wait(SAMPLE_SECONDS):
            for process in list(self.processes):
                with suppress(OSError, ValueError):
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    kib = int(status.partition("VmRSS:")[2].split()[0])
                    self.memory.setdefault(process.pid, []).append((time.monotonic(), kib))


def events_of(log: Path) -> Iterator[dict[str, Any]]:
    """What a watch has logged."""
    for line in log.read_text().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def last_increment(log: Path) -> str:
    return max(
        (one["at"] for one in events_of(log) if one.get("task") == "increment" and "code" not in one), default=""
    )


def cut_times(fleet_file: Path) -> list[datetime]:
    """When all cuts in the store were made."""
    code, document = run_command(load_fleet(fleet_file), "list")
    assert code == 0, document
    cuts = []
    for one in document["snapshots"]:
        cuts += [datetime.fromisoformat(point["cut_at"]) for point in (one, *one["increments"]) if point.get("cut_at")]
    return sorted(cuts)


def announced(watching: Watching) -> list[datetime]:
    """When a watch has said that something is wrong, or that increments wait."""
    words = ("waiting", "standing by", "follows", "waits", "begins", "is starting", "next attempt", "fails")
    return sorted(
        [
            datetime.fromisoformat(one["at"])
            for log in watching.logs
            for one in events_of(log)
            if "code" in one or any(word in one.get("text", "") for word in words)
        ]
        + watching.kills
    )


def judge(watching: Watching, began: datetime) -> list[str]:
    """What is wrong with the run."""
    faults: list[str] = []
    cuts = [one for one in cut_times(watching.fleet_file) if one >= began]
    words = announced(watching)
    for one, other in pairwise(cuts):
        seconds = (other - one).total_seconds()
        if seconds > EVERY_SECONDS + LATE_SECONDS:
            said = [at for at in words if one <= at <= other]
            say(f"gap of {seconds:.0f} s from {one:%H:%M:%S}, {'announced' if said else 'NOT ANNOUNCED'}")
            if not said:
                faults.append(f"{seconds:.0f} s without a cut from {one} on, and nobody said so")
    # One that has stood by needs more from when on it works.
    longest = watching.memory[watching.worked[-1]]
    late = [kib for at, kib in longest if at >= longest[0][0] + WARM_UP_SECONDS]
    if late:
        growth = max(late) / late[0] - 1
        say(f"memory of the watch that worked: {late[0]} KiB after ten minutes, then {min(late)} to {max(late)} KiB")
        if growth > GROWTH_MAX:
            faults.append(f"memory grew by {growth:.1%}")
    say(f"{len(cuts)} cuts; {watching.written} rows written")
    return faults


@contextmanager
def started(place: Path) -> Iterator[Watching]:
    """A fleet with a store behind a proxy, and two watches."""
    with ExitStack() as stack:
        embedded = start_fleet(place / "fleet", shards=3, backups=1)
        stack.callback(stop_fleet, place / "fleet", delete=True)
        server = stack.enter_context(s3_server())
        proxy = stack.enter_context(s3_proxy(server.endpoint_url))
        options = server.options | {"endpoint_url": proxy.endpoint_url}
        fleet = configure_fleet(embedded, place / "fleet.toml", server.bucket("watched"), options, WATCH)
        for node in embedded.primaries:
            with psycopg.connect(node.dsn(), autocommit=True) as session:
                session.execute("CREATE TABLE written (id bigint PRIMARY KEY, at timestamptz)")
        code, document = run_command(fleet, "init")
        assert code == 0, document
        watching = Watching(place, embedded, proxy, primaries={one.id: one.dsn() for one in embedded.primaries})
        for work in (watching.write, watching.sample):
            threading.Thread(target=work, daemon=True).start()
        watching.start_watch()
        time.sleep(5)
        watching.start_watch()
        try:
            yield watching
        finally:
            watching.ended.set()
            for process in watching.processes:
                process.send_signal(signal.SIGTERM)
            for process in watching.processes:
                process.wait(120)


def run(seconds: float) -> int:
    """Run for so long; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="watching-") as folder, started(Path(folder)) as watching:
        time.sleep(60)
        began, deadline = datetime.now(UTC), time.monotonic() + seconds
        # The watch that works after these two is left alone until the end, so that its memory can be compared.
        events: list[Callable[[], None]] = [watching.kill_working, watching.kill_working]
        between = [watching.stop_server, watching.lose_store, watching.lose_answers, watching.promote]
        number = 0
        while time.monotonic() < deadline:
            event = events.pop(0) if events else between[number % len(between)]
            number += not events
            say(event.__name__)
            event()
            time.sleep(min(120.0, max(deadline - time.monotonic(), 0)))
        say("kill_working")
        watching.kill_working()
        time.sleep(120)
        faults = judge(watching, began)
        code, document = run_command(load_fleet(watching.fleet_file), "check")
        say(f"check: exit code {code}, {document.get('result')}")
        if code not in (0, 4):
            faults.append(f"check: {document}")
        for log in watching.logs:
            say(f"--- {log.name}")
            for one in events_of(log):
                say(f"{one['at']} {one.get('text')}")
        for fault in faults:
            say(fault)
        return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1])))
