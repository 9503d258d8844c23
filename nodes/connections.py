"""Connections to nodes. All sessions have the same settings, so that a value always has the same text.

A session asks for its settings when it begins, by the startup parameter `options`. A server applies them or refuses the
session. A connection pooler between may drop them, and a login trigger may set others: so each session is asked once.

A session of a pooler tells another process id when it begins than its server does when it is asked: poolers make up
the key with which their clients cancel queries. A pooler that gives each transaction any of its server's sessions
(PgBouncer: pool_mode = transaction) can't be used: settings, locks and prepared statements don't last. A pooler that
hands sessions on as they are left would give ours to the application.

COPY and logical decoding print values under the session's settings: a row read by COPY and the same row read from WAL
have the same bytes only because both sessions are opened here. Each is asked once whether it has them.
"""

from __future__ import annotations

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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from cutline.fleet.config import SECRET_PARAMETERS, KnownServer, Node, remember_secrets_of
from cutline.fleet.libpq_environment import missing_files
from cutline.fleet.messages import UNFINISHED_RESTORE
from cutline.nodes.encodings import ADAPTERS, UTF8
from cutline.nodes.server_errors import called_functions, explain, remedy_of, shorten_message
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError, UsageError
from cutline.storage.process_limits import OPEN_FILES_HINT as OPEN_FILES
from cutline.storage.process_limits import TooLittleMemoryError, are_few_left, is_used_up

# Settings that change the text of a value (PostgreSQL manual, "Client Connection Defaults"), each as the server shows
# it. search_path is one: regclass and similar types print a schema only if it is not in the path. With
# row_security=off a query that policies would filter fails, instead of silently copying less.
PINNED_SETTINGS = {
    "datestyle": "ISO, YMD",
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
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "default_tablespace": "",
    # Each commit would wait for a synchronous standby that is away.
    "synchronous_commit": "local",
    # With "on", the planner would run functions in CHECK constraints of a table that is copied in ranges.
    "constraint_exclusion": "partition",
    # Compiling a long catalog query takes longer than running it.
    "jit": "off",
    # The server ends a session whose client is gone, even during a query, and releases its locks and slots.
    "client_connection_check_interval": "2s",
}
# A session over a Unix socket does not have them, and shows 0.
KEEPALIVES = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3"}
# A role may have a setting that makes its sessions act as another role. Privileges would be checked for that role,
# and granted to it. The dsn may name a role in its own options.
ROLE = {"role": "none"}
# Since 17, and older servers refuse a session that asks for it when it begins.
LATER_SETTINGS = {"transaction_timeout": "0"}
# The settings that a restore asks for, too.
ASKED_ALSO = ("role", "session_replication_role")
# The settings that a dump depends on and pg_dump does not set itself (pg_dump.c, setup_connection).
DUMP_SETTINGS = (
    "timezone",
    "lc_monetary",
    "bytea_output",
    "xmlbinary",
    "standard_conforming_strings",
    "role",
)
OPTION = re.compile(r"(?:-c\s*|--)([A-Za-z_][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


class SessionState(NamedTuple):
    """The answer of a session: its server process, the settings that it lacks, and its server if that was asked."""

    process: int
    lacking: dict[str, str]
    server: KnownServer | None


def startup_options(given: str) -> str:
    """The startup parameter `options` with the pinned settings; of the `given` options only the role counts more."""
    pinned = " ".join(option(name, value) for name, value in (PINNED_SETTINGS | KEEPALIVES).items())
    return " ".join(part for part in (option("role", ROLE["role"]), given.strip(), pinned) if part)


def option(name: str, value: str) -> str:
    """A setting in the form of the startup parameter `options`; of several with the same name the last counts."""
    escaped = re.sub(r"([\\\s])", r"\\\1", value)
    return f"-c {name}={escaped}"


def read_options(options: str) -> dict[str, str]:
    """The settings in the startup parameter `options`, the last of each name (PostgreSQL manual, "postgres")."""
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in re.findall(r"(?:\\.|[^\s\\])+", options)]
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        follows = words[number + 1] if word == "-c" and number + 1 < len(words) else ""
        if match := OPTION.fullmatch(f"-c{follows}" if follows else word):
            found[match[1].replace("-", "_").lower()] = match[2]
    return found


def wanted_settings(conninfo: str) -> dict[str, str]:
    """The settings of a session that is opened by this connection string, with those that are set after it began."""
    parameters = conninfo_to_dict(conninfo)
    encoding = {"client_encoding": str(parameters["client_encoding"])} if parameters.get("client_encoding") else {}
    return read_options(str(parameters.get("options") or "")) | LATER_SETTINGS | encoding


def state_query(wanted: Mapping[str, str], *, asks_server: bool) -> str:
    """The query for the state of a session, which `read_state` reads.

    Until it has answered, the session may have any search_path, so it uses no operator, and of functions those of
    pg_catalog alone: a role that may create functions in this database could have made better matches of others.
    """
    server = "(pg_catalog.pg_control_system()).system_identifier, pg_catalog.pg_is_in_recovery()"
    settings = "".join(f", pg_catalog.current_setting('{name}', true)" for name in _asked(wanted))
    return f"SELECT pg_catalog.pg_backend_pid(), {server if asks_server else 'NULL, NULL'}{settings}"


def read_state(row: Sequence[Any], wanted: Mapping[str, str]) -> SessionState:
    """The state that the row of `state_query` describes."""
    process, system_identifier, in_recovery, *values = row
    # A server that does not know a setting shows nothing.
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
    """The query that sets the settings for the rest of the session; like `state_query`, it trusts no search_path."""
    # The role comes last: another one may not set what ours may.
    ordered = sorted(settings.items(), key=lambda one: one[0] == "role")
    return "SELECT " + ", ".join(
        f"pg_catalog.set_config({_literal(name)}, {_literal(value)}, false)" for name, value in ordered
    )


def _literal(text: str) -> str:
    # In this form, backslashes mean the same under any standard_conforming_strings.
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"


# The numbers of this process's open files, on Linux and elsewhere.
DESCRIPTORS = Path("/dev/fd")

CANCEL_SECONDS_MAX = 5.0

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
# The open connections of this process, and their servers; and the addresses at which servers were reached.
_open: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()
_addresses: dict[str, set[Any]] = {}
_open_lock = threading.Lock()


def remember_open(connection: psycopg.Connection[Any], node: Node) -> None:
    """Let shut_down_sessions find the connection, and the server's address."""
    server = _server_of(node)
    with _open_lock, suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as handle:
        _open[connection] = server
        _addresses.setdefault(server, set()).add(handle.getpeername())


def shut_down(connection: AnyConnection) -> None:
    """End the connection, from any thread: a thread that waits for its answer gets an OperationalError at once."""
    try:
        handle = socket.socket(fileno=os.dup(connection.fileno()))
    except (OSError, psycopg.Error):
        return
    with handle, suppress(OSError):
        # While the connection is open, its descriptor can't belong to another file.
        if not connection.closed:
            handle.shutdown(socket.SHUT_RDWR)


def cancel_statements() -> None:
    """Cancel the statements of this process's sessions, from any thread; a request before its statement is lost."""
    with _open_lock:
        running = [session for session in _open if session.pgconn.transaction_status == TransactionStatus.ACTIVE]
    for connection in running:
        with suppress(psycopg.Error):
            connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)


def shut_down_sessions(node: Node, kept: Iterable[psycopg.Connection[Any]] = ()) -> None:
    """End all connections of this process to the server of `node`, also those of drivers that don't show theirs.

    Those `kept` stay; only the thread that calls this may close them.
    """
    server, spared = _server_of(node), set(kept)
    with _open_lock:
        connections = [session for session, other in _open.items() if other == server and session not in spared]
        addresses = frozenset(_addresses.get(server, ()))
    sockets = frozenset(os.fstat(session.fileno()).st_ino for session in spared if not session.closed)
    for connection in connections:
        shut_down(connection)
    with suppress(OSError):
        for descriptor in DESCRIPTORS.iterdir():
            _shut_down_to(addresses, int(descriptor.name), sockets)


def _shut_down_to(addresses: frozenset[Any], descriptor: int, spared: Set[int]) -> None:
    """Shut the descriptor down if it is a socket connected to any of these addresses, and not `spared`."""
    with suppress(OSError):
        # A copy: the number may belong to another file by now, the copy does not change.
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
    """Limit the time of the block: shut the connection down if the block still runs after `seconds`."""
    timer = threading.Timer(seconds, shut_down, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _server_of(node: Node) -> str:
    """The node's dsn without database and settings: if a server stops answering, it does so for all its sessions."""
    given = conninfo_to_dict(node.dsn)
    return make_conninfo("", **{key: value for key, value in given.items() if key not in ("dbname", "options")})


# Bare sessions of the pooler, in which nothing is set.
Open = Callable[[], psycopg.Connection[Any]]

PROCESS_QUERY = "SELECT pg_catalog.pg_backend_pid()"
# A pooler hands out the idle session of its server that was used last, or first, or any: while this many others are
# held, a session that is not kept has to change.
HELD = 3
# A pooler resets a session in the background.
RESET_TRIES, RESET_SECONDS = 3, 0.05
ANSWER_SECONDS_MAX = 15.0
POOLER_SECONDS_MAX = "2"
LEFT_SETTING = "cutline.left"
# PgBouncer answers so at its own database, to those who may not administer it.
CONSOLE, CONSOLE_REFUSAL = "pgbouncer", "not allowed"
PGBOUNCER, UNKNOWN = "PgBouncer", "a connection pooler"
# The messages of poolers about a startup parameter: PgBouncer; RDS Proxy.
REFUSALS = ("unsupported startup parameter", "command-line options")
DIRECT = "let the dsn name the server itself: PostgreSQL's own host and port"


class SessionUnfitError(RefusedError):
    """A session of a node can't be used: a connection pooler in between does not pass on or keep its state."""


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


# By fault: the pooler's behaviour, and the remedy.
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
    """The error that names the node, the pooler and the pooler's behaviour."""
    pooler = name_pooler(node)
    return SessionUnfitError(
        f"node {node.id}: its dsn leads to {pooler}, which {problem}",
        hint=hint,
        details={"node": node.id, "pooler": pooler},
    )


def name_pooler(node: Node) -> str:
    """The name of the pooler before the node, as far as it can be told."""
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
# A fleet may have a thousand nodes. A query to each takes milliseconds, or waits for the same event as all others.
THREADS_MAX = 64
LOOK_SECONDS = 1.0


def start_daemons(work: Callable[[Item], object], left: deque[Item], name: str) -> list[threading.Thread]:
    """Start up to THREADS_MAX threads that do `work` on the items of `left`, one after the other; return the threads.

    A caller that clears `left` lets them end. They are daemons: a node that accepts a connection and never answers must
    not keep the command from ending.
    """

    def run() -> None:
        while True:
            try:
                # A deque can be emptied by several threads.
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
    """Wait until the threads have set the futures. Raises TooLittleMemoryError if they end before they have."""
    while wait(futures, LOOK_SECONDS).not_done:
        if not any(thread.is_alive() for thread in threads) and wait(futures, 0).not_done:
            raise TooLittleMemoryError("a thread has ended before its work was done")


# Every server has this database; from there, databases are created and renamed.
MAINTENANCE_DATABASE = "postgres"
MAKE_IT = f"CREATE DATABASE {MAINTENANCE_DATABASE};"
CONNECT_SECONDS_MAX = 10
WITHOUT_STANDBYS = "; a full snapshot can do without standbys: snapshot create NAME --only-primary"
# What psycopg says if libpq says nothing, as where it can open no file.
NO_DETAILS, TOO_MANY = "no error details available", "too many open files"
# Older servers refuse a session that sets transaction_timeout in its connection string.
TRANSACTION_TIMEOUT_VERSION = 170000
# Reading a view runs functions of its owner's choice under our role. The relation was planned as a table or a
# sequence, but its owner may have put a view in its place since. The first minor version of each that can refuse to
# read views.
RESTRICTION = "SET LOCAL restrict_nonsystem_relation_kind = 'view, foreign-table'"
RESTRICTION_VERSIONS = {15: 150008, 16: 160004}

NO_REPLICATION = f"{DIRECT} (PgBouncer passes replication connections on since 1.23)"
# Of the parameter replication, for an ordinary session.
NO_REPLICATION_VALUES = (None, b"", b"0", b"f", b"n", b"false", b"no", b"off")
ONE_SERVER = "let its dsn lead to one server: name one host; or, of several, the primary: target_session_attrs=primary"

# The values of sslmode with which libpq never connects without TLS.
STRICT_MODES = ("require", "verify-ca", "verify-full")

# Given to OpenSSL for a key that should not be encrypted.
NO_PASSPHRASE = "none"

# libpq's own, of a connection that ended without a word of the server.
CUT_OFF = "server closed the connection unexpectedly"
# A server's English messages about one session too many: libpq has no code of an error before the session begins.
ALL_USED = (
    "sorry, too many clients already",
    "remaining connection slots are reserved",
    "too many connections for ",
)


class Passage(NamedTuple):
    """How a session reached its server: through a pooler or not, and which settings it did not have when it began."""

    pooled: bool
    lacking: Mapping[str, str]


DIRECTLY = Passage(pooled=False, lacking={})
_nodes: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()
# Of sessions that did not just begin as they should.
_passages: WeakKeyDictionary[psycopg.Connection[Any], Passage] = WeakKeyDictionary()


class NodeUnreachableError(UnreachableError):
    """A node can't be connected to, or its session was lost."""


class NodeDisruptedError(NodeUnreachableError):
    """A node ended a statement for lack of a resource, or for others: it succeeds later (nodes/server_errors.py)."""


class OtherServerError(NodeUnreachableError):
    """A session reached another server than the command had found at the node's dsn."""


class LoginTriggerError(RefusedError):
    """A login event trigger of a node's database refuses the session."""


class CopyError(UnreachableError):
    """A node ended a COPY before it was complete."""


def conninfo(dsn: str, **more: str) -> str:
    """`dsn` as a libpq connection string, with the pinned settings, timeouts and keepalives added."""
    given = conninfo_to_dict(dsn)
    defaults = {
        "connect_timeout": str(CONNECT_SECONDS_MAX),
        "keepalives_idle": "30",
        "keepalives_interval": "10",
        "keepalives_count": "3",
    }
    merged = defaults | {key: value for key, value in given.items() if value is not None}
    # Without a passphrase OpenSSL would ask the terminal for that of an encrypted key, also one in the default place.
    merged.setdefault("sslpassword", NO_PASSPHRASE)
    # Others tell our sessions by their name.
    ours = {
        "application_name": "cutline",
        "options": startup_options(str(given.get("options") or "")),
        "client_encoding": UTF8,
    }
    return make_conninfo("", **(merged | ours | more))


def probe_conninfo(dsn: str) -> str:
    """As `conninfo`, without settings: for sessions that only ask whether the server answers."""
    return make_conninfo(conninfo(dsn), options="")


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


class _Cursor(psycopg.Cursor[Any]):
    """A cursor that notes the node on an error for lack of a privilege: the privilege has to be granted there."""

    def execute(self, *args: Any, **options: Any) -> Self:
        try:
            return super().execute(*args, **options)
        except psycopg.errors.InsufficientPrivilege as error:
            error.add_note(f"node {node_of(self.connection)}")
            raise


class _ClientCursor(_Cursor, psycopg.ClientCursor[Any]):
    """The same, for commands that take no parameters of the protocol."""


def connect(node: Node, **more: str) -> psycopg.Connection[Any]:
    """Open an autocommit session on `node`; raise NodeUnreachableError if that is not possible.

    Raises SessionUnfitError if a connection pooler in between keeps no sessions, or if a setting can't be set;
    LoginTriggerError; and OtherServerError if another server answers than the command had found there.
    """
    return _begin(node, conninfo(node.dsn, **more), _Cursor)


def connect_with_path(node: Node, path: str, **more: str) -> psycopg.Connection[Any]:
    """As `connect`, but the session begins with this search_path: a script finds it as the session's default."""
    options = conninfo_to_dict(conninfo(node.dsn))["options"]
    return connect(node, options=f"{options} {option('search_path', path)}", **more)


def connect_replication(node: Node, **more: str) -> psycopg.Connection[Any]:
    """Open a session on `node` that takes replication commands for its database; raise as `connect` does."""
    asked = conninfo(node.dsn, replication="database", **more)
    session = _begin(node, asked, _ClientCursor)
    try:
        session.execute("IDENTIFY_SYSTEM")
    except BaseException as error:
        session.close()
        if isinstance(error, psycopg.errors.SyntaxError):
            what = "drops what asks for replication commands, which every create needs"
            raise unfit_error(node, what) from None
        if isinstance(error, psycopg.OperationalError):
            raise unreachable_error(node, error) from error
        raise
    return session


def _begin(node: Node, asked: str, cursors: type[_Cursor]) -> psycopg.Connection[Any]:
    """Open a session, and let it have the settings that the connection string asks for."""

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
    """Raise UsageError if the session takes replication commands unasked: a service file can't be read beforehand."""
    if "replication" in conninfo_to_dict(asked):
        return
    if any(
        parameter.keyword == b"replication" and parameter.val not in NO_REPLICATION_VALUES
        for parameter in session.pgconn.info
    ):
        raise UsageError(
            f"node {node.id}: its connection service has replication, which Cutline asks for itself where it needs it",
            hint="remove replication from the service file",
            details={"node": node.id},
        )


def _settle(node: Node, session: psycopg.Connection[Any], asked: str, open_bare: Open) -> None:
    """Ask the session for its settings and its server, and set the missing settings; raise as `connect` does."""
    wanted = wanted_settings(asked)
    state = ask_state(node, session, wanted)
    check_server(node, state)
    is_replication = "replication" in conninfo_to_dict(asked)
    if pooled := session.info.backend_pid != state.process and not is_replication:
        check_keeps(node, open_bare)
        # Others had this session before.
        session.execute("DISCARD ALL")
        state = ask_state(node, session, wanted)
    if pooled or state.lacking:
        _passages[session] = Passage(pooled, dict(state.lacking))
    # The settings that a dsn asks for beyond ours are dropped with these.
    if missing := dict(wanted) if pooled and state.lacking else state.lacking:
        _set(node, session, missing)
        if still := ask_state(node, session, wanted).lacking:
            raise lacking_error(node, still)


def lacking_error(node: Node, lacking: Iterable[str]) -> SessionUnfitError:
    """The error for a session that does not have settings although they were set."""
    return unfit_error(node, f"does not let a session have the settings {', '.join(lacking)}")


def _set(node: Node, session: psycopg.Connection[Any], settings: Mapping[str, str]) -> None:
    known = {name: value for name, value in settings.items() if name not in LATER_SETTINGS or _knows_later(session)}
    try:
        session.execute(set_query(known).encode())
    except psycopg.errors.OperationalError:
        raise
    except psycopg.Error as error:
        raise unfit_error(
            node, f"drops settings, and the server refuses them later: {shorten_message(error)}"
        ) from error


def _knows_later(session: psycopg.Connection[Any]) -> bool:
    return session.info.server_version >= TRANSACTION_TIMEOUT_VERSION


def ask_state(node: Node, session: psycopg.Connection[Any], wanted: Mapping[str, str]) -> SessionState:
    """Ask a session for its settings, and for its server if the command has found the node's."""
    row = session.execute(state_query(wanted, asks_server=node.server is not None).encode()).fetchone()
    if row is None:
        raise RuntimeError("a query without a table returned no row")
    return read_state(row, wanted)


def check_server(node: Node, state: SessionState) -> None:
    """Raise OtherServerError unless the session is on the server that the command has found at the node's dsn."""
    if node.server is None or state.server is None:
        return
    problem = ""
    if state.server.system_identifier != node.server.system_identifier:
        problem = (
            f"its dsn leads to more than one server: system identifier {node.server.system_identifier} before, now"
            f" {state.server.system_identifier}"
        )
    elif state.server.in_recovery and not node.server.in_recovery:
        problem = "its dsn leads to the primary and to a standby: a session came to a standby"
    if problem:
        raise OtherServerError(f"node {node.id}: {problem}", hint=ONE_SERVER, details={"node": node.id})


def lacking_at_start(connection: psycopg.Connection[Any]) -> Mapping[str, str]:
    """The settings that the session asked for and lacked when it began: client programs lack them, too."""
    return _passages.get(connection, DIRECTLY).lacking


def node_of(connection: psycopg.Connection[Any]) -> str:
    """The id of the node that the session is on, for a message."""
    return _nodes.get(connection, connection.info.host)


def is_pooled(connection: psycopg.Connection[Any]) -> bool:
    """Whether a connection pooler is between the command and the session's server."""
    return _passages.get(connection, DIRECTLY).pooled


def _remember_password(node: Node, password: bytes | None) -> None:
    """Let no error show a password that libpq took from a password file or a service, which the dsn does not have."""
    if password:
        # The password's bytes are as the user wrote them, whatever the session's encoding.
        remember_secrets_of(make_conninfo(node.dsn, password=password.decode(errors="replace")))


def has_restriction(version: int) -> bool:
    """Whether a server of this version can refuse to read views (PostgreSQL manual, "Client Connection Defaults")."""
    return version >= RESTRICTION_VERSIONS.get(version // 10000, 170000)


def refuse_views(connection: psycopg.Connection[Any]) -> None:
    """Let the rest of the transaction, which reads tables or sequences by name, read no view, if the server can."""
    if has_restriction(connection.info.server_version):
        connection.execute(RESTRICTION)


def as_connected(node: Node, connection: psycopg.Connection[Any]) -> Node:
    """The node for client programs, which connect to the server of `connection`, even if its dsn has several hosts.

    Over a Unix socket they use no mode of TLS: libpq ignores sslmode there, but a program that is built without TLS
    refuses it. A host's name stays: certificates and password files have it.
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


def _is_over_socket(connection: psycopg.Connection[Any]) -> bool:
    with socket.socket(fileno=os.dup(connection.fileno())) as handle:
        return handle.family == socket.AF_UNIX


def session_error(node: Node, error: psycopg.Error) -> SnapshotError:
    """The error for a session that could not be opened."""
    if refuses_replication(error):
        return unfit_error(node, "takes no replication connections, which every create needs", NO_REPLICATION)
    functions = called_functions(str(error))
    return login_trigger_error(node, error, functions[-1]) if functions else unreachable_error(node, error)


def login_trigger_error(node: Node, error: psycopg.Error, function: str) -> LoginTriggerError:
    """The error for a session that a login event trigger refuses: nothing else runs a function before a session."""
    role = conninfo_to_dict(node.dsn).get("user") or "…"
    return LoginTriggerError(
        f"node {node.id}: a login event trigger of database {database_name(node.dsn)}, which calls {function}, refuses"
        f" the session: {explain(error)}",
        hint=[
            "see which: SELECT evtname, evtfoid::regprocedure FROM pg_event_trigger WHERE evtevent = 'login';",
            f"if it names objects without a schema: ALTER FUNCTION {function} SET search_path = …;",
            "if the role lacks a privilege, grant it; or let a superuser exempt the role:"
            f' ALTER ROLE "{role}" SET event_triggers = off;',
        ],
        details={"node": node.id, "function": function},
    )


def unreachable_error(node: Node, error: psycopg.Error) -> NodeUnreachableError:
    """The error for a node that can't be reached, with the reason from the server or libpq."""
    if error.pgconn is not None:
        _remember_password(node, error.pgconn.password)
    if remedy_of(error):
        return disrupted_error(node.id, error)
    hint, reason = "check that the server runs, and that its dsn and your password file are right", explain(error)
    if NO_DETAILS in str(error) and are_few_left():
        reason = TOO_MANY
    if any(text in str(error) for text in ALL_USED):
        hint = (
            "its connections are used up: end sessions of others, or raise max_connections; connections_max of the"
            " [[node]] in fleet.toml limits those of a command"
        )
    elif is_used_up(error) or reason == TOO_MANY:
        hint = OPEN_FILES
    elif CUT_OFF in str(error):
        hint = (
            "see the server's log; if it says nothing of this, something between has ended the connection, as HAProxy"
            ' does after its `timeout client`: docs/fleet-file.md, "Poolers, proxies and several hosts"'
        )
    elif refuses_database(node, error) and database_name(node.dsn) == MAINTENANCE_DATABASE:
        hint = f"a restore begins in its server's database {MAINTENANCE_DATABASE}; as a superuser: {MAKE_IT}"
    elif refuses_database(node, error):
        # It runs, and has answered.
        hint = f"check the name of the database in fleet.toml; {UNFINISHED_RESTORE}"
    if node.backup_of is not None:
        hint += WITHOUT_STANDBYS
    return NodeUnreachableError(
        f"node {node.id}: {reason}{missing_files(node.dsn)}",
        hint=hint,
        details={"node": node.id},
    )


def disrupted_error(node: str, error: psycopg.Error, what: str = "") -> NodeDisruptedError:
    """The error for a statement, about `what`, that says nothing about it (remedy_of)."""
    return NodeDisruptedError(
        f"node {node}: {what}{': ' if what else ''}{shorten_message(error)}",
        hint=remedy_of(error),
        details={"node": node},
    )


def has_answered(error: BaseException | None) -> bool:
    """Whether an attempt to connect ended with the server's or a pooler's answer.

    Servers translate their messages, but not the two spaces after the severity.
    """
    return ":  " in str(error)


def refuses_database(node: Node, error: BaseException | None) -> bool:
    """Whether the server's answer to a connection is about the database, and not a failed authentication.

    Servers translate their messages, but not the name of pg_hba.conf.
    """
    text = str(error)
    is_answer = has_answered(error) and database_name(node.dsn) in text
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
