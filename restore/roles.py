"""The roles that a snapshot's DDL names: whether a target has them, and making those that it lacks, by option.

A server keeps a role's name as the bytes that it has in the encoding of the database where it was made, and gives these
bytes to databases of all encodings. So what counts is the name's bytes in the encoding of the restored database.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql

from fleet.nodes.connections import connect
from fleet.nodes.encodings import RAW
from restore.target import Target, TargetUnfitError

# As the server keeps them: a session that has no encoding converts nothing.
KNOWN_QUERY = "SELECT namesend(rolname) FROM pg_roles"
BYTES_QUERY = """
SELECT convert(name, 'UTF8', %s) FROM unnest(%s::bytea[]) WITH ORDINALITY AS given (name, n) ORDER BY n
"""
RIGHTS_QUERY = "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user"


def missing_roles(
    target: Target, connection: psycopg.Connection[Any], roles: Iterable[str], encoding: str, *, may_create: bool
) -> list[str]:
    """The roles that the target's server lacks; raise TargetUnfitError unless it has all, or we `may_create` them.

    `encoding` is that of the database to be restored.
    """
    roles = list(roles)
    with connect(target.maintenance, client_encoding=RAW) as raw:
        known = {bytes(name) for (name,) in raw.execute(KNOWN_QUERY)}
    names = connection.execute(BYTES_QUERY, (encoding, [role.encode() for role in roles])).fetchall()
    missing = [role for role, (name,) in zip(roles, names, strict=True) if name not in known]
    node = target.node.id
    details: dict[str, object] = {"node": node, "roles": missing}
    if missing and not may_create:
        statements = "".join(f"\n  CREATE ROLE {_quote(role)};" for role in missing)
        where = "" if all(map(str.isascii, missing)) else f" (in a database of encoding {encoding})"
        raise TargetUnfitError(
            f"node {node} lacks roles that the snapshot's objects belong to or are granted to: {', '.join(missing)}",
            hint=f"restore with --create-roles makes them without login; or make them as they were{where}:{statements}",
            details=details,
        )
    if missing and connection.execute(RIGHTS_QUERY).fetchone() != (True,):
        raise TargetUnfitError(
            f"node {node}: role {connection.info.user} may not create roles: {', '.join(missing)}",
            hint=f"ALTER ROLE {_quote(connection.info.user)} CREATEROLE;",
            details=details,
        )
    return missing


def create_roles(target: Target, roles: Iterable[str]) -> list[str]:
    """Create the roles, without login, password, privilege or membership; return those that nobody else has made.

    They are made from the database that is being restored, whose encoding their names are to have. They stay where the
    restore fails: roles are the whole server's.
    """
    roles = list(roles)
    if not roles:
        return []
    with connect(target.loaded) as connection:
        return _create_role(target, connection, roles)


def _create_role(target: Target, connection: psycopg.Connection[Any], roles: Iterable[str]) -> list[str]:
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


def _quote(role: str) -> str:
    return '"{}"'.format(role.replace('"', '""'))
