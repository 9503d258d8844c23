"""WAL positions (LSN) and their text form.

Never compare positions on different nodes. An end position is exclusive, as in PostgreSQL: WAL "up to c" is every
record that begins before c.
"""

from __future__ import annotations

import re

LSN = re.compile("[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}")


class Lsn(int):
    """A byte position in one node's WAL (PostgreSQL manual, "pg_lsn Type"); str() gives PostgreSQL's text form.

    It is an int so that it can be compared with columns of positions, which are 64-bit integers in Arrow and numpy.
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Parse PostgreSQL's text form, `16/B374D848`; raise ValueError for anything else."""
        if not LSN.fullmatch(text):
            raise ValueError(f"{text!r} is not a WAL position")
        high, _, low = text.partition("/")
        return cls((int(high, 16) << 32) | int(low, 16))

    def __str__(self) -> str:
        return f"{int(self) >> 32:X}/{int(self) & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self})"


# The position before every record.
ORIGIN = Lsn(0)
