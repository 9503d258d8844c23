"""The large objects in a database: count them, divide them, and check that our role may read them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cutline.fleet.messages import list_some
from cutline.fleet.table_names import quote_identifier
from cutline.storage.errors import RefusedError

if TYPE_CHECKING:
    import psycopg

# A large object without an ACL can be read only by its owner (PostgreSQL manual, "Large Objects").
UNREADABLE_QUERY = """
SELECT m.oid::bigint FROM pg_largeobject_metadata m
 WHERE NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
   AND NOT current_setting('lo_compat_privileges')::bool
   AND NOT EXISTS (SELECT FROM aclexplode(coalesce(m.lomacl, acldefault('L', m.lomowner))) AS a
                    WHERE a.privilege_type = 'SELECT' AND (a.grantee = 0 OR pg_has_role(a.grantee, 'USAGE')))
 ORDER BY 1
"""
COUNT_QUERY = "SELECT count(*) FROM pg_largeobject_metadata"
# The first oid of each part; the parameter is the number of parts.
BOUNDS_QUERY = """
SELECT min(oid)::bigint FROM (SELECT oid, ntile(%s) OVER (ORDER BY oid) AS part FROM pg_largeobject_metadata) AS parts
 GROUP BY part ORDER BY 1
"""
NAMED_MAX = 3


class LargeObjectsUnreadableError(RefusedError):
    """Our role may not read a large object that is to be copied."""


def check_readable(connections: Mapping[str, psycopg.Connection[Any]]) -> None:
    """Raise LargeObjectsUnreadableError unless the role may read all large objects on these nodes."""
    for node, connection in connections.items():
        if oids := [oid for (oid,) in connection.execute(UNREADABLE_QUERY)]:
            role = connection.info.user
            raise LargeObjectsUnreadableError(
                f"node {node}: role {role} can't read large objects {list_some(map(str, oids), NAMED_MAX)}",
                hint=f"{_grant(oids, quote_identifier(role))}   or leave large objects out: --no-large-objects",
                details={"node": node, "large_objects": oids},
            )


def _grant(oids: list[int], role: str) -> str:
    if len(oids) <= NAMED_MAX:
        return f"GRANT SELECT ON LARGE OBJECT {', '.join(map(str, oids))} TO {role};"
    escaped = role.replace("%", "%%").replace("'", "''")
    every = f"format('GRANT SELECT ON LARGE OBJECT %s TO {escaped}', oid)"
    return f"in psql, as a superuser: SELECT {every} FROM pg_largeobject_metadata \\gexec"


def count_large_objects(connection: psycopg.Connection[Any]) -> int:
    """Count the large objects in the database."""
    (count,) = connection.execute(COUNT_QUERY).fetchone() or (0,)
    return int(count)


def oid_ranges(connection: psycopg.Connection[Any], parts: int) -> list[tuple[int, int | None]]:
    """Divide the oids into at most `parts` ranges, end exclusive, with about the same number of large objects each.

    The ranges cover all oids, because the copy uses a different snapshot and may see different large objects.
    """
    begins = [oid for (oid,) in connection.execute(BOUNDS_QUERY, (parts,))]
    return list(zip([0, *begins[1:]], [*begins[1:], None], strict=True))
