"""Check that nodes allow what Cutline needs; all problems are reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.beside import FILLING, SUFFIX_LENGTH
from cutline.fleet.nodes.connections import is_pooled
from cutline.fleet.nodes.encodings import RAW, UTF8, encoding_of, find_inconvertible
from cutline.fleet.nodes.privileges import (
    STANDBY_FUNCTIONS,
    STANDBY_SNAPSHOT_VERSION,
    find_decoding_problems,
    find_function_problems,
    find_role_problems,
    read_role,
)
from cutline.fleet.nodes.problems import NodeProblem, refuse_unfit
from cutline.fleet.nodes.session_kinds import find_session_problems
from cutline.fleet.nodes.sessions import Sessions
from cutline.fleet.some_names import list_some

SETTINGS_QUERY = """
SELECT current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_replication_slots),
       current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_stat_replication)
"""
# All names of the database that our sessions may read, as the server's bytes. A role may have been named in a database
# of another encoding: a role matters if it owns something here, has a privilege here, or has our setting.
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
# Those of superusers and our own: anybody who may create a schema may make one of such a name.
FILLINGS_QUERY = f"""
SELECT n.nspname FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
 WHERE n.nspname ~ '^{FILLING}[0-9a-f]{{{SUFFIX_LENGTH}}}$' AND (r.rolsuper OR r.rolname = current_user) ORDER BY 1
"""


def find_node_problems(sessions: Sessions, *, slots_needed: int = 1) -> list[NodeProblem]:
    """Everything that the nodes' settings and the privileges of our role on the servers lack.

    Raises NodeUnfitError for names that can't be read.
    """
    check_names(sessions.primaries)
    problems: list[NodeProblem] = []
    with_standbys = {node.backup_of for node in sessions.nodes}
    for node in sessions.nodes:
        connection = sessions.connections[node.id]
        problems += find_role_problems(node, connection)
        if node.id in with_standbys and connection.info.server_version >= STANDBY_SNAPSHOT_VERSION:
            problems += find_function_problems(node, connection, STANDBY_FUNCTIONS)
        problems += _find_setting_problems(node, connection, slots_needed)
    # What else passes through a pooler is asked before anything is made on its nodes.
    pooled = [node for node in sessions.nodes if is_pooled(sessions.connections[node.id])]
    return problems + find_session_problems(sessions, pooled)


def check_decoding(sessions: Sessions) -> None:
    """Raise NodeUnfitError naming every node that can no longer decode its WAL, with the remedies.

    An increment checks only this, as the nodes passed every check at the full snapshot: it needs no new slot, and it
    waits for a standby that is reconnecting.
    """
    check_names(sessions.primaries)
    problems: list[NodeProblem] = []
    for node in sessions.nodes:
        connection = sessions.connections[node.id]
        problems += find_decoding_problems(node, read_role(node, connection))
        problems += _find_level_problems(node, connection)
    refuse_unfit(problems)


def find_fillings(sessions: Sessions) -> list[NodeProblem]:
    """The databases into which a restore has loaded rows and not ended: a copy would have half of its rows."""
    problems: list[NodeProblem] = []
    for node, connection in sessions.primaries.items():
        for (schema,) in connection.execute(FILLINGS_QUERY):
            what = f"schema {schema} is of a restore into existing tables that has not ended"
            remedy = (
                "end it as snapshot list   says; if it came with a copy of another database:"
                f" DROP SCHEMA {schema} CASCADE"
            )
            problems.append(NodeProblem(node, what, remedy))
    return problems


def check_names(connections: Mapping[str, psycopg.Connection[Any]]) -> None:
    """Raise NodeUnfitError naming objects whose name can't be converted to UTF-8: commits could not store it."""
    problems: list[NodeProblem] = []
    for node, connection in connections.items():
        with connection.transaction():
            # Read as the server's bytes: a name that can't be converted would end the query.
            connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
            # In a UTF-8 database only names of roles may be invalid.
            names = connection.execute(ROLES_QUERY if encoding_of(connection) == UTF8 else NAMES_QUERY).fetchall()
        invalid = set(find_inconvertible(connection, list({name for _, name in names})))
        # The ASCII characters of a name are enough to recognize it.
        labels = sorted(
            {f"{kind} {name.decode('ascii', 'backslashreplace')}" for kind, name in names if name in invalid}
        )
        if labels:
            what = f"names that can't be written in UTF-8: {list_some(labels, NAMES_SHOWN_MAX)}"
            problems.append(NodeProblem(node, what, "rename them: ALTER … RENAME TO …"))
    refuse_unfit(problems)


def _find_setting_problems(node: Node, connection: psycopg.Connection[Any], slots_needed: int) -> Iterator[NodeProblem]:
    slots, senders = connection.execute(SETTINGS_QUERY).fetchone() or (0, 0)
    yield from _find_level_problems(node, connection)
    if slots < slots_needed:
        remedy = "raise max_replication_slots, or drop unused slots"
        yield NodeProblem(node.id, f"{slots} replication slots are free, {slots_needed} are needed", remedy)
    if senders < slots_needed:
        problem = f"{senders} WAL senders are free, {slots_needed} are needed"
        yield NodeProblem(node.id, problem, "raise max_wal_senders")
    if node.backup_of is None:
        return
    (feedback,) = connection.execute("SELECT current_setting('hot_standby_feedback')").fetchone() or ("off",)
    if feedback != "on":
        remedy = "ALTER SYSTEM SET hot_standby_feedback = on;  and reload"
        yield NodeProblem(node.id, "hot_standby_feedback is off", remedy)
    (receivers,) = connection.execute("SELECT count(*) FROM pg_stat_wal_receiver").fetchone() or (0,)
    if not receivers:
        remedy = "check primary_conninfo and the standby's log"
        yield NodeProblem(node.id, "it does not stream from its primary", remedy)


def _find_level_problems(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    (wal_level,) = connection.execute("SELECT current_setting('wal_level')").fetchone() or ("",)
    if wal_level != "logical":
        remedy = "ALTER SYSTEM SET wal_level = logical;  and restart the server"
        yield NodeProblem(node.id, f"wal_level is {wal_level}", remedy)
