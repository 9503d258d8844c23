"""gc beside all other commands: between any two of its store calls the others run, die, sleep and wake up.

The code that commits, settles, marks and leases puts everything into the store; only nodes and Spark are missing. With
CUTLINE_SOAK=SECONDS the test continues with new seeds for that long.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from cutline.snapshots.records.documents import ParsedKey
from cutline.snapshots.removal import garbage_rules
from cutline.snapshots.removal.garbage_rules import GarbageReason, GarbageRules, GarbageVerdict
from cutline.storage.store import ObjectMissingError
from tests.run.soak import SEED, SOAK_SECONDS
from tests.simulation.calls_in_order import calls_in_order
from tests.unit.made_garbage import run_gc
from tests.unit.racing_commands import Commands, InterleavedStore

# Each run has others.
HISTORIES = 12
# In so many a rule that is missing is noticed.
SEEDS = 25
ROUNDS = 12


def run(seed: int) -> int:
    """Run gc beside commands of that seed; return how many objects it removed meanwhile."""
    commands, removed = Commands(seed), 0
    for _ in range(ROUNDS):
        for _ in range(commands.choice.randint(0, 60)):
            commands.act()
        report = run_gc(InterleavedStore(commands.store, commands.act))  # type: ignore[arg-type]
        assert report.unknown == []
        removed += report.removed.objects
        commands.check()
    # All commands die and the next one settles. After a last gc only what is needed is left.
    commands.holder, commands.asleep = None, []
    for reader in commands.readers:
        reader.close()  # type: ignore[attr-defined]
    for _ in commands.settle():
        pass
    run_gc(commands.store)
    commands.check()
    assert commands.leftovers() == set()
    return removed


@pytest.fixture(autouse=True)
def _order_calls() -> Iterator[None]:
    with calls_in_order():
        yield


@pytest.fixture(autouse=True)
def _skip_the_hour_after_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """No put is late here, so that the hour after a mark need not pass."""
    monkeypatch.setattr(garbage_rules, "ENDED_SECONDS", 0.0)


def test_gc_removes_everything_that_is_not_needed_and_nothing_else() -> None:
    removed = sum(run(seed) for seed in range(SEED, SEED + HISTORIES))
    # Some of the garbage is removed while the commands run.
    assert removed > HISTORIES
    deadline = time.monotonic() + SOAK_SECONDS
    for seed in itertools.count(SEED + HISTORIES):
        if time.monotonic() > deadline:
            break
        run(seed)


def remove_the_next_increment(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = GarbageRules.judge

    def wrong(self: GarbageRules, key: str, parsed: ParsedKey) -> GarbageVerdict:
        verdict = judge(self, key, parsed)
        return GarbageVerdict(GarbageReason.ENDED) if verdict.why is GarbageReason.NEXT else verdict

    monkeypatch.setattr(GarbageRules, "judge", wrong)


def ignore_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_rules, "open_leases", lambda *_: [])


Break = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("break_rule", [remove_the_next_increment, ignore_leases])
def test_a_missing_rule_is_noticed(break_rule: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch)
    with pytest.raises((AssertionError, ObjectMissingError)):
        deque(map(run, range(SEEDS)), maxlen=0)
