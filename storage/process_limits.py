"""Limits on this process's open files, memory, threads and disk space: recognize their errors, and name the limit.

Libraries and executors report such errors only as text.

A command has about five open files for each node. The soft limit set by a shell or cron is often 1,024, under a hard
limit of a million. It is kept low for the sake of programs that call select(); Cutline does not.

Python's `Thread.start` waits until the new thread reports that it has started. A thread that gets no memory for its
first call dies before that, and the wait never ends. This affects Cutline's own threads as well as those of libraries,
such as py4j's connection to Spark.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError

# A message with a severity comes from a server: it is the server that has reached its limit, not this process.
OF_SERVER = re.compile(r"\b[A-Z]{3,}:  ")


def is_behind(error: BaseException, numbers: Collection[int], says: Callable[[str], bool]) -> bool:
    """Whether this error or a cause of it is an OSError with one of the `numbers`, or `says` is true for its text."""
    for link in _links(error):
        if isinstance(link, OSError) and link.errno in numbers:
            return True
        text = link.message if isinstance(link, SnapshotError) else _text_of(link)
        if isinstance(link, MemoryError):
            text = f"{type(link).__name__}: {text}"
        # A server's errors have an SQLSTATE and those of its client library don't, so the direct cause shows where the
        # text comes from.
        is_server = any(getattr(exception, "sqlstate", None) for exception in (link, link.__cause__))
        if not is_server and not OF_SERVER.search(text) and says(text):
            return True
    return False


def _text_of(error: BaseException) -> str:
    """Return the error's text. That of a Java exception is read from the JVM or, once that has ended, from its notes.

    spark/start.py adds the notes.
    """
    with suppress(Exception):
        return str(error)
    return "\n".join(getattr(error, "__notes__", []))


def _links(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


MEMORY_HINT = (
    "allow the command more memory and threads, then repeat it; the limit may be MemoryMax= or TasksMax= of a systemd"
    " unit, the container's limit, or ulimit -v or -u"
)
# The wordings used by Python, the dynamic loader, Arrow, zstd, the JVM and its launcher.
TEXT = re.compile(
    rf"""\bMemoryError\b | ArrowMemoryError | OutOfMemoryError | {re.escape(os.strerror(errno.ENOMEM)).lower()}
      | can't\ start\ new\ thread | unable\ to\ create\ native\ thread | failed\ to\ map\ segment
      | could\ not\ (?:reserve\ enough\ space|allocate\ ) | insufficient\ memory | malloc\ of\ size | out\ of\ memory
      | not\ enough\ memory
      | cannot\ create\ (?:\w+\ )*thread | fork:\ (?:retry:\ )?{re.escape(os.strerror(errno.EAGAIN)).lower()}
    """,
    re.IGNORECASE | re.VERBOSE,
)


class TooLittleMemoryError(UnreachableError):
    """The process can't get more memory or threads."""

    def __init__(self, reason: str, hint: str = MEMORY_HINT) -> None:
        super().__init__(f"too little memory: {reason}" if reason else "too little memory", hint=hint)


def says_no_memory(text: str) -> bool:
    """Whether a message from a library or the JVM says that there is no more memory."""
    return TEXT.search(text) is not None


def lacks_memory(error: BaseException) -> bool:
    """Whether the process has run out of memory, according to this error or one of its causes."""
    return is_behind(error, {errno.ENOMEM}, says_no_memory)


USED_UP = {errno.EMFILE, errno.ENFILE}
# Libraries and executors report these errors as text.
TEXTS = tuple(os.strerror(number).lower() for number in USED_UP)
OF_MACHINE = os.strerror(errno.ENFILE).lower()
# The most that macOS grants, although it reports no hard limit.
GRANTED_ANYWAY = 10_240
FILES_PER_CONNECTION = 3
OPEN_FILES_HINT = (
    "raise the hard limit and repeat the command, which needs about 100 plus 5 per node, and Spark's process 500."
    " For a systemd unit: LimitNOFILE=16384; for a user, in a new session: `USER hard nofile 16384` in"
    " /etc/security/limits.conf"
)
HINT_OF_MACHINE = "raise it with sysctl fs.file-max, or find the processes that have many files open"


class OpenFilesError(UnreachableError):
    """The process can't open more files or connections."""

    def __init__(self, reason: str, details: Mapping[str, object] | None = None) -> None:
        is_machine = OF_MACHINE in reason.lower()
        limit = "the machine's limit on open files (fs.file-max) has been reached" if is_machine else limit_text()
        hint = HINT_OF_MACHINE if is_machine else OPEN_FILES_HINT
        super().__init__(f"{limit}: {reason}", hint=hint, details={**(details or {}), "limit": open_files_limit()})


def open_files_limit() -> int:
    """Return the number of files and connections that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def limit_text() -> str:
    """Return the message that names the limit."""
    return f"the limit of {open_files_limit()} open files and connections (ulimit -n) has been reached"


def raise_limit() -> None:
    """Raise the soft limit to the hard limit as far as the system allows, for this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, GRANTED_ANYWAY):
        if soft in (hard, resource.RLIM_INFINITY) or (limit <= soft and limit != resource.RLIM_INFINITY):
            return
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def are_few_left() -> bool:
    """Whether too few descriptors are left for a connection, which needs two or three."""
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
    """Whether a message says that this process can't open more files; False if it comes from a server."""
    return any(part in text.lower() for part in TEXTS) and not OF_SERVER.search(text)


def is_used_up(error: BaseException) -> bool:
    """Whether the process can't open more files, according to this error or one of its causes."""
    return is_behind(error, USED_UP, says_used_up)


FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
# Spark and libraries report these errors as text.
FULL_TEXTS = tuple(os.strerror(number).lower() for number in FULL_DISK)


def space_hint(folder: str) -> str:
    """Return what to do if the `folder` for temporary files is full."""
    return (
        f"free space in {folder}, or set TMPDIR to a folder with more space (for executors, local.dir in [spark] of"
        " fleet.toml); then repeat the command"
    )


class NoSpaceError(UnreachableError):
    """There is no space left for temporary files. Stores and files that a user names have errors of their own."""

    def __init__(self, reason: str) -> None:
        hint = space_hint("the folder for temporary files ($TMPDIR, else /tmp)")
        super().__init__(f"no space is left for temporary files: {reason}", hint=hint)


def lacks_space(error: BaseException) -> bool:
    """Whether a folder for temporary files is full, according to this error or one of its causes."""
    return is_behind(error, FULL_DISK, says_full_disk)


def says_full_disk(text: str) -> bool:
    """Whether a message from the system, a library or the JVM says that a disk is full."""
    return any(part in text.lower() for part in FULL_TEXTS)


def find_used_up(error: BaseException) -> UnreachableError | None:
    """Return the error to report instead of `error` if its real cause is a lack of open files, memory or disk space.

    Returns None otherwise, or if `error` also reports something else, such as a commit that may have been stored.
    """
    is_own = isinstance(error, SnapshotError)
    if is_used_up(error) and (not is_own or isinstance(error, (UnreachableError, RefusedError))):
        reason = error.message if isinstance(error, SnapshotError) else f"{type(error).__name__}: {error}"
        return OpenFilesError(reason, error.details if isinstance(error, SnapshotError) else None)
    if is_own:
        return None
    if lacks_memory(error):
        return TooLittleMemoryError(str(error))
    return NoSpaceError(_first_line(error)) if lacks_space(error) else None


def _first_line(error: BaseException) -> str:
    """Return the line about a full disk, without the stack of a Java exception."""
    lines = _text_of(error).splitlines()
    return next((line.strip() for line in lines if says_full_disk(line)), "".join(lines[:1]))


# A thread starts within a millisecond, or within a few seconds on a machine that is short of memory.
BEGIN_SECONDS_MAX = 30
# Python's message if the system refuses another thread.
NO_THREAD = "can't start new thread"

_start = threading.Thread.start


class _Begun(threading.Event):
    """Signals that a thread has started; a wait without a timeout ends after BEGIN_SECONDS_MAX."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        # Wait in steps: a process that was suspended loses only the current step.
        for _ in range(BEGIN_SECONDS_MAX):
            if super().wait(1):
                return True
        raise RuntimeError(NO_THREAD) from MemoryError("the thread did not start")


def limit_thread_starts() -> None:
    """Make Thread.start raise RuntimeError, process-wide, if a thread fails to start. Safe to repeat."""
    setattr(threading.Thread, "start", _start_limited)  # noqa: B010  # mypy refuses the plain form


def _start_limited(thread: threading.Thread) -> None:
    own: Any = thread
    # An uninitialized thread has no event, and a thread that was started before raises.
    begun = getattr(own, "_started", None)
    if begun is not None and not begun.is_set():
        own._started = _Begun()
    _start(thread)
