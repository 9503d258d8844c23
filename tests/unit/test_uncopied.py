"""Restore points that a second store lacks: what gives them up in the first store says so, and so does `list`."""

from __future__ import annotations

import io
from datetime import timedelta
from pathlib import Path

import pytest

from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.fold import limits
from cutline.snapshots.merge.running import Proof, plan_merge, run_merge
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.records.operation_records import CopiedPoint
from cutline.storage.clock import utc_now
from cutline.storage.ids import new_operation_id
from cutline.storage.location import StoreLocation
from tests.commands.in_process import run_here, run_with_stderr
from tests.unit.made_repairs import NAME, MadeShard
from tests.unit.test_merged_repairs import BORDERS, HISTORY, ROWS, Ready

SECOND = "s3://elsewhere/shop"


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A chain with increments 1 to 3, merged at 2."""
    monkeypatch.setattr(limits, "CHANGES_MAX", 500_000)
    location = StoreLocation(f"file://{tmp_path}/store")
    shard = MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, BORDERS, location=location)
    shard.take()
    plan = plan_merge(shard.fleet, NAME, 2, Silent())
    run_merge(shard.fleet, plan, Ready(), Silent(), lambda *_: Proof(0, ""))  # type: ignore[arg-type]
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'name = "shop"\nstore = "{location.url}"\n[[copy]]\nto = "{SECOND}"\n'
        '[[node]]\nid = "a"\ndsn = "dbname=a"\n[[node]]\nid = "b"\ndsn = "dbname=b"\nbackup_of = "a"\n'
    )
    return load_fleet(file)


def record_copy(fleet: Fleet, name: str, increment: int) -> None:
    """Record a complete copy that found one snapshot, as if it had begun before this one was taken."""
    began = utc_now() - timedelta(days=9000)
    command = Command("copy", "", new_operation_id(began))
    copied = (CopiedPoint(SECOND, name, increment, Time.of(began), 0),)
    record_without_intent(fleet.store.open(), command, Time.of(began), "", Ending("done", code=0, copied=copied))


def run(fleet: Fleet, *words: str) -> str:
    """Run the command; return what it prints, with hints as if the fleet file had its usual name."""
    code, out = run_with_stderr(err := io.StringIO(), fleet, *words)
    assert code == 0, out
    return (out + err.getvalue()).replace(f" --fleet {fleet.path}", "")


@pytest.mark.parametrize("quiet", [(), ("--quiet",)], ids=["", "quiet"])
@pytest.mark.parametrize(("copied", "expected"), [
    ((NAME, 0), f"{SECOND} has {NAME} only up to the full snapshot, so it can't be continued there once the chain"
     f" begins at increment 2 and never gets increment 1; to copy before: snapshot copy {NAME}"),
    ((NAME, 1), f"{SECOND} has {NAME} only up to increment 1, so it can't be continued there once the chain begins at"
     f" increment 2; to copy before: snapshot copy {NAME}"),
    ((NAME, 2), None),
    (("other", 0), f"{SECOND} has nothing of {NAME} yet, so it never gets the full snapshot to increment 1; to copy"
     f" before: snapshot copy {NAME}"),
])  # fmt: skip
def test_a_plan_says_which_restore_points_a_second_store_never_gets(
    fleet: Fleet, copied: tuple[str, int], expected: str | None, quiet: tuple[str, ...]
) -> None:
    record_copy(fleet, *copied)
    words, warnings = ("merge", NAME, "--to", "2", "--drop-earlier"), [expected] if expected else []
    assert run_here(fleet, *words, "--dry-run")[1]["warnings"] == warnings
    rules = ("prune", "--keep-last", "1", "--dry-run")
    assert run_here(fleet, *rules)[1]["warnings"] == warnings
    texts = [run(fleet, *rules), run(fleet, *words, "--dry-run"), run(fleet, *words, "--yes", *quiet)]
    lines = [[line for line in text.splitlines() if line.startswith("warning: ")] for text in texts]
    assert lines == [[f"warning: {text}" for text in warnings]] * 3
    # What is given up already is warned of no more.
    assert run_here(fleet, *words, "--dry-run")[1]["warnings"] == []


def test_the_list_says_how_to_copy_what_a_second_store_lacks(fleet: Fleet) -> None:
    record_copy(fleet, NAME, 0)
    up_to_date = "to bring it up to date: snapshot copy --all"
    assert f"; {NAME} lacks 3 restore points; {up_to_date}" in run(fleet, "list")
    run(fleet, "merge", NAME, "--to", "2", "--drop-earlier", "--yes")
    stuck = (
        f"; {NAME} lacks 3 restore points and can't be continued there, because some of them were given up: to copy it"
        f" from increment 2 on, name an empty folder: snapshot copy {NAME} --to URL"
    )
    text = run(fleet, "list")
    assert stuck in text
    assert up_to_date not in text
    (state,) = run_here(fleet, "list")[1]["copies"]
    assert (state["missing"], [one["can_be_continued"] for one in state["snapshots"]]) == ([], [False])


def test_the_list_names_snapshots_of_which_a_second_store_has_nothing(fleet: Fleet) -> None:
    record_copy(fleet, "other", 0)
    text = run(fleet, "list")
    assert f"; it has nothing of {NAME}; to bring it up to date: snapshot copy --all" in text
    assert [one["missing"] for one in run_here(fleet, "list")[1]["copies"]] == [[NAME]]
