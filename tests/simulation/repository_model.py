"""What a simulated repository is beside its store: the fleet's nodes, its lock, the clock, and who was told what.

A node's WAL is the numbers from 1 on, its slots are positions in it. A base copy holds all numbers up to a position,
a segment those between two. So what a restore must yield is arithmetic: all numbers up to the cut's position.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random

from storage.errors import UnreachableError
from tests.simulation.faulty_store import Bucket
from tests.simulation.schedule import Schedule

# One is enough: what a repository promises is the same for any number, and a commit of one is read faster.
NODES = ("a",)
BEGINNING = datetime(2026, 11, 20, 11, 0, tzinfo=UTC)
TOMBSTONE = re.compile(r"deleted/([^/]+)\.json")
ONLY_FULL = re.compile(r"snapshots/([^/]+)/only-full\.json")
STEP = timedelta(milliseconds=40)


class NodeSilentError(UnreachableError):
    """A node of the model does not answer."""


@dataclass(slots=True)
class Attempt:
    """One create: what its process was told in the end, and the state that it was about to commit.

    `told` is "yes", "no" (it said that nothing was committed), "unknown" (exit code 5), or "" while it runs and where
    nobody was told, because it was killed or interrupted. `told_at` is the step.
    """

    operation: str
    snapshot: str
    increment: int
    previous: str = ""
    told: str = ""
    told_at: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Going:
    """What somebody began to take away at a step; `done_at` once somebody was told that it is gone."""

    began_at: int
    done_at: int | None = None


@dataclass(slots=True)
class ModelNodes:
    """The nodes: where each's WAL ends, and where each's slots stand."""

    wal: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NODES, 1))
    slots: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, draw: Random) -> None:
        """Let the fleet go on writing."""
        for node in NODES:
            self.wal[node] += draw.randrange(1, 4)


class RepositoryWorld:
    """Everything that the processes of one history share."""

    def __init__(self, seed: int, switch: float = 0.5) -> None:
        self.draw = Random(seed)
        self.schedule = Schedule(self.draw, switch)
        self.skipped = timedelta()
        self.bucket = Bucket(now=self.now)
        self.nodes = ModelNodes()
        self.holder: object = None
        self.running: object = None
        self.attempts: dict[str, Attempt] = {}
        self.deletions: dict[str, Going] = {}
        self.prunings: dict[str, Going] = {}
        self.seen: dict[tuple[str, int], tuple[str, int]] = {}
        self.tally: Counter[str] = Counter()
        self.story: list[str] = []
        self._ids = Random(seed)

    def copied(self) -> RepositoryWorld:
        """Another world in which the same has happened, while nothing runs: what happens in one is not in the other."""
        copy = RepositoryWorld(0)
        copy.draw.setstate(self.draw.getstate())
        copy._ids.setstate(self._ids.getstate())
        copy.schedule.steps, copy.skipped = self.schedule.steps, self.skipped
        self.bucket.copy_to(copy.bucket)
        copy.nodes = ModelNodes(dict(self.nodes.wal), {slot: dict(at) for slot, at in self.nodes.slots.items()})
        copy.attempts = {operation: replace(one) for operation, one in self.attempts.items()}
        copy.deletions = {name: replace(one) for name, one in self.deletions.items()}
        copy.prunings = {name: replace(one) for name, one in self.prunings.items()}
        copy.seen, copy.tally, copy.story = dict(self.seen), self.tally.copy(), list(self.story)
        return copy

    def now(self) -> datetime:
        """The time of day everywhere."""
        return BEGINNING + self.schedule.steps * STEP + self.skipped

    def clock(self) -> datetime:
        """The time of day as the machine of the running process has it."""
        return self.now() + getattr(self.running, "skew", timedelta())

    def token(self, size: int) -> str:
        """What is random in an operation id."""
        return self._ids.randbytes(size).hex()

    def is_marking(self, key: str) -> None:
        """Somebody begins to create a mark: from now on what it marks may be gone."""
        if found := TOMBSTONE.fullmatch(key):
            self.deletions.setdefault(found[1], Going(self.schedule.steps))
        elif found := ONLY_FULL.fullmatch(key):
            self.prunings.setdefault(found[1], Going(self.schedule.steps))

    def is_told_deleted(self, name: str) -> None:
        """Somebody was told that the snapshot is deleted."""
        deletion = self.deletions.setdefault(name, Going(self.schedule.steps))
        deletion.done_at = deletion.done_at or self.schedule.steps

    def tell(self, line: str) -> None:
        """Keep a line of what happens, to be read where a promise is broken."""
        self.story.append(f"{self.schedule.steps:5} {line}")

    def below(self, size: int) -> int:
        """A number that the seed says, below `size`."""
        return self.draw.randrange(size) if size > 0 else 0

    def skip(self, seconds: float) -> None:
        """Let time pass in which nobody does anything."""
        self.skipped += timedelta(seconds=seconds)
