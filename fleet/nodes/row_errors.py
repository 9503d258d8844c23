"""Errors of a server that a single row causes, and what to do: it can't be printed, so neither copied nor decoded."""

from __future__ import annotations

import re

# Data exception, program limit exceeded, internal error or damaged data; and out of memory. Of a row that is too large
# the error may be any of the last three.
_ROW_ERRORS = re.compile("22...|54...|XX...|53200")
_DAMAGED = re.compile("22...|XX00[12]")
KEY_CHARACTERS_MAX = 200


def is_row_error(sqlstate: str) -> bool:
    """Whether a row may be the cause, if the server had begun to print rows."""
    return bool(_ROW_ERRORS.fullmatch(sqlstate))


def row_hint(sqlstate: str) -> str:
    """What makes the row printable, or does without it."""
    if _DAMAGED.fullmatch(sqlstate):
        return "the row is damaged on this server: repair it, from a standby say"
    return (
        "as COPY prints it a row has less than 1 GB, and each byte of a bytea and each escaped character has two: make"
        " it smaller, or exclude the table in fleet.toml under groups.exclude"
    )
