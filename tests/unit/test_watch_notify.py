"""`[notify] command` gets the event as JSON on stdin; what is wrong with it is said, and ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cutline.cli.watch.notices
from cutline.cli.watch.notices import notify

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
