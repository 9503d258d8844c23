"""Recognize errors that mean that the process can't get more memory, or start no more threads, which need some."""

from __future__ import annotations

import errno
import os
import re

from cutline.storage.causes import is_behind
from cutline.storage.errors import UnreachableError

HINT = (
    "give the command more memory and threads and repeat it; it may have a limit: MemoryMax= or TasksMax= of a systemd"
    " unit, the container's, ulimit -v or -u"
)
# As Python, the loader of libraries, Arrow, the JVM and its launcher say it.
TEXT = re.compile(
    rf"""\bMemoryError\b | ArrowMemoryError | OutOfMemoryError | {re.escape(os.strerror(errno.ENOMEM)).lower()}
      | can't\ start\ new\ thread | unable\ to\ create\ native\ thread | failed\ to\ map\ segment
      | could\ not\ (?:reserve\ enough\ space|allocate\ ) | insufficient\ memory | malloc\ of\ size | out\ of\ memory
      | cannot\ create\ (?:\w+\ )*thread | fork:\ (?:retry:\ )?{re.escape(os.strerror(errno.EAGAIN)).lower()}
    """,
    re.IGNORECASE | re.VERBOSE,
)


class TooLittleMemoryError(UnreachableError):
    """The process gets no more memory."""

    def __init__(self, reason: str, hint: str = HINT) -> None:
        super().__init__(f"too little memory: {reason}" if reason else "too little memory", hint=hint)


def says_no_memory(text: str) -> bool:
    """Whether a library's message, or the JVM's, is that there is no more memory."""
    return TEXT.search(text) is not None


def lacks_memory(error: BaseException) -> bool:
    """Whether this error, or one that caused it, is that the process gets no more memory."""
    return is_behind(error, {errno.ENOMEM}, says_no_memory)
