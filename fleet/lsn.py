"""WAL positions, and how they are written.

Positions of different nodes never compare. A position names the byte *after* what it includes: WAL "up to c" is every
record that begins before c, as PostgreSQL's own end positions mean it.
"""

from __future__ import annotations

import re

LSN = re.compile("[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}")


class Lsn(int):
    """A byte position in one node's WAL (PostgreSQL manual, "pg_lsn Type"). Printed, it is PostgreSQL's text form.

    It is an int, because columns of positions are 64-bit integers in Arrow and numpy, and are compared with it.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Read PostgreSQL's form, `16/B374D848`; raise ValueError otherwise."""
        if not LSN.fullmatch(text):
            raise ValueError(f"{text!r} is not a WAL position")
        high, _, low = text.partition("/")
        return cls((int(high, 16) << 32) | int(low, 16))

    def __str__(self) -> str:
        return f"{int(self) >> 32:X}/{int(self) & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self})"


# Before every record.
ORIGIN = Lsn(0)
