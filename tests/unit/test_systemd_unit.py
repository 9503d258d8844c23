"""The unit of docs/systemd is one that systemd takes, and its command can be typed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.cli.output.failure import CANCELLED, MEANINGS, USAGE
from tests.integration.shown_commands import ShownCommand, parse

UNIT = Path(__file__).parents[2] / "docs" / "systemd" / "cutline-watch.service"


def values(key: str) -> list[str]:
    return re.findall(rf"(?m)^{key}=(.*)$", UNIT.read_text(encoding="utf-8"))


def test_its_command_is_watch_and_can_be_typed() -> None:
    (program,) = values("ExecStart")
    parse(ShownCommand(UNIT.name, f"snapshot {program.partition(' ')[2]}"))


def test_it_is_not_started_again_after_what_starting_it_again_does_not_mend() -> None:
    codes = {int(code) for code in values("RestartPreventExitStatus")[0].split()}
    assert {USAGE, CANCELLED} < codes < MEANINGS.keys()


def test_systemd_takes_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    # It looks for the program, which is not installed here.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/cutline/bin/snapshot", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("Restart=on-failure", "Restart=sometimes"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60, check=False)
    assert "sometimes" in done.stderr
