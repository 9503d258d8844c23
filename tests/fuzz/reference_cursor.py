"""One message and its values, read byte by byte as the manual describes them: part of the reference reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ESCAPES = {8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 92: b"\\\\"}
UNCHANGED = object()
LAST_POSITION = 2**63 - 1


class RefusedError(Exception):
    """The messages violate the protocol, or no known definition matches a table."""


@dataclass(slots=True)
class Cursor:
    """One message, read from left to right."""

    message: bytes
    place: int = 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.place + size > len(self.message):
            raise RefusedError("too short")
        self.place += size
        return self.message[self.place - size : self.place]

    def number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "big", signed=signed)

    def position(self) -> int:
        if (found := self.number(8)) > LAST_POSITION:
            raise RefusedError("not a position")
        return found

    def name(self) -> str:
        end = self.message.find(b"\0", self.place)
        if end < 0:
            raise RefusedError("unterminated name")
        content = self.take(end - self.place)
        self.take(1)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise RefusedError("not UTF-8") from error

    def zero(self) -> None:
        if self.number(1) != 0:
            raise RefusedError("unknown flags")

    def end(self) -> None:
        if self.place != len(self.message):
            raise RefusedError("too long")


def copy_text(value: Any) -> bytes:
    """A value as COPY prints it, or the mark of an unchanged TOASTed value."""
    if value is None:
        return b"\\N"
    if value is UNCHANGED:
        return b"\\u"
    return b"".join(ESCAPES.get(byte, bytes([byte])) for byte in value)


def decode_or(content: bytes, otherwise: str | None) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return otherwise
