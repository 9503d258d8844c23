"""At most one `watch` of a fleet works: it holds a lock on all primaries; others stand by until it is gone.

The lock is not the fleet's: between two tasks of the watch others may do theirs. It ends with the sessions of its
process, however that ends. Two watches at once would harm nothing, as every task takes the fleet's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from cutline.fleet.config import Fleet
from cutline.fleet.label import own_label
from cutline.fleet.nodes.connections import NodeUnreachableError
from cutline.fleet.nodes.lock import FleetLock, FleetLockLostError, lock_fleet, watch_lock
from cutline.fleet.nodes.sessions import open_sessions
from cutline.fleet.nodes.watch import SilentNodeError
from cutline.storage.errors import SnapshotError

RENEW_SECONDS, ANSWER_SECONDS = 30.0, 1.0
LOST_HINT = "see the server's log for what ended the session; a connection pooler must keep sessions"


@dataclass(slots=True)
class Turn:
    """The turn of this process to work for the fleet."""

    lock: FleetLock
    log: Callable[..., None]
    _renewed_at: float = 0.0
    _problem: str = ""
    # A silent node is waited for beside the tasks.
    _renewal: Future[None] | None = None

    def keep(self) -> bool:
        """Whether this process still has its turn, as far as that is known. A node that is away does not end it."""
        if self._renewal is None and time.monotonic() >= self._renewed_at + RENEW_SECONDS:
            self._renewal = Future()
            Thread(target=self._renew, args=(self._renewal,), name="watch lock", daemon=True).start()
            # Nodes that answer say now whether another watch may have begun.
            wait([self._renewal], ANSWER_SECONDS)
        if self._renewal is None or not self._renewal.done():
            return True
        renewal, self._renewal, self._renewed_at = self._renewal, None, time.monotonic()
        try:
            renewal.result()
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
            # Its hint is for whoever has no watch.
            self.log(f"{error.message}; the watch begins anew")
            return False
        else:
            self._problem = ""
        return True

    def end(self) -> None:
        """Wait no more for a node that is asked now."""
        if self._renewal is not None and not self._renewal.done():
            self.lock.interrupt()

    def _renew(self, renewal: Future[None]) -> None:
        try:
            self.lock.renew()
        except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
            renewal.set_exception(error)
        else:
            renewal.set_result(None)

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
        turn = Turn(lock, log, time.monotonic())
        try:
            yield turn
        finally:
            turn.end()
