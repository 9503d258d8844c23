"""Transactions between shards, of which an earlier check has compared a part."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from cutline.check.cuts import StoredEvents
from cutline.check.transactions import ComparedParts, compare_pairs
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.sources import SegmentSource, Source
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import HeldObjects
from cutline.wal.segments.segments import SegmentRange, create_segment
from tests.unit.made_segments import event, table

NODES = ("s1", "s2")
CHECKED_TO, POSITION = Lsn(200), Lsn(400)
# The positions of the PREPAREs of each node's segments by global id.
Prepared = tuple[dict[str, int], ...]


def pairs(
    folder: Path, shards: tuple[Prepared, Prepared], undecided: tuple[dict[str, bool], dict[str, bool]], new: int
) -> tuple[int, list[str]]:
    """Compare the shards; segments from number `new` on are new. Return how many were compared, and the torn ones."""
    location = StoreLocation(f"file://{folder}/store")
    sources: list[SegmentSource] = []
    compared: dict[int, ComparedParts] = {}
    for number, segments in enumerate(shards):
        keys = set[str]()
        for at, prepared in enumerate(segments, start=1):
            events = table([event(lsn, "P") | {"global_id": gid} for gid, lsn in sorted(prepared.items())])
            wal_range = SegmentRange(NODES[number], "op", Lsn(at * 100 - 100), Lsn(at * 100))
            segment = create_segment(
                location.open(), f"wal/{NODES[number]}", at, wal_range, (table([]), events)
            ).segment
            source = Source(segment.key, NODES[number], number, segment.size, segment.digest, segment=segment)
            sources.append(SegmentSource(source, segment, POSITION, frozenset(), {}))
            keys |= {segment.key} if at >= new else set()
        compared[number] = ComparedParts(CHECKED_TO, keys, tuple(undecided[number].items()))
    events_store = StoredEvents(HeldObjects(location).open())
    found = compare_pairs(cast("Any", None), NODES, tuple(sources), location, events_store, compared)
    assert found.problems == []
    return found.transactions, [str(one.global_id) for one in found.conflicts]


@pytest.mark.parametrize(("shards", "undecided", "expected"), [
    # Both parts are new.
    ((({}, {}, {"g": 250}), ({}, {}, {"g": 260})), ({}, {}), (1, [])),
    # The part of s2 is after its cut.
    ((({}, {}, {"g": 250}), ({}, {}, {"g": 450})), ({}, {}), (1, ["g"])),
    # The earlier check has compared both parts, and a part whose gid was used again after that is another one.
    ((({"g": 50}, {}), ({"g": 60}, {})), ({}, {}), (0, [])),
    ((({"g": 50}, {}, {"g": 250}), ({"g": 60}, {}, {"g": 450})), ({}, {}), (1, ["g"])),
    # The part of s1 was undecided at the cut that was checked, and that of s2 is new.
    ((({"g": 50}, {}), ({}, {}, {"g": 260})), ({"g": True}, {}), (1, [])),
    ((({"g": 50}, {}), ({}, {}, {"g": 260})), ({"g": False}, {}), (1, ["g"])),
    # Undecided on both shards then.
    ((({"g": 50}, {}), ({"g": 60}, {})), ({"g": True}, {"g": True}), (1, [])),
    ((({"g": 50}, {}), ({"g": 60}, {})), ({"g": True}, {"g": False}), (1, ["g"])),
    # A new segment of a node that was idle may begin before the cut that was checked.
    ((({}, {}, {"g": 150}), ({}, {}, {"g": 450})), ({}, {}), (1, ["g"])),
])  # fmt: skip
def test_only_parts_that_the_checked_state_lacks_are_compared(
    tmp_path: Path,
    shards: tuple[Prepared, Prepared],
    undecided: tuple[dict[str, bool], dict[str, bool]],
    expected: tuple[int, list[str]],
) -> None:
    assert pairs(tmp_path, shards, undecided, new=3) == expected
