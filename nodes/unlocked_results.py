"""Exchange data with a server without keeping Python's lock while waiting.

psycopg keeps the lock while libpq waits in `get_result` and in the functions for COPY. In a thread of the command that
would stop all other threads: neither an interrupt nor the watch over silent nodes would be noticed.
"""

from __future__ import annotations

import select

from psycopg.pq.abc import PGconn, PGresult


def exchange(libpq: PGconn, events: int = select.POLLIN | select.POLLOUT) -> None:
    """Wait until the socket is ready for one of the `events`, and read what has arrived."""
    poll = select.poll()
    poll.register(libpq.socket, events)
    if any(ready & ~select.POLLOUT for _, ready in poll.poll()):
        libpq.consume_input()


def next_line(libpq: PGconn) -> tuple[int, memoryview]:
    """Wait for the next line of a COPY TO STDOUT; return its length and content, or -1 after the last line."""
    while not (received := libpq.get_copy_data(1))[0]:
        exchange(libpq, select.POLLIN)
    return received


def next_result(libpq: PGconn) -> PGresult | None:
    """Wait for the next result of a statement and return it; None after the last. Raises psycopg.OperationalError."""
    while libpq.is_busy():
        exchange(libpq, select.POLLIN)
    return libpq.get_result()
