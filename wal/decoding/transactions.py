"""Assign messages to their transactions, and extract transaction events and markers from a batch.

The parts of a distributed transaction share a *global id*. `[cut] global_id` in fleet.toml is the rule that derives the
global id from a two-phase gid. If the rule does not match a gid, the gid itself is the global id.

A slot yields a transaction's messages in one piece, between its BEGIN and its COMMIT or PREPARE.

A transaction that commits in one phase can be tagged with a global id by a transactional logical message that has the
`snapshot.gid` prefix and a gid as its content. The last tag counts. Content that PostgreSQL would not accept as a gid
is ignored. So is a tag in a prepared transaction, which has its own gid.

The *participants* of a distributed transaction are the shards on which it has parts. A gid can name them, if the rule
has a group `participants`. So can any part, by a transactional logical message with the prefix `snapshot.participants`,
of which the last one in the part counts. `fleet.participants` describes how names are written.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, from_list, gather, texts_array
from cutline.fleet.config import GLOBAL_ID_FORMS
from cutline.fleet.lsn import Lsn
from cutline.fleet.participants import SEPARATOR
from cutline.nodes.encodings import Texts
from cutline.wal.cut.markers import MARKER_PREFIX
from cutline.wal.decoding import pgoutput
from cutline.wal.decoding.pgoutput import Messages, convert_texts, is_text
from cutline.wal.segments.segments import (
    COMMIT,
    COMMIT_PREPARED,
    EVERY_PARTITION,
    MARKER,
    NO_GROUP,
    PREPARE,
    ROLLBACK_PREPARED,
    SEGMENT_SCHEMA,
    UNKNOWN_TIME,
)

# Gids from the JDBC driver (RecoveredXid.xidToString): format id (a signed integer), global transaction id and branch
# qualifier (both in base64).
XA = r"^(?P<global>-?\d+_[A-Za-z0-9+/=]+)_[A-Za-z0-9+/=]*$"
# Gids from Citus (Assign2PCIdentifier): citus_<initiating group>_<process>_<transaction number>_<connection number>,
# all unsigned.
CITUS = r"^(?P<global>citus_\d+_\d+_\d+)_\d+$"


def global_ids(gids: pa.Array[Any], form: str) -> pa.Array[Any]:
    """Return the global id of each gid; `form` is exact, xa, citus, or a regular expression with a `global` group."""
    if form == "exact" or len(gids) == 0:
        return gids
    builtin = {"xa": XA, "citus": CITUS}.get(form)
    if builtin:
        return pc.coalesce(pc.struct_field(pc.extract_regex(gids, builtin), "global"), gids)
    return _matched_names(gids, form)[0]


def _matched_names(gids: pa.Array[Any], form: str) -> tuple[pa.Array[Any], pa.Array[Any]]:
    """Return the global id that the regular expression `form` finds in each gid, and the text of its participants.

    Without a match of the group `participants`, that text is empty.
    """
    # Arrow's regular expressions are RE2: no look-around, no unnamed groups. The operator's rule was validated as a
    # Python regular expression, so Python evaluates it, once per distinct gid.
    encoded = gids.dictionary_encode()
    pattern, names, participants = re.compile(form), list[str](), list[str]()
    names_participants = PARTICIPANTS_GROUP in pattern.groupindex
    for gid in encoded.dictionary.to_pylist():
        match = pattern.search(gid)
        names.append((match and match["global"]) or gid)
        participants.append((match and names_participants and match[PARTICIPANTS_GROUP]) or "")
    return texts_array(names).take(encoded.indices), texts_array(participants).take(encoded.indices)


def _names_of(gids: pa.Array[Any], form: str) -> tuple[pa.Array[Any], pa.Array[Any] | None]:
    """Return the global ids of `gids`, which may be null, and the participants that they name (None: no gid can)."""
    if form in GLOBAL_ID_FORMS or len(gids) == 0 or PARTICIPANTS_GROUP not in re.compile(form).groupindex:
        return global_ids(gids, form), None
    return _matched_names(gids, form)


TAG_PREFIX, PARTICIPANTS_PREFIX = b"snapshot.gid", b"snapshot.participants"
PARTICIPANTS_GROUP = "participants"
# PostgreSQL's limit for gids (GIDSIZE without the terminating zero).
GID_BYTES_MAX = 199
# Enough for the names of a thousand shards. A logical message may be 1 GB, and events are held in memory.
PARTICIPANTS_BYTES_MAX = 8192
ROW_KINDS = (pgoutput.INSERTED, pgoutput.UPDATED, pgoutput.DELETED, pgoutput.TRUNCATED)


class OpenTransactionHead(Struct, frozen=True):
    """The transaction that has begun but not ended in the messages so far; `sent` counts its rows.

    A prepared transaction has a `global_id`; a transaction that commits in one phase may have a `tag`, a gid.
    `participants` is the content of the transaction's last message that names them. `head` is the BEGIN message without
    its kind. With `has_origin`, the transaction repeats one of another server.
    """

    lsn: Lsn
    xid: int
    global_id: str | None
    sent: int
    tag: str | None = None
    head: bytes = b""
    participants: str | None = None
    has_origin: bool = False


class Transactions(Struct, frozen=True):
    """The transactions in a batch, and for each message the number of its transaction.

    Number 0 is the transaction that the previous batch left open. `ordinal` numbers the rows of each transaction.
    `global_id`, `tag`, `participants` and `has_origin` are the fields of OpenTransactionHead, by transaction number.
    """

    of_message: Ints
    ordinal: Ints
    lsn: Ints
    xid: Ints
    global_id: pa.Array[Any]
    tag: pa.Array[Any]
    participants: pa.Array[Any]
    has_origin: Flags
    left_open: OpenTransactionHead | None

    @classmethod
    def of(cls, messages: Messages, before: OpenTransactionHead | None, form: str) -> Transactions:
        """Find the transactions in a batch; `before` is the transaction that the previous batch left open."""
        kinds = messages.kinds
        begins = np.flatnonzero((kinds == pgoutput.BEGIN) | (kinds == pgoutput.BEGIN_PREPARE))
        is_prepared = kinds[begins] == pgoutput.BEGIN_PREPARE
        at = messages.starts[begins]
        count = len(begins)
        lsn, xid = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
        lsn[1:] = messages.u64(at + 1)
        xid[1:] = messages.u32(at + np.where(is_prepared, 25, 17))
        prepared = np.flatnonzero(is_prepared)
        names = messages.names(begins[prepared], 29)
        index = np.full(count + 1, -1, np.int64)
        index[1:][prepared] = np.arange(len(prepared)) + 1
        known = pa.concat_arrays([_one_text(before.global_id if before else None), global_ids(names, form)])
        if before:
            lsn[0], xid[0] = before.lsn, before.xid
            index[0] = -1 if before.global_id is None else 0
        of_message = np.cumsum((kinds == pgoutput.BEGIN) | (kinds == pgoutput.BEGIN_PREPARE))
        # Only rows are counted, because relation messages are sent again each time the WAL is read.
        is_row = np.isin(kinds, ROW_KINDS)
        rows = np.cumsum(is_row)
        first = np.concatenate([[-(before.sent if before else 0)], rows[begins]])
        ordinal = rows - is_row - first[of_message]
        identities = known.take(to_arrow(index, absent=index < 0))
        tags = _tags(messages, of_message, index >= 0, before)
        participants = _participants(messages, of_message, before, count + 1)
        has_origin = np.zeros(count + 1, np.bool_)
        has_origin[0] = before is not None and before.has_origin
        has_origin[of_message[kinds == pgoutput.ORIGIN]] = True
        sent = int(rows[-1] - first[of_message[-1]])
        left = None
        if _is_left_open(kinds, of_message, was_open=before is not None):
            last = int(of_message[-1])
            head = messages.bytes_at(int(begins[last - 1]))[1:] if last else before.head if before else b""
            left = OpenTransactionHead(
                Lsn(lsn[last]),
                int(xid[last]),
                identities[last].as_py(),
                sent,
                tags[last].as_py(),
                head,
                participants[last].as_py(),
                bool(has_origin[last]),
            )
        return cls(of_message, ordinal, lsn, xid, identities, tags, participants, has_origin, left)


def _tags(
    messages: Messages, of_message: Ints, is_prepared: Flags, before: OpenTransactionHead | None
) -> pa.Array[Any]:
    """Return the last tag of each transaction that was not prepared."""
    numbers, starts = _transactional(messages, TAG_PREFIX, GID_BYTES_MAX)
    is_tag = ~is_prepared[of_message[numbers]]
    tag = before.tag if before else None
    return _last_texts(messages, (numbers[is_tag], starts[is_tag]), of_message, tag, len(is_prepared))


def _participants(
    messages: Messages, of_message: Ints, before: OpenTransactionHead | None, count: int
) -> pa.Array[Any]:
    """Return the content of the last message in each of `count` transactions that names participants."""
    found = _transactional(messages, PARTICIPANTS_PREFIX, PARTICIPANTS_BYTES_MAX)
    return _last_texts(messages, found, of_message, before.participants if before else None, count)


def _transactional(messages: Messages, prefix: bytes, bytes_max: int) -> tuple[Ints, Ints]:
    """Find the messages with this prefix and a content of 1 to `bytes_max` bytes, as `Messages.find_prefix` does.

    A non-transactional message belongs to no transaction, so it is left out.
    """
    numbers, starts = messages.find_prefix(prefix)
    lengths = messages.ends[numbers] - starts
    chosen = (messages.u8(messages.starts[numbers] + 1) == 1) & (lengths > 0) & (lengths <= bytes_max)
    return numbers[chosen], starts[chosen]


def _last_texts(
    messages: Messages, found: tuple[Ints, Ints], of_message: Ints, before: str | None, count: int
) -> pa.Array[Any]:
    """Return the last of the `found` contents that is valid text in each of `count` transactions; null without any.

    `before` is the text of the transaction that the previous batch left open.
    """
    numbers, starts = found
    texts, are_texts = _texts(gather(messages.source, starts, messages.ends[numbers] - starts), messages.convert)
    index = np.full(count, -1, np.int64)
    if before is not None:
        index[0] = 0
    # If an index occurs several times, numpy keeps the last value.
    index[of_message[numbers[are_texts]]] = np.arange(len(texts)) + 1
    return pa.concat_arrays([_one_text(before), texts]).take(to_arrow(index, absent=index < 0))


def _texts(contents: BytesColumn, convert: Texts | None) -> tuple[pa.Array[Any], Flags]:
    """Decode the contents that are valid text; also return flags that say which contents are."""
    binary = contents.to_arrow()
    if convert is not None:
        return convert_texts(binary, convert), np.ones(len(contents), np.bool_)
    try:
        return binary.cast(pa.string()), np.ones(len(contents), np.bool_)
    except pa.ArrowInvalid:
        # Tags are checked separately only if one of them is not valid UTF-8.
        are_texts = np.array([is_text(content) for content in binary.to_pylist()], np.bool_)
        return binary.filter(to_mask(are_texts)).cast(pa.string()), are_texts


def _one_text(text: str | None) -> pa.Array[Any]:
    if text is None:
        return pa.nulls(1, pa.string())
    return from_list([text.encode()]).to_arrow().cast(pa.string())


def _is_left_open(kinds: Any, of_message: Ints, *, was_open: bool) -> bool:
    """Whether the last message belongs to a transaction that has not ended."""
    last = int(of_message[-1])
    ends = np.flatnonzero((kinds == pgoutput.COMMIT_LOCAL) | (kinds == pgoutput.PREPARED))
    ended = len(ends) > 0 and int(of_message[ends[-1]]) == last
    return (last > 0 or was_open) and not ended


NO_GID = from_list([b""]).to_arrow()[0]


def events_of(messages: Messages, transactions: Transactions, form: str) -> pa.Table:
    """Return the events in a batch, ordered by their end positions; `form` is the rule for global ids."""
    parts = [
        _commits(messages, transactions, form),
        _prepares(messages, transactions, form),
        _settlements(messages, pgoutput.COMMIT_OF_PREPARED, COMMIT_PREPARED, form),
        _settlements(messages, pgoutput.ROLLBACK_OF_PREPARED, ROLLBACK_PREPARED, form),
        *_markers(messages),
    ]
    events = pa.concat_tables(parts)
    return events.take(to_arrow(np.argsort(to_numpy(events["end_lsn"]), kind="stable")))


def _commits(messages: Messages, transactions: Transactions, form: str) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == pgoutput.COMMIT_LOCAL)
    at = messages.starts[numbers]
    of_commit = transactions.of_message[numbers]
    names, participants = _names_of(transactions.tag.take(to_arrow(of_commit)), form)
    # The time is that of the commit on the other server (decode.c, DecodeCommit), perhaps days ago, by another clock.
    times = np.where(transactions.has_origin[of_commit], UNKNOWN_TIME, messages.u64(at + 18))
    of_records = _Numbers(messages.u64(at + 2), messages.u64(at + 10), times, transactions.xid[of_commit])
    keys = _participant_keys(participants, transactions.participants.take(to_arrow(of_commit)), names)
    return _event_table(COMMIT, of_records, names, keys=keys)


def _prepares(messages: Messages, transactions: Transactions, form: str) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == pgoutput.PREPARED)
    at = messages.starts[numbers]
    gids = messages.names(numbers, 30)
    names, participants = _names_of(gids, form)
    # The position of the transaction's changes is where its PREPARE record begins.
    of_prepare = transactions.of_message[numbers]
    lsn = transactions.lsn[of_prepare]
    other_gids = pc.if_else(pc.equal(gids, names), NO_GID, gids.cast(pa.binary()))
    of_records = _Numbers(lsn, messages.u64(at + 10), messages.u64(at + 18), messages.u32(at + 26))
    keys = _participant_keys(participants, transactions.participants.take(to_arrow(of_prepare)), names)
    return _event_table(PREPARE, of_records, names, other_gids, keys)


def _participant_keys(by_gid: pa.Array[Any] | None, by_message: pa.Array[Any], names: pa.Array[Any]) -> Any:
    """Return the participants that gids and messages name as keys of events (binary); None if there are none.

    A transaction without a global id has no participants but its own shard, whatever a message says.
    """
    if by_message.null_count == len(by_message) and by_gid is None:
        return None
    nothing = from_list([b""]).to_arrow()[0]
    texts = by_message.cast(pa.binary()).fill_null(nothing)
    if by_gid is not None:
        gids = by_gid.cast(pa.binary()).fill_null(nothing)
        separator = from_list([SEPARATOR.encode()]).to_arrow()[0]
        both = pc.and_(pc.not_equal(gids, nothing), pc.not_equal(texts, nothing))
        texts = pc.binary_join_element_wise(gids, texts, pc.if_else(both, separator, nothing))
    return pc.if_else(names.is_valid(), texts, nothing)


def _settlements(messages: Messages, kind: int, op: int, form: str) -> pa.Table:
    numbers = np.flatnonzero(messages.kinds == kind)
    at = messages.starts[numbers]
    is_commit = kind == pgoutput.COMMIT_OF_PREPARED
    names = global_ids(messages.names(numbers, 30 if is_commit else 38), form)
    # The message of a rollback identifies the transaction by the end of its PREPARE, not by its beginning. It
    # contains the time of the PREPARE before its own time.
    ended_at = at + (18 if is_commit else 26)
    of_records = _Numbers(
        messages.u64(at + 2), messages.u64(at + 10), messages.u64(ended_at), messages.u32(ended_at + 8)
    )
    return _event_table(op, of_records, names)


def _markers(messages: Messages) -> list[pa.Table]:
    tables: list[pa.Table] = []
    # There are two markers per cut.
    for number, start in zip(*messages.find_prefix(MARKER_PREFIX), strict=True):
        end = messages.u64(messages.starts[[number]] + 2)
        content = from_list([messages.source[start : messages.ends[number]].tobytes()]).to_arrow()
        none = np.zeros(1, np.int64)
        tables.append(_event_table(MARKER, _Numbers(end, end, none, none), pa.nulls(1, pa.string()), content))
    return tables


class _Numbers(NamedTuple):
    """The records of events: where each begins and ends, when it was written, and its transaction."""

    lsn: Ints
    end_lsn: Ints
    written_at: Ints
    xid: Ints


def _event_table(op: int, numbers: _Numbers, names: Any, rows: Any = None, keys: Any = None) -> pa.Table:
    count = len(numbers.lsn)
    empty = BytesColumn(np.empty(0, np.uint8), np.zeros(count + 1, np.int64)).to_arrow()
    return pa.table(
        [
            *map(to_arrow, numbers),
            names,
            to_arrow(np.full(count, op, np.int8)),
            to_arrow(np.full(count, NO_GROUP, np.int32)),
            to_arrow(np.full(count, EVERY_PARTITION, np.int32)),
            empty if keys is None else keys,
            empty if rows is None else rows,
            # They are counted once the segment is complete.
            pa.nulls(count, pa.int64()),
        ],
        schema=SEGMENT_SCHEMA,
    )
