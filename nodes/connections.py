"""Connections to nodes. All sessions have the same settings, so that a value always has the same text.

COPY and logical decoding print values under the session's settings: a row read by COPY and the same row read from WAL
have the same bytes only because both sessions are opened here.

A session requests its settings when it starts, in the `options` startup parameter. A server applies them or refuses the
session. A connection pooler in between may drop them, and a login trigger may change them, so every new session is
queried once to verify them.

Behind a pooler, the process id reported when the session starts differs from the server's pg_backend_pid(), because
poolers make up the keys that their clients use to cancel queries. A pooler that may run each transaction in a different
server session (PgBouncer: pool_mode = transaction) can't be used: settings, locks and prepared statements don't last. A
pooler that does not reset sessions before it reuses them would pass ours on to the application.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from cutline.fleet.config import SECRET_PARAMETERS, KnownServer, Node, remember_secrets_of
from cutline.fleet.libpq_environment import missing_files
from cutline.fleet.messages import UNFINISHED_RESTORE
from cutline.fleet.timers import calling_after
from cutline.nodes.encodings import ADAPTERS, UTF8
from cutline.nodes.server_errors import called_functions, explain, remedy_of, shorten_message
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError, UsageError
from cutline.storage.process_limits import OPEN_FILES_HINT as OPEN_FILES
from cutline.storage.process_limits import TooLittleMemoryError, are_few_left, is_used_up

# Settings that change the text of a value (PostgreSQL manual, "Client Connection Defaults"), with each value written as
# the server shows it. search_path matters because regclass and similar types print a schema only if it is not in the
# path. With row_security=off a query that policies would filter fails, instead of silently copying less.
PINNED_SETTINGS = {
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    # Settings that change how a value is parsed: otherwise XML might have to be a document, or {NULL} might be a
    # string.
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
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "default_tablespace": "",
    # With "on", a server ends the session of a statement that it refuses, and seems to be out of reach.
    "exit_on_error": "off",
    # With "on", each commit would wait for a synchronous standby that is down.
    "synchronous_commit": "local",
    # With "on", the planner would run functions in the CHECK constraints on a table that is copied in ranges.
    "constraint_exclusion": "partition",
    # Compiling a long catalog query takes longer than running it.
    "jit": "off",
    # Enough for a hash table of the catalogs of 100,000 tables. Without one, the server would search all of them for
    # each.
    "work_mem": "64MB",
    # The server ends a session whose client has disconnected, even during a query, and releases its locks and slots.
    "client_connection_check_interval": "2s",
}
# Over a Unix socket these settings are shown as 0.
KEEPALIVES = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3"}
# ALTER ROLE … SET role makes a role's sessions act as a different role. Privileges would be checked for that role, and
# granted to it. The dsn may name a role in its own options.
ROLE = {"role": "none"}
# Servers before 17 refuse a session that requests this setting in `options`.
LATER_SETTINGS = {"transaction_timeout": "0"}
# Additional settings that a restore requests.
ASKED_ALSO = ("role", "session_replication_role")
# The settings that a dump depends on but that pg_dump does not set itself (pg_dump.c, setup_connection).
DUMP_SETTINGS = (
    "timezone",
    "lc_monetary",
    "bytea_output",
    "xmlbinary",
    "standard_conforming_strings",
    "role",
)
OPTION = re.compile(r"(?:-c\s*|--)([A-Za-z_][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


# An interrupt ends sessions: psycopg's messages about them on stderr would look like the failure of a server.
logging.getLogger("psycopg").addHandler(logging.NullHandler())


class SessionState(NamedTuple):
    """The state of a session: its server process, the settings that it lacks (with the values to set), and its server.

    `server` is None if the query did not ask for it.
    """

    process: int
    lacking: dict[str, str]
    server: KnownServer | None


def startup_options(given: str) -> str:
    """Return the `options` startup parameter with the pinned settings, which override the `given` options.

    Of the `given` options, only a role takes precedence.
    """
    pinned = " ".join(option(name, value) for name, value in (PINNED_SETTINGS | KEEPALIVES).items())
    return " ".join(part for part in (option("role", ROLE["role"]), given.strip(), pinned) if part)


def option(name: str, value: str) -> str:
    """Format a setting for the `options` startup parameter; if a name is repeated, the last setting counts."""
    escaped = re.sub(r"([\\\s])", r"\\\1", value)
    return f"-c {name}={escaped}"


def read_options(options: str) -> dict[str, str]:
    """Parse the `options` startup parameter; if a name is repeated, the last counts (PostgreSQL manual, "postgres")."""
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in re.findall(r"(?:\\.|[^\s\\])+", options)]
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        follows = words[number + 1] if word == "-c" and number + 1 < len(words) else ""
        if match := OPTION.fullmatch(f"-c{follows}" if follows else word):
            found[match[1].replace("-", "_").lower()] = match[2]
    return found


def wanted_settings(conninfo: str) -> dict[str, str]:
    """Return the settings of a session with this connection string, including those that are set after it starts."""
    parameters = conninfo_to_dict(conninfo)
    encoding = {"client_encoding": str(parameters["client_encoding"])} if parameters.get("client_encoding") else {}
    return read_options(str(parameters.get("options") or "")) | LATER_SETTINGS | encoding


def state_query(wanted: Mapping[str, str], *, asks_server: bool) -> str:
    """Return the query for the state of a session, for `read_state`.

    The session's search_path is not known yet, so the query uses no operators and qualifies every function with
    pg_catalog: otherwise the server might choose a better-matching function that another role created in this database.
    """
    server = "(pg_catalog.pg_control_system()).system_identifier, pg_catalog.pg_is_in_recovery()"
    settings = "".join(f", pg_catalog.current_setting('{name}', true)" for name in _asked(wanted))
    return f"SELECT pg_catalog.pg_backend_pid(), {server if asks_server else 'NULL, NULL'}{settings}"


def read_state(row: Sequence[Any], wanted: Mapping[str, str]) -> SessionState:
    """Read the state of a session from the row that `state_query` returns."""
    process, system_identifier, in_recovery, *values = row
    # A setting that the server does not recognize is NULL.
    lacking = {
        name: wanted[name]
        for name, value in zip(_asked(wanted), values, strict=True)
        if value is not None and value != wanted[name]
    }
    server = None if system_identifier is None else KnownServer(str(system_identifier), bool(in_recovery))
    return SessionState(int(process), lacking, server)


def _asked(wanted: Mapping[str, str]) -> list[str]:
    names = (*PINNED_SETTINGS, *LATER_SETTINGS, *ASKED_ALSO, "client_encoding")
    return [name for name in names if name in wanted]


def set_query(settings: Mapping[str, str]) -> str:
    """Return the query that sets the settings for the rest of the session; it trusts no search_path either."""
    # The role is set last: the new role might not be allowed to change the other settings.
    ordered = sorted(settings.items(), key=lambda one: one[0] == "role")
    return "SELECT " + ", ".join(
        f"pg_catalog.set_config({_literal(name)}, {_literal(value)}, false)" for name, value in ordered
    )


def _literal(text: str) -> str:
    # In an E'' string, backslashes mean the same whatever standard_conforming_strings is set to.
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"


# The folder that lists this process's open descriptors, on Linux and other systems.
DESCRIPTORS = Path("/dev/fd")

CANCEL_SECONDS_MAX = 5.0

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
# The servers of this process's open connections, and the addresses at which each server was reached.
_open: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()
_addresses: dict[str, set[Any]] = {}
_open_lock = threading.Lock()


class _Opened:
    """The connections that a block opens (`stoppable_sessions`)."""

    def __init__(self) -> None:
        self._connections: WeakSet[psycopg.Connection[Any]] = WeakSet()
        self._lock = threading.Lock()
        self._is_stopped = False

    def add(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            self._connections.add(connection)
            is_late = self._is_stopped
        if is_late:
            shut_down(connection)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            connections = list(self._connections)
        for connection in connections:
            shut_down(connection)


_opened: ContextVar[_Opened | None] = ContextVar("opened", default=None)


@contextmanager
def stoppable_sessions() -> Iterator[Callable[[], None]]:
    """Yield a function with which another thread can end the connections that this thread opens in the block.

    Connections that are opened later are ended at once.
    """
    opened = _Opened()
    before = _opened.set(opened)
    try:
        yield opened.stop
    finally:
        _opened.reset(before)


def remember_open(connection: psycopg.Connection[Any], node: Node) -> None:
    """Register the connection and the server's address for shut_down_sessions and stoppable_sessions."""
    server = _server_of(node)
    if opened := _opened.get():
        opened.add(connection)
    with _open_lock, suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as handle:
        _open[connection] = server
        _addresses.setdefault(server, set()).add(handle.getpeername())


def shut_down(connection: AnyConnection) -> None:
    """End the connection. May be called from any thread: a thread waiting on the connection gets OperationalError."""
    try:
        handle = socket.socket(fileno=os.dup(connection.fileno()))
    except (OSError, psycopg.Error):
        return
    with handle, suppress(OSError):
        # While the connection is open, its descriptor can't belong to another file.
        if not connection.closed:
            handle.shutdown(socket.SHUT_RDWR)


def cancel_statements() -> None:
    """Cancel the running statements of this process's sessions. May be called from any thread.

    A request that arrives before the statement starts has no effect.
    """
    with _open_lock:
        running = [session for session in _open if session.pgconn.transaction_status == TransactionStatus.ACTIVE]
    for connection in running:
        with suppress(psycopg.Error):
            connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)


def shut_down_sessions(nodes: Iterable[Node], kept: Iterable[psycopg.Connection[Any]] = ()) -> None:
    """End all connections from this process to the nodes' servers, even those from drivers that hide their sockets.

    The connections in `kept` stay open; no other thread may close them.
    """
    servers, spared = set(map(_server_of, nodes)), set(kept)
    with _open_lock:
        connections = [session for session, server in _open.items() if server in servers and session not in spared]
        addresses = frozenset(address for server in servers for address in _addresses.get(server, ()))
    sockets = frozenset(os.fstat(session.fileno()).st_ino for session in spared if not session.closed)
    for connection in connections:
        shut_down(connection)
    with suppress(OSError):
        for descriptor in DESCRIPTORS.iterdir():
            _shut_down_to(addresses, int(descriptor.name), sockets)


def _shut_down_to(addresses: frozenset[Any], descriptor: int, spared: Set[int]) -> None:
    """Shut the descriptor down if it is a socket connected to one of these addresses, unless its inode is `spared`."""
    with suppress(OSError):
        # Use a duplicate: the number may soon be reused for a different file, but the duplicate still refers to the
        # same one.
        copy = os.dup(descriptor)
        try:
            handle = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return
        with handle:
            if handle.getpeername() in addresses and os.fstat(copy).st_ino not in spared:
                handle.shutdown(socket.SHUT_RDWR)


@contextmanager
def shut_down_after(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Shut the connection down if the block is still running after `seconds`."""
    with calling_after(seconds, partial(shut_down, connection)):
        yield


def _server_of(node: Node) -> str:
    """Return the node's dsn without database and settings: a server that stops answering does so in every session."""
    given = conninfo_to_dict(node.dsn)
    return make_conninfo("", **{key: value for key, value in given.items() if key not in ("dbname", "options")})


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


Item = TypeVar("Item")
# A fleet may have a thousand nodes. A query takes milliseconds, unless all nodes are waiting for the same event.
THREADS_MAX = 64
LOOK_SECONDS = 1.0


def start_daemons(work: Callable[[Item], object], left: deque[Item], name: str) -> list[threading.Thread]:
    """Start up to THREADS_MAX threads that take items from `left` and call `work` on each; return the threads.

    The threads end once `left` is empty; the caller may clear it. The threads are daemons, because a node that accepts
    a connection but never answers must not keep the command from ending.
    """

    def run() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            work(item)

    threads = [
        threading.Thread(target=run, name=f"{name} {number}", daemon=True)
        for number in range(min(len(left), THREADS_MAX))
    ]
    for thread in threads:
        thread.start()
    return threads


def await_futures(futures: Collection[Future[Any]], threads: Collection[threading.Thread]) -> None:
    """Wait until the threads have set all futures; raise TooLittleMemoryError if they end before that."""
    while wait(futures, LOOK_SECONDS).not_done:
        if not any(thread.is_alive() for thread in threads) and wait(futures, 0).not_done:
            raise TooLittleMemoryError("a thread ended before its work was done")


# Every server has this database. Cutline connects to it to create and rename databases.
MAINTENANCE_DATABASE = "postgres"
MAKE_IT = f"CREATE DATABASE {MAINTENANCE_DATABASE};"
CONNECT_SECONDS_MAX = 10
# psycopg's message if libpq gives no reason, for example if it can't open another file.
NO_DETAILS, TOO_MANY = "no error details available", "too many open files"
# Older servers refuse a session that sets transaction_timeout in its connection string.
TRANSACTION_TIMEOUT_VERSION = 170000
# Reading a view runs functions of its owner's choice as our role. Cutline expects a table or a sequence, but its owner
# may since have replaced it with a view. RESTRICTION_VERSIONS maps each major version to the first minor version that
# can refuse to read views.
RESTRICTION = "SET LOCAL restrict_nonsystem_relation_kind = 'view, foreign-table'"
RESTRICTION_VERSIONS = {15: 150008, 16: 160004}

NO_REPLICATION = f"{DIRECT} (PgBouncer 1.23 and later pass replication connections through)"
# The values of the `replication` parameter that request an ordinary session.
NO_REPLICATION_VALUES = (None, b"", b"0", b"f", b"n", b"false", b"no", b"off")
ONE_SERVER = "make its dsn connect to only one server: name a single host, or add target_session_attrs=primary"

# The sslmode values with which libpq never connects without TLS.
STRICT_MODES = ("require", "verify-ca", "verify-full")

# The passphrase to give OpenSSL if the dsn does not contain one.
NO_PASSPHRASE = "none"

# libpq's message for a connection that ended without a message from the server.
CUT_OFF = "server closed the connection unexpectedly"
# libpq's message if neither the dsn nor the system names the user.
NO_USER = "local user with ID"
# A server's English messages when no connection is free: libpq does not report an SQLSTATE before the session starts.
ALL_USED = "sorry, too many clients already", "remaining connection slots are reserved"
# The same when a role or a database has as many connections as its CONNECTION LIMIT allows.
LIMITED, FULL = re.compile('too many connections for (role|database) "(.+)"'), "too many connections for database"
# Words that servers don't translate: a privilege, the file that admits clients, and a setting.
CONNECT, HBA, WAL_SENDERS = "CONNECT", "pg_hba.conf", "max_wal_senders"
# The end of the names of databases that restores create (nodes/other_databases.py).
NEW_DATABASES = "_(restoring|rehearsing)_[0-9a-f]+$"


class Passage(NamedTuple):
    """How a session reached its server: whether through a pooler, and which settings it lacked when it started."""

    pooled: bool
    lacking: Mapping[str, str]


DIRECTLY = Passage(pooled=False, lacking={})
_nodes: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()
# Sessions that came through a pooler or started without some of their settings.
_passages: WeakKeyDictionary[psycopg.Connection[Any], Passage] = WeakKeyDictionary()


class NodeUnreachableError(UnreachableError):
    """A connection to a node can't be opened, or its session was lost."""


class NotAdmittedError(NodeUnreachableError):
    """A server's pg_hba.conf does not admit the role to a database."""


class NodeDisruptedError(NodeUnreachableError):
    """A statement failed for a reason unrelated to the statement; a retry can succeed (nodes/server_errors.py)."""


class OtherServerError(NodeUnreachableError):
    """A session reached a different server than an earlier session with the same dsn."""


class LoginTriggerError(RefusedError):
    """A login event trigger of a node's database refuses the session."""


class CopyError(UnreachableError):
    """A node ended a COPY before it was complete."""


def conninfo(dsn: str, **more: str) -> str:
    """Return `dsn` as a libpq connection string, with the pinned settings, timeouts and keepalives added."""
    given = conninfo_to_dict(dsn)
    defaults = {
        "connect_timeout": str(CONNECT_SECONDS_MAX),
        "keepalives_idle": "30",
        "keepalives_interval": "10",
        "keepalives_count": "3",
    }
    merged = defaults | {key: value for key, value in given.items() if value is not None}
    # Without this, OpenSSL would prompt at the terminal for the passphrase of an encrypted key, even the default key's.
    merged.setdefault("sslpassword", NO_PASSPHRASE)
    # Other code recognizes our sessions by their application_name.
    ours = {
        "application_name": "cutline",
        "options": startup_options(str(given.get("options") or "")),
        "client_encoding": UTF8,
    }
    return make_conninfo("", **(merged | ours | more))


def probe_conninfo(dsn: str) -> str:
    """Return `conninfo` without settings, for sessions that only check whether the server answers."""
    return make_conninfo(conninfo(dsn), options="")


class ProgramConnection(NamedTuple):
    """How a client program connects: a connection string for its command line, and variables for its environment."""

    conninfo: str
    environment: dict[str, str]


def program_connection(node: Node, *, needs_tls: bool, **more: str) -> ProgramConnection:
    """Return `conninfo` for a program, with the password in the environment: all users can read command lines.

    `needs_tls` must be set if the other sessions use TLS: it keeps the program from falling back to plaintext.
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
            f"node {node.id}: the dsn contains {secret}, which pg_dump accepts only on its command line, where every"
            " user of the machine can read it",
            hint="use a password, or a client key in a file that only you can read",
            details={"node": node.id},
        )
    return ProgramConnection(make_conninfo("", **given), environment)


class _Cursor(psycopg.Cursor[Any]):
    """A cursor that adds the node, as a note, to errors about missing privileges: the grant must be run there."""

    def execute(self, *args: Any, **options: Any) -> Self:
        try:
            return super().execute(*args, **options)
        except psycopg.errors.InsufficientPrivilege as error:
            error.add_note(f"node {node_of(self.connection)}")
            raise


class _ClientCursor(_Cursor, psycopg.ClientCursor[Any]):
    """Like `_Cursor`, for commands that don't accept parameters through the protocol."""


def connect(node: Node, **more: str) -> psycopg.Connection[Any]:
    """Open an autocommit session on `node`.

    Raises NodeUnreachableError if that is not possible, SessionUnfitError if a connection pooler in between does not
    keep sessions or a setting can't be set, LoginTriggerError, and OtherServerError if a different server answers than
    before.
    """
    return _begin(node, conninfo(node.dsn, **more), _Cursor)


def connect_with_path(node: Node, path: str, **more: str) -> psycopg.Connection[Any]:
    """Open a session as `connect` does, with this search_path as the session's default."""
    options = conninfo_to_dict(conninfo(node.dsn))["options"]
    return connect(node, options=f"{options} {option('search_path', path)}", **more)


def connect_plainly(node: Node) -> psycopg.Connection[Any]:
    """Open a session with the settings of its server, database and role instead of ours.

    Other roles' objects may come before PostgreSQL's there: its queries must qualify every name. Raises the errors of
    `connect`, except for a pooler's.
    """
    try:
        session = psycopg.connect(probe_conninfo(node.dsn), autocommit=True, context=ADAPTERS, cursor_factory=_Cursor)
    except psycopg.OperationalError as error:
        raise session_error(node, error) from error
    _remember_password(node, session.pgconn.password)
    remember_open(session, node)
    _nodes[session] = node.id
    return session


def connect_replication(node: Node, **more: str) -> psycopg.Connection[Any]:
    """Open a session on `node` that takes replication commands for its database; raise the same errors as `connect`."""
    asked = conninfo(node.dsn, replication="database", **more)
    session = _begin(node, asked, _ClientCursor)
    try:
        session.execute("IDENTIFY_SYSTEM")
    except BaseException as error:
        session.close()
        if isinstance(error, psycopg.errors.SyntaxError):
            what = "ignores the request for a replication connection, which every create needs"
            raise unfit_error(node, what) from None
        if isinstance(error, psycopg.OperationalError):
            raise unreachable_error(node, error) from error
        raise
    return session


def _begin(node: Node, asked: str, cursors: type[_Cursor]) -> psycopg.Connection[Any]:
    """Open a session, and make sure that it has the settings that the connection string requests."""

    def open_bare(text: str) -> psycopg.Connection[Any]:
        return psycopg.connect(text, autocommit=True, context=ADAPTERS, cursor_factory=cursors)

    try:
        try:
            session = open_bare(asked)
        except psycopg.OperationalError as error:
            if not refuses_options(error):
                raise
            session = open_bare(make_conninfo(asked, options=""))
    except psycopg.OperationalError as error:
        raise session_error(node, error) from error
    try:
        _check_ordinary(node, session, asked)
        _remember_password(node, session.pgconn.password)
        remember_open(session, node)
        _nodes[session] = node.id
        _settle(node, session, asked, lambda: open_bare(make_conninfo(asked, options="")))
    except psycopg.OperationalError as error:
        session.close()
        raise unreachable_error(node, error) from error
    except BaseException:
        session.close()
        raise
    return session


def _check_ordinary(node: Node, session: psycopg.Connection[Any], asked: str) -> None:
    """Raise UsageError if the session takes replication commands only because libpq's service file requests that."""
    if "replication" in conninfo_to_dict(asked):
        return
    if any(
        parameter.keyword == b"replication" and parameter.val not in NO_REPLICATION_VALUES
        for parameter in session.pgconn.info
    ):
        raise UsageError(
            f"node {node.id}: its connection service sets replication, which Cutline sets itself where needed",
            hint="remove replication from the service file",
            details={"node": node.id},
        )


def _settle(node: Node, session: psycopg.Connection[Any], asked: str, open_bare: Open) -> None:
    """Query the session's settings and server, and set the missing settings; raise the same errors as `connect`."""
    wanted = wanted_settings(asked)
    state = ask_state(node, session, wanted)
    check_server(node, state)
    is_replication = "replication" in conninfo_to_dict(asked)
    if pooled := session.info.backend_pid != state.process and not is_replication:
        check_keeps(node, open_bare)
        # Another client may have used this server session before.
        session.execute("DISCARD ALL")
        state = ask_state(node, session, wanted)
    if pooled or state.lacking:
        _passages[session] = Passage(pooled, dict(state.lacking))
    # A pooler that drops our settings drops the dsn's own settings as well.
    if missing := dict(wanted) if pooled and state.lacking else state.lacking:
        _set(node, session, missing)
        if still := ask_state(node, session, wanted).lacking:
            raise lacking_error(node, still)


def lacking_error(node: Node, lacking: Iterable[str]) -> SessionUnfitError:
    """Return the error for a session that still lacks settings after they were set."""
    return unfit_error(node, f"does not keep these settings of a session: {', '.join(lacking)}")


def _set(node: Node, session: psycopg.Connection[Any], settings: Mapping[str, str]) -> None:
    known = {name: value for name, value in settings.items() if name not in LATER_SETTINGS or _knows_later(session)}
    try:
        session.execute(set_query(known).encode())
    except psycopg.errors.OperationalError:
        raise
    except psycopg.Error as error:
        raise unfit_error(
            node, f"drops settings, and the server does not allow setting them later: {shorten_message(error)}"
        ) from error


def _knows_later(session: psycopg.Connection[Any]) -> bool:
    return session.info.server_version >= TRANSACTION_TIMEOUT_VERSION


def ask_state(node: Node, session: psycopg.Connection[Any], wanted: Mapping[str, str]) -> SessionState:
    """Query a session's settings, and its server if the node's server is known."""
    row = session.execute(state_query(wanted, asks_server=node.server is not None).encode()).fetchone()
    if row is None:
        raise RuntimeError("a query without a table returned no row")
    return read_state(row, wanted)


def check_server(node: Node, state: SessionState) -> None:
    """Raise OtherServerError unless the session is on the node's known server."""
    if node.server is None or state.server is None:
        return
    problem = ""
    if state.server.system_identifier != node.server.system_identifier:
        problem = (
            "its dsn connects to more than one server: the system identifier was"
            f" {node.server.system_identifier} and is now {state.server.system_identifier}"
        )
    elif state.server.in_recovery and not node.server.in_recovery:
        problem = "its dsn connects to both the primary and a standby: a session was on a standby"
    if problem:
        raise OtherServerError(f"node {node.id}: {problem}", hint=ONE_SERVER, details={"node": node.id})


def lacking_at_start(connection: psycopg.Connection[Any]) -> Mapping[str, str]:
    """Return the requested settings that the session lacked when it started; client programs lack them, too."""
    return _passages.get(connection, DIRECTLY).lacking


def node_of(connection: psycopg.Connection[Any]) -> str:
    """Return the id of the session's node, for a message."""
    return _nodes.get(connection, connection.info.host)


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether the session goes through a connection pooler."""
    return _passages.get(connection, DIRECTLY).pooled


def _remember_password(node: Node, password: bytes | None) -> None:
    """Make errors hide a password that is not in the dsn, because libpq took it from a password file or a service."""
    if password:
        # The password's bytes are as the user wrote them, so the session's encoding does not matter.
        remember_secrets_of(make_conninfo(node.dsn, password=password.decode(errors="replace")))


def has_restriction(version: int) -> bool:
    """Whether a server of this version can refuse to read views (PostgreSQL manual, "Client Connection Defaults")."""
    return version >= RESTRICTION_VERSIONS.get(version // 10000, 170000)


def refuse_views(connection: psycopg.Connection[Any]) -> None:
    """Prevent the rest of the transaction from reading views, if the server supports that."""
    if has_restriction(connection.info.server_version):
        connection.execute(RESTRICTION)


def as_connected(node: Node, connection: psycopg.Connection[Any]) -> Node:
    """Return the node with a dsn that directs client programs to `connection`'s server, even if it names several hosts.

    Over a Unix socket sslmode is disabled: libpq ignores it there, but a program built without TLS refuses it. The host
    name stays, because certificates and password files use it.
    """
    given = {name: value for name, value in conninfo_to_dict(node.dsn).items() if value is not None}
    here = {"host": connection.info.host, "port": str(connection.info.port)}
    dropped = {"hostaddr", "target_session_attrs", "load_balance_hosts"}
    if not _is_over_socket(connection):
        here["hostaddr"] = connection.info.hostaddr
    elif given.get("sslmode") in STRICT_MODES:
        here["sslmode"] = "disable"
        dropped |= {"sslrootcert", "sslnegotiation"}
    kept = {name: value for name, value in given.items() if name not in dropped}
    return replace(node, dsn=make_conninfo("", **(kept | {name: value for name, value in here.items() if value})))


def on_each_host(node: Node) -> list[Node]:
    """Return the node once for each host that its dsn names, with a dsn that admits a server of any kind."""
    given = conninfo_to_dict(node.dsn)
    lists = {name: str(given[name]).split(",") for name in ("host", "hostaddr", "port") if given.get(name)}
    count = max((len(lists[name]) for name in ("host", "hostaddr") if name in lists), default=1)
    # A single port is that of each host.
    hosts = [{name: some[number if len(some) > 1 else 0] for name, some in lists.items()} for number in range(count)]
    return [replace(node, dsn=make_conninfo(node.dsn, target_session_attrs="any", **host)) for host in hosts]


def host_of(node: Node) -> str:
    """Return the host (or socket folder) and the port of a dsn that names one host."""
    given = conninfo_to_dict(node.dsn)
    # Several addresses may have one name, for their certificates.
    names = dict.fromkeys(str(given[name]) for name in ("host", "hostaddr") if given.get(name))
    return ":".join(filter(None, ("/".join(names), str(given.get("port") or ""))))


def _is_over_socket(connection: psycopg.Connection[Any]) -> bool:
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:
        return handle.family == socket.AF_UNIX


def session_error(node: Node, error: psycopg.Error) -> SnapshotError:
    """Return the error for a session that could not be opened."""
    if refuses_replication(error):
        return unfit_error(node, "does not accept replication connections, which every create needs", NO_REPLICATION)
    functions = called_functions(str(error))
    return login_trigger_error(node, error, functions[-1]) if functions else unreachable_error(node, error)


def login_trigger_error(node: Node, error: psycopg.Error, function: str) -> LoginTriggerError:
    """Return the error for a session that a login event trigger refuses: only such triggers run functions at login."""
    role = conninfo_to_dict(node.dsn).get("user") or "…"
    return LoginTriggerError(
        f"node {node.id}: a login event trigger in database {database_name(node.dsn)}, which calls {function}, rejected"
        f" the session: {explain(error)}",
        hint=[
            "find it: SELECT evtname, evtfoid::regprocedure FROM pg_event_trigger WHERE evtevent = 'login';",
            f"if the function names objects without their schema: ALTER FUNCTION {function} SET search_path = …;",
            "if the role lacks a privilege, grant it; or let a superuser exempt the role:"
            f' ALTER ROLE "{role}" SET event_triggers = off;',
        ],
        details={"node": node.id, "function": function},
    )


def unreachable_error(node: Node, error: psycopg.Error) -> NodeUnreachableError:
    """Return the error for a node that can't be reached, with the reason from the server or libpq."""
    if error.pgconn is not None:
        _remember_password(node, error.pgconn.password)
    if remedy_of(error):
        return disrupted_error(node.id, error)
    hint, reason = (
        "check that the server is running, and that its dsn and your password file are correct",
        explain(error),
    )
    if NO_DETAILS in str(error) and are_few_left():
        reason = TOO_MANY
    if HBA in str(error):
        return _not_admitted_error(node, reason)
    if few := no_connection_hint(str(error)):
        hint = few
    elif is_used_up(error) or reason == TOO_MANY:
        hint = OPEN_FILES
    elif NO_USER in str(error):
        hint = (
            "the dsn names no role, and the system has no name for this process's user, which libpq would take instead:"
            " add user=… to the dsn, or set PGUSER"
        )
    elif CUT_OFF in str(error):
        hint = (
            "see the server's log; if it does not mention this, a proxy may have closed the connection, as HAProxy does"
            ' after its `timeout client`: docs/fleet-file.md, "Poolers, proxies and several hosts"'
        )
    else:
        hint = _database_hint(node, error) or hint
    return NodeUnreachableError(
        f"node {node.id}: {reason}{missing_files(node.dsn)}",
        hint=hint,
        details={"node": node.id},
    )


def no_connection_hint(message: str) -> str:
    """Return how to get a connection if a server's message says that none is free; "" for other messages."""
    fewer = "connections_max of the [[node]] in fleet.toml limits how many connections a command opens"
    if any(text in message for text in ALL_USED):
        return f"all its connections are in use: end other clients' sessions, or raise max_connections; {fewer}"
    if limited := LIMITED.search(message):
        kind, name = limited.groups()
        return f"end other sessions of the {kind}, or raise its limit: {raise_limit(kind, name)}   {fewer}"
    if WAL_SENDERS in message:
        return f"raise {WAL_SENDERS}, or end replication connections that are not needed"
    return ""


def raise_limit(kind: str, name: str) -> str:
    """Return the statement that raises the CONNECTION LIMIT of a role or a database (the `kind`)."""
    return f"ALTER {kind.upper()} {_quoted(name)} CONNECTION LIMIT …;"


def _database_hint(node: Node, error: psycopg.Error) -> str:
    """Return what to do if the server refused the session because of its database, else ""."""
    name = database_name(node.dsn)
    if not refuses_database(node, error):
        return ""
    if CONNECT in str(error):
        role = str(conninfo_to_dict(node.dsn).get("user") or "…")
        return f"as a superuser or the owner: GRANT CONNECT ON DATABASE {_quoted(name)} TO {_quoted(role)};"
    if name == MAINTENANCE_DATABASE:
        return f"a restore first connects to the server's database {MAINTENANCE_DATABASE}; as a superuser: {MAKE_IT}"
    # The server is running: it has answered.
    return f"check the database name in fleet.toml; {UNFINISHED_RESTORE}"


def _not_admitted_error(node: Node, reason: str) -> NotAdmittedError:
    name = database_name(node.dsn)
    hint = f"let pg_hba.conf on the server admit this role from this machine to database {name}"
    if re.search(NEW_DATABASES, name):
        hint = (
            "a restore loads a database that it creates, and renames it at the end: let a line of pg_hba.conf on the"
            f" server admit this role to all databases (all), or to {MAINTENANCE_DATABASE} and, with PostgreSQL 16 and"
            f' newer, to "/{NEW_DATABASES}"; then: SELECT pg_reload_conf();'
        )
    return NotAdmittedError(f"node {node.id}: {reason}", hint=hint, details={"node": node.id, "database": name})


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def disrupted_error(node: str, error: psycopg.Error, what: str = "") -> NodeDisruptedError:
    """Return the error for a statement, described by `what`, that failed for a reason unrelated to it (remedy_of)."""
    return NodeDisruptedError(
        f"node {node}: {what}{': ' if what else ''}{shorten_message(error)}",
        hint=remedy_of(error),
        details={"node": node},
    )


def has_answered(error: BaseException | None) -> bool:
    """Whether the server or a pooler answered the failed attempt to connect.

    Servers translate their messages, but not the two spaces after the severity.
    """
    return ":  " in str(error)


def refuses_database(node: Node, error: BaseException | None) -> bool:
    """Whether the server refused a connection because of the database, and not because authentication failed.

    Servers translate their messages, but not the name of pg_hba.conf.
    """
    text = str(error)
    is_answer = has_answered(error) and database_name(node.dsn) in text
    return is_answer and not any(sign in text for sign in ("authentication", HBA, FULL))


def is_full(node: Node, error: BaseException | None) -> bool:
    """Whether the server refused a connection because of the database's CONNECTION LIMIT."""
    return FULL in str(error) and database_name(node.dsn) in str(error)


@contextmanager
def raising_unreachable(node: Node) -> Iterator[None]:
    """Raise NodeUnreachableError naming `node` if its session is lost during the block."""
    try:
        yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
        # The node answered: its wait for a lock timed out.
        raise
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error


def database_name(dsn: str) -> str:
    """Return the database that `dsn` names, by libpq's rule (dbname, else user)."""
    given = conninfo_to_dict(dsn)
    return str(given.get("dbname") or given.get("user") or "postgres")


def with_database(node: Node, database: str) -> Node:
    """Return the node with a different database on the same server."""
    return replace(node, dsn=make_conninfo(node.dsn, dbname=database))
