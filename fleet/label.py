"""What an operation's sessions are called on the servers: `cutline create daily ops@db7:4711`.

PostgreSQL keeps 63 bytes of an application_name, and only ASCII; what is cut off ends in `~`.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from dataclasses import dataclass

LABEL_BYTES_MAX = 63
# Of these, what is kept for `user@host:pid` however long the subject is.
OWNER_BYTES_MAX = 32
LABEL = re.compile(
    r"cutline (?P<command>\S+)(?: (?P<subject>\S+))? (?P<user>[^@\s]+)@(?P<host>[^:\s]+):(?P<process>\d+)"
)


@dataclass(frozen=True, slots=True)
class Label:
    """Whose a session is: the command, what it works on ("" if nothing), and its process on its machine."""

    command: str
    subject: str
    user: str
    host: str
    process: int

    def text(self) -> str:
        """The application_name, at most LABEL_BYTES_MAX long."""
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
        # A user id without a name, as containers have them.
        user = str(os.getuid())
    return Label(command, subject, user, socket.gethostname().partition(".")[0], os.getpid()).text()


def read_label(text: str) -> Label | None:
    """What `Label.text` wrote; None for any other application_name."""
    found = LABEL.fullmatch(text)
    if found is None:
        return None
    return Label(found["command"], found["subject"] or "", found["user"], found["host"], int(found["process"]))


def _plain(text: str) -> str:
    return re.sub(r"[^!-9;-?A-~]", "_", text)


def _shorten(text: str, length_max: int) -> str:
    return text if len(text) <= length_max else f"{text[: length_max - 1]}~"
