"""A check that reads new increments, and rests on the record of an earlier check for all other objects.

New increments are checked as in any check (check/new_part.py). For the other objects, a listing shows whether each is
there, and each check rereads a part of them, so that all are reread within a bounded time. The result is conclusive
only if all objects that it rests on were read within that time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import numpy as np
from msgspec import Struct

from cutline.check.copies import Copies
from cutline.check.earlier_check import EarlierCheck, RecordedChecks, find_earlier, new_record
from cutline.check.new_part import NewPart
from cutline.check.read_times import (
    LastReads,
    PlaceRange,
    due_ranges,
    due_share,
    milliseconds_of,
    moment_of,
    subset_range,
)
from cutline.check.report import Findings, RestsOn, Skipped, SnapshotReport
from cutline.check.rereading import Deadline, Rereading, pieces_of
from cutline.check.stored_entries import StoredEntries, compare_listing
from cutline.check.uncompared import note_uncompared
from cutline.columns.bytes_column import Ints
from cutline.fleet.progress import Progress
from cutline.fleet.record import Time
from cutline.fleet.units import duration_text, size_text
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import PLACES
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.location import StoreLocation

# With a time limit, new increments are checked in parts of about this many bytes.
PART_BYTES = 256 << 20


class ChainCheck(Struct, frozen=True):
    """The check of one chain, which was read at `moment` or later.

    `subset` is as in CheckRequest. `store_id` identifies the store (check.earlier_check.store_digest). Everything that
    the result rests on must have been read in the last `reread_seconds`. `known_as` maps further names of shards, as
    distributed transactions have them, to their primaries.
    """

    chain: Chain
    location: StoreLocation
    findings: Findings
    spark: SparkSource
    progress: Progress
    deadline: Deadline
    subset: tuple[int, int] | None
    moment: datetime
    store_id: str
    reread_seconds: float
    known_as: Mapping[str, str]

    @property
    def now(self) -> int:
        """The time of the check in milliseconds since 1970: it reads all objects after that."""
        return milliseconds_of(self.moment)

    @property
    def report(self) -> SnapshotReport:
        """The report under construction."""
        return self.findings.report


def record_full(check: ChainCheck) -> None:
    """After everything was read and compared, note that later checks may rest on this check, if nothing is wrong."""
    if check.report.is_complete:
        times = LastReads.of_full(check.chain.last.increment, check.now)
        compared = "", Time.of(moment_of(check.now))
        check.report.read = new_record(check.chain, check.store_id, times, compared, check.now)


def rest_on_record(check: ChainCheck, recorded: RecordedChecks, check_part: Callable[[NewPart], None]) -> bool:
    """Check new increments with `check_part`, and reread the objects that are due, if there is a record to rest on.

    Without a record, returns False and reports the reason: everything must be read. If the check is limited to a subset
    or a time, reads that much instead, and the result is inconclusive.
    """
    store, chain, report = check.location.open(), check.chain, check.report
    checks = recorded.for_snapshot(chain.name)
    earlier, why = find_earlier(chain, checks, store, check.store_id, check.moment)
    is_limited = check.subset is not None or check.deadline.seconds_max is not None
    if earlier is None and not is_limited:
        _note_unused(check, why)
        return False
    check.progress.step("list objects")
    # The objects of new increments will be read, which finds more.
    entries, missing = compare_listing(store, chain, earlier.increment if earlier else chain.last.increment)
    if earlier and (count := int(np.count_nonzero(entries.were_replaced(earlier.times, earlier.increment)))):
        why = f"some objects ({count:,}) were stored after check {earlier.check.operation} had read them"
        earlier = None
    if earlier is None:
        _note_unused(check, why)
        if is_limited:
            report.conflicts += missing
            _read_unproven(check, entries, why)
        return is_limited
    report.conflicts += missing
    _Resting(check, entries, earlier).run(check_part)
    return True


def _note_unused(check: ChainCheck, why: str) -> None:
    check.report.unused_records = why


class _Resting(Struct, frozen=True):
    """A check of the increments since an `earlier` check; `entries` are those of the whole chain."""

    check: ChainCheck
    entries: StoredEntries
    earlier: EarlierCheck

    def run(self, check_part: Callable[[NewPart], None]) -> None:
        """Check new increments, reread the objects that are due, and report the record on which the result rests."""
        report, last = self.check.report, self.check.chain.last.increment
        reached = self._check_new(check_part)
        times = self.earlier.times
        if reached > self.earlier.increment:
            times = times.with_increments(reached, self.check.now)
        is_checked = self.entries.increments <= reached
        held = _Held(
            self.entries.places[is_checked], self.entries.increments[is_checked], self.entries.sizes[is_checked]
        )
        rereading = self._reread(times, held, reached)
        after = held.last_read(rereading.times)
        oldest = int(after.min(initial=self.check.now))
        report.rests_on = self._rests_on(rereading, held, after, oldest)
        # Until here, only what has no second copy is skipped: all else in the new record has been read and compared.
        if report.is_complete:
            compared = self.earlier.compared_by, self.earlier.read.compared_at
            chain = self.check.chain.up_to(reached)
            report.read = new_record(chain, self.check.store_id, rereading.times, compared, oldest)
        report.increment = reached
        report.gaps = tuple(gap for gap in report.gaps if self.earlier.increment < gap.increment <= reached)
        if reached < last:
            what = f"increments {reached + 1} to {last}" if reached + 1 < last else f"increment {last}"
            report.skipped.append(Skipped(what, self._why_ended))
        is_overdue = after < self._oldest_allowed
        if overdue := int(np.count_nonzero(is_overdue)):
            what = f"{overdue:,} objects ({size_text(int(held.sizes[is_overdue].sum()))})"
            bound = duration_text(self.check.reread_seconds)
            why = f"they have not been read since {moment_of(oldest):%Y-%m-%d %H:%M} UTC, which is over {bound} ago"
            report.skipped.append(Skipped(what, f"{why}; see [check] reread"))

    def _check_new(self, check_part: Callable[[NewPart], None]) -> int:
        """Check the new increments, and return the last that was checked before the time was over."""
        chain, report, reached = self.check.chain, self.check.report, self.earlier.increment
        for end in ends_of_parts(chain, reached, is_limited=self.check.deadline.seconds_max is not None):
            check_part(NewPart(chain.up_to(end), reached))
            reached = end
            if report.conflicts or self.check.deadline.is_over:
                break
        # Neither the earlier check nor this one has compared it: the verdict is no better than that of a full check.
        note_uncompared(chain.up_to(reached), self.check.findings)
        return reached

    @property
    def _why_ended(self) -> str:
        if self.check.report.conflicts:
            return "an earlier increment has conflicts"
        return f"--max-seconds {self.check.deadline.seconds_max:g} ended the check"

    @property
    def _oldest_allowed(self) -> int:
        return self.check.now - round(self.check.reread_seconds * 1000)

    def _reread(self, times: LastReads, held: _Held, reached: int) -> Rereading:
        """Reread the subset, or the objects that are due; nothing if there are conflicts already."""
        check = self.check
        rereading = Rereading(check.spark, check.location, check.findings, check.progress, check.deadline, times)
        if check.report.conflicts:
            return rereading
        if check.subset:
            ranges = [subset_range(*check.subset)]
        else:
            is_overdue = held.last_read(times) < self._oldest_allowed
            overdue = np.sort(held.places[is_overdue])
            elapsed_seconds = (check.now - self.earlier.times.newest) / 1000
            ranges = due_ranges(
                times,
                due_share(elapsed_seconds, check.reread_seconds),
                lambda one: bool(np.diff(np.searchsorted(overdue, [one.low, one.high])).any()),
            )
        rereading.read(self.entries, pieces_of(self.entries, reached, ranges, check.deadline.batch_bytes), check.now)
        return rereading

    def _rests_on(self, rereading: Rereading, held: _Held, after: Ints, oldest: int) -> RestsOn:
        is_unread = after < self.check.now
        return RestsOn(
            operation=self.earlier.check.operation,
            ended_at=self.earlier.check.ended_at,
            compared_by=self.earlier.compared_by,
            compared_at=self.earlier.read.compared_at,
            oldest_read_at=Time.of(moment_of(oldest)),
            reread_seconds=self.check.reread_seconds,
            objects=int(np.count_nonzero(is_unread)),
            bytes=int(held.sizes[is_unread].sum()),
            reread_objects=rereading.objects,
            reread_bytes=rereading.bytes,
            left_objects=rereading.left_objects,
            left_bytes=rereading.left_bytes,
        )


class _Held(Struct, frozen=True):
    """The objects that the result is about: place, increment and size of each."""

    places: Ints
    increments: Ints
    sizes: Ints

    def last_read(self, times: LastReads) -> Ints:
        return times.last_read(self.places, self.increments)


def ends_of_parts(chain: Chain, after: int, *, is_limited: bool) -> list[int]:
    """Divide the increments after `after` into parts to check, and return the last increment of each part.

    If the time `is_limited`, a part ends with the increment that brings it to PART_BYTES, but not while a copy is
    absent that comes back: the next part would have the copy's WAL of that time, and not that of the other copies. Nor
    does it end where the rest can't be checked by itself, for the same reasons as after an earlier check.
    """
    last = chain.last.increment
    if after == last or not is_limited:
        return [last] if after < last else []
    ends: list[int] = []
    size = 0
    commits = chain.commits_after(after)
    awaited, copies = _increments_without_a_copy_that_comes_back(commits), Copies.of(chain)
    for commit in commits:
        size += commit.counts.get("bytes", 0)
        is_full = size >= PART_BYTES and commit.increment not in awaited
        if commit.increment == last or (is_full and not NewPart(chain, commit.increment).problem(copies)):
            ends.append(commit.increment)
            size = 0
    return ends


def _increments_without_a_copy_that_comes_back(commits: Sequence[Commit]) -> set[int]:
    found: set[int] = set()
    stays_absent = set(commits[-1].absent)
    for commit in reversed(commits):
        stays_absent &= commit.absent.keys()
        if commit.absent.keys() - stays_absent:
            found.add(commit.increment)
    return found


def _read_unproven(check: ChainCheck, entries: StoredEntries, why: str) -> None:
    """Without a record, read the subset, or as much as there is time for; the result is inconclusive."""
    report, increment = check.report, check.chain.last.increment
    report.is_partial = True
    # Begin anywhere: no record says which objects the last such check has read.
    begin = secrets.randbelow(PLACES)
    ranges = [subset_range(*check.subset)] if check.subset else [PlaceRange(begin, PLACES), PlaceRange(0, begin)]
    times = LastReads.of_full(increment, 0)
    rereading = Rereading(check.spark, check.location, check.findings, check.progress, check.deadline, times)
    rereading.read(entries, pieces_of(entries, increment, ranges, check.deadline.batch_bytes), check.now)
    check.findings.count(objects=rereading.objects, size_bytes=rereading.bytes)
    to_make_one = f"to have one: snapshot check {check.chain.name}"
    if left := len(entries.sizes) - rereading.objects:
        size = size_text(int(entries.sizes.sum()) - rereading.bytes)
        report.skipped.append(Skipped(f"contents of {left:,} objects ({size})", why))
    report.skipped.append(Skipped("comparison of copies, cuts and transactions", f"{why}; {to_make_one}"))
