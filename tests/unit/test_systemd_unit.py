"""The units of docs/systemd are ones that systemd takes, and their commands can be typed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.cli.output.failure import CANCELLED, MEANINGS, USAGE
from tests.integration.shown_commands import ShownCommand, parse
from tests.programs.lacking import skip_without

FOLDER = Path(__file__).parents[2] / "docs" / "systemd"
UNIT, CHECK = FOLDER / "cutline-watch.service", FOLDER / "cutline-check.service"
TIMER = CHECK.with_suffix(".timer")


def values(key: str, unit: Path = UNIT) -> list[str]:
    return re.findall(rf"(?m)^{key}=(.*)$", unit.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("unit", "command"), [(UNIT, "watch"), (CHECK, "check")])
def test_its_command_can_be_typed(unit: Path, command: str) -> None:
    (program,) = values("ExecStart", unit)
    assert program.split()[:2] == ["/opt/cutline/bin/snapshot", command]
    parse(ShownCommand(unit.name, f"snapshot {program.partition(' ')[2]}"))


def test_a_check_that_fails_or_hangs_is_a_failed_unit() -> None:
    """Without settings of its own, systemd takes every code but 0 for a failure; a oneshot has no limit of time."""
    assert values("SuccessExitStatus", CHECK) == []
    assert values("Type", CHECK) == ["oneshot"]
    assert values("TimeoutStartSec", CHECK) == ["12h"]
    # The report is in the folder that systemd makes for the unit.
    assert "%S/cutline/" in values("ExecStart", CHECK)[0]
    assert values("StateDirectory", CHECK) == ["cutline"]


def test_it_is_not_started_again_after_what_starting_it_again_does_not_mend() -> None:
    codes = {int(code) for code in values("RestartPreventExitStatus")[0].split()}
    assert {USAGE, CANCELLED} < codes < MEANINGS.keys()


def analyzed(*words: str | Path) -> tuple[int, str]:
    if shutil.which("systemd-analyze") is None:
        skip_without("systemd-analyze", "it is not on the PATH")
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


def copied(unit: Path, folder: Path) -> Path:
    """A copy of a unit. systemd looks for the program, which is not installed here."""
    copy = folder / unit.name
    copy.write_text(unit.read_text().replace("/opt/cutline/bin/snapshot", sys.executable))
    return copy


@pytest.mark.parametrize(
    ("unit", "right", "wrong"),
    [(UNIT, "Restart=on-failure", "Restart=sometimes"), (CHECK, "Type=oneshot", "Type=sometimes")],
)
def test_systemd_takes_it(tmp_path: Path, unit: Path, right: str, wrong: str) -> None:
    copy = copied(unit, tmp_path)
    assert analyzed("verify", copy) == (0, "")
    copy.write_text(copy.read_text().replace(right, wrong))
    assert "sometimes" in analyzed("verify", copy)[1]


def test_the_timer_starts_the_check_once_a_day(tmp_path: Path) -> None:
    copied(CHECK, tmp_path)
    assert analyzed("verify", copied(TIMER, tmp_path)) == (0, "")
    (time,) = values("OnCalendar", TIMER)
    assert analyzed("calendar", time)[0] == 0
    assert re.fullmatch(r"\*-\*-\* \d\d:\d\d:00 UTC", time)
    assert values("Persistent", TIMER) == ["true"]
