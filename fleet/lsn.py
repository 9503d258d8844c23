"""WAL positions as numbers: an int is a byte position in one node's WAL.

Positions of different nodes never compare. A position names the byte *after* what it includes: WAL "up to
c" is every record that begins before c (PostgreSQL's own use for end positions).
"""

from __future__ import annotations


def lsn_from_text(text: str) -> int:
    """Read PostgreSQL's form, "16/B374D848"; raise ValueError otherwise."""
    high, slash, low = text.partition("/")
    if not slash:
        raise ValueError(f"{text!r} is not a WAL position")
    return (int(high, 16) << 32) | int(low, 16)


def lsn_to_text(position: int) -> str:
    """Write PostgreSQL's form of a position."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
