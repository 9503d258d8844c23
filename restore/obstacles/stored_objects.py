"""Compare the objects that a restore reads with a listing of the store; no object is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fleet.tables.groups import Group
from restore.estimates.volumes import base_objects, large_objects, stored_names
from restore.obstacles.obstacles import Obstacles
from snapshots.records.chain import Chain
from storage.errors import RefusedError
from storage.store import ObjectMissingError, ObjectStore
from storage.stored_form import stored_form

NAMED_MAX = 5


class StoredObjectsMissingError(RefusedError):
    """The store lacks objects that a snapshot's commits list, or has them in another size."""


def check_stored_objects(
    store: ObjectStore, chain: Chain, groups: Mapping[str, Iterable[Group]], obstacles: Obstacles
) -> frozenset[str]:
    """Add an obstacle for objects that are missing or have another size; return the keys of these.

    Only those count that a restore of these groups, by shard, reads.
    """
    form = stored_form(store)
    listed = {one.key: one.size for one in form.raw.inventory(f"snapshots/{chain.name}")}
    wrong = [
        key
        for shard, chosen in groups.items()
        for key, size in _objects_of(chain, shard, chosen)
        if listed.get(key) != form.stored_size(size) and _find_size(form.raw, key) != form.stored_size(size)
    ]
    if wrong:
        more = f" and {len(wrong) - NAMED_MAX} more" if len(wrong) > NAMED_MAX else ""
        obstacles.add(
            StoredObjectsMissingError(
                f"the store lacks objects of snapshot {chain.name}, or has them in another size:"
                f" {', '.join(wrong[:NAMED_MAX])}{more}",
                hint="put them back from a copy of the store, or restore another increment or snapshot; see:"
                f" snapshot check {chain.name}",
                details={"objects": wrong},
            )
        )
    return frozenset(wrong)


def _objects_of(chain: Chain, shard: str, groups: Iterable[Group]) -> Iterator[tuple[str, int]]:
    """Keys and sizes of what is read to restore a shard: base copies and large objects, segments, the newest DDL."""
    bases = base_objects(chain, shard, stored_names(chain, shard, groups))
    for stored in (*bases, *chain.schema_objects(shard), *large_objects(chain, shard)):
        yield stored.key, stored.size
    for segment in chain.segments(shard):
        yield segment.key, segment.size


def _find_size(store: ObjectStore, key: str) -> int | None:
    """The object's size, asked for by its key: a listing may be out of date."""
    try:
        return store.size(key)
    except ObjectMissingError:
        return None
