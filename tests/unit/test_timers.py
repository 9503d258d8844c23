"""Timers for blocks: whether and when the call is made."""

import threading
import time

import pytest

from cutline.fleet.timers import calling_after


def test_the_call_is_made_while_the_block_is_running() -> None:
    called = threading.Event()
    with calling_after(0.01, called.set):
        assert called.wait(10)


def test_a_block_that_ends_in_time_makes_no_call() -> None:
    called = threading.Event()
    with calling_after(0.3, called.set):
        pass
    assert not called.wait(0.6)


def test_a_block_that_raises_in_time_makes_no_call() -> None:
    called = threading.Event()
    with pytest.raises(ValueError, match="an error"), calling_after(0.3, called.set):
        raise ValueError("an error")
    assert not called.wait(0.6)


@pytest.mark.parametrize("waits", [False, True])
def test_only_a_timer_that_waits_completes_a_call_that_has_begun(*, waits: bool) -> None:
    begun, ended = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        time.sleep(0.3)
        ended.set()

    with calling_after(0.01, call, waits=waits):
        assert begun.wait(10)
    assert ended.is_set() is waits
    assert ended.wait(10)
