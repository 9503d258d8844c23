from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

import cutline.cli.demo.command
from cutline.check.report import CheckReport, Compared, Conflict, Skipped, SnapshotReport
from cutline.cli.demo.figures import ChapterName, CutWatch, StoryReport
from cutline.cli.main import run
from cutline.embedded.bank import BankInvariants
from cutline.fleet.progress import Silent

RIGHT = BankInvariants(30_000_000, 30_000_000, (5, 5, 5), (), ())
VALID = SnapshotReport("demo", 3, Compared(objects=1))
CONFLICTS = SnapshotReport("demo", 3, Compared(objects=1), conflicts=[Conflict("digest", "other bytes")])
INCONCLUSIVE = SnapshotReport("demo", 3, Compared(objects=1), skipped=[Skipped("s1", "its object is damaged")])
WRONG = [
    (CONFLICTS, RIGHT),
    (INCONCLUSIVE, replace(RIGHT, total_balance=1)),
    (VALID, replace(RIGHT, total_balance=1)),
    (VALID, replace(RIGHT, half_present=("a transfer",))),
    (VALID, replace(RIGHT, unexplained_accounts=(7,))),
]


def new_story(checked: SnapshotReport, books: BankInvariants | None) -> StoryReport:
    return StoryReport(0.0, seconds=1.0, check=CheckReport((checked,), 0.5), invariants=books)


def run_demo(report: StoryReport, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(cutline.cli.demo.command, "tell_story", lambda *_: report)
    return run(["demo", *words])


def test_exit_0_if_the_invariants_hold(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_demo(new_story(VALID, RIGHT), monkeypatch, "--json") == 0
    assert json.loads(capfd.readouterr().out)["holds"] is True


def test_exit_4_if_the_check_is_inconclusive(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(new_story(INCONCLUSIVE, RIGHT), monkeypatch) == 4
    assert "the check is inconclusive" in capfd.readouterr().out


@pytest.mark.parametrize(("checked", "books"), [*WRONG, (VALID, None)])
def test_exit_1_if_anything_is_wrong(
    checked: SnapshotReport,
    books: BankInvariants | None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_demo(new_story(checked, books), monkeypatch) == 1
    assert "NOT PROVEN" in capfd.readouterr().out


def test_every_attempt_at_a_cut_is_a_window() -> None:
    watch = CutWatch(Silent())
    for step in ("check the chain", "cut", "cut", "archive WAL", "commit"):
        watch.step(step)
    assert len(watch.windows()) == 2
    assert all(begin <= end for begin, end in watch.windows())


def test_an_unfinished_cut_is_not_a_window_yet() -> None:
    watch = CutWatch(Silent())
    watch.step("cut")
    assert watch.windows() == ()


def test_chapters_have_names_for_scripts() -> None:
    assert all(name.isidentifier() for name in ChapterName)
