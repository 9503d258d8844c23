"""Count the values in the sets of constraints in this process, as Spark does it for many rows (restorable.py).

Sorting whole columns takes the place of grouping, so that no Python code runs for each value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_numpy

COUNTED_SCHEMA = pa.schema(
    [
        ("node", pa.int32()),
        ("group", pa.int32()),
        ("set", pa.int32()),
        ("problem", pa.string()),
        ("missing", pa.int64()),
        ("rows", pa.int64()),
        ("repeated", pa.int64()),
        ("absent", pa.int64()),
        ("example", pa.int64()),
    ]
)
Numbers: TypeAlias = npt.NDArray[Any]
LARGEST = np.iinfo(np.int64).max


def count_values(values: pa.Table, multisets: Collection[int]) -> pa.Table:
    """Reduce LOADED rows to one COUNTED_SCHEMA row for each set, problem and combination of missing references.

    `missing` has the bits of the foreign keys that have `absent` values which the set lacks, and `repeated` is the
    number of values that occur more than once, except in set 0 of `multisets`. `example` is the hash of such a value,
    or null.
    """
    is_value = pc.is_null(values["problem"])
    of_values = _count_values(values.filter(is_value), multisets)
    problems = values.filter(pc.invert(is_value)).select(["node", "group", "set", "problem"])
    counts = Counter(zip(*(problems[name].to_pylist() for name in problems.column_names), strict=True))
    of_problems = [(*place, 0, count, 0, 0, None) for place, count in counts.items()]
    columns = zip(*of_problems, strict=True) if of_problems else [[] for _ in COUNTED_SCHEMA]
    arrays = [pa.array(column, kind.type) for column, kind in zip(columns, COUNTED_SCHEMA, strict=True)]
    return pa.concat_tables([of_values, pa.table(arrays, schema=COUNTED_SCHEMA)])


def _count_values(values: pa.Table, multisets: Collection[int]) -> pa.Table:
    if len(values) == 0:
        return COUNTED_SCHEMA.empty_table()
    *places, h1, h2, reference = (
        to_numpy(values[name].combine_chunks()) for name in ("node", "group", "set", "h1", "h2", "reference")
    )
    order, starts = _runs([*places, h1, h2])
    node, group, number, h1 = (column[order][starts] for column in (*places, h1))
    times = np.add.reduceat((reference[order] == 0).astype(np.int64), starts)
    references = np.bitwise_or.reduceat(reference[order], starts)
    is_repeated = (times > 1) & ((number > 0) | ~np.isin(group, list(multisets)))
    is_absent = times == 0
    missing = np.where(is_absent, references, 0)
    order, starts = _runs([node, group, number, missing])
    sums = [np.add.reduceat(column[order].astype(np.int64), starts) for column in (times, is_repeated, is_absent)]
    examples = np.minimum.reduceat(np.where(is_repeated | is_absent, h1, LARGEST)[order], starts)
    first = [column[order][starts] for column in (node, group, number, missing)]
    has_example = (sums[1] > 0) | (sums[2] > 0)
    return pa.table(
        [
            *(pa.array(column) for column in first[:3]),
            pa.nulls(len(starts), pa.string()),
            pa.array(first[3]),
            *(pa.array(column) for column in sums),
            pa.array(examples, mask=~has_example),
        ],
        schema=COUNTED_SCHEMA,
    )


def _runs(columns: Iterable[Numbers]) -> tuple[Numbers, Numbers]:
    """Return the order that sorts rows by these columns, and where in it rows with the same values begin."""
    columns = list(columns)
    order = np.lexsort(columns[::-1])
    differs = np.zeros(len(order), bool)
    differs[0] = True
    for column in columns:
        in_order = column[order]
        differs[1:] |= in_order[1:] != in_order[:-1]
    return order, np.flatnonzero(differs)
