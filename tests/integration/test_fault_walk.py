"""The walk: faults at the points of create, and after each the fleet is whole and the next command goes on.

The short form has every fault once, the kill a few times, at points that the seed draws: one of every kind at least
(tests/faults/cases.py). With CUTLINE_SOAK=SECONDS all faults are walked at all points, in random order, for so long.
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

import fleet.nodes.watch
import snapshots.create.make_cut
import storage.storing
from check.verify import CheckRequest, check_snapshots
from embedded.fleet import is_fleet, start_fleet, stop_fleet
from fleet.progress import Silent
from snapshots.operations.crash_points import (
    FULL_POINTS,
    INCREMENT_POINTS,
    CrashPoint,
    terminal_crash_points,
)
from tests.faults.cases import ANEW, FAULTS, KILLED, KINDS, READ_ONLY, STOPPED, Case, cases, sample, steps
from tests.faults.injection import (
    HARMLESS,
    STORE_FAULTS,
    Place,
    disk_full,
    may_mount,
    on_small_disk,
)
from tests.faults.pg_proxy import led_through, pg_proxies
from tests.faults.sights import Sight
from tests.faults.world import World, eventually
from tests.faults.writers import JOURNAL
from tests.integration.conftest import RUNNING
from tests.s3_proxy import s3_proxy
from tests.snapshot_runs import Ready, described
from tests.soak import SEED, SOAK_SECONDS
from tests.stored_documents import documents_known

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.s3_server import S3Server

CHAIN = "chain"
SETTINGS = {"max_wal_size": "96MB", "min_wal_size": "32MB", "wal_retrieve_retry_interval": "500ms"}
# A store that never answers is given up soon: how often it is asked makes no difference while it is not mended.
IMPATIENT = (
    "[store_options.config_kwargs]\nread_timeout = 0.5\nconnect_timeout = 0.5\nretries = { total_max_attempts = 2 }"
)
# What may be wrong with the error that a fault causes: not known, not reached, not consistent. Never "refused".
FAULT_CODES = {5, 6, 9}
SAMPLES = 50


def test_every_point_is_a_step_and_of_a_kind() -> None:
    assert {(step.incremental, step.point) for step in steps() if isinstance(step.point, CrashPoint)} == {
        *((False, point) for point in FULL_POINTS),
        *((True, point) for point in terminal_crash_points(INCREMENT_POINTS)),
        *((True, point) for point, _ in ANEW),
    }
    for step in steps():
        assert len([kind for kind, points in KINDS.items() if step.point in points]) == 1, step


def test_every_sample_has_every_fault_and_every_kind_of_point() -> None:
    for seed in range(SAMPLES):
        chosen = sample(random.Random(seed))
        assert {case.name for case in chosen} == {Case(steps()[0], fault).name for fault in FAULTS}
        assert {kind for case in chosen for kind, points in KINDS.items() if case.step.point in points} == set(KINDS)
        killed = [case.step for case in chosen if case.fault == KILLED]
        assert {(step.incremental, step.terminal) for step in killed} >= {(False, False), (True, False), (True, True)}
        assert any(step.point in KINDS[READ_ONLY] for step in killed)
        assert not [case for case in chosen if case.fault == STOPPED and isinstance(case.step.point, Sight)]


@dataclass(slots=True)
class Walk:
    """The worlds of all cases: one with its store in a folder, one with it in S3 behind a bad network."""

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
    """A node that is silent is given up soon, but later than one that pauses; a cut is made again at once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {"PROBE_SECONDS": 0.5, "ANSWER_SECONDS_MAX": 2.0, "SILENCE_SECONDS_MAX": 4.0}.items():
            patch.setattr(fleet.nodes.watch, name, seconds)
        patch.setattr(snapshots.create.make_cut, "PAUSE_SECONDS_FIRST", 0.1)
        patch.setattr(storage.storing, "READ_BACK_PAUSES_SECONDS", (0.05, 0.1))
        yield


@pytest.fixture(scope="module")
def walk(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, spark: SparkSession, s3: S3Server
) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("walk")
    servers_folder = folder / "fleet"
    why_not = "" if may_mount(folder) else "only root with leave to mount can make a small disk"
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
            place = Place(servers, proxies, store, small, random.Random(SEED))
            slots: set[str] = set()
            options = s3.options | {"endpoint_url": store.endpoint_url}
            urls = (("folder", f"file://{folder}/store", {}, ""), ("s3", s3.bucket("walk"), options, IMPATIENT))
            worlds = []
            for name, url, chosen, more in urls:
                straight = described(servers, folder / f"{name}.toml", url, chosen, more)
                led = led_through(proxies, straight, folder / f"{name}-led.toml")
                worlds.append(World(led, spark, place, slots))
            worlds[0].await_whole()
            for world in worlds:
                world.runs.init()
            for world in worlds:
                world.runs.full(CHAIN)
                world.keep(CHAIN)
            yield Walk((worlds[0], worlds[1]), why_not, time.monotonic(), [])
        running.remove(servers)
    finally:
        if is_fleet(servers_folder):
            stop_fleet(servers_folder, delete=True)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_after_a_fault_the_next_command_goes_on(walk: Walk, case: Case) -> None:
    if SOAK_SECONDS and time.monotonic() - walk.began > SOAK_SECONDS:
        pytest.skip(f"{SOAK_SECONDS} s are over")
    if case.fault is disk_full and walk.why_no_small_disk:
        pytest.skip(walk.why_no_small_disk)
    began = time.monotonic()
    world = walk.world(case)
    name = CHAIN if case.step.incremental else f"full-{len(walk.walked)}"
    walk.walked.append((case.name, str(case.step), 0))
    world.await_whole()
    before = world.newest(name)
    world.writers.write()
    tag = f"{len(walk.walked):032x}"
    if case.step.anew:
        world.writers.add_table(f"came_{len(walk.walked)}")
    # The slot of a copy waits for what is prepared, and a terminal snapshot does too.
    is_held = case.step.incremental and not (case.step.terminal or case.step.anew)
    if is_held:
        world.writers.prepare(tag)
    newest = faulty(world, case, name, before)
    left_open = world.left_open()
    if case.step.terminal:
        check_freeze(world, case, is_committed=newest != before, is_open=bool(left_open))
    else:
        world.writers.write()
    commit, notes = world.next(name)
    assert commit.increment == (0 if newest is None else newest + 1)
    for operation in left_open:
        assert any(operation.id in note for note in notes), f"{operation.id} was settled in silence: {notes}"
    assert world.left_open() == []
    world.keep(name)
    if case.step.terminal:
        world.writers.write()
    elif is_held:
        world.writers.commit_prepared(tag)
    eventually(world.left_behind)
    if not case.step.incremental:
        if SOAK_SECONDS or not walk.has_compared:
            world.writers.write()
            world.create_next_and_compare(name)
            walk.has_compared = True
        world.end(name)
    if case.step.anew:
        # The other chain has to copy the new table, too: not in a case that holds a prepared transaction.
        walk.other(world).next(CHAIN)
    walk.walked[-1] = (case.name, str(case.step), time.monotonic() - began)


def check_freeze(world: World, case: Case, *, is_committed: bool, is_open: bool) -> None:
    """After a terminal create: read-only if it is committed, else not for long, whatever the next command is."""
    frozen = world.frozen()
    primaries = [node.id for node in world.place.servers.primaries]
    if is_committed:
        assert frozen == primaries
        assert sorted(world.resume()) == primaries
        world.writers.write()
    elif case.fault in STORE_FAULTS or not is_open:
        # Undoing it needs no store.
        assert frozen == []
    elif case.fault == KILLED:
        assert frozen
        if case.step.point == CrashPoint.FROZEN:
            assert sorted(world.resume()) == frozen
            world.writers.write()


def faulty(world: World, case: Case, name: str, before: int | None) -> int | None:
    """Run the command of the case under its fault and mend it; the newest increment that there is after it."""
    step, point = case.step, case.step.point
    at = point if isinstance(point, Sight) else (str(point), step.count)
    done = 0 if before is None else before + 1
    if isinstance(case.fault, str):
        if isinstance(at, Sight):
            code = world.create_killed_on_sight(name, at, incremental=step.incremental)
        else:
            code = world.create_killed(name, at, case.fault, **step.kind)
        newest = world.newest(name)
        # On sight the kill may come late: then all was done.
        assert newest == (done if step.committed else before) or (isinstance(at, Sight) and newest == done)
        if case.fault == STOPPED:
            assert code == 130
            assert world.left_open() == []
        else:
            assert code == -9
        return newest
    ended = world.create_under(name, at, case.fault, **step.kind)
    world.await_whole()
    assert not ended.hung, f"hung until the fault was mended, and then: {ended.error}"
    newest = world.newest(name)
    if ended.commit:
        assert newest == ended.commit.increment == done
        return newest
    assert ended.error
    assert case.fault not in HARMLESS, ended.error
    assert ended.error.exit_code in FAULT_CODES, f"{ended.error.exit_code} {ended.error.slug}: {ended.error}"
    assert ended.error.hint
    # What is there although the command failed was committed before the fault, or nobody could know.
    assert newest == before or (newest == done and (step.committed or ended.error.exit_code == 5))
    return newest


@pytest.mark.parametrize("number", [0, 1], ids=["folder", "s3"])
def test_nothing_was_lost_and_nothing_stored_twice(walk: Walk, number: int) -> None:
    world = walk.worlds[number]
    world.writers.write()
    world.create_next_and_compare(CHAIN)
    # One store is read as well as another: of the second only what it lists.
    is_read = number == 0 or bool(SOAK_SECONDS)
    request = CheckRequest(CHAIN, metadata_only=not is_read)
    assert check_snapshots(world.fleet, request, Ready(world.spark), Silent()).exit_code == (0 if is_read else 4)
    assert documents_known(world.store)["Increment"] > 0
    for fault, step, seconds in sorted(walk.walked):
        print(f"{fault:20} {step:50} {seconds:6.1f} s")  # noqa: T201  # the table of what was walked


def test_the_small_disk_is_small(walk: Walk) -> None:
    if walk.why_no_small_disk:
        pytest.skip(walk.why_no_small_disk)
    small = walk.worlds[0].place.small_disk
    assert small
    assert shutil.disk_usage(small.data_directory).total < 1 << 30
