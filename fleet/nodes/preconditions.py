"""What a node must allow before Cutline can work with it; everything that it does not is named at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import psycopg

from fleet.nodes.encodings import RAW, UTF8, encoding_of, without_text
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
# Every name of the database that a session of ours may be told, as the server has it. Roles may have been named in a
# database of another encoding: one counts if something here belongs or is granted to it, or is said in its name.
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
    """A node's settings or our role's privileges do not allow snapshots."""


def check_nodes(sessions: Sessions, *, slots_needed: int = 1) -> None:
    """Raise NodeUnfitError naming everything that the nodes lack, with what would mend it."""
    check_names(sessions.primaries)
    problems: list[tuple[str, str, str]] = []
    for node in sessions.nodes:
        connection = sessions.connections[node.id]
        is_primary = node.backup_of is None
        problems += [
            (node.id, *found) for found in _lacks(connection, is_primary=is_primary, slots_needed=slots_needed)
        ]
    refuse_unfit(problems)


def check_decoding(sessions: Sessions) -> None:
    """Raise NodeUnfitError naming every node that can't decode its WAL any more, with what would mend it.

    That is what an increment needs of nodes that had everything at the full snapshot: it needs no new slot, and
    waits for a standby that is connecting again.
    """
    check_names(sessions.primaries)
    refuse_unfit(
        [(node.id, *found) for node in sessions.nodes for found in _decodes_not(sessions.connections[node.id])]
    )


def check_names(connections: Mapping[str, psycopg.Connection[Any]]) -> None:
    """Raise NodeUnfitError naming what has a name that is no text: commits and reports could not name it."""
    problems: list[tuple[str, str, str]] = []
    for node, connection in connections.items():
        with connection.transaction():
            # As the server has them: as text, one that is none would end the query that asks for it.
            connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
            # In UTF-8 all but roles have text.
            names = connection.execute(ROLES_QUERY if encoding_of(connection) == UTF8 else NAMES_QUERY).fetchall()
        unfit = set(without_text(connection, list({name for _, name in names})))
        # What a name has of ASCII tells which it is.
        found = sorted({f"{kind} {name.decode('ascii', 'backslashreplace')}" for kind, name in names if name in unfit})
        if found:
            more = f" and {len(found) - NAMES_SHOWN_MAX} more" if len(found) > NAMES_SHOWN_MAX else ""
            what = f"names that can't be written in UTF-8: {', '.join(found[:NAMES_SHOWN_MAX])}{more}"
            problems.append((node, what, "rename them: ALTER … RENAME TO …"))
    refuse_unfit(problems)


def refuse_unfit(problems: list[tuple[str, str, str]]) -> None:
    """Raise NodeUnfitError naming all problems (node, problem, remedy), if there are any."""
    if problems:
        raise NodeUnfitError(
            "; ".join(f"node {node}: {problem}" for node, problem, _ in problems),
            hint="\n".join(dict.fromkeys(remedy for *_, remedy in problems)),
            details={"problems": [{"node": node, "problem": problem} for node, problem, _ in problems]},
        )


def _lacks(connection: psycopg.Connection[Any], *, is_primary: bool, slots_needed: int) -> Iterable[tuple[str, str]]:
    row = connection.execute(SETTINGS_QUERY).fetchone()
    slots, senders, monitor, create = row or (0, 0, False, False)
    role = connection.info.user
    yield from _decodes_not(connection)
    if slots < slots_needed:
        yield f"{slots} replication slots are free", "raise max_replication_slots, or drop slots nobody reads"
    if senders < slots_needed:
        yield f"{senders} WAL senders are free", "raise max_wal_senders"
    if not monitor:
        yield f"role {role} may not see what runs", f'GRANT pg_monitor TO "{role}";'
    if is_primary and not create:
        yield f"role {role} may not create publications", f'GRANT CREATE ON DATABASE … TO "{role}";'
    if not is_primary:
        (feedback,) = connection.execute("SELECT current_setting('hot_standby_feedback')").fetchone() or ("off",)
        if feedback != "on":
            yield "hot_standby_feedback is off", "ALTER SYSTEM SET hot_standby_feedback = on;  and reload"
        (receivers,) = connection.execute("SELECT count(*) FROM pg_stat_wal_receiver").fetchone() or (0,)
        if not receivers:
            yield "it does not stream from its primary", "see primary_conninfo and the standby's log"


def _decodes_not(connection: psycopg.Connection[Any]) -> Iterable[tuple[str, str]]:
    wal_level, replication = connection.execute(DECODING_QUERY).fetchone() or ("", False)
    if wal_level != "logical":
        yield f"wal_level is {wal_level}", "ALTER SYSTEM SET wal_level = logical;  and restart the server"
    if not replication:
        role = connection.info.user
        yield f"role {role} may not replicate", f'ALTER ROLE "{role}" REPLICATION;'
