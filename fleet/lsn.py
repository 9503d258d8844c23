"""WAL positions as numbers: an int is a byte position in one node's WAL.

Positions of different nodes never compare. A position names the byte *after* what it includes: WAL "up to
c" is every record that begins before c (PostgreSQL's own use for end positions).
"""

from __future__ import annotations

import re

LSN = re.compile("[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}")


def lsn_from_text(text: str) -> int:
    """Read PostgreSQL's form, "16/B374D848"; raise ValueError otherwise."""
    if not LSN.fullmatch(text):
        raise ValueError(f"{text!r} is not a WAL position")
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_to_text(position: int) -> str:
    """Write PostgreSQL's form of a position."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
