"""The objects that commits list, directly and in object lists."""

from __future__ import annotations

from collections.abc import Iterator

from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, StoredObject, listed_objects


def objects_of(commit: Commit) -> Iterator[StoredObject]:
    """Yield all objects of base copies and DDL that the commit adds."""
    for one in commit.entries:
        yield from listed_objects(one)


def base_objects_of(chain: Chain, node: str) -> Iterator[StoredObject]:
    """Yield the objects of the node's base copies."""
    for one in chain.base_entries(node):
        yield from listed_objects(one)
