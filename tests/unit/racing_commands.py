"""All commands that write to a store, in steps between which others run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.snapshots.operations.committing import decide
from cutline.snapshots.operations.leases import hold_lease
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import Operation, begin, commit_operation, new_operation, record_outcome
from cutline.snapshots.records.end_marks import has_end
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import find_place, free_turn, read_chain, snapshot_names
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectExistsError
from cutline.wal.segments.archive import archive_prefix, segment_key
from tests.unit.made_commits import memory
from tests.unit.made_garbage import NODES, StoreBuilder, needed_by

NAMES = ("a", "b", "c", "d", "e")
Steps = Iterator[None]


class InterleavedStore:
    """The store as gc sees it: before each of its calls the other commands may act."""

    def __init__(self, store: Any, others: Callable[[], None]) -> None:
        self._store, self._others = store, others

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self._others()
            return found(*arguments)

        return call


class Commands:
    """Commands on one fleet, one step at a time. One of them holds the lock; one that sleeps may lose it unnoticed."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.builder = StoreBuilder(memory())
        self.store = self.builder.store
        self.holder: Steps | None = None
        self.turn = 0
        self.asleep: list[Steps] = []
        self.dead: list[Steps] = []
        self.readers: list[Steps] = []
        self.committed: set[tuple[str, int]] = set()

    def act(self) -> None:
        """Let any number of things happen, often none."""
        while self.choice.random() < 0.5:
            self._act_once()

    def _act_once(self) -> None:
        drawn = self.choice.random()
        if drawn < 0.08 and self.holder:
            (self.dead if self.choice.random() < 0.5 else self.asleep).append(self.holder)
            self.holder, self.turn = None, self.turn + 1
        elif drawn < 0.2 and self.asleep:
            self._resume(self.choice.choice(self.asleep))
        elif drawn < 0.4 and self.readers:
            self._resume(self.choice.choice(self.readers))
        elif drawn < 0.45:
            self.readers.append(self._restore(self.choice.choice(NAMES)))
        elif self.holder:
            self._resume(self.holder)
        else:
            name = self.choice.choice(NAMES)
            commands = (self._take_full, self._take_increment, self._take_increment, self._mark)
            self.turn += 1
            self.holder = self.choice.choice(commands)(name, self.turn)

    def _resume(self, one: Steps) -> None:
        try:
            next(one, "over")
            if one.gi_frame is not None:  # type: ignore[attr-defined]
                return
        except SnapshotError:
            pass
        self.holder = None if self.holder is one else self.holder
        for some in (self.asleep, self.readers):
            if one in some:
                some.remove(one)

    def settle(self) -> Steps:
        for one in read_open_intents(self.store):
            if one.kind == "create":
                yield
                record_outcome(self.store, one, "done" if decide(self.store, one) else "failed")

    def _take_full(self, name: str, turn: int) -> Steps:
        yield from self.settle()
        if find_place(self.store, name, 0).commit is not None or is_deleted(self.store, name):
            return
        operation = self.builder.begin_create(name)
        objects: list[str] = []
        for part in range(2):
            yield
            objects += self._store_base(operation, part)
        if self.choice.random() < 0.3:
            self._store_base(operation, 7)
        for number in (1, 2):
            yield
            self._store_segment(name, operation.id, number)
        yield from self._finish(operation, lambda: self.builder.new_commit(operation, objects), turn)

    def _take_increment(self, name: str, turn: int) -> Steps:
        yield from self.settle()
        chain = read_chain(self.store, name)
        if has_end(self.store, name, chain.full.operation) or is_only_full(self.store, name):
            return
        yield
        number = chain.last.increment + 1
        operation = new_operation("create", name, number, NODES)
        operation = structs.replace(operation, turn=free_turn(self.store, name, number))
        begin(self.store, operation)
        for _ in range(self.choice.randint(1, 2)):
            yield
            self._store_segment(name, chain.full.operation, self.builder.next_number(chain))
        yield
        yield from self._finish(operation, lambda: self.builder.new_commit(operation, chain=chain), turn)

    def _finish(self, operation: Intent, commit: Callable[[], Any], turn: int) -> Steps:
        if self.choice.random() < 0.15:
            record_outcome(self.store, operation, "failed")
            return
        new = commit()
        yield
        if self.turn != turn:
            return
        # The lock may be lost from here on.
        yield
        commit_operation(self.store, Operation(operation), new)
        self.committed.add((operation.snapshot, operation.increment))
        yield
        record_outcome(self.store, operation, "done")

    def _mark(self, name: str, turn: int) -> Steps:
        yield from self.settle()
        chain = read_chain(self.store, name)
        yield
        if self.turn != turn:
            return
        drawn = self.choice.random()
        if drawn < 0.2:
            self.builder.put_tombstone(name)
        elif drawn < 0.4 and not is_only_full(self.store, name):
            self.builder.put_only_full(name)
        elif drawn < 0.6:
            self.builder.end_chain(chain)

    def _restore(self, name: str) -> Steps:
        chain = read_chain(self.store, name)
        yield
        with hold_lease(self.store, new_operation("restore", name, chain.last.increment, NODES), Silent()):
            for key in sorted(needed_by(chain)):
                yield
                assert self.store.exists(key), f"{key} was removed during its restore"

    def _store_base(self, operation: Intent, part: int) -> list[str]:
        prefix = f"snapshots/{operation.snapshot}/base"
        keys = [f"{prefix}/{node}/{operation.id}/part-{part:06d}-000-ab.parquet" for node in NODES]
        for key in keys:
            self.store.create(key, key.encode())
        return keys

    def _store_segment(self, name: str, chain: str, number: int) -> None:
        for node in NODES:
            key = segment_key(archive_prefix(name, node, chain), number)
            try:
                self.store.create(key, key.encode())
            except ObjectExistsError:
                continue

    def check(self) -> None:
        """Check that nothing that anything needs was removed."""
        for name in snapshot_names(self.store):
            chain = read_chain(self.store, name)
            for key in needed_by(chain):
                assert self.store.read(key) == key.encode()
            if not has_end(self.store, name, chain.full.operation) and not is_only_full(self.store, name):
                for node in NODES:
                    prefix = archive_prefix(name, node, chain.full.operation)
                    found = self.store.list(prefix)
                    assert found == [segment_key(prefix, number + 1) for number in range(len(found))]
        for name, increment in self.committed:
            if not is_deleted(self.store, name) and not (increment and is_only_full(self.store, name)):
                assert read_chain(self.store, name).last.increment >= increment

    def leftovers(self) -> set[str]:
        """Data that nothing needs."""
        data = {key for key in self.store.list("snapshots") if key.endswith(".parquet")}
        for name in snapshot_names(self.store):
            chain = read_chain(self.store, name)
            data -= needed_by(chain)
            if not has_end(self.store, name, chain.full.operation) and not is_only_full(self.store, name):
                data -= set(self.store.list(f"snapshots/{name}/wal"))
        return data
