"""Connection poolers between Cutline and a server: which sessions they spoil, and what is said about it.

Behind a pooler, the process id reported when the session starts differs from the server's pg_backend_pid(), because
poolers make up the keys that their clients use to cancel queries. A pooler that may run each transaction in a different
server session (PgBouncer: pool_mode = transaction) can't be used: settings, locks and prepared statements don't last. A
pooler that does not reset sessions before it reuses them would pass ours on to the application.
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
from cutline.nodes.open_sessions import shut_down_after
from cutline.storage.errors import RefusedError

# Opens a session through the pooler without setting anything.
Open = Callable[[], psycopg.Connection[Any]]

PROCESS_QUERY = "SELECT pg_catalog.pg_backend_pid()"
# A pooler hands out its most recently used idle server session, its least recently used, or any of them. While this
# many other sessions are open, a client that shares server sessions is sure to get a different one.
HELD = 3
# A pooler resets a session in the background.
RESET_TRIES, RESET_SECONDS = 3, 0.05
ANSWER_SECONDS_MAX = 15.0
POOLER_SECONDS_MAX = "2"
LEFT_SETTING = "cutline.left"
# PgBouncer's admin database, and its answer to users who may not administer it.
CONSOLE, CONSOLE_REFUSAL = "pgbouncer", "not allowed"
PGBOUNCER, UNKNOWN = "PgBouncer", "a connection pooler"
# The messages with which PgBouncer and RDS Proxy refuse a startup parameter.
REFUSALS = ("unsupported startup parameter", "command-line options")
DIRECT = "point the dsn at the server itself: PostgreSQL's own host and port"


class SessionUnfitError(RefusedError):
    """A session on a node can't be used, because a connection pooler does not pass on or keep the session's state."""


_checked: dict[str, str] = {}
# One lock per dsn, so that a pooler that does not answer does not hold up other nodes.
_locks: dict[str, threading.Lock] = {}
_checking = threading.Lock()


def refuses_options(error: Exception) -> bool:
    """Whether a pooler refused the connection because it requests settings."""
    text = str(error)
    return "options" in text and any(sign in text for sign in REFUSALS)


def refuses_replication(error: Exception) -> bool:
    """Whether a pooler refused the connection because it requests replication commands."""
    return f"{REFUSALS[0]}: replication" in str(error)


def check_keeps(node: Node, open_session: Open) -> None:
    """Raise SessionUnfitError unless the pooler in front of `node` keeps sessions, and resets them before reuse.

    A process checks each dsn once.
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


# For each fault, the pooler's behaviour and the remedy.
FAULTS = {
    "shares": (
        "may run each transaction in a different server session, so settings and locks don't last",
        "set pool_mode = session for this database in the pooler",
    ),
    "leaves": (
        "reuses sessions without resetting them, so locks and settings would leak to other clients",
        "set server_reset_query = DISCARD ALL in the pooler",
    ),
}


def unfit_error(node: Node, problem: str, hint: str = DIRECT) -> SessionUnfitError:
    """Return the error that names the node, the pooler and the pooler's behaviour."""
    pooler = name_pooler(node)
    return SessionUnfitError(
        f"node {node.id}: its dsn connects through {pooler}, which {problem}",
        hint=hint,
        details={"node": node.id, "pooler": pooler},
    )


def name_pooler(node: Node) -> str:
    """Return the name of the pooler in front of the node, or UNKNOWN."""
    dsn = make_conninfo(node.dsn, dbname=CONSOLE, connect_timeout=POOLER_SECONDS_MAX)
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
    """Whether another client can get the server session between two transactions."""
    with ExitStack() as stack:
        own = _open_bounded(stack, open_session)
        process = _process_of(own)
        for _ in range(HELD):
            other = _open_bounded(stack, open_session)
            try:
                # During a transaction, no other client gets its server session.
                other.execute("BEGIN")
            except psycopg.DatabaseError as error:
                if error.sqlstate is None:
                    raise
                # PgBouncer with pool_mode = statement refuses BEGIN.
                return True
            if _process_of(other) == process or _process_of(own) != process:
                return True
    return False


def _leaves(open_session: Open) -> bool:
    """Whether a session's settings and locks are still there in the next session."""
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
