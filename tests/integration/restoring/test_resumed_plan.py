"""A restore that is resumed says what is left of it, and how long that takes."""

from __future__ import annotations

import io
import json
from typing import Any

import psycopg
import pytest

from cutline.cli.output.restore_report import plan_document, plan_lines
from cutline.nodes.connections import with_database
from cutline.restore.estimates.estimate import RestoreStep
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import RestorePreview
from cutline.restore.run.restore import resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.in_process import run_and_capture, run_here, run_with_stderr
from tests.commands.snapshot_runs import Ready
from tests.integration.restoring.ending import restore_left
from tests.integration.restoring.target_place import NAME, SHARDS, Place, assert_restored, old_databases
from tests.integration.restoring.test_progress import Recorded

# The bank's accounts, and the place's tables: ten lines of a log were deleted, and two inserted.
ROWS = 10_000 + 300 + 200 - 10 + 2


def loading_of(document: dict[str, Any]) -> list[tuple[str, int]]:
    return [(one["phase"], one["rows_loaded"]) for one in document["plan"]["targets"]]


def phases_of(place: Place) -> dict[str, str]:
    """The phase of each node's unfinished database, as its comment says."""
    found: dict[str, str] = {}
    for node in place.target.primaries:
        with psycopg.connect(with_database(node, "postgres").dsn) as connection:
            query = "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname LIKE '%restoring%'"
            for (text,) in connection.execute(query):
                found[node.id] = json.loads(text)["phase"]
    return found


def test_rows_that_are_loaded_are_named_and_the_rest_is_estimated(place: Place) -> None:
    told: list[tuple[RestorePlan, RestorePreview]] = []
    recorded = Recorded()
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.ROWS_LOADED)
        assert phases_of(place) == dict.fromkeys(("s1", "s2", "s3"), "loading")
        resume_restore(
            place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), recorded,
            lambda plan, preview: told.append((plan, preview)),
        )  # fmt: skip
        assert_restored(place)
    (shown,) = told
    document = plan_document(*shown)
    assert [(one["phase"], one["rows_loaded"]) for one in document["targets"]] == [("loading", ROWS)] * SHARDS
    assert document["done"] == []
    lines = [line for line in plan_lines(*shown) if f"; {ROWS:,} rows are already loaded" in line]
    assert [line.partition(" to ")[0] for line in lines] == ["s1", "s2", "s3"]
    # What is left of the base is what the changes have taken from it.
    assert shown[1].estimate.amounts[RestoreStep.ROWS] == SHARDS * 8
    left = [reading.seconds_left for step, reading in recorded.readings if step in shown[1].estimate.seconds]
    assert left
    assert all(one is not None and one >= 0 for one in left)


def test_what_is_left_is_shown_without_a_change(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["restore-resume", NAME, "--to", str(place.target.path)]
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.ROWS_LOADED)
        before = place.comments()
        code, planned = run_here(place.fleet, *words, "--dry-run")
        assert (code, planned["schema"]) == (0, "cutline/restore-plan/1"), planned
        assert [(one["phase"], one["rows_loaded"]) for one in planned["plan"]["targets"]] == [
            ("loading", ROWS)
        ] * SHARDS
        code, text = run_and_capture(place.fleet, *words, "--dry-run")
        assert text.count(f"; {ROWS:,} rows are already loaded") == SHARDS
        assert "every check passed; nothing was changed" in text
        with monkeypatch.context() as patch:
            # What another version has loaded is loaded again.
            patch.setattr("cutline.restore.run.run.version", lambda _package: "another")
            code, again = run_here(place.fleet, *words, "--dry-run")
        assert loading_of(again) == [("created", 0)] * SHARDS
        assert place.comments() == before
        said = io.StringIO()
        code, out = run_with_stderr(said, place.fleet, *words, "--json", spark=place.spark)
        assert (code, json.loads(out)["plan"]["targets"]) == (0, planned["plan"]["targets"])
        assert_restored(place)
        lines = [json.loads(line) for line in said.getvalue().splitlines()]
        schemas = [line["schema"] for line in lines]
        assert schemas.count(planned["schema"]) == 1
        # Before the first step that changes something.
        number = schemas.index(planned["schema"])
        assert lines[number]["plan"]["targets"] == planned["plan"]["targets"]
        assert {line["step"] for line in lines[:number]} == {"check targets"}
        code, none = run_here(place.fleet, *words, "--dry-run")
        assert (code, none["error"]) == (3, "nothing-unfinished")
        # It may be the same command, which was killed when all was done.
        assert str(none["message"]).endswith(f"{dict(none['details'])['last']}, was published")


def test_one_that_has_published_all_lacks_nothing(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.SLOTS_RELEASED)
        before = place.comments()
        words = ["restore-resume", NAME, "--to", str(place.target.path)]
        code, text = run_and_capture(place.fleet, *words, "--dry-run")
        assert code == 0, text
        assert text.count(f"{ROWS:,} rows, already published") == SHARDS
        assert place.comments() == before
        assert run_here(place.fleet, *words)[0] == 0
        assert_restored(place)


def test_shards_that_are_done_need_nothing_more(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.FINISHED)
        phases = phases_of(place)
        code, document = run_here(place.fleet, "restore-resume", NAME, "--to", str(place.target.path))
        assert code == 0, document
        assert_restored(place)
    plan = document["plan"]
    assert {one["node"]: one["phase"] for one in (*plan["targets"], *plan["done"])} == phases
    assert {one["node"] for one in plan["done"]} == {node for node, phase in phases.items() if phase == "finished"}
    assert [one["rows_loaded"] for one in (*plan["targets"], *plan["done"])] == [ROWS] * SHARDS
    assert plan["done"]
    assert not {"start Spark", "fold changes", "load rows"} & plan["seconds_by_step"].keys()
