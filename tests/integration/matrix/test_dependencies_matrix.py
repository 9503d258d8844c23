"""Every kind of dependency, in both directions of size, from each version to it and to every newer one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.server import EmbeddedNode
from cutline.nodes.programs import run_tool
from cutline.restore.scope.scope import RestoreScope
from tests.chains.exact_chain import differences
from tests.commands.snapshot_runs import Runs, dropping_slots, sorted_copies
from tests.integration.matrix.chains import DATABASE, DDL, Matrix
from tests.integration.refusing import execute
from tests.servers.installed import MAJORS
from tests.tables.dependencies import SIZES, script_of

# Dropped with those of the matrix.
NAME, AGAIN, EXPECTED = f"{DATABASE}_depending", f"{DATABASE}_depending_again", f"{DATABASE}_depending_expected"
PAIRS = [(source, target) for source in MAJORS for target in MAJORS if source <= target]
# All of them are in `make rest`: tests/integration/test_dependencies.py restores every dependency on one version.
pytestmark = pytest.mark.rest
# An index, and a view's rows, that no server from here on makes itself: a restore does, of an older server's.
RESTRICTED = 17
# From here on an inherited column that is NOT NULL of its own is told from one that inherits this, too.
NAMED_NOT_NULL = 18
ONLY_OLDER = ("orders_label_norm", "orders_slow", "normed")


@dataclass(frozen=True, slots=True)
class Depending:
    """The chain of a fleet with one shard of each version, and how these are printed."""

    runs: Runs
    rows: Mapping[int, dict[str, bytes]]


@pytest.fixture(scope="module")
def depending(matrix: Matrix, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Depending]:
    folder = tmp_path_factory.mktemp(NAME)
    for version, server in matrix.servers.items():
        make(server, NAME, version, folder)
    fleet = matrix.fleet({version: matrix.node(version, version, NAME, "socket") for version in MAJORS}, NAME)
    with dropping_slots(fleet):
        runs = Runs(fleet, matrix.spark)
        runs.init()
        runs.full(NAME)
        yield Depending(runs, {version: rows_of(server.dsn(NAME)) for version, server in matrix.servers.items()})


def make(server: EmbeddedNode, database: str, version: int, folder: Path) -> None:
    """Make the schema of a version in a new database."""
    script = folder / f"{version}.sql"
    script.write_text(script_of(version * 10_000))
    execute(server.dsn("postgres"), f"CREATE DATABASE {database} TEMPLATE template0")
    run_tool("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(script), "-d", server.dsn(database))


def rows_of(dsn: str) -> dict[str, bytes]:
    # To plan a query of a table, the server reads the functions of its statistics.
    return sorted_copies(make_conninfo(dsn, options=f"-c search_path={','.join(SIZES)}"))


def ddl_of(dsn: str) -> list[str]:
    lines = run_tool("pg_dump", "--dbname", dsn, *DDL).stdout.splitlines()
    return [line for line in lines if line and not line.startswith("--")]


def without_name(line: str) -> str:
    """Without the name of a NOT NULL constraint."""
    return re.sub(r"CONSTRAINT \S+ NOT NULL", "NOT NULL", line)


@pytest.mark.parametrize(
    ("source", "target"),
    PAIRS,
    ids=str,
)
def test_every_dependency_is_restored_on_every_newer_version(
    depending: Depending, matrix: Matrix, source: int, target: int, tmp_path: Path
) -> None:
    server = matrix.servers[target]
    node = matrix.node(source, target, AGAIN, "socket", few=source % 2 == target % 2)
    try:
        depending.runs.restore(NAME, matrix.fleet({source: node}, "unused"), scope=RestoreScope(nodes=(node.id,)))
        assert rows_of(server.dsn(AGAIN)) == depending.rows[source]
        is_upgraded = source < RESTRICTED <= target
        make(server, EXPECTED, target if is_upgraded else source, tmp_path)
        found, expected = ddl_of(server.dsn(AGAIN)), ddl_of(server.dsn(EXPECTED))
        if source < NAMED_NOT_NULL <= target:
            expected = [line for line in map(without_name, expected) if not line.startswith("    NOT NULL ")]
            found = [without_name(line) for line in found]
        if is_upgraded:
            for name in ONLY_OLDER:
                assert sum(line.startswith("CREATE") and f"{name} " in line for line in found) == len(SIZES)
            # What is printed of these repeats other lines.
            expected = sorted(set(expected))
            found = sorted(set(found) & set(expected))
        assert differences(found, expected) == []
    finally:
        for database in (AGAIN, EXPECTED):
            execute(server.dsn("postgres"), f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
