"""The demo's story, chapter by chapter; every figure in it is measured during the run.

The footer is drawn only on a terminal; elsewhere only chapters and results are written. Colour never carries
information alone.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.cli.demo.figures import (
    BankFigures,
    Chapter,
    ChapterName,
    CutWatch,
    Disaster,
    StoryReport,
    TakenCut,
    longest_gap,
    longest_within,
    sparkline,
)
from cutline.cli.demo.stage import CLIENTS, SHARDS, Stage
from cutline.cli.output.displays import StepProgress
from cutline.cli.output.tables import count_text, quantity_text, seconds_text, size_text
from cutline.embedded.bank import ACCOUNTS_PER_SHARD, INITIAL_BALANCE, read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Reading
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.records.operation_records import VALID

REFRESHES_PER_SECOND = 4
PULSE_SECONDS = 0.5
PULSE_POINTS = 24
TEXT_WIDTH_MAX = 100
INDENT = 4


class Screen:
    """The output of the story, and a Progress for its operations; writes nothing if `quiet`."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._began = time.monotonic()
        self._step: StepProgress | None = None
        self._bank: BankWorkload | None = None
        self._pulse: deque[tuple[float, int]] = deque(maxlen=PULSE_POINTS + 1)
        self._spinner = Spinner("dots")
        self._lock = Lock()
        self._live: Live | None = None
        if not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._live = Live(
                get_renderable=self._footer,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._step = self._bank = None
        if self._live:
            self._live.stop()

    def chapter(self, title: str, text: str) -> None:
        """Begin a chapter: write the time, the title, and what happens and why."""
        self._step = None
        when = f"{seconds_text(time.monotonic() - self._began):>8}"
        self._console.print()
        self._console.print(Text.assemble((when, "dim"), "  ", (title, "bold")))
        self._print("", text)

    def result(self, text: str) -> None:
        """Write a result."""
        self._print("✓ ", text, "green")

    def warning(self, text: str) -> None:
        """Write what is wrong or lost."""
        self._print("✗ ", text, "bold red")

    def watch(self, bank: BankWorkload | None) -> None:
        """Show this bank's rate in the footer; None stops that."""
        with self._lock:
            self._pulse.clear()
            self._bank = bank

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Show `name` in the footer as the running step."""
        self._step = StepProgress(name, total, unit)

    def advance(self, done: int) -> None:
        """Advance the running step."""
        with self._lock:
            if self._step is not None:
                self._step.done += done

    def tell(self, reading: Reading) -> None:
        """Ignore it: the footer has the step's own count."""

    def note(self, text: str) -> None:
        """Write a note."""
        self._print("! ", text, "yellow")

    def reached(self, point: str, *, node: str = "") -> None:
        """Ignore the point: the story has its own chapters."""

    def ending(self) -> None:
        """Ignore it: the demo's operations are its own."""

    def _print(self, sign: str, text: str, style: str = "") -> None:
        width = min(self._console.width, TEXT_WIDTH_MAX)
        margin = " " * (INDENT + len(sign))
        lines = textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin)
        self._console.print(Text.assemble((" " * INDENT + sign, style), lines[len(margin) :]))

    def _footer(self) -> Group:
        """The footer, redrawn several times a second."""
        lines = [line for line in (self._step_line(), self._bank_line()) if line is not None]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _step_line(self) -> Text | None:
        step = self._step
        if step is None:
            return None
        sign = self._spinner.render(self._console.get_time())
        amount = f"{count_text(step.done)} of {quantity_text(step.total, step.unit)}" if step.total else ""
        return Text.assemble("  ", str(sign), f" {step.name}  {amount}  ", (seconds_text(step.seconds), "dim"))

    def _bank_line(self) -> Text | None:
        with self._lock:
            bank = self._bank
            if bank is None:
                return None
            now, total = time.monotonic(), bank.committed.total
            if not self._pulse or now - self._pulse[-1][0] >= PULSE_SECONDS:
                self._pulse.append((now, total))
            points = list(self._pulse)
        rates = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairwise(points)]
        now_text = f"{count_text(round(rates[-1]))} a second, " if rates else ""
        pulse = f"{sparkline(rates):>{PULSE_POINTS}}"
        return Text.assemble("    the bank ", (pulse, "cyan"), f" {now_text}{count_text(total)} transfers")


SNAPSHOT = "demo"
INCREMENTS = 3
RESTORED_INCREMENT = 2
LOST_SHARD = 1
WATCH_SECONDS = 1.0
TOTAL = count_text(SHARDS * ACCOUNTS_PER_SHARD * INITIAL_BALANCE)
ACCOUNTS = count_text(SHARDS * ACCOUNTS_PER_SHARD)


def tell_story(screen: Screen, programs: Path | None = None) -> StoryReport:
    """Play the whole story and return the measurements; everything it started is stopped and deleted in any case.

    `programs` is the folder of the servers' programs; None: the wheel's.

    Raises what the operations raise: an interrupted story has no report.
    """
    story = Story(screen)
    with Stage(programs) as stage:
        try:
            story.play(stage)
            screen.chapter("The end", "Everything that ran is stopped, everything that was stored is deleted.")
        except BaseException:
            screen.note("interrupted: stopping and deleting everything")
            raise
        finally:
            ending = time.monotonic()
            screen.watch(None)
            screen.step("stop and delete everything")
    report = story.report
    report.chapters.append(Chapter(ChapterName.DOWN, ending, time.monotonic() - ending))
    report.seconds = time.monotonic() - report.began
    return report


class Story:
    """One run of the story: its screen, and the measurements so far."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.report = StoryReport(time.monotonic())

    def play(self, stage: Stage) -> None:
        """Play all chapters in order."""
        source = self.fleet_up(stage)
        fleet = load_fleet(source.fleet_toml)
        bank = self.bank_opens(stage, source)
        self.full_snapshot(stage, fleet, bank)
        self.increments(stage, fleet, bank)
        self.check(stage, fleet, bank)
        self.disaster(source, bank)
        target = self.restore(stage, fleet)
        self.verdict(target)

    @contextmanager
    def _chapter(self, name: ChapterName, title: str, text: str) -> Iterator[None]:
        self._screen.chapter(title, text)
        began = time.monotonic()
        yield
        self.report.chapters.append(Chapter(name, began, time.monotonic() - began))

    def fleet_up(self, stage: Stage) -> EmbeddedFleet:
        """Start the servers, while Spark starts in the background."""
        text = (
            f"{SHARDS} shards, each a primary and a standby: {2 * SHARDS} real PostgreSQL servers in a temporary "
            "folder. Spark, which copies, checks and restores, starts in the background."
        )
        with self._chapter(ChapterName.FLEET, "A fleet", text):
            self._screen.step("start PostgreSQL")
            source = stage.start_source()
            self._screen.result(
                f"{len(source.nodes)} servers are running: {', '.join(node.id for node in source.nodes)}"
            )
        return source

    def bank_opens(self, stage: Stage, source: EmbeddedFleet) -> BankWorkload:
        """Prepare the fleet for snapshots and start the clients."""
        text = (
            f"{CLIENTS} clients move money between {ACCOUNTS} accounts, half of it from one shard to another by "
            f"two-phase commit. Money only moves: at every moment all accounts together hold {TOTAL}. From here "
            "to the disaster nothing pauses them."
        )
        with self._chapter(ChapterName.BANK, "A bank that never closes", text):
            ready = initialise(load_fleet(source.fleet_toml), self._screen)
            self._screen.result(f"init: {len(ready.nodes)} nodes and the store are ready for snapshots")
            bank = stage.open_bank(source)
            self._screen.watch(bank)
            self._screen.step("start Spark")
            stage.session()
            self._screen.step("measure the bank alone")
            bank.wait(WATCH_SECONDS)
            self._screen.result(f"{count_text(bank.committed.total)} transfers so far")
        return bank

    def full_snapshot(self, stage: Stage, fleet: Fleet, bank: BankWorkload) -> None:
        """Take the full snapshot."""
        text = (
            "Backups of single shards, put together, tear transfers: money has left one and not reached the other. "
            "A snapshot needs a cut, one position in the WAL of every shard, at which all agree about every "
            "transfer. Two small messages to each primary make it: nothing is locked, and nothing waits."
        )
        with self._chapter(ChapterName.CREATE, "A full snapshot while money moves", text):
            self._take(stage, fleet, bank)

    def increments(self, stage: Stage, fleet: Fleet, bank: BankWorkload) -> None:
        """Take the increments, with some transfers before each."""
        text = (
            "An increment is what has changed since the previous cut, up to a new cut: "
            "the fleet can be restored to any of them."
        )
        with self._chapter(ChapterName.INCREMENTS, "Three increments", text):
            for _ in range(INCREMENTS):
                self._screen.step("let money move")
                bank.wait(WATCH_SECONDS)
                self._take(stage, fleet, bank)

    def check(self, stage: Stage, fleet: Fleet, bank: BankWorkload) -> None:
        """Read everything back while the bank works and the servers to restore into start in the background."""
        text = (
            "A backup that nobody has read is only a hope. Check reads every stored object back and compares "
            "primary with standby and shard with shard, down to each row and each transfer."
        )
        # Starting servers earlier would disturb the measured cuts.
        stage.begin_target()
        with self._chapter(ChapterName.CHECK, "Is it whole? The check", text):
            self.report.check = check = check_snapshots(fleet, CheckRequest(SNAPSHOT), stage, self._screen)
            compared = check.snapshots[0].compared
            write = self._screen.result if check.result == VALID else self._screen.warning
            write(
                f"{check.result}: {count_text(compared.objects)} objects, {count_text(compared.rows)} base rows, "
                f"{count_text(compared.changes)} changes, {count_text(compared.transactions)} two-phase transfers "
                f"compared in {seconds_text(check.seconds)}"
            )
            _check_running(bank)

    def disaster(self, source: EmbeddedFleet, bank: BankWorkload) -> None:
        """Delete one shard's data under the running bank."""
        text = (
            "One primary is killed and its data directory deleted, with transfers in progress on it. A standby "
            "can take over for one lost server; it can't undo a wrong DELETE or a lost site. Restoring can, and "
            "must bring all shards back to the same moment."
        )
        with self._chapter(ChapterName.DISASTER, "Disaster", text):
            lost = source.primaries[LOST_SHARD]
            sizes = [path.lstat().st_size for path in lost.data_directory.rglob("*") if path.is_file()]
            at = time.monotonic()
            source.delete_node_data(lost)
            self.report.disaster = Disaster(lost.id, len(sizes), sum(sizes), at)
            self._screen.warning(f"{lost.id} is gone: {count_text(len(sizes))} files, {size_text(sum(sizes))}")
            bank.stop(abandon=True)
            self._screen.watch(None)
            self._measure(bank, at)
            self._screen.warning(f"the bank stopped after {count_text(bank.committed.total)} transfers")

    def restore(self, stage: Stage, fleet: Fleet) -> EmbeddedFleet:
        """Restore into the second fleet."""
        text = (
            f"All shards as they were at increment {RESTORED_INCREMENT}, into {SHARDS} new, empty servers: an earlier "
            "moment, although increment 3 was taken later. Base copy and increments are folded into "
            "one load; nothing is replayed."
        )
        with self._chapter(ChapterName.RESTORE, f"Restore to increment {RESTORED_INCREMENT}", text):
            self._screen.step("wait for the new servers")
            target = stage.target()
            request = RestoreRequest(SNAPSHOT, RESTORED_INCREMENT)
            plan = plan_restore(fleet, load_fleet(target.fleet_toml), request)
            self.report.restore = restored = restore_fleet(plan, stage, self._screen)
            rows, databases = count_text(restored.rows), len(restored.nodes)
            self._screen.result(f"{rows} rows in {databases} databases, {seconds_text(restored.seconds)}")
        return target

    def verdict(self, target: EmbeddedFleet) -> None:
        """Compute the bank's invariants on the restored shards."""
        text = (
            "Three questions that only a consistent state answers with yes: is all the money there, is "
            "every transfer on both of its shards or on neither, does every balance follow from its transfers?"
        )
        with self._chapter(ChapterName.INVARIANTS, "Do the books balance?", text):
            self._screen.step("compute the invariants")
            self.report.invariants = found = read_invariants(target.dsns())
            write = self._screen.result if found.hold else self._screen.warning
            write(
                f"sum of all balances: {count_text(found.total_balance)}, initially {count_text(found.expected_total)}"
            )
            write(f"transfers on only one of their two shards: {count_text(len(found.half_present))}")
            write(f"balances not explained by transfers: {count_text(len(found.unexplained_accounts))}")

    def _take(self, stage: Stage, fleet: Fleet, bank: BankWorkload) -> None:
        """Take the full snapshot, or its next increment."""
        create = create_increment if self.report.cuts else create_full
        watched, began = CutWatch(self._screen), time.monotonic()
        commit = create(fleet, CreateRequest(SNAPSHOT), stage, watched)
        command, windows = (began, time.monotonic()), watched.windows()
        cut = TakenCut(commit, command, windows, longest_within(bank.latencies, windows))
        self.report.cuts.append(cut)
        made, counts = commit.cut, commit.counts
        rows = f"{count_text(counts['rows'])} rows, " if counts["rows"] else ""
        self._screen.result(
            f"{cut.name}: {rows}{count_text(counts['changes'])} changes, {size_text(counts['bytes'])}, "
            f"{seconds_text(commit.seconds)}; its cut took {made.seconds * 1000:.1f} ms with {made.in_flight} "
            f"global transaction{'' if made.in_flight == 1 else 's'} in flight"
        )
        _check_running(bank)

    def _measure(self, bank: BankWorkload, ended: float) -> None:
        """Compute the cost of the cuts from the bank's log, once every transaction in it has ended."""
        report, log = self.report, bank.latencies
        report.cuts = [replace(cut, longest_commit_seconds=longest_within(log, cut.windows)) for cut in report.cuts]
        entries = log.entries()
        ends = sorted(end for end in (start + seconds for start, seconds in entries) if end <= ended)
        began = min((start for start, _ in entries), default=ended)
        checks = [(one.began, one.began + one.seconds) for one in report.chapters if one.name is ChapterName.CHECK]
        report.bank = BankFigures(
            clients=bank.clients,
            began=began,
            ended=ended,
            committed=bank.committed,
            p99_seconds=log.p99_seconds([window for cut in report.cuts for window in cut.windows]),
            p99_idle_seconds=log.p99_seconds([*(cut.command for cut in report.cuts), *checks]),
            longest_gap_seconds=longest_gap(ends, began),
            ends=ends,
        )


def _check_running(bank: BankWorkload) -> None:
    """Raise the error that ended the bank, if any: only the disaster may end it."""
    if not bank.wait(0):
        bank.stop()
