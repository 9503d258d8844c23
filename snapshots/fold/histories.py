"""Find the changes from which rows with partial images take their values, and merge these images.

All changes of the rows' keys are held in memory. Spark does the same with DataFrames (snapshots.fold.key_history).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, column_of, gather, offsets_of, runs
from cutline.columns.lines import concatenate
from cutline.snapshots.fold.key_history import Images, build_key_history, merge_in_blocks, number_rows
from cutline.wal.segments.segments import DELETE, PARTIAL

# Rows are identified by their node, group and key; in a group without a key, the name of the line replaces the key.
ROW_NAME = ["node", "group", "key"]


def named(table: pa.Table, key: str = "key") -> pa.Table:
    """Return the rows' names (ROW_NAME); the third column is `key`."""
    return pa.table([table["node"], table["group"], table[key]], names=ROW_NAME)


class Histories(Struct, frozen=True):
    """The changes from which each of n rows takes its values: those of row i begin at `offsets[i]`, oldest first.

    They are partial except for the oldest, which may be complete. If they have no beginning (`is_open`), the row may
    have been in the base copy, under the name in `names`.
    """

    changes: Ints
    offsets: Ints
    is_open: Flags
    names: pa.Table


def find_histories(keyed: pa.Table, rows: pa.Table) -> Histories:
    """Find the histories of `rows` (with a name) among the changes of groups with a key."""
    periods = build_key_history(named(rows), moves_among(keyed))
    parts = [named(rows), named(periods, "target"), named(periods), named(keyed)]
    names = pa.concat_tables(parts)
    code = number_rows(names["key"], *(to_numpy(names[name]) for name in ROW_NAME[:2]))
    of_row, of_target, of_period, of_change = np.split(code, np.cumsum([len(part) for part in parts])[:-1])
    chosen = np.flatnonzero(np.isin(of_change, of_period))
    places = [of_change[chosen], *(to_numpy(keyed[name])[chosen].astype(np.int64) for name in ("lsn", "seq"))]
    # The changes of each key, oldest first, and where those of each period are among them.
    order = np.lexsort(places[::-1])
    places = [place[order] for place in places]
    low, high = (
        _count_before(places, [of_period, *(to_numpy(periods[f"{end}_{name}"]) for name in ("lsn", "seq"))])
        for end in ("low", "high")
    )
    # The periods of each row, oldest first: build_key_history returns the newest first.
    by_code = np.argsort(of_row)
    row = by_code[np.searchsorted(of_row[by_code], of_target)]
    by_row = np.lexsort((-np.arange(len(row)), row))
    first = np.searchsorted(row[by_row], np.arange(len(rows)))
    begin, is_stopped = _begin_periods(to_numpy(keyed["op"])[chosen[order]], low[by_row], high[by_row])
    # If a period is stopped, the row's earlier periods don't count.
    later: Ints = np.cumsum(is_stopped[::-1])[::-1] - is_stopped
    later -= np.repeat(later[np.append(first[1:], len(row)) - 1], np.diff(np.append(first, len(row))))
    lengths = np.where(later == 0, high[by_row] - begin, 0)
    offsets = offsets_of(lengths)
    changes = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)
    is_open = ~np.logical_or.reduceat(is_stopped, first)
    oldest = named(periods.take(to_arrow(by_row[first])))
    return Histories(chosen[order[changes]], offsets[np.append(first, len(row))], is_open, oldest)


def _begin_periods(op: Ints, low: Ints, high: Ints) -> tuple[Ints, Flags]:
    """Return where the changes that count begin in each period [low, high), and whether it is stopped there.

    A change that is not partial stops the search for values: it has all of them, or it deletes the row.
    """
    last = np.concatenate([[-1], np.maximum.accumulate(np.where(op != PARTIAL, np.arange(len(op)), -1))])
    stop = last[high]
    is_stopped = stop >= low
    return np.where(is_stopped, stop + (op[stop] == DELETE), low), is_stopped


def are_moves(changes: pa.Table) -> Flags:
    """Flag the changes that moved a row: DELETEs whose `row` is the new key as a line.

    In groups without a key, the `row` of a DELETE is the deleted line, and the flags have no meaning.
    """
    are_moved: Flags = (to_numpy(changes["op"]) == DELETE) & (to_numpy(pc.binary_length(changes["row"])) > 0)
    return are_moved


def moves_among(keyed: pa.Table) -> pa.Table:
    """Select the moves: `key` is the old key, `row` is the new key."""
    moves = keyed.filter(to_mask(are_moves(keyed)))
    line = column_of(moves["row"])
    key = gather(line.data, line.offsets[:-1], line.lengths - 1).to_arrow()
    columns = [*(moves[name] for name in ROW_NAME), key, moves["lsn"], moves["seq"]]
    return pa.table(columns, names=[*ROW_NAME, "row", "lsn", "seq"])


def _count_before(ordered: list[Ints], bounds: list[Ints]) -> Ints:
    """For each of the `bounds`, count the `ordered` triples that are less than it."""
    triples = [np.concatenate(columns) for columns in zip(bounds, ordered, strict=True)]
    is_counted = np.arange(len(triples[0])) >= len(bounds[0])
    order = np.lexsort((is_counted, *reversed(triples)))
    counts = np.empty(len(order), np.int64)
    counts[order] = np.cumsum(is_counted[order])
    return counts[: len(bounds[0])]


def merge_by_table(rows: pa.Table, images: Images, counts: Mapping[tuple[int, int], int]) -> tuple[BytesColumn, Flags]:
    """Merge the images of `rows`, which are ordered by node and group."""
    node, group = (to_numpy(rows[name]).astype(np.int64) for name in ("node", "group"))
    merged: list[BytesColumn] = []
    complete = [np.zeros(0, np.bool_)]
    for run in runs((node << 32) + group):
        offsets = images.offsets[run.start : run.stop + 1]
        lines = images.lines.part(slice(int(offsets[0]), int(offsets[-1])))
        copy = int(node[run.start]), int(group[run.start])
        of_table, are_complete = merge_in_blocks(Images(lines, offsets - offsets[0]), counts[copy])
        merged.append(of_table)
        complete.append(are_complete)
    return concatenate(merged), np.concatenate(complete)
