"""The large objects in a database: count them, divide them, and check that our role may read them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutline.fleet.progress import Progress
from cutline.nodes.privileges import find_large_object_problems
from cutline.nodes.problems import actions_of, addresses_of, comment, grants_of, script_of
from cutline.nodes.sessions import Sessions
from cutline.storage.errors import RefusedError

if TYPE_CHECKING:
    import psycopg

COUNT_QUERY = "SELECT count(*) FROM pg_largeobject_metadata"
SIZE_QUERY = "SELECT pg_relation_size('pg_largeobject')"
# Nobody can drop a role that owns large objects, but damaged catalogs have such objects.
OWNERLESS_QUERY = """
SELECT count(*), min(oid)::bigint FROM pg_largeobject_metadata WHERE lomowner NOT IN (SELECT oid FROM pg_roles)
HAVING count(*) > 0
"""
# The first oid of each part; the parameter is the number of parts.
BOUNDS_QUERY = """
SELECT min(oid)::bigint FROM (SELECT oid, ntile(%s) OVER (ORDER BY oid) AS part FROM pg_largeobject_metadata) AS parts
 GROUP BY part ORDER BY 1
"""


class LargeObjectsUnreadableError(RefusedError):
    """Our role may not read a large object that is to be copied."""


def check_readable(sessions: Sessions) -> None:
    """Raise LargeObjectsUnreadableError, which names all primaries with large objects that our role may not read."""
    found = sessions.ask_named_primaries(lambda node, connection: list(find_large_object_problems(node, connection)))
    if problems := [problem for of_node in found.values() for problem in of_node]:
        leave_out = comment("or leave large objects out: --no-large-objects")
        raise LargeObjectsUnreadableError(
            "; ".join(dict.fromkeys(f"node {problem.node}: {problem.problem}" for problem in problems)),
            hint=[*script_of(problems, addresses_of(sessions.fleet.nodes)), leave_out],
            details={
                "problems": [{"node": problem.node, "problem": problem.problem} for problem in problems],
                "grants": grants_of(problems),
                "actions": actions_of(problems),
            },
        )


def note_ownerless(sessions: Sessions, progress: Progress) -> None:
    """Note the large objects whose owners do not exist: pg_dump refuses them, and a restore can't give them back."""
    for node, rows in sessions.ask_primaries(lambda one: one.execute(OWNERLESS_QUERY).fetchall()).items():
        for count, oid in rows:
            progress.note(
                f"node {node}: {count} large {'object has' if count == 1 else 'objects have'} an owner that does not"
                f" exist, such as {oid}: they are copied, and a restore makes the restoring role their owner; to give"
                f" them one, as a superuser: ALTER LARGE OBJECT {oid} OWNER TO …;"
            )


def count_large_objects(connection: psycopg.Connection[Any]) -> int:
    """Count the large objects in the database."""
    (count,) = connection.execute(COUNT_QUERY).fetchone() or (0,)
    return int(count)


def measure_large_objects(connection: psycopg.Connection[Any]) -> int:
    """Return the size in bytes of the pages with the contents of the large objects in the database."""
    (size,) = connection.execute(SIZE_QUERY).fetchone() or (0,)
    return int(size)


def oid_ranges(connection: psycopg.Connection[Any], parts: int) -> list[tuple[int, int | None]]:
    """Divide the oids into at most `parts` ranges, end exclusive, with about the same number of large objects each.

    The ranges cover all oids, because the copy uses a different snapshot and may see different large objects.
    """
    begins = [oid for (oid,) in connection.execute(BOUNDS_QUERY, (parts,))]
    return list(zip([0, *begins[1:]], [*begins[1:], None], strict=True))
