"""Key filter: a set of keys with false positives (a Bloom filter with one hash), in bounded memory.

It contains every key of the set, and may match others too. So base rows that it does not match are certainly unchanged;
the others are compared with the changed keys in a shuffle. It is used if a set of all keys would not fit on the
driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cutline.columns.bytes_column import BytesColumn, Flags, xxhash64

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# With this, at most one in 16 keys outside of the set is matched.
BITS_PER_KEY = 16
BITS_MIN, BITS_MAX = 1 << 6, 1 << 28
WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """A bit per remainder of the hash, set if a key of the set has it. The number of bits is a power of two."""

    words: npt.NDArray[np.uint64]

    def contains(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Flags:
        """Which of `keys` may be in the set; pass `hashes` if they are known."""
        places = (xxhash64(keys) if hashes is None else hashes) & np.uint64(len(self.words) * WORD_BITS - 1)
        bits = self.words[places // np.uint64(WORD_BITS)] >> (places % np.uint64(WORD_BITS))
        return np.asarray(bits & np.uint64(1), np.bool_)


def key_filters(changed: DataFrame, count: int, groups: Iterable[tuple[int, int]]) -> dict[int, dict[int, KeyFilter]]:
    """Build the filters of the keys in `changed` (node, key; about `count` keys), by the (node, group) of `groups`.

    All groups of a node share one filter. The data sent to the driver is bounded by BITS_MAX per node.
    """
    bits = min(max(1 << (count * BITS_PER_KEY - 1).bit_length(), BITS_MIN), BITS_MAX)
    # Spark's xxhash64 equals columns.bytes_column.xxhash64.
    places = changed.selectExpr("node", f"xxhash64(key) & {bits - 1}L AS place")
    words = places.selectExpr(
        "node", f"place div {WORD_BITS} AS word", f"shiftleft(1L, int(place % {WORD_BITS})) AS bit"
    )
    table = words.groupBy("node", "word").agg({"bit": "bit_or"}).toDF("node", "word", "bits").toArrow()
    node, word, value = (np.asarray(table[name].to_numpy()) for name in ("node", "word", "bits"))
    filters: dict[int, dict[int, KeyFilter]] = {}
    of_node: dict[int, KeyFilter] = {}
    for number, group in groups:
        if number not in of_node:
            node_words = np.zeros(bits // WORD_BITS, np.uint64)
            node_words[word[node == number]] = value[node == number].view(np.uint64)
            of_node[number] = KeyFilter(node_words)
        filters.setdefault(number, {})[group] = of_node[number]
    return filters
