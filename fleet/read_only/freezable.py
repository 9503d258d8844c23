"""Check that primaries allow their databases to be made read-only; all problems are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.other_sessions import SessionFilter, other_sessions, sessions_text
from fleet.nodes.preconditions import NodeProblem, refuse_unfit
from fleet.nodes.sessions import Sessions
from fleet.read_only.frozen import read_settings
from fleet.tables.publications import publication_names

PRIVILEGES_QUERY = """
SELECT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
       pg_has_role(d.datdba, 'USAGE'), pg_has_role('pg_signal_backend', 'USAGE'),
       pg_has_role('pg_read_all_stats', 'USAGE'), d.datname,
       (SELECT pg_get_userbyid(pubowner) FROM pg_publication
         WHERE pubname = %s AND NOT pg_has_role(pubowner, 'USAGE'))
  FROM pg_database d WHERE d.datname = current_database()
"""
# A subscription's apply worker bypasses the checks for read-only transactions (worker.c).
SUBSCRIPTIONS_QUERY = """
SELECT subname FROM pg_subscription
 WHERE subenabled AND subdbid = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY 1
"""


def check_freezable(sessions: Sessions, fleet_id: str) -> None:
    """Raise NodeUnfitError naming everything that prevents our role from ending all writes to the primaries."""

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        return [NodeProblem(node.id, *texts) for texts in _find_problems(connection, fleet_id)]

    refuse_unfit([problem for problems in sessions.ask_named_primaries(find).values() for problem in problems])


def _find_problems(connection: psycopg.Connection[Any], fleet_id: str) -> Iterator[tuple[str, str]]:
    """Yield what the node does not allow, each with its remedy."""
    publication = publication_names(fleet_id)[0]
    row = connection.execute(PRIVILEGES_QUERY, (publication,)).fetchone()
    is_super, owns, signals, sees, database, publisher = row or (False, False, False, False, "", None)
    role = connection.info.user
    if not owns:
        yield f"role {role} does not own database {database}", f'ALTER DATABASE "{database}" OWNER TO "{role}";'
    if publisher:
        yield f"role {role} does not own publication {publication}", f'GRANT "{publisher}" TO "{role}";'
    if not signals:
        yield f"role {role} may not end other roles' sessions", f'GRANT pg_signal_backend TO "{role}";'
    if not sees:
        yield f"role {role} may not see other sessions", f'GRANT pg_monitor TO "{role}";'
    for one in read_settings(connection):
        if one.setting.role and not one.is_on and not one.may_change:
            yield (
                f"role {one.setting.role} has its own default_transaction_read_only = {one.value_in_effect}, which role"
                f" {role} may not change",
                "create the snapshot as a superuser, or as a role with CREATEROLE and ADMIN OPTION on that role",
            )
    others = [] if is_super else other_sessions("", connection, SessionFilter())
    if protected := [one for one in others if one.is_superuser]:
        yield (
            f"role {role} may not end superusers' sessions: {sessions_text(protected)}",
            "end them, or create the snapshot as a superuser",
        )
    for (name,) in connection.execute(SUBSCRIPTIONS_QUERY):
        yield (
            f"subscription {name} writes to database {database} even if it is read-only",
            f'in database "{database}": ALTER SUBSCRIPTION "{name}" DISABLE;',
        )
