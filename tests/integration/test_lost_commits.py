"""Commands whose puts lose their answers: the exit code is true, and the next command continues.

The store is S3 behind a network that holds, loses and delays single puts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import cutline.storage.storing as storing
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import SnapshotError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import configure_fleet, dropping_slots
from tests.commands.watching import Watching
from tests.faults.awaited import await_none
from tests.faults.contest import commits_in, end_sessions, failed_that_committed
from tests.faults.injection import UNAVAILABLE, FaultTargets
from tests.faults.world import World
from tests.faults.writers import journal_tables
from tests.s3.proxy import Fault, S3Proxy, s3_proxy
from tests.stores.documents import check_documents

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.snapshots.records.commit import Commit
    from tests.s3.server import S3Server

CHAIN = "chain"
ATTEMPTS = 2
# All attempts of one put meet the same fault.
IMPATIENT = f"[store_options.config_kwargs]\nread_timeout = 60\nretries = {{ total_max_attempts = {ATTEMPTS} }}"


@pytest.fixture(scope="module")
def world(
    shared_fleet: EmbeddedFleet, s3: S3Server, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("lost-answers")
    with s3_proxy(s3.endpoint_url) as proxy, journal_tables(shared_fleet):
        options = s3.options | {"endpoint_url": proxy.endpoint_url}
        fleet = configure_fleet(shared_fleet, folder / "fleet.toml", s3.bucket("lost-answers"), options, IMPATIENT)
        with dropping_slots(fleet):
            made = World(fleet, spark, FaultTargets(shared_fleet, {}, proxy, None, random.Random(0)), set())
            made.runs.init()
            made.runs.full(CHAIN)
            made.keep_chain(CHAIN)
            yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "READ_BACK_PAUSES_SECONDS", (0.05, 0.1))


@pytest.fixture
def proxy(world: World) -> Iterator[S3Proxy]:
    """The network before the store. It has no faults at the beginning and at the end."""
    proxy = world.targets.store
    proxy.reset()
    proxy.late_statuses.clear()
    yield proxy
    proxy.outage = None
    proxy.reset()


def try_create(
    world: World, name: str = CHAIN, *, incremental: bool = True
) -> tuple[Commit | SnapshotError, list[str]]:
    """Run a create in this process; return its commit or error, and its notes."""
    world.writers.write()
    watching = Watching()
    try:
        return world.create(name, watching, incremental=incremental), watching.notes
    except SnapshotError as error:
        return error, watching.notes


def code_of(found: Commit | SnapshotError) -> int:
    return found.exit_code if isinstance(found, SnapshotError) else 0


def lost_answers(key: str, *, arrives: bool, status: int = 0, then: Callable[[], None] | None = None) -> list[Fault]:
    code = "InternalError" if status else ""
    return [Fault(arrives=arrives, status=status, code=code, key=key, then=then)] * ATTEMPTS


def commit_file(number: int) -> str:
    return f"/increments/{number:016d}."


def create_next(world: World, number: int) -> list[str]:
    """Create increment `number`, assert that nothing is left on the nodes, and return the notes."""
    notes = create_next_beside_another(world, number)
    await_none(world.find_leftovers)
    return notes


def create_next_beside_another(world: World, number: int) -> list[str]:
    """Create increment `number` while another create is running, whose sessions stay; return the notes."""
    world.writers.write()
    commit, notes = world.create_next(CHAIN)
    assert commit.increment == number
    assert world.open_operations() == []
    assert failed_that_committed(world.store) == []
    assert all(len(found) == 1 for found in commits_in(world.store).values())
    return notes


@pytest.mark.parametrize("status", [0, 500])
def test_a_stored_commit_counts_even_if_every_answer_is_lost(world: World, proxy: S3Proxy, status: int) -> None:
    number = (world.newest_increment(CHAIN) or 0) + 1
    proxy.faults += lost_answers(commit_file(number), arrives=True, status=status)
    found, _ = try_create(world)
    assert not isinstance(found, SnapshotError), found
    assert (found.increment, proxy.faults) == (number, [])


def test_a_lost_commit_is_indeterminate_and_is_listed_until_the_next_create_settles_it(
    world: World, proxy: S3Proxy
) -> None:
    number = (world.newest_increment(CHAIN) or 0) + 1
    proxy.faults += lost_answers(commit_file(number), arrives=False)
    found, _ = try_create(world)
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (5, "commit-indeterminate")
    for words, code in ((["list"], 0), (["show", CHAIN], 0), (["check", CHAIN, "--metadata-only"], 4)):
        assert open_operations(world, code, *words) == [(found.details["operation"], number, False)]
    assert open_operations(world, 0, "restore", CHAIN, "--replace", "--dry-run") == [
        (found.details["operation"], number, False)
    ]
    assert any(str(found.details["operation"]) in note for note in create_next(world, number))
    assert open_operations(world, 0, "list") == []


def open_operations(world: World, code: int, *words: str) -> list[tuple[object, object, object]]:
    """Run a command; return operation, increment and whether it is committed for every open operation it reports."""
    found, document = run_here(world.fleet, *words)
    assert found == code, document
    return [(one["operation"], one["increment"], one["committed"]) for one in document["open_operations"]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_that_arrives_late_counts_before_the_next_command_and_never_after_it(
    world: World, proxy: S3Proxy, when: str
) -> None:
    number, arrives = (world.newest_increment(CHAIN) or 0) + 1, threading.Event()
    proxy.faults += [Fault(arrives=False, key=commit_file(number), late=arrives)] * ATTEMPTS
    found, _ = try_create(world)
    assert code_of(found) == 5
    if when == "before":
        let_arrive(proxy, arrives)
        assert sorted(proxy.late_statuses) == [200, 412]
        assert world.newest_increment(CHAIN) == number
        assert f"had committed increment {number}" in create_next(world, number + 1)[0]
        return
    assert f"ended without committing increment {number}" in create_next(world, number)[0]
    before = commits_in(world.store)
    let_arrive(proxy, arrives)
    assert proxy.late_statuses == [412, 412]
    assert commits_in(world.store) == before
    assert world.newest_increment(CHAIN) == number
    create_next(world, number + 1)


def let_arrive(proxy: S3Proxy, arrives: threading.Event) -> None:
    arrives.set()
    await_none(lambda: len(proxy.late_statuses) < ATTEMPTS)


def test_a_commit_that_arrives_counts_even_if_the_store_is_then_unreachable(world: World, proxy: S3Proxy) -> None:
    number = (world.newest_increment(CHAIN) or 0) + 1

    def go_away() -> None:
        proxy.outage = UNAVAILABLE

    proxy.faults += lost_answers(commit_file(number), arrives=True, then=go_away)
    found, _ = try_create(world)
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (5, "commit-indeterminate")
    code, document = run_here(world.fleet, "list")
    assert (code, document["error"]) == (6, "store-unreachable")
    proxy.outage = None
    proxy.reset()
    assert open_operations(world, 0, "list") == [(found.details["operation"], number, True)]
    assert f"had committed increment {number}" in create_next(world, number + 1)[0]


def test_a_full_snapshot_whose_commit_arrives_after_its_slots_were_dropped_does_not_exist(
    world: World, proxy: S3Proxy
) -> None:
    arrives = threading.Event()
    proxy.faults += [Fault(arrives=False, key="/late/snapshot.", late=arrives)] * ATTEMPTS
    found, _ = try_create(world, "late", incremental=False)
    assert code_of(found) == 5
    # The create keeps its slots, which may be needed. The next command decides the operation and drops them.
    assert len([one for one in world.find_leftovers() if "slot" in one]) == len(world.fleet.nodes)
    create_next(world, (world.newest_increment(CHAIN) or 0) + 1)
    let_arrive(proxy, arrives)
    assert proxy.late_statuses == [412, 412]
    assert world.newest_increment("late") is None
    code, document = run_here(world.fleet, "restore", "late", "--dry-run")
    assert (code, document["error"]) == (3, "snapshot-missing")


def test_a_lost_answer_to_anything_but_a_commit_is_never_indeterminate(world: World, proxy: S3Proxy) -> None:
    number = (world.newest_increment(CHAIN) or 0) + 1
    for key in ("/intent.json", "/wal/s1/"):
        proxy.faults += lost_answers(key, arrives=False)
        found, _ = try_create(world)
        assert isinstance(found, SnapshotError), key
        assert (found.exit_code, found.slug, bool(found.hint)) == (6, "store-answers-lost", True)
        assert (proxy.faults, world.newest_increment(CHAIN)) == ([], number - 1)
    # A segment that is found stored counts; an outcome that is not stored does not prevent the commit.
    proxy.faults += [*lost_answers("/wal/s1/", arrives=True), *lost_answers("/outcome.json", arrives=False)]
    found, notes = try_create(world)
    assert code_of(found) == 0, found
    assert (proxy.faults, world.newest_increment(CHAIN)) == ([], number)
    assert any("its outcome could not be stored" in note for note in notes)
    create_next(world, number + 1)


def test_a_full_snapshot_without_its_ddl_fails_and_leaves_nothing(world: World, proxy: S3Proxy) -> None:
    # All answers for base objects are lost as well, but those objects are found stored.
    rows = lost_answers("/base/", arrives=True) * 100
    proxy.faults += rows + lost_answers("/schema/s1/", arrives=False)
    found, _ = try_create(world, "without", incremental=False)
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (6, "store-answers-lost")
    assert "/schema/" in str(found.details["object"])
    assert 0 < len(proxy.faults) < len(rows)
    assert world.open_operations() == []
    await_none(world.find_leftovers)


def test_a_create_whose_commit_is_held_up_loses_to_the_void(world: World, proxy: S3Proxy) -> None:
    number, released = (world.newest_increment(CHAIN) or 0) + 1, threading.Event()
    proxy.faults.append(Fault(arrives=False, key=commit_file(number), held=released))
    with ThreadPoolExecutor(1) as threads:
        held_create = threads.submit(try_create, world)
        try:
            await_none(lambda: not proxy.held_paths)
            end_sessions(world)
            assert f"ended without committing increment {number}" in create_next_beside_another(world, number)[0]
        finally:
            released.set()
        found, _ = held_create.result()
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (7, "operation-settled")
    assert world.newest_increment(CHAIN) == number
    assert check_documents(world.store)["Void"] > 0
    await_none(world.find_leftovers)


def test_nothing_is_lost_and_nothing_is_stored_twice(world: World) -> None:
    world.writers.write()
    world.create_next_and_compare(CHAIN)
    read_chain(world.store, CHAIN).check_archive()
    check_documents(world.store)
