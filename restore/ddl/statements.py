"""Split pg_dump's SQL into statements, so that thousands of tables need not be locked in one transaction.

One message is one transaction, which holds a lock for every table that it creates. Where a statement ends follows the
rules of the server's scanner and of psql (PostgreSQL manual, "Lexical Structure"; src/fe_utils/psqlscan.l). A wrong
split is noticed: the server refuses the halves, as neither is a statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

ESCAPED = r"'(?:[^'\\]|\\.)*(?:'|\Z)"
# Words matter only where they open or close a routine's body.
_TOKEN = r"""
      # A doubled quote within quotes is read as two adjacent strings.
      (?P<skipped> --[^\n]* | [eE]{escaped} | {string} | "[^"]*(?:"|\Z) )
    | (?P<comment> /\* )
    | \$(?P<tag> (?:[A-Za-z_\x80-\U0010ffff][A-Za-z_0-9\x80-\U0010ffff]*)? )\$
    | (?P<word> [A-Za-z_\x80-\U0010ffff][A-Za-z_0-9$\x80-\U0010ffff]* )
    | (?P<mark> [();] )
"""
TOKEN, TOKEN_WITH_BACKSLASHES = (
    re.compile(_TOKEN.replace("{escaped}", ESCAPED).replace("{string}", string), re.VERBOSE | re.DOTALL)
    for string in (r"'[^']*(?:'|\Z)", ESCAPED)
)
COMMENT_MARK = re.compile(r"/\*|\*/")
ROUTINE = re.compile(r"\s*create\s+(?:or\s+replace\s+)?(?:function|procedure)\b", re.IGNORECASE)
# One of the settings at the beginning of a script: a backslash within quotes is an escape.
BACKSLASHES = "SET standard_conforming_strings = off;"
SETTING = re.compile(r"SET |RESET |SELECT pg_catalog\.set_config\(")
# Between these the session is another role.
OTHER_ROLE, OWN_ROLE = ("SET ROLE ", "SET SESSION AUTHORIZATION "), ("RESET ROLE;", "RESET SESSION AUTHORIZATION;")
# The comments that pg_dump writes before a statement.
COMMENT_LINES = re.compile(r"\A(?:\s*--[^\n]*\n)*")
STATEMENTS_MAX, TEXT_MAX = 200, 1 << 20


class Statement(NamedTuple):
    """A statement of a script: its text with all that precedes it, and `bare`, without the comments before it."""

    text: str
    bare: str


def batches(script: str) -> Iterator[str]:
    """Yield the script in batches of whole statements, about STATEMENTS_MAX and TEXT_MAX characters each at most.

    Each ends as the role that the session began as.
    """
    pieces: list[str] = []
    size, is_other = 0, False
    for one in statements_of(script):
        pieces.append(one.text)
        size += len(one.text)
        is_other = one.bare.startswith(OTHER_ROLE) or (is_other and not one.bare.startswith(OWN_ROLE))
        if not is_other and (len(pieces) >= STATEMENTS_MAX or size > TEXT_MAX):
            yield "".join(pieces)
            pieces, size = [], 0
    if (rest := "".join(pieces)).strip():
        yield rest


def settings_of(script: str) -> str:
    """The statements that set something for the session."""
    return "".join(one.text for one in statements_of(script) if SETTING.match(one.bare))


def statements_of(script: str) -> Iterator[Statement]:
    """Yield the statements, and what follows the last one: their texts together are the script."""
    begin = 0
    for end in statement_ends(script):
        yield _statement(script[begin:end])
        begin = end
    if begin < len(script):
        yield _statement(script[begin:])


def _statement(text: str) -> Statement:
    return Statement(text, COMMENT_LINES.sub("", text).strip())


def statement_ends(script: str) -> Iterator[int]:
    """Yield the offset after the semicolon of every statement."""
    return _ends(script, TOKEN_WITH_BACKSLASHES if _has_backslashes(script) else TOKEN)


def _has_backslashes(script: str) -> bool:
    """Whether the settings at the beginning of the script make a backslash within quotes an escape."""
    begin = 0
    for end in _ends(script, TOKEN):
        bare = _statement(script[begin:end]).bare
        if bare == BACKSLASHES:
            return True
        if not SETTING.match(bare):
            return False
        begin = end
    return False


def _ends(script: str, tokens: re.Pattern[str]) -> Iterator[int]:
    offset, parentheses, bodies = 0, 0, 0
    is_routine: bool | None = None
    while token := tokens.search(script, offset):
        offset = token.end()
        if token["comment"]:
            offset = _comment_end(script, offset)
        elif token["tag"] is not None:
            offset = _quote_end(script, offset, token[0])
        elif word := token["word"]:
            if is_routine is None:
                is_routine = ROUTINE.match(script, token.start()) is not None
            if is_routine and parentheses == 0:
                bodies += _depth_change(word.lower(), bodies)
        elif mark := token["mark"]:
            parentheses = max(parentheses + {"(": 1, ")": -1, ";": 0}[mark], 0)
            if mark == ";" and parentheses == 0 and bodies == 0:
                yield offset
                is_routine = None


def _depth_change(word: str, bodies: int) -> int:
    """How the word changes the nesting depth: BEGIN ATOMIC opens a body, CASE within one another, END closes one."""
    if word == "begin" or (word == "case" and bodies):
        return 1
    return -1 if word == "end" and bodies else 0


def _comment_end(script: str, offset: int) -> int:
    """The offset after the comment that was opened before `offset`; comments nest."""
    depth = 1
    while depth and (mark := COMMENT_MARK.search(script, offset)):
        depth += 1 if mark[0] == "/*" else -1
        offset = mark.end()
    return offset if depth == 0 else len(script)


def _quote_end(script: str, offset: int, quote: str) -> int:
    end = script.find(quote, offset)
    return end + len(quote) if end >= 0 else len(script)
