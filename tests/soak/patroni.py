"""A chain on two shards that Patroni manages: switchovers, a failover, restarts of members, a rebuilt member.

    python -m tests.soak.patroni

pip installs Patroni from the package index into an environment of its own, which is deleted at the end; Cutline and its
tests do not depend on it. If it can't be installed, the exit code is 77. One Raft server is the store in which the
members agree on their leader. All servers listen on 127.0.0.1 only, and need passwords.

A bank makes transfers on both shards and between them all the time. The run fails if an increment after an event is
refused, or copies other servers again than docs/patroni.md says; if the check finds a conflict; if a restored increment
tears a transfer; or if the restored newest increment differs from the shards.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from cutline.embedded.bank import create_bank, read_invariants
from cutline.embedded.bank_workload import BankStoppedError, BankWorkload
from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.embedded.folder import DATABASE
from cutline.embedded.server import EmbeddedNode, stop_server
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.programs import Account, Programs, run_as, server_programs, shared_temporary_directory
from tests.commands.snapshot_runs import configure_fleet, run_command, sorted_copies
from tests.faults.ports import HOST, free_ports
from tests.run.quick_spark import with_spark
from tests.servers.disasters import kill_server
from tests.soak.years import say

NAME = "chain"
PACKAGES = ("patroni[raft]", "psycopg[binary]")
NOT_INSTALLED = 77
# How often Patroni looks at its server and at the configuration.
LOOP_SECONDS = 2
INSTALL_SECONDS_MAX, SETTLED_SECONDS_MAX, COMMAND_SECONDS_MAX = 600, 240.0, 600.0
IGNORE_SLOTS = [{"type": "logical", "plugin": "pgoutput", "database": DATABASE}]
# The servers have the settings of docs/patroni.md. No test cuts the machine's power.
PARAMETERS = {
    "wal_level": "logical",
    "hot_standby_feedback": "on",
    "max_prepared_transactions": 50,
    "max_replication_slots": 20,
    "max_wal_senders": 20,
    "max_slot_wal_keep_size": "20GB",
    "fsync": "off",
}
# No acknowledged transaction is lost in a failover; the leader is replaced after 20 seconds, the least that there is.
DYNAMIC = {
    "ttl": 20,
    "loop_wait": LOOP_SECONDS,
    "retry_timeout": 5,
    "primary_start_timeout": 0,
    "synchronous_mode": True,
    "ignore_slots": IGNORE_SLOTS,
    "postgresql": {"use_pg_rewind": True, "parameters": PARAMETERS},
}


class NotInstalledError(Exception):
    """The package index can't be reached, or has no Patroni for this Python."""


@dataclass(slots=True)
class Member:
    """One member of a shard's cluster: its server, the ports of the server and of Patroni, and Patroni's process."""

    shard: str
    server: EmbeddedNode
    port: int
    api_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def id(self) -> str:
        return self.server.id

    @property
    def config(self) -> Path:
        return self.server.folder / "patroni.yml"


@dataclass(slots=True)
class Trial:
    """The clusters, the chain, and what was found."""

    place: Path
    programs: Programs
    environment: Path
    members: dict[str, Member]
    raft_port: int
    secret: str
    fleet: Fleet | None = None
    raft: subprocess.Popen[bytes] | None = None
    events: list[tuple[str, float, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    committed: int = 0
    ended: threading.Event = field(default_factory=threading.Event)
    writer: threading.Thread | None = None

    @property
    def shards(self) -> list[str]:
        return sorted({member.shard for member in self.members.values()})

    def of(self, shard: str) -> list[Member]:
        """The members of a shard, in the order of their ids."""
        return [member for member in self.members.values() if member.shard == shard]

    def dsn(self, *members: Member, database: str = DATABASE) -> str:
        """Sessions on the member, or on that of several members which is the leader."""
        hosts = ",".join(f"{HOST}:{member.port}" for member in members)
        leader = "?target_session_attrs=read-write" if len(members) > 1 else ""
        return f"postgresql://postgres@{hosts}/{database}{leader}"

    # Patroni

    def run_as_server(self, log: Path, *command: str | Path) -> subprocess.Popen[bytes]:
        """Start a program of Patroni under the account that runs PostgreSQL."""
        account = self.programs.account
        with log.open("ab") as out:
            return subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/",
                env={"PATH": os.environ["PATH"], "HOME": str(self.place)},
                user=account.uid if account else None, group=account.gid if account else None,
                extra_groups=[] if account else None,
            )  # fmt: skip

    def write_config(self, path: Path, config: dict[str, Any]) -> None:
        """Write a configuration, which is YAML because it is JSON; nobody but the servers' account can read it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(json.dumps(config))
        if self.programs.account:
            os.chown(path, self.programs.account.uid, self.programs.account.gid)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        if self.programs.account:
            os.chown(folder, self.programs.account.uid, self.programs.account.gid)

    def start_raft(self) -> None:
        folder = self.place / "raft"
        self.make_folder(folder)
        address = f"{HOST}:{self.raft_port}"
        raft = {"self_addr": address, "data_dir": str(folder), "password": self.secret}
        self.write_config(folder / "raft.yml", {"raft": raft})
        self.raft = self.run_as_server(
            self.place / "raft.log", self.environment / "bin/patroni_raft_controller", folder / "raft.yml"
        )

    def configure_member(self, member: Member) -> None:
        """Write the configuration of a member. What is in `bootstrap` counts for the first member of a cluster only."""
        self.make_folder(member.server.folder)
        users = {
            user: {"username": name, "password": self.secret}
            for user, name in (("superuser", "postgres"), ("replication", "replicator"), ("rewind", "rewinder"))
        }
        config = {
            "scope": member.shard,
            "name": member.id,
            "restapi": {
                "listen": f"{HOST}:{member.api_port}",
                "connect_address": f"{HOST}:{member.api_port}",
                "authentication": {"username": "patroni", "password": self.secret},
            },
            "raft": {
                "data_dir": str(member.server.folder),
                "partner_addrs": [f"{HOST}:{self.raft_port}"],
                "password": self.secret,
            },
            "bootstrap": {"dcs": DYNAMIC, "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "no-sync"]},
            "postgresql": {
                "listen": f"{HOST}:{member.port}",
                "connect_address": f"{HOST}:{member.port}",
                "data_dir": str(member.server.data_directory),
                "bin_dir": str(self.programs.bin_directory),
                "pgpass": str(member.server.folder / "pgpass"),
                "authentication": users,
                "pg_hba": [f"host {of} all {HOST}/32 scram-sha-256" for of in ("all", "replication")],
                "parameters": {"unix_socket_directories": ""},
            },
        }
        self.write_config(member.config, config)

    def start_member(self, member: Member) -> None:
        member.process = self.run_as_server(
            self.place / f"{member.id}.log", self.environment / "bin/patroni", member.config
        )

    def kill_member(self, member: Member) -> None:
        """Kill Patroni and its server, as when the machine loses its power."""
        assert member.process is not None
        member.process.kill()
        member.process.wait()
        kill_server(member.server)

    def stop(self) -> None:
        """Stop everything that was started."""
        self.ended.set()
        processes = [member.process for member in self.members.values()] + [self.raft]
        for process in filter(None, processes):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
        for member in self.members.values():
            stop_server(member.server, immediate=True)

    def ctl(self, shard: str, command: str, *words: str) -> None:
        """Run patronictl for a cluster, without asking."""
        config = self.of(shard)[0].config
        done = subprocess.run(
            [self.environment / "bin/patronictl", "-c", config, command, shard, *words, "--force"],
            capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"patronictl {command}: {done.stdout}{done.stderr}"

    def cluster(self, shard: str) -> dict[str, dict[str, Any]]:
        """What the members of a cluster are doing, by their ids, as Patroni reports it; empty if none answers."""
        for member in self.of(shard):
            with suppress(urllib.error.URLError, OSError):
                url = f"http://{HOST}:{member.api_port}/cluster"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    return {one["name"]: one for one in json.load(answer)["members"]}
        return {}

    def leader(self, shard: str) -> str:
        """The member that is the leader; "" if there is none."""
        found = [name for name, one in self.cluster(shard).items() if one["role"] == "leader"]
        return found[0] if len(found) == 1 else ""

    def replica(self, shard: str) -> str:
        """The member that is not the leader."""
        leader = self.leader(shard)
        (name,) = [member.id for member in self.of(shard) if member.id != leader]
        return name

    def await_settled(self, shard: str, *, members: int = 2) -> None:
        """Wait until the cluster has a leader, and its replica streams on the leader's timeline, as synchronous one."""
        deadline = time.monotonic() + SETTLED_SECONDS_MAX
        while time.monotonic() < deadline:
            found = self.cluster(shard).values()
            running = [one for one in found if one["state"] in ("running", "streaming")]
            roles = sorted(one["role"] for one in running)
            timelines = {one.get("timeline") for one in running}
            if roles == ["leader", "sync_standby"][:members] and len(timelines) == 1:
                return
            time.sleep(0.5)
        raise AssertionError(f"{shard} does not settle: {self.cluster(shard)}")

    # The bank

    def write(self) -> None:
        """Run the bank until the end; start it again whenever a leader goes away."""
        dsns = [self.dsn(*self.of(shard)) for shard in self.shards]
        while not self.ended.is_set():
            bank = BankWorkload(dsns, clients=2, names=self.shards, pause_seconds=0.02)
            try:
                with bank:
                    while bank.wait(0.2) and not self.ended.is_set():
                        pass
            except (BankStoppedError, psycopg.Error):
                self.ended.wait(1)
            self.committed += bank.committed.total

    def stop_writing(self) -> None:
        """Stop the bank, if it was started, and wait until its last transfer is complete."""
        self.ended.set()
        if self.writer:
            self.writer.join(60)
            assert not self.writer.is_alive(), "the bank does not stop"

    # The chain

    def command(self, *words: str) -> dict[str, Any]:
        """Run a command that must succeed; return its document."""
        assert self.fleet is not None
        code, document = run_command(self.fleet, *words, seconds_max=COMMAND_SECONDS_MAX)
        assert code == 0, f"{' '.join(words)}: exit code {code}: {document}"
        return document

    def increment(self, event: str, seconds: float, *, copied: str = "", without: str = "") -> None:
        """Take an increment after an event; compare the copies that begin again, or that it does without.

        Of a shard s1, the copy of the leader is s1 and that of the replica s1-b1, whichever member is the leader.
        """
        document = self.command("create", NAME, "--incremental")
        found = {row["node"] for row in document["renewed"]}
        absent = {out["name"] for out in document["left_out"] if out["kind"] == "absent_copy"}
        told = f"increment {document['increment']}"
        told += "".join(f", copy {name} begins again" for name in sorted(found))
        told += "".join(f", without copy {name}" for name in sorted(absent))
        self.events.append((event, seconds, told))
        say(f"{event}, {seconds:.0f} s: {told}")
        if found != {copied} - {""} or absent != {without} - {""}:
            self.faults.append(f"{event}: {told}; expected: '{copied}' copied again, without '{without}'")

    def after(self, event: str, act: Callable[[], None], shard: str, **expected: Any) -> None:
        """Let an event happen, wait until the cluster has settled, and take an increment."""
        began = time.monotonic()
        act()
        self.await_settled(shard, members=1 if "without" in expected else 2)
        self.increment(event, time.monotonic() - began, **expected)

    def switch(self, shard: str) -> None:
        old, new = self.leader(shard), self.replica(shard)
        self.after(
            f"switchover from {old} to {new}",
            lambda: self.ctl(shard, "switchover", "--leader", old, "--candidate", new), shard,
        )  # fmt: skip
        if self.leader(shard) != new:
            self.faults.append(f"{shard}: the leader is {self.leader(shard)} after a switchover to {new}")

    def restart(self, shard: str, name: str, **expected: Any) -> None:
        role = "the leader" if name == self.leader(shard) else "the replica"
        self.after(f"restart of {role} {name}", lambda: self.ctl(shard, "restart", name), shard, **expected)

    def fail_over(self, shard: str) -> None:
        """The leader and its Patroni are killed, and come back after an increment."""
        old, new = self.leader(shard), self.replica(shard)

        def kill() -> None:
            self.kill_member(self.members[old])
            deadline = time.monotonic() + SETTLED_SECONDS_MAX
            while self.leader(shard) != new:
                assert time.monotonic() < deadline, f"{new} is not promoted: {self.cluster(shard)}"
                time.sleep(0.5)

        self.after(f"kill -9 of the leader {old} and of its Patroni", kill, shard, without=f"{shard}-b1")
        back = f"{old} comes back as a replica of {new}"
        self.after(back, lambda: self.start_member(self.members[old]), shard, copied=f"{shard}-b1")

    def run(self) -> None:
        """All events, with an increment after each."""
        self.switch("s1")
        self.switch("s2")
        self.switch("s1")
        for shard in self.shards:
            for member in self.of(shard):
                self.restart(shard, member.id)
        self.fail_over("s1")
        self.switch("s1")
        # The same without the setting that the page asks for.
        self.ctl("s2", "edit-config", "--set", "ignore_slots=null")
        time.sleep(3 * LOOP_SECONDS)
        leader, replica = self.leader("s2"), self.replica("s2")
        self.restart("s2", replica, copied="s2-b1")
        self.restart("s2", leader, copied="s2")

    def judge(self, target: Fleet) -> None:
        """Check the chain, restore every increment, and compare the newest one with the shards."""
        self.stop_writing()
        leaders = [self.dsn(self.members[self.leader(shard)]) for shard in self.shards]
        document = self.command("create", NAME, "--incremental")
        last = document["increment"]
        live = [sorted_copies(dsn) for dsn in leaders]
        if not read_invariants(leaders).hold:
            self.faults.append("the bank itself is torn")
        checked = self.command("check", NAME)
        (snapshot,) = checked["snapshots"]
        say(f"check: {checked['result']}, {snapshot['compared']}")
        if checked["result"] != "valid" or snapshot["conflicts"]:
            self.faults.append(f"check: {checked}")
        restored = [node.dsn for node in target.primaries]
        for number in range(last + 1):
            self.command(
                "restore", NAME, "--increment", str(number), "--to", str(target.path), "--replace", "--yes"
            )  # fmt: skip
            if not read_invariants(restored).hold:
                self.faults.append(f"increment {number} tears a transfer")
        if [sorted_copies(dsn) for dsn in restored] != live:
            self.faults.append("the restored shards differ from the live ones")
        rows = sum(text.count(b"\n") for tables in live for text in tables.values())
        say(f"{last + 1} restore points restored; {rows} rows equal to the live ones; {self.committed} transactions")


def install(environment: Path, account: Account | None) -> str:
    """Install Patroni into a new environment; return its version. Raises NotInstalledError.

    The account that runs root's servers may not be able to run root's Python.
    """
    candidates = [os.path.realpath(sys.executable), "/usr/bin/python3"]
    usable = [one for one in candidates if not run_as(account, ["test", "-x", one], seconds_max=30).returncode]
    if not usable:
        raise NotInstalledError(f"the servers' account can run none of {', '.join(candidates)}")
    subprocess.run([usable[0], "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin/python", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            list(map(str, [*pip, "install", "--quiet", *PACKAGES])),
            capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"pip did not end in {INSTALL_SECONDS_MAX} seconds") from error
    if done.returncode:
        raise NotInstalledError(done.stderr.strip().splitlines()[-1])
    shown = subprocess.run([environment / "bin/patroni", "--version"], capture_output=True, text=True, check=True)
    return shown.stdout.strip()


def describe(trial: Trial) -> Fleet:
    """Write fleet.toml with each member as a node, and load it."""
    nodes = ""
    for shard in trial.shards:
        for number, member in enumerate(trial.of(shard)):
            backup = f"backup_of = {json.dumps(trial.of(shard)[0].id)}\n" if number else ""
            nodes += f"\n[[node]]\nid = {json.dumps(member.id)}\n{backup}dsn = {json.dumps(trial.dsn(member))}\n"
    path = trial.place / "fleet.toml"
    store = json.dumps(f"file://{trial.place}/store")
    path.write_text(f'name = "patroni"\nstore = {store}\n{nodes}{with_spark("")}\n')
    return load_fleet(path)


@contextmanager
def clusters(place: Path, environment: Path) -> Iterator[Trial]:
    """Two clusters of two members each, with the bank, a full snapshot, and clients that write."""
    ids = {"s1": "s1", "s1-b1": "s1", "s2": "s2", "s2-b1": "s2"}
    raft_port, *ports = free_ports(1 + 2 * len(ids))
    pairs = zip(ports[::2], ports[1::2], strict=True)
    members = {
        name: Member(shard, EmbeddedNode(name, place / name), port, api_port)
        for (name, shard), (port, api_port) in zip(ids.items(), pairs, strict=True)
    }
    trial = Trial(place, server_programs(), environment, members, raft_port, secrets.token_hex(16))
    passwords = place / "pgpass"
    passwords.touch(0o600)
    passwords.write_text(f"*:*:*:postgres:{trial.secret}\n")
    os.environ["PGPASSFILE"] = str(passwords)
    with ExitStack() as stack:
        stack.callback(trial.stop)
        trial.start_raft()
        for member in members.values():
            trial.configure_member(member)
            trial.start_member(member)
        for number, shard in enumerate(trial.shards):
            trial.await_settled(shard)
            leader = members[trial.leader(shard)]
            with psycopg.connect(trial.dsn(leader, database="postgres"), autocommit=True) as session:
                session.execute(f"CREATE DATABASE {DATABASE}")
            create_bank(trial.dsn(leader), shard=number)
        trial.fleet = describe(trial)
        trial.writer = threading.Thread(target=trial.write, daemon=True)
        trial.writer.start()
        stack.callback(trial.stop_writing)
        warned = [one["warning"] for one in trial.command("init")["surroundings"]]
        if warned != ["patroni"]:
            trial.faults.append(f"init warns of {warned}")
        trial.command("create", NAME)
        yield trial


def main() -> int:
    """Run the trial; return the exit code."""
    parent = shared_temporary_directory()
    with tempfile.TemporaryDirectory(prefix="patroni-", dir=parent) as folder, chdir(folder), ExitStack() as stack:
        place = Path(folder)
        # The servers' account enters the folder.
        place.chmod(0o711)
        try:
            version = install(place / "environment", server_programs().account)
        except NotInstalledError as error:
            say(f"Patroni can't be installed: {error}")
            return NOT_INSTALLED
        say(version)
        servers = start_fleet(place / "target", shards=2, backups=0)
        stack.callback(stop_fleet, place / "target", delete=True)
        target = configure_fleet(servers, place / "target.toml", f"file://{place}/other-store")
        trial = stack.enter_context(clusters(place, place / "environment"))
        try:
            trial.run()
            trial.judge(target)
        except (AssertionError, psycopg.Error, subprocess.SubprocessError) as error:
            trial.faults.append(str(error))
            for log in sorted(place.glob("*.log")):
                say(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-30:]))
        for fault in trial.faults:
            say(f"FAULT {fault}")
        return 1 if trial.faults else 0


if __name__ == "__main__":
    sys.exit(main())
