"""A bank on PostgreSQL 18 and 15 with WAL archives and base backups, and their recovery to a plan in new servers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from msgspec.structs import replace

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode, delete_server, log_tail, running_pid, start_server
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.programs import Programs, run_as, server_programs
from cutline.nodes.sessions import in_parallel
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.servers.fleets import fleet_of
from tests.servers.installed import SERVERS, Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 300
# A server's working directory is its data directory.
ARCHIVING = {"fsync": "off", "archive_mode": "on", "archive_command": "mkdir -p ../wal && cp %p ../wal/%f"}
# A server without hot standby accepts no session before it is promoted.
RECOVERING = ["archive_mode = off", "hot_standby = off"]
RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class PhysicalPlace:
    """The servers, the fleet and its commands, and a target for restores: another database on the same servers."""

    servers: EmbeddedFleet
    fleet: Fleet
    runs: Runs
    target: Fleet
    numbers: Iterator[int]

    def programs(self, node: EmbeddedNode) -> Programs:
        programs = server_programs()
        return replace(programs, bin_directory=node.programs) if node.programs else programs

    def back_up(self) -> None:
        """Take a base backup of every node."""

        def back_up(node: EmbeddedNode) -> None:
            source = ["--dbname", node.dsn("postgres"), "--pgdata", str(node.folder / "backup"), "--checkpoint=fast"]
            self.programs(node).run("pg_basebackup", *source, "--no-sync", seconds_max=600)

        in_parallel(back_up, self.servers.primaries)

    def archive(self) -> None:
        """Wait until the WAL of every node, as it is now, is archived."""
        for node in self.servers.primaries:
            with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
                (name,) = connection.execute("SELECT pg_walfile_name(pg_current_wal_lsn())").fetchone() or ("",)
                connection.execute("SELECT pg_switch_wal()")
            deadline = time.monotonic() + SECONDS_MAX
            while not (node.folder / "wal" / name).exists():
                assert time.monotonic() < deadline, f"{name} of {node.id} is not archived"
                time.sleep(0.05)

    @contextmanager
    def recovered(self, plan: Sequence[Mapping[str, Any]]) -> Iterator[list[EmbeddedNode]]:
        """The nodes' backups, recovered in new servers as the plan says; before its statements have run."""
        nodes = [self.new_node(self.servers.node(one["node"])) for one in plan]

        def recover(pair: tuple[EmbeddedNode, Mapping[str, Any]]) -> None:
            node, one = pair
            self._copy(self.servers.node(one["node"]), node)
            wal = self.servers.node(one["node"]).folder / "wal"
            lines = [*RECOVERING, f"restore_command = 'cp {wal}/%f %p'", *one["postgresql_auto_conf"]]
            with (node.data_directory / "postgresql.auto.conf").open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
            start_server(self.programs(node), node)
            await_promoted(node)

        try:
            in_parallel(recover, list(zip(nodes, plan, strict=True)))
            yield nodes
        finally:
            in_parallel(delete_server, nodes)

    def new_node(self, source: EmbeddedNode) -> EmbeddedNode:
        """A server of the same version as `source`, without data."""
        programs, number = self.programs(source), next(self.numbers)
        folder = source.folder.parent / f"{source.id}r{number}"
        folder.mkdir(mode=0o700)
        if programs.account:
            os.chown(folder, programs.account.uid, programs.account.gid)
        return EmbeddedNode(f"{source.id}-{number}", folder, None, source.programs)

    def _copy(self, source: EmbeddedNode, node: EmbeddedNode) -> None:
        account = self.programs(source).account
        run_as(account, ["cp", "-a", str(source.folder / "backup"), str(node.data_directory)], seconds_max=60)
        run_as(account, ["touch", str(node.data_directory / "recovery.signal")], seconds_max=60)


@contextmanager
def physical_place(folder: Path, spark: SparkSession, both: Server | None = None) -> Iterator[PhysicalPlace]:
    """Start two shards of the server `both`; without it, of the wheel's and, where it is installed, PostgreSQL 15."""
    chosen = [both, both] if both else [None, SERVERS.get(15)]
    with fleet_of(folder / "fleet", chosen, settings=ARCHIVING) as servers:
        fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store")
        target = folder / "target.toml"
        target.write_text(fleet.path.read_text().replace("/bank?", f"/{RESTORED}?"))
        with dropping_slots(fleet):
            yield PhysicalPlace(servers, fleet, Runs(fleet, Ready(spark)), load_fleet(target), count())


def await_promoted(node: EmbeddedNode) -> None:
    """Wait until the server has recovered and accepts sessions."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            psycopg.connect(node.dsn()).close()
        except psycopg.OperationalError:
            assert running_pid(node), log_tail(node)
            assert time.monotonic() < deadline, log_tail(node)
            time.sleep(0.05)
        else:
            return


def run_all(node: EmbeddedNode, statements: Sequence[str]) -> None:
    """Run each statement by itself."""
    with psycopg.connect(node.dsn(), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def prepared_on(node: EmbeddedNode) -> list[str]:
    """The gids that are prepared in the node's bank."""
    with psycopg.connect(node.dsn()) as connection:
        query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid"
        return [gid for (gid,) in connection.execute(query)]
