"""Errors of servers: their wording, which of them a row causes, and which say nothing about the statement.

Some errors say nothing about the statement, and it succeeds when it is repeated. Such a statement does not count as
refused, and a restore must not continue without it.

Of a message, the line with the error comes first, because DETAIL and CONTEXT alone say nothing.
"""

from __future__ import annotations

import re

import psycopg

# Remedies, by the first characters of an SQLSTATE (PostgreSQL manual, "PostgreSQL Error Codes"). Of class 58 only I/O
# errors: others name a file that is not there, such as a function's library. A shutdown (57P) loses the session.
REMEDIES = {
    "53100": "make room on the server's disk, or in /dev/shm if it names a shared memory segment",
    "53200": "give the server more memory, or raise the setting that it names",
    "53": "give the server more of the resource that it names",
    "57014": "somebody cancelled the statement on the server: see who",
    "58030": "see the server's log: its disk or file system has a fault",
    "40001": "see who else uses the database",
    "40P01": "see who else uses the database",
    "55P03": "see who else uses the database",
}


def remedy_of(error: psycopg.Error) -> str:
    """What to do before the statement is repeated; "" if the error is about the statement itself."""
    state = error.diag.sqlstate or ""
    return next((remedy for begin, remedy in REMEDIES.items() if state.startswith(begin)), "")


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
# psycopg's line before the failures at each of several hosts, and what each begins with.
SEVERAL, EACH = "Multiple connection attempts failed. All failures were:", re.compile(r"- host: .*?(?=connection )")
# What shows where in a statement an error is.
POSITION = re.compile(r"LINE \d+: .*|QUERY:  .*|\^")
# PostgreSQL's context of an error in a function: `PL/pgSQL function public.f(integer) line 3 at SQL statement`.
FUNCTION = re.compile(r'function ((?:"(?:[^"]|"")+"|[^\s"(.]+)(?:\.(?:"(?:[^"]|"")+"|[^\s"(.]+))?\([^)]*\))')


def shorten_message(error: psycopg.Error) -> str:
    """The server's message on one line, cut off after MESSAGE_SHOWN_MAX characters."""
    text = error.diag.message_primary
    # Without a message of the server, libpq's own. An empty one says nothing either, and libpq adds the whole context.
    text = str(error) if text is None else text or f"an error without a message ({error.diag.sqlstate})"
    return " ".join(_cut(text).split())


def explain(error: psycopg.Error) -> str:
    """The server's message with its detail and context on one line; of an attempt to connect, each host's."""
    text = str(error)
    whole, _, each = text.partition(SEVERAL)
    attempts = EACH.split(each)[1:] if each else [whole]
    said = list(dict.fromkeys(filter(None, map(_lines_of, attempts))))
    return _cut("; ".join(said) or type(error).__name__)


def called_functions(text: str) -> list[str]:
    """The functions that the context of an error names, the innermost first, as the server names them."""
    return FUNCTION.findall(text)


def _cut(text: str) -> str:
    return text if len(text) <= MESSAGE_SHOWN_MAX else f"{text[:MESSAGE_SHOWN_MAX]}…"


def _lines_of(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line and line not in LIBPQ_GUESSES and not line.startswith(FROM_FILE)]
    return "; ".join(line for line in told if not POSITION.fullmatch(line))
