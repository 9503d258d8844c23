"""Check that every document stored by real commands is of a known kind and round-trips byte for byte."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import reduce
from operator import or_

import pyarrow as pa
import pyarrow.parquet as pq

from cutline.fleet.record import fields_of, from_json
from cutline.snapshots.records.documents import read_sealed, seal
from cutline.snapshots.records.kinds import KINDS, DocumentKind
from cutline.storage.encryption.key_documents import KEY_DOCUMENT
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import SegmentMetadata
from cutline.wal.segments.segments import METADATA_KEY

SUFFIX = ".json"
# The form of the keys of each kind.
KEYS = {
    "fleet": re.compile(r"fleet\.json"),
    "baseline": re.compile(r"baselines/\d{16}\.json"),
    "snapshot": re.compile(r"snapshots/[^/]+/snapshot(\.\d+)?\.json"),
    "increment": re.compile(r"snapshots/[^/]+/increments/\d{16}(\.\d+)?\.json"),
    "objects": re.compile(r"snapshots/[^/]+/lists/[^/]+/[^/]+/[^/]+\.json"),
    "repair": re.compile(r"snapshots/[^/]+/repairs/\d{16}\.json"),
    "merge": re.compile(r"snapshots/[^/]+/merges/\d{16}(\.\d+)?\.json"),
    "begin": re.compile(r"snapshots/[^/]+/begins/\d{16}\.json"),
    "merge-part": re.compile(r"operations/[^/]+/merged-\d+\.json"),
    "unfinished-base": re.compile(r"operations/[^/]+/base-\d+\.json"),
    "copied-ranges": re.compile(r"operations/[^/]+/copied-\d+-\d+\.json"),
    "copy-step": re.compile(r"snapshots/[^/]+/copies/[^/]+/[^/]+/[^/]+\.json"),
    "resumption": re.compile(r"operations/[^/]+/resumed-\d+\.json"),
    "ended": re.compile(r"snapshots/[^/]+/ended/[^/]+\.json"),
    "deleted": re.compile(r"deleted/[^/]+\.json|snapshots/[^/]+/only-full\.json"),
    "pin": re.compile(r"snapshots/[^/]+/pins/[^/]+\.json"),
    "intent": re.compile(r"operations/[^/]+/intent\.json"),
    "outcome": re.compile(r"operations/[^/]+/(outcome|increment|conflicts|full-check)\.json"),
    "failure": re.compile(r"operations/[^/]+/(failure|interrupted-\d+)\.json"),
    "decision": re.compile(r"operations/[^/]+/decision\.json"),
    "sign": re.compile(r"operations/[^/]+/sign-\d+\.json"),
    "cancel": re.compile(r"operations/[^/]+/cancel-\d+\.json"),
    "key": KEY_DOCUMENT,
    "lease": re.compile(r"operations/[^/]+/lease-\d+\.json"),
}


def kind_of(key: str) -> DocumentKind | None:
    """Return the kind of the document at `key`, None if no kind has such a key."""
    return next((kind for kind in KINDS if KEYS[kind.name].fullmatch(key)), None)


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
