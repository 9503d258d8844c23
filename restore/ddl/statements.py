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
      # The prefixes of other constants change nothing about where these end.
    | (?P<quoted> (?: [eE]'(?:[^'\\]++|\\.|'')*+ | [bBnNxX]?'[^']* ) (?: ' | (?P<open>\\?\Z) )
      | "[^"]*(?: " | (?P<open_name>\Z) ) )
    | (?P<comment> /\* )
    | \$(?P<tag> (?:[A-Za-z_\x80-\U0010ffff][A-Za-z_0-9\x80-\U0010ffff]*)? )\$
      # With letters the server refuses it, and psql is at odds with itself: such an E begins no constant. A dollar sign
      # after it begins a quote.
    | (?P<number> \.?[0-9][A-Za-z_0-9.\x80-\U0010ffff]* )
    | (?P<word> [A-Za-z_\x80-\U0010ffff][A-Za-z_0-9$\x80-\U0010ffff]* )
    | (?P<mark> [();] )
    """,
    re.VERBOSE | re.DOTALL,
)
COMMENT_MARK = re.compile(r"/\*|\*/")
# The first words of a statement, whatever is between them, after which psql looks for BEGIN and END.
ROUTINES = [["create", *words, kind] for words in ([], ["or", "replace"]) for kind in ("function", "procedure")]
ROUTINE_WORDS_MAX = 4
# The comments that pg_dump writes before a statement.
COMMENT_LINES = re.compile(r"\A(?:\s*--[^\n\r]*[\n\r])*")
# How all begin that pg_dump or a restore writes; none of them begins a transaction, or takes what follows as data.
BEGINNING = re.compile(
    r"(?:ALTER|COMMENT|CREATE|DO|GRANT|INSERT|LOAD|REFRESH|REVOKE|SECURITY|SELECT"
    r"|(?:RE)?SET (?:ROLE|SESSION AUTHORIZATION)|SET default_table(?:space|_access_method))\b",
)
NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z_0-9.$\x80-\U0010ffff])")
# Before a word or constant it makes a variable of it, unless it is one of a pair: the sign of a cast.
COLON = re.compile(r"(?<!:)(?:::)*:\Z")
# Dumps have all names quoted. After a colon, in a slice of an array, psql's own variables alone have such names.
NO_VARIABLE = re.compile(r'"(?![A-Z_]+")')


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

    Rather False than True: psql 15 to 18 and the servers differ where constants touch numbers, words or each other, and
    psql has commands, variables and COPY data. So it is False for what pg_dump never writes. Where psql is to read the
    script, standard_conforming_strings has to be on.
    """
    # psql reads lines up to the first of these.
    if "\0" in script:
        return False
    offset, is_ended = 0, True
    # Where the constant or name before ended if nothing, or only comments, follow it.
    word_end = string_end = -1
    for match, end, is_statement_end in _tokens(script):
        start, between = match.start(), script[offset : match.start()]
        if "\\" in between or ":{" in between or _is_open(match, end, script):
            return False
        if between.strip():
            string_end = -1
        offset = end
        if match["line"] is not None or match["comment"] is not None:
            is_ended = is_ended and not between.strip()
            continue
        if is_ended and (between.strip() or not BEGINNING.match(script, start)):
            return False
        text = match[0]
        is_after_colon = between.endswith(":") and COLON.search(between) is not None
        if is_after_colon and (match["word"] or match["quoted"]) and not NO_VARIABLE.match(text):
            return False
        # Dumps have no constants with U&.
        if match["quoted"] and (start == word_end or between.endswith("&")):
            return False
        # Constants with a line end between them are one; a doubled quote is read as two.
        if text[-1] == "'" and string_end >= 0 and (start != string_end or text[0] != "'"):
            return False
        if match["number"] is not None and not NUMBER.match(script, start):
            return False
        is_ended = is_statement_end
        word_end = end if match["word"] is not None or match["number"] is not None else -1
        string_end = end if text[-1] == "'" else -1
    return is_ended and not script[offset:].strip()


def _is_open(match: re.Match[str], end: int, script: str) -> bool:
    """Whether a quote or comment does not end."""
    return match["open"] is not None or match["open_name"] is not None or end > len(script)


def _tokens(script: str) -> Iterator[_Token]:
    """Yield what matters of a script; the end of what is not closed is behind the script's."""
    offset, parentheses, bodies = 0, 0, 0
    words: list[str] = []
    while token := TOKEN.search(script, offset):
        offset, is_end = token.end(), False
        if token["comment"]:
            offset = _comment_end(script, offset)
        elif token["tag"] is not None:
            offset = _quote_end(script, offset, token[0])
        elif word := token["word"]:
            if len(words) < ROUTINE_WORDS_MAX:
                words.append(word.lower())
            if parentheses == 0 and any(words[: len(one)] == one for one in ROUTINES):
                bodies += _depth_change(word.lower(), bodies)
        elif mark := token["mark"]:
            parentheses = max(parentheses + {"(": 1, ")": -1, ";": 0}[mark], 0)
            is_end = mark == ";" and parentheses == 0 and bodies == 0
            words = [] if is_end else words
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
