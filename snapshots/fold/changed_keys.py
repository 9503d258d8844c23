"""Which keys have changed: every one of them where they fit on the driver, else a filter that knows them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow.compute as pc

from columns.arrow_numbers import to_numpy
from snapshots.fold.key_filter import KeyFilter, key_filters
from snapshots.fold.long_lines import NO_PLACE
from snapshots.fold.overlay import KeySet, overlays
from snapshots.fold.sources import PROBLEM

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Keys: TypeAlias = KeySet | KeyFilter
# With fewer changes than that nothing is counted first.
COUNTED_FROM = 200_000
# What the keys take in the driver and in every process that reads base objects; making the sets takes some times that.
KEYS_BYTES_MAX = 64 << 20
BYTES_PER_KEY = 24


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """The `count` keys by node number and group, and the ops that their last changes are of.

    Where it `is_exact`, each of them is a KeySet; else each is a KeyFilter. `has_long_lines`: not all of their last
    images are there themselves.
    """

    keys: dict[int, dict[int, Keys]]
    count: int
    ops: frozenset[int]
    is_exact: bool = True
    has_problems: bool = False
    has_long_lines: bool = False


def collect_changed_keys(latest: DataFrame, changes: int) -> ChangedKeys:
    """The keys in `latest` (node, group, key, op, place), of which each is there once; rows of PROBLEM are no keys.

    `changes` is at least their number. What the driver is sent is bounded by KEYS_BYTES_MAX, or by the filters and the
    tables.
    """
    if changes > COUNTED_FROM and (found := _build_filters(latest)):
        return found
    table = latest.selectExpr("node", "`group`", "key", "op", f"place <> {NO_PLACE} AS is_long").toArrow()
    is_problem = pc.equal(table["group"], PROBLEM)
    sets = overlays(table.filter(pc.invert(is_problem)))
    ops = frozenset(np.unique(to_numpy(table["op"])).tolist())
    keys: dict[int, dict[int, Keys]] = {node: dict(found) for node, found in sets.items()}
    has_problems, has_long_lines = (bool(pc.any(flags).as_py()) for flags in (is_problem, table["is_long"]))
    return ChangedKeys(keys, len(table), ops, has_problems=has_problems, has_long_lines=has_long_lines)


def _build_filters(latest: DataFrame) -> ChangedKeys | None:
    """Filters, if the keys are too many to be had one by one."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    sizes = latest.groupBy("node", "group", "op").agg(
        F.count(F.lit(1)).alias("keys"), F.sum(F.length("key")).alias("bytes"), F.max("place").alias("place")
    )
    counted = sizes.collect()  # bounded by the tables
    found = [row for row in counted if row["group"] != PROBLEM]
    count = sum(row["keys"] for row in found)
    if sum(row["bytes"] for row in found) + count * BYTES_PER_KEY <= KEYS_BYTES_MAX:
        return None
    groups = sorted({(row["node"], row["group"]) for row in found})
    filters = key_filters(latest.where(f"`group` <> {PROBLEM}"), count, groups)
    keys: dict[int, dict[int, Keys]] = {node: dict(of_groups) for node, of_groups in filters.items()}
    ops = frozenset(row["op"] for row in counted)
    has_long_lines = any(row["place"] != NO_PLACE for row in found)
    has_problems = len(found) < len(counted)
    return ChangedKeys(keys, count, ops, is_exact=False, has_problems=has_problems, has_long_lines=has_long_lines)
