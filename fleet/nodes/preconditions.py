"""Check that nodes allow what Cutline needs; all problems are reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.encodings import RAW, UTF8, encoding_of, find_inconvertible
from fleet.nodes.sessions import Sessions
from storage.errors import RefusedError

DECODING_QUERY = """
SELECT current_setting('wal_level'),
       (SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user)
"""
SETTINGS_QUERY = """
SELECT current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_replication_slots),
       current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_stat_replication),
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
           OR pg_has_role(current_user, 'pg_monitor', 'MEMBER'),
       has_database_privilege(current_database(), 'CREATE')
"""
# On a primary with standbys: making a slot on a standby waits for the primary to log its running transactions.
STANDBY_QUERY = "SELECT has_function_privilege(%s, 'EXECUTE')"
STANDBY_FUNCTION = "pg_catalog.pg_log_standby_snapshot()"
STANDBY_VERSION = 160000
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


class NodeUnfitError(RefusedError):
    """A node's settings or our role's privileges do not allow the operation."""


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """What a node lacks, and the remedy: a statement or an action."""

    node: str
    problem: str
    remedy: str


def check_nodes(sessions: Sessions, *, slots_needed: int = 1) -> None:
    """Raise NodeUnfitError naming everything that the nodes lack, with the remedies."""
    check_names(sessions.primaries)
    problems: list[NodeProblem] = []
    for node in sessions.nodes:
        problems += _find_problems(node, sessions.connections[node.id], slots_needed)
    with_standbys = {node.backup_of for node in sessions.nodes}
    for primary, connection in sessions.primaries.items():
        if primary in with_standbys and connection.info.server_version >= STANDBY_VERSION:
            (may_log,) = connection.execute(STANDBY_QUERY, (STANDBY_FUNCTION,)).fetchone() or (False,)
            problems += [] if may_log else [lacks_standby_snapshots(primary, connection.info.user)]
    refuse_unfit(problems)


def lacks_standby_snapshots(primary: str, role: str) -> NodeProblem:
    """The problem of a primary whose running transactions the role may not have logged."""
    quoted = role.replace('"', '""')
    return NodeProblem(
        primary,
        f"role {role} may not call pg_log_standby_snapshot(), which slots on standbys need",
        f'GRANT EXECUTE ON FUNCTION pg_catalog.pg_log_standby_snapshot() TO "{quoted}";',
    )


def check_decoding(sessions: Sessions) -> None:
    """Raise NodeUnfitError naming every node that can no longer decode its WAL, with the remedies.

    An increment checks only this, as the nodes passed every check at the full snapshot: it needs no new slot, and it
    waits for a standby that is reconnecting.
    """
    check_names(sessions.primaries)
    refuse_unfit(
        [problem for node in sessions.nodes for problem in _find_decoding_problems(node, sessions.connections[node.id])]
    )


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
            more = f" and {len(labels) - NAMES_SHOWN_MAX} more" if len(labels) > NAMES_SHOWN_MAX else ""
            what = f"names that can't be written in UTF-8: {', '.join(labels[:NAMES_SHOWN_MAX])}{more}"
            problems.append(NodeProblem(node, what, "rename them: ALTER … RENAME TO …"))
    refuse_unfit(problems)


def refuse_unfit(problems: Iterable[NodeProblem]) -> None:
    """Raise NodeUnfitError naming all problems and remedies, if there are any."""
    if problems := list(problems):
        raise unfit_error(problems)


def unfit_error(problems: Sequence[NodeProblem]) -> NodeUnfitError:
    """The error that names all problems and remedies."""
    return NodeUnfitError(
        "; ".join(f"node {one.node}: {one.problem}" for one in problems),
        hint="\n".join(dict.fromkeys(one.remedy for one in problems)),
        details={"problems": [{"node": one.node, "problem": one.problem} for one in problems]},
    )


def _find_problems(node: Node, connection: psycopg.Connection[Any], slots_needed: int) -> Iterator[NodeProblem]:
    row = connection.execute(SETTINGS_QUERY).fetchone()
    slots, senders, monitor, create = row or (0, 0, False, False)
    role = connection.info.user
    yield from _find_decoding_problems(node, connection)
    if slots < slots_needed:
        remedy = "raise max_replication_slots, or drop unused slots"
        yield NodeProblem(node.id, f"{slots} replication slots are free, {slots_needed} are needed", remedy)
    if senders < slots_needed:
        problem = f"{senders} WAL senders are free, {slots_needed} are needed"
        yield NodeProblem(node.id, problem, "raise max_wal_senders")
    if not monitor:
        yield NodeProblem(node.id, f"role {role} may not see other sessions", f'GRANT pg_monitor TO "{role}";')
    if node.backup_of is None:
        if not create:
            remedy = f'GRANT CREATE ON DATABASE … TO "{role}";'
            yield NodeProblem(node.id, f"role {role} may not create publications", remedy)
        return
    (feedback,) = connection.execute("SELECT current_setting('hot_standby_feedback')").fetchone() or ("off",)
    if feedback != "on":
        remedy = "ALTER SYSTEM SET hot_standby_feedback = on;  and reload"
        yield NodeProblem(node.id, "hot_standby_feedback is off", remedy)
    (receivers,) = connection.execute("SELECT count(*) FROM pg_stat_wal_receiver").fetchone() or (0,)
    if not receivers:
        remedy = "check primary_conninfo and the standby's log"
        yield NodeProblem(node.id, "it does not stream from its primary", remedy)


def _find_decoding_problems(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    wal_level, replication = connection.execute(DECODING_QUERY).fetchone() or ("", False)
    if wal_level != "logical":
        remedy = "ALTER SYSTEM SET wal_level = logical;  and restart the server"
        yield NodeProblem(node.id, f"wal_level is {wal_level}", remedy)
    if not replication:
        role = connection.info.user
        yield NodeProblem(node.id, f"role {role} may not replicate", f'ALTER ROLE "{role}" REPLICATION;')
