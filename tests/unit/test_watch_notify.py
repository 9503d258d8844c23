"""`[notify] command` gets the event as JSON on stdin; what is wrong with it is said, and ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import cutline.cli.watch.notices
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.notices import Notices, adopt_failures, notify, state_of
from cutline.snapshots.records.chain import RenewalGap
from cutline.storage.errors import UnreachableError

EVENT: dict[str, object] = {"event": "failed", "message": "node s1 can't be reached"}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_event_is_on_stdin(tmp_path: Path) -> None:
    file = tmp_path / "event"
    assert notify(python(f"import sys; open({str(file)!r}, 'w').write(sys.stdin.read())"), EVENT) == ""
    assert json.loads(file.read_text()) == {"schema": "cutline/notify/1", **EVENT}


def test_without_a_command_nothing_happens() -> None:
    assert notify((), EVENT) == ""


def test_a_command_that_fails_does_not_read_or_is_not_there_is_named() -> None:
    assert notify(python("raise SystemExit(3)"), EVENT).endswith("ended with exit code 3")
    assert notify(python("import os; os.close(0)"), EVENT | {"more": "x" * 1_000_000}) == ""
    assert "/nowhere" in notify(["/nowhere"], EVENT)


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.cli.watch.notices, "NOTIFY_SECONDS_MAX", 0.5)
    assert "was still running after" in notify(python("import time; time.sleep(60)"), EVENT)


def test_a_command_that_hangs_ends_with_an_interrupted_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "process"

    def communicate(process: subprocess.Popen[bytes], *_: object) -> None:
        file.write_text(str(process.pid))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(KeyboardInterrupt):
        notify(python("import time; time.sleep(60)"), EVENT)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@dataclass
class Pager:
    """A [notify] command that fails while it is away, what it got, and a clock for the pauses."""

    is_away: bool = True
    seconds: float = 1000.0
    seconds_each: float = 0.0
    got: list[tuple[str, str]] = field(default_factory=list)
    tries: int = 0
    said: list[str] = field(default_factory=list)

    def take(self, _command: object, event: dict[str, object], seconds_max: float = 30.0) -> str:
        assert seconds_max > 0
        self.seconds += self.seconds_each
        self.tries += 1
        if self.is_away:
            return "[notify] command x ended with exit code 3"
        self.got.append((str(event["event"]), str(event["task"])))
        return ""

    def wait(self, notices: Notices, seconds: float) -> int:
        """Let the rounds of a watch pass, one a second or less often; return how many times the command has run."""
        before, until = self.tries, self.seconds + seconds
        while self.seconds < until:
            self.seconds += min(seconds / 100, until - self.seconds)
            notices.send_again()
        return self.tries - before


@pytest.fixture
def pager(monkeypatch: pytest.MonkeyPatch) -> Pager:
    found = Pager()
    monkeypatch.setattr(cutline.cli.watch.notices, "notify", found.take)
    monkeypatch.setattr(cutline.cli.watch.notices, "time", SimpleNamespace(monotonic=lambda: found.seconds))
    return found


def notices_to(pager: Pager) -> Notices:
    source = SimpleNamespace(path=Path("fleet.toml"), fleet=SimpleNamespace(name="shop", notify=("x",)))
    return Notices(cast(FleetSource, source), lambda text, **_: pager.said.append(text))


def test_notices_that_the_command_did_not_accept_are_sent_again_in_order(pager: Pager) -> None:
    notices = notices_to(pager)
    notices.waits(UnreachableError("node s1 is away"))
    notices.waits(None)
    assert (pager.got, pager.tries) == ([], 2)
    # The pauses double: 2, 4, … minutes.
    assert pager.wait(notices, 3600) == 4
    pager.is_away = False
    notices.ages(UnreachableError("too old"))
    assert pager.got == [("failed", "watch"), ("recovered", "watch"), ("failed", "max-age")]
    # It was named once, however often it was tried.
    assert pager.said == ["[notify] command x ended with exit code 3"]
    assert pager.wait(notices, 90000) == 0


def test_a_notice_is_given_up_after_a_day(pager: Pager) -> None:
    notices = notices_to(pager)
    notices.waits(UnreachableError("node s1 is away"))
    assert 20 < pager.wait(notices, 100_000) < 40
    assert pager.said[-1].startswith("a notice was given up, because the [notify] command did not accept it: watch")
    pager.is_away = False
    assert (pager.wait(notices, 100_000), pager.got) == (0, [])


def test_only_the_newest_notices_wait_for_the_command(pager: Pager) -> None:
    notices = notices_to(pager)
    for _ in range(70):
        notices.waits(UnreachableError("node s1 is away"))
        notices.waits(None)
    assert sum("given up" in text for text in pager.said) == 40
    pager.is_away = False
    pager.wait(notices, 7200)
    assert len(pager.got) == 100


def test_absent_copies_are_reported_when_they_change_and_when_they_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, str, str]] = []
    source = SimpleNamespace(path=Path("fleet.toml"), fleet=SimpleNamespace(name="shop", notify=("x",)))

    def keep(_command: object, event: dict[str, object]) -> str:
        sent.append((str(event["event"]), str(event["task"]), str(event["message"])))
        return ""

    monkeypatch.setattr(cutline.cli.watch.notices, "notify", keep)
    notices = Notices(cast(FleetSource, source), lambda *_, **__: None)
    for absent in ({}, {"b": "paused"}, {"b": "not receiving"}, {"b": "paused", "c": "away"}, {}, {}):
        notices.leaves_out("daily", absent)
    assert [event for event, _, _ in sent] == ["failed", "failed", "recovered"]
    assert {task for _, task, _ in sent} == {"copies"}
    assert [("b: paused" in text, "c: away" in text) for _, _, text in sent[:2]] == [(True, False), (True, True)]
    assert notices.troubles == []


@pytest.mark.parametrize(("is_away", "seconds_each", "sent"), [(True, 0.0, 0), (False, 0.0, 3), (False, 3.0, 2)])
def test_a_watch_that_ends_sends_what_it_can_in_time_and_names_the_rest(
    pager: Pager, *, is_away: bool, seconds_each: float, sent: int
) -> None:
    notices = notices_to(pager)
    for _ in range(2):
        notices.waits(UnreachableError("node s1 is away"))
        notices.waits(None)
    pager.is_away, pager.seconds_each, pager.said, pager.tries = is_away, seconds_each, [], 0
    del notices._unsent[0]
    notices.end()
    assert (len(pager.got), pager.tries) == (sent, sent or 1)
    assert sum("was not delivered before the watch ended: watch" in text for text in pager.said) == 3 - sent
    notices.end()
    assert pager.tries == (sent or 1)


def test_each_gap_is_reported_once_and_ends_with_the_next_increment(pager: Pager) -> None:
    pager.is_away, notices = False, notices_to(pager)
    gap, later = (RenewalGap(number, "s1", "its slot is lost") for number in (3, 4))
    for gaps in ([], [gap], [later], [], []):
        notices.leaves_gaps("daily", gaps)
    assert pager.got == [("failed", "gaps"), ("failed", "gaps"), ("recovered", "gaps")]
    assert notices.troubles == []


@pytest.mark.parametrize(("hint", "sent"), [
    ("see: snapshot status", "see: snapshot --fleet {} status"),
    ("check that the server is running, then repeat the command: it cleans up anything that was left there",
     "check that the server is running; the watch tries again by itself"),
    ("repeat the command: it copies the node again", "the watch tries again by itself"),
    ("free a slot, then repeat the command; or: snapshot end a",
     "free a slot; the watch tries again by itself; or: snapshot --fleet {} end a"),
    ("to open it, then repeat the command: ALTER DATABASE a", "to open it, then repeat the command: ALTER DATABASE a"),
])  # fmt: skip
def test_a_hint_names_the_fleet_file_and_no_command_that_the_watch_repeats(
    hint: str, sent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is that of the watch, from any folder, not its copy of it."""
    monkeypatch.chdir(tmp_path)
    hints: list[object] = []

    def keep(_command: object, event: dict[str, object]) -> str:
        hints.append(event["hint"])
        return ""

    monkeypatch.setattr(cutline.cli.watch.notices, "notify", keep)
    source = SimpleNamespace(path=Path("shop.toml"), fleet=SimpleNamespace(name="shop", notify=("x",)))
    notices = Notices(cast(FleetSource, source), lambda *_, **__: None)
    notices.waits(UnreachableError("node s1: no answer for 51 s", hint=hint))
    assert hints == [sent.format(tmp_path / "shop.toml")]


def test_a_new_watch_does_not_report_the_same_absence_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(path=Path("fleet.toml"), fleet=SimpleNamespace(name="shop", notify=()))
    first = Notices(cast(FleetSource, source), lambda *_, **__: None)
    first.leaves_out("daily", {"b": "paused"})
    told = state_of(first.troubles, had_turn=True).failing
    second = Notices(cast(FleetSource, source), lambda *_, **__: None)
    second.adopt(adopt_failures(told, {}), ())
    monkeypatch.setattr(Notices, "send", lambda *_: pytest.fail("it was reported"))
    second.leaves_out("daily", {"b": "not receiving"})
