"""Complete chains with all objects that they list, and nodes with their slots, for the tests of deletions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.progress import Silent
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.records.commit import DDL, FullSnapshot, Previous, StoredObject
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.removal.removing import RemovalRun
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import slot_name
from tests.unit.made_commits import begun_at, commit, counted

FLEET = Fleet(
    Path("fleet.toml"), "shop", StoreLocation("memory://unused"), (Node("a", "dbname=a"), Node("b", "dbname=b", "a")),
    "exact", GroupRules(), "local[*]", {},
)  # fmt: skip


def store_chain(store: ObjectStore, name: str, *taken_at: str) -> str:
    """Store a full snapshot and increments of these times (RFC 3339), with all objects; return the chain's id."""
    chain = f"op-{name}-0"
    previous: Previous | None = None
    for number, at in enumerate(taken_at):
        new = commit(number, chain)
        segments = {
            node: tuple(
                structs.replace(s, key=f"snapshots/{name}/wal/{node}/{chain}/{s.number:020d}.parquet") for s in listed
            )
            for node, listed in new.segments.items()
        }
        if isinstance(new, FullSnapshot):
            base = [(f"snapshots/{name}/base/{node}/{chain}/part-0.parquet", "base", node) for node in ("a", "b")]
            ddl = [(f"snapshots/{name}/schema/a/{chain}/archive.dump.zst", DDL, "a")]
            new = structs.replace(new, copied=tuple(StoredObject(*one, 5, "d", {}) for one in (*base, *ddl)))
        new = structs.replace(
            begun_at(new, at), snapshot=name, operation=f"op-{name}-{number}", segments=segments, previous=previous
        )
        new = counted(new)
        intent = structs.replace(new_operation("create", name, number, ("a", "b")), operation=new.operation)
        begin(store, intent)
        for key, size in new.object_sizes.items():
            store.create(key, bytes(size))
        put_commit(store, new)
        record_outcome(store, intent, "done")
        last = read_chain(store, name).last
        previous = Previous(last.operation, last.digest)
    return chain


@dataclass(slots=True)
class InMemoryNodes:
    """NodeCleanup without servers: the slots, the unreachable nodes, and the nodes that have publications."""

    slots: set[tuple[str, str]] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)
    publications: set[str] = field(default_factory=lambda: {"a"})

    def check_held(self, operation: Intent) -> None:
        """The lock is always held."""

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
        left: list[str] = []
        for node in nodes:
            if node in self.unreachable:
                left.append(node)
            else:
                self.slots.discard((slot, node))
        return left, []

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
        if any(is_ours(slot) for slot, _ in self.slots):
            return [], []
        dropped = sorted(self.publications)
        self.publications.clear()
        return dropped, []


def nodes_of(*chains: str) -> InMemoryNodes:
    """Nodes that have the slots of these chains."""
    return InMemoryNodes({(slot_name(chain), node) for chain in chains for node in ("a", "b")})


def new_removal_run(store: ObjectStore, nodes: InMemoryNodes, *, force: bool = False) -> RemovalRun:
    """A removal run that holds the fleet's lock."""
    return RemovalRun(FLEET, store, nodes, Silent(), force)
