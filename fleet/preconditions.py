"""What a node must allow before Cutline can work with it; everything that it does not is named at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from fleet.sessions import Sessions
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


class NodeUnfitError(RefusedError):
    """A node's settings or our role's privileges do not allow snapshots."""


def check_nodes(sessions: Sessions, *, slots_needed: int = 1) -> None:
    """Raise NodeUnfitError naming everything that the nodes lack, with what would mend it."""
    problems: list[tuple[str, str, str]] = []
    for node in sessions.nodes:
        connection = sessions.connections[node.id]
        is_primary = node.backup_of is None
        problems += [
            (node.id, *found) for found in _lacks(connection, is_primary=is_primary, slots_needed=slots_needed)
        ]
    _refuse(problems)


def check_decoding(sessions: Sessions) -> None:
    """Raise NodeUnfitError naming every node that can't decode its WAL any more, with what would mend it.

    That is what an increment needs of nodes that had everything at the full snapshot: it needs no new slot, and
    waits for a standby that is connecting again.
    """
    _refuse([(node.id, *found) for node in sessions.nodes for found in _decodes_not(sessions.connections[node.id])])


def _refuse(problems: list[tuple[str, str, str]]) -> None:
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
