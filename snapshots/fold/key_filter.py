"""Key filter: keys that may have changed, in memory that does not grow with their number.

Of a key in the set it says so; of others it may say so too. So base rows that it does not know hold for sure, and the
others are compared with the changed keys in a shuffle, where a set of all keys would not fit on the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from columns.bytes_column import BytesColumn, Flags, xxhash64

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Of keys that are not in the set it then knows one in 16 at most.
BITS_PER_KEY = 16
BITS_MIN, BITS_MAX = 1 << 6, 1 << 28
WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """A bit for every remainder of hashes, set where a key in the set has it; as many as a power of two."""

    words: npt.NDArray[np.uint64]

    def contains(self, keys: BytesColumn, hashes: npt.NDArray[np.uint64] | None = None) -> Flags:
        """Which of `keys` may be in the set; `hashes` are those of the keys."""
        places = (xxhash64(keys) if hashes is None else hashes) & np.uint64(len(self.words) * WORD_BITS - 1)
        bits = self.words[places // np.uint64(WORD_BITS)] >> (places % np.uint64(WORD_BITS))
        return np.asarray(bits & np.uint64(1), np.bool_)


def key_filters(changed: DataFrame, count: int, groups: Iterable[tuple[int, int]]) -> dict[int, dict[int, KeyFilter]]:
    """By node and group, of those in `groups`, the filter of the keys of `changed` (node, key), about `count` keys.

    One filter serves all groups of a node. What comes to the driver is bounded by BITS_MAX.
    """
    bits = min(max(1 << (count * BITS_PER_KEY - 1).bit_length(), BITS_MIN), BITS_MAX)
    # Spark's hash is the same number as ours.
    places = changed.selectExpr("node", f"xxhash64(key) & {bits - 1}L AS place")
    words = places.selectExpr(
        "node", f"place div {WORD_BITS} AS word", f"shiftleft(1L, int(place % {WORD_BITS})) AS bit"
    )
    found = words.groupBy("node", "word").agg({"bit": "bit_or"}).toDF("node", "word", "bits").toArrow()
    node, word, value = (np.asarray(found[name].to_numpy()) for name in ("node", "word", "bits"))
    filters: dict[int, dict[int, KeyFilter]] = {}
    of_node: dict[int, KeyFilter] = {}
    for number, group in groups:
        if number not in of_node:
            whole = np.zeros(bits // WORD_BITS, np.uint64)
            whole[word[node == number]] = value[node == number].view(np.uint64)
            of_node[number] = KeyFilter(whole)
        filters.setdefault(number, {})[group] = of_node[number]
    return filters
