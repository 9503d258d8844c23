"""Check that every document stored by real commands is of a known kind and round-trips byte for byte."""

from __future__ import annotations

import json
from collections import Counter
from functools import reduce
from operator import or_

import pyarrow as pa
import pyarrow.parquet as pq

from cutline.fleet.record import fields_of, from_json
from cutline.snapshots.records.documents import read_sealed, seal
from cutline.snapshots.records.kinds import kind_of
from cutline.storage.store import ObjectStore
from cutline.wal.segments.segments import METADATA_KEY, SegmentMetadata

SUFFIX = ".json"


def check_documents(store: ObjectStore) -> Counter[str]:
    """Check that every document is written back as the same bytes; return the number of documents of each type."""
    found: Counter[str] = Counter()
    for key in store.list(""):
        kind = kind_of(key)
        assert (kind is not None) == key.endswith(SUFFIX), key
        if kind is not None:
            document = read_sealed(store, key, reduce(or_, kind.types))
            assert seal(document) == store.read(key), key
            found[type(document).__name__] += 1
        elif "/wal/" in key:
            metadata = pq.read_metadata(pa.BufferReader(store.read(key))).metadata[METADATA_KEY]
            assert json.dumps(fields_of(from_json(metadata, SegmentMetadata))).encode() == metadata, key
            found[SegmentMetadata.__name__] += 1
    return found
