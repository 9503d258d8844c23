"""Messages that servers have sent, and the definitions of their tables.

`python -m tests.fuzz.capture VERSION DSN` writes `captured_VERSION.json`; the unit tests build those named "made".
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from cutline.fleet.record import from_json, to_builtins
from cutline.wal.segments.archive import Definition
from tests.unit.made_changes import ALL_MESSAGES, VERSIONS


@dataclass(frozen=True, slots=True)
class Captured:
    """All messages of a slot; `versions` are the definitions of their tables."""

    name: str
    messages: list[bytes]
    versions: tuple[Definition, ...]


def load_captured(name: str) -> Captured:
    """Load the messages of a name."""
    if name == "made":
        return Captured(name, ALL_MESSAGES, VERSIONS)
    document = json.loads(path_of(name).read_text(encoding="utf-8"))
    versions = from_json(json.dumps(document["versions"]), tuple[Definition, ...])
    return Captured(name, [base64.b64decode(message) for message in document["messages"]], versions)


def store(found: Captured) -> None:
    """Write the messages to their file."""
    document = {
        "versions": to_builtins(found.versions),
        "messages": [base64.b64encode(message).decode() for message in found.messages],
    }
    path_of(found.name).write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")


def path_of(name: str) -> Path:
    """The file of a name."""
    return Path(__file__).parent / f"captured_{name}.json"
