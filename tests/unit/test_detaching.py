"""The process in the background is waited for until it has an operation, also where the terminal ends meanwhile."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import cutline.cli.process.detaching as module

# It has an operation after a second; a signal ends it before.
STARTED = "import os, sys, time; time.sleep(1); os.write(int(sys.argv[1]), b'the-operation\\n')"


def await_operation(tmp_path: Path, number: signal.Signals) -> str:
    """What is found if this process gets the signal meanwhile."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(number, interrupt)
    pipe, end = os.pipe()
    (tmp_path / "log").touch()
    try:
        with (
            subprocess.Popen([sys.executable, "-c", STARTED, str(end)], pass_fds=[end]) as process,
            os.fdopen(pipe, "rb", buffering=0) as answers,
            (tmp_path / "log").open("rb") as log,
        ):
            os.close(end)
            threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
            return module._await_operation(process, answers, module._Relay(log, io.StringIO()))
    finally:
        signal.signal(number, before)


def test_the_end_of_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    assert await_operation(tmp_path, signal.SIGHUP) == "the-operation"


def test_sigterm_ends_it(tmp_path: Path) -> None:
    assert await_operation(tmp_path, signal.SIGTERM) == ""
