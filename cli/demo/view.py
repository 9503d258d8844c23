"""The demo's measurements, as tables for people and as one document for scripts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cutline.cli.demo.fleet import invariants_document
from cutline.cli.demo.report import BankFigures, ChapterName, StoryReport, TakenCut
from cutline.cli.demo.stage import BACKUPS, SHARDS
from cutline.cli.output.exit_codes import INCONCLUSIVE
from cutline.cli.output.restore_report import document_of as restore_document
from cutline.cli.output.tables import count_text, seconds_text, size_text
from cutline.embedded.bank import ACCOUNTS_PER_SHARD

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One character per value, scaled to the highest; a space for zero."""
    highest = max(values, default=0.0)
    return "".join(
        " " if value <= 0 else LEVELS[min(int(value / highest * len(LEVELS)), len(LEVELS) - 1)] for value in values
    )


def rates(moments: Sequence[float], began: float, ended: float, columns: int) -> list[float]:
    """The number of `moments` (ascending) per second in each of `columns` equal parts of the time."""
    width = (ended - began) / columns
    edges = [bisect_left(moments, began + width * column) for column in range(columns + 1)]
    return [(after - before) / width for before, after in pairwise(edges)]


def marks(places: Mapping[str, float], began: float, ended: float, columns: int) -> str:
    """A line of `columns` characters with each sign at its moment; on a collision the sign moves to the nearest gap."""
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
    """The command's JSON."""
    bank, disaster = report.bank, report.disaster
    return {
        "schema": SCHEMA,
        "holds": report.holds,
        "seconds": round(report.seconds, 3),
        "chapters": [{"name": one.name, "seconds": round(one.seconds, 3)} for one in report.chapters],
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
    """The summary for people."""
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
    """The bank's rate over time, and the cuts below it."""
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
    """What the clients observed."""
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
    for one in report.chapters:
        table.add_row(one.name, seconds_text(one.seconds), shown.get(one.name, ""))
    table.add_row("all of it", seconds_text(report.seconds), "", style="bold")
    return table


def _findings(report: StoryReport) -> dict[ChapterName, str]:
    """The result of each chapter, by its name."""
    found = {
        ChapterName.FLEET: f"{SHARDS * (1 + BACKUPS)} PostgreSQL servers on this machine",
        ChapterName.DOWN: "servers and Spark stopped, all files deleted",
    }
    if report.cuts:
        rows = report.cuts[0].commit.counts["rows"]
        copies = ", of primaries and of standbys" if report.is_valid else ""
        found[ChapterName.CREATE] = f"{count_text(rows)} rows{copies}"
        changes = sum(cut.commit.counts["changes"] for cut in report.cuts[1:])
        size = sum(cut.commit.counts["bytes"] for cut in report.cuts[1:])
        found[ChapterName.INCREMENTS] = f"{count_text(changes)} changes in {size_text(size)}"
    if report.check:
        compared = [one.compared for one in report.check.snapshots]
        transfers = sum(one.transactions for one in compared)
        found[ChapterName.CHECK] = f"{report.check.result}: {count_text(transfers)} two-phase transfers compared"
    if report.disaster:
        lost = report.disaster
        found[ChapterName.DISASTER] = f"{lost.node} lost {count_text(lost.files)} files, {size_text(lost.bytes)}"
    if report.restore:
        found[ChapterName.RESTORE] = (
            f"increment {report.restore.increment}: {count_text(report.restore.rows)} rows, all shards"
        )
    if report.invariants:
        books = report.invariants
        found[ChapterName.INVARIANTS] = (
            f"{count_text(books.total_balance)} of {count_text(books.expected_total)} there, "
            f"{len(books.half_present)} torn, {len(books.unexplained_accounts)} unexplained"
        )
    if report.bank:
        total = count_text(report.bank.committed.total)
        found[ChapterName.BANK] = f"{total} transfers until the disaster, no pause"
    return found


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1000:.1f} ms"
