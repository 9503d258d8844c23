"""What the demo measured: every figure that its closing part and its JSON show. Nothing here runs or prints."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from check.report import VALID, CheckReport
from embedded.bank import BankInvariants
from embedded.bank_latency import LatencyLog, Window
from embedded.bank_workload import Committed
from fleet.progress import Progress
from restore.report import RestoreReport
from snapshots.records.commit import Commit

CUT_STEP = "cut"


class ChapterName(StrEnum):
    """The story's parts in order, as the JSON calls them."""

    FLEET = "fleet"
    BANK = "bank"
    CREATE = "create"
    INCREMENTS = "increments"
    CHECK = "check"
    DISASTER = "disaster"
    RESTORE = "restore"
    INVARIANTS = "invariants"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class TakenCut:
    """One snapshot or increment as seen from outside.

    `command` is when it ran from begin to end, `windows` when its markers were being written (one window for
    every attempt), and what a little checking before that adds; all on the monotonic clock.
    `longest_commit_seconds`: of the clients' transactions that ran within the windows, None if none did.
    """

    commit: Commit
    command: Window
    windows: tuple[Window, ...]
    longest_commit_seconds: float | None

    @property
    def name(self) -> str:
        """`full snapshot`, or `increment 1` and so on."""
        return f"increment {self.commit.increment}" if self.commit.increment else "full snapshot"


@dataclass(frozen=True, slots=True)
class Disaster:
    """What was deleted, of which node; `at` on the monotonic clock."""

    node: str
    files: int
    bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class BankFigures:
    """The bank from its first transaction to its last, `began` and `ended` on the monotonic clock.

    `p99_seconds` is of the transactions outside of all cuts, `p99_idle_seconds` of those while no command ran;
    `longest_gap_seconds` is the longest time in which nothing was committed on any shard; `ends` are the
    moments at which transactions ended, ascending.
    """

    clients: int
    began: float
    ended: float
    committed: Committed
    p99_seconds: float | None
    p99_idle_seconds: float | None
    longest_gap_seconds: float
    ends: list[float]

    @property
    def seconds(self) -> float:
        """How long it moved money."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Chapter:
    """A part of the story: when it began, on the monotonic clock, and how long it took."""

    name: ChapterName
    began: float
    seconds: float


@dataclass(slots=True)
class StoryReport:
    """The whole story."""

    began: float
    chapters: list[Chapter] = field(default_factory=list)
    cuts: list[TakenCut] = field(default_factory=list)
    seconds: float = 0.0
    check: CheckReport | None = None
    disaster: Disaster | None = None
    bank: BankFigures | None = None
    restore: RestoreReport | None = None
    invariants: BankInvariants | None = None

    @property
    def holds(self) -> bool:
        """Whether the snapshot was found valid and what it brought back is a consistent state of all shards."""
        return self.is_valid and self.invariants is not None and self.invariants.hold

    @property
    def is_valid(self) -> bool:
        """Whether the check found the snapshot whole."""
        return self.check is not None and self.check.result == VALID

    @property
    def longest_commit_seconds(self) -> float | None:
        """The longest transaction of any client during any cut."""
        return max((cut.longest_commit_seconds for cut in self.cuts if cut.longest_commit_seconds), default=None)


class CutWatch:
    """A Progress that notes when the cut was being made, and passes everything on."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._windows: list[Window] = []
        self._began: float | None = None

    def windows(self) -> tuple[Window, ...]:
        """One for every attempt at the cut so far."""
        return tuple(self._windows)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Note the moment, if the cut begins or has been made."""
        now = time.monotonic()
        if self._began is not None:
            self._windows.append((self._began, now))
        self._began = now if name == CUT_STEP else None
        self._shown.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        """Pass it on."""
        self._shown.advance(done)

    def note(self, text: str) -> None:
        """Pass it on."""
        self._shown.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Pass it on."""
        self._shown.reached(point, node=node)


def longest_within(latencies: LatencyLog, windows: tuple[Window, ...]) -> float | None:
    """The longest transaction that ran, in part at least, within one of the windows."""
    found = [latencies.longest_between(*window) for window in windows]
    return max((seconds for seconds in found if seconds is not None), default=None)


def longest_gap(ends: list[float], began: float) -> float:
    """The longest time between two moments that follow each other; `ends` ascending, after `began`."""
    return max((later - earlier for earlier, later in pairwise([began, *ends])), default=0.0)
