"""Gaps between restore points. Pure values: the current time is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

# A span is a gap if it is longer than so many times the median. Of fewer spans no median is usual.
GAP_FACTOR, SPANS_MIN = 3, 3


@dataclass(frozen=True, slots=True)
class RestorePlace:
    """Where one can restore to: a commit and when its cut was made.

    `ended` says why its chain can't be continued after it; "" for all others.
    """

    snapshot: str
    increment: int
    at: datetime
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """A span without a restore point: after one, before the next (None: until now). `why` is "" if it is only long."""

    after: RestorePlace
    before: RestorePlace | None
    until: datetime
    why: str

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.until - self.after.at).total_seconds()


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps, the oldest first, and the median span in seconds; None if there are too few."""

    median_seconds: float | None
    found: tuple[Gap, ...]

    @property
    def limit_seconds(self) -> float | None:
        """A longer span is a gap."""
        return None if self.median_seconds is None else GAP_FACTOR * self.median_seconds


def find_gaps(places: Iterable[RestorePlace], now: datetime) -> Gaps:
    """The spans between neighbours that are longer than usual, or in which a chain ended and the next began.

    The newest place and `now` are neighbours, too, but that span does not count for the median: it still grows.
    """
    ordered = sorted(places, key=lambda one: (one.at, one.snapshot, one.increment))
    pairs = list(pairwise(ordered))
    spans = [(before.at - after.at).total_seconds() for after, before in pairs]
    usual = median(spans) if len(spans) >= SPANS_MIN else None
    candidates = [Gap(after, before, before.at, after.ended) for after, before in pairs]
    candidates += [Gap(newest, None, now, newest.ended) for newest in ordered[-1:]]
    found = Gaps(usual, ())
    limit = found.limit_seconds
    return Gaps(usual, tuple(one for one in candidates if one.why or (limit is not None and one.seconds > limit)))
