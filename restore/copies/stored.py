"""The objects that a chain lists, and which of them are missing or altered. Reads no object, only listings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from cutline.snapshots.operations.stored_objects import listed_sizes, sizes_of
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.stored_object import (
    BASE,
    DDL,
    LARGE_OBJECTS,
    LostList,
    NamedObject,
    ObjectList,
    ReadList,
    StoredObject,
    listed_objects,
)
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment


@dataclass(frozen=True, slots=True)
class ChainObject:
    """An object that a chain lists, in the commit of `increment`; `node` is the one whose copy or DDL it is.

    An object list stands for all objects that it lists: until it is expanded, or if it is lost.
    """

    key: str
    node: str
    increment: int
    stored: Segment | StoredObject | ObjectList

    @property
    def count(self) -> int:
        """How many objects it stands for."""
        return self.stored.objects if isinstance(self.stored, ObjectList) else 1

    def expand(self) -> Iterator[ChainObject]:
        """Yield the objects that it stands for, a lost list as itself; raise RuntimeError if a list was not read."""
        if not isinstance(self.stored, ObjectList) or isinstance(self.stored, LostList):
            yield self
            return
        for one in listed_objects(self.stored):
            yield ChainObject(one.key, self.node, self.increment, one)


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with an object of the node's copy or DDL; `kind` is that of ObjectDamagedError."""

    key: str
    node: str
    kind: str
    detail: str


Damages: TypeAlias = Mapping[str, Damage]


def list_entries(chain: Chain, nodes: Iterable[str]) -> Iterator[ChainObject]:
    """Yield what the chain's commits name of these nodes, one node after the other; object lists are not expanded."""
    # A large fleet's commit has thousands of entries: they are gone through once, not once for every node.
    by_node: dict[tuple[str, int], list[NamedObject]] = {}
    for commit in chain.commits:
        for entry in commit.entries:
            by_node.setdefault((entry.node, commit.increment), []).append(entry)
    for node in nodes:
        for commit in chain.commits:
            of_node = (*commit.segments.get(node, ()), *by_node.get((node, commit.increment), ()))
            yield from (ChainObject(one.key, node, commit.increment, one) for one in of_node)


def list_objects(chain: Chain, nodes: Iterable[str]) -> Iterator[ChainObject]:
    """Yield the objects that the chain's commits list of these nodes, one node after the other."""
    for entry in list_entries(chain, nodes):
        yield from entry.expand()


def count_bytes(chain: Chain, shards: Collection[str]) -> int:
    """The bytes of all objects of the copies of these shards; those that a lost list listed are counted as one."""
    nodes = {node for node in chain.baseline if chain.shard_of(node) in shards}
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
    for _, of_node in groupby(list_objects(chain, chain.baseline), lambda one: one.node):
        objects = list(of_node)
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
    if one.stored.kind == DDL and one.stored == chain.ddl_object(shard):
        return "DDL"
    return "large objects" if one.stored.kind == LARGE_OBJECTS else ""
