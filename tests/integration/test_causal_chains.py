"""A Jepsen-style test: four shards run causal chains and the bank, increments are taken at random times and restored.

The shards run four versions of PostgreSQL; every other round of the long form has standbys, which decode from 16 on.

Every restored state must be consistent in itself (foreign keys, twins, chains without a hole, the bank's sums). It must
also agree with the clients' journal: no acknowledged commit is lost, and there is no row that no client wrote. For most
cuts the markers reach the shards at different times, as over a bad network. Two-phase transactions stay open over
several cuts, prepared everywhere or committed on one shard only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.snapshots.create.make_cut
from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import open_session
from cutline.embedded.fleet import EmbeddedFleet
from cutline.nodes.connections import with_database
from cutline.snapshots.records.commit import Commit
from cutline.wal.cut.cut_values import Cut
from cutline.wal.cut.markers import Marker, WrittenMarker, write_markers
from cutline.wal.cut.resolve import NodeWindow, resolve
from tests.causal.chain import HALF, Calendar, ChainClient
from tests.causal.journal import Occurrences, TakenIncrement, Transaction, count_occurrences, find_disagreements
from tests.causal.state import ChainState, create_chains, find_faults, read_state
from tests.causal.workload import CausalWorkload
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.run.soak import SEED, SOAK_SECONDS
from tests.servers.dealt import DECODING_STANDBYS
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, Server, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.integration.conftest import FleetFactory

NAME = "chains"
BACK = "chains_back"
INCREMENTS = 30 if SOAK_SECONDS else 7
# How many of the increments and the full snapshot are restored.
JUDGED = INCREMENTS + 1 if SOAK_SECONDS else 2
PAUSE_SECONDS_MAX = 1.0
# The maximum delay of a cut's markers; every cut draws one of these.
MARKER_SECONDS_MAX = (0.0, 0.02, 0.1, 0.3)
SHORT_SECONDS_MAX = 900
ROUND_SECONDS_MAX = 1200


@dataclass(slots=True)
class Increments:
    """The chain of one round: its commits, and when each create ran."""

    runs: Runs
    commits: list[Commit] = field(default_factory=list)
    taken: list[TakenIncrement] = field(default_factory=list)

    def take(self) -> None:
        """Take the full snapshot first, and an increment in every later call."""
        started = time.monotonic()
        self.commits.append(self.runs.increment(NAME) if self.commits else self.runs.full(NAME))
        self.taken.append(TakenIncrement(len(self.taken), started, time.monotonic()))

    def restore(self, number: int) -> ChainState:
        """Restore an increment, assert the bank's invariants, and return the state for the checks of the chains."""
        target = replace(self.runs.fleet, nodes=tuple(with_database(n, BACK) for n in self.runs.fleet.primaries))
        self.runs.restore(NAME, target, number)
        dsns = [node.dsn for node in target.primaries]
        try:
            invariants = read_invariants(dsns)
            assert invariants.hold, (number, invariants)
            state = read_state(dsns)
        finally:
            for node in target.primaries:
                drop_database(with_database(node, "postgres").dsn)
        self.taken[number] = replace(self.taken[number], rows=state.rows)
        return state


def drop_database(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {BACK} WITH (FORCE)")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did."""

    seed: int
    increments: int
    raised: int
    occurred: Occurrences
    taking_seconds: float
    seconds: float

    def __str__(self) -> str:
        done = self.occurred
        return (
            f"CUTLINE_SEED={self.seed}: {self.increments} increments, {self.raised} with a position raised; "
            f"{done.transactions} transactions, {done.links} links, {done.trims} trims, {done.tagged} tagged; "
            f"{done.held} held ({done.rolled_back} rolled back), {done.half} half committed, {done.early} times early; "
            f"0 torn; all taken after {self.taking_seconds:.0f} s, {JUDGED} restored after {self.seconds:.0f} s"
        )


def late_markers(chance: random.Random) -> Callable[..., dict[str, WrittenMarker]]:
    """`write_markers` as over a network that delays every message differently."""

    def write_late(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, WrittenMarker]:
        latest = chance.choice(MARKER_SECONDS_MAX)
        delays = {node: chance.uniform(0, latest) for node in connections}

        def write(node: str) -> WrittenMarker:
            time.sleep(delays[node])
            return write_markers({node: connections[node]}, marker)[node]

        with ThreadPoolExecutor(max_workers=len(connections)) as threads:
            return dict(zip(connections, threads.map(write, connections), strict=True))

    return write_late


def servers_for(*, standbys: bool) -> list[Server | None]:
    """A server of each version, or with standbys of each that can have them, and the wheel's."""
    if standbys:
        return [*(require_server(version) for version in MAJORS if version >= DECODING_STANDBYS), None]
    return [require_server(version) for version in MAJORS]


def run_round(runs: Runs, embedded: EmbeddedFleet, seed: int, monkeypatch: pytest.MonkeyPatch) -> Round:
    """Take a snapshot and its increments under the workload; restore and judge JUDGED of them."""
    began = time.monotonic()
    chance = random.Random(f"{seed} increments")
    dsns = embedded.dsns()
    for dsn in dsns:
        create_chains(dsn)
    runs.init()
    increments = Increments(runs)
    with monkeypatch.context() as patched, CausalWorkload(dsns, seed) as workload:
        patched.setattr(cutline.snapshots.create.make_cut, "write_markers", late_markers(chance))
        workload.wait(0.5)
        # Creating a full snapshot's slots waits for prepared transactions; later cuts wait for nothing.
        increments.take()
        workload.calendar.may_hold = True
        for _ in range(INCREMENTS):
            workload.wait(chance.uniform(0, PAUSE_SECONDS_MAX))
            increments.take()
            workload.calendar.cuts += 1
    taking_seconds = time.monotonic() - began
    judged = sorted([*chance.sample(range(INCREMENTS), JUDGED - 1), INCREMENTS])
    faults = [f"increment {n}: {fault}" for n in judged for fault in find_faults(increments.restore(n))]
    faults += find_disagreements(workload.journal, [increments.taken[number] for number in judged])
    assert faults == []
    assert_commits_agree(increments, workload.journal)
    cuts = [commit.cut.nodes for commit in increments.commits]
    raised = sum(any(node.position > node.start for node in nodes) for nodes in cuts)
    happened = count_occurrences(workload.journal, increments.taken)
    return Round(seed, INCREMENTS, raised, happened, taking_seconds, time.monotonic() - began)


def assert_commits_agree(increments: Increments, journal: list[Transaction]) -> None:
    """Assert that the commits agree with the clients' journal about open transactions."""
    before = TakenIncrement(-1, 0.0, 0.0)
    for taken, commit in zip(increments.taken, increments.commits, strict=True):
        cut = commit.cut
        undecided = {found.node: {entry.global_id for entry in found.undecided} for found in cut.nodes}
        for one in journal:
            if one.is_held_throughout(taken):
                assert all(one.gid in undecided[f"s{shard + 1}"] for shard in one.shards), (taken.number, one)
        # A transaction that is half committed over several cuts is included early in the first of them.
        early = [one for one in journal if one.is_half_committed_throughout(taken) and not one.may_be_in(before)]
        assert cut.included_early >= len(early), (taken.number, cut.included_early, early)
        before = taken


def assert_something_happened(round_: Round) -> None:
    """Assert that every interesting case occurred; otherwise the round would prove nothing."""
    done = round_.occurred
    assert done.held - done.rolled_back >= 1, round_
    assert done.rolled_back >= 2, round_
    assert done.half >= 2, round_
    assert done.early >= round_.increments // 2, round_
    assert done.trims >= round_.increments, round_
    assert done.tagged >= round_.increments, round_
    assert done.links >= 20 * round_.increments, round_
    assert round_.raised >= 2, round_


@pytest.mark.timeout(max(SHORT_SECONDS_MAX, SOAK_SECONDS + ROUND_SECONDS_MAX))
def test_no_increment_tears_a_transaction_or_loses_an_acknowledged_commit(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deadline = time.monotonic() + SOAK_SECONDS
    rounds: list[Round] = []
    while not rounds or time.monotonic() < deadline:
        seed = SEED + len(rounds)
        print(f"CUTLINE_SEED={seed}")  # noqa: T201  # shown when the test fails
        directory = tmp_path / f"round-{len(rounds)}"
        has_standbys = bool(SOAK_SECONDS) and len(rounds) % 2 == 0
        servers = servers_for(standbys=has_standbys)
        # A long run must not keep the fleets of all its rounds.
        with fleet_of(directory, servers, backups=int(has_standbys), settings={"fsync": "on"}) as embedded:
            fleet = configure_fleet(embedded, directory / "described.toml", f"file://{tmp_path}/store-{len(rounds)}")
            runs = Runs(fleet, Ready(spark))
            rounds.append(run_round(runs, embedded, seed, monkeypatch))
            report = runs.check_one(NAME)
        assert report.conflicts == []
        assert report.result == ("valid" if has_standbys else "inconclusive"), report
        with capsys.disabled():
            print(f"\n{rounds[-1]}")  # noqa: T201  # the figures are what a long run is for
        assert_something_happened(rounds[-1])


def cut_at_the_start_markers(windows: Mapping[str, NodeWindow]) -> Cut:
    """Resolve every node alone, as separate backups would: no position is raised, nothing is included early."""
    alone = [resolve({node: window}) for node, window in windows.items()]
    nodes = tuple(node for cut in alone for node in cut.nodes)
    return Cut(nodes, sum(cut.global_transactions for cut in alone), 0, sum(cut.in_flight for cut in alone))


def test_a_cut_at_the_start_markers_alone_is_found_torn(
    fleet_factory: FleetFactory, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = fleet_factory(shards=2)
    runs = Runs(configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store"), Ready(spark))
    for dsn in embedded.dsns():
        create_chains(dsn)
    runs.init()
    increments = Increments(runs)
    increments.take()
    with ExitStack() as opened:
        sessions = [opened.enter_context(closing(open_session(dsn))) for dsn in embedded.dsns()]
        chain = ChainClient(sessions, 0, random.Random(SEED), Calendar(may_hold=True), [HALF, HALF, HALF, HALF])
        chain.grow()
        chain.grow()
        increments.take()
        chain.decide_all()
        chain.grow()
        chain.grow()
        monkeypatch.setattr(cutline.snapshots.create.make_cut, "resolve", cut_at_the_start_markers)
        increments.take()
        chain.decide_all()
    assert find_faults(increments.restore(0)) == []
    assert find_faults(increments.restore(1)) == []
    assert find_disagreements(chain.journal, increments.taken[:2]) == []
    faults = find_faults(increments.restore(2))
    assert len([fault for fault in faults if fault.startswith("torn")]) == 2, faults
    found = find_disagreements(chain.journal, increments.taken)
    assert len([fault for fault in found if fault.startswith("torn: increment 2")]) == 2, found
    assert len([fault for fault in found if fault.startswith("lost: increment 2")]) == 2, found
