"""Read the DDL of a shard from the store."""

from __future__ import annotations

from snapshots.ddl.dump import find_ddl_objects, read_ddl
from snapshots.records.chain import Chain
from storage.store import ObjectStore
from wal.segments.damage import read_listed


def read_stored_ddl(store: ObjectStore, chain: Chain, shard: str) -> dict[str, bytes]:
    """The archive of a shard's DDL, or its scripts, by kind; raise ObjectDamagedError, ManifestError."""
    found: dict[str, bytes] = {}
    for stored in find_ddl_objects(chain, shard):
        body = read_listed(store, shard, stored.key, (stored.size, stored.digest))
        found[stored.kind] = read_ddl(body, stored)
    return found
