"""The objects that a chain lists, and which of them are missing or altered. Reads no object, only listings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from snapshots.operations.stored_objects import listed_sizes, sizes_of
from snapshots.records.chain import Chain
from snapshots.records.stored_object import BASE, DDL, LARGE_OBJECTS, LostList, ReadList, StoredObject, listed_objects
from storage.store import ObjectStore
from wal.segments.archive import Segment


@dataclass(frozen=True, slots=True)
class ChainObject:
    """An object that a chain lists, in the commit of `increment`; `node` is the one whose copy or DDL it is.

    A lost object list stands for all objects that it listed.
    """

    key: str
    node: str
    increment: int
    stored: Segment | StoredObject | LostList


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with an object of the node's copy or DDL; `kind` is that of ObjectDamagedError."""

    key: str
    node: str
    kind: str
    detail: str


Damages: TypeAlias = Mapping[str, Damage]


def list_objects(chain: Chain, nodes: Iterable[str]) -> Iterator[ChainObject]:
    """Yield the objects that the chain's commits list of these nodes, one node after the other."""
    for node in nodes:
        for commit in chain.commits:
            for segment in commit.segments.get(node, ()):
                yield ChainObject(segment.key, node, commit.increment, segment)
            for entry in commit.entries:
                if entry.node != node:
                    continue
                if isinstance(entry, LostList):
                    yield ChainObject(entry.key, node, commit.increment, entry)
                for stored in listed_objects(entry):
                    yield ChainObject(stored.key, node, commit.increment, stored)


def count_bytes(chain: Chain, shards: Collection[str]) -> int:
    """The bytes of all objects of the copies of these shards; those that a lost list listed are counted as one."""
    nodes = [node for node in chain.baseline if chain.shard_of(node) in shards]
    segments = sum(segment.size for node in nodes for segment in chain.segments(node))
    entries = [one for commit in chain.commits for one in commit.entries if one.node in nodes]
    return segments + sum(one.bytes if isinstance(one, ReadList) else one.size for one in entries)


def lost_lists(chain: Chain) -> Iterator[tuple[ChainObject, LostList]]:
    """Yield the object lists of the chain that are lost."""
    for commit in chain.commits:
        for one in commit.object_lists:
            if isinstance(one, LostList):
                yield ChainObject(one.key, one.node, commit.increment, one), one


def find_listed_damage(store: ObjectStore, chain: Chain) -> dict[str, Damage]:
    """Find the objects that are missing or have another size, by a listing of the snapshot's folder.

    Of a chain with object lists, large folders of one node at a time: that is bounded. What is not listed in its size
    is looked up by itself: a listing may be out of date.
    """
    if not any(commit.object_lists for commit in chain.commits):
        sizes = {one.key: one.size for one in store.inventory(f"snapshots/{chain.name}")}
        return _find_damage(store, list_objects(chain, chain.baseline), sizes)
    found: dict[str, Damage] = {}
    for node in chain.baseline:
        objects = list(list_objects(chain, [node]))
        found |= _find_damage(store, objects, listed_sizes(store, (one.key for one in objects)))
    return found


def _find_damage(store: ObjectStore, objects: Iterable[ChainObject], listed: Mapping[str, int]) -> dict[str, Damage]:
    unsure = [one for one in objects if isinstance(one.stored, LostList) or listed.get(one.key) != one.stored.size]
    sizes = sizes_of(store, (one.key for one in unsure if not isinstance(one.stored, LostList)))
    return {one.key: damage for one in unsure if (damage := _damage_of(one, sizes.get(one.key))) is not None}


def _damage_of(one: ChainObject, size: int | None) -> Damage | None:
    """What is wrong with an object of which the store has so many bytes, None if it has none."""
    if isinstance(one.stored, LostList):
        return Damage(one.key, one.node, one.stored.damage, one.stored.detail)
    if size is None:
        return Damage(one.key, one.node, "missing", "it is not in the store")
    if size == one.stored.size:
        return None
    return Damage(one.key, one.node, "size", f"it has {size} bytes instead of {one.stored.size}")


@dataclass(frozen=True, slots=True)
class CopyNeeds:
    """Of which objects a node's copy at the chain's last commit is made; `numbers` are its numbers_at_cut."""

    chain: Chain
    node: str
    numbers: Mapping[int, int]

    @classmethod
    def of(cls, chain: Chain, node: str) -> CopyNeeds:
        """The needs of the node's copy."""
        return cls(chain, node, chain.numbers_at_cut(node))

    def groups_of(self, one: ChainObject) -> frozenset[int]:
        """The numbers of the groups whose rows can't be had from this copy without the object."""
        if one.node != self.node or one.increment > self.chain.last.increment:
            return frozenset()
        if isinstance(one.stored, Segment):
            # A segment may have changes of every group.
            is_needed = one.stored.changes and one.stored.after < self.chain.position(self.node)
            return frozenset(self.numbers.values()) if is_needed else frozenset()
        if one.stored.kind != BASE:
            return frozenset()
        return frozenset(self.numbers[number] for number in one.stored.rows if number in self.numbers)


def needs_other(chain: Chain, shard: str, one: ChainObject) -> str:
    """What the shard lacks without the object besides rows: `DDL`, `large objects` or nothing."""
    if one.node != shard or isinstance(one.stored, Segment):
        return ""
    if one.stored.kind in DDL and one.key in {stored.key for stored in chain.schema_objects(shard)}:
        return "DDL"
    return "large objects" if one.stored.kind == LARGE_OBJECTS else ""
