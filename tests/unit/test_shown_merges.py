"""Merges as users see them: `show` names them, and `merge` says which increments begin with one."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from cutline.cli.commands.merge import document_of, lines_of, plan_lines
from cutline.cli.output.tables import moment_text, quantity_text, size_text
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.fold import limits
from cutline.snapshots.merge.running import MergeReport, Proof, plan_merge, run_merge
from cutline.storage.location import StoreLocation
from tests.commands.in_process import run_as_text, run_here
from tests.unit.made_repairs import NAME, MadeShard
from tests.unit.test_merged_repairs import BORDERS, HISTORY, ROWS, Ready


def test_merges_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGES_MAX", 500_000)
    location = StoreLocation(f"file://{tmp_path}/store")
    shard = MadeShard(ROWS, HISTORY, {"a": 150, "b": 50}, BORDERS, {"a": 9, "b": 5}, location=location)
    shard.take()
    file = tmp_path / "fleet.toml"
    file.write_text(f'name = "shop"\nstore = "{location.url}"\n[[node]]\nid = "a"\ndsn = "dbname=a"\n')
    fleet = load_fleet(file)

    def merge(increment: int) -> MergeReport:
        plan = plan_merge(shard.fleet, NAME, increment, Silent())
        return run_merge(shard.fleet, plan, Ready(), Silent(), lambda *_: Proof(0, ""))  # type: ignore[arg-type]

    assert run_here(fleet, "show", NAME)[1]["merges"] == []
    reports = {number: merge(number) for number in (3, 1, 2)}
    beginnings = {
        3: f"{NAME} begins at increment 3",
        1: f"increments 1 to 2 of {NAME} begin with the merge at 1, and later ones with that at 3",
        2: f"increment 2 of {NAME} begins with the merge at 2, and later ones with that at 3",
    }
    for number, text in beginnings.items():
        assert lines_of(reports[number])[0].startswith(f"{text} now: ")
    assert [document_of(report)["later_merge"] for report in reports.values()] == [None, 3, 3]
    assert plan_lines(plan_merge(shard.fleet, NAME, 2, Silent())) == [
        f"{beginnings[2]} already: operation {reports[2].operation}"
    ]

    shown = run_here(fleet, "show", NAME)[1]["merges"]
    assert [(one["increment"], one["operation"]) for one in shown] == [
        (number, reports[number].operation) for number in (1, 2, 3)
    ]
    sizes = {entry.key: entry.size for entry in shard.store.inventory(f"snapshots/{NAME}/base")}
    lines = run_as_text(fleet, "show", NAME).splitlines()
    for number, one in zip((1, 2, 3), shown, strict=True):
        keys = [key for entry in reports[number].merge.objects for key in entry.keys]
        assert one["bytes"] == sum(sizes[key] for key in keys)
        head = f"merged at increment {number} on {moment_text(datetime.fromisoformat(one['made_at']))}"
        what = f"{quantity_text(len(keys), 'objects')}, {size_text(one['bytes'])}"
        assert [line for line in lines if line.startswith(f"{head}: {what}")], lines
    assert [one["increment"] for one in run_here(fleet, "show", NAME, "--increment", "2")[1]["merges"]] == [1, 2]
    # What lies before the last is given up, and its merges with it.
    code, _ = run_here(fleet, "merge", NAME, "--to", "3", "--drop-earlier", "--yes")
    assert (code, [one["increment"] for one in run_here(fleet, "show", NAME)[1]["merges"]]) == (0, [3])
