"""At most one `watch` of a fleet works: it holds a lock on all primaries; others stand by until it is gone.

The lock is not the fleet's: between two tasks of the watch others may do theirs. It ends with the sessions of its
process, however that ends. Two watches at once would harm nothing, as every task takes the fleet's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fleet.config import Fleet
from fleet.label import own_label
from fleet.nodes.connections import NodeUnreachableError
from fleet.nodes.lock import FleetLock, FleetLockLostError, lock_fleet, watch_lock
from fleet.nodes.sessions import open_sessions
from fleet.nodes.watch import SilentNodeError
from storage.errors import SnapshotError

RENEW_SECONDS = 30.0
LOST_HINT = "see the server's log for what ended the session; a connection pooler must keep sessions"


@dataclass(slots=True)
class Turn:
    """The turn of this process to work for the fleet."""

    lock: FleetLock
    log: Callable[..., None]
    _renewed_at: float = 0.0
    _problem: str = ""

    def keep(self) -> bool:
        """Whether this process still has its turn. A node that is away does not end it."""
        if time.monotonic() < self._renewed_at + RENEW_SECONDS:
            return True
        self._renewed_at = time.monotonic()
        try:
            self.lock.renew()
        except NodeUnreachableError as error:
            problem = self._why(error)
            if problem.message != self._problem:
                self.log(f"the lock of the watch: {problem.message}", hint=problem.hint)
            self._problem = problem.message
        except FleetLockLostError as error:
            text = f"node {error.details['node']}: the watch's lock was lost; another watch may have begun"
            self.log(f"{text}, so this one begins anew: it takes the lock again, or stands by", hint=LOST_HINT)
            return False
        except SnapshotError as error:
            self.log(f"{error.message}; the watch begins anew", hint=error.hint)
            return False
        else:
            self._problem = ""
        return True

    def _why(self, error: NodeUnreachableError) -> SnapshotError:
        """Why a node can't be asked: of one that was silent, the session was ended here."""
        try:
            self.lock.sessions.watch.check()
        except SilentNodeError as silent:
            return silent
        return error


@contextmanager
def take_turn(fleet: Fleet, log: Callable[..., None]) -> Iterator[Turn]:
    """Hold the lock of the fleet's watch; raise FleetBusyError naming the one that has it, NodeUnreachableError."""
    with (
        open_sessions(fleet, fleet.primaries) as sessions,
        lock_fleet(sessions, watch_lock(fleet), own_label("watch")) as lock,
    ):
        yield Turn(lock, log, time.monotonic())
