"""Find copies of tables that may lack rows, because the tables were rewritten while others were copied.

VACUUM FULL and CLUSTER move rows to pages that another task may have read already, and after a TRUNCATE, the snapshot
of a copy shows none of the rows that it should (base_copy/copy_ranges.py). But a cut that includes a TRUNCATE of the
table has no row from before it: nothing of the base copy counts then, whatever it lacks. So a table that is truncated
and filled again all the time can be copied.

TRUNCATEs of two-phase transactions don't count here, because a cut may leave them out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cutline.columns.arrow_numbers import to_flags, to_numpy
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import list_some
from cutline.nodes.groups import Table
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import TRUNCATE, read_changes

TABLES_NAMED_MAX = 8


def find_incomplete(
    store: ObjectStore, tables: Iterable[Table], segments: Iterable[Segment], copied_from: Lsn, position: Lsn
) -> tuple[Table, ...]:
    """Return which of these tables, rewritten while a node's others were copied, have a copy that may lack rows.

    `segments` are those of the node's archive, which may begin before the copy; changes from `copied_from` on count for
    it. `position` is that of the cut. Raises ObjectDamagedError.
    """
    waiting = {table.group.number: table for table in tables}
    for segment in segments:
        if not waiting:
            break
        if not segment.truncates:
            continue
        for changes in read_changes(store, segment, ["lsn", "op", "group", "global_id"]):
            lsn, op, group = (to_numpy(changes[name]) for name in ("lsn", "op", "group"))
            is_counted = (lsn >= copied_from) & (lsn < position)
            is_chosen = (op == TRUNCATE) & is_counted & to_flags(changes["global_id"].is_null().combine_chunks())
            for number in np.unique(group[is_chosen]).tolist():
                waiting.pop(number, None)
    return tuple(waiting.values())


def rewritten_text(tables: Iterable[Table]) -> str:
    """Say that the tables were rewritten."""
    names = sorted({table.group.name for table in tables})
    verb = "was" if len(names) == 1 else "were"
    return f"{list_some(names, TABLES_NAMED_MAX)} {verb} rewritten while others were copied"
