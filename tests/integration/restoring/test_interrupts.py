"""Ctrl-C and SIGTERM at a restore: what the error says is what is there, and what it says to type works."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.run.ending import ALL_RESTORED
from cutline.restore.run.restore import restore_fleet
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import abandon_restore, discard_old
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.errors import StoppedError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.restoring.ending import REQUEST, abandon, restore_left, resume
from tests.integration.restoring.target_place import (
    KILL_SECONDS_MAX,
    NAME,
    ROOT,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    old_databases,
    open_restores,
)
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UNDONE = (RestoreCrashPoint.LOADING, RestoreCrashPoint.ROWS_LOADED, RestoreCrashPoint.CLOSED)
OPEN = (
    RestoreCrashPoint.DECIDED,
    RestoreCrashPoint.RENAMED,
    RestoreCrashPoint.PUBLISHED,
    RestoreCrashPoint.SLOTS_RELEASED,
)
DONE = (RestoreCrashPoint.OUTCOME_STORED,)


def interrupted(place: Place, point: RestoreCrashPoint) -> tuple[StoppedError, Watching]:
    def then(reached: Reached) -> None:
        if reached.point == str(point):
            raise KeyboardInterrupt

    watching = Watching(then)
    with pytest.raises(StoppedError) as raised:
        restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), watching)
    assert isinstance(raised.value.__cause__, KeyboardInterrupt)
    return raised.value, watching


@pytest.mark.parametrize("point", first(UNDONE))
def test_before_the_decision_all_is_removed_and_no_database_is_closed(place: Place, point: RestoreCrashPoint) -> None:
    with old_databases(place):
        error, watching = interrupted(place, point)
        assert error.message == "everything that the restore created was removed"
        assert "unfinished" not in error.details
        assert watching.notes[-1] == "the restore was undone: the databases that it created were dropped"
        assert place.states() == ["old"] * SHARDS
        assert open_restores(place) == []
        assert_old(place)


@pytest.mark.parametrize("point", [*OPEN, *DONE])
def test_from_the_decision_on_the_error_says_what_is_open_and_what_is_done(
    place: Place, point: RestoreCrashPoint
) -> None:
    with old_databases(place):
        error, _ = interrupted(place, point)
        left = open_restores(place)
        if point in DONE:
            assert (error.message, left) == (ALL_RESTORED, [])
            assert "snapshot list" in error.hint
        else:
            assert left == [error.details["unfinished"]]
            assert f"snapshot restore-resume {NAME}" in error.hint
            # Before all are marked as published, another command may still undo it.
            is_last = point == RestoreCrashPoint.SLOTS_RELEASED
            assert error.message == (
                f"{ALL_RESTORED}, but this was not recorded" if is_last else "the restore was left unfinished"
            )
            assert (f"snapshot restore-abandon {NAME}" in error.hint) is not is_last
            resume(place)
        # What its outcome in the store makes void may be left.
        assert_restored(place, keeps_records=point in DONE)


def test_an_undo_that_is_interrupted_says_that_it_may_be_done_in_part(place: Place) -> None:
    def then(reached: Reached) -> None:
        if reached.point == str(RestoreCrashPoint.ABANDONED):
            raise KeyboardInterrupt

    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, SHARDS)
        with pytest.raises(StoppedError, match="the restore may be partly undone") as raised:
            abandon_restore(place.fleet, place.target, NAME, lambda _: None, Watching(then))
        assert f"snapshot restore-abandon {NAME}" in raised.value.hint
        abandon(place)
        assert_old(place)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("point", [RestoreCrashPoint.DECIDED, RestoreCrashPoint.OUTCOME_STORED])
def test_a_signal_ends_the_command_with_that_in_its_document(
    place: Place, number: signal.Signals, point: RestoreCrashPoint
) -> None:
    program = [sys.executable, "-m", "tests.faults.signalled_command", number.name, str(point), "1", "--"]
    words = ["--fleet", str(place.fleet.path), "--json", "--quiet", "restore", NAME, "--to", str(place.target.path)]
    with old_databases(place):
        done = subprocess.run(
            [*program, *words, "--replace", "--yes"],
            capture_output=True, stdin=subprocess.DEVNULL, text=True, cwd=ROOT, timeout=KILL_SECONDS_MAX, check=False,
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        assert done.returncode == found["code"] == (130 if number == signal.SIGINT else 8), done.stderr
        by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        if point == RestoreCrashPoint.DECIDED:
            assert found["message"] == f"stopped by {by}: the restore was left unfinished"
            again = f"snapshot --fleet {place.fleet.path} restore-resume {NAME} --to {place.target.path}"
            assert f"to finish it: {again}" in found["hint"].split("\n")
            assert open_restores(place) == [found["details"]["unfinished"]]
            resume(place)
        else:
            assert found["message"] == f"stopped by {by}: {ALL_RESTORED}"
            assert open_restores(place) == []
        assert_restored(place, keeps_records=point == RestoreCrashPoint.OUTCOME_STORED)


def test_a_removal_of_old_databases_that_is_interrupted_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with old_databases(place):
        restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.unfinished.undoing.drop_database", interrupt)
            with pytest.raises(StoppedError, match="some of the old databases may have been dropped") as raised:
                discard_old(place.fleet, place.target, lambda _: None, Silent())
        assert "snapshot restore-discard" in raised.value.hint
        assert len(discard_old(place.fleet, place.target, lambda _: None, Silent())) == SHARDS
        assert_restored(place)


def test_an_interrupt_while_spark_ends_does_not_take_the_report(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(SparkOnDemand):
        def begin(self, *_: object) -> None:
            """Do nothing: the session is running."""

        def session(self) -> SparkSession:
            return place.spark

        def __exit__(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr("cutline.cli.commands.restore.SparkOnDemand", Ending)
    with old_databases(place):
        code, found = run_here(place.fleet, "restore", NAME, "--to", str(place.target.path), "--replace", "--yes")
        assert (code, found["snapshot"], found["rows"]) == (0, NAME, sum(place.rows(one) for one in range(SHARDS)))
        assert_restored(place)
