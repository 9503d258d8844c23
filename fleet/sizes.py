"""Parse and print sizes in bytes."""

from __future__ import annotations

import re

SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
BYTES_PER_UNIT = 1024
# The units of a given size: KiB and so on are powers of 1024, KB and so on powers of 1000.
UNIT_BYTES = {
    "B": 1,
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def size_text(size_bytes: int) -> str:
    """Print a size: `0 B`, `1023 B`, `1.5 KiB`, `12.0 GiB`; one decimal, none for bytes."""
    size = float(size_bytes)
    for unit in SIZE_UNITS:
        # 1023.95 and above would print as 1024.0.
        if abs(size) < BYTES_PER_UNIT - 0.05 or unit == SIZE_UNITS[-1]:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= BYTES_PER_UNIT
    raise AssertionError("the last unit always returns")


class Size(int):
    """A number of bytes, written as 1024, or as `16GiB`, `1.5 TB`, `500MB`."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Size:
        """Parse a number with its unit; raise ValueError for anything else."""
        match = SIZE.fullmatch(text.strip())
        if match is None or match[2].upper() not in UNIT_BYTES:
            raise ValueError(f"{text!r} is not a size such as 16GiB or 500MB")
        return cls(float(match[1]) * UNIT_BYTES[match[2].upper()])

    @classmethod
    def from_document(cls, value: object) -> Size:
        """Read a number of bytes, or parse a size with its unit; raise ValueError unless it is positive."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError('a size is a number of bytes, or a string such as "16GiB"')
        size = cls.parse(value) if isinstance(value, str) else cls(value)
        if size <= 0:
            raise ValueError("a size must be positive")
        return size
