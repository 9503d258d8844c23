"""The chains of the matrix, and the state of their databases at every restore point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from cutline.check.report import SnapshotReport
from cutline.embedded.bank import create_bank
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import Fleet, Node
from cutline.nodes.programs import run_tool, wheel_bin_directory
from cutline.nodes.sessions import in_parallel
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.integration.matrix.shop import CHANGES, LATER, SCHEMA
from tests.integration.refusing import execute
from tests.servers.hosts import Hosts, Way, make_reachable
from tests.servers.installed import MAJORS, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE, TARGET = "matrix", "matrix_back"
# The chain of all versions; those of one version are called by it.
TOGETHER = "together"
FEW = 6
CROSSED_MIN, WAIT_SECONDS = 40, 0.05
DDL = ("--schema-only", "--no-publications", "--restrict-key=x")
# The one line that depends on the server alone.
VERSION = "-- Dumped from database version"
# pg_dump sets it for servers that know it.
NEWER_SETTING = "SET transaction_timeout"


@dataclass(frozen=True, slots=True)
class State:
    """A database as PostgreSQL prints it: the rows of its tables, and its DDL."""

    rows: Mapping[str, bytes]
    ddl: list[str]


def ddl_of(dsn: str) -> list[str]:
    lines = run_tool("pg_dump", "--dbname", dsn, *DDL, seconds_max=60).stdout.splitlines()
    return [line for line in lines if not line.startswith(VERSION)]


def state_of(dsn: str) -> State:
    return State(sorted_copies(dsn), ddl_of(dsn))


@dataclass(slots=True)
class Matrix:
    """The servers, by major version, and the chains on them, by the name of the chain."""

    servers: Mapping[int, EmbeddedNode]
    hosts: Hosts
    template: Fleet
    spark: Ready
    folder: Path
    chains: dict[str, Runs] = field(default_factory=dict)
    # The states at the restore points of a chain, by the version of the shard.
    states: dict[str, list[Mapping[int, State]]] = field(default_factory=dict)
    checked: dict[str, SnapshotReport] = field(default_factory=dict)
    _as_dumped: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)

    def node(self, shard: int, server: int, database: str, way: Way, *, few: bool = False) -> Node:
        """The node of a shard, by major versions: where it is on `server`, reached this way."""
        dsn = self.hosts.dsn(self.servers[server], database, way)
        return Node(self.servers[shard].id, dsn, connections_max=FEW if few else None)

    def fleet(self, shards: Mapping[int, Node], store: str, programs: int | None = None) -> Fleet:
        """The fleet of these nodes; its programs are the wheel's, or those of a major version."""
        folder = require_server(programs).programs if programs else wheel_bin_directory()
        nodes = tuple(replace(node, programs=folder) for node in shards.values())
        return replace(self.template, nodes=nodes, store=StoreLocation(f"file://{self.folder}/{store}"))

    def record(self, chain: str, *versions: int) -> None:
        dsns = {version: self.servers[version].dsn(DATABASE) for version in versions}
        states = in_parallel(state_of, list(dsns.values()))
        self.states.setdefault(chain, []).append(dict(zip(dsns, states, strict=True)))

    def expected_ddl(self, chain: str, source: int, target: int) -> list[str]:
        """The newest DDL of a chain's shard as a server of another version prints it once psql has run it there."""
        ddl, key = self.states[chain][-1][source].ddl, (chain, source, target)
        if source != target and key not in self._as_dumped:
            script = self.folder / "ddl.sql"
            script.write_text("".join(f"{line}\n" for line in ddl if not line.startswith(NEWER_SETTING)))
            server = self.servers[target]
            execute(server.dsn("postgres"), f"CREATE DATABASE {TARGET}_as_dumped TEMPLATE template0")
            dsn = server.dsn(f"{TARGET}_as_dumped")
            run_tool("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(script), "-d", dsn)
            self._as_dumped[key] = ddl_of(dsn)
            execute(server.dsn("postgres"), f"DROP DATABASE {TARGET}_as_dumped")
        return self._as_dumped.get(key, ddl)

    def change(self, script: tuple[str, ...], *versions: int) -> None:
        in_parallel(lambda version: execute(self.servers[version].dsn(DATABASE), *script), versions)


@contextmanager
def matrix_on(embedded: EmbeddedFleet, folder: Path, spark: SparkSession) -> Iterator[Matrix]:
    """Make the databases and the chains; at the end drop all of it."""
    servers = dict(zip(MAJORS, embedded.primaries, strict=True))
    template = configure_fleet(embedded, folder / "fleet.toml", f"file://{folder}/unused")
    matrix = Matrix(servers, make_reachable(embedded, folder), template, Ready(spark), folder)
    with ExitStack() as stack:
        for shard, node in enumerate(servers.values()):
            stack.callback(drop_databases, node)
            execute(node.dsn("postgres"), f"CREATE DATABASE {DATABASE}")
            create_bank(node.dsn(DATABASE), shard=shard)
        stack.enter_context(
            dropping_slots(matrix.fleet({v: matrix.node(v, v, DATABASE, "socket") for v in servers}, "none"))
        )
        matrix.change(SCHEMA, *servers)
        make_chain_together(matrix)
        for version in servers:
            make_chain_alone(matrix, version)
        yield matrix


def make_chain_together(matrix: Matrix) -> None:
    """All versions in one fleet: created under load by socket, then over TCP, and over TLS with few connections."""
    versions = tuple(matrix.servers)

    def runs(way: Way, *, few: bool = False, programs: int | None = None) -> Runs:
        nodes = {version: matrix.node(version, version, DATABASE, way, few=few) for version in versions}
        return Runs(matrix.fleet(nodes, TOGETHER, programs), matrix.spark)

    matrix.chains[TOGETHER] = runs("socket")
    matrix.chains[TOGETHER].init()
    dsns = [node.dsn(DATABASE) for node in matrix.servers.values()]
    with BankWorkload(dsns, clients=4, pause_seconds=0.005) as bank:
        began = bank.committed.cross
        matrix.chains[TOGETHER].full(TOGETHER)
        while bank.committed.cross < began + CROSSED_MIN:
            assert bank.wait(WAIT_SECONDS)
        bank.stop()
    # Nobody knows the state in the middle of the load; its invariants are tested.
    matrix.states[TOGETHER] = [{}]
    for script, command in zip(CHANGES, (runs("tcp"), runs("tls", few=True, programs=max(versions))), strict=True):
        matrix.change(script, *versions)
        matrix.record(TOGETHER, *versions)
        command.increment(TOGETHER)
    matrix.checked[TOGETHER] = runs("tcp").check_one(TOGETHER)


def make_chain_alone(matrix: Matrix, version: int) -> None:
    """A fleet of one version, by its own programs, over TLS with few connections."""
    name, node = str(version), matrix.node(version, version, DATABASE, "tls", few=True)
    runs = matrix.chains[name] = Runs(matrix.fleet({version: node}, name, version), matrix.spark)
    runs.init()
    matrix.record(name, version)
    runs.full(name)
    matrix.change(LATER, version)
    matrix.record(name, version)
    runs.increment(name)
    matrix.checked[name] = runs.check_one(name)


def drop_databases(node: EmbeddedNode) -> None:
    with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
        query = "SELECT quote_ident(datname) FROM pg_database WHERE datname ^@ %s"
        for (name,) in connection.execute(query, (DATABASE,)).fetchall():
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
