"""The identity of this process, its user and its machine, as stored in sessions, records and folders.

A process id alone does not identify a process: later processes and processes in other containers reuse it. The id is
unique only in combination with the machine's boot id, the namespaces and the process's start time. Only Linux provides
these.

PostgreSQL keeps 63 bytes of an application_name, and only ASCII. A part that was cut short ends in `~`.

Some folders must be safe from other users. Root can change every folder, and so can the owner of `/`, who has a
different uid in a user namespace; both are trusted. So are the groups of parent folders: on many systems every user has
a private group with write access.
"""

from __future__ import annotations

import errno
import getpass
import os
import pwd
import re
import socket
import stat
from pathlib import Path

from msgspec import Struct

from cutline.storage.errors import UsageError


class FolderGoneError(UsageError):
    """The working directory no longer exists."""


def check_working_directory() -> None:
    """Raise FolderGoneError if the working directory was deleted: relative paths mean nothing there."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise FolderGoneError(
            "the current folder no longer exists", hint="change to an existing folder, then repeat the command"
        ) from None


def real_path(path: Path) -> Path:
    """Return the absolute path without links; raise UsageError if links are circular or the path contains NUL."""
    try:
        # realpath stops at the circular link, while Path.resolve raises RuntimeError before Python 3.13.
        resolved = Path(os.path.realpath(path))
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: {error}", hint="name a different path") from error
    if _is_circular(resolved):
        raise UsageError(f"{path}: symbolic links form a loop at {resolved}", hint="name a different path")
    return resolved


def _is_circular(path: Path) -> bool:
    """Whether realpath stopped at a circular link."""
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError as error:
        # If this user may not enter the folder, opening the file raises the error later.
        return error.errno == errno.ELOOP


def is_own(path: Path) -> bool:
    """Whether `path` belongs to this user and is not a symbolic link; raise FileNotFoundError if it does not exist."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def is_own_alone(path: Path) -> bool:
    """Whether `path` belongs to this user, nobody else can write to it, and it is not a symbolic link."""
    return is_own(path) and not path.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_replaceable(path: Path) -> bool:
    """Whether another user can rename `path`, or a folder above it, and put something else in its place.

    `path` may be missing. The folders above it must exist; a symbolic link among them counts as replaceable.
    """
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}
    return any(_is_open_to_others(folder, trusted) for folder in path.parents)


def _is_open_to_others(folder: Path, trusted: set[int]) -> bool:
    status = folder.lstat()
    is_shared = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    return bool(is_shared) or stat.S_ISLNK(status.st_mode) or status.st_uid not in trusted


PROC = Path("/proc")
# The namespaces that a process id and a start time are relative to.
NAMESPACES = ("pid", "time")
# States of processes that have ended, but whose exit status has not been collected.
ENDED = ("Z", "X", "x")
NUMBER = re.compile(r"[1-9]\d{0,17}", re.ASCII)


def own_process() -> str:
    """Return this process's identity for `is_gone`, or "" if the system does not provide it."""
    place, start = _place(), _start(os.getpid())
    return f"{place} {os.getpid()} {start}" if place and start else ""


def is_gone(process: str) -> bool:
    """Whether the process with this `own_process` has certainly ended; False for processes on other machines."""
    place, _, rest = process.partition(" ")
    number, _, start = rest.partition(" ")
    if not place or place != _place() or not (NUMBER.fullmatch(number) and NUMBER.fullmatch(start)):
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        # The process may belong to another user, or the number may be out of range.
        pass
    # The system may hide the process from other users.
    found = _start(int(number))
    return found is not None and found != start


def _place() -> str:
    """Return the machine's boot id and this process's namespaces, or "" if they are unknown."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return "/".join([boot, *(str((PROC / "self/ns" / name).stat().st_ino) for name in NAMESPACES)])
    except (OSError, UnicodeDecodeError):
        return ""


def _start(process: int) -> str | None:
    """Return when a process started, in ticks since boot; "" if it has ended, None if the system hides it."""
    try:
        # The name in parentheses may itself contain spaces and parentheses (proc_pid_stat(5)).
        fields = (PROC / str(process) / "stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    return None if len(fields) < 20 else "" if fields[0] in ENDED else fields[19]


LABEL_BYTES_MAX = 63
# How many of these bytes are reserved for `user@host:pid`, however long the subject is.
OWNER_BYTES_MAX = 32
LABEL = re.compile(
    r"cutline (?P<command>\S+)(?: (?P<subject>\S+))? (?P<user>[^@\s]+)@(?P<host>[^:\s]+):(?P<process>\d+)"
)


class Label(Struct, frozen=True):
    """The owner of a session: the command, its subject ("" if it has none), and its process on its machine."""

    command: str
    subject: str
    user: str
    host: str
    process: int

    def text(self) -> str:
        """Format the application_name, at most LABEL_BYTES_MAX bytes long."""
        number = f":{self.process}"
        user = _shorten(_plain(self.user), OWNER_BYTES_MAX // 2)
        host = _shorten(_plain(self.host), OWNER_BYTES_MAX - len(user) - len("@") - len(number))
        owner = f"{user}@{host}{number}"
        command = f"cutline {self.command}"
        room = LABEL_BYTES_MAX - len(command) - len(owner) - 2
        return " ".join(word for word in (command, _shorten(_plain(self.subject), room), owner) if word)


def is_unnamed_user() -> bool:
    """Whether the system has no name for this process's user, as in a container that runs under an arbitrary uid."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return True
    return False


def own_label(command: str, subject: str = "") -> str:
    """Return the application_name for this process's sessions."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # In a container, the user id may have no name.
        user = str(os.getuid())
    return Label(command, subject, user, socket.gethostname().partition(".")[0], os.getpid()).text()


def read_label(text: str) -> Label | None:
    """Parse the result of `Label.text`; return None for any other application_name."""
    match = LABEL.fullmatch(text)
    if match is None:
        return None
    return Label(match["command"], match["subject"] or "", match["user"], match["host"], int(match["process"]))


def is_of_one_process(text: str, other: str) -> bool:
    """Whether two labels belong to the same process, perhaps to different tasks within it."""
    first, second = read_label(text), read_label(other)
    if first is None or second is None:
        return False
    return (first.user, first.host, first.process) == (second.user, second.host, second.process)


def end_sessions_statement(label: str) -> str:
    """Return the SQL statement that ends all sessions that the label's process has on a server."""
    owner = label.rpartition(" ")[2].replace("'", "''")
    return (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE application_name LIKE 'cutline %' AND right(application_name, {len(owner) + 1}) = ' {owner}'"
    )


def _plain(text: str) -> str:
    return re.sub(r"[^!-9;-?A-~]", "_", text)


def _shorten(text: str, length_max: int) -> str:
    return text if len(text) <= length_max else f"{text[: length_max - 1]}~"
