"""Where `snapshot` begins: a signal ends it also while its modules are imported, with its exit code and its message.

Python imports them for some tenths of a second. An interrupt raised there would show a traceback, or be lost in the
callback of a weak reference. Nothing has begun by then that would have to be undone, so the process ends at once.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from cutline.cli.output.failure import CANCELLED, INTERRUPTED

# As `cli.output.failure.report` writes it.
DOCUMENT = '{"schema": "cutline/error/1", "code": %d, "error": "%s", "message": "%s", "hint": "", "details": {}}\n'


def main() -> None:
    """Run `snapshot` and exit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Otherwise the parent process set it to be ignored, as nohup does.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    from cutline.cli.main import main as run_and_exit

    run_and_exit()


def _end(number: int, _frame: FrameType | None) -> None:
    code, slug, message = INTERRUPTED, "interrupted", "stopped by Ctrl-C"
    if number != signal.SIGINT:
        code, slug, message = CANCELLED, "terminated", f"stopped by {signal.Signals(number).name}"
    words = sys.argv[1:]
    is_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    with suppress(OSError):
        os.write(1 if is_json else 2, (DOCUMENT % (code, slug, message) if is_json else f"error: {message}\n").encode())
    os._exit(code)
