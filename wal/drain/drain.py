"""Draining a node's slot into its archive: what a task of the drain job does, in an executor.

In this order, always: peek a chunk, decode it, create the segment, advance the slot. Whoever dies in between
leaves WAL that is decoded again, or a segment that the next drain finds and goes on from; nothing is lost and
nothing is archived twice. A task that Spark repeats may meet the first attempt still at work: what that stores
counts, and the second goes on from there. A transaction too large for one segment is stored in several, and the slot is
advanced when its last is there.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
import pyarrow as pa

from columns.arrow_numbers import to_mask, to_numpy
from columns.bytes_column import from_arrow, from_list
from fleet.hints import NEW_CHAIN
from fleet.lsn import ORIGIN, Lsn
from fleet.nodes.connections import connect, unreachable_error
from fleet.nodes.encodings import Texts, texts_of
from storage.errors import BusyError, SnapshotError, UnreachableError, report_of
from storage.store import ObjectExistsError, ObjectStore
from wal.decoding.decoder import Decoded, Decoder
from wal.decoding.pgoutput import DecodingError
from wal.drain.drain_task import DrainReport, DrainTask
from wal.drain.peek import SlotInUseError, peek, slot_in_use
from wal.drain.replay import await_replay
from wal.drain.rolled_back import RolledBack, undecodable_ahead
from wal.segments.archive import (
    ArchivedSegment,
    OpenTransaction,
    Segment,
    SegmentRange,
    archive_prefix,
    check_contiguous,
)
from wal.segments.segment_schema import SEGMENT_SCHEMA
from wal.segments.segments import create_segment, list_unlisted
from wal.slots.slots import SlotLostError, advance_slot, check_slot, slot_state

FIRST_CHUNK_MESSAGES = 200_000
CHUNK_MESSAGES_MIN, CHUNK_MESSAGES_MAX = 10_000, 1_000_000
CHUNK_BYTES = 256 << 20
# Of rows in memory: what a worker holds while it makes a segment is several times that.
SEGMENT_BYTES_MAX = 64 << 20
SLOT_IN_USE_POLL_SECONDS = 0.05
SLOT_IN_USE_SECONDS_MAX = 20.0


class DrainBusyError(BusyError):
    """Another process writes the archive."""


@dataclass(slots=True)
class _Archive:
    """The end of one node's archive, as it grows."""

    task: DrainTask
    store: ObjectStore
    segments: list[ArchivedSegment] = field(default_factory=list)
    ignored: int = 0
    grown_at: float = 0.0

    @property
    def prefix(self) -> str:
        return archive_prefix(self.task.snapshot, self.task.node.id, self.task.chain)

    @property
    def last(self) -> Segment | None:
        if self.segments:
            return self.segments[-1].segment
        return self.task.known[-1] if self.task.known else None

    @property
    def through(self) -> Lsn:
        return self.last.through if self.last else self.task.base

    @property
    def open(self) -> OpenTransaction | None:
        return self.last.open if self.last else None

    def find(self) -> None:
        """Take over what others have stored after the segments that are known here."""
        # By key: a listing may be of a moment ago, and a slot that is ahead of what it shows would be taken for a loss.
        for one in list_unlisted(self.store, self.prefix, len(self.task.known) + len(self.segments)):
            if one.segment.number > self.task.planned and one.definitions != self.task.definitions:
                raise read_archived_range(self.task)
            self.segments.append(one)
            self.grown_at = time.monotonic()
        archived = [*self.task.known, *(one.segment for one in self.segments)]
        check_contiguous(self.task.node.id, self.task.base, archived)

    def add(self, through: Lsn, opened: OpenTransaction | None, tables: tuple[pa.Table, pa.Table]) -> None:
        """Create the next segment."""
        number = len(self.task.known) + len(self.segments) + 1
        held = SegmentRange(self.task.node.id, self.task.operation, self.through, through, opened)
        try:
            made = create_segment(self.store, self.prefix, number, held, tables, self.task.definitions)
            self.segments.append(made)
        except ObjectExistsError as error:
            raise read_archived_range(self.task) from error
        self.grown_at = time.monotonic()


def read_archived_range(task: DrainTask) -> DrainBusyError:
    """The error for an archive that grows by another process's hand."""
    return DrainBusyError(
        f"node {task.node.id}: another process archives this chain's WAL",
        hint="wait until it is done, then repeat",
        details={"node": task.node.id},
    )


def drain(task: DrainTask) -> DrainReport:
    """Bring the node's archive up to `task.finish`; never raises a SnapshotError, but reports it."""
    began = time.monotonic()
    archive: _Archive | None = None
    while True:
        try:
            archive = archive or _Archive(task, task.store.open())
            _drain(task, archive)
            return DrainReport(task.node.id, tuple(archive.segments), archive.ignored, time.monotonic() - began)
        except (SlotInUseError, DrainBusyError) as error:
            # A command or a task that was killed reads the slot, and may store what it has read, until its process
            # has noticed. Both would store the same: whoever is second goes on from there.
            if archive is None or time.monotonic() - max(began, archive.grown_at) > SLOT_IN_USE_SECONDS_MAX:
                return DrainReport(task.node.id, problem=report_of(error))
            time.sleep(SLOT_IN_USE_POLL_SECONDS)
        except SnapshotError as error:
            return DrainReport(task.node.id, problem=report_of(error))
        except psycopg.OperationalError as error:
            return DrainReport(task.node.id, problem=report_of(unreachable_error(task.node, error)))


def _drain(task: DrainTask, archive: _Archive) -> None:
    with connect(task.node) as connection:
        # In this order: a slot that is ahead of the archive as it is found later has lost something.
        state = slot_state(connection, task.slot)
        archive.find()
        state = check_slot(task.node.id, task.slot, state, archive.through)
        if task.node.backup_of is not None:
            await_replay(connection, task.node, task.finish)
        if state.confirmed < archive.through:
            _advance(connection, task, archive.through)
        _fill(connection, task, archive)


def _fill(connection: psycopg.Connection[Any], task: DrainTask, archive: _Archive) -> None:
    messages = FIRST_CHUNK_MESSAGES
    while archive.through < task.finish:
        chunk = _Chunk(archive, texts_of(connection))
        try:
            chunk.read(task, messages)
        except (UnreachableError, DecodingError) as error:
            lsn = Lsn.parse(str(error.details["lsn"])) if isinstance(error, DecodingError) else ORIGIN
            gone = undecodable_ahead(task.node, task.slot, task.publications, task.finish, lsn)
            if gone is None:
                raise
            if gone.before > archive.through:
                _fill(connection, replace(task, finish=gone.before), archive)
            chunk.pass_over(task, gone)
        _advance(connection, task, archive.through)
        messages = chunk.next_messages


def _advance(connection: psycopg.Connection[Any], task: DrainTask, through: Lsn) -> None:
    # PostgreSQL refuses where somebody else has moved the slot on, or dropped it.
    try:
        with suppress(psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.UndefinedObject):
            advance_slot(connection, task.slot, through)
    except psycopg.errors.ObjectInUse as error:
        raise slot_in_use(task.node, task.slot) from error
    state = slot_state(connection, task.slot)
    if state is not None and state.confirmed > through:
        # Sound only if the archive has grown by another hand as well, which the next look at both tells.
        raise read_archived_range(task)
    if state is None or state.confirmed != through:
        place = str(state.confirmed) if state else "nowhere"
        raise SlotLostError(
            f"node {task.node.id}: slot {task.slot} is at {place}, advanced to {through}",
            hint=f"somebody else moves it; {NEW_CHAIN}",
            details={"node": task.node.id, "slot": task.slot},
        )


@dataclass(slots=True)
class _Chunk:
    """One peek at the slot, and the segments made of it."""

    archive: _Archive
    convert: Texts | None
    tables: list[tuple[pa.Table, pa.Table]] = field(default_factory=list)
    held_bytes: int = 0
    through: Lsn = ORIGIN
    resumed: OpenTransaction | None = None
    next_messages: int = FIRST_CHUNK_MESSAGES

    def read(self, task: DrainTask, messages_max: int) -> None:
        """Store what the slot has up to `task.finish`, or to the end of the transaction that fills it."""
        decoder = Decoder(task.node.id, task.versions, task.global_id_form, convert=self.convert)
        self.through, self.resumed = self.archive.through, self.archive.open
        for batch in peek(task.node, task.slot, task.publications, task.finish, messages_max):
            # A row may be of 100 MB: nothing is kept longer than it is needed.
            messages = decoder.view(from_arrow(batch))
            del batch
            decoded = decoder.decode(messages)
            del messages
            self._hold(decoded, task)
            del decoded
            if self.held_bytes > SEGMENT_BYTES_MAX:
                opened = decoder.open
                self._store(OpenTransaction(opened.lsn, opened.sent * 2 - 1) if opened else None)
        if decoder.open:
            raise _ended_within(task, decoder.open.lsn)
        if decoder.read < messages_max:
            # The slot had no more: everything up to the finish has been seen, even if that was nothing.
            self.through = task.finish
        if self.tables or self.through > self.archive.through:
            self._store(None)
        average = max(decoder.read_bytes / max(decoder.read, 1), 1.0)
        self.next_messages = int(min(max(CHUNK_BYTES / average, CHUNK_MESSAGES_MIN), CHUNK_MESSAGES_MAX))

    def _hold(self, decoded: Decoded, task: DrainTask) -> None:
        """Keep what was decoded for the next segment."""
        if decoded.through > task.finish:
            raise DecodingError(
                f"node {task.node.id}: what its slot gave ends at {decoded.through}, after"
                f" {task.finish}, up to where it was asked",
                details={"node": task.node.id, "lsn": str(decoded.through)},
            )
        changes = _after(decoded.changes, self.resumed)
        self.archive.ignored += decoded.ignored
        self.through = max(self.through, decoded.through)
        self.tables.append((changes, decoded.events))
        self.held_bytes += changes.nbytes + decoded.events.nbytes

    def pass_over(self, task: DrainTask, gone: RolledBack) -> None:
        """Store the PREPARE of a transaction that can't be decoded, and none of its changes."""
        decoder = Decoder(task.node.id, task.versions, task.global_id_form, convert=self.convert)
        decoded = decoder.feed(from_list(list(gone.messages)))
        self.through = decoded.through
        self.tables = [(decoded.changes, decoded.events)]
        self._store(None)

    def _store(self, opened: OpenTransaction | None) -> None:
        empty = pa.Table.from_batches([], SEGMENT_SCHEMA)
        changes = pa.concat_tables([empty, *(changes for changes, _ in self.tables)])
        events = pa.concat_tables([empty, *(events for _, events in self.tables)])
        self.archive.add(self.through, opened, (changes, events))
        self.tables, self.held_bytes = [], 0
        del changes, events
        # What Arrow keeps of encoding a segment is as much again as the segment.
        pa.default_memory_pool().release_unused()


def _ended_within(task: DrainTask, lsn: Lsn) -> DecodingError:
    return DecodingError(
        f"node {task.node.id}: what its slot gave ends within the transaction at {lsn}",
        hint="repeat the command: it reads the same WAL again; if it ends here again, report this",
        details={"node": task.node.id, "lsn": str(lsn)},
    )


def _after(changes: pa.Table, resumed: OpenTransaction | None) -> pa.Table:
    """The changes that the archive does not hold yet of the transaction it ends in."""
    if resumed is None or len(changes) == 0:
        return changes
    is_held = (to_numpy(changes["lsn"]) == resumed.lsn) & (to_numpy(changes["seq"]) <= resumed.seq)
    return changes.filter(to_mask(~is_held))
