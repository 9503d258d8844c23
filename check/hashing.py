"""Combine the hashes of many entries. The result doesn't depend on their order, and can be merged from parts.

An entry's hash is 64 bits over key and row together. A set of entries is represented by their number, the exclusive or
of their hashes, and the sums of the lower and upper halves of the hashes. The sums reveal differences that cancel out
in the exclusive or.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct

from cutline.columns.bytes_column import Ints

HASH_COLUMNS = ("count", "xor", "low", "high")
HALF = np.uint64(0xFFFFFFFF)


class Sums(Struct, frozen=True):
    """Combined hashes by key: row i of `values` (n by 4) belongs to row i of `keys` (n by columns, all distinct)."""

    keys: Ints
    values: Ints

    def as_dict(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the combined hashes by key, at most one per partition of the copies."""
        return {tuple(key): tuple(value) for key, value in zip(self.keys.tolist(), self.values.tolist(), strict=True)}


def combine_hashes(keys: Ints, hashes: npt.NDArray[np.uint64]) -> Sums:
    """Combine the hashes of entries with the same key."""
    if len(keys) == 0:
        return Sums(keys, np.empty((0, len(HASH_COLUMNS)), np.int64))
    order, starts = _runs(keys)
    hashes = hashes[order]
    columns = [
        np.diff(np.append(starts, len(hashes))),
        np.bitwise_xor.reduceat(hashes, starts).view(np.int64),
        np.add.reduceat((hashes & HALF).view(np.int64), starts),
        np.add.reduceat((hashes >> np.uint64(32)).view(np.int64), starts),
    ]
    return Sums(keys[order[starts]], np.stack(columns, axis=1))


def combine_repeated(keys: Ints, hashes: npt.NDArray[np.uint64], counts: Ints) -> Sums:
    """Combine the hashes of entries with the same key, each of which occurs as often as `counts` says."""
    columns = [
        counts,
        np.where(counts % 2 == 1, hashes, np.uint64(0)).view(np.int64),
        counts * (hashes & HALF).view(np.int64),
        counts * (hashes >> np.uint64(32)).view(np.int64),
    ]
    return combine(keys, np.stack(columns, axis=1))


def combine(keys: Ints, values: Ints) -> Sums:
    """Merge combined hashes with the same key."""
    if len(keys) == 0:
        return Sums(keys, values)
    order, starts = _runs(keys)
    values = values[order]
    reduced = [
        (np.bitwise_xor if name == "xor" else np.add).reduceat(values[:, column], starts)
        for column, name in enumerate(HASH_COLUMNS)
    ]
    return Sums(keys[order[starts]], np.stack(reduced, axis=1))


def _runs(keys: Ints) -> tuple[Ints, Ints]:
    """Return an order of the rows that puts equal keys next to each other, and the start of each run of equal keys."""
    codes = _codes(keys)
    # numpy uses a radix sort for 16-bit numbers; the codes of one group's partitions always fit into 16 bits.
    order = np.argsort(codes.astype(np.uint16) if codes.max() < 1 << 16 else codes, kind="stable")
    codes = codes[order]
    return order, np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))


def _codes(keys: Ints) -> Ints:
    """Number the rows of `keys` so that two numbers are equal if and only if the rows are equal."""
    codes = np.zeros(len(keys), np.int64)
    for column in keys.T:
        low, high = int(column.min()), int(column.max())
        if high > low:
            codes = codes * (high - low + 1) + (column - low)
            if codes.max() > 1 << 31:
                codes = np.unique(codes, return_inverse=True)[1]
    return codes


def combine_all(parts: list[Sums], width: int) -> Sums:
    """Merge the combined hashes of the parts of a set; `width` is the number of key columns."""
    keys = [np.empty((0, width), np.int64), *(part.keys for part in parts)]
    values = [np.empty((0, len(HASH_COLUMNS)), np.int64), *(part.values for part in parts)]
    return combine(np.concatenate(keys), np.concatenate(values))


def differing_keys(ours: Sums, theirs: Sums) -> Ints:
    """Return the keys, in order, whose combined hashes differ, or that only one side has.

    A side may have several rows for a key, which are merged.
    """
    signs = np.array([1 if name == "xor" else -1 for name in HASH_COLUMNS])
    keys, values = np.concatenate([ours.keys, theirs.keys]), np.concatenate([ours.values, signs * theirs.values])
    difference = combine(keys, values)
    differing: Ints = difference.keys[(difference.values != 0).any(axis=1)]
    return differing


def sums_of_table(table: pa.Table, key_columns: list[str], prefix: str = "") -> Sums:
    """Read the combined hashes that a Spark job computed by `hash_aggregates`."""
    keys = [np.asarray(table[name].to_numpy(), np.int64) for name in key_columns]
    values = [np.asarray(table[prefix + name].to_numpy(), np.int64) for name in HASH_COLUMNS]
    return Sums(np.stack(keys, axis=1), np.stack(values, axis=1))


def hash_aggregates(hashed: Any, prefix: str = "", where: Any = None) -> list[Any]:
    """Return Spark aggregates for the same combined hash of the bigint column `hashed`, over rows matching `where`."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    def of(value: Any) -> Any:
        return value if where is None else F.when(where, value)

    zero = F.lit(0).cast("bigint")
    half = F.lit(0xFFFFFFFF).cast("bigint")
    combined = {
        "count": F.count(of(F.lit(1))),
        "xor": F.bit_xor(of(hashed)),
        "low": F.sum(of(hashed.bitwiseAND(half))),
        "high": F.sum(of(F.shiftrightunsigned(hashed, 32))),
    }
    return [F.coalesce(value, zero).alias(prefix + name) for name, value in combined.items()]
