"""pgoutput's messages as columns: where each field lies, read for all messages of one kind at once.

Source: PostgreSQL manual, "Logical Replication Message Formats", protocol version 3. Numbers are big-endian.
Nothing here knows of groups or positions in the archive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from storage.errors import SnapshotError
from wal.bytes_column import Bytes, BytesColumn, Ints, gather
from wal.lines import Values, with_constants

BEGIN, COMMIT_LOCAL, BEGIN_PREPARE, PREPARED, COMMIT_OF_PREPARED, ROLLBACK_OF_PREPARED = (
    ord(letter) for letter in "BCbPKr"
)
RELATION, INSERTED, UPDATED, DELETED, TRUNCATED, MESSAGE = (ord(letter) for letter in "RIUDTM")
ORIGIN, TYPE = ord("O"), ord("Y")
KNOWN = (
    BEGIN, COMMIT_LOCAL, BEGIN_PREPARE, PREPARED, COMMIT_OF_PREPARED, ROLLBACK_OF_PREPARED,
    RELATION, INSERTED, UPDATED, DELETED, TRUNCATED, MESSAGE, ORIGIN, TYPE,
)  # fmt: skip


class DecodingError(SnapshotError):
    """The server's decoded WAL is not what the protocol says; nothing was stored of it."""


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """One column as a relation message describes it."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation message: a table as it was when the changes after it were made."""

    oid: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Messages:
    """A batch of messages: `source` is their data with the line constants behind it."""

    source: Bytes
    data_bytes: int
    starts: Ints
    ends: Ints
    kinds: Bytes

    def __len__(self) -> int:
        return len(self.starts)

    def u8(self, at: Ints) -> Bytes:
        """The bytes at these places."""
        return self.source[at]

    def u32(self, at: Ints) -> Ints:
        """The 32-bit numbers that begin at these places."""
        view = np.ndarray((len(self.source) - 3,), np.dtype(">u4"), self.source, strides=(1,))
        return view[at].astype(np.int64)

    def u64(self, at: Ints) -> Ints:
        """The 64-bit numbers that begin at these places."""
        view = np.ndarray((len(self.source) - 7,), np.dtype(">u8"), self.source, strides=(1,))
        return view[at].astype(np.int64)

    def texts(self, starts: Ints, ends: Ints) -> pa.Array[Any]:
        """The texts in these ranges, as Arrow strings."""
        return gather(self.source, starts, ends - starts).to_arrow().cast(pa.string())

    def prefixed(self, prefix: bytes) -> tuple[Ints, Ints]:
        """The numbers of the logical messages with that prefix, and where their contents begin."""
        # Others' messages may be many, so their prefix is compared by column.
        wanted = np.frombuffer(prefix + b"\0", np.uint8)
        numbers = np.flatnonzero(self.kinds == MESSAGE)
        numbers = numbers[self.ends[numbers] - self.starts[numbers] >= 14 + len(wanted)]
        for place, byte in enumerate(wanted):
            # What is left after a byte or two are those looked for, as a rule.
            numbers = numbers[self.u8(self.starts[numbers] + 10 + place) == byte]
        return numbers, self.starts[numbers] + 14 + len(wanted)

    def bytes_at(self, number: int) -> bytes:
        """The whole message of that number."""
        return self.source[self.starts[number] : self.ends[number]].tobytes()


def messages_of(column: BytesColumn) -> Messages:
    """View a batch of messages; raise DecodingError on a kind that protocol 3 without streaming lacks."""
    low, high = int(column.offsets[0]), int(column.offsets[-1])
    source = with_constants(column.data[low:high])
    starts = column.offsets[:-1] - low
    messages = Messages(source, high - low, starts, column.offsets[1:] - low, source[starts])
    unknown = np.flatnonzero(~np.isin(messages.kinds, KNOWN))
    if len(unknown):
        raise DecodingError(
            f"a decoded message begins with {chr(messages.kinds[unknown[0]])!r}, unknown to protocol 3",
            hint="is the server newer than this version of Cutline?",
        )
    return messages


def read_tuples(messages: Messages, at: Ints, width: int) -> tuple[list[Values], Ints]:
    """Read the tuples that begin at these places, all of `width` columns; also return where they end.

    Raises DecodingError where a tuple has another number of columns, or binary values.
    """
    counts = (messages.u8(at).astype(np.int64) << 8) | messages.u8(at + 1)
    if np.any(counts != width):
        raise DecodingError(f"a decoded row has {int(counts[counts != width][0])} columns instead of {width}")
    place = at + 2
    columns: list[Values] = []
    for _ in range(width):
        kinds = messages.u8(place)
        is_text = kinds == ord("t")
        lengths = np.where(is_text, messages.u32(np.minimum(place + 1, messages.data_bytes)), 0)
        columns.append(Values(kinds, place + 5, lengths))
        place = place + 1 + np.where(is_text, 4 + lengths, 0)
        if not np.all(is_text | (kinds == ord("n")) | (kinds == ord("u"))):
            raise DecodingError("a decoded value is neither text, null nor unchanged")
    return columns, place


def read_relation(message: bytes) -> Relation:
    """Read a relation message."""
    oid = int.from_bytes(message[1:5], "big")
    schema, table, rest = message[5:].split(b"\0", 2)
    count = int.from_bytes(rest[1:3], "big")
    columns: list[RelationColumn] = []
    place = 3
    for _ in range(count):
        is_key = bool(rest[place] & 1)
        end = rest.index(b"\0", place + 1)
        columns.append(
            RelationColumn(
                rest[place + 1 : end].decode(),
                int.from_bytes(rest[end + 1 : end + 5], "big"),
                int.from_bytes(rest[end + 5 : end + 9], "big", signed=True),
                is_key,
            )
        )
        place = end + 9
    # The system schema pg_catalog is sent as an empty name.
    return Relation(oid, schema.decode() or "pg_catalog", table.decode(), chr(rest[0]), tuple(columns))
