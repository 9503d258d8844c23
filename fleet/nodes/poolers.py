"""Connection poolers between a command and its nodes: whether one is there, and what it makes of sessions.

A session of a pooler tells another process id when it begins than its server does when it is asked: poolers make up
the key with which their clients cancel queries. A pooler that gives each transaction any of its server's sessions
(PgBouncer: pool_mode = transaction) can't be used: settings, locks and prepared statements don't last. A pooler that
hands sessions on as they are left would give ours to the application.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import Node
from cutline.fleet.nodes.shut_down import shut_down_after
from cutline.storage.errors import RefusedError

# Bare sessions of the pooler, in which nothing is set.
Open = Callable[[], psycopg.Connection[Any]]

PROCESS_QUERY = "SELECT pg_catalog.pg_backend_pid()"
# Of several idle sessions of its server, a pooler gives the one that was used last, or first, or any: while this many
# others are held, a session that is not kept has to change.
HELD = 3
# A pooler resets a session in the background.
RESET_TRIES, RESET_SECONDS = 3, 0.05
ANSWER_SECONDS_MAX = 15.0
CONNECT_SECONDS_MAX = "2"
LEFT_SETTING = "cutline.left"
# PgBouncer answers so at its own database, to those who may not administer it.
CONSOLE, CONSOLE_REFUSAL = "pgbouncer", "not allowed"
PGBOUNCER, UNKNOWN = "PgBouncer", "a connection pooler"
# What poolers say of a startup parameter: PgBouncer; RDS Proxy.
REFUSALS = ("unsupported startup parameter", "command-line options")
DIRECT = "let the dsn name the server itself: PostgreSQL's own host and port"


class SessionUnfitError(RefusedError):
    """A session of a node can't be used: a connection pooler between does not pass on or keep what it needs."""


_checked: dict[str, str] = {}
# One for each of these: a pooler that does not answer holds up no other node.
_locks: dict[str, threading.Lock] = {}
_checking = threading.Lock()


def refuses_options(error: Exception) -> bool:
    """Whether a pooler refused the connection because it asks for settings."""
    text = str(error)
    return "options" in text and any(sign in text for sign in REFUSALS)


def refuses_replication(error: Exception) -> bool:
    """Whether a pooler refused the connection because it asks for replication commands."""
    return f"{REFUSALS[0]}: replication" in str(error)


def check_keeps(node: Node, open_session: Open) -> None:
    """Raise SessionUnfitError unless the pooler before `node` keeps sessions, and resets those that it hands on.

    A process asks this once of each dsn.
    """
    key = _key(node)
    with _checking:
        own = _locks.setdefault(key, threading.Lock())
    with own:
        if key not in _checked:
            _checked[key] = _find_fault(open_session)
        fault = _checked[key]
    if fault:
        problem, remedy = FAULTS[fault]
        raise unfit_error(node, problem, f"{DIRECT}; or {remedy}")


# By the fault: what the pooler does, and what would mend it.
FAULTS = {
    "shares": (
        "gives each transaction any of the server's sessions, so that settings and locks don't last",
        "give this database pool_mode = session in the pooler",
    ),
    "leaves": (
        "hands sessions on without resetting them, so that locks and settings would reach other clients",
        "set server_reset_query = DISCARD ALL in the pooler",
    ),
}


def unfit_error(node: Node, problem: str, hint: str = DIRECT) -> SessionUnfitError:
    """The error that names the node and the pooler, and what it does."""
    pooler = name_pooler(node)
    return SessionUnfitError(
        f"node {node.id}: its dsn leads to {pooler}, which {problem}",
        hint=hint,
        details={"node": node.id, "pooler": pooler},
    )


def name_pooler(node: Node) -> str:
    """The name of the pooler before the node, as far as it can be told."""
    dsn = make_conninfo(node.dsn, dbname=CONSOLE, connect_timeout=CONNECT_SECONDS_MAX)
    try:
        with psycopg.connect(dsn, autocommit=True) as connection, shut_down_after(connection, ANSWER_SECONDS_MAX):
            (version,) = connection.execute("SHOW VERSION").fetchone() or ("",)
            return str(version) if PGBOUNCER in str(version) else UNKNOWN
    except psycopg.Error as error:
        return PGBOUNCER if CONSOLE_REFUSAL in str(error) else UNKNOWN


def _find_fault(open_session: Open) -> str:
    if _shares(open_session):
        return "shares"
    return "leaves" if _leaves(open_session) else ""


def _shares(open_session: Open) -> bool:
    """Whether a session is given to others between two of its transactions."""
    with ExitStack() as stack:
        own = _open_bounded(stack, open_session)
        process = _process_of(own)
        for _ in range(HELD):
            other = _open_bounded(stack, open_session)
            try:
                # In a transaction, nobody else gets its session.
                other.execute("BEGIN")
            except psycopg.DatabaseError as error:
                if error.sqlstate is None:
                    raise
                # PgBouncer with pool_mode = statement.
                return True
            if _process_of(other) == process or _process_of(own) != process:
                return True
    return False


def _leaves(open_session: Open) -> bool:
    """Whether what a session has set or locked is still there in the next one."""
    number = secrets.randbits(62)
    with ExitStack() as stack:
        first = _open_bounded(stack, open_session)
        process = _process_of(first)
        first.execute(f"SELECT pg_catalog.set_config('{LEFT_SETTING}', 'x', false)")
        first.execute(f"SELECT pg_catalog.pg_try_advisory_lock({number})")
    for _ in range(RESET_TRIES):
        time.sleep(RESET_SECONDS)
        with ExitStack() as stack:
            second = _open_bounded(stack, open_session)
            query = (
                f"SELECT pg_catalog.current_setting('{LEFT_SETTING}', true), pg_catalog.pg_advisory_unlock({number})"
            )
            if _process_of(second) == process:
                setting, was_locked = second.execute(query).fetchone() or (None, False)
                return bool(setting) or bool(was_locked)
    return False


def _open_bounded(stack: ExitStack, open_session: Open) -> psycopg.Connection[Any]:
    connection = stack.enter_context(open_session())
    stack.enter_context(shut_down_after(connection, ANSWER_SECONDS_MAX))
    return connection


def _process_of(connection: psycopg.Connection[Any]) -> int:
    (process,) = connection.execute(PROCESS_QUERY).fetchone() or (0,)
    return int(process)


def _key(node: Node) -> str:
    given = conninfo_to_dict(node.dsn)
    return make_conninfo("", **{name: value for name, value in given.items() if name != "options"})
