"""Drain a node's slot into its archive: a task of the drain job, run in an executor.

The steps for each chunk are: peek, decode, create segments, verify that the store is still the fleet's, advance the
slot. The first three overlap. If a drain dies, the next drain decodes the same WAL again or continues after the last
stored segment, so nothing is lost or archived twice. If Spark repeats a task while its first attempt is still running,
the second attempt continues after the segments that the first has stored. A transaction that is too large for one
segment is stored in several segments; the slot is advanced after the last of them.

Nothing is stored for an idle node, whose WAL since the end of its archive contains only markers, and its slot is not
advanced: the next drain reads this WAL again. So the rule that a slot never passes the end of the archive protects idle
nodes, too. An idle node's WAL is stored once it exceeds IDLE_BYTES_MAX or an eighth of the node's limit on retained
WAL.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
from msgspec import UnsetType
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import from_arrow, from_list
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import NEXT_COPIES
from cutline.nodes.connections import connect, unreachable_error
from cutline.nodes.encodings import Texts, texts_of
from cutline.nodes.sessions import promoted_error
from cutline.nodes.timelines import current_timeline
from cutline.storage.errors import SnapshotError, UnreachableError, report_of
from cutline.storage.rate import RateLimit
from cutline.storage.store import ObjectExistsError, ObjectStore
from cutline.wal.decoding.decoder import Decoded, Decoder
from cutline.wal.decoding.pgoutput import DecodingError
from cutline.wal.drain.drain_task import DrainBusyError, DrainReport, DrainTask, archive_busy_error
from cutline.wal.drain.lineage import (
    KnownMarker,
    check_archived_history,
    check_ends,
    check_markers,
    check_resumed,
    diverged_error,
    ends_of_events,
    ends_of_messages,
    first_begun,
    markers_of_events,
    markers_of_messages,
)
from cutline.wal.drain.message_stream import AHEAD_BYTES, BackgroundCalls, Batches, read_ahead
from cutline.wal.drain.peek import (
    PublicationMissingError,
    SlotInUseError,
    WalRemovedError,
    peek,
    reads_with_psycopg,
    slot_in_use,
)
from cutline.wal.drain.prepare_record import RolledBack, find_undecodable
from cutline.wal.drain.replay import check_replayed
from cutline.wal.drain.slots import SlotLostError, advance_slot, check_slot, slot_state
from cutline.wal.drain.unprintable import find_unprintable
from cutline.wal.segments.archive import (
    ArchivedSegment,
    OpenTransaction,
    Segment,
    SegmentRange,
    archive_prefix,
    check_contiguous,
)
from cutline.wal.segments.own_store import check_own_store
from cutline.wal.segments.segments import MARKER, SEGMENT_SCHEMA, create_segment, list_unlisted, read_events

FIRST_CHUNK_MESSAGES = 200_000
CHUNK_MESSAGES_MIN, CHUNK_MESSAGES_MAX = 10_000, 1_000_000
CHUNK_BYTES = 256 << 20
# The size of a segment's rows in memory. Creating the segment takes several times as much memory.
SEGMENT_BYTES_MAX = 40 << 20
# While rows larger than this are being stored, no other rows are held.
LARGE_BYTES = SEGMENT_BYTES_MAX + AHEAD_BYTES
# Small enough that even a large idle fleet is drained without Spark (wal/drain/lags.py). A WAL file is four times as
# large, so the server retains barely more for a slot that is not advanced.
IDLE_BYTES_MAX = 4 << 20
# More than any range of WAL has.
PEEKED_MESSAGES_MAX = (1 << 31) - 1
SLOT_IN_USE_POLL_SECONDS = 0.05
SLOT_IN_USE_SECONDS_MAX = 20.0
# A promotion renames and copies WAL files, and an operator may be putting one back.
REMOVED_AGAIN_SECONDS = 3.0


@dataclass(slots=True)
class _Archive:
    """One node's archive, which this drain extends."""

    task: DrainTask
    store: ObjectStore
    segments: list[ArchivedSegment] = field(default_factory=list)
    ignored: int = 0
    dropped: set[int] = field(default_factory=set)
    grown_at: float = 0.0
    idle: pa.Table | None = None
    pace: RateLimit = field(init=False)

    def __post_init__(self) -> None:
        self.pace = RateLimit(self.task.node.read_bytes_per_second)

    @property
    def prefix(self) -> str:
        return archive_prefix(self.task.snapshot, self.task.node.id, self.task.archive)

    @property
    def last(self) -> Segment | None:
        if self.segments:
            return self.segments[-1].segment
        return self.task.last

    @property
    def number(self) -> int:
        """The number of the last segment, or 0 if there is none."""
        return self.last.number if self.last else 0

    @property
    def through(self) -> Lsn:
        return self.last.through if self.last else self.task.base

    @property
    def open(self) -> OpenTransaction | None:
        return self.last.open if self.last else None

    def read_new_segments(self) -> None:
        """Read the segments that other processes have stored after the last known segment."""
        # Read segments by key: a listing may lag behind, and then a slot ahead of the listed archive would look like
        # lost WAL.
        number, through, before = self.number, self.through, len(self.segments)
        read_before = {segment.segment.key: segment for segment in self.task.read_before}
        for segment in list_unlisted(self.store, self.task.node.id, self.prefix, number, read_before):
            if segment.segment.number > self.task.planned and segment.definitions != self.task.unlisted_definitions:
                raise archive_busy_error(self.task)
            self.segments.append(segment)
            self.grown_at = time.monotonic()
        check_contiguous(
            self.task.node.id, through, (segment.segment for segment in self.segments[before:]), first=number + 1
        )

    def add(self, through: Lsn, opened: OpenTransaction | None, tables: tuple[pa.Table, pa.Table]) -> None:
        """Create the next segment."""
        number = self.number + 1
        task = self.task
        wal_range = SegmentRange(task.node.id, task.operation, self.through, through, opened, task.history)
        try:
            segment = create_segment(
                self.store, self.prefix, number, wal_range, tables, task.unlisted_definitions, continued=self.open
            )
            self.segments.append(segment)
        except ObjectExistsError as error:
            raise archive_busy_error(task) from error
        self.grown_at = time.monotonic()


def drain(task: DrainTask) -> DrainReport:
    """Bring the node's archive up to `task.finish`; return a SnapshotError in the report instead of raising it."""
    began = time.monotonic()
    archive: _Archive | None = None
    removed = ""
    while True:
        try:
            archive = archive or _Archive(task, task.store.open())
            _drain(task, archive)
            seconds = time.monotonic() - began
            return DrainReport(
                task.node.id,
                tuple(archive.segments),
                archive.ignored,
                seconds,
                idle=archive.idle,
                dropped=frozenset(archive.dropped),
            )
        except (SlotInUseError, DrainBusyError) as error:
            # A killed command or task may keep reading the slot, and even storing segments, until its process notices.
            # It stores the same segments that this drain would store, so wait and continue after the last of them.
            if archive is None or time.monotonic() - max(began, archive.grown_at) > SLOT_IN_USE_SECONDS_MAX:
                return DrainReport(task.node.id, problem=report_of(error))
            time.sleep(SLOT_IN_USE_POLL_SECONDS)
        except WalRemovedError as error:
            # No slot is given up for a file that is missing for a moment.
            if removed == (segment := str(error.details["segment"])):
                return DrainReport(task.node.id, problem=report_of(_lost_error(task, error)))
            removed = segment
            time.sleep(REMOVED_AGAIN_SECONDS)
        except PublicationMissingError as error:
            return DrainReport(task.node.id, problem=report_of(_lost_error(task, error)))
        except SnapshotError as error:
            return DrainReport(task.node.id, problem=report_of(error))
        except psycopg.OperationalError as error:
            return DrainReport(task.node.id, problem=report_of(unreachable_error(task.node, error)))


def _lost_error(task: DrainTask, error: SnapshotError) -> SlotLostError:
    return SlotLostError(error.message, hint=error.hint, details={"node": task.node.id, "slot": task.slot})


def _drain(task: DrainTask, archive: _Archive) -> None:
    with connect(task.node) as connection:
        # Read the slot before the archive: then a slot that is ahead of the archive means lost WAL, not a race.
        state = slot_state(connection, task.slot)
        archive.read_new_segments()
        check_archived_history(task.node.id, archive.segments[-1] if archive.segments else None, task.history)
        state = check_slot(task.node.id, task.slot, state, archive.through)
        if task.node.backup_of is not None:
            check_replayed(connection, task.node, task.finish)
        _check_timeline(connection, task)
        if state.confirmed < archive.through:
            _check_lineage(task, archive, state.confirmed)
            _advance(connection, task, archive)
        _fill(connection, task, archive)


def _check_timeline(connection: psycopg.Connection[Any], task: DrainTask) -> None:
    """Raise ServerPromotedError if the server left the timeline of the task's history after the history was read.

    The segments are stored with that history.
    """
    if isinstance(task.history, UnsetType):
        return
    was, now = task.history.timeline, current_timeline(connection)
    # A standby may receive no WAL for a moment, and that of earlier timelines while it catches up.
    if now != was and (task.node.backup_of is None or (now or 0) > was):
        raise promoted_error(task.node, f"its timeline was {was} and is {now or 'unknown'}")


def _check_lineage(task: DrainTask, archive: _Archive, begin: Lsn) -> None:
    """Raise WalDivergedError unless the WAL from `begin` to the end of the archive is that of the chain.

    It must have the chain's markers, and the transactions in the archive behind the last of them.
    """
    known, tables = [task.last_marker] if task.last_marker else [], list[pa.Table]()
    for segment in archive.segments:
        if segment.segment.through <= begin:
            continue
        tables.append(read_events(archive.store, segment.segment))
        known += markers_of_events(tables[-1])
    expected = [one for one in known if begin < one.position <= archive.through]
    proven = max((one.position for one in expected), default=begin)
    ends = {end for events in tables for end in ends_of_events(events, proven)}
    if not (expected or ends):
        return
    # The publication of the append-only tables has the fewest rows, and the server sends markers in any case; but not
    # the ends of transactions without rows.
    publications = task.publications if ends else task.publications[-1:]
    chosen = reads_with_psycopg(archive.through - begin, len(task.definitions))
    found, missing = set[KnownMarker](), set(ends)
    batches = peek(task.node, task.slot, publications, archive.through, PEEKED_MESSAGES_MAX, with_psycopg=chosen)
    try:
        for messages in batches:
            found.update(markers_of_messages(messages))
            if missing:
                missing.difference_update(ends_of_messages(messages))
    except (WalRemovedError, PublicationMissingError):
        raise
    except UnreachableError as error:
        if find_undecodable(task.node, task.slot, publications, archive.through, ORIGIN):
            raise diverged_error(
                task.node.id, "its WAL can't be decoded for a comparison with the archive", {}
            ) from error
        raise
    check_markers(task.node.id, expected, found)
    check_ends(task.node.id, missing)


def _fill(connection: psycopg.Connection[Any], task: DrainTask, archive: _Archive) -> None:
    messages = FIRST_CHUNK_MESSAGES
    while archive.through < task.finish:
        chunk = _Chunk(archive, texts_of(connection))
        try:
            chunk.read(task, messages)
        except (WalRemovedError, PublicationMissingError):
            raise
        except (UnreachableError, DecodingError) as error:
            lsn = Lsn.parse(str(error.details["lsn"])) if isinstance(error, DecodingError) else ORIGIN
            rolled_back = find_undecodable(task.node, task.slot, task.publications, task.finish, lsn)
            if rolled_back is None:
                if isinstance(error, UnreachableError) and (
                    unprintable := find_unprintable(task.node, task.slot, task.publications, task.finish)
                ):
                    raise unprintable from error
                raise
            # What this chunk has already stored must not be read, and stored, again.
            _advance(connection, task, archive)
            if rolled_back.before > archive.through:
                # The segment with the rolled-back transaction follows, so nothing before it may be left out.
                _fill(connection, replace(task, finish=rolled_back.before, may_be_idle=False), archive)
            chunk.skip(task, rolled_back)
        if archive.idle is not None:
            return
        _advance(connection, task, archive)
        messages = chunk.next_messages


def _advance(connection: psycopg.Connection[Any], task: DrainTask, archive: _Archive) -> None:
    through = archive.through
    # Segments that were written to a different store in place of the fleet's do not count as archived.
    if task.fleet_id is not None:
        check_own_store(archive.store, task.fleet_id)
    # PostgreSQL refuses if another process has advanced the slot further, or dropped it.
    try:
        with suppress(psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.UndefinedObject):
            advance_slot(connection, task.slot, through)
    except psycopg.errors.ObjectInUse as error:
        raise slot_in_use(task.node, task.slot) from error
    state = slot_state(connection, task.slot)
    if state is not None and state.confirmed > through:
        # Another process has advanced the slot. The retry checks that it also extended the archive.
        raise archive_busy_error(task)
    if state is None or state.confirmed != through:
        place = f"is at {state.confirmed}" if state else "was dropped"
        raise SlotLostError(
            f"node {task.node.id}: slot {task.slot} {place} after being advanced to {through}",
            hint=f"another process has moved or dropped the slot: {NEXT_COPIES}",
            details={"node": task.node.id, "slot": task.slot},
        )


@dataclass(slots=True)
class _Chunk:
    """One peek at the slot, and the segments created from it."""

    archive: _Archive
    convert: Texts | None
    tables: list[tuple[pa.Table, pa.Table]] = field(default_factory=list)
    held_bytes: int = 0
    through: Lsn = ORIGIN
    resumed: OpenTransaction | None = None
    next_messages: int = FIRST_CHUNK_MESSAGES

    def read(self, task: DrainTask, messages_max: int) -> None:
        """Store the slot's content up to `task.finish`, or to the end of the transaction that fills the chunk."""
        decoder = Decoder(task.node.id, task.definitions, task.global_id_form, convert=self.convert)
        self.through, self.resumed = self.archive.through, self.archive.open
        awaited = self.resumed
        with (
            BackgroundCalls() as storing,
            read_ahead(lambda: self._peek(task, messages_max)) as batches,
        ):
            for batch in batches:
                # Reading ahead stops while this thread waits (AHEAD_BYTES).
                self.archive.pace.spend(batch.nbytes)
                if awaited is not None and (begun := first_begun(batch)) is not None:
                    check_resumed(task.node.id, awaited.lsn, begun)
                    awaited = None
                # A row may be 100 MB, so release everything as early as possible.
                messages = decoder.view(from_arrow(batch))
                del batch
                decoded = decoder.decode(messages)
                del messages
                self._hold(decoded, task)
                del decoded
                if self.held_bytes > SEGMENT_BYTES_MAX:
                    opened = decoder.open
                    self._store(OpenTransaction(opened.lsn, opened.sent * 2 - 1, 0) if opened else None, storing)
        if awaited is not None and task.finish > awaited.lsn:
            check_resumed(task.node.id, awaited.lsn, None)
        if decoder.open:
            raise _incomplete_error(task, decoder.open.lsn)
        if decoder.read < messages_max:
            # The slot has no more messages: everything up to the finish marker has been read, even if it was empty.
            self.through = task.finish
        if self._is_idle(task):
            self.archive.idle = pa.concat_tables([_empty(), *(events for _, events in self.tables)])
        elif self.tables or self.through > self.archive.through:
            self._store(None)
        average = max(decoder.read_bytes / max(decoder.read, 1), 1.0)
        self.next_messages = int(min(max(CHUNK_BYTES / average, CHUNK_MESSAGES_MIN), CHUNK_MESSAGES_MAX))

    def _peek(self, task: DrainTask, messages_max: int) -> Batches:
        chosen = reads_with_psycopg(task.finish - self.archive.through, len(task.definitions))
        return peek(task.node, task.slot, task.publications, task.finish, messages_max, with_psycopg=chosen)

    def _is_idle(self, task: DrainTask) -> bool:
        """Whether the node's WAL from the end of its archive to `task.finish` is small and contains only markers."""
        archive = self.archive
        return (
            task.may_be_idle
            and not (archive.segments or archive.ignored or archive.open or task.unlisted_numbers)
            and self.through == task.finish
            and task.finish - archive.through <= min(IDLE_BYTES_MAX, task.node.retained_wal_bytes_max // 8)
            and not any(len(changes) for changes, _ in self.tables)
            and all((to_numpy(events["op"]) == MARKER).all() for _, events in self.tables)
        )

    def _hold(self, decoded: Decoded, task: DrainTask) -> None:
        """Keep decoded rows for the next segment."""
        if decoded.through > task.finish and task.node.backup_of is not None:
            # The primary's marker ends there.
            raise diverged_error(
                task.node.id,
                f"its WAL has a record that spans {task.finish}, where a record of its primary ends",
                {"position": str(task.finish)},
            )
        if decoded.through > task.finish:
            raise DecodingError(
                f"node {task.node.id}: slot {task.slot} returned WAL up to {decoded.through}, but only WAL up to"
                f" {task.finish} was requested",
                details={"node": task.node.id, "lsn": str(decoded.through)},
            )
        changes = _after(decoded.changes, self.resumed)
        self.archive.ignored += decoded.ignored
        self.archive.dropped |= decoded.dropped
        self.through = max(self.through, decoded.through)
        self.tables.append((changes, decoded.events))
        self.held_bytes += changes.nbytes + decoded.events.nbytes

    def skip(self, task: DrainTask, rolled_back: RolledBack) -> None:
        """Store only the PREPARE of a transaction that can't be decoded, without its changes."""
        decoder = Decoder(task.node.id, task.definitions, task.global_id_form, convert=self.convert)
        decoded = decoder.feed(from_list(list(rolled_back.messages)))
        self.through = decoded.through
        self.tables = [(decoded.changes, decoded.events)]
        self._store(None)

    def _store(self, opened: OpenTransaction | None, storing: BackgroundCalls | None = None) -> None:
        """Create a segment from the held rows, in the thread of `storing` if it is given."""
        tables, through, is_large = self.tables, self.through, self.held_bytes > LARGE_BYTES
        self.tables, self.held_bytes = [], 0
        if storing is None:
            self._add(through, opened, tables)
            return
        storing.run(lambda: self._add(through, opened, tables))
        if is_large:
            # These rows may be 100 MB, so hold no other rows at the same time.
            storing.wait()

    def _add(self, through: Lsn, opened: OpenTransaction | None, tables: list[tuple[pa.Table, pa.Table]]) -> None:
        changes = pa.concat_tables([_empty(), *(changes for changes, _ in tables)])
        events = pa.concat_tables([_empty(), *(events for _, events in tables)])
        tables.clear()
        self.archive.add(through, opened, (changes, events))
        del changes, events
        # After encoding, Arrow still holds as much memory as the segment needed.
        pa.default_memory_pool().release_unused()


def _empty() -> pa.Table:
    return pa.Table.from_batches([], SEGMENT_SCHEMA)


def _incomplete_error(task: DrainTask, lsn: Lsn) -> DecodingError:
    return DecodingError(
        f"node {task.node.id}: the messages of slot {task.slot} end in the middle of the transaction at {lsn}",
        hint="repeat the command: it reads the same WAL again; if this error persists, report it",
        details={"node": task.node.id, "lsn": str(lsn)},
    )


def _after(changes: pa.Table, resumed: OpenTransaction | None) -> pa.Table:
    """If the archive ends inside a transaction, drop its changes that are already archived."""
    if resumed is None or len(changes) == 0:
        return changes
    is_held = (to_numpy(changes["lsn"]) == resumed.lsn) & (to_numpy(changes["seq"]) <= resumed.seq)
    return changes.filter(to_mask(~is_held))
