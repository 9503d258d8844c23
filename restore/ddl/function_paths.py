"""Run a statement while functions that name others without a schema find them, as in the sessions of the source.

DDL runs with an empty search_path, so that its own names mean what they meant when it was dumped, whatever others have
created since. Functions that an index, a constraint or a view calls may name tables and functions without a schema;
they worked on the source, because its sessions have a search_path. PostgreSQL 17 and newer give such functions no
search_path at all while they build an index, refresh a view or analyze (PostgreSQL manual, "Maintenance Commands").

So the functions themselves get one, `ALTER ROUTINE … SET search_path`, and lose it again in the same transaction.
Nobody else ever sees it, and the names in the statement are resolved as before.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.nodes.disruptions import remedy_of
from cutline.fleet.nodes.encodings import raw_text
from cutline.fleet.tables.names import quote_identifier
from cutline.snapshots.ddl.search_path import DEFAULT, list_elements

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
    return ", ".join(["pg_catalog", *(owner if one == USER else one for one in path_elements(path))])


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

    The session is raw (fleet.nodes.encodings). They run as they stand first; if a name is not found, once more while
    every function without a search_path of its own has that of the database, for its owner, then its own schema, and
    then those of the other functions.
    Raises the psycopg.Error of the first attempt if neither succeeds, or one of the second that is about the server.
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
    given = [one.encode() for one in path_elements(path)]
    elements = [bytes(name) for (name,) in connection.execute(STORED_QUERY, (given,))]
    setting, resetting, needed = [], [], list[NeededPath]()
    found = connection.execute(FUNCTIONS_QUERY).fetchall()
    others = sorted({bytes(schema) for _, _, schema, _ in found})
    for function, owner, schema, call in found:
        schemas = [bytes(owner) if one == USER.encode() else one for one in elements]
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
