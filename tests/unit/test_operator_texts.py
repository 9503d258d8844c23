"""Sentences and numbers that operators read, where no other test has the words."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cutline.check import compare
from cutline.check.live.cut_comparison import CutComparison, TableVerdict
from cutline.check.report import CheckReport, Compared, Conflict, Findings, SnapshotReport
from cutline.cli.commands import check as check_command
from cutline.cli.commands.history import IMPORTANT, TITLES
from cutline.cli.commands.init import lines_of
from cutline.cli.demo import fleet as demo_fleet
from cutline.cli.output.arguments import CommandContext
from cutline.cli.output.tables import FittingTable, Shorter
from cutline.restore.drill import restorable
from cutline.restore.drill.restorable import RestorableReport
from cutline.snapshots.create.initialise import InitReport
from cutline.snapshots.operations.leases import LEASE_SECONDS, RENEW_SECONDS
from cutline.snapshots.operations.open_operations import OpenOperation
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.records.proven_chains import OnlyCutError
from tests.commands.in_process import run_as_text, run_here
from tests.unit.made_repairs import NAME
from tests.unit.test_repair import new_shard

DOCS = Path(__file__).parents[2] / "docs"


def copies(**more: Any) -> Any:
    return SimpleNamespace(group_name=lambda *_: "public.t", pairs=[("s1", "s1-b1")], nodes=["s1", "s1-b1"], **more)


@pytest.mark.parametrize(("theirs", "detail"), [
    ((20_000, 2), "one or more of the 20,000 rows in this partition differ"),
    ((19_999, 2), "20,000 rows on s1, 19,999 on s1-b1"),
])  # fmt: skip
def test_numbers_of_rows_have_separators(theirs: tuple[int, int], detail: str) -> None:
    entries = {"s1": {(1, 0): (20_000, 1)}, "s1-b1": {(1, 0): theirs}}
    (conflict,) = compare._compare_place(copies(), ("s1", "s1-b1"), (1, 0), entries, {})
    assert conflict.detail == detail


def test_numbers_of_changes_have_separators() -> None:
    sums = cast("Any", SimpleNamespace(as_dict=lambda: {(0, 1): (20_000, 1), (1, 1): (1_000, 1)}))
    findings = Findings(SnapshotReport("daily", 1))
    compare.compare_streams(copies(), sums, findings)
    (conflict,) = findings.report.conflicts
    assert conflict.detail == "20,000 changes in the archive of s1, 1,000 in the archive of s1-b1"


@pytest.mark.parametrize(("changed", "lost", "words"), [
    (1, 0, "1 row has other contents, although nobody has written it since"),
    (0, 1, "1 row is missing, although nobody has written it since"),
    (1, 1, "1 row has other contents, 1 row is missing, although nobody has written them since"),
    (2, 0, "2 rows have other contents, although nobody has written them since"),
])  # fmt: skip
def test_a_row_that_nobody_has_written_is_one_row(changed: int, lost: int, words: str) -> None:
    comparison = cast("Any", SimpleNamespace(label="daily at increment 1"))
    shard, group = SimpleNamespace(node=SimpleNamespace(id="s1")), SimpleNamespace(identity="default", name="public.t")
    verdict = cast("TableVerdict", SimpleNamespace(changed=changed, lost=lost, unknown=0))
    conflict = CutComparison._conflict(comparison, cast("Any", shard), cast("Any", group), verdict, ())
    assert conflict.detail == f"compared with daily at increment 1, {words}"


@pytest.mark.parametrize(("stopped", "text"), [(1, "1 server stopped"), (2, "2 servers stopped")])
def test_one_server_is_one_server(stopped: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_fleet, "open_fleet", lambda _: SimpleNamespace(store=tmp_path / "store"))
    monkeypatch.setattr(demo_fleet, "stop_fleet", lambda *_, **__: stopped)
    assert run_as_text(new_shard().fleet, "demo", "down", str(tmp_path)).splitlines()[0] == text


@pytest.mark.parametrize(("allows", "end"), [
    (False, "check has no second copy to compare, and exits with 4; to allow one copy: docs/check.md#one-copy"),
    (True, "check has no second copy to compare, which [check] in the fleet file allows"),
])  # fmt: skip
def test_init_says_what_a_check_makes_of_one_copy(allows: bool, end: str) -> None:  # noqa: FBT001  # a parameter
    node = cast("Any", SimpleNamespace(node="s1", backup_of=None))
    store = cast("Any", SimpleNamespace(name="shop", fleet_id="f"))
    report = InitReport(
        store, store_created=False, nodes=(node,), groups={}, append_only={}, published={}, forgotten=[]
    )
    assert f"without a standby: s1; {end}" in lines_of(report, allows_one_copy=allows)


def test_the_seconds_of_a_check_contain_building_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> RestorableReport:
        time.sleep(0.3)
        return RestorableReport()

    shard, file = new_shard(), tmp_path / "check.xml"
    shard.take()
    report = CheckReport((SnapshotReport(NAME, 2, Compared(objects=1, bytes=1)),), 0.001)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    monkeypatch.setattr(check_command, "check_snapshots", lambda *_: report)
    monkeypatch.setattr(restorable, "check_restorable", build)
    code, document = run_here(shard.fleet, "check", NAME, "--restorable", "--junit", str(file))
    assert code == 0, json.dumps(document)
    assert document["seconds"] >= 0.3
    assert float(ElementTree.parse(file).getroot().attrib["time"]) >= 0.3


@pytest.mark.parametrize(
    ("conflicts", "expected"),
    [([], (3, "only-cut")), ([Conflict("missing", "its DDL is missing")], (1, None))],
    ids=["refused", "conflicts"],
)
def test_a_check_says_what_is_wrong_with_a_restore_point_although_it_has_no_rows_to_build(
    monkeypatch: pytest.MonkeyPatch, conflicts: list[Conflict], expected: tuple[int, str | None]
) -> None:
    def refuse(*_: object) -> RestorableReport:
        raise OnlyCutError("it has no rows")

    shard = new_shard()
    report = CheckReport((SnapshotReport(NAME, 0, conflicts=conflicts),), 0.001)
    monkeypatch.setattr(CommandContext, "load_fleet", lambda _: shard.fleet)
    monkeypatch.setattr(check_command, "check_snapshots", lambda *_: report)
    monkeypatch.setattr(restorable, "check_restorable", refuse)
    code, document = run_here(shard.fleet, "check", NAME, "--restorable")
    assert (code, document.get("error")) == expected


def test_the_page_shows_history_as_it_looks_in_80_columns() -> None:
    rows = [
        (
            "20261124T193737Z-442667cbbf", "create nightly, increment 1", "done", "root@vm",
            Shorter("2026-11-24 19:37:56Z", "2026-11-24 19:37Z"), "18.9 s", "4 objects, 6.6 KiB",
        ),
        (
            "20261124T193551Z-0b5ef7a1c2", "check nightly", "done: conflicts (exit 1)", "root@vm",
            Shorter("2026-11-24 19:36:15Z", "2026-11-24 19:36Z"), "24.0 s", "27 objects, 88.1 KiB, 4,000 rows",
        ),
        (
            "20261124T193227Z-eef66bd537", "check nightly",
            Shorter("failed: cancelled by root@vm (exit 8)", "failed (exit 8)", "cancelled by root@vm"), "root@vm",
            Shorter("2026-11-24 19:32:41Z", "2026-11-24 19:32Z"), "14.1 s", "",
        ),
    ]  # fmt: skip
    table = "\n".join(f"    {line}" for line in FittingTable(TITLES, rows, important=IMPORTANT).lines(80, "utf-8"))
    assert table in (DOCS / "operations.md").read_text()


def test_how_long_a_dead_repair_keeps_its_lease() -> None:
    intent = new_operation("repair", NAME, 2, ("a",))
    opened = OpenOperation(intent.id, intent)
    minutes, renewal = LEASE_SECONDS / 60, RENEW_SECONDS / 60
    assert f"for up to {minutes:.0f} minutes" in opened.text
    assert f"It runs for {minutes:.0f} minutes, and is renewed every {renewal:.0f} minutes" in " ".join(
        (DOCS / "repair.md").read_text().split()
    )
