"""Which process of which machine this is, so that others on the machine can tell that it is gone.

A number alone does not say: it is used again, by later processes and by those of other containers. With the boot of the
machine, the namespaces and the time at which the process began, it does. Linux alone tells these.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PROC = Path("/proc")
# What the number and the start time of a process are counted in.
NAMESPACES = ("pid", "time")
# States of processes that have ended: nobody has asked for their result yet.
ENDED = ("Z", "X", "x")
NUMBER = re.compile(r"[1-9]\d{0,17}", re.ASCII)


def own_process() -> str:
    """Which process this is, as `is_gone` takes it; "" where the system does not tell."""
    place, start = _place(), _start(os.getpid())
    return f"{place} {os.getpid()} {start}" if place and start else ""


def is_gone(process: str) -> bool:
    """Whether it is certain that the process, as its `own_process` described it, is gone; False of other machines."""
    place, _, rest = process.partition(" ")
    number, _, start = rest.partition(" ")
    if not place or place != _place() or not (NUMBER.fullmatch(number) and NUMBER.fullmatch(start)):
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        # Another user's, or none at all.
        pass
    # It may be hidden from other users.
    found = _start(int(number))
    return found is not None and found != start


def _place() -> str:
    """The boot of the machine and the namespaces that this process is in; "" where that is not known."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return "/".join([boot, *(str((PROC / "self/ns" / name).stat().st_ino) for name in NAMESPACES)])
    except (OSError, UnicodeDecodeError):
        return ""


def _start(process: int) -> str | None:
    """When a process began, in ticks since boot; "" if it has ended. None if that is not to be seen."""
    try:
        # The name in parentheses may have spaces and parentheses itself (proc_pid_stat(5)).
        fields = (PROC / str(process) / "stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if len(fields) < 20 else "" if fields[0] in ENDED else fields[19]
