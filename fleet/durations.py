"""Parse lengths of time as people write them."""

from __future__ import annotations

import re

WORD_SECONDS = {"never": 0, "hourly": 3600, "daily": 86400, "weekly": 7 * 86400, "monthly": 30 * 86400}
UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
# Longer ones would lead out of the calendar.
DAYS_MAX = 36_500
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


class Duration(float):
    """A length of time in seconds, written as `24h`, `90 min`, `1.5d` or `0`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Parse a number with its unit; raise ValueError for anything else."""
        if text.strip() == "0":
            return cls(0)
        match = DURATION.fullmatch(text.strip())
        if match is None or match[2] not in UNIT_SECONDS:
            raise ValueError(f"{text!r} is not a length of time such as 24h, 30min or 7d")
        if (seconds := float(match[1]) * UNIT_SECONDS[match[2]]) > DAYS_MAX * UNIT_SECONDS["d"]:
            raise ValueError(f"{text!r} is more than {DAYS_MAX:,} days")
        return cls(seconds)

    @classmethod
    def from_document(cls, value: object) -> Duration:
        """Parse a string; raise ValueError for a number, which has no unit."""
        if not isinstance(value, str):
            raise ValueError('a length of time is a string such as "24h"')
        return cls.parse(value)


class Interval(Duration):
    """How often something is done, in seconds: a length of time, or `hourly`, `daily`, `weekly`, `monthly` (30 days).

    0, written as `never`: not at all.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Parse a word or a length of time that is not 0; raise ValueError for anything else."""
        if text in WORD_SECONDS:
            return cls(WORD_SECONDS[text])
        if not (seconds := Duration.parse(text)):
            raise ValueError(f'{text!r} is no interval; if it is not to be done at all, write "never"')
        return cls(seconds)
