"""Check that primaries allow their databases to be made read-only; all problems are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.other_sessions import SessionFilter, other_sessions, sessions_text
from cutline.fleet.nodes.privileges import INHERIT_OPTION_VERSION, Role, quote, read_role
from cutline.fleet.nodes.problems import NodeProblem, Purpose, unfit_error
from cutline.fleet.nodes.sessions import Sessions
from cutline.fleet.read_only.frozen import read_settings
from cutline.fleet.tables.publications import publication_names

PRIVILEGES_QUERY = """
SELECT pg_has_role(d.datdba, 'USAGE'), o.rolname, o.rolsuper, pg_has_role('pg_signal_backend', 'USAGE'),
       (SELECT pg_get_userbyid(pubowner) FROM pg_publication
         WHERE pubname = %s AND NOT pg_has_role(pubowner, 'USAGE'))
  FROM pg_database d JOIN pg_roles o ON o.oid = d.datdba WHERE d.datname = current_database()
"""
# A subscription's apply worker bypasses the checks for read-only transactions (worker.c).
SUBSCRIPTIONS_QUERY = """
SELECT subname FROM pg_subscription
 WHERE subenabled AND subdbid = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY 1
"""


def check_freezable(sessions: Sessions, fleet_id: str) -> None:
    """Raise NodeUnfitError naming everything that prevents our role from ending all writes to the primaries."""

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        return [*find_freeze_problems(node, connection, fleet_id), *_find_obstacles(node, connection)]

    problems = [problem for some in sessions.ask_named_primaries(find).values() for problem in some]
    if problems:
        raise unfit_error(problems)


def find_freeze_problems(
    node: Node, connection: psycopg.Connection[Any], fleet_id: str | None
) -> Iterator[NodeProblem]:
    """The privileges that our role lacks to make the node's database read-only, and to undo that."""
    role = read_role(node, connection)
    if role.is_super:
        return
    for problem, statement in _find_lacking(connection, role, fleet_id):
        yield NodeProblem(node.id, f"role {role.name} {problem}", statement, role.place, Purpose.TERMINAL)
    yield from _find_own_settings(node, connection, role)


def _find_lacking(connection: psycopg.Connection[Any], role: Role, fleet_id: str | None) -> Iterator[tuple[str, str]]:
    """Yield what the role lacks, each with a statement that grants it."""
    database = role.place.database
    publication = publication_names(fleet_id)[0] if fleet_id else ""
    row = connection.execute(PRIVILEGES_QUERY, (publication,)).fetchone()
    owns, owner, is_owner_super, signals, publisher = row or (False, "", True, False, None)
    if not owns:
        # Not another owner, where there is a choice: the owner has privileges on the schema public.
        change = f"ALTER DATABASE {quote(database)} OWNER TO {role.quoted};"
        for statement in [change] if is_owner_super else role.grant_membership(owner):
            yield f"does not own database {database}", statement
    if publisher:
        yield (
            f"does not own publication {publication}",
            f"ALTER PUBLICATION {quote(publication)} OWNER TO {role.quoted};",
        )
    if not signals:
        for statement in role.grant_membership("pg_signal_backend"):
            yield "may not end other roles' sessions", statement
    if not role.sees_statistics:
        for statement in role.grant_membership("pg_read_all_stats"):
            yield "may not see other sessions", statement


def _find_own_settings(node: Node, connection: psycopg.Connection[Any], role: Role) -> Iterator[NodeProblem]:
    """Yield the roles whose own setting would have to be changed, and may not be."""
    for one in read_settings(connection):
        other = one.setting.role
        if not other or one.is_on or one.may_change:
            continue
        problem = (
            f"role {role.name} may not change role {other}, which has its own default_transaction_read_only ="
            f" {one.value_in_effect}"
        )
        if connection.execute("SELECT FROM pg_roles WHERE rolname = %s AND rolsuper", (other,)).fetchone() is not None:
            action = f"only a superuser may change superuser {other}: create the snapshot as a superuser"
            yield NodeProblem(node.id, problem, action, purpose=Purpose.TERMINAL)
            continue
        for statement in _administer(role, other):
            yield NodeProblem(node.id, problem, statement, role.place, Purpose.TERMINAL)


def _administer(role: Role, other: str) -> Iterator[str]:
    """The statements that let our role change the settings of another one."""
    if not role.may_create_roles:
        yield f"ALTER ROLE {role.quoted} CREATEROLE;"
    if role.version >= INHERIT_OPTION_VERSION:
        yield f"GRANT {quote(other)} TO {role.quoted} WITH ADMIN TRUE, INHERIT FALSE, SET FALSE;"


def _find_obstacles(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    """Yield what else writes to the database, or can't be stopped."""
    role, database = read_role(node, connection), connection.info.dbname
    others = [] if role.is_super else other_sessions(node.id, connection, SessionFilter())
    if protected := [one for one in others if one.is_superuser]:
        yield NodeProblem(
            node.id,
            f"role {role.name} may not end superusers' sessions: {sessions_text(protected, names_node=False)}",
            "end them, or create the snapshot as a superuser",
            purpose=Purpose.TERMINAL,
        )
    for (name,) in connection.execute(SUBSCRIPTIONS_QUERY):
        yield NodeProblem(
            node.id,
            f"subscription {name} writes to database {database} even if it is read-only",
            f"ALTER SUBSCRIPTION {quote(name)} DISABLE;",
            role.place,
            Purpose.TERMINAL,
        )
