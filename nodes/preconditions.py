"""Check that nodes meet Cutline's requirements, using a session of each kind; all problems are reported at once.

The caller provides the kind of session that reads a slot (wal/drain/peek.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from itertools import chain
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.messages import FREE_SLOTS, list_some, without_node
from cutline.nodes.connections import (
    ONE_SERVER,
    NodeUnreachableError,
    connect,
    connect_replication,
    has_answered,
    is_pooled,
    lacking_at_start,
)
from cutline.nodes.encodings import RAW, UTF8, can_name_database, encoding_of, find_inconvertible
from cutline.nodes.other_databases import FILLING, SUFFIX_LENGTH
from cutline.nodes.pinned_settings import DUMP_SETTINGS
from cutline.nodes.poolers import DIRECT, SessionUnfitError, name_pooler
from cutline.nodes.problems import (
    STANDBY_FUNCTIONS,
    STANDBY_SNAPSHOT_VERSION,
    NodeProblem,
    find_decoding_problems,
    find_function_problems,
    find_role_problems,
    read_role,
    refuse_unfit,
)
from cutline.nodes.sessions import Sessions, in_parallel

# A function that opens a session of an additional kind on a node.
Kind = Callable[[Node], AbstractContextManager[Any]]
# A function that says how to free a replication slot on a node.
SlotsRemedy = Callable[[Node, psycopg.Connection[Any]], str]


def default_slots_remedy(_node: Node, _connection: psycopg.Connection[Any]) -> str:
    """Return the remedy if it is not known whose slots these are."""
    return FREE_SLOTS


PROCESS_QUERY = "SELECT pg_postmaster_start_time()::text, current_setting('port')"


def find_session_problems(sessions: Sessions, nodes: Iterable[Node], others: Iterable[Kind] = ()) -> list[NodeProblem]:
    """Open a session of each kind on every node; return the problems that make sessions unusable.

    Raises NodeUnreachableError if a node does not answer.
    """
    found = in_parallel(lambda node: _find(sessions, node, others), nodes)
    return [problem for problems in found for problem in problems]


def _find(sessions: Sessions, node: Node, others: Iterable[Kind]) -> list[NodeProblem]:
    connection = sessions.connections[node.id]
    process = connection.execute(PROCESS_QUERY).fetchone()

    def open_raw(node: Node) -> AbstractContextManager[psycopg.Connection[Any]]:
        return closing(connect(node, client_encoding=RAW))

    def open_replication(node: Node) -> AbstractContextManager[psycopg.Connection[Any]]:
        return closing(connect_replication(node))

    problems: list[NodeProblem] = []
    role = read_role(node, connection)
    # A role without REPLICATION is reported as a separate problem.
    kinds = [open_raw, *([open_replication] if role.is_super or role.may_replicate else [])]
    for kind in kinds:
        try:
            with kind(node) as session:
                if session.execute(PROCESS_QUERY).fetchone() != process:
                    problem = "its dsn connects to more than one server, or the server was restarted"
                    problems.append(NodeProblem(node.id, problem, ONE_SERVER))
        except (SessionUnfitError, NodeUnreachableError) as error:
            if isinstance(error, NodeUnreachableError) and not has_answered(error.__cause__):
                raise
            problems.append(_problem_of(node, error))
    for other in others:
        try:
            with other(node):
                pass
        except SessionUnfitError as error:
            problems.append(_problem_of(node, error))
    if not problems and node.backup_of is None:
        problems += find_dump_problems(node, connection)
    return problems


def _problem_of(node: Node, error: SessionUnfitError | NodeUnreachableError) -> NodeProblem:
    return NodeProblem(node.id, without_node(error.message, node.id), error.hint)


def find_dump_problems(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    """Yield a problem for each setting that pg_dump's sessions lack: Cutline can change only its own sessions."""
    lacking = lacking_at_start(connection)
    if not (needed := [name for name in DUMP_SETTINGS if name in lacking]):
        return
    role = read_role(node, connection)
    what = f"its dsn connects through {name_pooler(node)}, which drops the settings that pg_dump requests"
    for name in needed:
        change = "RESET role" if name == "role" else f"SET {name} = '{lacking[name]}'"
        remedy = f"ALTER ROLE {role.quoted} {change};"
        yield NodeProblem(
            node.id,
            f"{what} ({', '.join(needed)}): {DIRECT}; or set them for the role, and make the pooler reconnect",
            remedy,
            role.place,
        )


def check_dump_settings(node: Node, connection: psycopg.Connection[Any]) -> None:
    """Raise NodeUnfitError if pg_dump's sessions on the node lack settings, with the statements that set them."""
    refuse_unfit(find_dump_problems(node, connection))


SETTINGS_QUERY = """
SELECT current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_replication_slots),
       current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_stat_replication)
"""
# All names in the database that our sessions may read, as the server's bytes. A role's name may have been written in a
# database with a different encoding. A role matters if it owns something here, has a privilege here, or has our
# setting.
ROLES_QUERY = """
SELECT DISTINCT 'role', namesend(r.rolname) FROM pg_roles r
 WHERE r.oid = 10 OR r.oid IN (
       SELECT refobjid FROM pg_shdepend
        WHERE refclassid = 'pg_authid'::regclass
          AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
       UNION ALL SELECT setrole FROM pg_db_role_setting CROSS JOIN unnest(setconfig) AS setting
        WHERE setting ^@ 'default_transaction_read_only=')
"""
NAMES_QUERY = f"""
SELECT kind, name FROM (
    SELECT 'schema', namesend(nspname) FROM pg_namespace
    UNION ALL SELECT 'relation', namesend(relname) FROM pg_class WHERE relkind NOT IN ('i', 'I', 't')
    UNION ALL SELECT 'column', namesend(a.attname) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
               WHERE NOT a.attisdropped AND c.relkind NOT IN ('i', 'I', 't')
    UNION ALL SELECT 'type', namesend(typname) FROM pg_type WHERE typrelid = 0 AND typelem = 0
    UNION ALL SELECT 'database', namesend(datname) FROM pg_database
    UNION ALL SELECT 'extension', namesend(extname) FROM pg_extension
    UNION ALL SELECT 'foreign server', namesend(srvname) FROM pg_foreign_server
    UNION ALL SELECT 'subscription', namesend(subname) FROM pg_subscription
    UNION ALL SELECT 'publication', namesend(pubname) FROM pg_publication
    UNION ALL ({ROLES_QUERY})
) AS every (kind, name) WHERE encode(name, 'escape') ~ '\\\\[23][0-7][0-7]'
"""
NAMES_SHOWN_MAX = 8
# Only schemas owned by superusers or our role count: anybody who may create schemas could create one with such a name.
FILLINGS_QUERY = f"""
SELECT n.nspname FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
 WHERE n.nspname ~ '^{FILLING}[0-9a-f]{{{SUFFIX_LENGTH}}}$' AND (r.rolsuper OR r.rolname = current_user) ORDER BY 1
"""


def find_node_problems(sessions: Sessions, slots_remedy: SlotsRemedy = default_slots_remedy) -> list[NodeProblem]:
    """Find all problems with the nodes' settings and with our role's privileges on the servers.

    Raises NodeUnfitError for names that can't be converted to UTF-8.
    """
    check_names(sessions)
    with_standbys = {node.backup_of for node in sessions.nodes}

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        problems = list(find_role_problems(node, connection))
        if node.id in with_standbys and connection.info.server_version >= STANDBY_SNAPSHOT_VERSION:
            problems += find_function_problems(node, connection, STANDBY_FUNCTIONS)
        return [*problems, *_find_setting_problems(node, connection, slots_remedy)]

    problems = list(chain.from_iterable(sessions.ask_nodes(find).values()))
    # Test the other kinds of sessions through a pooler before anything is created on its nodes.
    pooled = [node for node in sessions.nodes if is_pooled(sessions.connections[node.id])]
    return problems + find_session_problems(sessions, pooled)


def find_undecodable_nodes(sessions: Sessions) -> dict[str, list[NodeProblem]]:
    """Find the problems of the nodes that can no longer decode their WAL, by node; raise the error of check_names.

    An increment checks only this, because the nodes passed all checks for the full snapshot, the increment needs a new
    slot only if it copies tables, and it waits for a standby that is reconnecting.
    """
    check_names(sessions)

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        return [*find_decoding_problems(node, read_role(node, connection)), *_find_level_problems(node, connection)]

    return {node: problems for node, problems in sessions.ask_nodes(find).items() if problems}


def find_fillings(sessions: Sessions) -> list[NodeProblem]:
    """Find databases with rows from an unfinished restore: a snapshot would contain only some of the restore's rows."""
    schemas = sessions.ask_primaries(lambda connection: connection.execute(FILLINGS_QUERY).fetchall())
    problems: list[NodeProblem] = []
    for node, found in schemas.items():
        for (schema,) in found:
            what = f"schema {schema} belongs to an unfinished restore into existing tables"
            remedy = (
                f"if the schema was copied from another database: DROP SCHEMA {schema} CASCADE; otherwise finish or"
                " undo the restore with the command that is shown by: snapshot list"
            )
            problems.append(NodeProblem(node, what, remedy))
    return problems


def check_names(sessions: Sessions) -> None:
    """Raise NodeUnfitError naming objects whose names can't be converted to UTF-8, so commits can't store them.

    It also names the databases whose encodings can't represent their own names.
    """
    problems = [
        NodeProblem(
            node,
            f"database {name} has encoding {encoding}, and a name that is not ASCII: PostgreSQL keeps it in UTF-8, so"
            " sessions in the database can't name it",
            "rename it, in a session in another database: ALTER DATABASE … RENAME TO …; then change its dsn",
        )
        for node, (name, encoding) in sessions.ask_primaries(_name_and_encoding).items()
        if not can_name_database(name, encoding)
    ]
    for node, labels in sessions.ask_primaries(_find_unwritable_names).items():
        if labels:
            what = f"names that can't be written in UTF-8: {list_some(labels, NAMES_SHOWN_MAX)}"
            problems.append(NodeProblem(node, what, "rename them: ALTER … RENAME TO …"))
    refuse_unfit(problems)


def _name_and_encoding(connection: psycopg.Connection[Any]) -> tuple[str, str]:
    return connection.info.dbname, encoding_of(connection)


def _find_unwritable_names(connection: psycopg.Connection[Any]) -> list[str]:
    with connection.transaction():
        # Read names as the server's bytes: a name that can't be converted would make the query fail.
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        # In a UTF-8 database only role names may be invalid.
        names = connection.execute(ROLES_QUERY if encoding_of(connection) == UTF8 else NAMES_QUERY).fetchall()
    invalid = set(find_inconvertible(connection, list({name for _, name in names})))
    # The ASCII characters of a name are enough to recognize it.
    return sorted({f"{kind} {name.decode('ascii', 'backslashreplace')}" for kind, name in names if name in invalid})


def _find_setting_problems(
    node: Node, connection: psycopg.Connection[Any], slots_remedy: SlotsRemedy
) -> Iterator[NodeProblem]:
    slots, senders = connection.execute(SETTINGS_QUERY).fetchone() or (0, 0)
    yield from _find_level_problems(node, connection)
    if slots < 1:
        yield NodeProblem(node.id, "no replication slot is free, and one is needed", slots_remedy(node, connection))
    if senders < 1:
        yield NodeProblem(node.id, "no WAL sender is free, and one is needed", "raise max_wal_senders")
    if node.backup_of is None:
        return
    (feedback,) = connection.execute("SELECT current_setting('hot_standby_feedback')").fetchone() or ("off",)
    if feedback != "on":
        remedy = "ALTER SYSTEM SET hot_standby_feedback = on;  and reload"
        yield NodeProblem(node.id, "hot_standby_feedback is off", remedy)
    (receivers,) = connection.execute("SELECT count(*) FROM pg_stat_wal_receiver").fetchone() or (0,)
    if not receivers:
        remedy = "check primary_conninfo and the standby's log"
        yield NodeProblem(node.id, "it is not streaming from its primary", remedy, is_away=True)


def _find_level_problems(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    (wal_level,) = connection.execute("SELECT current_setting('wal_level')").fetchone() or ("",)
    if wal_level != "logical":
        remedy = "ALTER SYSTEM SET wal_level = logical;  and restart the server"
        yield NodeProblem(node.id, f"wal_level is {wal_level}", remedy)
