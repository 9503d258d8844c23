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
      (?P<line> --[^\n\r]* )
      # A doubled quote within quotes is read as two adjacent strings, but where a backslash is an escape.
    | (?P<quoted> (?: [eE]'(?:[^'\\]++|\\.|'')*+ | '[^']* ) (?: ' | (?P<open>\\?\Z) )
      | "[^"]*(?: " | (?P<open_name>\Z) ) )
    | (?P<comment> /\* )
    | \$(?P<tag> (?:[A-Za-z_\x80-\U0010ffff][A-Za-z_0-9\x80-\U0010ffff]*)? )\$
      # With letters the server refuses it, and psql is at odds with itself: such an E begins no constant.
    | (?P<number> \.?[0-9][A-Za-z_0-9.$\x80-\U0010ffff]* )
    | (?P<word> [A-Za-z_\x80-\U0010ffff][A-Za-z_0-9$\x80-\U0010ffff]* )
    | (?P<mark> [();] )
    """,
    re.VERBOSE | re.DOTALL,
)
COMMENT_MARK = re.compile(r"/\*|\*/")
ROUTINE = re.compile(r"\s*create\s+(?:or\s+replace\s+)?(?:function|procedure)\b", re.IGNORECASE)
# The comments that pg_dump writes before a statement.
COMMENT_LINES = re.compile(r"\A(?:\s*--[^\n\r]*[\n\r])*")
# A quote belongs to the letter before it.
QUOTE_PREFIXES = ("b", "n", "x")


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


class _Token(NamedTuple):
    """A part of a script, up to the offset `end`; `is_statement_end`: the semicolon after a statement."""

    match: re.Match[str]
    end: int
    is_statement_end: bool


def statement_ends(script: str) -> Iterator[int]:
    """Yield the offset after the semicolon of every statement."""
    return (token.end for token in _tokens(script) if token.is_statement_end)


def is_statements_alone(script: str) -> bool:
    """Whether psql would send all of the script to the server, and nothing of what follows it in a file with it.

    No SQL has a backslash outside of quotes: by it psql runs commands. COPY FROM STDIN would take the lines after it.
    """
    offset, is_ended = 0, True
    # The token before that is no comment, and where it ends.
    before, before_end = "", -1
    for match, end, is_statement_end in _tokens(script):
        between = script[offset : match.start()]
        is_open = match["open"] is not None or match["open_name"] is not None or end > len(script)
        is_joined = match["quoted"] is not None and match.start() == before_end
        is_copy = (match["word"] or "").lower() == "copy" and before in ("", ";")
        if "\\" in between or is_open or is_joined or is_copy:
            return False
        offset = end
        if match["line"] is not None or match["comment"] is not None:
            is_ended = is_ended and not between.strip()
            continue
        is_ended = is_statement_end
        before = match[0].lower()
        is_word = (match["word"] or match["number"]) is not None and before not in QUOTE_PREFIXES
        before_end = end if is_word else -1
    return is_ended and not script[offset:].strip()


def _tokens(script: str) -> Iterator[_Token]:
    """Yield what matters of a script; the end of what is not closed is behind the script's."""
    offset, parentheses, bodies = 0, 0, 0
    is_routine: bool | None = None
    while token := TOKEN.search(script, offset):
        offset, is_end = token.end(), False
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
            is_end = mark == ";" and parentheses == 0 and bodies == 0
            is_routine = None if is_end else is_routine
        yield _Token(token, offset, is_end)


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
    return offset if depth == 0 else len(script) + 1


def _quote_end(script: str, offset: int, quote: str) -> int:
    end = script.find(quote, offset)
    return end + len(quote) if end >= 0 else len(script) + 1


def literal(text: str) -> str:
    """The text as a constant that means the same whether or not standard_conforming_strings is on."""
    quoted = "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    return f"E{quoted}" if "\\" in text else quoted
