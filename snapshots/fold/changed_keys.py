"""The changed keys: as exact sets if they fit on the driver, else as filters that contain them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_numpy
from cutline.snapshots.fold.key_filter import KeyFilter, key_filters
from cutline.snapshots.fold.long_lines import NO_PLACE
from cutline.snapshots.fold.overlay import KeySet, overlays
from cutline.snapshots.fold.sources import PROBLEM

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Keys: TypeAlias = KeySet | KeyFilter
# With fewer changes than this, collect the keys without counting them first.
COUNTED_FROM = 200_000
# Memory for the keys, in the driver and in each process that reads base objects. Building the sets takes several times
# as much.
KEYS_BYTES_MAX = 64 << 20
BYTES_PER_KEY = 24


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """The `count` changed keys by node number and group, and the ops of their last changes.

    All are KeySets if `is_exact`, else all are KeyFilters. `has_long_lines`: some last images are replaced by
    stand-ins.
    """

    keys: dict[int, dict[int, Keys]]
    count: int
    ops: frozenset[int]
    is_exact: bool = True
    has_problems: bool = False
    has_long_lines: bool = False


def collect_changed_keys(latest: DataFrame, changes: int) -> ChangedKeys:
    """Collect the keys of `latest` (node, group, key, op, place), where each key occurs once; skip rows of PROBLEM.

    `changes` is an upper bound of their number. The data sent to the driver is bounded by KEYS_BYTES_MAX, or by the
    size of the filters and the number of tables.
    """
    if changes > COUNTED_FROM and (filters := _build_filters(latest)):
        return filters
    return exact_keys(latest.select("node", "group", "key", "op", "place").toArrow())


def exact_keys(table: pa.Table) -> ChangedKeys:
    """The keys of a table (node, group, key, op, and place), where each key occurs once; rows of PROBLEM are skipped.

    Without a place no line is a stand-in.
    """
    is_problem = pc.equal(table["group"], PROBLEM)
    sets = overlays(table.filter(pc.invert(is_problem)))
    ops = frozenset(np.unique(to_numpy(table["op"])).tolist())
    keys: dict[int, dict[int, Keys]] = {node: dict(of_groups) for node, of_groups in sets.items()}
    is_long = pc.not_equal(table["place"], NO_PLACE) if "place" in table.column_names else pa.array([False])
    has_problems, has_long_lines = (bool(pc.any(flags).as_py()) for flags in (is_problem, is_long))
    return ChangedKeys(keys, len(table), ops, has_problems=has_problems, has_long_lines=has_long_lines)


def _build_filters(latest: DataFrame) -> ChangedKeys | None:
    """Build filters if there are too many keys for exact sets; else return None."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    sizes = latest.groupBy("node", "group", "op").agg(
        F.count(F.lit(1)).alias("keys"), F.sum(F.length("key")).alias("bytes"), F.max("place").alias("place")
    )
    counted = sizes.collect()  # bounded by the tables
    sized = [row for row in counted if row["group"] != PROBLEM]
    count = sum(row["keys"] for row in sized)
    if sum(row["bytes"] for row in sized) + count * BYTES_PER_KEY <= KEYS_BYTES_MAX:
        return None
    groups = sorted({(row["node"], row["group"]) for row in sized})
    filters = key_filters(latest.where(f"`group` <> {PROBLEM}"), count, groups)
    keys: dict[int, dict[int, Keys]] = {node: dict(of_groups) for node, of_groups in filters.items()}
    ops = frozenset(row["op"] for row in counted)
    has_long_lines = any(row["place"] != NO_PLACE for row in sized)
    has_problems = len(sized) < len(counted)
    return ChangedKeys(keys, count, ops, is_exact=False, has_problems=has_problems, has_long_lines=has_long_lines)
