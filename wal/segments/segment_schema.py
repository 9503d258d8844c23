"""What a segment's columns mean. The same for every table, so the jobs know nothing of tables.

A segment holds row changes and transaction events, in row groups of their own. A change's `lsn` is the
position where its transaction's commit record (for a prepared one: its PREPARE record) begins, an event's the
position of its own record; `end_lsn` is where that record ends. A marker is known by its end alone, a
ROLLBACK PREPARED by its own end and, as `lsn`, the end of the PREPARE that it undid.
"""

from __future__ import annotations

import pyarrow as pa

INSERT, UPSERT, PARTIAL, DELETE, TRUNCATE = (ord(letter) for letter in "IUuDT")
COMMIT, PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED, MARKER = (ord(letter) for letter in "CPKRM")

# op, an ASCII code:
#   I  a row of a group without a key came to be; `row` is its line
#   U  a row is now `row`, complete
#   u  a row is now `row`, where \u stands for a value that is the same as before
#   D  the row with this `key` (of a group without a key: with the line `row`) is gone. Where the update that
#      took it away left values unchanged, `row` is the key under which the row lives on, as a line: with a
#      newline, since a key may be empty
#   T  every row of the group is gone
#   C  COMMIT   P  PREPARE   K  COMMIT PREPARED   R  ROLLBACK PREPARED   M  a marker; `row` is its content
#
# global_id: of a two-phase transaction, on its changes and events. On a COMMIT: with what the transaction was
# tagged (wal.decoding.transactions), as a part of a distributed transaction that its node committed in one phase.
SEGMENT_SCHEMA = pa.schema(
    [
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("end_lsn", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("global_id", pa.string()),
        pa.field("op", pa.int8(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("row", pa.binary(), nullable=False),
    ]
)
NO_GROUP = 0
EVERY_PARTITION = -1
