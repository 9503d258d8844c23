"""Messages that servers have sent, and the definitions of the tables they are of.

`python -m tests.fuzz.capture VERSION` made `captured_VERSION.json`; "made" are those that the unit tests build.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from fleet.record import from_builtins, to_builtins
from tests.unit.made_changes import VERSIONS, WHOLE
from wal.segments.definitions import Definition


@dataclass(frozen=True, slots=True)
class Captured:
    """A slot's messages from its beginning to its end; `versions` are the tables' definitions."""

    name: str
    messages: list[bytes]
    versions: tuple[Definition, ...]


def captured(name: str) -> Captured:
    """The messages of that name."""
    if name == "made":
        return Captured(name, WHOLE, VERSIONS)
    document = json.loads(path_of(name).read_text(encoding="utf-8"))
    versions = from_builtins(document["versions"], tuple[Definition, ...])
    return Captured(name, [base64.b64decode(message) for message in document["messages"]], versions)


def store(found: Captured) -> None:
    """Keep the messages."""
    document = {
        "versions": to_builtins(found.versions),
        "messages": [base64.b64encode(message).decode() for message in found.messages],
    }
    path_of(found.name).write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")


def path_of(name: str) -> Path:
    """Where they are kept."""
    return Path(__file__).parent / f"captured_{name}.json"
