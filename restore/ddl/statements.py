"""The statements of an archive's entry, and the search_path for functions that name others without a schema.

Where a statement ends follows the rules of the server's scanner and of psql (PostgreSQL manual, "Lexical Structure";
src/fe_utils/psqlscan.l). A backslash is no escape: dumps are made with standard_conforming_strings on. A wrong split is
noticed: the server refuses the halves, as neither is a statement.

DDL runs with an empty search_path, so that its own names mean the same as at the dump, even if others have created
objects since. Functions that an index, a constraint or a view calls may name tables and functions without a schema;
they worked on the source, because its sessions have a search_path. PostgreSQL 17 and newer give such functions no
search_path at all while they build an index, refresh a view or analyze (PostgreSQL manual, "Maintenance Commands").

So the functions themselves get one, `ALTER ROUTINE … SET search_path`, and lose it again in the same transaction.
Nobody else ever sees it, and the names in the statement are resolved as before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.table_names import quote_identifier
from cutline.nodes.encodings import raw_text
from cutline.nodes.server_errors import remedy_of
from cutline.snapshots.ddl.database_facts import DEFAULT, list_elements

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
# The first words of a statement, with any words in between, after which psql looks for BEGIN and END.
ROUTINES = [["create", *words, kind] for words in ([], ["or", "replace"]) for kind in ("function", "procedure")]
ROUTINE_WORDS_MAX = 4
# The comments that pg_dump writes before a statement.
COMMENT_LINES = re.compile(r"\A(?:\s*--[^\n\r]*[\n\r])*")
# The beginnings of all statements that pg_dump or a restore writes; none begins a transaction, or reads the next
# lines as data.
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
    """Yield the statements, and the text after the last one: their texts together are the script."""
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
    """Whether psql would send the whole script to the server, without any of the text that follows it in a file.

    Rather False than True: psql 15 to 18 and the servers differ where constants touch numbers, words or each other, and
    psql has commands, variables and COPY data. So it is False for forms that pg_dump never writes. Where psql is to
    read the script, standard_conforming_strings has to be on.
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
    """Yield the tokens of a script that matter; an unclosed one ends behind the script's end."""
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
            if parentheses == 0 and any(words[: len(routine)] == routine for routine in ROUTINES):
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


# Errors of a name that was not found, or was found with other types: class 42 without those that no search_path mends.
NOT_FOUND = re.compile(r"3F000|42(?!501|710|701|P04|P05|P06|P07|723)...")
USER = "$user"
# From this version on maintenance commands give functions no search_path.
RESTRICTED_VERSION = 170000
# Functions whose body is text that is parsed when it runs. Those of others can't be altered, and would be refused.
FUNCTIONS_QUERY = b"""
SELECT pg_catalog.textsend(p.oid::pg_catalog.regprocedure::pg_catalog.text),
       pg_catalog.textsend(pg_catalog.concat('"', pg_catalog.replace(pg_catalog.pg_get_userbyid(p.proowner), '"', '""'),
                                             '"')),
       pg_catalog.textsend(pg_catalog.concat('"', pg_catalog.replace(n.nspname, '"', '""'), '"')),
       pg_catalog.textsend(pg_catalog.concat('"', pg_catalog.replace(n.nspname, '"', '""'), '"."',
                                             pg_catalog.replace(p.proname, '"', '""'), '"('))
  FROM pg_catalog.pg_proc p
  JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
  JOIN pg_catalog.pg_language l ON l.oid = p.prolang
 WHERE l.lanname NOT IN ('c', 'internal') AND p.prosqlbody IS NULL AND p.prokind IN ('f', 'p')
   AND n.nspname NOT IN ('pg_catalog', 'information_schema')
   AND NOT EXISTS (SELECT FROM pg_catalog.unnest(p.proconfig) AS of (setting) WHERE setting ^@ 'search_path=')
   AND pg_catalog.pg_has_role(p.proowner, 'USAGE')
"""
# Their names as the server stores them.
STORED_QUERY = b"""
SELECT pg_catalog.convert(name, 'UTF8', pg_catalog.getdatabaseencoding())
  FROM pg_catalog.unnest(%s::bytea[]) WITH ORDINALITY AS of (name, n) ORDER BY n
"""


def path_elements(path: str | None) -> list[str]:
    """The schemas of a search_path as it is stored, DEFAULT if it is None: quoted names, and USER unquoted."""
    names = list_elements(DEFAULT if path is None else path)
    # An empty path is stored as one name without characters, which no statement takes.
    return [USER if name == USER else quote_identifier(name) for name in names if name]


def path_of_owner(path: str | None, owner: str) -> str:
    """The search_path of a session of `owner` (a quoted name), where `path` is set for the database.

    pg_catalog comes first, so nothing hides its names.
    """
    return ", ".join(
        ["pg_catalog", *(owner if path_element == USER else path_element for path_element in path_elements(path))]
    )


class NeededPath(NamedTuple):
    """A function that is called without a search_path of its own, and the statement that gives it one; raw text."""

    function: str
    statement: str


def run_with_paths(
    connection: psycopg.Connection[Any], statement: bytes, path: str | None, definition: bytes = b""
) -> tuple[NeededPath, ...] | None:
    """Run the statements, in a transaction or savepoint of their own; return which functions needed a search_path.

    None if none did. Those are returned that the statements call, or the `definition` of the object that they name;
    functions that others call are not among them.

    The session is raw (nodes.encodings). Statements run as they stand first. If a name is not found, they run once
    more, with a search_path for every function that has none of its own: that of the database, for its owner, then its
    own schema, and then those of the other functions. Raises the psycopg.Error of the first attempt if neither
    succeeds, or one of the second that is about the server.
    """
    try:
        with connection.transaction():
            run_statements(connection, statement)
    except psycopg.Error as error:
        if connection.broken or not NOT_FOUND.fullmatch(error.diag.sqlstate or ""):
            raise
        needed = _run_once_more(connection, statement, path, definition)
        if needed is None:
            raise
        return needed
    return None


def _run_once_more(
    connection: psycopg.Connection[Any], statement: bytes, path: str | None, definition: bytes
) -> tuple[NeededPath, ...] | None:
    given = [path_element.encode() for path_element in path_elements(path)]
    elements = [bytes(name) for (name,) in connection.execute(STORED_QUERY, (given,))]
    setting, resetting, needed = [], [], list[NeededPath]()
    functions = connection.execute(FUNCTIONS_QUERY).fetchall()
    others = sorted({bytes(schema) for _, _, schema, _ in functions})
    for function, owner, schema, call in functions:
        schemas = [bytes(owner) if element == USER.encode() else element for element in elements]
        own = [b"pg_catalog", *schemas, bytes(schema)]
        value = b", ".join(dict.fromkeys([*own, *others]))
        setting.append(b"ALTER ROUTINE %s SET search_path = %s;" % (bytes(function), value))
        if bytes(call) in statement + definition:
            lasting = b"ALTER FUNCTION %s SET search_path = %s;" % (bytes(function), b", ".join(dict.fromkeys(own)))
            needed.append(NeededPath(raw_text(bytes(function)), raw_text(lasting)))
        resetting.append(b"ALTER ROUTINE %s RESET search_path;" % bytes(function))
    if not setting:
        return None
    try:
        with connection.transaction():
            for text in (b"".join(setting), statement, b"".join(resetting)):
                run_statements(connection, text)
    except psycopg.Error as error:
        if connection.broken or remedy_of(error):
            raise
        return None
    return tuple(needed)


def run_statements(connection: psycopg.Connection[Any], statements: bytes) -> None:
    """Run the statements as one message, which is one transaction unless there is one; raise psycopg.Error."""
    if not statements:
        return
    result = connection.pgconn.exec_(statements)
    if result.error_message:
        if connection.broken:
            raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
        raise psycopg.errors.error_from_result(result)
