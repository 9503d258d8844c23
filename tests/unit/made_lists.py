"""Commits with object lists, for the tests of these."""

from __future__ import annotations

from typing import TypeVar

import pytest
from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.snapshots.operations import object_lists
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.operations.object_lists import replace_by_lists
from cutline.snapshots.operations.operation import Operation, commit_operation, record_outcome
from cutline.snapshots.records.commit import BASE, Commit, FullSnapshot, StoredObject
from cutline.snapshots.records.documents import base_prefix, ddl_prefix
from cutline.snapshots.records.proven_chains import read_full
from cutline.storage.store import ObjectStore
from tests.unit.made_commits import commit, counted
from tests.unit.made_garbage import StoreBuilder

NAME, OPERATION = "daily", "op-0"
C = TypeVar("C", bound=Commit)
PARTS, SIZE = 7, 1000


def shorten_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any base copy go into a list, and a list have at most three."""
    monkeypatch.setattr(object_lists, "OWN_OBJECTS_MAX", 0)
    monkeypatch.setattr(object_lists, "LIST_OBJECTS_MAX", 3)


def base_copies(node: str, parts: int = PARTS) -> list[StoredObject]:
    prefix = base_prefix(NAME, node, OPERATION)
    return [StoredObject(f"{prefix}/part-{number:06d}.parquet", BASE, node, SIZE, "d", {}) for number in range(parts)]


def with_copies(nodes: str = "ab", parts: int = PARTS) -> FullSnapshot:
    """A full snapshot with base copies of these nodes, and the DDL of a."""
    ddl = StoredObject(f"{ddl_prefix(NAME, 'a', OPERATION)}/archive-1.dump.zst", "archive", "a", 5, "d", {})
    new = commit(0)
    assert isinstance(new, FullSnapshot)
    return structs.replace(new, copied=(*(one for node in nodes for one in base_copies(node, parts)), ddl))


def listed(store: ObjectStore, new: C) -> C:
    """Store lists of all base copies of the commit, and return it with these."""
    return replace_by_lists(store, new, Silent())


def put_listed(store: ObjectStore, new: FullSnapshot) -> FullSnapshot:
    """Store the lists and the commit that names them, and read the commit."""
    put_commit(store, counted(listed(store, new)))
    return read_full(store, NAME)


def listed_full(builder: StoreBuilder, name: str) -> Commit:
    """Commit a snapshot whose base copies are in lists."""
    operation = builder.begin_create(name)
    objects = builder.store_base(operation)
    builder.store_segments(name, operation.id, (1, 2))
    new = counted(listed(builder.store, builder.new_commit(operation, objects)))
    commit_operation(builder.store, Operation(operation), new)
    record_outcome(builder.store, operation, "done")
    return new
