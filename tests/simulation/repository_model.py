"""A simulated repository apart from its store: the fleet's nodes, its lock, the clock, and what commands reported.

A node's WAL is the numbers from 1 on, and its slots are positions in it. A base copy has all numbers up to a position,
a segment those between two positions. So a restore must yield all numbers up to the cut's position.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random

from cutline.storage.errors import UnreachableError
from tests.simulation.faulty_store import Bucket
from tests.simulation.schedule import Schedule

# One is enough: the repository's promises don't depend on the number of nodes, and small commits are read faster.
NODES = ("a",)
BEGINNING = datetime(2026, 11, 20, 11, 0, tzinfo=UTC)
TOMBSTONE = re.compile(r"deleted/([^/]+)\.json")
ONLY_FULL = re.compile(r"snapshots/([^/]+)/only-full\.json")
STEP = timedelta(milliseconds=40)


class NodeSilentError(UnreachableError):
    """A node of the model does not answer."""


@dataclass(slots=True)
class CreateRun:
    """One create: what it reported in the end, and the state that it was about to commit.

    `reported` is "yes" (committed), "no" (nothing was committed), "unknown" (exit code 5), or "" while it runs, and if
    it was killed or interrupted before it could report. `reported_at` is the step.
    """

    operation: str
    snapshot: str
    increment: int
    previous: str = ""
    reported: str = ""
    reported_at: int = 0
    positions: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class CheckRun:
    """One full check of a snapshot: what it has found, when it ended by its own clock, and in which step it had stored
    that; None if it does not know whether it has.
    """

    snapshot: str
    has_conflicts: bool
    ended_at: datetime
    stored_at: int | None = None


@dataclass(slots=True)
class RemovalTimes:
    """The step at which a removal began, and `done_at`, the step at which a command reported it as done."""

    began_at: int
    done_at: int | None = None


@dataclass(slots=True)
class PinRun:
    """A pin that a command has reported as stored; `is_released` from the moment at which its release begins."""

    snapshot: str
    increment: int
    is_released: bool = False

    def is_broken_by(self, mark: str) -> bool:
        """Whether a mark with this key gives up the pinned restore point."""
        if found := TOMBSTONE.fullmatch(mark):
            return found[1] == self.snapshot
        found = ONLY_FULL.fullmatch(mark)
        return found is not None and found[1] == self.snapshot and self.increment > 0


@dataclass(slots=True)
class ModelNodes:
    """The nodes: the end of each one's WAL, and the positions of its slots."""

    wal: dict[str, int] = field(default_factory=lambda: dict.fromkeys(NODES, 1))
    slots: dict[str, dict[str, int]] = field(default_factory=dict)

    def write(self, draw: Random) -> None:
        """Let the fleet write some WAL, or let it be idle."""
        written = [draw.randrange(1, 4) for _ in NODES]
        if sum(written) % 4:
            self.wal.update((node, self.wal[node] + more) for node, more in zip(NODES, written, strict=True))


class RepositoryWorld:
    """Everything that the processes of a history share."""

    def __init__(self, seed: int, switch: float = 0.5) -> None:
        self.draw = Random(seed)
        self.schedule = Schedule(self.draw, switch)
        self.skipped = timedelta()
        self.bucket = Bucket(now=self.now, on_put=self._note_stored)
        self.nodes = ModelNodes()
        self.holder: object = None
        self.running: object = None
        self.create_runs: dict[str, CreateRun] = {}
        self.check_runs: list[CheckRun] = []
        self.deletions: dict[str, RemovalTimes] = {}
        self.prunings: dict[str, RemovalTimes] = {}
        self.pins: list[PinRun] = []
        # The marks of forced deletions, which break pins, and of commands that read a stale listing.
        self.excused_marks: set[str] = set()
        self.seen: dict[tuple[str, int], tuple[str, int]] = {}
        self.tally: Counter[str] = Counter()
        self.story: list[str] = []
        self._ids = Random(seed)

    def copy(self) -> RepositoryWorld:
        """An independent copy of this world, with the same past; no process may be running."""
        copy = RepositoryWorld(0)
        copy.draw.setstate(self.draw.getstate())
        copy._ids.setstate(self._ids.getstate())
        copy.schedule.steps, copy.skipped = self.schedule.steps, self.skipped
        self.bucket.copy_to(copy.bucket)
        copy.nodes = ModelNodes(dict(self.nodes.wal), {slot: dict(at) for slot, at in self.nodes.slots.items()})
        copy.create_runs = {operation: replace(one) for operation, one in self.create_runs.items()}
        copy.check_runs = [replace(one) for one in self.check_runs]
        copy.deletions = {name: replace(one) for name, one in self.deletions.items()}
        copy.prunings = {name: replace(one) for name, one in self.prunings.items()}
        copy.pins, copy.excused_marks = [replace(one) for one in self.pins], set(self.excused_marks)
        copy.seen, copy.tally, copy.story = dict(self.seen), self.tally.copy(), list(self.story)
        return copy

    def now(self) -> datetime:
        """The true time."""
        return BEGINNING + self.schedule.steps * STEP + self.skipped

    def clock(self) -> datetime:
        """The time on the machine of the running process."""
        return self.now() + getattr(self.running, "skew", timedelta())

    def token(self, size: int) -> str:
        """The random part of an operation id."""
        return self._ids.randbytes(size).hex()

    def note_mark(self, key: str, *, is_excused: bool) -> None:
        """Note that a process puts this key; if it is a mark, what it marks may be removed from now on.

        If it `is_excused`, it may break pins.
        """
        if is_excused:
            self.excused_marks.add(key)
        if found := TOMBSTONE.fullmatch(key):
            self.deletions.setdefault(found[1], RemovalTimes(self.schedule.steps))
        elif found := ONLY_FULL.fullmatch(key):
            self.prunings.setdefault(found[1], RemovalTimes(self.schedule.steps))

    def _note_stored(self, key: str) -> None:
        """Assert that an object that is stored, perhaps late, is no mark that breaks a pin."""
        if key not in self.excused_marks:
            broken = [one for one in self.pins if not one.is_released and one.is_broken_by(key)]
            assert not broken, f"pinned: {key} is stored, and {broken} are in force"

    def note_deleted(self, name: str) -> None:
        """Note that a command has reported the snapshot as deleted."""
        deletion = self.deletions.setdefault(name, RemovalTimes(self.schedule.steps))
        deletion.done_at = deletion.done_at or self.schedule.steps

    def log(self, line: str) -> None:
        """Add a line to the story that a broken promise prints."""
        self.story.append(f"{self.schedule.steps:5} {line}")

    def below(self, size: int) -> int:
        """A number from 0 to below `size`, drawn from the seed."""
        return self.draw.randrange(size) if size > 0 else 0

    def skip(self, seconds: float) -> None:
        """Let time pass without any calls."""
        self.skipped += timedelta(seconds=seconds)
