"""The current time, according to this machine's clock unless the nodes' clocks show that it is wrong.

Use `utc_now` for every time that is stored or that a decision depends on. Durations use time.monotonic. nodes/clocks.py
reads the nodes' clocks.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# The correct time at a given reading of the steady clock; None while the machine's clock is used.
_anchor: tuple[datetime, float] | None = None


def utc_now() -> datetime:
    """Return the time in UTC, according to the machine's clock or as corrected by `set_time`."""
    if _anchor is None:
        return machine_now()
    moment, count = _anchor
    return moment + timedelta(seconds=steady_seconds() - count)


def machine_now() -> datetime:
    """Return the time according to the machine's clock, which may be wrong."""
    return datetime.now(UTC)


def steady_seconds() -> float:
    """Return a count of seconds that continues while the machine is suspended and ignores changes to its clock."""
    return time.clock_gettime(_STEADY)


def set_time(moment: datetime, steady: float) -> None:
    """Set the time to `moment` as of the reading `steady` of `steady_seconds`, whatever the machine's clock says."""
    global _anchor  # process-wide state
    _anchor = (moment, steady)


def follow_machine() -> None:
    """Make `utc_now` return the machine's time again."""
    global _anchor  # process-wide state
    _anchor = None
