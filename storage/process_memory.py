"""The memory of the command's machine: a command that gets no more of it says so, and is repeated with more."""

from __future__ import annotations

import errno

from storage.errors import UnreachableError, find_behind

HINT = (
    "give the command more memory and repeat it; it may have a limit: MemoryMax= of a systemd unit, the container's,"
    " ulimit -v"
)


class TooLittleMemoryError(UnreachableError):
    """The process gets no more memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"too little memory: {reason}" if reason else "too little memory", hint=HINT)


def lacks_memory(error: BaseException) -> bool:
    """Whether this error, or one that caused it, is that the process gets no more memory."""
    found = find_behind(error, OSError)
    return find_behind(error, MemoryError) is not None or (found is not None and found.errno == errno.ENOMEM)
