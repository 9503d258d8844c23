"""The walk of promotions: a standby takes its primary's place at every crash point of a create, with and without loss.

At the point the create dies, or it goes on. What it has committed, and what the next creates commit, must restore to
what the shard's surviving server had at that cut; a restore point that has rows that were lost must be named. The same
cases are walked at every run: `make test` has one of each command, `make rest` the others. The servers stay: the one
that was the primary is rebuilt after every case, as the standby of the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import psycopg
import pytest

import cutline.snapshots.create.make_cut
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import stop_fleet
from cutline.embedded.folder import describe
from cutline.embedded.server import create_standby, delete_server, stop_server
from cutline.fleet.config import load_fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.records.commit import Commit, Increment
from cutline.snapshots.records.proven_chains import increment_numbers, read_chain
from cutline.storage.errors import BusyError, SnapshotError
from cutline.wal.drain.slots import drop_slot, slot_name
from tests.commands.changing_fleet import SEEN, ChangingFleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, names_of_snapshots, slots_of, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.faults.awaited import QUIET_SECONDS_MAX
from tests.faults.patience import impatient
from tests.faults.paused_command import run_paused
from tests.faults.points import FULL_POINTS, INCREMENT_POINTS
from tests.integration.promoting import PRIMARY, STANDBY, promote
from tests.servers.dealt import start_fleet
from tests.servers.disasters import kill_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Another chain begins after so many cases: each case copies servers again, so a chain soon becomes slow.
CASES_OF_CHAIN = 8
# With three shards, a create keeps its lock although a primary is gone, and may go on to its commit.
SHARDS = 3
# What a create may end with if a primary dies: indeterminate, unreachable, inconsistent cut. Never "refused".
CODES = {5, 6, 9}
# The drains of the standby and of its primary may be at different places: the slot of the promoted server may be ahead.
DRAINING = CrashPoint.FINISHES_WRITTEN
RESTORED_EVERY = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A promotion at a point of a create, which dies or goes on; the promoted server lacks the newest WAL, or none."""

    point: CrashPoint
    incremental: bool
    dies: bool
    loses: bool

    def __str__(self) -> str:
        words = ("increment" if self.incremental else "full", self.point.replace(" ", "_"))
        return "-".join((*words, "dies" if self.dies else "goes_on", "lossy" if self.loses else "whole"))


@contextmanager
def suppress_codes(codes: set[int]) -> Iterator[None]:
    """Let the block fail with one of these exit codes."""
    try:
        yield
    except SnapshotError as error:
        if error.exit_code not in codes:
            raise


def cases(points: tuple[CrashPoint, ...], chosen: set[str], *, incremental: bool) -> list[object]:
    """Every point: of an increment in all four ways, of a full create in two of them by turns."""
    found = []
    for number, point in enumerate(points):
        for dies in (False, True):
            for loses in (False, True):
                case = Case(point, incremental, dies, loses)
                if incremental or (dies == loses) == bool(number % 2):
                    found.append(pytest.param(case, marks=() if str(case) in chosen else pytest.mark.rest))
    return found


@dataclass(slots=True)
class Walk:
    """The fleet, whose shard s1 has a standby, and which of its two servers is the primary now."""

    place: ChangingFleet
    primary: str = PRIMARY
    number: int = 0
    chain: str = ""
    states: dict[tuple[str, int], list[dict[str, bytes]]] = field(default_factory=dict)
    seconds: list[tuple[str, float]] = field(default_factory=list)

    @property
    def standby(self) -> str:
        return STANDBY if self.primary == PRIMARY else PRIMARY

    # What happens at the points.

    def part(self) -> None:
        """Let the primary commit what its standby does not get."""
        self.place.stop(self.standby)
        self.place.execute(self.primary, f"INSERT INTO seen VALUES ({1_000_000 + self.number}, 'lost')")

    def fail_over(self, *, loses: bool) -> None:
        """Kill the primary, and promote its standby."""
        place, old, new = self.place, self.primary, self.standby
        if not loses:
            place.await_replay(new)
        kill_server(place.servers.node(old))
        if loses:
            place.servers.start_node(place.servers.node(new))
        promote(place, new)
        self.primary = new
        place.execute(new, f"INSERT INTO seen VALUES ({1_000_000 + self.number}, 'kept')")

    def rebuild(self) -> None:
        """Copy the primary into the server that was the primary before."""
        place, old = self.place, self.place.servers.node(self.standby)
        delete_server(old)
        create_standby(place.servers._programs(old), old, place.servers.node(self.primary))
        place.start(self.standby)

    def spanning(self, statement: str) -> None:
        """Do something to a transaction on two shards."""
        for node in (self.primary, "s2"):
            with psycopg.connect(self.place.fleet.node(node).dsn, autocommit=True) as connection:
                if statement.startswith("PREPARE"):
                    connection.execute("BEGIN")
                    connection.execute("INSERT INTO seen VALUES (%s, 'spans')", [2_000_000 + self.number])
                connection.execute(f"{statement} 'walk-{self.number}'".encode())

    # Creates.

    def begin_chain(self) -> None:
        """Take a full snapshot, and drop the slots of the chain before."""
        if self.chain:
            self.end_chain(self.chain)
        self.chain = f"chain-{self.number}"
        self.create_and_keep(self.chain)

    def slot(self, name: str) -> str:
        return slot_name(read_chain(self.place.fleet.store.open(), name, 0).full.operation)

    def end_chain(self, name: str) -> None:
        for node in self.place.fleet.nodes:
            drop_slot(node, self.slot(name))

    def newest(self, name: str) -> int | None:
        if name not in names_of_snapshots(self.place.fleet):
            return None
        return max(increment_numbers(self.place.fleet.store.open(), name), default=0)

    def create(self, name: str, progress: Watching | None = None) -> Commit:
        """Take the next increment of the snapshot, or the snapshot, as soon as no killed command holds the lock."""
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        request = CreateRequest(name, retries=1)
        create = create_full if self.newest(name) is None else create_increment
        while True:
            try:
                return create(self.place.fleet, request, self.place.runs.spark, progress or Silent())
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def create_and_keep(self, name: str) -> Commit:
        commit = self.create(name)
        self.states[name, commit.increment] = self.place.live_state()
        return commit

    def create_over_promotion(self, case: Case, name: str) -> None:
        """Run the case's create, which commits or fails; keep what the primaries had, in case it commits."""
        before, held = self.newest(name), list[list[dict[str, bytes]]]()
        first = (INCREMENT_POINTS if case.incremental else FULL_POINTS)[0]
        is_over = False

        def at_point(point: str, count: int) -> bool:
            nonlocal is_over
            if (point, count) == (str(first), 1) and case.loses:
                self.part()
            if (point, count) == (str(case.point), 1):
                held.append(self.place.live_state())
                self.fail_over(loses=case.loses)
                is_over = True
            return is_over and case.dies

        if case.dies:
            words = ["create", name, *(["--incremental"] if case.incremental else [])]
            assert run_paused(self.place.fleet, words, at_point) == -9
        else:

            def then(reached: Reached) -> None:
                at_point(str(reached.point), reached.count)

            with suppress_codes(CODES):
                self.create(name, Watching(then))
        assert is_over, f"{case.point} was not reached"
        if (newest := self.newest(name)) != before:
            assert newest is not None
            (self.states[name, newest],) = held

    # What must hold.

    def check_restored(self, name: str, increment: int) -> None:
        place = self.place
        place.runs.restore(name, place.target, increment)
        found = [sorted_copies(node.dsn) for node in place.target.primaries]
        assert found == self.states[name, increment], f"{name} at {increment}"

    def check_newest(self, name: str, absent: set[str]) -> None:
        """A check finds nothing wrong, and names exactly the copies that are left out."""
        request = CheckRequest(name, self.newest(name))
        (report,) = check_snapshots(self.place.fleet, request, self.place.runs.spark, Silent()).snapshots
        assert not report.conflicts
        assert {one.what for one in report.skipped if one.is_absent} == {f"the copy of {node}" for node in absent}

    def check_lost(self, commit: Commit, case: Case, held: int | None) -> None:
        """The restore point that has lost rows, `held`, is named by the next increment, and no other is."""
        assert isinstance(commit, Increment)
        renewal = commit.renewed.get(PRIMARY)
        if held is not None:
            assert renewal is not None
            assert renewal.lost is not None
            assert renewal.lost.since == held
        elif renewal is not None:
            assert renewal.lost is None or renewal.lost.since is None, renewal
        if not case.loses and renewal is not None:
            assert case.point == DRAINING, renewal
            assert f"had archived the WAL of standby {STANDBY}" in renewal.reason


@pytest.fixture(scope="module", autouse=True)
def impatient_watch() -> Iterator[None]:
    """Retry a cut at once, and give up early on a silent node."""
    with impatient() as patch:
        patch.setattr(cutline.snapshots.create.make_cut, "PAUSE_SECONDS_FIRST", 0.1)
        yield


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("promotions")
    with ExitStack() as stack:
        stack.callback(stop_fleet, folder / "fleet", delete=True)
        servers = start_fleet(folder / "fleet", shards=SHARDS, backups=1)
        stack.callback(stop_fleet, folder / "target", delete=True)
        target = start_fleet(folder / "target", shards=SHARDS, backups=0, like_shared=True)
        # Only s1 fails over.
        others = [node for node in servers.nodes if node.backup_of not in (None, PRIMARY)]
        for node in others:
            stop_server(node)
        describe(servers.directory, [node for node in servers.nodes if node not in others])
        configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store")
        # A create does without a standby that is late as soon as possible.
        path = folder / "fleet.toml"
        fleet = replace(load_fleet(path), standby_wait_seconds=1)
        into = configure_fleet(target, folder / "target.toml", f"file://{folder}/other-store")
        place = ChangingFleet(servers, into, Runs(fleet, Ready(spark)), folder)
        for primary in fleet.primaries:
            place.execute(primary.id, *SEEN)
        place.await_replay(STANDBY)
        place.runs.init()
        found = Walk(place)
        found.begin_chain()
        yield found


def begin(walk: Walk) -> None:
    """Begin a case, of which a standby is there whose copy is in the chain."""
    walk.number += 1
    if walk.place.servers.node(walk.standby) not in walk.place.servers.running():
        # The case before has failed.
        walk.rebuild()
        walk.create_and_keep(walk.chain)
    if walk.number % CASES_OF_CHAIN == 0:
        walk.begin_chain()
    walk.place.write()
    walk.place.await_replay(walk.standby)


INCREMENT_CASE = "increment-commit_stored-goes_on-lossy"
FULL_CASE = "full-base_copied-dies-whole"


@pytest.mark.parametrize("case", cases(INCREMENT_POINTS, {INCREMENT_CASE}, incremental=True), ids=str)
def test_a_promotion_during_an_increment_mixes_no_histories(walk: Walk, case: Case) -> None:
    began = time.monotonic()
    begin(walk)
    # A copy that begins again waits for prepared transactions.
    is_held = not case.loses and case.point != DRAINING
    if is_held:
        walk.spanning("PREPARE TRANSACTION")
        walk.place.await_replay(walk.standby)
    before = walk.newest(walk.chain)
    walk.create_over_promotion(case, walk.chain)
    newest = walk.newest(walk.chain)
    is_committed = newest != before
    walk.place.write()
    commit = walk.create_and_keep(walk.chain)
    walk.check_lost(commit, case, newest if is_committed and case.loses else None)
    assert isinstance(commit, Increment)
    assert commit.absent.keys() == {STANDBY}
    walk.check_newest(walk.chain, {STANDBY})
    if is_held:
        walk.spanning("COMMIT PREPARED")
    walk.place.write()
    walk.rebuild()
    # The rebuilt server is copied, and the transaction that was prepared on the lost server is in the chain.
    commit = walk.create_and_keep(walk.chain)
    assert isinstance(commit, Increment)
    assert commit.renewed.keys() == {STANDBY}
    assert not commit.absent
    # What the create that died has left on the server that was away could be settled only now.
    assert read_open_intents(walk.place.fleet.store.open()) == []
    for number in range(newest if is_committed and newest else commit.increment - 1, commit.increment + 1):
        walk.check_restored(walk.chain, number)
    walk.seconds.append((str(case), time.monotonic() - began))


def test_restore_points_of_the_walk_are_what_they_were(walk: Walk) -> None:
    reports = check_snapshots(walk.place.fleet, CheckRequest(), walk.place.runs.spark, Silent()).snapshots
    assert [conflict for report in reports for conflict in report.conflicts] == []
    # Each was restored in its case.
    for name, number in [*walk.states][::RESTORED_EVERY]:
        walk.check_restored(name, number)
    for case, seconds in walk.seconds:
        print(f"{case:60} {seconds:6.1f} s")  # noqa: T201  # the table of the cases


@pytest.mark.parametrize("case", cases(FULL_POINTS, {FULL_CASE}, incremental=False), ids=str)
def test_a_promotion_during_a_full_create_mixes_no_histories(walk: Walk, case: Case) -> None:
    began = time.monotonic()
    begin(walk)
    name = f"full-{walk.number}"
    walk.create_over_promotion(case, name)
    newest = walk.newest(name)
    walk.place.write()
    commit = walk.create_and_keep(name)
    if newest is not None:
        walk.check_lost(commit, case, newest if case.loses else None)
        walk.check_restored(name, newest)
    walk.place.write()
    walk.rebuild()
    last = walk.create_and_keep(name)
    assert isinstance(last, Increment)
    assert last.renewed.keys() <= {STANDBY}
    # The slots of the create that failed could not be dropped while the server was away.
    assert read_open_intents(walk.place.fleet.store.open()) == []
    walk.check_newest(name, set())
    for number in range(commit.increment, last.increment + 1):
        walk.check_restored(name, number)
    # No other slot is left than those of the chains.
    for node in walk.place.fleet.nodes:
        assert {*slots_of(node.dsn)} <= {walk.slot(name), walk.slot(walk.chain)}
    walk.end_chain(name)
    walk.seconds.append((str(case), time.monotonic() - began))
