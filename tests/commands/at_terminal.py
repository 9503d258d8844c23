"""A command at a terminal, where somebody types."""

from __future__ import annotations

import os
import pty

from cutline.fleet.config import Fleet
from tests.commands.snapshot_runs import command_line


def answer(fleet: Fleet, text: str, *words: str) -> tuple[int, str]:
    """Run a command at a terminal where somebody types `text`; return its exit code and all that the terminal shows.

    In the text, \\udce4 stands for the byte 0xe4, as in the arguments of a process.
    """
    process, terminal = pty.fork()
    if process == 0:
        line = command_line(fleet, *words)
        os.execv(line[0], line)
    os.write(terminal, text.encode(errors="surrogateescape"))
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 1000)
        except OSError:  # the other end is closed
            break
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), shown.decode(errors="replace")
