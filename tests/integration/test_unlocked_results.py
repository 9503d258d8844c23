"""While a thread waits for a server, the other threads run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.nodes.groups import Column, Group
from cutline.restore.rows.load import _copy_in
from cutline.snapshots.base_copy.copy_ranges import PageRange, copy_lines
from cutline.storage.rate import RateLimit

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet

SECONDS = 1.0
GROUP = Group(1, "public", "slow", "default", 1, (Column("id", "int", 23, -1, 0),), 1)


@pytest.fixture
def connection(shared_fleet: EmbeddedFleet) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_fleet.dsns()[0], autocommit=True) as found:
        yield found


def longest_pause(work: Callable[[], object]) -> float:
    """Do the work in a thread; return the longest time in which this thread could not run."""
    thread = threading.Thread(target=work)
    # The thread may begin to wait before this one runs again.
    longest, last = 0.0, time.monotonic()
    thread.start()
    while thread.is_alive():
        time.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


def test_a_copy_that_waits_for_the_next_line_does_not_stop_other_threads(connection: psycopg.Connection[Any]) -> None:
    # The first lines are longer than the server's buffer.
    query = (
        f"COPY (SELECT repeat('x', 200000), pg_sleep({SECONDS} * (n / 3)) FROM generate_series(1, 3) n)"
        " TO STDOUT (ENCODING 'SQL_ASCII')"
    )
    lines: list[int] = []

    def copy() -> None:
        for found in copy_lines(connection, None, PageRange(GROUP, 0), query):
            lines.append(len(found))

    began = time.monotonic()
    assert longest_pause(copy) < SECONDS / 2
    assert time.monotonic() - began >= SECONDS
    assert sum(lines) == 3


def test_a_load_that_waits_for_the_server_does_not_stop_other_threads(connection: psycopg.Connection[Any]) -> None:
    connection.execute(f"CREATE TEMPORARY TABLE slow (id int CHECK (pg_sleep({SECONDS}) IS NOT NULL))")
    stored: list[int] = []

    def copy() -> None:
        stored.append(_copy_in(connection, "COPY slow FROM STDIN", memoryview(b"1\n"), RateLimit(None)))

    assert longest_pause(copy) < SECONDS / 2
    assert stored == [1]
