"""Transactions that were already prepared when a chain's slots were made, or a terminal snapshot ended all writes.

PostgreSQL decodes the former only when they are committed, so the first cut waits for them; every later prepared
transaction is decoded at its PREPARE, and no cut ever waits for one. A terminal snapshot's does: one that is committed
after it would be a write.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import psycopg

from fleet.nodes.sessions import Sessions
from fleet.progress import Progress
from wal.slots.waiting import Awaited, WaitNotes, prepared_transactions, wait_error

POLL_SECONDS = 0.1


def await_prepared(sessions: Sessions, seconds_max: float, progress: Progress, what: str = "the first cut") -> None:
    """Wait until none of the transactions that are prepared now is left; raise SlotWaitError naming those that stay.

    `what` is what waits. Raises NodeUnreachableError.
    """
    notes = WaitNotes(what, progress)
    awaited = {one.key for one in _list_prepared(sessions)}
    while awaited:
        left = [one for one in _list_prepared(sessions) if one.key in awaited]
        if not left:
            return
        if notes.waited_seconds > seconds_max:
            raise wait_error(what, notes.waited_seconds, left)
        notes.tell(left)
        time.sleep(POLL_SECONDS)


def _list_prepared(sessions: Sessions) -> list[Awaited]:
    def read(connection: psycopg.Connection[Any]) -> list[Awaited]:
        return prepared_transactions("", connection)

    return [replace(one, node=node) for node, found in sessions.ask_primaries(read).items() for one in found]
