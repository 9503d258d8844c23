"""Dividing pg_dump's SQL into statements, so that thousands of tables need not be locked in one transaction.

What is sent in one message is one transaction, and PostgreSQL keeps a lock for every table that it makes. The rules of
the server's own scanner and of psql (PostgreSQL manual, "Lexical Structure"; src/fe_utils/psqlscan.l) say where a
statement ends. Were they misread, the server would refuse the halves: none is a statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Of plain identifiers only those count that open or close a body of statements.
TOKEN = re.compile(
    r"""
      # Two quotes within quotes are two strings side by side.
      (?P<skipped> --[^\n]* | [eE]'(?:[^'\\]|\\.)*(?:'|\Z) | '[^']*(?:'|\Z) | "[^"]*(?:"|\Z) )
    | (?P<comment> /\* )
    | \$(?P<tag> (?:[A-Za-z_\x80-\U0010ffff][A-Za-z_0-9\x80-\U0010ffff]*)? )\$
    | (?P<word> [A-Za-z_\x80-\U0010ffff][A-Za-z_0-9$\x80-\U0010ffff]* )
    | (?P<mark> [();] )
    """,
    re.VERBOSE | re.DOTALL,
)
COMMENT_MARK = re.compile(r"/\*|\*/")
ROUTINE = re.compile(r"\s*create\s+(?:or\s+replace\s+)?(?:function|procedure)\b", re.IGNORECASE)
# Here a backslash within quotes means something, and pg_dump has said so for a database that wants it.
BACKSLASHES = re.compile(r"^SET standard_conforming_strings = off;$", re.MULTILINE)
# What pg_dump writes before a statement.
COMMENT_LINES = re.compile(r"\A(?:\s*--[^\n]*\n)*")
STATEMENTS_MAX, TEXT_MAX = 200, 1 << 20


def batches(script: str) -> Iterator[str]:
    """The script in pieces of whole statements, each of a bounded number of them."""
    if BACKSLASHES.search(script):
        yield script
        return
    begin, count = 0, 0
    for end in statement_ends(script):
        count += 1
        if count == STATEMENTS_MAX or end - begin > TEXT_MAX:
            yield script[begin:end]
            begin, count = end, 0
    if script[begin:].strip():
        yield script[begin:]


def split_statements(script: str) -> Iterator[str]:
    """The statements one by one, without the comments before them; none where that can't be told."""
    if BACKSLASHES.search(script):
        return
    begin = 0
    for end in statement_ends(script):
        yield COMMENT_LINES.sub("", script[begin:end]).strip()
        begin = end


def statement_ends(script: str) -> Iterator[int]:
    """Where every statement of the script ends, behind its semicolon."""
    place, parentheses, bodies = 0, 0, 0
    is_routine: bool | None = None
    while token := TOKEN.search(script, place):
        place = token.end()
        if token["comment"]:
            place = _comment_end(script, place)
        elif token["tag"] is not None:
            place = _quote_end(script, place, token[0])
        elif word := token["word"]:
            if is_routine is None:
                is_routine = ROUTINE.match(script, token.start()) is not None
            if is_routine and parentheses == 0:
                bodies += _opened(word.lower(), bodies)
        elif mark := token["mark"]:
            parentheses = max(parentheses + {"(": 1, ")": -1, ";": 0}[mark], 0)
            if mark == ";" and parentheses == 0 and bodies == 0:
                yield place
                is_routine = None


def _opened(word: str, bodies: int) -> int:
    """How many bodies more there are behind the word: those of BEGIN ATOMIC, and CASE within them."""
    if word == "begin" or (word == "case" and bodies):
        return 1
    return -1 if word == "end" and bodies else 0


def _comment_end(script: str, place: int) -> int:
    """Where a comment ends that begins before `place`; they nest."""
    depth = 1
    while depth and (mark := COMMENT_MARK.search(script, place)):
        depth += 1 if mark[0] == "/*" else -1
        place = mark.end()
    return place if depth == 0 else len(script)


def _quote_end(script: str, place: int, quote: str) -> int:
    found = script.find(quote, place)
    return found + len(quote) if found >= 0 else len(script)
