"""The lock that lets one operation at a time change a fleet: advisory locks on its primaries.

They are held by the operation's own sessions, so they end with its process, however that ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from fleet.connections import shut_down_after
from fleet.sessions import Sessions
from storage.errors import BusyError

UNLOCK_SECONDS_MAX = 5.0


class FleetBusyError(BusyError):
    """Another operation is running on the fleet."""


@contextmanager
def locked_fleet(sessions: Sessions, name: str) -> Iterator[None]:
    """Hold the fleet for one operation: an advisory lock on every primary, gone with its session.

    The locks are taken in the order of the nodes' ids, so two operations can't each get half.
    Raises FleetBusyError naming the node and the process that holds it.
    """
    key = lock_key(name)
    taken: list[psycopg.Connection[Any]] = []
    try:
        for node, connection in sorted(sessions.primaries.items()):
            (locked,) = connection.execute("SELECT pg_try_advisory_lock(%s)", (key,)).fetchone() or (False,)
            if not locked:
                raise FleetBusyError(
                    f"node {node}: another operation of Cutline is running ({_holder(connection, key)})",
                    hint="wait until it is done; if its process is gone, its session ends by itself within a minute",
                    details={"node": node},
                )
            taken.append(connection)
        yield
    finally:
        for connection in taken:
            # A lock that can't be given back in time ends with its session.
            with suppress(psycopg.OperationalError), shut_down_after(connection, UNLOCK_SECONDS_MAX):
                connection.execute("SELECT pg_advisory_unlock(%s)", (key,))


def lock_key(name: str) -> int:
    """The advisory lock's 64-bit number for what is called `name`."""
    return int.from_bytes(hashlib.sha256(f"cutline {name}".encode()).digest()[:8], "big", signed=True)


def _holder(connection: psycopg.Connection[Any], key: int) -> str:
    row = connection.execute(
        "SELECT format('process %%s since %%s', a.pid, date_trunc('second', a.backend_start))"
        " FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
        " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
        " AND (l.classid::bigint << 32 | l.objid::bigint) = %s",
        (key,),
    ).fetchone()
    return row[0] if row else "it has just ended"
