"""The application_name of an operation's sessions: `cutline create daily ops@db7:4711`.

PostgreSQL keeps 63 bytes of an application_name, and only ASCII. A part that was cut short ends in `~`.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from dataclasses import dataclass

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
    """Whether two labels are known to be of one process, whatever it works on."""
    first, second = read_label(text), read_label(other)
    if first is None or second is None:
        return False
    return (first.user, first.host, first.process) == (second.user, second.host, second.process)


def end_sessions_statement(label: str) -> str:
    """The SQL statement that ends all sessions of the label's process on a server, whatever they work on."""
    owner = label.rpartition(" ")[2].replace("'", "''")
    return (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        f" WHERE application_name LIKE 'cutline %' AND right(application_name, {len(owner) + 1}) = ' {owner}'"
    )


def _plain(text: str) -> str:
    return re.sub(r"[^!-9;-?A-~]", "_", text)


def _shorten(text: str, length_max: int) -> str:
    return text if len(text) <= length_max else f"{text[: length_max - 1]}~"
