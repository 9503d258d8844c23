"""What a server or libpq says about an error, as messages quote it: a function of a table's owner may say any amount.

The line with the error comes first, whatever follows it: DETAIL and CONTEXT alone say nothing.
"""

from __future__ import annotations

import re

import psycopg

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
