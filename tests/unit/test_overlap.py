"""What a drain does at the same time: nothing is lost or reordered, errors come through, and memory stays bounded."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from cutline.storage.store import RequestStoppedError, check_not_stopped, stoppable_requests
from cutline.wal.drain.message_stream import AHEAD_BYTES, BackgroundCalls, read_ahead

SECONDS_MAX = 30.0
LOST_LOCK = re.compile("(un-acquired|unlocked) lock")
LARGE = pa.array([bytes(AHEAD_BYTES)], pa.binary())


class ReadError(Exception):
    """Reading failed."""


class StoreError(Exception):
    """Storing failed."""


def small(number: int) -> pa.Array[Any]:
    return pa.array([b"%d" % number], pa.binary())


def threads_left() -> list[str]:
    """Those that run: `enumerate` has a thread for ever whose start was interrupted."""
    return [one.name for one in threading.enumerate() if one.name == "read ahead" and one.is_alive()]


def test_batches_come_in_order_and_all() -> None:
    with read_ahead(lambda: (small(number) for number in range(1000))) as batches:
        found = [one.to_pylist() for one in batches]
    assert found == [[b"%d" % number] for number in range(1000)]
    assert threads_left() == []


def test_what_was_read_before_an_error_is_used_and_the_error_raised() -> None:
    def reading() -> Generator[pa.Array[Any], None, None]:
        yield small(1)
        raise ReadError

    found = []
    with pytest.raises(ReadError), read_ahead(reading) as batches:
        found.extend(one.to_pylist() for one in batches)
    assert found == [[b"1"]]


def test_reading_goes_on_while_a_batch_is_used() -> None:
    second_was_read = threading.Event()

    def reading() -> Generator[pa.Array[Any], None, None]:
        yield small(1)
        yield small(2)
        second_was_read.set()
        yield small(3)

    with read_ahead(reading) as batches:
        next(batches)
        # Nobody has asked for the second one.
        assert second_was_read.wait(SECONDS_MAX)


def test_no_more_is_read_than_is_allowed_to_wait() -> None:
    read: list[int] = []

    def reading() -> Generator[pa.Array[Any], None, None]:
        for number in range(4):
            read.append(number)
            yield LARGE

    with read_ahead(reading) as batches:
        for number, _ in enumerate(batches):
            time.sleep(0.1)
            # The one that is used counts, so the next one is not even begun.
            assert read == list(range(number + 1))


def test_whoever_leaves_early_ends_the_reading() -> None:
    closed: list[bool] = []

    def reading() -> Generator[pa.Array[Any], None, None]:
        try:
            while True:
                yield LARGE
        finally:
            closed.append(True)

    with read_ahead(reading) as batches:
        next(batches)
    assert (closed, threads_left()) == ([True], [])


def test_calls_run_one_at_a_time_and_in_order() -> None:
    running, seen, at_once = [0], list[int](), list[int]()

    def call(number: int) -> None:
        running[0] += 1
        at_once.append(running[0])
        time.sleep(0.01)
        seen.append(number)
        running[0] -= 1

    with BackgroundCalls() as behind:
        for number in range(5):
            behind.run(lambda number=number: call(number))
        behind.wait()
        assert seen == [0, 1, 2, 3, 4]
    assert set(at_once) == {1}


def test_the_caller_goes_on_while_a_call_runs() -> None:
    may_end, seen = threading.Event(), list[bool]()
    with BackgroundCalls() as behind:
        behind.run(lambda: seen.append(may_end.wait(SECONDS_MAX)))
        may_end.set()
        behind.wait()
    assert seen == [True]


def test_a_batch_is_released_when_its_user_releases_it() -> None:
    def reading() -> Generator[pa.Array[Any], None, None]:
        yield pa.concat_arrays([LARGE, LARGE])

    with read_ahead(reading) as batches:
        batch = next(batches)
        held_bytes = pa.total_allocated_bytes()
        del batch
        assert held_bytes - pa.total_allocated_bytes() >= 2 * AHEAD_BYTES


@pytest.mark.parametrize("way", ["run", "wait"])
def test_an_error_of_a_call_is_raised_by_the_next_one_which_does_not_run(way: str) -> None:
    seen: list[str] = []

    def fail() -> None:
        raise StoreError

    with BackgroundCalls() as behind:
        behind.run(fail)
        with pytest.raises(StoreError):
            behind.wait() if way == "wait" else behind.run(lambda: seen.append("next"))
    assert seen == []


def test_whoever_stops_the_requests_of_a_thread_stops_those_of_its_calls() -> None:
    with stoppable_requests() as stop:
        stop()
        with pytest.raises(RequestStoppedError), BackgroundCalls() as behind:
            behind.run(check_not_stopped)


def test_at_the_end_of_the_block_no_call_is_running() -> None:
    seen: list[str] = []

    def slow() -> None:
        time.sleep(0.1)
        seen.append("ended")

    with BackgroundCalls() as behind:
        behind.run(slow)
    assert seen == ["ended"]


def test_an_error_of_the_last_call_is_raised_at_the_end_of_the_block() -> None:
    def fail() -> None:
        raise StoreError

    with pytest.raises(StoreError), BackgroundCalls() as behind:
        behind.run(fail)


def test_an_error_of_the_block_is_not_hidden_by_one_of_a_call() -> None:
    def fail() -> None:
        raise StoreError

    def in_block() -> None:
        with BackgroundCalls() as behind:
            behind.run(fail)
            raise ReadError

    with pytest.raises(ReadError):
        in_block()


def test_an_interrupt_at_any_moment_does_not_keep_the_reading_from_ending() -> None:
    """The interrupt comes in the thread that uses the batches, wherever it is then."""
    with signal_handler(signal.SIGALRM, interrupt):
        for number in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + number / 100_000)
                with read_ahead(lambda: (small(n) for n in range(10_000))) as batches:
                    for _ in batches:
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            except RuntimeError as error:
                # Python raises it if the interrupt comes while it takes a lock again (threading.Condition).
                if not LOST_LOCK.search(str(error)):
                    raise
    deadline = time.monotonic() + SECONDS_MAX
    while threads_left():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def signal_handler(number: int, handler: Callable[..., object]) -> Generator[None, None, None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)
