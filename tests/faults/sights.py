"""Watch the effects of Spark tasks from outside: the command's own process only sees them after the whole job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from cutline.storage.store import ObjectStore

POLL_SECONDS = 0.005
SLOTS_QUERY = "SELECT slot_name, confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'"


class TaskEffect(StrEnum):
    """What one task has done while other tasks of its job have not yet."""

    BASE_OBJECT = "base object stored"
    SEGMENT = "segment stored"
    ADVANCED = "slot advanced"


@contextmanager
def on_effect(
    effect: TaskEffect, servers: EmbeddedFleet, store: ObjectStore, then: Callable[[], object]
) -> Iterator[threading.Event]:
    """During the block, call `then` once, as soon as the effect is seen; the event is set before that."""
    seen, done = threading.Event(), threading.Event()
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(psycopg.connect(node.dsn(), autocommit=True, application_name="tests"))
            for node in servers.nodes
        ]

        def objects() -> set[str]:
            part = {TaskEffect.BASE_OBJECT: "/base/", TaskEffect.SEGMENT: "/wal/"}[effect]
            return {key for key in store.list("snapshots") if part in key}

        def positions() -> set[tuple[int, str, str]]:
            return {(number, *row) for number, session in enumerate(sessions) for row in session.execute(SLOTS_QUERY)}

        look = positions if effect is TaskEffect.ADVANCED else objects
        known = look()

        def is_seen(now: set[object]) -> bool:
            if effect is not TaskEffect.ADVANCED:
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

        thread = threading.Thread(target=poll, name=f"look for {effect}")
        thread.start()
        try:
            yield seen
        finally:
            done.set()
            thread.join()
