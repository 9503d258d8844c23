"""That every message of a batch has the form of its kind, before any field of it is used.

Rows are the exception: what follows a row's table is read and checked where it is wanted. By whole columns, but for
kinds of which there are few: descriptions of tables and types, TRUNCATEs.
Source: PostgreSQL manual, "Logical Replication Message Formats"; flags that it calls unused are zero.
"""

from __future__ import annotations

import numpy as np

from columns.bytes_column import Ints, gather
from wal.decoding import pgoutput
from wal.decoding.pgoutput import DecodingError, Fields, Messages, name_texts, refuse

# The lengths of the kinds that have one, and those before the name at the end of others.
LENGTHS = {pgoutput.BEGIN: 21, pgoutput.COMMIT_LOCAL: 26}
LENGTHS_UNNAMED = {
    pgoutput.BEGIN_PREPARE: 29,
    pgoutput.PREPARED: 30,
    pgoutput.COMMIT_OF_PREPARED: 30,
    pgoutput.ROLLBACK_OF_PREPARED: 38,
    pgoutput.ORIGIN: 9,
}
# Kind, oid, a letter and a number of columns.
ROW_BYTES_MIN = 8
MESSAGE_BYTES_MIN = 15
# Where positions in the WAL are, and where flags that must be zero.
POSITIONS = {
    pgoutput.BEGIN: (1,),
    pgoutput.COMMIT_LOCAL: (2, 10),
    pgoutput.BEGIN_PREPARE: (1, 9),
    pgoutput.PREPARED: (2, 10),
    pgoutput.COMMIT_OF_PREPARED: (2, 10),
    pgoutput.ROLLBACK_OF_PREPARED: (2, 10),
    pgoutput.MESSAGE: (2,),
}
UNUSED_FLAGS = (
    pgoutput.COMMIT_LOCAL,
    pgoutput.PREPARED,
    pgoutput.COMMIT_OF_PREPARED,
    pgoutput.ROLLBACK_OF_PREPARED,
)
# A prefix up to here is looked for in all messages at once.
PREFIX_BYTES_BY_COLUMN = 32


def check_forms(messages: Messages) -> None:
    """Raise DecodingError unless every message is as long as its fields, and they are what they can be."""
    lengths = messages.ends - messages.starts
    of_kind = {int(kind): np.flatnonzero(messages.kinds == kind) for kind in np.unique(messages.kinds)}
    for kind, numbers in of_kind.items():
        letter = chr(kind)
        if kind in LENGTHS:
            refuse(numbers, lengths[numbers] != LENGTHS[kind], f"a decoded message {letter!r} has another length")
        elif kind in LENGTHS_UNNAMED:
            _check_name(messages, numbers, LENGTHS_UNNAMED[kind])
        elif kind in (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED):
            refuse(numbers, lengths[numbers] < ROW_BYTES_MIN, "a decoded row ends too early")
        elif kind == pgoutput.MESSAGE:
            _check_messages(messages, numbers)
        if kind in UNUSED_FLAGS:
            flags = messages.u8(messages.starts[numbers] + 1)
            refuse(numbers, flags != 0, f"a decoded message {letter!r} has flags")
        _check_positions(messages, kind, numbers)
    for number in of_kind.get(pgoutput.TYPE, ()):
        fields = Fields(messages.bytes_at(int(number)), int(number))
        fields.content(4)
        names = [fields.name(), fields.name()]
        if messages.convert is None:
            name_texts(names, int(number))
        fields.end()
    for number in of_kind.get(pgoutput.TRUNCATED, ()):
        truncated_tables(messages, int(number))


def truncated_tables(messages: Messages, number: int) -> list[int]:
    """The oids of the tables that this TRUNCATE names."""
    fields = Fields(messages.bytes_at(number), number)
    count, options = fields.number(4), fields.number(1)
    if options > 3:
        raise DecodingError(f"a decoded TRUNCATE has options {options}", number=number)
    if 4 * count != len(fields.message) - fields.place:
        raise DecodingError("a decoded TRUNCATE names another number of tables than it says", number=number)
    return [fields.number(4) for _ in range(count)]


def _check_positions(messages: Messages, kind: int, numbers: Ints) -> None:
    places = [messages.u64(messages.starts[numbers] + skip) for skip in POSITIONS.get(kind, ())]
    for place in places:
        refuse(numbers, place < 0, "a decoded message has a position past the end of all WAL")
    if len(places) == 2:
        refuse(numbers, places[0] > places[1], "a decoded transaction ends before it begins")


def _check_name(messages: Messages, numbers: Ints, skip: int) -> None:
    """That what follows after `skip` bytes is one zero-terminated name."""
    what = "a decoded message ends within a name, or not where a name does"
    starts, ends = messages.starts[numbers] + skip, messages.ends[numbers]
    refuse(numbers, starts >= ends, what)
    refuse(numbers, messages.u8(ends - 1) != 0, what)
    names = gather(messages.source, starts, ends - starts)
    if int(np.count_nonzero(names.data == 0)) != len(numbers):
        zeros = np.add.reduceat(names.data == 0, names.offsets[:-1], dtype=np.int64)
        refuse(numbers, zeros != 1, what)


def _check_messages(messages: Messages, numbers: Ints) -> None:
    """Logical messages: flags, position, prefix, and as much content as they say."""
    starts, ends = messages.starts[numbers], messages.ends[numbers]
    refuse(numbers, ends - starts < MESSAGE_BYTES_MIN, "a decoded logical message ends too early")
    refuse(numbers, messages.u8(starts + 1) > 1, "a decoded logical message has flags")
    zeros = np.full(len(numbers), -1, np.int64)
    left = np.arange(len(numbers))
    for place in range(10, 10 + PREFIX_BYTES_BY_COLUMN):
        left = left[starts[left] + place < ends[left]]
        is_zero = messages.u8(starts[left] + place) == 0
        zeros[left[is_zero]] = place
        left = left[~is_zero]
        if len(left) == 0:
            break
    for row in left:
        zeros[row] = messages.bytes_at(int(numbers[row])).find(b"\0", 10)
    contents = starts + zeros + 5
    refuse(numbers, (zeros < 0) | (contents > ends), "a decoded logical message ends within its prefix")
    said = messages.u32(contents - 4)
    refuse(numbers, contents + said != ends, "a decoded logical message has another length than it says")
