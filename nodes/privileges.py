"""The privileges that our role needs for the objects in a database, and the statements that grant them.

docs/roles.md lists the same privileges; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct
from psycopg import sql

from cutline.fleet.config import GroupRules, Node
from cutline.fleet.messages import list_some
from cutline.fleet.table_names import TABLE_NAME, is_included
from cutline.nodes.groups import ORDINARY_TABLE
from cutline.nodes.problems import (
    LARGE_OBJECT_FUNCTIONS,
    NodeProblem,
    Purpose,
    Role,
    find_function_problems,
    quote,
    read_role,
)
from cutline.nodes.publications import publication_names
from cutline.nodes.sessions import Sessions

# The relations that Cutline copies or that pg_dump locks: pg_dump locks every table, including excluded tables.
UNREADABLE_QUERY = f"""
SELECT {TABLE_NAME}, n.nspname, c.relname, c.relkind = 'S', has_schema_privilege(n.oid, 'USAGE')
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p', 'S') AND c.relpersistence <> 't'
   AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
   AND NOT coalesce(has_schema_privilege(n.oid, 'USAGE')
                    AND CASE c.relkind WHEN 'S' THEN has_sequence_privilege(c.oid, 'SELECT')
                                       ELSE has_table_privilege(c.oid, 'SELECT') END, true)
 ORDER BY 1
"""
# Whether our role can read other roles' tables through grants, to itself or to a role whose privileges it has.
READS_BY_GRANTS_QUERY = """
SELECT EXISTS (
  SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN aclexplode(c.relacl) AS a
   WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
     AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner) AND pg_has_role(a.grantee, 'USAGE'))
"""
# For each table: whether policies limit what our role reads, whether our role has its owner's privileges, and whether
# Cutline publishes it.
TABLES_QUERY = f"""
SELECT {TABLE_NAME}, row_security_active(c.oid), pg_has_role(c.relowner, 'USAGE'), o.rolname, o.rolsuper,
       EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                WHERE r.prrelid = c.oid AND p.pubname = ANY (%s))
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles o ON o.oid = c.relowner
 WHERE {ORDINARY_TABLE}
 ORDER BY 1
"""
PUBLICATIONS_QUERY = """
SELECT pubname, pg_has_role(pubowner, 'USAGE') FROM pg_publication WHERE pubname = ANY (%s) ORDER BY 1
"""
MAY_CREATE_QUERY = "SELECT has_database_privilege(current_database(), 'CREATE')"
# The large objects that our role may not read, and whether their owners may. One without an ACL can be read only by its
# owner (PostgreSQL manual, "Large Objects").
LARGE_OBJECTS_QUERY = """
SELECT m.oid::bigint, o.rolname, o.rolsuper,
       EXISTS (SELECT FROM aclexplode(coalesce(m.lomacl, acldefault('L', m.lomowner))) AS a
                WHERE a.privilege_type = 'SELECT' AND a.grantee = m.lomowner)
  FROM pg_largeobject_metadata m JOIN pg_roles o ON o.oid = m.lomowner
 WHERE NOT current_setting('lo_compat_privileges')::bool
   AND NOT EXISTS (SELECT FROM aclexplode(coalesce(m.lomacl, acldefault('L', m.lomowner))) AS a
                    WHERE a.privilege_type = 'SELECT' AND (a.grantee = 0 OR pg_has_role(a.grantee, 'USAGE')))
 ORDER BY 1
"""
ANY_LARGE_OBJECT_QUERY = "SELECT EXISTS (SELECT FROM pg_largeobject_metadata)"
# The first version with default privileges for large objects.
DEFAULT_PRIVILEGES_VERSION = 180000
NAMED_MAX, OIDS_NAMED_MAX, OIDS_AT_ONCE = 5, 3, 500


class _Unreadable(NamedTuple):
    """A table or sequence that our role may not read; `is_open`: our role may use its schema."""

    label: str
    schema: str
    name: str
    is_sequence: bool
    is_open: bool


class _Owned(Struct, frozen=True):
    owner: str
    is_super: bool
    names: tuple[str, ...]


def find_table_problems(sessions: Sessions, rules: GroupRules, fleet_id: str | None) -> list[NodeProblem]:
    """Find the missing privileges that our role needs to read the nodes' databases and publish the rules' tables.

    `fleet_id` is None before the publications exist.
    """
    publications = list(publication_names(fleet_id)) if fleet_id else []

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        role = read_role(node, connection)
        if role.is_super:
            return []
        rows = connection.execute(TABLES_QUERY, (publications,)).fetchall()
        tables = [row for row in rows if is_included(row[0], rules)]
        problems = list(_find_reading(node, role, connection, [row[0] for row in tables if row[1]]))
        if node.backup_of is None:
            problems += _find_publishing(node, role, connection, publications, tables)
        return problems

    return [problem for problems in sessions.ask_nodes(find).values() for problem in problems]


def find_large_object_problems(
    node: Node, connection: psycopg.Connection[Any], purpose: Purpose = Purpose.LARGE_OBJECTS
) -> Iterator[NodeProblem]:
    """Yield the missing privileges that our role needs to read the large objects.

    Statements that also cover large objects that are created later come first.
    """
    role = read_role(node, connection)
    if role.is_super:
        return
    unreadable = connection.execute(LARGE_OBJECTS_QUERY).fetchall()
    of_owners: dict[str, None] = {}
    of_others: dict[tuple[str, bool], list[int]] = {}
    for oid, owner, is_super, owner_reads in unreadable:
        if is_super or not owner_reads:
            of_others.setdefault((owner, is_super), []).append(oid)
        else:
            of_owners[owner] = None
    statements = [statement for owner in of_owners for statement in role.grant_membership(owner)]
    if role.version >= DEFAULT_PRIVILEGES_VERSION:
        statements += [_grant_later(owner, role) for owner, is_super in of_others if is_super]
    statements += [_grant_large_objects(oids, owner, role) for (owner, _), oids in of_others.items()]
    oids = list_some((str(oid) for oid, *_ in unreadable), OIDS_NAMED_MAX)
    for statement in statements:
        problem = f"role {role.name} can't read large objects {oids}"
        yield NodeProblem(node.id, problem, statement, role.place, purpose)
    if connection.execute(ANY_LARGE_OBJECT_QUERY).fetchone() == (True,):
        yield from find_function_problems(node, connection, LARGE_OBJECT_FUNCTIONS, purpose)


def _grant_later(owner: str, role: Role) -> str:
    """Return the statement that lets our role read the large objects that `owner` creates later."""
    return f"ALTER DEFAULT PRIVILEGES FOR ROLE {quote(owner)} GRANT SELECT ON LARGE OBJECTS TO {role.quoted};"


def _grant_large_objects(oids: list[int], owner: str, role: Role) -> str:
    """Return the statement that lets our role read these large objects, or, if they are many, all of their owner."""
    if len(oids) <= OIDS_AT_ONCE:
        return f"GRANT SELECT ON LARGE OBJECT {', '.join(map(str, oids))} TO {role.quoted};"
    owned = f"lomowner = (SELECT oid FROM pg_catalog.pg_roles WHERE rolname = {_literal(owner)})"
    granting = f"pg_catalog.format('GRANT SELECT ON LARGE OBJECT %s TO %I', lo, {_literal(role.name)})"
    every = f"SELECT oid FROM pg_catalog.pg_largeobject_metadata WHERE {owned}"
    body = f"DECLARE lo oid; BEGIN FOR lo IN {every} LOOP EXECUTE {granting}; END LOOP; END"
    return f"DO {_literal(body)};"


def _literal(text: str) -> str:
    return sql.Literal(text).as_string()


def _find_reading(
    node: Node, role: Role, connection: psycopg.Connection[Any], hidden: list[str]
) -> Iterator[NodeProblem]:
    if unreadable := [_Unreadable(*row) for row in connection.execute(UNREADABLE_QUERY)]:
        problem = f"role {role.name} can't read {list_some((owned.label for owned in unreadable), NAMED_MAX)}"
        statements = list(role.grant_membership("pg_read_all_data"))
        if connection.execute(READS_BY_GRANTS_QUERY).fetchone() == (True,):
            # An administrator has decided that the role does not need to read everything.
            instead = (
                f"role {role.name} reads tables through individual grants; to let it read all current and future"
                " tables instead"
            )
            yield NodeProblem(node.id, problem, f"{instead}: {' '.join(statements)}")
            statements = list(_grant_reading(unreadable, role))
        for statement in statements:
            yield NodeProblem(node.id, problem, statement, role.place)
    if hidden:
        problem = f"row-level security hides rows of {list_some(hidden, NAMED_MAX)} from role {role.name}"
        yield NodeProblem(node.id, problem, f"ALTER ROLE {role.quoted} BYPASSRLS;", role.place)


def _grant_reading(unreadable: Sequence[_Unreadable], role: Role) -> Iterator[str]:
    """Yield the statements that let our role read the relations: a few by name, many by granting a whole schema."""
    if closed := dict.fromkeys(quote(owned.schema) for owned in unreadable if not owned.is_open):
        yield f"GRANT USAGE ON SCHEMA {', '.join(closed)} TO {role.quoted};"
    for kind, is_sequence in (("TABLE", False), ("SEQUENCE", True)):
        names: dict[str, list[str]] = {}
        for owned in unreadable:
            if owned.is_sequence == is_sequence:
                names.setdefault(quote(owned.schema), []).append(f"{quote(owned.schema)}.{quote(owned.name)}")
        if few := [name for some in names.values() if len(some) <= NAMED_MAX for name in some]:
            yield f"GRANT SELECT ON {kind} {', '.join(few)} TO {role.quoted};"
        if many := [schema for schema, some in names.items() if len(some) > NAMED_MAX]:
            yield f"GRANT SELECT ON ALL {kind}S IN SCHEMA {', '.join(many)} TO {role.quoted};"


def _find_publishing(
    node: Node,
    role: Role,
    connection: psycopg.Connection[Any],
    publications: list[str],
    tables: Sequence[tuple[Any, ...]],
) -> Iterator[NodeProblem]:
    owners = dict(connection.execute(PUBLICATIONS_QUERY, (publications,)).fetchall())
    (may_create,) = connection.execute(MAY_CREATE_QUERY).fetchone() or (False,)
    if not (may_create or owners):
        statement = f"GRANT CREATE ON DATABASE {quote(role.place.database)} TO {role.quoted};"
        yield NodeProblem(node.id, f"role {role.name} can't create publications", statement, role.place)
    purpose = Purpose.NEW_TABLES if all(row[5] for row in tables) else Purpose.EVERYTHING
    for name, is_owned in owners.items():
        if not is_owned:
            problem = f"role {role.name} does not own publication {name}"
            statement = f"ALTER PUBLICATION {quote(name)} OWNER TO {role.quoted};"
            yield NodeProblem(node.id, problem, statement, role.place, purpose)
    for is_published in (False, True):
        for owned in _group_by_owner([row for row in tables if not row[2] and row[5] == is_published]):
            purpose = Purpose.NEW_TABLES if is_published else Purpose.EVERYTHING
            problem = (
                f"role {role.name} can't publish tables owned by {owned.owner}: {list_some(owned.names, NAMED_MAX)};"
                " a superuser can, with: snapshot init"
            )
            if owned.is_super:
                action = (
                    f"membership in {owned.owner} would make {role.name} a superuser: give"
                    f" {list_some(owned.names, NAMED_MAX)} a different owner, or let a superuser run: snapshot init"
                )
                yield NodeProblem(node.id, problem, action, purpose=purpose)
                continue
            for statement in role.grant_membership(owned.owner):
                yield NodeProblem(node.id, problem, statement, role.place, purpose)


def _group_by_owner(tables: Iterable[tuple[Any, ...]]) -> list[_Owned]:
    names: dict[tuple[str, bool], list[str]] = {}
    for name, _, _, owner, is_super, _ in tables:
        names.setdefault((owner, is_super), []).append(name)
    return [_Owned(owner, is_super, tuple(some)) for (owner, is_super), some in names.items()]
