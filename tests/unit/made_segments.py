"""Small segments, and stores for them."""

from itertools import count

import pyarrow as pa

from cutline.fleet.lsn import Lsn
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment, SegmentRange
from cutline.wal.segments.segments import SEGMENT_SCHEMA, create_segment

NAMES = count()
HELD = SegmentRange("n1", "op", Lsn(100), Lsn(200))


def memory() -> ObjectStore:
    return InMemoryStore(f"memory://segments-{next(NAMES)}")


def table(rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA)


def event(lsn: int, op: str = "C") -> dict[str, object]:
    return {
        "lsn": lsn, "end_lsn": lsn, "seq": 0, "xid": 1, "global_id": None, "op": ord(op), "group": 0,
        "partition": -1, "key": b"", "row": b"x" * 100,
    }  # fmt: skip


def small_segment(store: ObjectStore) -> tuple[Segment, bytes]:
    """A segment of a change and an event, and its bytes."""
    segment = create_segment(store, "wal", 1, HELD, (table([event(1, "U")]), table([event(2)])), continued=None).segment
    return segment, store.read(segment.key)


def store_with(segment: Segment, body: bytes) -> ObjectStore:
    store = memory()
    store.create(segment.key, body)
    return store
