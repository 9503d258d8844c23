"""`restore --data-only` that ends unfinished: it is named, goes on or is undone; after the decision it only goes on."""

from __future__ import annotations

import re
from collections import Counter

import psycopg
import pytest

from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.filled_tables import TablesUnfitError
from cutline.restore.rows.filling import Filling
from cutline.restore.rows.load import LoadError
from cutline.restore.rows.rounds import LoadEnd
from cutline.restore.run.restore import resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.restoring.filled import (
    assert_empty,
    assert_filled,
    end_words,
    leave,
    load,
    rows_of,
    tables_to_fill,
    words,
)
from tests.integration.restoring.target_place import (
    NAME,
    SHARDS,
    Place,
    await_sessions_over,
    plain_restore,
    restore_killed,
)
from tests.run.soak import first

ENDS = ["restore-resume", "restore-abandon"]
# Before the decision and after it.
POINTS = [
    (RestoreCrashPoint.LOADING, 2),
    (RestoreCrashPoint.ROWS_LOADED, 1),
    (RestoreCrashPoint.INDEXING, 2),
    (RestoreCrashPoint.FINISHED, SHARDS),
]
LATE = [
    (RestoreCrashPoint.DECIDED, 1),
    (RestoreCrashPoint.PUBLISHED, 1),
    (RestoreCrashPoint.PUBLISHED, SHARDS),
    (RestoreCrashPoint.SLOTS_RELEASED, 1),
]


# In `make test` a killed process is resumed, and one that lost a node undone.
KILLS = first([(*point, end) for end in ENDS for point in POINTS])
LOSSES = first([(*point, end) for end in reversed(ENDS) for point in POINTS])


@pytest.mark.parametrize(("point", "count", "end"), KILLS)
def test_a_killed_one_is_named_and_goes_on_or_is_undone(
    place: Place, point: RestoreCrashPoint, count: int, end: str
) -> None:
    """What `list` and a restore of any kind into the same databases say of it."""
    with tables_to_fill(place):
        restore_killed(place, point, count, "--data-only")
        await_sessions_over(place)
        code, listed = run_and_capture(place.fleet, "list")
        for command in ("restore-resume", "restore-abandon"):
            assert f"snapshot --fleet {place.fleet.path} {command} {NAME}   " in listed
        for again in ("--data-only", "--replace", "--schema-only"):
            code, refused = run_here(place.fleet, *words(place, again, "--yes"))
            assert (code, refused["error"]) == (3, "unfinished-restore"), refused
            # Of nodes that work side by side any may have begun.
            assert re.search(r"rows in tables of database shop on s\d", refused["message"]), refused
            program, to = f"snapshot --fleet {place.fleet.path}", f"--to {place.target.path}"
            assert f"to finish it: {program} restore-resume {NAME} {to}" in refused["hint"]
            assert refused["hint"].endswith(f"to undo it: {program} restore-abandon {NAME} {to}")
        code, done = run_here(place.fleet, *end_words(place, end), spark=place.spark)
        assert code == 0, done
        if end == "restore-resume":
            assert (done["resumed"], done["scope"]["data_only"]) == (True, True)
            assert_filled(place)
        else:
            assert "public.item" in {one.partition(": ")[2] for one in done["emptied"]}
            assert_empty(place)


@pytest.mark.parametrize(("point", "count", "end"), LOSSES)
def test_before_the_decision_it_ends_either_way(
    place: Place, point: RestoreCrashPoint, count: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tables_to_fill(place):
        error = leave(place, point, count)
        assert f"snapshot {end} {NAME}" in error.hint
        assert plain_restore(place)
        if end == "restore-abandon":
            report = abandon_restore(place.fleet, place.target, NAME, print, Silent())
            assert report.dropped == report.put_back == []
            assert_empty(place)
            with pytest.raises(UnfinishedRestoreError):
                abandon_restore(place.fleet, place.target, NAME, print, Silent())
        else:
            # What is in the ledger is not loaded again, and another version loads all again.
            if point == RestoreCrashPoint.ROWS_LOADED:
                monkeypatch.setattr("cutline.restore.run.run.version", lambda _package: "another")
            resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
            assert_filled(place)


def test_one_that_ended_while_loading_is_resumed_and_its_plan_has_what_is_loaded(place: Place) -> None:
    """Its ledger is in the existing database; there is no other."""
    with tables_to_fill(place):
        leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
        code, done = run_here(place.fleet, *end_words(place, "restore-resume"), spark=place.spark)
        assert code == 0, done
        loaded = [(one["phase"], one["rows_loaded"]) for one in done["plan"]["targets"]]
        assert loaded == [("loading", place.rows(shard)) for shard in range(SHARDS)]
        assert_filled(place)


def test_a_sequence_that_is_dropped_after_the_decision_is_named_and_set_when_it_is_back(place: Place) -> None:
    with tables_to_fill(place, "ALTER TABLE item ALTER n DROP DEFAULT"):
        node = place.target.primaries[1]

        def drop(reached: Reached) -> None:
            if reached.point == str(RestoreCrashPoint.DECIDED):
                execute(node.dsn, "DROP SEQUENCE numbers")

        with pytest.raises(TablesUnfitError, match=r"node s2: the rows are restored, but .*numbers") as raised:
            load(place, Watching(drop))
        assert f"create or alter the sequence, then: snapshot restore-resume {NAME}" in raised.value.hint
        execute(node.dsn, "CREATE SEQUENCE numbers")
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
        assert_filled(place)


def test_an_undo_that_is_refused_says_so_and_how_to_end_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.restore.rows.filling.LOCK_SECONDS_MAX", 1)
    with tables_to_fill(place), psycopg.connect(place.target.primaries[1].dsn) as reader:

        def lock_and_fail(reached: Reached) -> None:
            if reached.point == str(RestoreCrashPoint.ROWS_LOADED):
                reader.execute("LOCK TABLE log IN ACCESS SHARE MODE")
                raise LoadError("the rows are refused")

        watching = Watching(lock_and_fail)
        with pytest.raises(LoadError) as raised:
            load(place, watching)
        for end in ENDS:
            assert f"snapshot {end} {NAME}" in raised.value.hint
        assert any("could not be undone" in note and "held locks" in note for note in watching.notes)
        reader.rollback()
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert_empty(place)


def test_what_another_version_has_loaded_again_is_recorded_as_its_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tables_to_fill(place):
        leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
        monkeypatch.setattr("cutline.restore.run.run.version", lambda _package: "another")

        def lose(reached: Reached) -> None:
            if reached.point == str(RestoreCrashPoint.ROWS_LOADED):
                raise NodeUnreachableError("node s2: it is gone")

        ready = Ready(place.spark)
        with pytest.raises(NodeUnreachableError):
            resume_restore(place.fleet, place.target, RestoreRequest(NAME), ready, Watching(lose))
        monkeypatch.setattr(Filling, "start_again", lambda _: pytest.fail("all is loaded once more"))
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), ready, Silent())
        assert_filled(place)


def test_only_what_is_missing_is_loaded_by_another_process(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are seen as they come in: those of the base are there when no changes are loaded."""
    with tables_to_fill(place):
        with monkeypatch.context() as patch:
            # Whoever has folded them.
            patch.setattr("cutline.restore.rows.jobs._segment_tasks", lambda *_: [])
            patch.setattr("cutline.restore.rows.jobs._image_tasks", lambda *_: [])
            patch.setattr("cutline.restore.rows.jobs._load_images", lambda *_: LoadEnd(Counter[int]()))
            leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
        lines = [rows_of(node.dsn, "item")["public.item"].count(b"\n") for node in place.target.primaries]
        # Of 300 rows those whose id is a multiple of 3 or of 50 have changed.
        assert lines == [300 - 100 - 4] * SHARDS
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
        assert_filled(place)


@pytest.mark.parametrize(("point", "count"), first(LATE))
def test_after_the_decision_it_only_goes_forward(place: Place, point: RestoreCrashPoint, count: int) -> None:
    with tables_to_fill(place):
        error = leave(place, point, count)
        assert "restore-resume" in error.hint
        assert "restore-abandon" not in error.hint
        found = plain_restore(place) if point != RestoreCrashPoint.SLOTS_RELEASED else None
        if found is None:
            # Nothing is left in the databases, and the store knows what was decided.
            assert abandon_restore(place.fleet, place.target, NAME, print, Silent()).done
        else:
            assert "restore-abandon" not in found.hint
            with pytest.raises(UnfinishedRestoreError, match="can't be undone"):
                abandon_restore(place.fleet, place.target, NAME, print, Silent())
            resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
        assert_filled(place)


def test_what_is_ended_after_the_decision_leaves_nothing_in_the_databases(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its outcome in the store nobody looks for it any more."""
    with tables_to_fill(place):
        leave(place, RestoreCrashPoint.PUBLISHED, SHARDS)

        def lose(*_: object) -> None:
            raise NodeUnreachableError("node s2: it is gone")

        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.run.ending.clear_records", lose)
            with pytest.raises(NodeUnreachableError):
                resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
        assert_filled(place)


def test_a_record_that_can_not_be_read_is_refused_alike_by_all(place: Place) -> None:
    with tables_to_fill(place):
        leave(place, RestoreCrashPoint.LOADING, SHARDS)
        second = place.target.primaries[1]
        with psycopg.connect(second.dsn) as connection:
            query = "SELECT nspname FROM pg_namespace WHERE nspname ~ '^cutline'"
            (schema,) = connection.execute(query).fetchone() or ("",)
            connection.execute(f"ALTER TABLE {schema}.record ADD kept text".encode())
            connection.execute(f"UPDATE {schema}.record SET kept = text, text = 'of another version'".encode())
        lines = (words(place, "--data-only"), *(end_words(place, end) for end in ENDS))
        refused = [run_here(place.fleet, *line) for line in lines]
        assert {code for code, _ in refused} == {3}
        assert len({(said["message"], said["hint"]) for _, said in refused}) == 1
        assert "its record in database shop of s2 can't be read" in refused[0][1]["message"]
        assert "the version of Cutline that began it" in refused[0][1]["hint"]
        execute(second.dsn, f"UPDATE {schema}.record SET text = kept")
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert_empty(place)
