"""Markers: the logical messages by which a cut begins and ends in every primary's WAL.

A marker's position is where its record ends: what lies before it ended before it was written. Writing one
locks nothing and waits for no transaction.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.lsn import lsn_from_text

MARKER_PREFIX = b"cutline"
FLUSHING_MESSAGE_VERSION = 170000


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


def write_marker(connection: psycopg.Connection[Any], marker: Marker) -> int:
    """Write `marker` durably into the WAL of the connection's primary; return the position of its end."""
    text = marker.to_bytes().decode()
    prefix = MARKER_PREFIX.decode()
    if connection.info.server_version >= FLUSHING_MESSAGE_VERSION:
        query = "SELECT pg_logical_emit_message(false, %s, %s, true)::text"
        (position,) = connection.execute(query, (prefix, text)).fetchone() or ("",)
        return lsn_from_text(position)
    # Before 17 the message is not flushed by itself; a commit that has a transaction id flushes what is
    # before it. Waiting for a synchronous standby is not wanted here.
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = local")
        query = "SELECT pg_logical_emit_message(false, %s, %s)::text, pg_current_xact_id()"
        (position, _) = connection.execute(query, (prefix, text)).fetchone() or ("", None)
    return lsn_from_text(position)


def write_markers(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, int]:
    """Write `marker` on all primaries at once; return their positions once all are written."""
    with ThreadPoolExecutor(max_workers=len(connections)) as threads:
        written = {node: threads.submit(write_marker, connection, marker) for node, connection in connections.items()}
        return {node: future.result() for node, future in written.items()}
