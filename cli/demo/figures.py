"""The demo's measurements, as tables for people and as one JSON document for scripts."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any

from msgspec import Struct, field
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cutline.check.report import CheckReport
from cutline.cli.demo.fleet import invariants_document
from cutline.cli.demo.stage import BACKUPS, SHARDS
from cutline.cli.output.failure import CONFLICTS, DONE, INCONCLUSIVE
from cutline.cli.output.restore_report import document_of as restore_document
from cutline.cli.output.tables import count_text, seconds_text, size_text
from cutline.embedded.bank import ACCOUNTS_PER_SHARD, BankInvariants
from cutline.embedded.bank_workload import Committed, LatencyLog, Window
from cutline.fleet.progress import Forwarding, Progress
from cutline.restore.plan.report import RestoreReport
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import INCONCLUSIVE as RESULT_INCONCLUSIVE
from cutline.snapshots.records.operation_records import VALID

CUT_STEP = "cut"


class ChapterName(StrEnum):
    """The chapters, in order, by their names in the JSON output."""

    FLEET = "fleet"
    BANK = "bank"
    CREATE = "create"
    INCREMENTS = "increments"
    CHECK = "check"
    DISASTER = "disaster"
    RESTORE = "restore"
    INVARIANTS = "invariants"
    DOWN = "down"


class TakenCut(Struct, frozen=True):
    """A snapshot or increment and its timing, on the monotonic clock.

    `command` covers the whole command. `windows` contains one window per attempt: from shortly before the start markers
    to the finish markers. `longest_commit_seconds` is the duration of the longest client transaction that overlaps a
    window, or None.
    """

    commit: Commit
    command: Window
    windows: tuple[Window, ...]
    longest_commit_seconds: float | None

    @property
    def name(self) -> str:
        """`full snapshot`, or `increment 1` and so on."""
        return f"increment {self.commit.increment}" if self.commit.increment else "full snapshot"


class Disaster(Struct, frozen=True):
    """The deleted data and its node; `at` is on the monotonic clock."""

    node: str
    files: int
    bytes: int
    at: float


class BankFigures(Struct, frozen=True):
    """The bank from its first transaction to its last; `began` and `ended` are on the monotonic clock.

    `p99_seconds` covers transactions outside all cuts; `p99_idle_seconds` covers those that ran while no command was
    running. `longest_gap_seconds` is the longest time without a commit on any shard. `ends` are the times at which
    transactions ended, in ascending order.
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
        """The duration of the workload."""
        return self.ended - self.began


class Chapter(Struct, frozen=True):
    """A chapter of the demo; `began` is on the monotonic clock."""

    name: ChapterName
    began: float
    seconds: float


class StoryReport(Struct):
    """The measurements of the whole demo."""

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
        """The exit code of the demo: if only the check is inconclusive, the demo is, too."""
        if self.holds:
            return DONE
        is_open = self.check is not None and self.check.result == RESULT_INCONCLUSIVE
        return INCONCLUSIVE if is_open and self.invariants is not None and self.invariants.hold else CONFLICTS

    @property
    def is_valid(self) -> bool:
        """Whether the check found the snapshot valid."""
        return self.check is not None and self.check.result == VALID

    @property
    def longest_commit_seconds(self) -> float | None:
        """The duration of the longest transaction by any client during any cut."""
        return max((cut.longest_commit_seconds for cut in self.cuts if cut.longest_commit_seconds), default=None)


class CutWatch(Forwarding):
    """A Progress that records when cuts were made, and forwards every call."""

    def __init__(self, target: Progress) -> None:
        super().__init__(target)
        self._windows: list[Window] = []
        self._began: float | None = None

    def windows(self) -> tuple[Window, ...]:
        """Return one window per attempt at the cut so far."""
        return tuple(self._windows)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        now = time.monotonic()
        if self._began is not None:
            self._windows.append((self._began, now))
        self._began = now if name == CUT_STEP else None
        self.target.step(name, total=total, unit=unit)


def longest_within(latencies: LatencyLog, windows: tuple[Window, ...]) -> float | None:
    """Return the duration, in seconds, of the longest transaction that overlaps one of the windows."""
    longest = [latencies.longest_between(*window) for window in windows]
    return max((seconds for seconds in longest if seconds is not None), default=None)


def longest_gap(ends: list[float], began: float) -> float:
    """Return the longest time between two consecutive ends; `ends` are in ascending order, after `began`."""
    return max((later - earlier for earlier, later in pairwise([began, *ends])), default=0.0)


LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Draw one character per value, scaled to the highest; a space for zero."""
    highest = max(values, default=0.0)
    return "".join(
        " " if value <= 0 else LEVELS[min(int(value / highest * len(LEVELS)), len(LEVELS) - 1)] for value in values
    )


def rates(moments: Sequence[float], began: float, ended: float, columns: int) -> list[float]:
    """Return the number of `moments` (ascending) per second in each of `columns` equal parts of the period."""
    width = (ended - began) / columns
    edges = [bisect_left(moments, began + width * column) for column in range(columns + 1)]
    return [(after - before) / width for before, after in pairwise(edges)]


def marks(places: Mapping[str, float], began: float, ended: float, columns: int) -> str:
    """Draw a line of `columns` characters, with each sign at the free position that is nearest to its time."""
    line = [" "] * columns
    for sign, moment in places.items():
        column = min(max(int((moment - began) / (ended - began) * columns), 0), columns - 1)
        free = [place for place in range(columns) if line[place] == " "]
        line[min(free, key=lambda place: abs(place - column))] = sign
    return "".join(line)


SCHEMA = "cutline/demo/1"
TIMELINE_COLUMNS = 60
DISASTER_SIGN = "x"


def document_of(report: StoryReport) -> dict[str, Any]:
    """Return the command's JSON output."""
    bank, disaster = report.bank, report.disaster
    return {
        "schema": SCHEMA,
        "holds": report.holds,
        "seconds": round(report.seconds, 3),
        "chapters": [{"name": chapter.name, "seconds": round(chapter.seconds, 3)} for chapter in report.chapters],
        "fleet": {"shards": SHARDS, "backups": BACKUPS, "accounts": SHARDS * ACCOUNTS_PER_SHARD},
        "bank": bank and _bank_document(bank),
        "cuts": [_cut_document(cut, bank.began if bank else report.began) for cut in report.cuts],
        "longest_commit_in_a_cut_seconds": report.longest_commit_seconds,
        "check": report.check and report.check.to_json(),
        "disaster": disaster and {"node": disaster.node, "files": disaster.files, "bytes": disaster.bytes},
        "restore": report.restore and restore_document(report.restore),
        "invariants": report.invariants and invariants_document(report.invariants),
    }


def _bank_document(bank: BankFigures) -> dict[str, Any]:
    return {
        "clients": bank.clients,
        "seconds": round(bank.seconds, 3),
        "transactions": {"local": bank.committed.local, "cross": bank.committed.cross},
        "transactions_per_second": round(bank.committed.total / bank.seconds, 1) if bank.seconds else 0.0,
        "p99_seconds": bank.p99_seconds,
        "p99_idle_seconds": bank.p99_idle_seconds,
        "longest_gap_seconds": bank.longest_gap_seconds,
    }


def _cut_document(cut: TakenCut, bank_began: float) -> dict[str, Any]:
    commit, made = cut.commit, cut.commit.cut
    return {
        "snapshot": commit.snapshot,
        "increment": commit.increment,
        "at_seconds": round(cut.windows[0][0] - bank_began, 3),
        "seconds": round(commit.seconds, 3),
        "cut_seconds": round(made.seconds, 6),
        "window_seconds": round(sum(end - begin for begin, end in cut.windows), 6),
        "attempts": made.attempts,
        "global_transactions": made.global_transactions,
        "in_flight": made.in_flight,
        "included_early": made.included_early,
        "longest_commit_seconds": cut.longest_commit_seconds,
        "changes": commit.counts["changes"],
        "bytes": commit.counts["bytes"],
    }


def lines_of(report: StoryReport) -> Iterator[str | RenderableType]:
    """Return the human-readable summary."""
    if report.bank is not None:
        yield ""
        yield from _timeline(report, report.bank)
        yield ""
        yield _cut_table(report, report.bank)
        yield ""
        yield from _latency_lines(report, report.bank)
    yield ""
    yield _closing_table(report)
    yield ""
    if report.holds:
        yield (f"The books balance: exit 0 after {seconds_text(report.seconds)}. Try it by hand: snapshot demo up DIR")
    elif report.exit_code == INCONCLUSIVE:
        yield (
            "The books balance; the check is inconclusive, because PostgreSQL 15 can't decode WAL on standbys:"
            f" exit {INCONCLUSIVE} after {seconds_text(report.seconds)}."
        )
    else:
        yield f"NOT PROVEN: exit 1 after {seconds_text(report.seconds)}."


def _timeline(report: StoryReport, bank: BankFigures) -> Iterator[str | RenderableType]:
    rate = rates(bank.ends, bank.began, bank.ended, TIMELINE_COLUMNS)
    signs = {str(cut.commit.increment): cut.windows[0][0] for cut in report.cuts}
    if report.disaster:
        signs[DISASTER_SIGN] = report.disaster.at
    places = marks(signs, bank.began, bank.ended, TIMELINE_COLUMNS)
    end = f"{bank.seconds:.0f} s"
    yield Text("The bank while the cuts were made", style="bold")
    yield Text.assemble("  rate  ", (sparkline(rate), "cyan"), f" to {count_text(round(max(rate)))}/s")
    yield Text.assemble("  cuts  ", (places, "bold"))
    yield f"        0 s{end:>{TIMELINE_COLUMNS - 3}}"
    yield f"        0 the full snapshot, 1 2 3 its increments, {DISASTER_SIGN} the disaster"


def _cut_table(report: StoryReport, bank: BankFigures) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cut")
    for name in ("at", "cut took", "in flight", "included", "longest commit", "command"):
        table.add_column(name, justify="right", no_wrap=True)
    for cut in report.cuts:
        made = cut.commit.cut
        table.add_row(
            f"{cut.commit.increment} {'increment' if cut.commit.increment else 'full'}",
            seconds_text(cut.windows[0][0] - bank.began),
            _milliseconds(made.seconds),
            str(made.in_flight),
            str(made.included_early),
            _milliseconds(cut.longest_commit_seconds),
            seconds_text(cut.commit.seconds),
        )
    return table


def _latency_lines(report: StoryReport, bank: BankFigures) -> Iterator[str]:
    yield f"longest commit any client saw during a cut   {_milliseconds(report.longest_commit_seconds):>10}"
    yield f"p99 of the commits outside the cuts          {_milliseconds(bank.p99_seconds):>10}"
    yield f"p99 of the commits while no command ran      {_milliseconds(bank.p99_idle_seconds):>10}"
    yield f"longest time without a commit on any shard   {_milliseconds(bank.longest_gap_seconds):>10}"


def _closing_table(report: StoryReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("chapter", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("what it showed")
    shown = _findings(report)
    for chapter in report.chapters:
        table.add_row(chapter.name, seconds_text(chapter.seconds), shown.get(chapter.name, ""))
    table.add_row("total", seconds_text(report.seconds), "", style="bold")
    return table


def _findings(report: StoryReport) -> dict[ChapterName, str]:
    findings = {
        ChapterName.FLEET: f"{SHARDS * (1 + BACKUPS)} PostgreSQL servers on this machine",
        ChapterName.DOWN: "servers stopped, all files deleted",
    }
    if report.cuts:
        rows = report.cuts[0].commit.counts["rows"]
        copies = ", of primaries and of standbys" if report.is_valid else ""
        findings[ChapterName.CREATE] = f"{count_text(rows)} rows{copies}"
        changes = sum(cut.commit.counts["changes"] for cut in report.cuts[1:])
        size = sum(cut.commit.counts["bytes"] for cut in report.cuts[1:])
        findings[ChapterName.INCREMENTS] = f"{count_text(changes)} changes in {size_text(size)}"
    if report.check:
        compared = [snapshot.compared for snapshot in report.check.snapshots]
        transfers = sum(comparison.transactions for comparison in compared)
        findings[ChapterName.CHECK] = f"{report.check.result}: {count_text(transfers)} two-phase transfers compared"
    if report.disaster:
        lost = report.disaster
        findings[ChapterName.DISASTER] = f"{lost.node} lost {count_text(lost.files)} files, {size_text(lost.bytes)}"
    if report.restore:
        findings[ChapterName.RESTORE] = (
            f"increment {report.restore.increment}: {count_text(report.restore.rows)} rows, all shards"
        )
    if report.invariants:
        books = report.invariants
        findings[ChapterName.INVARIANTS] = (
            f"{count_text(books.total_balance)} of {count_text(books.expected_total)} there, "
            f"{len(books.half_present)} torn, {len(books.unexplained_accounts)} unexplained"
        )
    if report.bank:
        total = count_text(report.bank.committed.total)
        findings[ChapterName.BANK] = f"{total} transfers until the disaster, without a pause"
    return findings


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1000:.1f} ms"
