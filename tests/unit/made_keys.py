"""Sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from cutline.snapshots.fold.changed_keys import KeySet, overlays


def key_set(keys: Sequence[bytes]) -> KeySet:
    """Build the set of these distinct keys, as the only changed keys of a fleet."""
    place = pa.array([0] * len(keys), pa.int32())
    return overlays(pa.table({"node": place, "group": place, "key": pa.array(keys, pa.binary())}))[0][0]
