"""Errors from servers: their wording, errors that a row may have caused, and errors unrelated to the statement.

After an unrelated error the statement may succeed if it is repeated. Such a statement does not count as refused, so a
restore must not continue without it.
"""

from __future__ import annotations

import re

import psycopg

# Remedies for unrelated errors, by the first characters of an SQLSTATE (PostgreSQL manual, "PostgreSQL Error Codes").
# Class 58 has only I/O errors here: other errors name a missing file, such as a function's library. A shutdown (57P) is
# absent because it loses the session.
REMEDIES = {
    "53100": "free space on the server's disk, or in /dev/shm if the message names a shared memory segment",
    "53200": "give the server more memory, or raise the setting that the message names",
    "53400": "raise the setting that the message names: on the server, or for the role, by ALTER ROLE … SET …",
    "53": "give the server more of the resource that the message names",
    "57014": "someone cancelled the statement on the server: find out who",
    "58030": "see the server's log: its disk or file system is faulty",
    # A standby's replay cancels statements, too.
    "40001": "find out who else uses the database; on a standby, raise max_standby_streaming_delay",
    "40P01": "find out who else uses the database",
    "55P03": "find out who else uses the database",
}


def remedy_of(error: psycopg.Error) -> str:
    """Return what to do before the statement is repeated; "" if the error is about the statement itself.

    Includes the server's own hint, which may name the setting to raise.
    """
    remedy, hint = remedy_of_state(error.diag.sqlstate or ""), " ".join((error.diag.message_hint or "").split())
    return f"{remedy}; the server's own hint: {hint}" if remedy and hint else remedy


def remedy_of_state(sqlstate: str) -> str:
    """Return what `remedy_of` returns for an error with this SQLSTATE."""
    return next((remedy for begin, remedy in REMEDIES.items() if sqlstate.startswith(begin)), "")


# Data exception, program limit exceeded, internal error or damaged data, and out of memory. A row that is too large may
# cause any of the last three.
_ROW_ERRORS = re.compile("22...|54...|XX...|53200")
_DAMAGED = re.compile("22...|XX00[12]")
KEY_CHARACTERS_MAX = 200
# Missing and damaged files, which repeating a statement does not repair.
_LOST_FILES = re.compile("58P01|XX00[12]")


def is_row_error(sqlstate: str) -> bool:
    """Whether a row may have caused the error, provided that the server had begun to print rows."""
    return bool(_ROW_ERRORS.fullmatch(sqlstate))


def is_damaged(sqlstate: str) -> bool:
    """Whether a row that can't be printed is damaged, provided that is_row_error."""
    return bool(_DAMAGED.fullmatch(sqlstate))


def row_hint(sqlstate: str, *, is_standby: bool = False) -> str:
    """Return how to make the row printable, or how to do without it."""
    if is_damaged(sqlstate) and is_standby:
        return "the row is damaged on this standby: rebuild the standby from its primary (pg_basebackup)"
    if is_damaged(sqlstate):
        return "the row is damaged on this server: repair it, for example from a standby"
    return (
        "COPY can only print rows smaller than 1 GB, counting each byte of a bytea and each escaped character twice:"
        " make the row smaller, or exclude the table in fleet.toml under groups.exclude"
    )


def stopped_hint(sqlstate: str) -> str:
    """Return what to do about an error that stopped a server's work, other than an error of a row; "" if unknown."""
    if _LOST_FILES.fullmatch(sqlstate):
        return "a file is missing or damaged on this server: put it back from a standby or an archive of WAL"
    return remedy_of_state(sqlstate)


MESSAGE_SHOWN_MAX = 1000
# Lines that libpq adds after the reason, guessing at a cause.
LIBPQ_GUESSES = {
    "This probably means the server terminated abnormally",
    "before or while processing the request.",
    "Is the server running on that host and accepting TCP/IP connections?",
    "Is the server running locally and accepting connections on that socket?",
}
# The line that libpq adds after a refused password.
FROM_FILE = 'password retrieved from file "'
# psycopg's line before the failures at several hosts, and the beginning of each failure.
SEVERAL, EACH = "Multiple connection attempts failed. All failures were:", re.compile(r"- host: .*?(?=connection )")
# What psycopg puts before libpq's first line about a connection.
FAILED = re.compile("^connection (failed|is bad): ")
# Lines that show the position of an error in a statement.
POSITION = re.compile(r"LINE \d+: .*|QUERY:  .*|\^")
# PostgreSQL's context for an error in a function: `PL/pgSQL function public.f(integer) line 3 at SQL statement`.
FUNCTION = re.compile(r'function ((?:"(?:[^"]|"")+"|[^\s"(.]+)(?:\.(?:"(?:[^"]|"")+"|[^\s"(.]+))?\([^)]*\))')


def shorten_message(error: psycopg.Error) -> str:
    """Return the server's message on one line, cut off after MESSAGE_SHOWN_MAX characters."""
    text = error.diag.message_primary
    # If the server sent no message, use libpq's. If it sent an empty message, libpq's would contain only the context.
    text = str(error) if text is None else text or f"an error without a message ({error.diag.sqlstate})"
    return " ".join(_cut(text).split())


def explain(error: psycopg.Error) -> str:
    """Return the server's message with detail and context on one line; for a failed connection, each host's message.

    libpq tries a host again without TLS, and gives the reason again: every line is named once.
    """
    text = str(error)
    whole, _, each = text.partition(SEVERAL)
    attempts = EACH.split(each)[1:] if each else [whole]
    reasons: dict[str, str] = {}
    for line in (line for attempt in attempts for line in _lines_of(attempt)):
        reasons.setdefault(FAILED.sub("", line), line)
    return _cut("; ".join(reasons.values()) or type(error).__name__)


def called_functions(text: str) -> list[str]:
    """Return the functions that an error's context names, as the server writes them, the innermost first."""
    return FUNCTION.findall(text)


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_SHOWN_MAX else f"{text[:MESSAGE_SHOWN_MAX]}…"


def _lines_of(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line and line not in LIBPQ_GUESSES and not line.startswith(FROM_FILE)]
    return [line for line in told if not POSITION.fullmatch(line)]
