"""pgoutput's messages as columns: where each field lies, read for all messages of one kind at once.

Source: PostgreSQL manual, "Logical Replication Message Formats", protocol version 3. Numbers are big-endian.
Nothing here knows of groups or positions in the archive. No field is taken from outside its own message:
`wal.decoding.message_forms` sees to that for all messages, `read_tuples` for those whose rows are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from columns.bytes_column import Bytes, BytesColumn, Flags, Ints, gather
from columns.lines import Values, with_constants
from fleet.nodes.encodings import Texts
from storage.errors import SnapshotError

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
    """The server's decoded WAL is not what the protocol says; nothing was stored of it.

    `number` is the message's in its batch, from 0, while nobody has said where that is.
    """

    def __init__(
        self, message: str, *, number: int | None = None, hint: str = "", details: dict[str, object] | None = None
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.number = number


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
    """A batch of messages: `source` is their data with the line constants behind it; `convert` makes it text."""

    source: Bytes
    data_bytes: int
    starts: Ints
    ends: Ints
    kinds: Bytes
    convert: Texts | None = None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def column(self) -> BytesColumn:
        """The messages one by one."""
        return BytesColumn(self.source, np.append(self.starts, self.data_bytes))

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

    def names(self, numbers: Ints, skip: int) -> pa.Array[Any]:
        """The names at the ends of these messages, after `skip` bytes and without their zeros, as Arrow strings."""
        starts = self.starts[numbers] + skip
        binary = gather(self.source, starts, self.ends[numbers] - 1 - starts).to_arrow()
        if self.convert is not None:
            return convert_texts(binary, self.convert)
        try:
            return binary.cast(pa.string())
        except pa.ArrowInvalid:
            wrong = next(place for place, name in enumerate(binary.to_pylist()) if not is_text(name))
            raise DecodingError("a decoded name is no text", number=int(numbers[wrong])) from None

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


def is_text(name: bytes) -> bool:
    """Whether the bytes are a text, in UTF-8."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def convert_texts(names: pa.Array[Any], convert: Texts) -> pa.Array[Any]:
    """The texts of these bytes; each that differs is asked for once."""
    encoded = names.dictionary_encode()
    return pa.array(convert(encoded.dictionary.to_pylist()), pa.string()).take(encoded.indices)


def messages_of(column: BytesColumn, convert: Texts | None = None) -> Messages:
    """View a batch of messages; raise DecodingError on a kind that protocol 3 without streaming lacks."""
    low, high = int(column.offsets[0]), int(column.offsets[-1])
    source = with_constants(column.data[low:high])
    starts, ends = column.offsets[:-1] - low, column.offsets[1:] - low
    messages = Messages(source, high - low, starts, ends, source[starts], convert)
    if len(empty := np.flatnonzero(starts >= ends)):
        raise DecodingError("a decoded message is empty", number=int(empty[0]))
    if len(unknown := np.flatnonzero(~np.isin(messages.kinds, KNOWN))):
        raise DecodingError(
            f"a decoded message begins with {chr(messages.kinds[unknown[0]])!r}, unknown to protocol 3",
            number=int(unknown[0]),
            hint="is the server newer than this version of Cutline?",
        )
    return messages


def read_tuples(messages: Messages, numbers: Ints, at: Ints, width: int, *, is_last: bool) -> tuple[list[Values], Ints]:
    """Read the tuples of these messages that begin at these places, all of `width` columns; also return their ends.

    A tuple that `is_last` ends where its message does, another one before. Raises DecodingError where that is not so,
    where a tuple has another number of columns, or binary values.
    """
    ends = messages.ends[numbers]
    refuse(numbers, at + 2 > ends, "a decoded row ends within its number of columns")
    counts = (messages.u8(at).astype(np.int64) << 8) | messages.u8(at + 1)
    if (wrong := counts != width).any():
        refuse(numbers, wrong, f"a decoded row has {int(counts[wrong][0])} columns instead of {width}")
    place = at + 2
    columns: list[Values] = []
    for _ in range(width):
        # Of a row that does not end in time anything may be read here: no place is ever moved back.
        read = np.minimum(place, messages.data_bytes)
        kinds = messages.u8(read)
        is_text = kinds == ord("t")
        is_known = is_text | (kinds == ord("n")) | (kinds == ord("u"))
        refuse(numbers, ~is_known, "a decoded value is neither text, null nor unchanged")
        lengths = np.where(is_text, messages.u32(read + 1), 0)
        columns.append(Values(kinds, place + 5, lengths))
        place = place + 1 + np.where(is_text, 4 + lengths, 0)
    if is_last:
        refuse(numbers, place != ends, "a decoded row does not end where its message does")
    else:
        refuse(numbers, place >= ends, "a decoded row does not end within its message")
    return columns, place


def refuse(numbers: Ints, is_wrong: Flags, what: str) -> None:
    """Raise DecodingError of the first of these messages that is wrong, if one is."""
    if is_wrong.any():
        raise DecodingError(what, number=int(numbers[is_wrong][0]))


def read_relation(message: bytes, number: int = 0, convert: Texts | None = None) -> Relation:
    """Read a relation message, the batch's of that number; raise DecodingError unless it is one and nothing more.

    `convert` makes its names text where they are not UTF-8.
    """
    fields = Fields(message, number)
    oid, names, replica_identity = fields.number(4), [fields.name(), fields.name()], fields.number(1)
    facts: list[tuple[int, int, bool]] = []
    for _ in range(fields.number(2)):
        flags = fields.number(1)
        names.append(fields.name())
        type_oid, modifier = fields.number(4), fields.number(4)
        if flags > 1:
            raise DecodingError(f"a decoded table has a column with flags {flags}", number=number)
        facts.append((type_oid, (modifier ^ 1 << 31) - (1 << 31), bool(flags)))
    fields.end()
    if replica_identity not in b"dnfi":
        raise DecodingError(f"a decoded table has replica identity {chr(replica_identity)!r}", number=number)
    schema, table, *named = name_texts(names, number) if convert is None else convert(names)
    columns = tuple(RelationColumn(name, *found) for name, found in zip(named, facts, strict=True))
    # The system schema pg_catalog is sent as an empty name.
    return Relation(oid, schema or "pg_catalog", table, chr(replica_identity), columns)


def name_texts(names: list[bytes], number: int) -> list[str]:
    """The names in the batch's message of that number as text; raise DecodingError where one is not UTF-8."""
    if not all(map(is_text, names)):
        raise DecodingError("a decoded name is no text", number=number)
    return [name.decode() for name in names]


@dataclass(slots=True)
class Fields:
    """The fields of the batch's message `of`, one after the other; DecodingError where one is not whole."""

    message: bytes
    of: int
    place: int = 1

    def number(self, size: int) -> int:
        """The next field, an unsigned number of that many bytes."""
        return int.from_bytes(self.content(size), "big")

    def name(self) -> bytes:
        """The next field, a text in the server's encoding that ends with a zero."""
        end = self.message.find(b"\0", self.place)
        content = self.content(end - self.place if end >= 0 else len(self.message))
        self.place += 1
        return content

    def content(self, size: int) -> bytes:
        """The next field, so many bytes."""
        if size > len(self.message) - self.place:
            raise DecodingError(f"a decoded message {chr(self.message[0])!r} ends too early", number=self.of)
        self.place += size
        return self.message[self.place - size : self.place]

    def end(self) -> None:
        """Nothing may follow."""
        if self.place != len(self.message):
            raise DecodingError(f"a decoded message {chr(self.message[0])!r} does not end in time", number=self.of)
