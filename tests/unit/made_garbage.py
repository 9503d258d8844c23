"""Builds stores of committed and failed snapshots with the code that creates run, but without nodes and Spark."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from msgspec import structs

from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.snapshots.operations.operation import Operation, begin, commit_operation, new_operation, record_outcome
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    Commit,
    DefinitionChanges,
    FullSnapshot,
    Increment,
    Previous,
    StoredObject,
)
from cutline.snapshots.records.documents import base_prefix, ddl_prefix, seal
from cutline.snapshots.records.end_marks import EndMark, mark_end
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import free_turn, read_chain
from cutline.snapshots.records.tombstones import only_full_key, tombstone_key
from cutline.snapshots.removal.garbage_rules import GarbageReason
from cutline.snapshots.removal.gc import GcReport, find_garbage, remove_garbage
from cutline.storage.digest import digest
from cutline.storage.local import LocalStore
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment, archive_prefix, segment_key
from tests.unit.made_commits import commit as made_commit
from tests.unit.made_commits import counted, mark, memory

NODES = ("a", "b")


@dataclass
class StoreBuilder:
    """Stores what creates would store; `operations` are all that have begun."""

    store: Any = field(default_factory=memory)
    operations: list[Intent] = field(default_factory=list)

    def begin_create(self, name: str, increment: int = 0) -> Intent:
        """Begin a create, as if under the fleet's lock; return its intent."""
        operation = new_operation("create", name, increment, NODES)
        operation = structs.replace(operation, turn=free_turn(self.store, name, increment))
        begin(self.store, operation)
        self.operations.append(operation)
        return operation

    def store_base(self, operation: Intent, parts: int = 2) -> list[str]:
        """Store base copies and the DDL of an attempt; return the keys."""
        keys = [
            f"{base_prefix(operation.snapshot, node, operation.id)}/part-{part:06d}-000-ab.parquet"
            for node in NODES
            for part in range(parts)
        ]
        keys.append(f"{ddl_prefix(operation.snapshot, 'a', operation.id)}/archive-0123abcd.dump.zst")
        for key in keys:
            self.store.create(key, key.encode())
        return keys

    def store_segments(self, name: str, chain: str, numbers: Iterable[int]) -> list[str]:
        """Store segments of a chain; return the keys."""
        keys = [segment_key(archive_prefix(name, node, chain), number) for number in numbers for node in NODES]
        for key in keys:
            self.store.create(key, key.encode())
        return keys

    def new_commit(self, operation: Intent, objects: Iterable[str] = (), chain: Chain | None = None) -> Commit:
        """The operation's commit, not yet put. It lists `objects`, and all segments after those of the chain."""
        last = {node: chain.segments(node)[-1].number if chain and chain.segments(node) else 0 for node in NODES}
        owner = chain.full.operation if chain else operation.id
        segments = {node: self._segments_after(operation.snapshot, node, owner, last[node]) for node in NODES}
        new = made_commit(operation.increment, owner)
        stored = tuple(self._read_stored(key) for key in objects)
        if isinstance(new, FullSnapshot):
            new = structs.replace(new, copied=stored)
        changes = DefinitionChanges(objects=stored, roles={"a": ()}, fingerprints={"a": ""})
        made = structs.replace(
            new,
            snapshot=operation.snapshot,
            operation=operation.id,
            segments=segments,
            definition_changes=changes if chain and stored else None,
            previous=Previous(chain.last.operation, chain.last.digest) if chain else None,
        )
        if chain and isinstance(made, Increment):
            made = structs.replace(made, history=chain.next_history)
        return counted(made)

    def take_full(self, name: str) -> Chain:
        """Commit a snapshot with two segments per node."""
        operation = self.begin_create(name)
        objects = self.store_base(operation)
        self.store_segments(name, operation.id, (1, 2))
        commit_operation(self.store, Operation(operation), self.new_commit(operation, objects))
        record_outcome(self.store, operation, "done")
        return read_chain(self.store, name)

    def take_increment(self, name: str, *, copies: bool = False) -> Chain:
        """Commit the next increment: one new segment per node, and those that failed increments left.

        With `copies`, it has copies of tables, as after schema changes.
        """
        chain = read_chain(self.store, name)
        operation = self.begin_create(name, chain.last.increment + 1)
        objects = self.store_base(operation) if copies else []
        self.store_segments(name, chain.full.operation, [self.next_number(chain)])
        commit_operation(self.store, Operation(operation), self.new_commit(operation, objects, chain=chain))
        record_outcome(self.store, operation, "done")
        return read_chain(self.store, name)

    def next_number(self, chain: Chain) -> int:
        """The number of the next segment in the archive."""
        return len(self.store.list(archive_prefix(chain.name, "a", chain.full.operation))) + 1

    def end_chain(self, chain: Chain) -> None:
        mark_end(
            self.store,
            EndMark(chain.name, chain.full.operation, chain.last.increment, "a", "2026-11-20T00:00:00Z"),
        )

    def put_tombstone(self, name: str) -> None:
        self.store.create(tombstone_key(name), seal(mark(name)))

    def put_only_full(self, name: str) -> None:
        self.store.create(only_full_key(name), seal(mark(name, only_full=True)))

    def _segments_after(self, name: str, node: str, chain: str, after: int) -> tuple[Segment, ...]:
        prefix = archive_prefix(name, node, chain)
        numbers = range(after + 1, len(self.store.list(prefix)) + 1)
        return tuple(self._read_segment(segment_key(prefix, number), node, number) for number in numbers)

    def _read_segment(self, key: str, node: str, number: int) -> Segment:
        body = self.store.read(key)
        return Segment(
            key=key, number=number, size=len(body), digest=digest(body), changes=0, events=0, partials=0, truncates=0,
            node=node, operation="op", after=Lsn(number - 1), through=Lsn(number), open=None,
        )  # fmt: skip

    def _read_stored(self, key: str) -> StoredObject:
        body = self.store.read(key)
        kind = BASE if "/base/" in key else DDL
        return StoredObject(key, kind, key.split("/")[3], len(body), digest(body), {})


def backdate(store: Any, days: float, prefix: str = "") -> None:
    """Make everything below `prefix` older by `days`."""
    for one in store.inventory(prefix):
        then = one.created_at - timedelta(days=days)
        if isinstance(store, LocalStore):
            os.utime(store.root / one.key, (then.timestamp(), then.timestamp()))
        else:
            store._created_at[one.key] = then


def preview_gc(store: ObjectStore, grace_seconds: float = 0.0) -> GcReport:
    return find_garbage(store, grace_seconds, Silent())


def garbage_of(store: ObjectStore, grace_seconds: float = 0.0) -> dict[str, str]:
    """What gc would remove, and why."""
    return {listed.key: str(one.why) for one in preview_gc(store, grace_seconds).garbage for listed in one.objects} | {
        one.leftover.id: str(one.why) for one in preview_gc(store, grace_seconds).garbage if one.leftover
    }


def run_gc(store: ObjectStore, grace_seconds: float = 0.0) -> GcReport:
    """Remove what is garbage; return what gc did."""
    report = preview_gc(store, grace_seconds)
    remove_garbage(store, report, Silent())
    return report


def needed_by(chain: Chain) -> set[str]:
    """Every object that the chain lists."""
    return {key for commit in chain.commits for key in commit.object_sizes}


def count_kept(report: GcReport, why: GarbageReason) -> int:
    """How many objects are kept for that reason."""
    return sum(total.objects for (_, reason, _), total in report.kept.items() if reason is why)
