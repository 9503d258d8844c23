"""The identity of this process, its user and its machine, as sessions, records and folders store it.

A process id alone is no identity: later processes and processes of other containers use it again. Together with the
boot of the machine, the namespaces and the start time of the process, it is one. Only Linux provides these.

PostgreSQL keeps 63 bytes of an application_name, and only ASCII. A part that was cut short ends in `~`.

Some folders must be safe from other users. Root can change every folder, and so can the owner of `/`, which in a user
namespace may be another number: both are trusted. So is the group of a folder, if the folder's owner gave it that
group: on many systems every user has a group of their own, which may write.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from cutline.storage.errors import UsageError


def real_path(path: Path) -> Path:
    """The absolute path without links; raise UsageError if there can be none: the links lead in a circle, or a NUL."""
    try:
        # Unlike Path.resolve, which raises RuntimeError for a circle before Python 3.13, it ends at the link.
        resolved = Path(os.path.realpath(path))
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: {error}", hint="name another path") from error
    if _is_circular(resolved):
        raise UsageError(f"{path}: symbolic links lead in a circle at {resolved}", hint="name another path")
    return resolved


def _is_circular(path: Path) -> bool:
    """Whether a path without links has one all the same."""
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError as error:
        # In a folder that this user may not enter, opening the file raises the error.
        return error.errno == errno.ELOOP


def is_own(path: Path) -> bool:
    """Whether `path` is a file or folder of this user, and no link; raise FileNotFoundError."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def is_own_alone(path: Path) -> bool:
    """Whether `path` is a file or folder of this user that nobody else can write to, and no link."""
    return is_own(path) and not path.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_replaceable(path: Path) -> bool:
    """Whether another user can rename `path`, or a folder above it, and put something else in its place.

    `path` need not exist; the folders above it must, and none of them may be a link.
    """
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}
    return any(_is_open_to_others(folder, trusted) for folder in path.parents)


def _is_open_to_others(folder: Path, trusted: set[int]) -> bool:
    status = folder.lstat()
    is_shared = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    return bool(is_shared) or stat.S_ISLNK(status.st_mode) or status.st_uid not in trusted


PROC = Path("/proc")
# The namespaces in which the number and the start time of a process are counted.
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


LABEL_BYTES_MAX = 63
# Of these, reserved for `user@host:pid` however long the subject is.
OWNER_BYTES_MAX = 32
LABEL = re.compile(
    r"cutline (?P<command>\S+)(?: (?P<subject>\S+))? (?P<user>[^@\s]+)@(?P<host>[^:\s]+):(?P<process>\d+)"
)


@dataclass(frozen=True, slots=True)
class Label:
    """The owner of a session: the command, its subject ("" if it has none), and its process on its machine."""

    command: str
    subject: str
    user: str
    host: str
    process: int

    def text(self) -> str:
        """The application_name, at most LABEL_BYTES_MAX bytes long."""
        number = f":{self.process}"
        user = _shorten(_plain(self.user), OWNER_BYTES_MAX // 2)
        host = _shorten(_plain(self.host), OWNER_BYTES_MAX - len(user) - len("@") - len(number))
        owner = f"{user}@{host}{number}"
        command = f"cutline {self.command}"
        room = LABEL_BYTES_MAX - len(command) - len(owner) - 2
        return " ".join(word for word in (command, _shorten(_plain(self.subject), room), owner) if word)


def own_label(command: str, subject: str = "") -> str:
    """The application_name for this process's sessions."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # In a container the user id may have no name.
        user = str(os.getuid())
    return Label(command, subject, user, socket.gethostname().partition(".")[0], os.getpid()).text()


def read_label(text: str) -> Label | None:
    """Parse what `Label.text` wrote; None for any other application_name."""
    match = LABEL.fullmatch(text)
    if match is None:
        return None
    return Label(match["command"], match["subject"] or "", match["user"], match["host"], int(match["process"]))


def is_of_one_process(text: str, other: str) -> bool:
    """Whether two labels are known to belong to the same process, on any task."""
    first, second = read_label(text), read_label(other)
    if first is None or second is None:
        return False
    return (first.user, first.host, first.process) == (second.user, second.host, second.process)


def end_sessions_statement(label: str) -> str:
    """The SQL statement that ends all sessions of the label's process on a server."""
    owner = label.rpartition(" ")[2].replace("'", "''")
    return (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE application_name LIKE 'cutline %' AND right(application_name, {len(owner) + 1}) = ' {owner}'"
    )


def _plain(text: str) -> str:
    return re.sub(r"[^!-9;-?A-~]", "_", text)


def _shorten(text: str, length_max: int) -> str:
    return text if len(text) <= length_max else f"{text[: length_max - 1]}~"
