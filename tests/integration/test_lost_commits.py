"""What commands do where a store's answers get lost: exit codes that are true, and the next command goes on.

The store is S3 behind a network that keeps, loses and delays single puts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import storage.storing as storing
from snapshots.records.commits import read_chain
from storage.errors import SnapshotError
from tests.cli_runs import run_here
from tests.faults.contest import commits_in, end_sessions, failed_that_committed
from tests.faults.injection import UNAVAILABLE, Place
from tests.faults.world import World, eventually
from tests.faults.writers import journalled
from tests.s3_proxy import Fault, S3Proxy, s3_proxy
from tests.snapshot_runs import chains_dropped, described
from tests.stored_documents import documents_known
from tests.watching import Watching

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from embedded.fleet import EmbeddedFleet
    from snapshots.records.commit import Commit
    from tests.s3_server import S3Server

CHAIN = "chain"
ATTEMPTS = 2
# All attempts of one put meet the same.
IMPATIENT = f"[store_options.config_kwargs]\nread_timeout = 60\nretries = {{ total_max_attempts = {ATTEMPTS} }}"


@pytest.fixture(scope="module")
def world(
    shared_fleet: EmbeddedFleet, s3: S3Server, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("lost-answers")
    with s3_proxy(s3.endpoint_url) as proxy, journalled(shared_fleet):
        options = s3.options | {"endpoint_url": proxy.endpoint_url}
        fleet = described(shared_fleet, folder / "fleet.toml", s3.bucket("lost-answers"), options, IMPATIENT)
        with chains_dropped(fleet):
            made = World(fleet, spark, Place(shared_fleet, {}, proxy, None, random.Random(0)), set())
            made.runs.init()
            made.runs.full(CHAIN)
            made.keep(CHAIN)
            yield made


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "READ_BACK_PAUSES_SECONDS", (0.05, 0.1))


@pytest.fixture
def proxy(world: World) -> Iterator[S3Proxy]:
    """The network, in order again at the end."""
    proxy = world.place.store
    proxy.forget()
    proxy.came_late.clear()
    yield proxy
    proxy.outage = None
    proxy.forget()


def created(world: World, name: str = CHAIN, *, incremental: bool = True) -> tuple[Commit | SnapshotError, list[str]]:
    """What came of a create in this process, and its notes."""
    world.writers.write()
    watching = Watching()
    try:
        return world.create(name, watching, incremental=incremental), watching.notes
    except SnapshotError as error:
        return error, watching.notes


def code_of(found: Commit | SnapshotError) -> int:
    return found.exit_code if isinstance(found, SnapshotError) else 0


def lost(key: str, *, arrives: bool, status: int = 0, then: Callable[[], None] | None = None) -> list[Fault]:
    code = "InternalError" if status else ""
    return [Fault(arrives=arrives, status=status, code=code, key=key, then=then)] * ATTEMPTS


def commit_file(number: int) -> str:
    return f"/increments/{number:016d}."


def next_goes_on(world: World, number: int) -> list[str]:
    """The next create is increment `number`, and leaves nothing on the nodes; what it said."""
    notes = next_commits(world, number)
    eventually(world.left_behind)
    return notes


def next_commits(world: World, number: int) -> list[str]:
    """The same while another one is under way, whose sessions are left."""
    world.writers.write()
    commit, notes = world.next(CHAIN)
    assert commit.increment == number
    assert world.left_open() == []
    assert failed_that_committed(world.store) == []
    assert all(len(found) == 1 for found in commits_in(world.store).values())
    return notes


@pytest.mark.parametrize("status", [0, 500])
def test_a_commit_that_was_stored_counts_though_every_answer_was_lost(
    world: World, proxy: S3Proxy, status: int
) -> None:
    number = (world.newest(CHAIN) or 0) + 1
    proxy.faults += lost(commit_file(number), arrives=True, status=status)
    found, _ = created(world)
    assert not isinstance(found, SnapshotError), found
    assert (found.increment, proxy.faults) == (number, [])


def test_a_commit_that_never_arrived_is_not_known_then_said_and_settled_by_the_next_create(
    world: World, proxy: S3Proxy
) -> None:
    number = (world.newest(CHAIN) or 0) + 1
    proxy.faults += lost(commit_file(number), arrives=False)
    found, _ = created(world)
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (5, "commit-indeterminate")
    for words, code in ((["list"], 0), (["show", CHAIN], 0), (["check", CHAIN, "--metadata-only"], 4)):
        assert said(world, code, *words) == [(found.details["operation"], number, False)]
    assert said(world, 0, "restore", CHAIN, "--replace", "--dry-run") == [(found.details["operation"], number, False)]
    assert any(str(found.details["operation"]) in note for note in next_goes_on(world, number))
    assert said(world, 0, "list") == []


def said(world: World, code: int, *words: str) -> list[tuple[object, object, object]]:
    """The operation, increment and whether it is committed of all open operations that a command tells of."""
    found, document = run_here(world.fleet, *words)
    assert found == code, document
    return [(one["operation"], one["increment"], one["committed"]) for one in document["open_operations"]]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_put_of_a_commit_that_arrives_late_counts_before_the_next_command_and_never_after_it(
    world: World, proxy: S3Proxy, when: str
) -> None:
    number, arrives = (world.newest(CHAIN) or 0) + 1, threading.Event()
    proxy.faults += [Fault(arrives=False, key=commit_file(number), late=arrives)] * ATTEMPTS
    found, _ = created(world)
    assert code_of(found) == 5
    if when == "before":
        let_arrive(proxy, arrives)
        assert sorted(proxy.came_late) == [200, 412]
        assert world.newest(CHAIN) == number
        assert f"had committed increment {number}" in next_goes_on(world, number + 1)[0]
        return
    assert f"ended without committing increment {number}" in next_goes_on(world, number)[0]
    before = commits_in(world.store)
    let_arrive(proxy, arrives)
    assert proxy.came_late == [412, 412]
    assert commits_in(world.store) == before
    assert world.newest(CHAIN) == number
    next_goes_on(world, number + 1)


def let_arrive(proxy: S3Proxy, arrives: threading.Event) -> None:
    arrives.set()
    eventually(lambda: len(proxy.came_late) < ATTEMPTS)


def test_a_store_that_is_away_after_the_commit_arrived_leaves_it_open_and_it_counts(
    world: World, proxy: S3Proxy
) -> None:
    number = (world.newest(CHAIN) or 0) + 1

    def go_away() -> None:
        proxy.outage = UNAVAILABLE

    proxy.faults += lost(commit_file(number), arrives=True, then=go_away)
    found, _ = created(world)
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (5, "commit-indeterminate")
    code, document = run_here(world.fleet, "list")
    assert (code, document["error"]) == (6, "store-unreachable")
    proxy.outage = None
    proxy.forget()
    assert said(world, 0, "list") == [(found.details["operation"], number, True)]
    assert f"had committed increment {number}" in next_goes_on(world, number + 1)[0]


def test_a_full_snapshot_whose_commit_arrives_after_its_slots_were_dropped_is_none(
    world: World, proxy: S3Proxy
) -> None:
    arrives = threading.Event()
    proxy.faults += [Fault(arrives=False, key="/late/snapshot.", late=arrives)] * ATTEMPTS
    found, _ = created(world, "late", incremental=False)
    assert code_of(found) == 5
    # Nothing is undone that may be needed; the next command knows, and drops the slots.
    assert len([one for one in world.left_behind() if "slot" in one]) == len(world.fleet.nodes)
    next_goes_on(world, (world.newest(CHAIN) or 0) + 1)
    let_arrive(proxy, arrives)
    assert proxy.came_late == [412, 412]
    assert world.newest("late") is None
    code, document = run_here(world.fleet, "restore", "late", "--dry-run")
    assert (code, document["error"]) == (3, "snapshot-missing")


def test_a_lost_answer_to_anything_but_a_commit_is_never_indeterminate(world: World, proxy: S3Proxy) -> None:
    number = (world.newest(CHAIN) or 0) + 1
    for key in ("/intent.json", "/wal/s1/"):
        proxy.faults += lost(key, arrives=False)
        found, _ = created(world)
        assert isinstance(found, SnapshotError), key
        assert (found.exit_code, found.slug, bool(found.hint)) == (6, "store-answers-lost", True)
        assert (proxy.faults, world.newest(CHAIN)) == ([], number - 1)
    # What is found stored counts; what is not the commit keeps nothing from being committed.
    proxy.faults += [*lost("/wal/s1/", arrives=True), *lost("/outcome.json", arrives=False)]
    found, notes = created(world)
    assert code_of(found) == 0, found
    assert (proxy.faults, world.newest(CHAIN)) == ([], number)
    assert any("its outcome could not be stored" in note for note in notes)
    next_goes_on(world, number + 1)


def test_a_full_snapshot_without_its_ddl_fails_and_leaves_nothing(world: World, proxy: S3Proxy) -> None:
    # All answers to objects of rows are lost as well, and those are found stored.
    rows = lost("/base/", arrives=True) * 100
    proxy.faults += rows + lost("/schema/s1/", arrives=False)
    found, _ = created(world, "without", incremental=False)
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (6, "store-answers-lost")
    assert "/schema/" in str(found.details["object"])
    assert 0 < len(proxy.faults) < len(rows)
    assert world.left_open() == []
    eventually(world.left_behind)


def test_who_sleeps_while_its_commit_is_under_way_loses_to_the_void(world: World, proxy: S3Proxy) -> None:
    number, goes = (world.newest(CHAIN) or 0) + 1, threading.Event()
    proxy.faults.append(Fault(arrives=False, key=commit_file(number), held=goes))
    with ThreadPoolExecutor(1) as threads:
        sleeping = threads.submit(created, world)
        try:
            eventually(lambda: not proxy.holding)
            end_sessions(world)
            assert f"ended without committing increment {number}" in next_commits(world, number)[0]
        finally:
            goes.set()
        found, _ = sleeping.result()
    assert isinstance(found, SnapshotError)
    assert (found.exit_code, found.slug) == (7, "operation-settled")
    assert world.newest(CHAIN) == number
    eventually(world.left_behind)


def test_nothing_was_lost_and_nothing_stored_twice(world: World) -> None:
    world.writers.write()
    world.create_next_and_compare(CHAIN)
    read_chain(world.store, CHAIN).check_archive()
    assert documents_known(world.store)["Void"] > 0
