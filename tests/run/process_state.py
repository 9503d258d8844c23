"""What a stopped command leaves in its process, and what was told, is forgotten before each test.

A command's process ends with it. A worker of a run goes on to the next module, and which that is depends on how long
the others took: a test that passes only in a worker that has stopped nothing is one that differs from run to run.
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
    """Let this process be as one that has just begun."""
    stopping.forget_requests(kept="")
    stopping._is_sent.clear()
    stopping._is_signalled.clear()
    cutline.cli.main._signals.clear()
    # Else a signal within a second of another test's would be taken for the same one.
    cutline.cli.main._signalled_at = -math.inf
    waits._told.clear()
    clock.follow_machine()
    clocks._told_seconds = 0.0
