"""The columns of a segment. They are the same for every table, so that jobs need to know nothing of tables.

A segment holds row changes and transaction events, in separate row groups. The `lsn` of a change is the position where
the commit record of its transaction begins (of a prepared one: its PREPARE record); the `lsn` of an event is the
position of its own record. `end_lsn` is where that record ends. Of a marker only the end is known. A ROLLBACK PREPARED
has its own end, and as `lsn` the end of the PREPARE that it undid.
"""

from __future__ import annotations

import pyarrow as pa

INSERT, UPSERT, PARTIAL, DELETE, TRUNCATE = (ord(letter) for letter in "IUuDT")
COMMIT, PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED, MARKER = (ord(letter) for letter in "CPKRM")

# op, an ASCII code:
#   I  insert of a row of a group without a key; `row` is its line
#   U  insert or update; `row` is the complete new line
#   u  update; `row` is the new line, in which \u marks values that are unchanged
#   D  delete of the row with this `key` (in a group without a key: with the line `row`). If an update changed the key
#      and left values unchanged, `row` is the new key as a line: with a newline, because a key may be empty
#   T  truncate of the group
#   C  COMMIT   P  PREPARE; `row` is its gid if that is not the global id   K  COMMIT PREPARED   R  ROLLBACK PREPARED
#   M  a marker; `row` is its content
#
# global_id: that of a two-phase transaction, on its changes and events. On a COMMIT: the transaction's tag
# (wal.decoding.transactions), which names the distributed transaction of which its node committed a part in one phase.
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
