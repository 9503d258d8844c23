"""Connections to nodes. All sessions have the same settings, so that a value always has the same text.

COPY and logical decoding print values under the session's settings: a row read by COPY and the same row read from WAL
have the same bytes only because both sessions are opened here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet.config import Node
from fleet.hints import UNFINISHED_RESTORE
from fleet.libpq_environment import missing_files
from fleet.nodes.encodings import ADAPTERS, UTF8
from fleet.nodes.shut_down import remember_open
from fleet.variables import SECRET_PARAMETERS, remember_secrets_of
from storage.errors import UnreachableError, UsageError

# A database that every server has; others are created and renamed from there.
MAINTENANCE_DATABASE = "postgres"
CONNECT_SECONDS_MAX = 10
# Settings that change the text of a value (PostgreSQL manual, "Client Connection Defaults"). search_path is one:
# regclass and similar types print a schema only if it is not in the path. With row_security=off a query that policies
# would filter fails, instead of silently copying less.
PINNED_SETTINGS = {
    "datestyle": "ISO,YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    # Settings that change how a value is read: with others, only a document would be XML, and {NULL} one string.
    "xmloption": "content",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "lock_timeout": "0",
    "synchronize_seqscans": "off",
    "default_transaction_read_only": "off",
    # A standby refuses serializable transactions.
    "default_transaction_isolation": "read\\ committed",
    "default_transaction_deferrable": "off",
    "default_tablespace": "",
    # Compiling a long catalog query takes longer than running it.
    "jit": "off",
    # The server ends a session whose client is gone, even during a query, and releases its locks and slots.
    "client_connection_check_interval": "2s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
# Older servers refuse a session that sets transaction_timeout in its connection string.
TRANSACTION_TIMEOUT_VERSION = 170000
# Reading a view runs functions of its owner's choice under our role. What is read was planned as a table or a sequence,
# but its owner may have put a view in its place since. The first minor version of each that can refuse to read views.
RESTRICTION = "SET LOCAL restrict_nonsystem_relation_kind = 'view, foreign-table'"
RESTRICTION_VERSIONS = {15: 150008, 16: 160004}

# The values of sslmode with which libpq never connects without TLS.
STRICT_MODES = ("require", "verify-ca", "verify-full")

# Given to OpenSSL for a key that should not be encrypted.
NO_PASSPHRASE = "none"

# What a server says in English to one session too many: libpq has no code of an error before the session begins.
ALL_USED = (
    "sorry, too many clients already",
    "remaining connection slots are reserved",
    "too many connections for ",
)
# Lines that libpq adds after the reason, guessing at a cause.
LIBPQ_GUESSES = {
    "This probably means the server terminated abnormally",
    "before or while processing the request.",
    "Is the server running on that host and accepting TCP/IP connections?",
    "Is the server running locally and accepting connections on that socket?",
}


# The line that libpq adds after a refused password.
FROM_FILE = 'password retrieved from file "'


class NodeUnreachableError(UnreachableError):
    """A node can't be connected to, or its session was lost."""


class CopyError(UnreachableError):
    """A node ended a COPY before it was complete."""


def conninfo(dsn: str, **more: str) -> str:
    """`dsn` as a libpq connection string, with the pinned settings, timeouts and keepalives added."""
    given = conninfo_to_dict(dsn)
    pinned = " ".join(f"-c {name}={value}" for name, value in PINNED_SETTINGS.items())
    options = f"{given.get('options') or ''} {pinned}".strip()
    defaults = {
        "connect_timeout": str(CONNECT_SECONDS_MAX),
        "application_name": "cutline",
        "keepalives_idle": "30",
        "keepalives_interval": "10",
        "keepalives_count": "3",
    }
    merged = defaults | {key: value for key, value in given.items() if value is not None}
    # Without a passphrase OpenSSL would ask the terminal for that of an encrypted key, also one in the default place.
    merged.setdefault("sslpassword", NO_PASSPHRASE)
    return make_conninfo("", **(merged | {"options": options, "client_encoding": UTF8} | more))


class ProgramConnection(NamedTuple):
    """How a client program connects: a connection string for its command line, and variables for its environment."""

    conninfo: str
    environment: dict[str, str]


def program_connection(node: Node, *, needs_tls: bool, **more: str) -> ProgramConnection:
    """As `conninfo`, with the password in the environment: every user of the machine can read a command line.

    If `needs_tls`, because the other sessions use TLS, the program does not fall back to plaintext.
    """
    parameters = conninfo_to_dict(conninfo(node.dsn, **more))
    if needs_tls and parameters.get("sslmode", os.environ.get("PGSSLMODE")) not in STRICT_MODES:
        parameters["sslmode"] = "require"
    if parameters.get("sslpassword") == NO_PASSPHRASE:
        del parameters["sslpassword"]
    password = parameters.pop("password", None)
    environment = {} if password is None else {"PGPASSWORD": str(password)}
    given = {name: value for name, value in parameters.items() if value is not None}
    if secret := next((name for name in given if name in SECRET_PARAMETERS), None):
        raise UsageError(
            f"node {node.id}: the dsn has {secret}, which pg_dump takes only on its command line, where every user"
            " of the machine can read it",
            hint="use a password, or a client key in a file that only you can read",
            details={"node": node.id},
        )
    return ProgramConnection(make_conninfo("", **given), environment)


def connect(node: Node, **more: str) -> psycopg.Connection[Any]:
    """Open an autocommit session on `node`; raise NodeUnreachableError if that is not possible."""
    try:
        return _register(node, psycopg.connect(conninfo(node.dsn, **more), autocommit=True, context=ADAPTERS))
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error


def connect_replication(node: Node, **more: str) -> psycopg.Connection[Any]:
    """Open a session on `node` that takes replication commands for its database."""
    try:
        session = psycopg.connect(
            conninfo(node.dsn, replication="database", **more),
            autocommit=True,
            cursor_factory=psycopg.ClientCursor,
            context=ADAPTERS,
        )
        return _register(node, session)
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error


def _remember_password(node: Node, password: bytes | None) -> None:
    """Let no error show a password that libpq took from a password file or a service, which the dsn does not have."""
    if password:
        # It is as the user wrote it, whatever the encoding of the session.
        remember_secrets_of(make_conninfo(node.dsn, password=password.decode(errors="replace")))


def _register(node: Node, connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    _remember_password(node, connection.pgconn.password)
    remember_open(connection, node)
    if connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
        connection.execute("SET transaction_timeout = 0")
    return connection


def has_restriction(version: int) -> bool:
    """Whether a server of this version can refuse to read views (PostgreSQL manual, "Client Connection Defaults")."""
    return version >= RESTRICTION_VERSIONS.get(version // 10000, 170000)


def refuse_views(connection: psycopg.Connection[Any]) -> None:
    """Let the rest of the transaction, which reads tables or sequences by name, read no view, if the server can."""
    if has_restriction(connection.info.server_version):
        connection.execute(RESTRICTION)


def as_connected(node: Node, connection: psycopg.Connection[Any]) -> Node:
    """The node for client programs: over a Unix socket without any mode of TLS, if `connection` is over that socket.

    libpq ignores sslmode there, but a program that is built without TLS refuses it.
    """
    given = conninfo_to_dict(node.dsn)
    if given.get("sslmode") not in STRICT_MODES or not _is_over_socket(connection):
        return node
    # The very socket, as the dsn may name other hosts, too.
    here = {"host": connection.info.host, "port": str(connection.info.port), "sslmode": "disable"}
    kept = {name: value for name, value in given.items() if name not in ("sslrootcert", "sslnegotiation")}
    return replace(node, dsn=make_conninfo("", **(kept | here)))


def _is_over_socket(connection: psycopg.Connection[Any]) -> bool:
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:
        return handle.family == socket.AF_UNIX


def unreachable_error(node: Node, error: psycopg.Error) -> NodeUnreachableError:
    """The error for a node that can't be reached, with the reason from the server or libpq."""
    if error.pgconn is not None:
        _remember_password(node, error.pgconn.password)
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and line not in LIBPQ_GUESSES and not line.startswith(FROM_FILE)]
    hint = "check that the server runs, and that its dsn and your password file are right"
    if any(text in str(error) for text in ALL_USED):
        hint = (
            "its connections are used up: end sessions of others, or raise max_connections; connections_max of the"
            " [[node]] in fleet.toml limits those of a command"
        )
    elif refuses_database(node, error):
        # It runs, and has answered.
        hint = f"check the name of the database in fleet.toml; {UNFINISHED_RESTORE}"
    return NodeUnreachableError(
        f"node {node.id}: {lines[-1] if lines else type(error).__name__}{missing_files(node.dsn)}",
        hint=hint,
        details={"node": node.id},
    )


def refuses_database(node: Node, error: BaseException | None) -> bool:
    """Whether the server's answer to a connection is about the database, and not a failed authentication.

    Servers translate their messages, but not the two spaces after the severity, nor the name of pg_hba.conf.
    """
    text = str(error)
    is_answer = ":  " in text and database_name(node.dsn) in text
    return is_answer and not any(sign in text for sign in ("authentication", "pg_hba.conf"))


@contextmanager
def raising_unreachable(node: Node) -> Iterator[None]:
    """Raise NodeUnreachableError naming `node` if its session is lost in the block."""
    try:
        yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
        # The node answered: its wait for a lock timed out.
        raise
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error


def database_name(dsn: str) -> str:
    """The database that `dsn` names, by libpq's rule (dbname, else user)."""
    given = conninfo_to_dict(dsn)
    return str(given.get("dbname") or given.get("user") or "postgres")


def with_database(node: Node, database: str) -> Node:
    """The node with another database of the same server."""
    return replace(node, dsn=make_conninfo(node.dsn, dbname=database))
