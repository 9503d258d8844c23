"""Transactions that are prepared before the copy of a table, and that the copy lacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import psycopg

WAIT_SECONDS_MAX = 60.0
# The transaction for which a session waits that creates a slot.
AWAITED_QUERY = "SELECT l.transactionid::text FROM pg_locks AS l WHERE l.locktype = 'transactionid' AND NOT l.granted"


class SpanningTransactions:
    """Prepares transactions between the moment for which a slot waits and the slot's position, then ends `running`.

    PostgreSQL waits for the transactions that run when a slot is created, and then for those that run at that moment.
    What begins later can be prepared before the slot's position without being in its snapshot.
    """

    def __init__(self, dsn: str, gids: Mapping[str, tuple[str, ...]]) -> None:
        self.dsn, self.gids = dsn, gids
        self.running = psycopg.connect(dsn)
        self.first = self.xid(self.running)
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    @staticmethod
    def xid(session: psycopg.Connection[tuple[object, ...]]) -> str:
        (xid,) = session.execute("SELECT txid_current()::text").fetchone() or ("",)
        return str(xid)

    def run(self) -> None:
        with psycopg.connect(self.dsn) as second, psycopg.connect(self.dsn, autocommit=True) as third:
            self.await_waiting(third, self.first)
            later = self.xid(second)
            self.running.close()
            self.await_waiting(third, later)
            for gid, statements in self.gids.items():
                for statement in ("BEGIN", *statements, f"PREPARE TRANSACTION '{gid}'"):
                    third.execute(statement.encode())

    def await_waiting(self, session: psycopg.Connection[tuple[object, ...]], xid: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while (xid,) not in session.execute(AWAITED_QUERY).fetchall():
            assert time.monotonic() < deadline, f"no slot waits for {xid}"
            time.sleep(0.02)
