"""Markers: the logical messages that begin and end a cut in every primary's WAL.

The position of a marker is the end of its record: every record before it was written before the marker. Writing a
marker takes no lock and waits for no transaction. One thread writes all markers: it sends a marker to every primary
before it waits for answers (PostgreSQL manual, "Asynchronous Command Processing").
"""

from __future__ import annotations

import json
import selectors
import time
from contextlib import ExitStack
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from msgspec import Struct, field
from psycopg import pq
from psycopg.errors import error_from_result

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Record, fields_of, from_json
from cutline.nodes.clocks import time_of_epoch
from cutline.storage.clock import machine_now

MARKER_PREFIX = b"cutline"
FLUSHING_MESSAGE_VERSION = 170000
MARKER_SECONDS_MAX = 30.0
# The server's clock in seconds since 1970, in a form that does not depend on the session's settings.
CLOCK = b"extract(epoch FROM clock_timestamp())"


# A newer version's marker may have more fields; only these three are compared.
class Marker(Record, frozen=True, forbid_unknown_fields=False):
    """The content of a marker, the `start` or `finish` of a chain's cut.

    Only one operation uses the id in `cut`, but for each of its cuts: it makes another if a standby fails or tables
    change meanwhile.
    """

    chain: str
    cut: str
    kind: str

    def to_bytes(self) -> bytes:
        """Return the content of the message."""
        return json.dumps(fields_of(self)).encode()


def marker_from_bytes(content: bytes) -> Marker:
    """Parse the output of `Marker.to_bytes`; raise ValueError for anything else."""
    try:
        marker: Marker = from_json(content, Marker)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a marker: {error}") from error
    return marker


class WrittenMarker(Struct, frozen=True):
    """A marker in a node's WAL.

    `written_at` is the node's time just before it wrote the record; `sent_at` and `confirmed_at` are this machine's.
    """

    position: Lsn
    written_at: datetime
    sent_at: datetime
    confirmed_at: datetime


def write_markers(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, WrittenMarker]:
    """Write `marker` durably on all primaries at once; return the written markers, keyed by node.

    Raises psycopg.OperationalError if a session is lost or a node does not answer within MARKER_SECONDS_MAX, or the
    server's error if it refuses; both name the node. The sessions of nodes that answered stay usable; the others are
    closed.
    """
    deadline = time.monotonic() + MARKER_SECONDS_MAX
    pending = [_PendingMarker(node, connection) for node, connection in connections.items()]
    with ExitStack() as locks, selectors.DefaultSelector() as selector:
        for one in pending:
            locks.enter_context(one.connection.lock)
        try:
            for one in pending:
                one.send(selector, marker)
            while selector.get_map() and (seconds := deadline - time.monotonic()) > 0:
                for key, ready in selector.select(seconds):
                    key.data.advance(selector, ready)
        finally:
            # A session whose answer is outstanding can't be used for anything else.
            late = [key.data for key in list(selector.get_map().values())]
            for one in late:
                one.stop(selector)
                one.connection.close()
    for one in late:
        one.problem = psycopg.OperationalError(f"node {one.node}: no answer within {MARKER_SECONDS_MAX:g} s")
    for one in pending:
        if one.problem:
            raise one.problem
    return {one.node: one.written() for one in pending}


class _PendingMarker(Struct):
    """A marker that is being written on one primary. `problem` says why it may not have been written."""

    node: str
    connection: psycopg.Connection[Any]
    socket: int = -1
    results: list[pq.abc.PGresult] = field(default_factory=list)
    problem: psycopg.Error | None = None
    sent_at: datetime = field(default_factory=machine_now)
    confirmed_at: datetime = field(default_factory=machine_now)

    def send(self, selector: selectors.BaseSelector, marker: Marker) -> None:
        session = self.connection.pgconn
        self.sent_at = machine_now()
        try:
            session.nonblocking = 1
            text, prefix = marker.to_bytes(), MARKER_PREFIX
            if session.server_version >= FLUSHING_MESSAGE_VERSION:
                session.send_query_params(
                    b"SELECT %s, pg_logical_emit_message(false, $1::text, $2::text, true)" % CLOCK, [prefix, text]
                )
            else:
                # Before PostgreSQL 17 the function can't flush the message; the commit of a transaction that has an xid
                # flushes all WAL before it. The commit must not wait for a synchronous standby.
                # Statements sent together form one transaction and take one round trip.
                escaping = pq.Escaping(session)
                values = (escaping.escape_literal(prefix), escaping.escape_literal(text))
                emit = b"SELECT %s, pg_logical_emit_message(false, %s::text, %s::text), pg_current_xact_id()" % (
                    CLOCK,
                    *map(bytes, values),
                )
                session.send_query(b"SET LOCAL synchronous_commit = local; " + emit)
            is_unsent = session.flush()
            # Keep the socket: a lost session no longer has it, but it must be unregistered.
            self.socket = session.socket
            selector.register(self.socket, selectors.EVENT_READ | (is_unsent and selectors.EVENT_WRITE), self)
        except psycopg.Error as error:
            self._note_loss(error)

    def advance(self, selector: selectors.BaseSelector, ready: int) -> None:
        """Send and receive without waiting; unregister after the last result."""
        session = self.connection.pgconn
        try:
            if ready & selectors.EVENT_READ:
                session.consume_input()
            if not session.flush():
                selector.modify(self.socket, selectors.EVENT_READ, self)
            while not session.is_busy():
                result = session.get_result()
                if result is None:
                    self.stop(selector)
                    return
                self._take(result)
        except psycopg.Error as error:
            self._note_loss(error)
            self.stop(selector)
            self.connection.close()

    def stop(self, selector: selectors.BaseSelector) -> None:
        """Unregister from the selector."""
        selector.unregister(self.socket)

    def written(self) -> WrittenMarker:
        """Return the marker. Only valid once it has been written."""
        row = next(result for result in self.results if result.status == pq.ExecStatus.TUPLES_OK)
        clock, position = ((row.get_value(0, column) or b"").decode() for column in (0, 1))
        return WrittenMarker(Lsn.parse(position), time_of_epoch(float(clock)), self.sent_at, self.confirmed_at)

    def _take(self, result: pq.abc.PGresult) -> None:
        self.results.append(result)
        self.confirmed_at = machine_now()
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK) and self.problem is None:
            refused = error_from_result(result)
            self.problem = type(refused)(f"node {self.node}: {refused}")

    def _note_loss(self, error: psycopg.Error) -> None:
        if self.problem is None:
            self.problem = psycopg.OperationalError(f"node {self.node}: {error}")
