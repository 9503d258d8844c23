"""The entry point of `snapshot`, which handles signals even while the program's modules are being imported.

Importing takes a few tenths of a second, or seconds if the files are not cached. An interrupt raised during that time
would show a traceback, or be lost in the callback of a weak reference. There is nothing to undo yet, so the process
exits at once, with the usual exit code and message; a watch that SIGTERM stops has not failed. A JUnit report of an
earlier run is replaced first of all.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from cutline.cli.process.ended_watch import is_watch, report_end
from cutline.cli.process.unfinished_reports import name_stop, replace_earlier_report

# A command's records and modules contain hardly any cycles. Python's default (700 new objects) made it search them for
# cycles again and again: with thousands of tables, for a tenth of the processor time.
GARBAGE_OBJECTS = 100_000
# Exit codes as in cli/output/failure.py, whose import takes a tenth of a second.
CANCELLED, INTERRUPTED = 8, 130
# The same document that `cli.output.failure.report` writes.
DOCUMENT = '{"schema": "cutline/error/1", "code": %d, "error": "%s", "message": "%s", "hint": "%s", "details": {}}\n'
HINT = "nothing had begun yet: repeat the command"


def main() -> None:
    """Run `snapshot` and exit."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Respect a signal that the parent process ignores, as nohup does.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    replace_earlier_report(sys.argv[1:])
    gc.set_threshold(GARBAGE_OBJECTS)
    from cutline.cli.main import main as run_and_exit

    run_and_exit()


def _end(number: int, _frame: FrameType | None) -> None:
    words = sys.argv[1:]
    if number == signal.SIGTERM and is_watch(words):
        report_end(words)
        os._exit(0)
    code, slug, message = INTERRUPTED, "interrupted", "stopped by Ctrl-C"
    if number != signal.SIGINT:
        code, slug, message = CANCELLED, "terminated", f"stopped by {signal.Signals(number).name}"
    name_stop(words, message, slug)
    is_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    with suppress(OSError):
        text = DOCUMENT % (code, slug, message, HINT) if is_json else f"error: {message}\nhint: {HINT}\n"
        os.write(1 if is_json else 2, text.encode())
    os._exit(code)
