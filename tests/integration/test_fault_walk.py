"""The walk: cause faults at the crash points of create; after each, the fleet is whole and the next command succeeds.

`make test` causes every fault once, and the kill several times, at points of every kind, and `make all` a fault at
every point (tests/faults/cases.py). With CUTLINE_SOAK=SECONDS, all faults are caused at all points, in random order,
for about that time.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pytest

import cutline.snapshots.create.make_cut
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import is_fleet, stop_fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from tests.commands.snapshot_runs import Ready, configure_fleet
from tests.faults.awaited import await_none
from tests.faults.cases import CANCELLED, KILLED, STOPPED, Case, cases
from tests.faults.injection import HARMLESS, STORE_FAULTS, FaultTargets, can_mount, disk_full, on_small_disk
from tests.faults.patience import IMPATIENT, impatient
from tests.faults.pg_proxy import pg_proxies, route_through
from tests.faults.sights import TaskEffect
from tests.faults.world import World
from tests.faults.writers import JOURNAL
from tests.integration.conftest import RUNNING
from tests.run.soak import SEED, SOAK_SECONDS
from tests.s3.proxy import s3_proxy
from tests.servers.dealt import start_fleet
from tests.stores.documents import check_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.s3.server import S3Server

CHAIN = "chain"
SETTINGS = {"max_wal_size": "96MB", "min_wal_size": "32MB", "wal_retrieve_retry_interval": "500ms"}
# The exit codes that a fault may cause: indeterminate, unreachable, inconsistent cut. Never "refused".
FAULT_CODES = {5, 6, 9}
# Much longer than it takes: the machine may be busy.
CANCEL_SECONDS_MAX = 20.0


@dataclass(slots=True)
class Walk:
    """The worlds of all cases: one with its store in a folder, one with its store in S3 behind a faulty network."""

    worlds: tuple[World, World]
    why_no_small_disk: str
    began: float
    walked: list[tuple[str, str, float]]
    has_compared: bool = False

    def world(self, case: Case) -> World:
        return self.worlds[case.fault in STORE_FAULTS]

    def other(self, world: World) -> World:
        return self.worlds[world is self.worlds[0]]


@pytest.fixture(scope="module", autouse=True)
def impatient_watch() -> Iterator[None]:
    """Give up early on a silent node, but not during the pause that a fault causes; retry a cut at once."""
    with impatient() as patch:
        patch.setattr(cutline.snapshots.create.make_cut, "PAUSE_SECONDS_FIRST", 0.1)
        yield


@pytest.fixture(scope="module")
def walk(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, spark: SparkSession, s3: S3Server
) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("walk")
    servers_folder = folder / "fleet"
    why_not = "" if can_mount(folder) else "only root with leave to mount can make a small disk"
    running = pytestconfig.stash.setdefault(RUNNING, [])
    try:
        servers = start_fleet(servers_folder, shards=2, backups=1, settings=SETTINGS)
        running.append(servers)
        with ExitStack() as stack:
            small = None if why_not else servers.primaries[-1]
            if small:
                stack.enter_context(on_small_disk(servers, small))
            store = stack.enter_context(s3_proxy(s3.endpoint_url))
            proxies = stack.enter_context(pg_proxies(servers))
            for dsn in servers.dsns():
                with psycopg.connect(dsn) as connection:
                    connection.execute(JOURNAL)
            place = FaultTargets(servers, proxies, store, small, random.Random(SEED))
            slots: set[str] = set()
            options = s3.options | {"endpoint_url": store.endpoint_url}
            urls = (("folder", f"file://{folder}/store", {}, ""), ("s3", s3.bucket("walk"), options, IMPATIENT))
            worlds = []
            for name, url, chosen, more in urls:
                direct = configure_fleet(servers, folder / f"{name}.toml", url, chosen, more)
                routed = route_through(proxies, direct, folder / f"{name}-led.toml")
                worlds.append(World(routed, spark, place, slots))
            worlds[0].await_healthy()
            for world in worlds:
                world.runs.init()
            for world in worlds:
                world.runs.full(CHAIN)
                world.keep_chain(CHAIN)
            yield Walk((worlds[0], worlds[1]), why_not, time.monotonic(), [])
        running.remove(servers)
    finally:
        if is_fleet(servers_folder):
            stop_fleet(servers_folder, delete=True)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_after_a_fault_the_next_command_continues(walk: Walk, case: Case) -> None:
    if SOAK_SECONDS and time.monotonic() - walk.began > SOAK_SECONDS:
        pytest.skip(f"the {SOAK_SECONDS} s are over")
    if case.fault is disk_full and walk.why_no_small_disk:
        pytest.skip(walk.why_no_small_disk)
    began = time.monotonic()
    world = walk.world(case)
    name = CHAIN if case.step.incremental else f"full-{len(walk.walked)}"
    walk.walked.append((case.name, str(case.step), 0))
    world.await_healthy()
    before = world.newest_increment(name)
    tag = f"{len(walk.walked):032x}"
    prepare(world, case, name, len(walk.walked))
    # Creating the slot for a copy waits for prepared transactions, and so does a terminal snapshot.
    is_held = case.step.incremental and not (case.step.terminal or case.step.new_table or case.step.renews)
    if is_held:
        world.writers.prepare(tag)
    newest = create_under_fault(world, case, name, before)
    left_open = world.open_operations()
    if case.step.terminal:
        check_freeze(world, case, is_committed=newest != before, is_open=bool(left_open))
    else:
        world.writers.write()
    commit, notes = world.create_next(name)
    assert commit.increment == (0 if newest is None else newest + 1)
    for operation in left_open:
        assert any(operation.id in note for note in notes), f"{operation.id} was settled without a note: {notes}"
    assert world.open_operations() == []
    assert not case.step.renews or world.last_renewal(name, case.step.renews) > (before or 0)
    world.keep_chain(name)
    if case.step.terminal:
        world.writers.write()
    elif is_held:
        world.writers.commit_prepared(tag)
    await_none(world.find_leftovers)
    if not case.step.incremental:
        if SOAK_SECONDS or not walk.has_compared:
            world.writers.write()
            world.create_next_and_compare(name)
            walk.has_compared = True
        world.end_chain(name)
    if case.step.new_table:
        # The other chain must copy the new table, too. It does so now, because a later case may hold a transaction.
        walk.other(world).create_next(CHAIN)
    walk.walked[-1] = (case.name, str(case.step), time.monotonic() - began)


def prepare(world: World, case: Case, name: str, number: int) -> None:
    """Write rows, and do to the fleet what the step wants: lose the slot of a node, or add a table."""
    if case.step.renews:
        world.lose_slot(name, case.step.renews)
    world.writers.write()
    if case.step.new_table:
        world.writers.add_table(f"came_{number}")


def check_freeze(world: World, case: Case, *, is_committed: bool, is_open: bool) -> None:
    """After a terminal create the fleet is read-only if it is committed; if not, the next command ends the freeze."""
    frozen = world.frozen_primaries()
    primaries = [node.id for node in world.targets.servers.primaries]
    if is_committed:
        assert frozen == primaries
        assert sorted(world.resume()) == primaries
        world.writers.write()
    elif case.fault in STORE_FAULTS or not is_open:
        # Undoing the freeze does not need the store.
        assert frozen == []
    elif case.fault == KILLED:
        assert frozen
        if case.step.point == CrashPoint.FROZEN:
            assert sorted(world.resume()) == frozen
            world.writers.write()


def create_under_fault(world: World, case: Case, name: str, before: int | None) -> int | None:
    """Run the case's command under its fault, then repair the fault; return the newest increment afterwards."""
    step, point = case.step, case.step.point
    at = point if isinstance(point, TaskEffect) else (str(point), step.count)
    done = 0 if before is None else before + 1
    if case.fault == CANCELLED:
        run = world.create_cancelled(name, at, **step.options)
        newest = world.newest_increment(name)
        # On sight it may come too late.
        is_late = step.is_committed or (isinstance(at, TaskEffect) and newest == done)
        assert newest == (done if is_late else before)
        assert (run.code, run.results) == ((0, ["too-late"]) if is_late else (8, ["cancelled"])), run.document
        assert run.seconds < CANCEL_SECONDS_MAX
        assert world.open_operations() == []
        return newest
    if isinstance(case.fault, str):
        if isinstance(at, TaskEffect):
            code = world.create_killed_on_effect(name, at, incremental=step.incremental, by_spark=step.by_spark)
        else:
            code = world.create_killed(name, at, case.fault, **step.options)
        newest = world.newest_increment(name)
        # A kill on sight may come too late: then the command had committed.
        assert newest == (done if step.is_committed else before) or (isinstance(at, TaskEffect) and newest == done)
        if case.fault == STOPPED:
            assert code == 130
            assert world.open_operations() == []
        else:
            assert code == -9
        return newest
    ended = world.create_with_fault(name, at, case.fault, **step.options)
    world.await_healthy()
    assert not ended.hung, f"hung until the fault was repaired, then: {ended.error}"
    newest = world.newest_increment(name)
    if ended.commit:
        assert newest == ended.commit.increment == done
        return newest
    assert ended.error
    assert case.fault not in HARMLESS, ended.error
    assert ended.error.exit_code in FAULT_CODES, f"{ended.error.exit_code} {ended.error.slug}: {ended.error}"
    assert ended.error.hint
    # A failed command has committed only if the fault came after the commit, or if the result was indeterminate.
    assert newest == before or (newest == done and (step.is_committed or ended.error.exit_code == 5))
    return newest


@pytest.mark.parametrize("number", [0, 1], ids=["folder", "s3"])
def test_nothing_is_lost_and_nothing_is_stored_twice(walk: Walk, number: int) -> None:
    world = walk.worlds[number]
    world.writers.write()
    world.create_next_and_compare(CHAIN)
    # Reading one store suffices; check only the metadata in the other.
    is_read = number == 0 or bool(SOAK_SECONDS)
    request = CheckRequest(CHAIN, metadata_only=not is_read)
    assert check_snapshots(world.fleet, request, Ready(world.spark), Silent()).exit_code == (0 if is_read else 4)
    assert check_documents(world.store)["Increment"] > 0
    for fault, step, seconds in sorted(walk.walked):
        print(f"{fault:20} {step:50} {seconds:6.1f} s")  # noqa: T201  # the table of the cases


def test_the_small_disk_is_small(walk: Walk) -> None:
    if walk.why_no_small_disk:
        pytest.skip(walk.why_no_small_disk)
    small = walk.worlds[0].targets.small_disk
    assert small
    assert shutil.disk_usage(small.data_directory).total < 1 << 30
