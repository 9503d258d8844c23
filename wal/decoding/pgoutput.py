"""pgoutput's messages as columns: a field is read from all messages of a kind at once.

Source: PostgreSQL manual, "Logical Replication Message Formats", protocol version 3. Numbers are big-endian.
This module knows nothing about groups or the archive. No field is read beyond the end of its message:
`wal.decoding.message_forms` ensures this for all messages, `read_tuples` for tuples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from cutline.columns.bytes_column import Bytes, BytesColumn, Flags, Ints, gather, texts_array
from cutline.columns.lines import Values, with_constants
from cutline.nodes.encodings import Texts
from cutline.storage.errors import SnapshotError

BEGIN, COMMIT_LOCAL, BEGIN_PREPARE, PREPARED, COMMIT_OF_PREPARED, ROLLBACK_OF_PREPARED = (
    ord(letter) for letter in "BCbPKr"
)
RELATION, INSERTED, UPDATED, DELETED, TRUNCATED, MESSAGE = (ord(letter) for letter in "RIUDTM")
ORIGIN, TYPE = ord("O"), ord("Y")
KNOWN = (
    BEGIN,
    COMMIT_LOCAL,
    BEGIN_PREPARE,
    PREPARED,
    COMMIT_OF_PREPARED,
    ROLLBACK_OF_PREPARED,
    RELATION,
    INSERTED,
    UPDATED,
    DELETED,
    TRUNCATED,
    MESSAGE,
    ORIGIN,
    TYPE,
)


class DecodingError(SnapshotError):
    """A message from the server violates the protocol; none of it was stored.

    `number` is the index of the message in its batch, which the decoder replaces with its position among all messages
    that were read.
    """

    def __init__(
        self, message: str, *, number: int | None = None, hint: str = "", details: dict[str, object] | None = None
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.number = number


class RelationColumn(Struct, frozen=True):
    """One column as a relation message describes it."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool


class Relation(Struct, frozen=True):
    """A relation message: a table as it was when the changes after it were made."""

    oid: int
    schema: str
    table: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


class Messages(Struct, frozen=True):
    """A batch of messages. `source` is their data followed by the line constants; `convert` decodes names."""

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
        """The messages as a column."""
        return BytesColumn(self.source, np.append(self.starts, self.data_bytes))

    def u8(self, at: Ints) -> Bytes:
        """Return the bytes at these offsets."""
        return self.source[at]

    def u32(self, at: Ints) -> Ints:
        """Return the 32-bit numbers at these offsets."""
        view = np.ndarray((len(self.source) - 3,), np.dtype(">u4"), self.source, strides=(1,))
        return view[at].astype(np.int64)

    def u64(self, at: Ints) -> Ints:
        """Return the 64-bit numbers at these offsets."""
        view = np.ndarray((len(self.source) - 7,), np.dtype(">u8"), self.source, strides=(1,))
        return view[at].astype(np.int64)

    def names(self, numbers: Ints, skip: int) -> pa.Array[Any]:
        """Return the names that end these messages after `skip` bytes, as Arrow strings without the final zeros."""
        starts = self.starts[numbers] + skip
        binary = gather(self.source, starts, self.ends[numbers] - 1 - starts).to_arrow()
        if self.convert is not None:
            return convert_texts(binary, self.convert)
        try:
            return binary.cast(pa.string())
        except pa.ArrowInvalid:
            wrong = next(number for number, name in enumerate(binary.to_pylist()) if not is_text(name))
            raise DecodingError("a name is not valid UTF-8", number=int(numbers[wrong])) from None

    def find_prefix(self, prefix: bytes) -> tuple[Ints, Ints]:
        """Find the logical messages with this prefix; return their numbers and the offsets of their contents."""
        # Other programs may write many messages, so prefixes are compared by column.
        expected = np.frombuffer(prefix + b"\0", np.uint8)
        numbers = np.flatnonzero(self.kinds == MESSAGE)
        numbers = numbers[self.ends[numbers] - self.starts[numbers] >= 14 + len(expected)]
        for offset, byte in enumerate(expected):
            # After a byte or two, usually only the messages with the prefix remain.
            numbers = numbers[self.u8(self.starts[numbers] + 10 + offset) == byte]
        return numbers, self.starts[numbers] + 14 + len(expected)

    def bytes_at(self, number: int) -> bytes:
        """Return the bytes of message `number`."""
        return self.source[self.starts[number] : self.ends[number]].tobytes()


def is_text(name: bytes) -> bool:
    """Whether the bytes are valid UTF-8."""
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def convert_texts(names: pa.Array[Any], convert: Texts) -> pa.Array[Any]:
    """Decode these bytes; `convert` is called with each distinct value only once."""
    encoded = names.dictionary_encode()
    return texts_array(convert(encoded.dictionary.to_pylist())).take(encoded.indices)


def messages_of(column: BytesColumn, convert: Texts | None = None) -> Messages:
    """View a batch of messages; raise DecodingError for a kind that does not exist in protocol 3 without streaming."""
    low, high = int(column.offsets[0]), int(column.offsets[-1])
    source = with_constants(column.data[low:high])
    starts, ends = column.offsets[:-1] - low, column.offsets[1:] - low
    messages = Messages(source, high - low, starts, ends, source[starts], convert)
    if len(empty := np.flatnonzero(starts >= ends)):
        raise DecodingError("the message is empty", number=int(empty[0]))
    if len(unknown := np.flatnonzero(~np.isin(messages.kinds, KNOWN))):
        raise DecodingError(
            f"its kind {chr(messages.kinds[unknown[0]])!r} is unknown in protocol 3",
            number=int(unknown[0]),
            hint="this version of Cutline may be too old for the server",
        )
    return messages


def read_tuples(messages: Messages, numbers: Ints, at: Ints, width: int, *, is_last: bool) -> tuple[list[Values], Ints]:
    """Read the tuples in these messages at the offsets `at`, each with `width` columns; also return their ends.

    If `is_last`, a tuple must end where its message ends, otherwise before that. Raises DecodingError if it does not,
    or if a tuple has a different number of columns or contains binary values.
    """
    ends = messages.ends[numbers]
    refuse(numbers, at + 2 > ends, "a row ends before its number of columns is complete")
    counts = (messages.u8(at).astype(np.int64) << 8) | messages.u8(at + 1)
    if (wrong := counts != width).any():
        refuse(numbers, wrong, f"a row has {int(counts[wrong][0])} columns instead of {width}")
    offset = at + 2
    columns: list[Values] = []
    for _ in range(width):
        # A row that runs past its message may yield garbage here. Such a row is refused below, because offsets only
        # grow.
        read = np.minimum(offset, messages.data_bytes)
        kinds = messages.u8(read)
        is_text = kinds == ord("t")
        is_known = is_text | (kinds == ord("n")) | (kinds == ord("u"))
        refuse(numbers, ~is_known, "a value is neither text, null nor unchanged")
        lengths = np.where(is_text, messages.u32(read + 1), 0)
        columns.append(Values(kinds, offset + 5, lengths))
        offset = offset + 1 + np.where(is_text, 4 + lengths, 0)
    if is_last:
        refuse(numbers, offset != ends, "a row does not end where its message ends")
    else:
        refuse(numbers, offset >= ends, "a row does not end within its message")
    return columns, offset


def refuse(numbers: Ints, is_wrong: Flags, what: str) -> None:
    """Raise DecodingError for the first message that `is_wrong` flags, if any."""
    if is_wrong.any():
        raise DecodingError(what, number=int(numbers[is_wrong][0]))


def read_relation(message: bytes, number: int = 0, convert: Texts | None = None) -> Relation:
    """Read a relation message; `number` is its index in the batch, for errors.

    `convert` decodes its names if they are not UTF-8. Raises DecodingError unless the message is complete and valid.
    """
    fields = Fields(message, number)
    oid, names, replica_identity = fields.number(4), [fields.name(), fields.name()], fields.number(1)
    columns: list[RelationColumn] = []
    for _ in range(fields.number(2)):
        flags = fields.number(1)
        names.append(fields.name())
        type_oid, modifier = fields.number(4), fields.number(4)
        if flags > 1:
            raise DecodingError(f"a relation message has a column with unknown flags {flags}", number=number)
        # The name is set below, because all names are decoded at once.
        columns.append(RelationColumn("", type_oid, (modifier ^ 1 << 31) - (1 << 31), bool(flags)))
    fields.end()
    if replica_identity not in b"dnfi":
        raise DecodingError(
            f"a relation message has the unknown replica identity {chr(replica_identity)!r}", number=number
        )
    schema, table, *column_names = name_texts(names, number) if convert is None else convert(names)
    named = tuple(replace(column, name=name) for column, name in zip(columns, column_names, strict=True))
    # PostgreSQL sends pg_catalog as an empty schema name.
    return Relation(oid, schema or "pg_catalog", table, chr(replica_identity), named)


def name_texts(names: list[bytes], number: int) -> list[str]:
    """Decode the names of message `number`; raise DecodingError if one is not valid UTF-8."""
    if not all(map(is_text, names)):
        raise DecodingError("a name is not valid UTF-8", number=number)
    return [name.decode() for name in names]


class Fields(Struct):
    """Reads the fields of message `of` in the batch, in order; raises DecodingError if one is incomplete."""

    message: bytes
    of: int
    offset: int = 1

    def number(self, size: int) -> int:
        """Read the next field, an unsigned number of `size` bytes."""
        return int.from_bytes(self.content(size), "big")

    def name(self) -> bytes:
        """Read the next field, a zero-terminated string in the server's encoding."""
        end = self.message.find(b"\0", self.offset)
        content = self.content(end - self.offset if end >= 0 else len(self.message))
        self.offset += 1
        return content

    def content(self, size: int) -> bytes:
        """Read the next field, `size` bytes."""
        if size > len(self.message) - self.offset:
            raise DecodingError(f"a message {chr(self.message[0])!r} is too short", number=self.of)
        self.offset += size
        return self.message[self.offset - size : self.offset]

    def end(self) -> None:
        """Check that no bytes follow."""
        if self.offset != len(self.message):
            raise DecodingError(f"a message {chr(self.message[0])!r} is too long", number=self.of)
