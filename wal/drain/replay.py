"""Waiting for a standby: its slot gives what it has replayed, and no more."""

from __future__ import annotations

import time
from typing import Any

import psycopg

from fleet.config import Node
from fleet.lsn import Lsn
from storage.errors import UnreachableError

REPLAY_POLL_SECONDS = 0.05
REPLAY_SECONDS_MAX = 600.0


class ReplayLagError(UnreachableError):
    """A standby has not replayed up to the cut in time."""


def await_replay(connection: psycopg.Connection[Any], node: Node, finish: Lsn) -> None:
    """Return once the standby has replayed up to `finish`; raise ReplayLagError if it does not in time."""
    deadline = time.monotonic() + REPLAY_SECONDS_MAX
    while True:
        (text,) = connection.execute("SELECT pg_last_wal_replay_lsn()::text").fetchone() or ("0/0",)
        if Lsn.parse(text) >= finish:
            return
        if time.monotonic() > deadline:
            raise ReplayLagError(
                f"node {node.id}: replayed only {text} of {finish} after {REPLAY_SECONDS_MAX:.0f} s",
                hint="see why the standby lags, or leave standbys out: --only-primary",
                details={"node": node.id},
            )
        time.sleep(REPLAY_POLL_SECONDS)
