"""The roles that a snapshot's DDL names: whether a target has them, and making those that it lacks, by option."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql

from restore.target import Target, TargetUnfitError

RIGHTS_QUERY = "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user"


def missing_roles(
    target: Target, connection: psycopg.Connection[Any], roles: Iterable[str], *, may_create: bool
) -> list[str]:
    """The roles that the target's server lacks; raise TargetUnfitError unless it has all, or we `may_create` them."""
    known = {row[0] for row in connection.execute("SELECT rolname FROM pg_roles")}
    missing = [role for role in roles if role not in known]
    node = target.node.id
    details: dict[str, object] = {"node": node, "roles": missing}
    if missing and not may_create:
        statements = "".join(f"\n  CREATE ROLE {_quoted(role)};" for role in missing)
        raise TargetUnfitError(
            f"node {node} lacks roles that the snapshot's objects belong to or are granted to: {', '.join(missing)}",
            hint=f"restore with --create-roles makes them without login; or make them as they were:{statements}",
            details=details,
        )
    if missing and connection.execute(RIGHTS_QUERY).fetchone() != (True,):
        raise TargetUnfitError(
            f"node {node}: role {connection.info.user} may not create roles: {', '.join(missing)}",
            hint=f"ALTER ROLE {_quoted(connection.info.user)} CREATEROLE;",
            details=details,
        )
    return missing


def create_roles(target: Target, connection: psycopg.Connection[Any], roles: Iterable[str]) -> list[str]:
    """Create the roles, without login, password, privilege or membership; return those that nobody else has made.

    They stay where the restore fails: roles are the whole server's.
    """
    created: list[str] = []
    for role in roles:
        try:
            connection.execute(sql.SQL("CREATE ROLE {} NOLOGIN").format(sql.Identifier(role)))
        except psycopg.errors.DuplicateObject:
            # Another shard goes to the same server.
            continue
        except psycopg.Error as error:
            raise TargetUnfitError(
                f"node {target.node.id}: role {role} can't be created: {error.diag.message_primary or error}",
                hint="make it on the target, then repeat",
                details={"node": target.node.id, "roles": [role]},
            ) from error
        created.append(f"{target.node.id}: {role}")
    return created


def _quoted(role: str) -> str:
    return '"{}"'.format(role.replace('"', '""'))
