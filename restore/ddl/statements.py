"""Split an entry's script into statements, and run them with a search_path for functions that need one.

Statements are split by the rules of the server's scanner and of psql (PostgreSQL manual, "Lexical Structure";
src/fe_utils/psqlscan.l). A backslash is not an escape, because dumps are made with standard_conforming_strings on. An
incorrect split can't go unnoticed, because the server refuses the pieces.

DDL runs with an empty search_path, so that its names mean the same as they did when the dump was made, even if other
users have created objects since. But functions called by an index, a constraint or a view may use names without a
schema. They worked on the source because its sessions have a search_path. In PostgreSQL 17 and newer, such functions
have no search_path at all while an index is built, a view is refreshed or a table is analyzed (PostgreSQL manual,
"Maintenance Commands").

So the functions themselves get a search_path, set by `ALTER ROUTINE … SET search_path` and reset in the same
transaction. No other session ever sees this setting, and the names in the statement are resolved as before.
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

# Words matter only if they open or close a routine's body.
TOKEN = re.compile(
    r"""
      (?P<line> --[^\n\r]* )
      # A doubled quote within quotes is read as two adjacent strings, except where a backslash is an escape.
      # The prefixes of other constants don't affect where the constants end.
    | (?P<quoted> (?: [eE]'(?:[^'\\]++|\\.|'')*+ | [bBnNxX]?'[^']* ) (?: ' | (?P<open>\\?\Z) )
      | "[^"]*(?: " | (?P<open_name>\Z) ) )
    | (?P<comment> /\* )
    | \$(?P<tag> (?:[A-Za-z_\x80-\U0010ffff][A-Za-z_0-9\x80-\U0010ffff]*)? )\$
      # The server refuses a number followed by letters, and psql is inconsistent: an E there begins no constant, but a
      # dollar sign after it begins a quote.
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
# The beginnings of all statements that pg_dump or a restore writes. None of them begins a transaction or reads the
# following lines as data.
BEGINNING = re.compile(
    r"(?:ALTER|COMMENT|CREATE|DO|GRANT|INSERT|LOAD|REFRESH|REVOKE|SECURITY|SELECT"
    r"|(?:RE)?SET (?:ROLE|SESSION AUTHORIZATION)|SET default_table(?:space|_access_method))\b",
)
NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z_0-9.$\x80-\U0010ffff])")
# A colon before a word or constant makes it a psql variable, unless it belongs to a pair, which is a cast.
COLON = re.compile(r"(?<!:)(?:::)*:\Z")
# Dumps quote all names. After a colon, as in an array slice, only names like those of psql's own variables are unsafe.
NO_VARIABLE = re.compile(r'"(?![A-Z_]+")')


class Statement(NamedTuple):
    """A statement in a script: `text` with everything that precedes it, and `bare`, without preceding comments."""

    text: str
    bare: str


def statements_of(script: str) -> Iterator[Statement]:
    """Yield the statements, then any text after the last statement; the texts concatenated are the script."""
    begin, whole = 0, _statement(script)
    # After comments, most scripts have a single semicolon, at their end: that is one statement, whatever precedes it.
    if whole.bare.count(";") == 1 and whole.bare.endswith(";"):
        yield whole
        return
    for end in statement_ends(script):
        yield _statement(script[begin:end])
        begin = end
    if begin < len(script):
        yield _statement(script[begin:])


def _statement(text: str) -> Statement:
    return Statement(text, COMMENT_LINES.sub("", text).strip())


class _Token(NamedTuple):
    """A token in a script, up to the offset `end`; `is_statement_end`: it is the semicolon after a statement."""

    match: re.Match[str]
    end: int
    is_statement_end: bool


def statement_ends(script: str) -> Iterator[int]:
    """Yield the offset after the semicolon of every statement."""
    return (token.end for token in _tokens(script) if token.is_statement_end)


def is_statements_alone(script: str) -> bool:
    """Whether psql would send exactly this script to the server, no matter what text follows it in a file.

    Errs towards False: psql 15 to 18 and the servers differ where constants touch numbers, words or each other, and
    psql has commands, variables and COPY data. So the result is False for forms that pg_dump never writes.
    standard_conforming_strings must be on when psql reads the script.
    """
    # psql reads a line only up to the first NUL.
    if "\0" in script:
        return False
    offset, is_ended = 0, True
    # The ends of the preceding word and string, unless text other than comments follows them.
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
        # Dumps contain no U& constants.
        if match["quoted"] and (start == word_end or between.endswith("&")):
            return False
        # Constants separated by a line end are one constant; a doubled quote is read as two constants.
        if text[-1] == "'" and string_end >= 0 and (start != string_end or text[0] != "'"):
            return False
        if match["number"] is not None and not NUMBER.match(script, start):
            return False
        is_ended = is_statement_end
        word_end = end if match["word"] is not None or match["number"] is not None else -1
        string_end = end if text[-1] == "'" else -1
    return is_ended and not script[offset:].strip()


def _is_open(match: re.Match[str], end: int, script: str) -> bool:
    return match["open"] is not None or match["open_name"] is not None or end > len(script)


def _tokens(script: str) -> Iterator[_Token]:
    """Yield the relevant tokens in a script; an unclosed token ends beyond the script's end."""
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
            is_created = parentheses == 0 and words[0] == ROUTINES[0][0]
            if is_created and any(words[: len(routine)] == routine for routine in ROUTINES):
                bodies += _depth_change(word.lower(), bodies)
        elif mark := token["mark"]:
            parentheses = max(parentheses + {"(": 1, ")": -1, ";": 0}[mark], 0)
            is_end = mark == ";" and parentheses == 0 and bodies == 0
            words = [] if is_end else words
        yield _Token(token, offset, is_end)


def _depth_change(word: str, bodies: int) -> int:
    """Return the change in nesting depth: BEGIN ATOMIC, or CASE within a body, opens a level; END closes one."""
    if word == "begin" or (word == "case" and bodies):
        return 1
    return -1 if word == "end" and bodies else 0


def _comment_end(script: str, offset: int) -> int:
    """Return the offset after the end of the comment that was opened before `offset`; comments nest."""
    depth = 1
    while depth and (mark := COMMENT_MARK.search(script, offset)):
        depth += 1 if mark[0] == "/*" else -1
        offset = mark.end()
    return offset if depth == 0 else len(script) + 1


def _quote_end(script: str, offset: int, quote: str) -> int:
    end = script.find(quote, offset)
    return end + len(quote) if end >= 0 else len(script) + 1


def literal(text: str) -> str:
    """Quote the text as a constant that is valid whether or not standard_conforming_strings is on."""
    quoted = "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
    return f"E{quoted}" if "\\" in text else quoted


# SQLSTATEs for a name that was not found, or was not found with these types: class 42 minus the errors that no
# search_path can fix.
NOT_FOUND = re.compile(r"3F000|42(?!501|710|701|P04|P05|P06|P07|723)...")
USER = "$user"
# Since this version, functions have no search_path during maintenance commands.
RESTRICTED_VERSION = 170000
# Functions with a body that is parsed when the function runs. Functions that belong to other roles are excluded,
# because our role can't alter them.
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
# Converts names to the bytes that the server stores.
STORED_QUERY = b"""
SELECT pg_catalog.convert(name, 'UTF8', pg_catalog.getdatabaseencoding())
  FROM pg_catalog.unnest(%s::bytea[]) WITH ORDINALITY AS of (name, n) ORDER BY n
"""


def path_elements(path: str | None) -> list[str]:
    """Split a stored search_path, DEFAULT if it is None, into its schemas: quoted names, and USER unquoted."""
    names = list_elements(DEFAULT if path is None else path)
    # Skip empty names: an empty path is stored as an empty name, which statements don't accept.
    return [USER if name == USER else quote_identifier(name) for name in names if name]


def path_of_owner(path: str | None, owner: str) -> str:
    """Return the search_path that `owner` (a quoted name) has in its sessions if `path` is set for the database.

    pg_catalog comes first, so that no schema hides its names.
    """
    return ", ".join(
        ["pg_catalog", *(owner if path_element == USER else path_element for path_element in path_elements(path))]
    )


class NeededPath(NamedTuple):
    """A called function that sets no search_path, and the statement that sets one for it; raw text."""

    function: str
    statement: str


def run_with_paths(
    connection: psycopg.Connection[Any], statement: bytes, path: str | None, definition: bytes = b""
) -> tuple[NeededPath, ...] | None:
    """Run the statements in a separate transaction or savepoint; return the functions that needed a search_path.

    Returns None if the first attempt succeeded. The functions are those called by the statements or by `definition`,
    the definition of the statements' object, but not those called by other functions.

    The session must be raw (nodes.encodings). First the statements run unchanged. If a name is not found, they run
    again with a search_path for every function that sets none: the database's path for the function's owner, then the
    function's schema, then the schemas of the other functions. If both attempts fail, raises the psycopg.Error of the
    first, or of the second if the server's state caused the second.
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


# Since this version, a partitioned table can't be UNLOGGED; before, that had no effect.
LOGGED_PARENTS_VERSION = 180000
# pg_restore writes a comment before the statement.
UNLOGGED = re.compile(r"\A((?:\s*--[^\n]*\n)*\s*CREATE) UNLOGGED( TABLE )")
PARTITIONED = re.compile(
    r"""--[^\n]*|[eE]'(?:[^'\\]|\\.)*'|'[^']*'|"[^"]*"|(?P<by>\nPARTITION BY (?:HASH|LIST|RANGE) )""", re.DOTALL
)


def without_unlogged_parent(statements: str) -> str:
    """Return the statements for a table, as pg_dump writes them, without UNLOGGED if the table is partitioned."""
    if UNLOGGED.match(statements) and any(match["by"] for match in PARTITIONED.finditer(statements)):
        return UNLOGGED.sub(r"\1\2", statements, count=1)
    return statements


def run_statements(connection: psycopg.Connection[Any], statements: bytes) -> None:
    """Run the statements as one message, in the current transaction or in a separate one; raise psycopg.Error."""
    if not statements:
        return
    result = connection.pgconn.exec_(statements)
    if result.error_message:
        if connection.broken:
            raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
        raise psycopg.errors.error_from_result(result)
