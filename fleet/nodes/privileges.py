"""The privileges that our role needs on a server, and the statements that grant them.

docs/roles.md lists them; that the two agree is tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import MAINTENANCE_DATABASE, connect, database_name, with_database
from cutline.fleet.nodes.problems import NodeProblem, Place, Purpose
from cutline.storage.errors import SnapshotError

# A grant to a role that does not inherit has no effect unless it says so, which it can since this version.
INHERIT_OPTION_VERSION = 160000
STANDBY_SNAPSHOT_VERSION = 160000
# A server that has just answered with a refusal answers again at once.
CONNECT_SECONDS_MAX = "2"
ROLE_QUERY = """
SELECT rolname, rolsuper, rolreplication, rolinherit, rolcreaterole,
       pg_has_role('pg_read_all_stats', 'USAGE'), current_database(), current_setting('server_version_num')::int
  FROM pg_roles WHERE rolname = current_user
"""
# The functions that Cutline's statements call, and those behind the views that they read. PostgreSQL grants all but
# pg_log_standby_snapshot() to everybody, but an administrator may have revoked that.
FUNCTIONS = (
    "pg_advisory_unlock", "pg_backend_pid", "pg_blocking_pids", "pg_collation_actual_version", "pg_control_checkpoint",
    "pg_control_recovery",
    "pg_control_system",
    "pg_current_snapshot", "pg_current_wal_flush_lsn", "pg_current_wal_insert_lsn", "pg_current_wal_lsn",
    "pg_current_xact_id", "pg_database_collation_actual_version",
    "pg_database_size", "pg_drop_replication_slot", "pg_encoding_to_char", "pg_get_userbyid",
    "pg_get_wal_replay_pause_state",
    "pg_has_role",
    "pg_is_in_recovery", "pg_last_wal_replay_lsn", "pg_last_xact_replay_timestamp",
    "pg_logical_emit_message", "pg_logical_slot_peek_binary_changes",
    "pg_partition_root", "pg_postmaster_start_time", "pg_relation_filenode", "pg_relation_size",
    "pg_replication_slot_advance", "pg_sequence_last_value", "pg_snapshot_xmax", "pg_stat_clear_snapshot",
    "pg_stat_get_db_stat_reset_time",
    "pg_stat_get_tuples_deleted", "pg_stat_get_tuples_updated", "pg_tablespace_location",
    "pg_terminate_backend", "pg_try_advisory_lock",
    "pg_wal_lsn_diff", "pg_walfile_name", "pg_xact_status",
    "pg_get_replication_slots", "pg_lock_status", "pg_prepared_xact", "pg_stat_get_activity",
    "pg_stat_get_wal_receiver", "pg_stat_get_wal_senders",
)  # fmt: skip
# Making a slot on a standby waits for its primary to log its running transactions.
STANDBY_FUNCTIONS = ("pg_log_standby_snapshot",)
LARGE_OBJECT_FUNCTIONS = ("lo_get",)
FUNCTIONS_QUERY = """
SELECT p.oid::regprocedure::text FROM pg_proc p
 WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname = ANY (%s)
   AND NOT has_function_privilege(p.oid, 'EXECUTE')
 ORDER BY 1
"""
CATALOGS_QUERY = """
SELECT c.relname FROM pg_class c
 WHERE c.relnamespace = 'pg_catalog'::regnamespace AND c.relname = ANY (%s) AND NOT has_table_privilege(c.oid, 'SELECT')
 ORDER BY 1
"""
CONNECT_QUERY = "SELECT has_database_privilege(oid, 'CONNECT') FROM pg_database WHERE datname = %s"


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a node's sessions, its attributes, and where statements about it are run."""

    name: str
    is_super: bool
    may_replicate: bool
    inherits: bool
    may_create_roles: bool
    sees_statistics: bool
    place: Place
    version: int

    @property
    def quoted(self) -> str:
        """The name for SQL."""
        return quote(self.name)

    def grant_membership(self, of: str) -> Iterator[str]:
        """The statements that give our role the privileges of role `of`."""
        option = " WITH INHERIT TRUE" if not self.inherits and self.version >= INHERIT_OPTION_VERSION else ""
        yield f"GRANT {quote(of)} TO {self.quoted}{option};"
        if not self.inherits and not option:
            yield f"ALTER ROLE {self.quoted} INHERIT;"


def quote(name: str) -> str:
    """The name as a quoted identifier."""
    return sql.Identifier(name).as_string()


def read_role(node: Node, connection: psycopg.Connection[Any]) -> Role:
    """The role of the session."""
    row = connection.execute(ROLE_QUERY).fetchone()
    if row is None:
        raise RuntimeError("pg_roles has no row for the current role")
    *attributes, database, version = row
    values: list[Any] = [*attributes, Place(node.shard, database), version]
    return Role(*values)


def find_role_problems(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    """The privileges that our role lacks on the server, whatever the database holds."""
    role = read_role(node, connection)
    yield from find_decoding_problems(node, role)
    if not (role.is_super or role.sees_statistics):
        for statement in role.grant_membership("pg_read_all_stats"):
            yield NodeProblem(node.id, f"role {role.name} may not see other sessions", statement, role.place)
    yield from find_function_problems(node, connection, FUNCTIONS)


def find_decoding_problems(node: Node, role: Role) -> Iterator[NodeProblem]:
    """Yield the problem of a role that may not read slots."""
    if not (role.is_super or role.may_replicate):
        statement = f"ALTER ROLE {role.quoted} REPLICATION;"
        yield NodeProblem(node.id, f"role {role.name} may not replicate", statement, role.place)


def find_function_problems(
    node: Node,
    connection: psycopg.Connection[Any],
    functions: tuple[str, ...],
    purpose: Purpose = Purpose.EVERYTHING,
) -> Iterator[NodeProblem]:
    """Yield the problem of each of PostgreSQL's functions, by name, that our role may not call."""
    role = read_role(node, connection)
    for (signature,) in connection.execute(FUNCTIONS_QUERY, (list(functions),)).fetchall():
        yield lacks_function(node.id, role, signature, purpose)


def find_catalog_problems(
    node: Node, connection: psycopg.Connection[Any], catalogs: Iterable[str]
) -> Iterator[NodeProblem]:
    """Yield the problem of each of these catalogs of PostgreSQL, by name, that our role may not read."""
    role = read_role(node, connection)
    for (name,) in connection.execute(CATALOGS_QUERY, (list(catalogs),)).fetchall():
        statement = f"GRANT SELECT ON pg_catalog.{name} TO {role.quoted};"
        yield NodeProblem(node.id, f"role {role.name} may not read {name}", statement, role.place)


def lacks_function(node: str, role: Role, signature: str, purpose: Purpose = Purpose.EVERYTHING) -> NodeProblem:
    """The problem of a role that may not call a function of PostgreSQL."""
    why = ", which slots on standbys need" if signature.startswith(STANDBY_FUNCTIONS) else ""
    statement = f"GRANT EXECUTE ON FUNCTION pg_catalog.{signature} TO {role.quoted};"
    return NodeProblem(node, f"role {role.name} may not call {signature}{why}", statement, role.place, purpose)


def find_connect_problems(node: Node) -> Iterator[NodeProblem]:
    """Yield the problem of a role that may not connect to the node's database although it can reach the server."""
    database = database_name(node.dsn)
    try:
        with connect(with_database(node, MAINTENANCE_DATABASE), connect_timeout=CONNECT_SECONDS_MAX) as connection:
            role = read_role(node, connection)
            may_connect = connection.execute(CONNECT_QUERY, (database,)).fetchone()
    except (psycopg.Error, SnapshotError):
        return
    if may_connect == (False,):
        statement = f"GRANT CONNECT ON DATABASE {quote(database)} TO {role.quoted};"
        yield NodeProblem(node.id, f"role {role.name} may not connect to database {database}", statement, role.place)
