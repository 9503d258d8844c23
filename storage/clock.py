"""The time, as this process has it: by its machine's clock, until the nodes' clocks show that it is wrong.

`utc_now` gives all times that are stored or decide something. Durations use time.monotonic. Nodes' clocks are read in
nodes/clocks.py.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# The right time at a count of the steady clock; None while the machine's clock is used.
_anchor: tuple[datetime, float] | None = None


def utc_now() -> datetime:
    """The time in UTC, by the machine's clock or as corrected by `set_time`."""
    if _anchor is None:
        return machine_now()
    moment, count = _anchor
    return moment + timedelta(seconds=steady_seconds() - count)


def machine_now() -> datetime:
    """The time by the machine's clock, which may be wrong."""
    return datetime.now(UTC)


def steady_seconds() -> float:
    """A count of seconds that continues while the machine is suspended, and that setting its clock does not change."""
    return time.clock_gettime(_STEADY)


def set_time(moment: datetime, steady: float) -> None:
    """Let the time at the count `steady` have been `moment`; what becomes of the machine's clock does not matter."""
    global _anchor  # the state of this process
    _anchor = (moment, steady)


def follow_machine() -> None:
    """Let `utc_now` be the machine's clock again."""
    global _anchor  # the state of this process
    _anchor = None
