"""The demo's story, chapter by chapter; every figure in it is measured during the run.

Nothing is conveyed by colour alone.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
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
)
from cutline.cli.demo.stage import CLIENTS, SHARDS, Stage
from cutline.cli.output.tables import count_text, seconds_text, size_text
from cutline.embedded.bank import ACCOUNTS_PER_SHARD, INITIAL_BALANCE, read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.records.operation_records import VALID
from cutline.spark.on_demand import SparkOnDemand
from cutline.spark.spark_jobs import SparkSource

TEXT_WIDTH_MAX = 100
INDENT = 4


class StoryLines(Silent):
    """Writes the story and the notes from its operations to stderr, line by line; writes nothing if `quiet`."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._began = time.monotonic()

    def chapter(self, title: str, text: str) -> None:
        """Begin a chapter: write the time, the title, and an explanation."""
        when = f"{seconds_text(time.monotonic() - self._began):>8}"
        self._console.print()
        self._console.print(Text.assemble((when, "dim"), "  ", (title, "bold")))
        self._print("", text)

    def result(self, text: str) -> None:
        """Write a result."""
        self._print("✓ ", text, "green")

    def warning(self, text: str) -> None:
        """Write a warning: something is wrong or lost."""
        self._print("✗ ", text, "bold red")

    def note(self, text: str) -> None:
        self._print("! ", text, "yellow")

    def _print(self, sign: str, text: str, style: str = "") -> None:
        width = min(self._console.width, TEXT_WIDTH_MAX)
        margin = " " * (INDENT + len(sign))
        lines = textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin)
        self._console.print(Text.assemble((" " * INDENT + sign, style), lines[len(margin) :]))


SNAPSHOT = "demo"
INCREMENTS = 3
RESTORED_INCREMENT = 2
LOST_SHARD = 1
WATCH_SECONDS = 1.0
TOTAL = count_text(SHARDS * ACCOUNTS_PER_SHARD * INITIAL_BALANCE)
ACCOUNTS = count_text(SHARDS * ACCOUNTS_PER_SHARD)


def tell_story(lines: StoryLines, programs: Path | None = None) -> StoryReport:
    """Play the whole story and return the measurements. Everything that it started is always stopped and deleted.

    `programs` is the folder with the servers' programs; None means the wheel's programs. Raises the errors of the
    operations: an interrupted story has no report.
    """
    story = Story(lines)
    with Stage(programs) as stage:
        try:
            story.play(stage)
            lines.chapter("The end", "Everything that was started is stopped; everything that was stored is deleted.")
        except BaseException:
            lines.note("interrupted: stopping and deleting everything")
            raise
        finally:
            ending = time.monotonic()
    report = story.report
    report.chapters.append(Chapter(ChapterName.DOWN, ending, time.monotonic() - ending))
    report.seconds = time.monotonic() - report.began
    return report


class Story:
    """One run of the story: its output, and the measurements so far."""

    def __init__(self, lines: StoryLines) -> None:
        self._lines = lines
        self.report = StoryReport(time.monotonic())

    def play(self, stage: Stage) -> None:
        """Play all chapters in order."""
        source = self.fleet_up(stage)
        fleet = load_fleet(source.fleet_toml)
        bank = self.bank_opens(stage, source)
        with SparkOnDemand(fleet, "demo") as spark:
            self.full_snapshot(spark, fleet, bank)
            self.increments(spark, fleet, bank)
            # Starting servers earlier would disturb the measured cuts.
            stage.begin_target()
            self.check(spark, fleet, bank)
            self.disaster(source, bank)
            target = self.restore(stage, spark, fleet)
        self.verdict(target)

    @contextmanager
    def _chapter(self, name: ChapterName, title: str, text: str) -> Iterator[None]:
        self._lines.chapter(title, text)
        began = time.monotonic()
        yield
        self.report.chapters.append(Chapter(name, began, time.monotonic() - began))

    def fleet_up(self, stage: Stage) -> EmbeddedFleet:
        """Start the servers."""
        servers = f"{2 * SHARDS} real PostgreSQL servers in a temporary folder"
        text = f"{SHARDS} shards, each a primary and a standby: {servers}."
        with self._chapter(ChapterName.FLEET, "A fleet", text):
            source = stage.start_source()
            self._lines.result(
                f"{len(source.nodes)} servers are running: {', '.join(node.id for node in source.nodes)}"
            )
        return source

    def bank_opens(self, stage: Stage, source: EmbeddedFleet) -> BankWorkload:
        """Prepare the fleet for snapshots and start the clients."""
        text = (
            f"{CLIENTS} clients move money between {ACCOUNTS} accounts; half of the transfers cross shards by "
            f"two-phase commit. Money only moves: at every moment, all accounts together hold {TOTAL}. From here "
            "to the disaster, nothing pauses the clients."
        )
        with self._chapter(ChapterName.BANK, "A bank that never closes", text):
            ready = initialise(load_fleet(source.fleet_toml), self._lines)
            self._lines.result(f"init: {len(ready.nodes)} nodes and the store are ready for snapshots")
            bank = stage.open_bank(source)
            bank.wait(WATCH_SECONDS)
            self._lines.result(f"{count_text(bank.committed.total)} transfers so far")
        return bank

    def full_snapshot(self, spark: SparkSource, fleet: Fleet, bank: BankWorkload) -> None:
        """Take the full snapshot."""
        text = (
            "Combining backups of single shards tears transfers: money has left one shard and not reached the other. "
            "A snapshot needs a cut: one position in the WAL of every shard, at which all agree about every "
            "transfer. Two small messages to each primary make the cut. Nothing is locked, and nothing waits."
        )
        with self._chapter(ChapterName.CREATE, "A full snapshot while money moves", text):
            self._take(spark, fleet, bank)

    def increments(self, spark: SparkSource, fleet: Fleet, bank: BankWorkload) -> None:
        """Take the increments, and let some transfers happen before each."""
        text = (
            "An increment contains the changes from the previous cut to a new cut. "
            "The fleet can be restored to any of the cuts."
        )
        with self._chapter(ChapterName.INCREMENTS, "Three increments", text):
            for _ in range(INCREMENTS):
                bank.wait(WATCH_SECONDS)
                self._take(spark, fleet, bank)

    def check(self, spark: SparkSource, fleet: Fleet, bank: BankWorkload) -> None:
        """Read everything back while the bank is running."""
        text = (
            "A backup that nobody has read back is only a hope. The check reads every stored object and compares "
            "primary with standby and shard with shard, down to each row and each transfer."
        )
        with self._chapter(ChapterName.CHECK, "The check: is it complete?", text):
            self.report.check = check = check_snapshots(fleet, CheckRequest(SNAPSHOT), spark, self._lines)
            compared = check.snapshots[0].compared
            write = self._lines.result if check.result == VALID else self._lines.warning
            write(
                f"{check.result}: {count_text(compared.objects)} objects, {count_text(compared.rows)} base rows, "
                f"{count_text(compared.changes)} changes, {count_text(compared.transactions)} two-phase transfers "
                f"compared in {seconds_text(check.seconds)}"
            )
            _check_running(bank)

    def disaster(self, source: EmbeddedFleet, bank: BankWorkload) -> None:
        """Delete one shard's data while the bank is running."""
        text = (
            "One primary is killed and its data directory deleted, with transfers in progress on it. A standby "
            "can take over for a lost server, but it can't undo a wrong DELETE or the loss of a site. A restore can, "
            "and it must bring all shards back to the same moment."
        )
        with self._chapter(ChapterName.DISASTER, "Disaster", text):
            lost = source.primaries[LOST_SHARD]
            sizes = [path.lstat().st_size for path in lost.data_directory.rglob("*") if path.is_file()]
            at = time.monotonic()
            source.delete_node_data(lost)
            self.report.disaster = Disaster(lost.id, len(sizes), sum(sizes), at)
            self._lines.warning(f"{lost.id} is gone: {count_text(len(sizes))} files, {size_text(sum(sizes))}")
            bank.stop(abandon=True)
            self._measure(bank, at)
            self._lines.warning(f"the bank stopped after {count_text(bank.committed.total)} transfers")

    def restore(self, stage: Stage, spark: SparkSource, fleet: Fleet) -> EmbeddedFleet:
        """Restore into the second fleet."""
        text = (
            f"All shards are restored to increment {RESTORED_INCREMENT}, into {SHARDS} new, empty servers: an earlier "
            "moment, although increment 3 was taken later. The base copy and the increments are folded into "
            "one load; nothing is replayed."
        )
        with self._chapter(ChapterName.RESTORE, f"Restore to increment {RESTORED_INCREMENT}", text):
            target = stage.target()
            request = RestoreRequest(SNAPSHOT, RESTORED_INCREMENT)
            plan = plan_restore(fleet, load_fleet(target.fleet_toml), request)
            self.report.restore = restored = restore_fleet(plan, spark, self._lines)
            rows, databases = count_text(restored.rows), len(restored.nodes)
            self._lines.result(f"{rows} rows in {databases} databases, {seconds_text(restored.seconds)}")
        return target

    def verdict(self, target: EmbeddedFleet) -> None:
        """Compute the bank's invariants on the restored shards."""
        text = (
            "Only a consistent state answers yes to three questions. Is all the money there? Is "
            "every transfer on both of its shards or on neither? Does every balance follow from its transfers?"
        )
        with self._chapter(ChapterName.INVARIANTS, "Do the books balance?", text):
            self.report.invariants = invariants = read_invariants(target.dsns())
            write = self._lines.result if invariants.hold else self._lines.warning
            write(
                f"sum of all balances: {count_text(invariants.total_balance)},"
                f" initially {count_text(invariants.expected_total)}"
            )
            write(f"transfers on only one of their two shards: {count_text(len(invariants.half_present))}")
            write(f"balances not explained by transfers: {count_text(len(invariants.unexplained_accounts))}")

    def _take(self, spark: SparkSource, fleet: Fleet, bank: BankWorkload) -> None:
        create = create_increment if self.report.cuts else create_full
        watched, began = CutWatch(self._lines), time.monotonic()
        commit = create(fleet, CreateRequest(SNAPSHOT), spark, watched)
        command, windows = (began, time.monotonic()), watched.windows()
        cut = TakenCut(commit, command, windows, longest_within(bank.latencies, windows))
        self.report.cuts.append(cut)
        made, counts = commit.cut, commit.counts
        rows = f"{count_text(counts['rows'])} rows, " if counts["rows"] else ""
        self._lines.result(
            f"{cut.name}: {rows}{count_text(counts['changes'])} changes, {size_text(counts['bytes'])}, "
            f"{seconds_text(commit.seconds)}; its cut took {made.seconds * 1000:.1f} ms with {made.in_flight} "
            f"global transaction{'' if made.in_flight == 1 else 's'} in flight"
        )
        _check_running(bank)

    def _measure(self, bank: BankWorkload, ended: float) -> None:
        """Compute the cost of the cuts from the bank's log. Every transaction in the log must have ended."""
        report, log = self.report, bank.latencies
        report.cuts = [replace(cut, longest_commit_seconds=longest_within(log, cut.windows)) for cut in report.cuts]
        entries = log.entries()
        ends = sorted(end for end in (start + seconds for start, seconds in entries) if end <= ended)
        began = min((start for start, _ in entries), default=ended)
        checks = [
            (chapter.began, chapter.began + chapter.seconds)
            for chapter in report.chapters
            if chapter.name is ChapterName.CHECK
        ]
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
