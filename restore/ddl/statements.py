"""Split the SQL of an archive's entry into statements.

Where a statement ends follows the rules of the server's scanner and of psql (PostgreSQL manual, "Lexical Structure";
src/fe_utils/psqlscan.l). A backslash is no escape: dumps are made with standard_conforming_strings on. A wrong split is
noticed: the server refuses the halves, as neither is a statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# Words matter only where they open or close a routine's body.
TOKEN = re.compile(
    r"""
      # A doubled quote within quotes is read as two adjacent strings.
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
# The comments that pg_dump writes before a statement.
COMMENT_LINES = re.compile(r"\A(?:\s*--[^\n]*\n)*")


class Statement(NamedTuple):
    """A statement of a script: its text with all that precedes it, and `bare`, without the comments before it."""

    text: str
    bare: str


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
    offset, parentheses, bodies = 0, 0, 0
    is_routine: bool | None = None
    while token := TOKEN.search(script, offset):
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


def has_commands_of_psql(script: str) -> bool:
    """Whether psql would take a part of it for a command of its own: no SQL has a backslash outside of quotes."""
    offset = 0
    while token := TOKEN.search(script, offset):
        if "\\" in script[offset : token.start()]:
            return True
        offset = token.end()
        if token["comment"]:
            offset = _comment_end(script, offset)
        elif token["tag"] is not None:
            offset = _quote_end(script, offset, token[0])
    return "\\" in script[offset:]


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


def literal(text: str) -> str:
    """The text as a constant that means the same whether or not standard_conforming_strings is on."""
    quoted = "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    return f"E{quoted}" if "\\" in text else quoted
