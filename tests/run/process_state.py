"""Reset, before and after each test, the state that commands leave in their process.

A user's process ends with its command, but a test worker continues with another module, which depends on the timing of
the run. Without the reset, the result of a test could depend on the tests before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

import cutline.cli.main
from cutline.cli.process import stopping
from cutline.nodes import clocks
from cutline.storage import clock, waits


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """Reset this process to the state of a new process."""
    stopping.forget_requests(kept="")
    stopping._is_sent.clear()
    stopping._is_signalled.clear()
    cutline.cli.main._signals.clear()
    # Otherwise a signal within a second of another test's signal would be taken for the same signal.
    cutline.cli.main._signalled_at = -math.inf
    waits._told.clear()
    clock.follow_machine()
    clocks._told_seconds = 0.0
