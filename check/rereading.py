"""Read stored objects again, to find those that have been damaged, removed or replaced since a check last read them.

An object whose bytes still have the digest in its commit is the object that was compared, so nothing else is compared
again. The objects to reread are chosen by their places (check/read_times.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct

from cutline.check.cuts import READS_AT_ONCE
from cutline.check.read_times import LastReads, PlaceRange
from cutline.check.report import Findings
from cutline.check.stored_entries import Entry, StoredEntries
from cutline.columns.bytes_column import Ints
from cutline.fleet.progress import Progress
from cutline.spark.amount import Amount
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import TASKS_PER_JOB_MAX, Dealing, NodeShares, SparkSource, if_shared, run_tasks
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.storage.stored_form import stored_form
from cutline.wal.segments.damage import OpensStore, read_listed

# Up to this many bytes, the driver reads the objects: starting Spark takes as long as hashing gigabytes.
READ_HERE_BYTES_MAX = 1 << 30
# With a time limit, the clock is read after this many bytes.
BATCH_BYTES = 256 << 20


class Deadline:
    """The end of the time that a check may take, if there is one; begins when it is made."""

    def __init__(self, seconds_max: float | None) -> None:
        self.seconds_max = seconds_max
        self._began = time.monotonic()

    @property
    def batch_bytes(self) -> int | None:
        """How many bytes to read before the clock is read again; None if there is no end."""
        return None if self.seconds_max is None else BATCH_BYTES

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self.seconds_max is not None and time.monotonic() - self._began >= self.seconds_max


class RereadTask(Struct, frozen=True):
    """An object to read again."""

    entry: Entry
    store: OpensStore


def reread(task: RereadTask) -> ErrorReport | None:
    """Read the object, in pieces, and compare it with its commit; return the problem, if any."""
    entry = task.entry
    try:
        store = task.store.open()
        if not _has_digest(store, entry):
            # This raises the error that describes the damage, and reads again if the answer was cut short.
            read_listed(store, entry.node, entry.key, (entry.size, entry.digest))
    except SnapshotError as error:
        return report_of(error)
    return None


def _has_digest(store: ObjectStore, entry: Entry) -> bool:
    try:
        return stored_form(store).raw.digest(entry.key) == entry.digest
    except ObjectMissingError:
        return False


class Piece(Struct, frozen=True):
    """The entries (by number) in a range of places, which are read together."""

    places: PlaceRange
    numbers: Ints
    size_bytes: int


def pieces_of(
    entries: StoredEntries, increment: int, ranges: Iterable[PlaceRange], bytes_max: int | None
) -> list[Piece]:
    """Divide the entries of the commits up to the increment into pieces, in the order of the ranges.

    A piece has at most `bytes_max` (None: no limit) and TASKS_PER_JOB_MAX objects, unless one place has more.
    """
    numbers = np.flatnonzero(entries.increments <= increment)
    numbers = numbers[np.argsort(entries.places[numbers], kind="stable")]
    places, ends = entries.places[numbers], np.cumsum(entries.sizes[numbers])
    pieces: list[Piece] = []
    for one in ranges:
        at, last = np.searchsorted(places, [one.low, one.high]).tolist()
        low = one.low
        while True:
            end = min(last, at + TASKS_PER_JOB_MAX)
            before = int(ends[at - 1]) if at else 0
            if bytes_max is not None and end > at:
                end = min(end, max(int(np.searchsorted(ends, before + bytes_max, side="right")), at + 1))
            # Objects with the same place stay together.
            end = int(np.searchsorted(places, places[end - 1], side="right")) if at < end < last else end
            high = int(places[end]) if end < last else one.high
            size = int(ends[end - 1]) - before if end > at else 0
            pieces.append(Piece(PlaceRange(low, high), numbers[at:end], size))
            if end >= last:
                break
            at, low = end, high
    return pieces


class Rereading(Struct):
    """Reads objects again until the time is over: the times after that, the amounts, and the amounts that were left.

    Damage is added to `findings`.
    """

    spark: SparkSource
    store: StoreLocation
    findings: Findings
    progress: Progress
    deadline: Deadline
    times: LastReads
    objects: int = 0
    bytes: int = 0
    left_objects: int = 0
    left_bytes: int = 0

    def read(self, entries: StoredEntries, pieces: Sequence[Piece], at: int) -> None:
        """Read the pieces in order, and end between two of them when the time is over.

        `at` is the time, in milliseconds since 1970, after which the objects were read. Raises a task's error if the
        store did not answer that task.
        """
        if total := sum(len(piece.numbers) for piece in pieces):
            self.progress.step("reread objects", total=total, unit="objects")
        is_here = sum(piece.size_bytes for piece in pieces) <= READ_HERE_BYTES_MAX
        for piece in pieces:
            if self.deadline.is_over and len(piece.numbers):
                self.left_objects += len(piece.numbers)
                self.left_bytes += piece.size_bytes
                continue
            tasks = [RereadTask(entry, self.store) for entry in entries.entries(piece.numbers)]
            reports = self._read_here(tasks) if is_here or not tasks else self._read_by_job(tasks)
            problems = [report for report in reports if report is not None]
            for problem in problems:
                self.findings.damage(problem)
            if not problems:
                self.times = self.times.with_part(piece.places, at)
            self.objects += len(tasks)
            self.bytes += piece.size_bytes

    def read_entries(self, entries: Sequence[Entry]) -> None:
        """Read these objects, whatever their places."""
        self.progress.step("read other copies", total=len(entries), unit="objects")
        tasks, size = [RereadTask(entry, self.store) for entry in entries], sum(entry.size for entry in entries)
        reports = self._read_here(tasks) if size <= READ_HERE_BYTES_MAX else self._read_by_job(tasks)
        for problem in reports:
            if problem is not None:
                self.findings.damage(problem)
        self.objects += len(tasks)
        self.bytes += size

    def _read_here(self, tasks: Sequence[RereadTask]) -> list[ErrorReport | None]:
        def read(task: RereadTask) -> ErrorReport | None:
            report = reread(task)
            self.progress.advance(1)
            return report

        with ThreadPoolExecutor(READS_AT_ONCE) as threads:
            return list(threads.map(read, tasks))

    def _read_by_job(self, tasks: Sequence[RereadTask]) -> list[ErrorReport | None]:
        self.spark.begin(ExecutorNeeds(self.store), self.progress, Amount())
        shares = NodeShares[RereadTask].of_tasks(
            self.progress, tasks, lambda task: task.entry.node, lambda task: task.entry.size
        )
        shares.begin()
        dealing = Dealing[RereadTask](lambda task: task.entry.size)
        return run_tasks(self.spark.session(), reread, tasks, shares, dealing, problem_of=if_shared)
