"""The columns of a segment. They are the same for every table, so that jobs need to know nothing of tables.

A segment holds row changes and transaction events, in separate row groups. The `lsn` of a change is the position where
the commit record of its transaction begins (of a prepared one: its PREPARE record); the `lsn` of an event is the
position of its own record. `end_lsn` is where that record ends. Of a marker only the end is known. A ROLLBACK PREPARED
has its own end, and as `lsn` the end of the PREPARE that it undid.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_mask, to_numpy

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
# seq: on a change, its number within its transaction. On an event, when the transaction ended, or was prepared: by the
# node's clock, in microseconds since 2000, as PostgreSQL has it. 0 on markers and in early segments.
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
CHANGES = (INSERT, UPSERT, PARTIAL, DELETE, TRUNCATE)
OF_TWO_PHASES = (PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED)
EVENTS = (COMMIT, *OF_TWO_PHASES, MARKER)


def check_rows(table: pa.Table) -> None:
    """Raise ValueError unless each row is a change of a group, or an event of none with the global id that it needs."""
    op, group = to_numpy(table["op"]), to_numpy(table["group"])
    is_change = np.isin(op, CHANGES)
    if not (is_change | np.isin(op, EVENTS)).all():
        raise ValueError("it has a row that is neither a change nor an event")
    if (group[is_change] <= NO_GROUP).any() or (group[~is_change] != NO_GROUP).any():
        raise ValueError("it has a change of no group, or an event of one")
    needs_id = np.isin(op, OF_TWO_PHASES)
    if needs_id.any() and table["global_id"].filter(to_mask(needs_id)).null_count:
        raise ValueError("it has an event of a two-phase transaction without a global id")
