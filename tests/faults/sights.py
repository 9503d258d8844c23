"""What executors do, as it is seen from outside: the command's own process learns of it only when all is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum

import psycopg

from embedded.fleet import EmbeddedFleet
from storage.store import ObjectStore

POLL_SECONDS = 0.005
SLOTS_QUERY = "SELECT slot_name, confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'"


class Sight(StrEnum):
    """Something that a task has done, and others of its job have not yet."""

    BASE_OBJECT = "base object stored"
    SEGMENT = "segment stored"
    ADVANCED = "slot advanced"


@contextmanager
def sighting(
    sight: Sight, servers: EmbeddedFleet, store: ObjectStore, then: Callable[[], object]
) -> Iterator[threading.Event]:
    """While the block runs, call `then` as soon as it is seen; the event says that it was."""
    seen, done = threading.Event(), threading.Event()
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(psycopg.connect(node.dsn(), autocommit=True, application_name="tests"))
            for node in servers.nodes
        ]

        def objects() -> set[str]:
            part = {Sight.BASE_OBJECT: "/base/", Sight.SEGMENT: "/wal/"}[sight]
            return {key for key in store.list("snapshots") if part in key}

        def positions() -> set[tuple[int, str, str]]:
            return {(number, *row) for number, session in enumerate(sessions) for row in session.execute(SLOTS_QUERY)}

        look = positions if sight is Sight.ADVANCED else objects
        known = look()

        def is_seen(now: set[object]) -> bool:
            if sight is not Sight.ADVANCED:
                return bool(now - known)
            slots = {(one[0], one[1]) for one in known}
            return any((one[0], one[1]) in slots for one in now - known)

        def poll() -> None:
            nonlocal known
            while not done.wait(POLL_SECONDS):
                now = look()
                if is_seen(now):
                    seen.set()
                    then()
                    return
                known |= now

        thread = threading.Thread(target=poll, name=f"look for {sight}")
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()
