"""From every version to the same and to every newer one, with each choice of programs, over each kind of connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.embedded.bank import read_invariants
from cutline.fleet.progress import Silent
from cutline.nodes import programs
from cutline.nodes.programs import ProgramsUnfitError, wheel_bin_directory
from cutline.nodes.programs import programs_for as programs_for_node
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.obstacles import ObstaclesError
from cutline.restore.targets.target import TargetUnfitError
from cutline.snapshots.create.initialise import initialise
from tests.chains.exact_chain import differences
from tests.integration.matrix.chains import CROSSED_MIN, DATABASE, TARGET, TOGETHER, Matrix, state_of
from tests.run.soak import SOAK_SECONDS
from tests.servers.fleets import fleet_of
from tests.servers.hosts import WAYS, Way
from tests.servers.installed import MAJORS, require_server

# The first test waits for the chains.
pytestmark = pytest.mark.timeout(900)
NEWEST = max(MAJORS)
PAIRS = [(source, target) for source in MAJORS for target in MAJORS if source <= target]


@dataclass(frozen=True, slots=True)
class Restored:
    """One restore: of a chain's shard, on a server, by programs (None: the wheel's), over a connection."""

    chain: str
    source: int
    target: int
    programs: int | None
    way: Way
    few: bool

    def __str__(self) -> str:
        """What the test is called."""
        by = f"by-{self.programs or 'wheel'}-over-{self.way}"
        return f"{self.source}-to-{self.target}-{self.chain}-{by}{'-few' if self.few else ''}"


def programs_for(source: int, target: int) -> list[tuple[str, int | None]]:
    """The chains, by who wrote their DDL, with the programs that can read it, those of the target first."""
    own = sorted(range(source, NEWEST + 1), key=lambda version: (version != target, version))
    return [(TOGETHER, None), *((str(source), version) for version in own), (TOGETHER, NEWEST), (str(source), None)]


def cases() -> Iterator[Any]:
    """In the short form, of each pair the default and one restore over each connection, with other programs in turn.

    `make test` restores each pair once: by default, or over one of the connections in turn.
    """
    for number, (source, target) in enumerate(PAIRS):
        choices = programs_for(source, target)
        if SOAK_SECONDS:
            for (chain, programs), way, few in product(choices, WAYS, (False, True)):
                yield Restored(chain, source, target, programs, way, few)
            continue
        is_default = number % 2 == 0
        default = Restored(TOGETHER, source, target, None, "socket", few=False)
        yield pytest.param(default, marks=() if is_default else pytest.mark.rest)
        for turn, way in enumerate(WAYS):
            chain, programs = choices[1 + (number + turn) % (len(choices) - 1)]
            case = Restored(chain, source, target, programs, way, few=(number + turn) % 2 == 0)
            yield pytest.param(case, marks=() if not is_default and turn == number % len(WAYS) else pytest.mark.rest)


@pytest.fixture
def clean(matrix: Matrix) -> Iterator[None]:
    """Drop what a test restores."""
    yield
    for node in matrix.servers.values():
        with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
            query = "SELECT quote_ident(datname) FROM pg_database WHERE datname ^@ %s"
            for (name,) in connection.execute(query, (TARGET,)).fetchall():
                connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("increment", [0, 1])
def test_all_versions_together_are_restored_at_one_cut(matrix: Matrix, increment: int) -> None:
    """The full snapshot was taken under transfers across all versions; at the first increment the fleet was idle."""
    nodes = {version: matrix.node(version, version, TARGET, "socket") for version in MAJORS}
    matrix.chains[TOGETHER].restore(TOGETHER, matrix.fleet(nodes, "unused"), increment)
    dsns = [node.dsn for node in nodes.values()]
    assert read_invariants(dsns).hold
    if increment:
        found = [state_of(dsn) for dsn in dsns]
        assert [one.rows for one in found] == [one.rows for one in matrix.states[TOGETHER][increment].values()]
        for one, state in zip(found, matrix.states[TOGETHER][increment].values(), strict=True):
            assert differences(one.ddl, state.ddl) == []


def test_a_check_of_several_versions_finds_no_conflict(matrix: Matrix) -> None:
    for chain, report in matrix.checked.items():
        assert report.conflicts == []
        # A fleet without standbys has one copy of each row.
        assert {one.what.partition(" ")[0] for one in report.skipped} == {"rows"}
        assert report.compared.changes > 0
        assert (report.compared.transactions >= CROSSED_MIN) == (chain == TOGETHER)


@pytest.mark.parametrize(("source", "target"), [(b, a) for a, b in PAIRS if a != b])
def test_an_older_version_is_refused_by_name(matrix: Matrix, source: int, target: int) -> None:
    node = matrix.node(source, target, TARGET, "socket")
    what = f"node {node.id}: PostgreSQL {target} is older than the snapshot's {source}"
    with pytest.raises(TargetUnfitError, match=what):
        matrix.chains[str(source)].restore(str(source), matrix.fleet({source: node}, "unused"))


@pytest.mark.parametrize("programs", [version for version in MAJORS if version < NEWEST])
def test_programs_that_are_too_old_are_refused_by_name(matrix: Matrix, programs: int) -> None:
    """pg_dump must not be older than its server, and pg_restore not older than the pg_dump that wrote the DDL."""
    newer = programs + 1
    with pytest.raises(ProgramsUnfitError, match=f"there is no pg_dump {newer} or newer in "):
        initialise(matrix.fleet({newer: matrix.node(newer, newer, DATABASE, "socket")}, "refused", programs), Silent())
    target = matrix.fleet({programs: matrix.node(programs, programs, TARGET, "socket")}, "unused", programs)
    with pytest.raises(ProgramsUnfitError, match=f"needs pg_restore {NEWEST} or newer, but there is none in "):
        matrix.chains[TOGETHER].restore(TOGETHER, target, scope=RestoreScope(nodes=(target.nodes[0].id,)))


@pytest.mark.parametrize("server", MAJORS)
def test_the_programs_of_the_servers_own_version_come_first(
    matrix: Matrix, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next newer ones, and those that Cutline brings only where the machine has none that are older."""
    folders = {version: require_server(version).programs for version in MAJORS}
    node = matrix.node(server, server, DATABASE, "socket")
    with psycopg.connect(node.dsn) as connection:
        for missing in (None, server):
            there = [folder for version, folder in folders.items() if version not in (missing, NEWEST)]
            monkeypatch.setattr(programs, "installed_folders", there.copy)
            expected = server if missing is None else min(server + 1, NEWEST)
            found = programs_for_node(node, connection)
            assert (found.version, found.folder) == (expected, (folders | {NEWEST: wheel_bin_directory()})[expected])


def test_a_server_that_is_built_without_xml_and_lz4_is_refused_at_once(matrix: Matrix, tmp_path: Path) -> None:
    """The wheel's: both are named together, by a dry run too."""
    with fleet_of(tmp_path / "fleet", [None], schema=False) as without:
        node = replace(matrix.node(NEWEST, NEWEST, TARGET, "socket"), dsn=without.primaries[0].dsn(TARGET))
        request = RestoreRequest(TOGETHER, 1, scope=RestoreScope(nodes=(node.id,)))
        plan = plan_restore(matrix.chains[TOGETHER].fleet, matrix.fleet({NEWEST: node}, "unused"), request)
        with pytest.raises(ObstaclesError) as raised:
            preview_restore(plan, Silent())
        with pytest.raises(ObstaclesError):
            restore_fleet(plan, matrix.spark, Silent())
        with psycopg.connect(without.primaries[0].dsn("postgres")) as connection:
            databases = connection.execute("SELECT datname FROM pg_database ORDER BY 1").fetchall()
    assert databases == [("postgres",), ("template0",), ("template1",)]
    obstacles = {one["message"] for one in raised.value.details["obstacles"]}
    start = f"node {node.id}: its PostgreSQL is built without "
    assert obstacles == {
        f"{start}XML support, but the snapshot has XML in public.journal.paper",
        f"{start}lz4, with which columns of the snapshot are compressed: public.customer.note",
    }


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_a_version_is_restored_on_it_and_on_every_newer_one(matrix: Matrix, case: Restored) -> None:
    node = matrix.node(case.source, case.target, TARGET, case.way, few=case.few)
    target = matrix.fleet({case.source: node}, "unused", case.programs)
    runs = matrix.chains[case.chain]
    runs.restore(case.chain, target, scope=RestoreScope(nodes=(node.id,)))
    found = state_of(matrix.servers[case.target].dsn(TARGET))
    expected = matrix.states[case.chain][-1][case.source]
    assert found.rows == expected.rows
    assert differences(found.ddl, matrix.expected_ddl(case.chain, case.source, case.target)) == []
