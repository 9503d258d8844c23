"""Transactions that were already prepared when a chain's slots were made.

PostgreSQL decodes those only when they are committed, so the first cut waits for them; every later prepared
transaction is decoded at its PREPARE, and no cut ever waits for one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import psycopg

from fleet.progress import Progress
from wal.slots import SlotWaitError

POLL_SECONDS = 0.1
NOTE_SECONDS = 2.0
PREPARED_QUERY = """
SELECT gid, to_char(prepared AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), transaction::text
  FROM pg_prepared_xacts WHERE database = current_database()
"""


def prepared_transactions(connection: psycopg.Connection[Any]) -> dict[str, str]:
    """The transactions prepared now in the connection's database: a description by transaction id."""
    found = connection.execute(PREPARED_QUERY)
    return {row[2]: f"{row[0]!r}, prepared {row[1]}" for row in found}


def await_prepared(
    primaries: Mapping[str, psycopg.Connection[Any]],
    prepared: Mapping[str, Mapping[str, str]],
    seconds_max: float,
    progress: Progress,
) -> None:
    """Wait until none of `prepared` (by node) is left; raise SlotWaitError naming those that stay."""
    began = time.monotonic()
    noted = False
    while True:
        left = {
            node: {xid: text for xid, text in found.items() if xid in prepared_transactions(primaries[node])}
            for node, found in prepared.items()
            if found
        }
        names = [f"{text} on node {node}" for node, found in left.items() for text in found.values()]
        if not names:
            return
        waited = time.monotonic() - began
        if waited > seconds_max:
            raise SlotWaitError(
                f"after {waited:.0f} s still prepared from before the snapshot: {', '.join(names[:5])}",
                hint="COMMIT PREPARED or ROLLBACK PREPARED them, or give more time: --wait SECONDS",
                details={"transactions": names},
            )
        if waited > NOTE_SECONDS and not noted:
            progress.note(f"waiting for transactions prepared before the snapshot: {', '.join(names[:5])}")
            noted = True
        time.sleep(POLL_SECONDS)
