"""Connections to nodes: every session of ours speaks with the same settings, so that a value has one text.

COPY and logical decoding both print values with the session's settings; a row read by COPY and the same
row read from WAL are the same bytes only because both sessions are opened here.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet.config import Node
from fleet.nodes.encodings import ADAPTERS, UTF8
from storage.errors import UnreachableError

CONNECT_SECONDS_MAX = 10
# What changes the text of a value (PostgreSQL manual, "Client Connection Defaults"); search_path because
# regclass and its kin print a schema only where the path does not reach. row_security=off makes a reader
# that policies would blind fail instead of copying too little.
PINNED_SETTINGS = {
    "datestyle": "ISO,YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    # What changes how a value is read: a document alone would be XML, {NULL} an array of a text.
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
    # A standby refuses every statement of a transaction that is serializable.
    "default_transaction_isolation": "read\\ committed",
    "default_transaction_deferrable": "off",
    "default_tablespace": "",
    # Compiling a long query of the catalogs takes longer than running it.
    "jit": "off",
    # A session whose client is gone ends on the server too, in the middle of a query, with its locks and slots.
    "client_connection_check_interval": "2s",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
# Older servers would refuse a session that sets it while it begins.
TRANSACTION_TIMEOUT_VERSION = 170000

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
# What this process has open, with the server that it leads to.
_open: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()
_open_lock = threading.Lock()


# What libpq adds to a reason: guesses at what may be behind it, and they stand last.
LIBPQ_GUESSES = {
    "This probably means the server terminated abnormally",
    "before or while processing the request.",
    "Is the server running on that host and accepting TCP/IP connections?",
    "Is the server running locally and accepting connections on that socket?",
}


class NodeUnreachableError(UnreachableError):
    """A node does not take our connection."""


class CopyError(UnreachableError):
    """A node ended a COPY before its end."""


def conninfo(dsn: str, **more: str) -> str:
    """`dsn` as a libpq connection string with the pinned settings, time-outs and keepalives added."""
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
    return make_conninfo("", **(merged | {"options": options, "client_encoding": UTF8} | more))


def connect(node: Node, **more: str) -> psycopg.Connection[Any]:
    """Open an autocommit session on `node`; raise NodeUnreachableError if it can't be had."""
    try:
        return _noting_server(node, psycopg.connect(conninfo(node.dsn, **more), autocommit=True, context=ADAPTERS))
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
        return _noting_server(node, session)
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error


def shut_down(connection: AnyConnection) -> None:
    """End the connection from any thread: whoever waits for its answer gets an OperationalError at once."""
    try:
        handle = socket.socket(fileno=os.dup(connection.fileno()))
    except (OSError, psycopg.Error):
        return
    with handle, suppress(OSError):
        # Its number can't have become another file's as long as the connection is open.
        if not connection.closed:
            handle.shutdown(socket.SHUT_RDWR)


def shut_down_sessions(node: Node) -> None:
    """End all connections of this process to the server of `node`."""
    server = _server_of(node)
    with _open_lock:
        found = [connection for connection, known in _open.items() if known == server]
    for connection in found:
        shut_down(connection)


@contextmanager
def shut_down_after(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Bound the block: a connection that is still in use after `seconds` is shut down."""
    timer = threading.Timer(seconds, shut_down, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _noting_server(node: Node, connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    with _open_lock:
        _open[connection] = _server_of(node)
    if connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
        connection.execute("SET transaction_timeout = 0")
    return connection


def _server_of(node: Node) -> str:
    """The node's dsn without its database: all databases of a server answer or none does."""
    return make_conninfo("", **{key: value for key, value in conninfo_to_dict(node.dsn).items() if key != "dbname"})


def unreachable_error(node: Node, error: psycopg.Error) -> NodeUnreachableError:
    """The error for a node that can't be reached, with the server's or libpq's own reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and line.strip() not in LIBPQ_GUESSES]
    return NodeUnreachableError(
        f"node {node.id}: {lines[-1] if lines else type(error).__name__}",
        hint="see that the server runs and that the dsn in fleet.toml and your password file fit",
        details={"node": node.id},
    )


@contextmanager
def raising_unreachable(node: Node) -> Iterator[None]:
    """Name `node` where its session is lost in this block: raise NodeUnreachableError."""
    try:
        yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
        # It has answered: a wait for a lock was bounded.
        raise
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error


def database_name(dsn: str) -> str:
    """The database that `dsn` leads to, by libpq's rule (dbname, else user)."""
    given = conninfo_to_dict(dsn)
    return str(given.get("dbname") or given.get("user") or "postgres")


def with_database(node: Node, database: str) -> Node:
    """The same server as `node`, another database."""
    return replace(node, dsn=make_conninfo(node.dsn, dbname=database))
