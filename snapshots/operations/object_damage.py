"""Damaged objects of a chain: missing or of the wrong size according to a listing, or with altered bytes when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TypeAlias

from msgspec import Struct

from cutline.snapshots.operations.committing import listed_sizes, sizes_of
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    LostList,
    NamedObject,
    ObjectList,
    StoredObject,
    listed_objects,
    parts_of_entries,
)
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError, read_listed


class ChainObject(Struct, frozen=True):
    """An object listed by the commit of `increment`, which belongs to the copy or the DDL of `node`.

    Until it is expanded, an object list represents all objects that it lists; a lost list is never expanded.
    """

    key: str
    node: str
    increment: int
    stored: Segment | StoredObject | ObjectList

    @property
    def count(self) -> int:
        """The number of objects represented."""
        return self.stored.parts if isinstance(self.stored, ObjectList) else 1

    def expand(self) -> Iterator[ChainObject]:
        """Yield the objects represented, or a lost list itself; raise RuntimeError if a list was not read.

        An object that lists the dead rows of another follows it; its entry has the rows of that other object.
        """
        if isinstance(self.stored, Segment | LostList):
            yield self
            return
        listed = listed_objects(self.stored) if isinstance(self.stored, ObjectList) else (self.stored,)
        for part in parts_of_entries(listed):
            yield ChainObject(part.key, self.node, self.increment, part)


class Damage(Struct, frozen=True):
    """Damage to an object of the node's copy or DDL; for `kind`, see ObjectDamagedError."""

    key: str
    node: str
    kind: str
    detail: str


Damages: TypeAlias = Mapping[str, Damage]


def list_entries(chain: Chain, nodes: Iterable[str]) -> Iterator[ChainObject]:
    """Yield the objects of these nodes that the chain's commits name, node by node; object lists are not expanded."""
    # Scan the entries once, not once per node: a large fleet's commit has thousands.
    by_node: dict[tuple[str, int], list[NamedObject]] = {}
    for commit in chain.commits:
        for entry in commit.entries:
            by_node.setdefault((entry.node, commit.increment), []).append(entry)
    for node in nodes:
        for commit in chain.commits:
            of_node = (*commit.segments.get(node, ()), *by_node.get((node, commit.increment), ()))
            yield from (ChainObject(stored.key, node, commit.increment, stored) for stored in of_node)


def list_objects(chain: Chain, nodes: Iterable[str]) -> Iterator[ChainObject]:
    """Yield the objects that the chain's commits list for these nodes, node by node."""
    for entry in list_entries(chain, nodes):
        yield from entry.expand()


def lost_lists(chain: Chain) -> Iterator[tuple[ChainObject, LostList]]:
    """Yield the chain's lost object lists."""
    for commit in chain.commits:
        for object_list in commit.object_lists:
            if isinstance(object_list, LostList):
                yield ChainObject(object_list.key, object_list.node, commit.increment, object_list), object_list


def find_listed_damage(store: ObjectStore, chain: Chain, nodes: Iterable[str] | None = None) -> dict[str, Damage]:
    """List the snapshot's folder, and find objects of these nodes that are missing or have the wrong size.

    By default, the nodes are those at the chain's last commit. If the chain has object lists, large folders are listed
    one node at a time, to limit memory. An object that is missing from the listing or has the wrong size there is
    looked up individually, because a listing may be out of date.
    """
    nodes = tuple(chain.baseline if nodes is None else nodes)
    if not any(commit.object_lists for commit in chain.commits):
        sizes = {listed.key: listed.size for listed in store.inventory(f"snapshots/{chain.name}")}
        return _find_damage(store, list_objects(chain, nodes), sizes)
    damages: dict[str, Damage] = {}
    for _, of_node in groupby(list_objects(chain, nodes), lambda one: one.node):
        objects = list(of_node)
        damages |= _find_damage(store, objects, listed_sizes(store, (stored_object.key for stored_object in objects)))
    return damages


def _find_damage(store: ObjectStore, objects: Iterable[ChainObject], listed: Mapping[str, int]) -> dict[str, Damage]:
    unsure = [
        stored_object
        for stored_object in objects
        if isinstance(stored_object.stored, LostList) or listed.get(stored_object.key) != stored_object.stored.size
    ]
    asked = [stored_object.key for stored_object in unsure if not isinstance(stored_object.stored, LostList)]
    sizes = sizes_of(store, asked)
    return {
        stored_object.key: damage
        for stored_object in unsure
        if (damage := _damage_of(stored_object, sizes.get(stored_object.key))) is not None
    }


def _damage_of(chain_object: ChainObject, size: int | None) -> Damage | None:
    """Compare an object's recorded size with its size in the store; return the damage, or None if it is intact."""
    if isinstance(chain_object.stored, LostList):
        return Damage(chain_object.key, chain_object.node, chain_object.stored.damage, chain_object.stored.detail)
    if size is None:
        return Damage(chain_object.key, chain_object.node, "missing", "it is not in the store")
    if size == chain_object.stored.size:
        return None
    return Damage(
        chain_object.key, chain_object.node, "size", f"it is {size} bytes long instead of {chain_object.stored.size}"
    )


class VerifyTask(Struct, frozen=True):
    """An object to read and compare with its commit."""

    chain_object: ChainObject
    store: StoreLocation


class VerifyReport(Struct, frozen=True):
    """The damage to the object, or the error that ended the task."""

    damage: Damage | None = None
    problem: ErrorReport | None = None


def verify_object(task: VerifyTask) -> VerifyReport:
    """Read the task's object and verify it."""
    stored_object = task.chain_object
    try:
        read_listed(
            task.store.open(),
            stored_object.node,
            stored_object.key,
            (stored_object.stored.size, stored_object.stored.digest),
        )
    except ObjectDamagedError as error:
        return VerifyReport(Damage(stored_object.key, stored_object.node, error.kind, error.detail))
    except SnapshotError as error:
        return VerifyReport(problem=report_of(error))
    return VerifyReport()
