"""Markers: the logical messages by which a cut begins and ends in every primary's WAL.

A marker's position is where its record ends: what lies before it ended before it was written. Writing one
locks nothing and waits for no transaction. One thread writes them all: every primary is sent its marker before
any answer is awaited (PostgreSQL manual, "Asynchronous Command Processing").
"""

from __future__ import annotations

import json
import selectors
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from fleet.lsn import Lsn

MARKER_PREFIX = b"cutline"
FLUSHING_MESSAGE_VERSION = 170000
MARKER_SECONDS_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Marker:
    """What a marker says: which cut of which chain it starts or finishes. `cut` is never used twice."""

    chain: str
    cut: str
    kind: str

    def to_bytes(self) -> bytes:
        """The message's content."""
        return json.dumps({"chain": self.chain, "cut": self.cut, "kind": self.kind}).encode()


def marker_from_bytes(content: bytes) -> Marker:
    """Read what `Marker.to_bytes` wrote; raise ValueError on anything else."""
    try:
        document = json.loads(content)
        fields = [document[name] for name in ("chain", "cut", "kind")]
    except (KeyError, TypeError) as error:
        raise ValueError("not a marker") from error
    if not all(isinstance(value, str) for value in fields):
        raise ValueError("not a marker: its fields are no texts")
    return Marker(*fields)


def write_marker(connection: psycopg.Connection[Any], marker: Marker) -> Lsn:
    """Write `marker` durably into the WAL of the connection's primary; return the position of its end."""
    return write_markers({connection.info.host or "primary": connection}, marker).popitem()[1]


def write_markers(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, Lsn]:
    """Write `marker` durably on all primaries at once; return their positions once all are written.

    Raises psycopg.OperationalError naming a node whose session is lost or that has not answered within
    MARKER_SECONDS_MAX, and the server's own error, naming the node, where it refuses. The sessions of the
    nodes that answered stay usable; those of the others are closed.
    """
    deadline = time.monotonic() + MARKER_SECONDS_MAX
    sent = [_Sent(node, connection) for node, connection in connections.items()]
    with ExitStack() as locks, selectors.DefaultSelector() as selector:
        for one in sent:
            locks.enter_context(one.connection.lock)
        try:
            for one in sent:
                one.send(selector, marker)
            while selector.get_map() and (seconds := deadline - time.monotonic()) > 0:
                for key, ready in selector.select(seconds):
                    key.data.go_on(selector, ready)
        finally:
            # Nobody else may use a session whose answer is still to come.
            late = [key.data for key in list(selector.get_map().values())]
            for one in late:
                one.stop(selector)
                one.connection.close()
    for one in late:
        one.problem = psycopg.OperationalError(f"node {one.node}: no answer within {MARKER_SECONDS_MAX:g} s")
    for one in sent:
        if one.problem:
            raise one.problem
    return {one.node: one.position() for one in sent}


@dataclass(slots=True)
class _Sent:
    """A marker on its way to one primary. `problem`: why it is not known to be written."""

    node: str
    connection: psycopg.Connection[Any]
    socket: int = -1
    results: list[pq.abc.PGresult] = field(default_factory=list)
    problem: psycopg.Error | None = None

    def send(self, selector: selectors.BaseSelector, marker: Marker) -> None:
        session = self.connection.pgconn
        try:
            session.nonblocking = 1
            text, prefix = marker.to_bytes(), MARKER_PREFIX
            if session.server_version >= FLUSHING_MESSAGE_VERSION:
                session.send_query_params(
                    b"SELECT pg_logical_emit_message(false, $1::text, $2::text, true)", [prefix, text]
                )
            else:
                # Before 17 the message is not flushed by itself; a commit that has a transaction id flushes what
                # is before it. Waiting for a synchronous standby is not wanted here. Statements that are sent
                # together are one transaction, and one round trip.
                escaping = pq.Escaping(session)
                values = (escaping.escape_literal(prefix), escaping.escape_literal(text))
                emit = b"SELECT pg_logical_emit_message(false, %s::text, %s::text), pg_current_xact_id()" % tuple(
                    map(bytes, values)
                )
                session.send_query(b"SET LOCAL synchronous_commit = local; " + emit)
            is_left = session.flush()
            # A lost session has no socket any more, but has to leave the selector.
            self.socket = session.socket
            selector.register(self.socket, selectors.EVENT_READ | (is_left and selectors.EVENT_WRITE), self)
        except psycopg.Error as error:
            self._lost(error)

    def go_on(self, selector: selectors.BaseSelector, ready: int) -> None:
        """Send and receive what can be, without waiting; leave the selector after the last result."""
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
            self._lost(error)
            self.stop(selector)
            self.connection.close()

    def stop(self, selector: selectors.BaseSelector) -> None:
        """Leave the selector."""
        selector.unregister(self.socket)

    def position(self) -> Lsn:
        """Where the marker ends, once it is written."""
        found = next(result for result in self.results if result.status == pq.ExecStatus.TUPLES_OK)
        return Lsn.parse((found.get_value(0, 0) or b"").decode())

    def _take(self, result: pq.abc.PGresult) -> None:
        self.results.append(result)
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK) and self.problem is None:
            refused = error_from_result(result)
            self.problem = type(refused)(f"node {self.node}: {refused}")

    def _lost(self, error: psycopg.Error) -> None:
        if self.problem is None:
            self.problem = psycopg.OperationalError(f"node {self.node}: {error}")
