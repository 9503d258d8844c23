"""Wait for a standby: its slot yields only WAL that the standby has replayed."""

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
    """A standby did not replay WAL up to the cut in time."""


def await_replay(connection: psycopg.Connection[Any], node: Node, finish: Lsn) -> None:
    """Wait until the standby has replayed up to `finish`; raise ReplayLagError after REPLAY_SECONDS_MAX."""
    deadline = time.monotonic() + REPLAY_SECONDS_MAX
    while True:
        (text,) = connection.execute("SELECT pg_last_wal_replay_lsn()::text").fetchone() or ("0/0",)
        if Lsn.parse(text) >= finish:
            return
        if time.monotonic() > deadline:
            raise ReplayLagError(
                f"node {node.id}: the standby has replayed WAL only up to {text} of {finish}"
                f" after {REPLAY_SECONDS_MAX:.0f} s",
                hint="find out why the standby lags, or leave out standbys: --only-primary",
                details={"node": node.id},
            )
        time.sleep(REPLAY_POLL_SECONDS)
