"""Connections to nodes, and the errors of nodes that can't be reached.

A session requests its settings (nodes/pinned_settings.py) when it starts, in the `options` startup parameter. A server
applies them or refuses the session. A connection pooler in between may drop them, and a login trigger may change them,
so every new session is queried once to verify them.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import SECRET_PARAMETERS, Node, remember_secrets_of
from cutline.fleet.libpq_environment import missing_files
from cutline.fleet.messages import UNFINISHED_RESTORE
from cutline.nodes.encodings import ADAPTERS, UTF8
from cutline.nodes.open_sessions import remember_open
from cutline.nodes.pinned_settings import (
    LATER_SETTINGS,
    SessionState,
    option,
    read_state,
    set_query,
    startup_options,
    state_query,
    wanted_settings,
)
from cutline.nodes.poolers import (
    DIRECT,
    Open,
    SessionUnfitError,
    check_keeps,
    refuses_options,
    refuses_replication,
    unfit_error,
)
from cutline.nodes.server_errors import called_functions, explain, remedy_of, shorten_message
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError, UsageError
from cutline.storage.process_limits import OPEN_FILES_HINT as OPEN_FILES
from cutline.storage.process_limits import are_few_left, is_used_up

# An interrupt ends sessions: psycopg's messages about them on stderr would look like the failure of a server.
logging.getLogger("psycopg").addHandler(logging.NullHandler())


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
