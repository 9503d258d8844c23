"""Which restore a command ends, and what is said where there is none, or one of another snapshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cutline.fleet.progress import Noting, Silent
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready
from tests.integration.restoring.ending import abandon, restore_left, resume
from tests.integration.restoring.target_place import NAME, SHARDS, Place, assert_old, old_databases


def test_a_create_names_the_open_restore_into_its_databases(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(place, target=place.fleet)
    restore_left(own, RestoreCrashPoint.CREATED, SHARDS)
    try:
        # No increment of the chain that the other modules share.
        for take, text in (
            (create_full, "is running; it will end the chain of every database that it sets aside"),
            (create_increment, "a chain will end if its source database is set aside"),
        ):
            noting = Noting(Silent())
            take(place.fleet, CreateRequest("between"), Ready(place.spark), noting)
            (note,) = [note for note in noting.notes if f" of {NAME} into database bank on" in note]
            assert text in note
            # As a minute later.
            monkeypatch.setattr("cutline.snapshots.operations.open_operations.shows_life", lambda *_: False)
    finally:
        abandon(own)
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CREATED, SHARDS)
        noting = Noting(Silent())
        create_full(place.fleet, CreateRequest("beside"), Ready(place.spark), noting)
        assert not [one for one in noting.notes if f" of {NAME} into " in one]
        abandon(place)


def test_a_file_that_to_names_and_does_not_exist_is_not_asked_for_by_fleet(place: Place, tmp_path: Path) -> None:
    code, refused = run_here(place.fleet, "restore", NAME, "--to", str(tmp_path / "missing.toml"))
    assert (code, refused["error"]) == (2, "fleet-file")
    assert refused["hint"].startswith("--to names the file")


def test_there_is_nothing_to_end(place: Place) -> None:
    with old_databases(place):
        for command in (lambda: resume(place), lambda: abandon(place)):
            with pytest.raises(UnfinishedRestoreError, match="no unfinished restore"):
                command()
        assert_old(place)


def test_another_snapshots_restore_is_named(place: Place) -> None:
    create_full(place.fleet, CreateRequest("other"), Ready(place.spark), Silent())
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CREATED, SHARDS)
        with pytest.raises(UnfinishedRestoreError, match="belongs to snapshot daily, not to other"):
            resume_restore(place.fleet, place.target, RestoreRequest("other"), Ready(place.spark), Silent())
        with pytest.raises(UnfinishedRestoreError, match="does not belong to snapshot other"):
            abandon_restore(place.fleet, place.target, "other", print, Silent())
        abandon(place)
        assert_old(place)


def test_the_command_ends_a_restore_in_both_ways(place: Place) -> None:
    to = ("--to", str(place.target.path))
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CREATED, SHARDS)
        code, document = run_here(place.fleet, "restore", NAME, *to, "--replace", "--yes")
        assert (code, document["error"]) == (3, "unfinished-restore")
        code, document = run_here(place.fleet, "restore-abandon", NAME, *to, "--yes")
        assert (code, len(document["operations"]), len(document["dropped"])) == (0, 1, SHARDS)
        assert_old(place)
        assert run_here(place.fleet, "restore-resume", NAME, *to)[0] == 3
        assert run_here(place.fleet, "restore-abandon", NAME, *to)[0] == 2
        assert run_here(place.fleet, "restore-resume", NAME, *to, "--replace")[0] == 2
