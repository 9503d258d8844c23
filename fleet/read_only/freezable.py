"""What a primary must allow before its database can be made read-only; everything that it does not is named at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from fleet.nodes.other_sessions import Chosen, other_sessions, sessions_text
from fleet.nodes.preconditions import refuse_unfit
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
# What a subscription brings is written below the checks for read-only transactions (worker.c).
SUBSCRIPTIONS_QUERY = """
SELECT subname FROM pg_subscription
 WHERE subenabled AND subdbid = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY 1
"""


def check_freezable(sessions: Sessions, fleet_id: str) -> None:
    """Raise NodeUnfitError naming everything that keeps our role from ending all writes to the primaries."""
    found = sessions.ask_primaries(lambda connection: list(_lacks(connection, fleet_id)))
    refuse_unfit([(node, *lack) for node, lacks in found.items() for lack in lacks])


def _lacks(connection: psycopg.Connection[Any], fleet_id: str) -> Iterator[tuple[str, str]]:
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
        yield f"role {role} may not see what runs", f'GRANT pg_monitor TO "{role}";'
    for one in read_settings(connection):
        if one.setting.role and not one.is_on and not one.may_change:
            yield (
                f"role {one.setting.role} has default_transaction_read_only = {one.holds} of its own, and role {role}"
                " may not change that",
                "create the snapshot as a superuser, or as a role with CREATEROLE and ADMIN OPTION on that one",
            )
    above = [one for one in other_sessions("", connection, Chosen()) if one.is_superuser] if not is_super else []
    if above:
        yield (
            f"role {role} may not end a superuser's session: {sessions_text(above)}",
            "end it, or create the snapshot as a superuser",
        )
    for (name,) in connection.execute(SUBSCRIPTIONS_QUERY):
        yield (
            f"subscription {name} writes to database {database}, read-only or not",
            f'in database "{database}": ALTER SUBSCRIPTION "{name}" DISABLE;',
        )
