"""What the reference reader makes of messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(slots=True)
class OpenTransaction:
    """The open transaction, as far as its messages describe it."""

    head: bytes
    lsn: int
    xid: int
    gid: str | None
    rows: int = 0
    tag: str | None = None
    participants: bytes = b""
    has_origin: bool = False


@dataclass(slots=True)
class ReadResult:
    """The result of all messages: changes and events of SEGMENT_SCHEMA, and how many changes are of no known table."""

    changes: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    ignored: int = 0
    through: int = 0
