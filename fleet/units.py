"""Parse and print durations and sizes in bytes as people write them."""

from __future__ import annotations

import re

WORD_SECONDS = {"never": 0, "hourly": 3600, "daily": 86400, "weekly": 7 * 86400, "monthly": 30 * 86400}
UNIT_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
# Units that people also write, and the units that they mean: how many of which.
MEANT_UNITS = {
    **dict.fromkeys(("sec", "secs", "second", "seconds"), (1, "s")),
    **dict.fromkeys(("m", "mins", "minute", "minutes"), (1, "min")),
    **dict.fromkeys(("hr", "hrs", "hour", "hours"), (1, "h")),
    **dict.fromkeys(("day", "days"), (1, "d")),
    **dict.fromkeys(("w", "week", "weeks"), (7, "d")),
}
# Longer durations would exceed Python's range of dates.
DAYS_MAX = 36_500
# Below this, a row of 1 MB would take longer than the time limits of some servers and proxies.
RATE_MIN = 100_000
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


class Duration(float):
    """A duration in seconds, written as `24h`, `90 min`, `1.5d` or `0`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Parse a number with its unit; raise ValueError for anything else."""
        if text.strip() == "0":
            return cls(0)
        match = DURATION.fullmatch(text.strip())
        if match is None or match[2] not in UNIT_SECONDS:
            raise ValueError(f"{text!r} is not a duration such as 24h, 30min or 7d{_meant_text(match)}")
        if (seconds := float(match[1]) * UNIT_SECONDS[match[2]]) > DAYS_MAX * UNIT_SECONDS["d"]:
            raise ValueError(f"{text!r} is more than {DAYS_MAX:,} days")
        return cls(seconds)

    @classmethod
    def from_document(cls, value: object) -> Duration:
        """Parse a string; raise ValueError for any other type, such as a number without a unit."""
        if not isinstance(value, str):
            raise ValueError('a duration is a string such as "24h"')
        return cls.parse(value)


def _meant_text(match: re.Match[str] | None) -> str:
    """Return which duration was probably meant, for the message; "" if that is not known."""
    if match is None:
        return ""
    # `M` may stand for months.
    unit = match[2] if match[2] == "M" else match[2].lower()
    factor, meant = MEANT_UNITS.get(unit, (1, unit))
    return f": write {float(match[1]) * factor:g}{meant}" if meant in UNIT_SECONDS else ""


class Interval(Duration):
    """The interval of a scheduled task in seconds: a duration, `hourly`, `daily`, `weekly` or `monthly` (30 days).

    0, written as `never`, disables the task.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Parse a word or a duration other than 0; raise ValueError for anything else."""
        if text in WORD_SECONDS:
            return cls(WORD_SECONDS[text])
        if not (seconds := Duration.parse(text)):
            raise ValueError(f'{text!r} is not an interval; to disable the task, write "never"')
        return cls(seconds)


class Rate(int):
    """A number of bytes per second, written as `50MB/s` or `16 MiB/s`."""

    __slots__ = ()

    @classmethod
    def from_document(cls, value: object) -> Rate:
        """Parse a size with its unit, followed by `/s`; raise ValueError for anything else, and below RATE_MIN."""
        if not isinstance(value, str) or not value.endswith("/s"):
            raise ValueError('a rate is a string such as "50MB/s"')
        rate = cls(Size.parse(value.removesuffix("/s")))
        if rate < RATE_MIN:
            raise ValueError(f"{value!r} is less than {RATE_MIN // 1000} kB/s")
        return rate


def duration_text(seconds: float) -> str:
    """Return a duration in the largest unit of which it is a whole number: `30 days`, `36 h`, `90 min`, `2.5 s`."""
    for unit, unit_seconds in reversed(UNIT_SECONDS.items()):
        if seconds and not seconds % unit_seconds:
            count = round(seconds / unit_seconds)
            return f"{count:,} {'day' if count == 1 else 'days'}" if unit == "d" else f"{count:,} {unit}"
    return f"{seconds:g} s"


SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
BYTES_PER_UNIT = 1024
# The units in which sizes are written: KiB, MiB and so on are powers of 1024; KB, MB and so on are powers of 1000.
UNIT_BYTES = {
    "B": 1,
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
# What a bigint can hold.
SIZE_MAX = 2**63 - 1


def size_text(size_bytes: int) -> str:
    """Format a size with one decimal, except bytes: `0 B`, `1023 B`, `1.5 KiB`, `12.0 GiB`."""
    size = float(size_bytes)
    for unit in SIZE_UNITS:
        # 1023.95 and above would print as 1024.0.
        if abs(size) < BYTES_PER_UNIT - 0.05 or unit == SIZE_UNITS[-1]:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= BYTES_PER_UNIT
    raise AssertionError("the last unit always returns")


class Size(int):
    """A number of bytes, written as 1024 or as `16GiB`, `1.5 TB` or `500MB`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse a number with its unit; raise ValueError for anything else."""
        match = SIZE.fullmatch(text.strip())
        if match is None or match[2].upper() not in UNIT_BYTES:
            raise ValueError(f"{text!r} is not a size such as 16GiB or 500MB")
        if (size := float(match[1]) * UNIT_BYTES[match[2].upper()]) > SIZE_MAX:
            raise ValueError(f"{text[:40]!r} is more than {size_text(SIZE_MAX)}")
        return cls(size)

    @classmethod
    def from_document(cls, value: object) -> Size:
        """Read a number of bytes, or parse a size with its unit; raise ValueError unless it is positive."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError('a size is a number of bytes, or a string such as "16GiB"')
        size = cls.parse(value) if isinstance(value, str) else cls(value)
        if size <= 0:
            raise ValueError("a size must be positive")
        if size > SIZE_MAX:
            raise ValueError(f"a size must be at most {size_text(SIZE_MAX)}")
        return size
