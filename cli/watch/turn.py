"""The turn of a watch: at most one `watch` per fleet is active at a time; others stand by until it ends.

The watch has its own lock, separate from the fleet's, so that other commands can run between its tasks. The lock is
released with the process's sessions, however the process ends. Two watches at once would do no harm, because every task
takes the fleet's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from threading import Thread

from msgspec import Struct, field

from cutline.cli.watch.fleet_source import FleetSource
from cutline.fleet.config import Fleet
from cutline.fleet.own_process import Label, end_sessions_statement, own_label
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.lock import FleetLock, FleetLockLostError, lock_fleet, watch_lock
from cutline.nodes.roles import find_roles
from cutline.nodes.sessions import open_sessions
from cutline.nodes.watch import SilentNodeError
from cutline.snapshots.operations.cancelling import forget
from cutline.snapshots.operations.under_way import WATCH, ActivityState, hanging_watch, read_under_way
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, SnapshotError

LOOK_SECONDS = 30.0


class SilentWatchError(BusyError):
    """The watch that holds the lock shows no sign of life."""


class SilentWatch(Struct):
    """Checks from time to time whether the watch that holds the lock sends heartbeats."""

    _looked_at: float = -LOOK_SECONDS
    _found: SilentWatchError | None = None

    def find(self, source: FleetSource, busy: BusyError) -> SilentWatchError | None:
        """Return an error if the watch that `busy` names sends no heartbeats; if unknown, return the last answer."""
        # Compare processes: the error may name any session of the same watch.
        if self._found is not None and _process_of(self._found) != _process_of(busy):
            self._found = None
        if time.monotonic() >= self._looked_at + LOOK_SECONDS:
            self._looked_at = time.monotonic()
            with suppress(SnapshotError):
                self._found = _find(source, busy)
        return self._found


def _process_of(busy: BusyError) -> tuple[object, ...]:
    return tuple(busy.details.get(name) for name in ("user", "host", "process"))


def _find(source: FleetSource, busy: BusyError) -> SilentWatchError | None:
    user, host, process = _process_of(busy)
    if not isinstance(process, int):
        return None
    label = Label("watch", "", str(user), str(host), process).text()
    way = hanging_watch(read_under_way(source.open_store()), label, utc_now())
    if way is None:
        return None
    return SilentWatchError(
        f"the watch of {user}@{host} (process {process}) holds the watch lock, but has shown no sign of life since"
        f" {way.seen_at}",
        hint=f"kill its process, or terminate its sessions on every primary: {end_sessions_statement(label)}",
        details=busy.details,
    )


# After this time, a watch that was killed when this watch took over counts as dead.
FORGET_SECONDS = 180.0


class DeadWatches(Struct):
    """Records dead watches once, a while after this watch got its turn."""

    _due_at: float | None = field(default_factory=lambda: time.monotonic() + FORGET_SECONDS)

    def forget_when_due(self, source: FleetSource, log: Callable[..., None]) -> None:
        """Record each dead watch; if the store does not answer, try again after the same interval."""
        if self._due_at is None or time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + FORGET_SECONDS
        with suppress(SnapshotError):
            store, now = source.open_store(), utc_now()
            for way in read_under_way(store):
                if way.kind == WATCH and way.opened is None and way.state(now) is ActivityState.DEAD:
                    log(f"operation {way.id}, an earlier watch: {forget(store, way, Silent()).text}")
            self._due_at = None


RENEW_SECONDS, ANSWER_SECONDS = 30.0, 1.0
LOST_HINT = (
    "check the server's log to see why the session ended; a connection pooler must not drop or share the session"
)


class Turn(Struct):
    """The process's turn to work for the fleet."""

    lock: FleetLock
    log: Callable[..., None]
    # Returns the promoted standbys by primary, as far as they answer (nodes/roles.py).
    find_promoted: Callable[[], Mapping[str, str]] = dict
    _promoted: Mapping[str, str] = field(default_factory=dict)
    _renewed_at: float = 0.0
    _problem: str = ""
    # The renewal in progress: tasks continue while it waits for a node that does not respond.
    _renewal: Future[None] | None = None

    def keep(self) -> bool:
        """Whether this process still has its turn, as far as is known. An unreachable node does not end the turn."""
        if self._renewal is None and time.monotonic() >= self._renewed_at + RENEW_SECONDS:
            self._renewal = Future()
            Thread(target=self._renew, args=(self._renewal,), name="watch lock", daemon=True).start()
            # Give nodes time to answer, so that a lost lock is noticed now.
            wait([self._renewal], ANSWER_SECONDS)
        if self._renewal is None or not self._renewal.done():
            return True
        renewal, self._renewal, self._renewed_at = self._renewal, None, time.monotonic()
        try:
            renewal.result()
        except NodeUnreachableError as error:
            if promoted := self._promoted_since():
                servers = ", ".join(f"{standby} as {primary}" for primary, standby in promoted.items())
                self.log(f"a standby was promoted: {servers}; the watch starts over, to take its lock there")
                return False
            problem = self._why(error)
            if problem.message != self._problem:
                self.log(f"the watch lock: {problem.message}", hint=problem.hint)
            self._problem = problem.message
        except FleetLockLostError as error:
            text = f"node {error.details['node']}: the watch lock was lost; another watch may have taken over"
            self.log(f"{text}, so this watch starts over: it takes the lock again, or stands by", hint=LOST_HINT)
            return False
        except SnapshotError as error:
            # The hint is for commands outside a watch.
            self.log(f"{error.message}; the watch starts over")
            return False
        else:
            self._problem = ""
        return True

    def end(self) -> None:
        """Stop waiting for a node's answer."""
        if self._renewal is not None and not self._renewal.done():
            self.lock.interrupt()

    def _promoted_since(self) -> dict[str, str]:
        """Return the servers that have taken the places of primaries since the lock was taken, by primary."""
        return {
            primary: standby
            for primary, standby in self._promoted.items()
            if self.lock.sessions.promoted.get(primary) != standby
        }

    def _renew(self, renewal: Future[None]) -> None:
        try:
            try:
                self.lock.renew()
            except NodeUnreachableError:
                self._promoted = self.find_promoted()
                raise
        except BaseException as error:  # noqa: BLE001  # raised where the result is asked for
            renewal.set_exception(error)
        else:
            renewal.set_result(None)

    def _why(self, error: NodeUnreachableError) -> SnapshotError:
        """Return the reason why a node can't be asked.

        If the node did not respond, this process has ended its session on that node.
        """
        try:
            self.lock.sessions.watch.check()
        except SilentNodeError as silent:
            return silent
        return error


@contextmanager
def take_turn(fleet: Fleet, log: Callable[..., None]) -> Iterator[Turn]:
    """Hold the fleet's watch lock; raise FleetBusyError, which names its holder, or NodeUnreachableError."""
    with (
        open_sessions(fleet, fleet.primaries) as sessions,
        lock_fleet(sessions, watch_lock(fleet), own_label("watch")) as lock,
    ):
        turn = Turn(lock, log, partial(find_roles, fleet), _renewed_at=time.monotonic())
        try:
            yield turn
        finally:
            turn.end()
