"""Wait for prepared transactions: before the first cut of a chain, and before the cut of a terminal snapshot.

PostgreSQL decodes a transaction that was prepared before the slot was made only at its COMMIT PREPARED, so the first
cut waits for it. Later transactions are decoded at their PREPARE, and no cut waits for them. A terminal snapshot's cut
does wait: committing one after the cut would be a write.
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
    """Wait until every transaction that is prepared now has been decided.

    Raises SlotWaitError naming those left after `seconds_max`, and NodeUnreachableError. `what` names what waits.
    """
    notes = WaitNotes(what, progress)
    awaited = {one.key for one in _list_prepared(sessions)}
    while awaited:
        left = [one for one in _list_prepared(sessions) if one.key in awaited]
        if not left:
            return
        if notes.waited_seconds > seconds_max:
            raise wait_error(what, notes.waited_seconds, left)
        notes.report(left)
        time.sleep(POLL_SECONDS)


def _list_prepared(sessions: Sessions) -> list[Awaited]:
    def read(connection: psycopg.Connection[Any]) -> list[Awaited]:
        return prepared_transactions("", connection)

    return [replace(one, node=node) for node, found in sessions.ask_primaries(read).items() for one in found]
