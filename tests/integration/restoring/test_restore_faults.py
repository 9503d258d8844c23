"""The walk with faults: a node or the store goes away at a crash point of a restore over existing databases.

Afterwards all shards are old, or all new, or the next command names an unfinished restore, which ends in either way.
`make all` causes every fault once, and one at every point; with CUTLINE_SOAK every fault is caused at every point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import stop_fleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.storage.errors import SnapshotError
from tests.commands.snapshot_runs import Ready, configure_fleet, dropping_slots
from tests.commands.watching import Reached, Watching
from tests.faults.injection import (
    HARMLESS,
    NETWORK_FAULTS,
    STORE_FAULTS,
    FaultTargets,
    Repair,
    primary_down,
    primary_restarted,
    repaired_after,
)
from tests.faults.patience import IMPATIENT, impatient
from tests.faults.pg_proxy import pg_proxies, route_through
from tests.faults.points import RESTORE_PER_NODE
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    make_place,
    old_databases,
    open_restores,
    plain_restore,
)
from tests.run.soak import SEED, SOAK_SECONDS, covering
from tests.s3.proxy import s3_proxy
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.s3.server import S3Server

COMMAND_SECONDS_MAX = 90
# The exit codes that a fault may cause: indeterminate, unreachable.
FAULT_CODES = {5, 6}
# All is restored: a node that goes away keeps a record that says nothing any more.
ALL_STORED = {RestoreCrashPoint.SLOTS_RELEASED, RestoreCrashPoint.OUTCOME_STORED}
Case = tuple[Callable[[FaultTargets], Repair], RestoreCrashPoint, int]
FAULTS = (primary_down, primary_restarted, *NETWORK_FAULTS, *STORE_FAULTS)
POINTS = [
    (point, count)
    for point in RestoreCrashPoint
    if point != RestoreCrashPoint.ABANDONED
    for count in ((1, SHARDS) if point in RESTORE_PER_NODE else (1,))
]
CASES: list[Case] = [(fault, *at) for fault in FAULTS for at in POINTS]
SHORT = [CASES[number] for number in sorted(covering(CASES))]
# The first fault of the servers, of the network and of the store.
IN_TEST = [next(case for case in SHORT if case[0] in faults) for faults in ([FAULTS[0]], NETWORK_FAULTS, STORE_FAULTS)]


@dataclass(frozen=True, slots=True)
class FaultyPlace:
    """The place as users reach it, and the fleets as the restore reaches them, through proxies."""

    direct: Place
    source: Fleet
    target: Fleet
    faults: FaultTargets


@pytest.fixture(scope="module", autouse=True)
def impatient_watch() -> Iterator[None]:
    """Give up early on a silent node, but not during the pause that a fault causes."""
    with impatient():
        yield


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession, s3: S3Server) -> Iterator[FaultyPlace]:
    folder = tmp_path_factory.mktemp("restore-faults")
    servers = start_fleet(folder / "fleet", shards=SHARDS, backups=0)
    try:
        with ExitStack() as stack:
            store = stack.enter_context(s3_proxy(s3.endpoint_url))
            proxies = stack.enter_context(pg_proxies(servers))
            options = s3.options | {"endpoint_url": store.endpoint_url}
            direct = configure_fleet(servers, folder / "fleet.toml", s3.bucket("restored"), options, IMPATIENT)
            place = make_place(servers, direct, spark)
            stack.enter_context(dropping_slots(direct))
            source = route_through(proxies, direct, folder / "led.toml")
            (folder / "led-target.toml").write_text(source.path.read_text().replace("/bank", f"/{DATABASE}"))
            faults = FaultTargets(servers, proxies, store, None, random.Random(SEED))
            yield FaultyPlace(place, source, load_fleet(folder / "led-target.toml"), faults)
    finally:
        stop_fleet(folder / "fleet", delete=True)


def restore_with_fault(faulty: FaultyPlace, case: Case) -> SnapshotError | None:
    """Restore with the fault from the point on, which is repaired at the end; return the error."""
    fault, point, count = case
    repairs: list[Repair] = []

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(point), count):
            repairs.append(fault(faulty.faults))

    request = RestoreRequest(NAME, replace=True)
    error = None
    with repaired_after(repairs, COMMAND_SECONDS_MAX) as hung:
        try:
            plan = plan_restore(faulty.source, faulty.target, request)
            restore_fleet(plan, Ready(faulty.direct.spark), Watching(then))
        except SnapshotError as raised:
            error = raised
    assert repairs, f"{point} was not reached: {error}"
    assert not hung.is_set(), "the command ended only when the fault was repaired"
    return error


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in IN_TEST else pytest.mark.rest)
        for case in (CASES if SOAK_SECONDS else SHORT)
    ],
    ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}",
)
def test_after_a_fault_all_shards_are_old_or_new_or_the_next_command_says_more(faulty: FaultyPlace, case: Case) -> None:
    place = faulty.direct
    with old_databases(place):
        error = restore_with_fault(faulty, case)
        if error is None:
            # An outcome that could not be stored is recorded by the next command.
            assert plain_restore(place) is None
            assert_restored(place, keeps_records=case[1] in ALL_STORED)
            return
        assert case[0] not in HARMLESS, error
        assert error.exit_code in FAULT_CODES, error
        states = place.states()
        found = plain_restore(place)
        if found is None:
            # Nothing was made, or all of it is undone or done.
            assert set(states) in ({"old"}, {"new"})
            (assert_old if states[0] == "old" else assert_restored)(place)
            return
        assert found.exit_code == 3
        assert "restore-resume" in error.hint, error.hint
        if random.Random(f"{SEED} {case}").random() < 0.5 and "restore-abandon" in found.hint:
            abandon_restore(place.fleet, place.target, NAME, print, Silent())
            assert_old(place)
        else:
            resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Watching())
            assert_restored(place)
        with pytest.raises(UnfinishedRestoreError):
            abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert open_restores(place) == []
