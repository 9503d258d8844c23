"""The limit on open files, for which connections count, too: raised when the program starts, named once it is used up.

A command has about five on each node, and the limit that a shell or cron starts it with is often 1,024 of a hard one of
a million: nothing that is used here needs the low one, which is kept for programs that call select().
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping
from contextlib import suppress

from cutline.storage.causes import OF_SERVER, is_behind
from cutline.storage.errors import UnreachableError

USED_UP = {errno.EMFILE, errno.ENFILE}
# Libraries pass it on as text, and so do executors.
TEXTS = tuple(os.strerror(number).lower() for number in USED_UP)
OF_MACHINE = os.strerror(errno.ENFILE).lower()
# What macOS grants although it says that there is no hard limit.
GRANTED_ANYWAY = 10_240
FILES_PER_CONNECTION = 3
HINT = (
    "raise the hard limit and repeat the command; it needs about 5 for each node, and 100, and Spark's process 500."
    " For a systemd unit: LimitNOFILE=4096; for a user, in a new session: `USER hard nofile 4096` in"
    " /etc/security/limits.conf"
)
HINT_OF_MACHINE = "raise it with sysctl fs.file-max, or see which processes have so many files open"


class OpenFilesError(UnreachableError):
    """The process may open no more files and connections."""

    def __init__(self, reason: str, details: Mapping[str, object] | None = None) -> None:
        is_machine = OF_MACHINE in reason.lower()
        limit = "the machine's limit on open files (fs.file-max) is used up" if is_machine else limit_text()
        hint = HINT_OF_MACHINE if is_machine else HINT
        super().__init__(f"{limit}: {reason}", hint=hint, details={**(details or {}), "limit": open_files_limit()})


def open_files_limit() -> int:
    """How many files and connections this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def limit_text() -> str:
    """What is wrong, with the limit."""
    return f"the limit of {open_files_limit()} open files and connections (ulimit -n) is used up"


def raise_limit() -> None:
    """Raise the limit to the hard one, for this process and those that it starts, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, GRANTED_ANYWAY):
        if soft in (hard, resource.RLIM_INFINITY) or (limit <= soft and limit != resource.RLIM_INFINITY):
            return
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def are_few_left() -> bool:
    """Whether a connection, which needs two or three, can't be opened now."""
    opened: list[int] = []
    try:
        while len(opened) < FILES_PER_CONNECTION:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in USED_UP
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return False


def says_used_up(text: str) -> bool:
    """Whether a library's message is that no more files can be opened; of a server's message it is another's limit."""
    return any(one in text.lower() for one in TEXTS) and not OF_SERVER.search(text)


def is_used_up(error: BaseException) -> bool:
    """Whether this error, or one that caused it, is that no more files can be opened."""
    return is_behind(error, USED_UP, says_used_up)
