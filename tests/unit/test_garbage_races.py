"""gc beside everything else, at every moment: between any two of its calls others go on, die, sleep and come back.

All that is in the store is put there by the code that commits, settles, marks and leases; only nodes and Spark are left
out. With CUTLINE_SOAK=SECONDS it goes on with fresh seeds for so long.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec import structs

from fleet.progress import Silent
from snapshots.operations.deciding import decide
from snapshots.operations.leases import hold_lease
from snapshots.operations.operation import (
    Operation,
    begin,
    commit_operation,
    new_operation,
    pending_operations,
    record_outcome,
)
from snapshots.records.commits import find_place, free_turn, read_chain, snapshot_names
from snapshots.records.keys import Place
from snapshots.records.lost_chains import is_lost
from snapshots.records.operation_records import Intent
from snapshots.records.tombstones import is_deleted, is_only_full
from snapshots.removal import garbage
from snapshots.removal.garbage import GarbageReason, GarbageRules, GarbageVerdict
from storage.errors import SnapshotError
from storage.store import ObjectExistsError, ObjectMissingError
from tests.simulation.calls_in_order import calls_in_order
from tests.soak import SOAK_SECONDS
from tests.unit.made_commits import memory
from tests.unit.made_garbage import NODES, MadeStore, collected, needed_by
from wal.segments.archive import archive_prefix, segment_key

SEEDS = 25
ROUNDS = 12
NAMES = ("a", "b", "c", "d", "e")
Steps = Iterator[None]


class Between:
    """The store as gc sees it: before each of its calls the others may do something."""

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


class Crowd:
    """Commands on one fleet, one step at a time. One of them holds the lock; who sleeps may lose it unnoticed."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)
        self.made = MadeStore(memory())
        self.store = self.made.store
        self.holder: Steps | None = None
        self.turn = 0
        self.asleep: list[Steps] = []
        self.dead: list[Steps] = []
        self.readers: list[Steps] = []
        self.committed: set[tuple[str, int]] = set()

    def act(self) -> None:
        """Nothing happens, or one thing, or some."""
        while self.choice.random() < 0.5:
            self._act()

    def _act(self) -> None:
        drawn = self.choice.random()
        if drawn < 0.08 and self.holder:
            (self.dead if self.choice.random() < 0.5 else self.asleep).append(self.holder)
            self.holder, self.turn = None, self.turn + 1
        elif drawn < 0.2 and self.asleep:
            self._go_on(self.choice.choice(self.asleep))
        elif drawn < 0.4 and self.readers:
            self._go_on(self.choice.choice(self.readers))
        elif drawn < 0.45:
            self.readers.append(self._restore(self.choice.choice(NAMES)))
        elif self.holder:
            self._go_on(self.holder)
        else:
            name = self.choice.choice(NAMES)
            commands = (self._full, self._increment, self._increment, self._mark)
            self.turn += 1
            self.holder = self.choice.choice(commands)(name, self.turn)

    def _go_on(self, one: Steps) -> None:
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
        for one in pending_operations(self.store):
            if one.kind == "create":
                yield
                record_outcome(self.store, one, "done" if decide(self.store, one) else "failed")

    def _full(self, name: str, turn: int) -> Steps:
        yield from self.settle()
        if find_place(self.store, name, 0).commit is not None or is_deleted(self.store, name):
            return
        operation = self.made.begin(name)
        objects: list[str] = []
        for part in range(2):
            yield
            objects += self._stored(operation, part)
        if self.choice.random() < 0.3:
            self._stored(operation, 7)
        for number in (1, 2):
            yield
            self._segment(name, operation.id, number)
        yield from self._end(operation, lambda: self.made.commit(operation, objects), turn)

    def _increment(self, name: str, turn: int) -> Steps:
        yield from self.settle()
        chain = read_chain(self.store, name)
        if is_lost(self.store, name, chain.full.operation) or is_only_full(self.store, name):
            return
        yield
        number = chain.last.increment + 1
        operation = new_operation("create", name, number, NODES)
        operation = structs.replace(operation, turn=free_turn(self.store, name, number))
        begin(self.store, operation)
        for _ in range(self.choice.randint(1, 2)):
            yield
            self._segment(name, chain.full.operation, self.made.next_number(chain))
        yield
        yield from self._end(operation, lambda: self.made.commit(operation, chain=chain), turn)

    def _end(self, operation: Intent, commit: Callable[[], Any], turn: int) -> Steps:
        if self.choice.random() < 0.15:
            record_outcome(self.store, operation, "failed")
            return
        made = commit()
        yield
        if self.turn != turn:
            return
        # The lock may be lost from here on.
        yield
        commit_operation(self.store, Operation(operation), made)
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
            self.made.tombstone(name)
        elif drawn < 0.4 and not is_only_full(self.store, name):
            self.made.only_full(name)
        elif drawn < 0.6:
            self.made.lose(chain)

    def _restore(self, name: str) -> Steps:
        chain = read_chain(self.store, name)
        yield
        with hold_lease(self.store, new_operation("restore", name, chain.last.increment, NODES), Silent()):
            for key in sorted(needed_by(chain)):
                yield
                assert self.store.exists(key), f"{key} went while it was restored"

    def _stored(self, operation: Intent, part: int) -> list[str]:
        prefix = f"snapshots/{operation.snapshot}/base"
        keys = [f"{prefix}/{node}/{operation.id}/part-{part:06d}-000-ab.parquet" for node in NODES]
        for key in keys:
            self.store.create(key, key.encode())
        return keys

    def _segment(self, name: str, chain: str, number: int) -> None:
        for node in NODES:
            key = segment_key(archive_prefix(name, node, chain), number)
            try:
                self.store.create(key, key.encode())
            except ObjectExistsError:
                continue

    # What must hold.

    def check(self) -> None:
        """Nothing that anything needs is gone."""
        for name in snapshot_names(self.store):
            chain = read_chain(self.store, name)
            for key in needed_by(chain):
                assert self.store.read(key) == key.encode()
            if not is_lost(self.store, name, chain.full.operation) and not is_only_full(self.store, name):
                for node in NODES:
                    prefix = archive_prefix(name, node, chain.full.operation)
                    found = self.store.list(prefix)
                    assert found == [segment_key(prefix, number + 1) for number in range(len(found))]
        for name, increment in self.committed:
            if not is_deleted(self.store, name) and not (increment and is_only_full(self.store, name)):
                assert read_chain(self.store, name).last.increment >= increment

    def left(self) -> set[str]:
        """Data that nothing needs."""
        data = {key for key in self.store.list("snapshots") if key.endswith(".parquet")}
        for name in snapshot_names(self.store):
            chain = read_chain(self.store, name)
            data -= needed_by(chain)
            if not is_lost(self.store, name, chain.full.operation) and not is_only_full(self.store, name):
                data -= set(self.store.list(f"snapshots/{name}/wal"))
        return data


def run(seed: int) -> int:
    """One crowd; how many objects gc removed beside it."""
    crowd, removed = Crowd(seed), 0
    for _ in range(ROUNDS):
        for _ in range(crowd.choice.randint(0, 60)):
            crowd.act()
        report = collected(Between(crowd.store, crowd.act))  # type: ignore[arg-type]
        assert report.unknown == []
        removed += report.removed.objects
        crowd.check()
    # All of them die; who comes next settles, and then only what is needed is left.
    crowd.holder, crowd.asleep = None, []
    for reader in crowd.readers:
        reader.close()  # type: ignore[attr-defined]
    for _ in crowd.settle():
        pass
    collected(crowd.store)
    crowd.check()
    assert crowd.left() == set()
    return removed


@pytest.fixture(autouse=True)
def _a_seed_is_a_history() -> Iterator[None]:
    with calls_in_order():
        yield


@pytest.fixture(autouse=True)
def _marks_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """No put comes late here, so that the hour after a mark need not pass."""
    monkeypatch.setattr(garbage, "LOST_SECONDS", 0.0)


def test_nothing_that_is_needed_goes_and_nothing_else_stays() -> None:
    removed = sum(run(seed) for seed in range(SEEDS))
    # The crowd makes garbage that goes while it is at work.
    assert removed > SEEDS
    deadline = time.monotonic() + SOAK_SECONDS
    for seed in itertools.count(SEEDS):
        if time.monotonic() > deadline:
            break
        run(seed)


def takes_the_next_increment(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = GarbageRules.judge

    def wrong(self: GarbageRules, key: str, place: Place) -> GarbageVerdict:
        verdict = judge(self, key, place)
        return GarbageVerdict(GarbageReason.LOST) if verdict.why is GarbageReason.NEXT else verdict

    monkeypatch.setattr(GarbageRules, "judge", wrong)


def asks_no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "open_leases", lambda *_: [])


Break = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("break_rule", [takes_the_next_increment, asks_no_leases])
def test_a_rule_less_is_noticed(break_rule: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch)
    with pytest.raises((AssertionError, ObjectMissingError)):
        deque(map(run, range(SEEDS)), maxlen=0)
