"""The objects that a chain lists, and which of them are missing or altered. Reads no object, only listings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from snapshots.records.chain import Chain
from snapshots.records.stored_object import BASE, DDL, LARGE_OBJECTS, LostList, StoredObject
from storage.store import ObjectMissingError, ObjectStore
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


def list_objects(chain: Chain) -> dict[str, ChainObject]:
    """Every object that the chain's commits list, by key."""
    found: dict[str, ChainObject] = {}
    for commit in chain.commits:
        for node, segments in commit.segments.items():
            found |= {one.key: ChainObject(one.key, node, commit.increment, one) for one in segments}
        found |= {one.key: ChainObject(one.key, one.node, commit.increment, one) for one in commit.objects}
        lost = [one for one in commit.object_lists if isinstance(one, LostList)]
        found |= {one.key: ChainObject(one.key, one.node, commit.increment, one) for one in lost}
    return found


def find_listed_damage(store: ObjectStore, chain: Chain) -> dict[str, Damage]:
    """Find the objects that are missing or have another size, by one listing of the snapshot's folder.

    What seems damaged is looked up again by itself: a listing may be out of date.
    """
    sizes = {one.key: one.size for one in store.inventory(f"snapshots/{chain.name}")}
    listed = list_objects(chain)
    wrong = [one for one in listed.values() if sizes.get(one.key) != one.stored.size or _is_lost(one)]
    return {one.key: damage for one in wrong if (damage := _look_up(store, one)) is not None}


def _is_lost(one: ChainObject) -> bool:
    return isinstance(one.stored, LostList)


def _look_up(store: ObjectStore, one: ChainObject) -> Damage | None:
    if isinstance(one.stored, LostList):
        return Damage(one.key, one.node, one.stored.damage, one.stored.detail)
    try:
        size = store.size(one.key)
    except ObjectMissingError:
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
