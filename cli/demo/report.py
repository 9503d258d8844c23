"""The demo's measurements: every figure that its summary and its JSON show. Nothing here runs or prints."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from cutline.check.report import CheckReport
from cutline.cli.output.exit_codes import CONFLICTS, DONE, INCONCLUSIVE
from cutline.embedded.bank import BankInvariants
from cutline.embedded.bank_latency import LatencyLog, Window
from cutline.embedded.bank_workload import Committed
from cutline.fleet.progress import Progress, Reading
from cutline.restore.report import RestoreReport
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import INCONCLUSIVE as RESULT_INCONCLUSIVE
from cutline.snapshots.records.operation_records import VALID

CUT_STEP = "cut"


class ChapterName(StrEnum):
    """The chapters in order, as the JSON names them."""

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
    """A snapshot or increment and its timing, on the monotonic clock.

    `command` is the time of the whole command. `windows` has one window per attempt: from shortly before the start
    markers to the finish markers. `longest_commit_seconds` is the longest client transaction that overlaps a window,
    None if none does.
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
    """What was deleted, and on which node; `at` is on the monotonic clock."""

    node: str
    files: int
    bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class BankFigures:
    """The bank from its first transaction to its last; `began` and `ended` are on the monotonic clock.

    `p99_seconds` covers transactions outside all cuts, `p99_idle_seconds` those while no command ran.
    `longest_gap_seconds` is the longest time without a commit on any shard. `ends` are the times at which
    transactions ended, ascending.
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
        """How long the bank worked."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class Chapter:
    """A chapter: when it began, on the monotonic clock, and how long it took."""

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
        """Whether the check found the snapshot valid and the restored shards are consistent."""
        return self.is_valid and self.invariants is not None and self.invariants.hold

    @property
    def exit_code(self) -> int:
        """The exit code of the demo: a check that is inconclusive is one here, too."""
        if self.holds:
            return DONE
        is_open = self.check is not None and self.check.result == RESULT_INCONCLUSIVE
        return INCONCLUSIVE if is_open and self.invariants is not None and self.invariants.hold else CONFLICTS

    @property
    def is_valid(self) -> bool:
        """Whether the check found the snapshot whole."""
        return self.check is not None and self.check.result == VALID

    @property
    def longest_commit_seconds(self) -> float | None:
        """The longest transaction of any client during any cut."""
        return max((cut.longest_commit_seconds for cut in self.cuts if cut.longest_commit_seconds), default=None)


class CutWatch:
    """A Progress that records when cuts were made, and forwards everything."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._windows: list[Window] = []
        self._began: float | None = None

    def windows(self) -> tuple[Window, ...]:
        """One window per attempt at the cut so far."""
        return tuple(self._windows)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Forward the step; record the time if the cut begins or ends."""
        now = time.monotonic()
        if self._began is not None:
            self._windows.append((self._began, now))
        self._began = now if name == CUT_STEP else None
        self._shown.step(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        """Forward the call."""
        self._shown.advance(done)

    def tell(self, reading: Reading) -> None:
        """Forward the call."""
        self._shown.tell(reading)

    def note(self, text: str) -> None:
        """Forward the call."""
        self._shown.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Forward the call."""
        self._shown.reached(point, node=node)

    def ending(self) -> None:
        """Forward the call."""
        self._shown.ending()


def longest_within(latencies: LatencyLog, windows: tuple[Window, ...]) -> float | None:
    """The longest transaction that overlaps one of the windows, in seconds."""
    found = [latencies.longest_between(*window) for window in windows]
    return max((seconds for seconds in found if seconds is not None), default=None)


def longest_gap(ends: list[float], began: float) -> float:
    """The longest time between two consecutive moments; `ends` is ascending, after `began`."""
    return max((later - earlier for earlier, later in pairwise([began, *ends])), default=0.0)
