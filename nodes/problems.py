"""Problems with nodes, all reported at once: wrong settings, and privileges that our role lacks.

docs/roles.md lists the same privileges; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import Node
from cutline.fleet.messages import NODES_NAMED_MAX, list_some, name_nodes
from cutline.nodes.connections import MAINTENANCE_DATABASE, connect, database_name, with_database
from cutline.nodes.server_errors import shorten_message
from cutline.storage.errors import RefusedError, SnapshotError

# Hints for a server's "permission denied". `init` can't list privileges if only the server can tell that they are
# missing.
GRANT = "grant the role the privilege that the message names: docs/roles.md"
RUN_INIT = f"run: snapshot init   it prints the missing grants; if it prints none, {GRANT}"


class NodeUnfitError(RefusedError):
    """A node's settings or our role's privileges do not allow the operation."""


class Place(NamedTuple):
    """Where a statement is run: in a database on a primary. A standby has its primary's roles and privileges."""

    node: str
    database: str


class Purpose(StrEnum):
    """The commands that need a privilege."""

    EVERYTHING = "init and every create"
    NEW_TABLES = "tables created later, and delete of the last snapshot"
    LARGE_OBJECTS = "create --large-objects"
    TERMINAL = "create --terminal and resume"


class NodeProblem(Struct, frozen=True):
    """A setting or privilege that a node lacks, and the remedy: SQL if it has a `place`, else an action.

    A node that `is_away` has a problem that may end by itself, as that of a server that can't be reached.
    """

    node: str
    problem: str
    remedy: str
    place: Place | None = None
    purpose: Purpose = Purpose.EVERYTHING
    is_away: bool = False


def distinct_problems(problems: Iterable[NodeProblem]) -> list[NodeProblem]:
    """Drop problems whose statement repeats that of a problem with a more general purpose."""
    distinct: dict[tuple[object, ...], NodeProblem] = {}
    for node_problem in sorted(problems, key=lambda problem: list(Purpose).index(problem.purpose)):
        distinct.setdefault(
            (
                node_problem.node,
                node_problem.place,
                node_problem.remedy,
                node_problem.problem if node_problem.place is None else "",
            ),
            node_problem,
        )
    return list(distinct.values())


def refuse_unfit(problems: Iterable[NodeProblem], addresses: Mapping[str, str] | None = None) -> None:
    """Raise NodeUnfitError if any problem concerns every command; the message and hint name only such problems.

    With the `addresses` of the primaries, the hint is a script for all of them that also covers other commands' needs.
    """
    problems = distinct_problems(problems)
    if required := [problem for problem in problems if problem.purpose == Purpose.EVERYTHING]:
        raise unfit_error(
            required, [problem for problem in problems if problem.purpose != Purpose.EVERYTHING], addresses
        )


def unfit_error(
    required: Sequence[NodeProblem],
    others: Sequence[NodeProblem] = (),
    addresses: Mapping[str, str] | None = None,
) -> NodeUnfitError:
    """Return the error that lists the required problems, with the remedies.

    Without `addresses`, `others` appear only in the details. A hint with statements can be run unchanged.
    """
    problems = [*required, *others]
    script = script_of(problems if addresses else required, addresses)
    actions = list(dict.fromkeys(problem.remedy for problem in required if problem.place is None))
    if addresses:
        actions += dict.fromkeys(
            f"for {problem.purpose}: {problem.remedy}" for problem in others if problem.place is None
        )
    return NodeUnfitError(
        "; ".join(_texts_of(required)),
        hint=[*(map(comment, actions) if script else actions), *script],
        details={
            "problems": [{"node": problem.node, "problem": problem.problem} for problem in problems],
            "grants": grants_of(problems),
            "actions": actions_of(problems),
        },
    )


@contextmanager
def raising_unfit(kind: type[RefusedError] = NodeUnfitError, *, hint: str) -> Iterator[None]:
    """Raise an error of this `kind` if a server refuses a statement in the block because our role lacks a privilege."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        # The session has added its node as a note (nodes/connections.py).
        node = next(iter(getattr(error, "__notes__", [])), "")
        raise kind(
            f"{node or 'a server'} rejected a statement that the role of the dsn is not allowed to run:"
            f" {shorten_message(error)}",
            hint=hint,
        ) from error


def _texts_of(problems: Iterable[NodeProblem]) -> list[str]:
    nodes: dict[str, dict[str, None]] = {}
    for problem in problems:
        needed = "" if problem.purpose == Purpose.EVERYTHING else f" (only {problem.purpose} need this)"
        nodes.setdefault(f"{problem.problem}{needed}", {})[problem.node] = None
    return [f"{name_nodes(where)}: {text}" for text, where in nodes.items()]


def grants_of(problems: Iterable[NodeProblem]) -> list[dict[str, str]]:
    """Return the statements, each with its place and purpose, for `--json`."""
    rows = dict.fromkeys(
        (problem.place, problem.remedy, problem.purpose) for problem in distinct_problems(problems) if problem.place
    )
    return [
        {"node": place.node, "database": place.database, "statement": statement, "for": purpose}
        for place, statement, purpose in rows
        if place
    ]


def actions_of(problems: Iterable[NodeProblem]) -> list[dict[str, str]]:
    """Return the remedies other than statements, each with its node and purpose, for `--json`."""
    return [
        {"node": problem.node, "action": problem.remedy, "for": problem.purpose}
        for problem in distinct_problems(problems)
        if problem.place is None
    ]


def optional_lines(problems: Sequence[NodeProblem], addresses: Mapping[str, str] | None = None) -> list[str]:
    """Describe privileges that only some commands need, as lines of text: the actions, then the script."""
    nodes: dict[tuple[str, str], dict[str, None]] = {}
    for one in actions_of(problems):
        nodes.setdefault((one["for"], one["action"]), {})[one["node"]] = None
    lines = [
        f"for {purpose}, on {list_some(where, NODES_NAMED_MAX)}: {action}" for (purpose, action), where in nodes.items()
    ]
    script = script_of(problems, addresses)
    if lines or script:
        lines.insert(
            0, "the role of the dsn has the privileges that every create of these tables needs; other tasks need more"
        )
    return [*lines, "to grant what other tasks need, run:", *script] if script else lines


def addresses_of(nodes: Iterable[Node]) -> dict[str, str]:
    """Return a connection string for psql to each primary among the nodes, without a user or password.

    It names the database as the dsn does: a pooler may not know the server's name of it.
    """
    addresses = dict[str, str]()
    for node in nodes:
        if node.backup_of is None:
            given = conninfo_to_dict(node.dsn)
            kept = {name: value for name, value in given.items() if name in ADDRESS_PARAMETERS}
            if "," in str(kept.get("host", "")):
                kept["target_session_attrs"] = "primary"
            addresses[node.id] = make_conninfo("", **kept)
    return addresses


def connect_line(address: str, database: str) -> str:
    """Return the psql command that connects to a database as psql's user, or a comment if psql can't quote it.

    The database is the one that the address names, if it names any, or the maintenance database.
    """
    is_named = "dbname" in conninfo_to_dict(address) and database != MAINTENANCE_DATABASE
    target = address if is_named else make_conninfo(address, dbname=database)
    if '"' in target or not target.isprintable():
        return comment(f"connect to {target}")
    return f'\\connect -reuse-previous=on "{target}"'


def _script_for_psql(problems: Iterable[NodeProblem], addresses: Mapping[str, str]) -> list[str]:
    """List the statements by place and purpose; those for a place follow the command that connects psql to it.

    If some statements are required, all others become comments, so that nobody grants them unnecessarily.
    """
    problems = list(problems)
    is_required = any(problem.purpose == Purpose.EVERYTHING for problem in problems)
    statements: dict[Place, dict[Purpose, dict[str, None]]] = {}
    for one in distinct_problems(problems):
        if one.place:
            statements.setdefault(one.place, {}).setdefault(one.purpose, {})[one.remedy] = None
    lines: list[str] = []
    for place in sorted(statements):
        lines.append(connect_line(addresses.get(place.node, ""), place.database))
        for purpose in Purpose:
            if some := statements[place].get(purpose):
                lines += [comment(f"node {place.node}, database {place.database}; for {purpose}:")]
                is_shown = purpose == Purpose.EVERYTHING or not is_required
                lines += some if is_shown else [comment(statement) for statement in some]
    return [comment("run it all in psql, as a superuser:"), *lines] if lines else []


def script_of(problems: Iterable[NodeProblem], addresses: Mapping[str, str] | None = None) -> list[str]:
    """Write a script for a superuser: the statements by purpose and place, with comments that name both.

    With the `addresses` of the primaries, psql runs the whole script on all of them.
    """
    if addresses:
        return _script_for_psql(problems, addresses)
    places: dict[tuple[Purpose, str], dict[Place, None]] = {}
    for problem in distinct_problems(problems):
        if problem.place:
            places.setdefault((problem.purpose, problem.remedy), {})[problem.place] = None
    statements: dict[tuple[Purpose, tuple[Place, ...]], list[str]] = {}
    for (purpose, statement), found in places.items():
        statements.setdefault((purpose, tuple(found)), []).append(statement)
    lines: list[str] = []
    for purpose in Purpose:
        for (other, found_places), some in statements.items():
            if other == purpose:
                where = "; ".join(f"{node}, database {database}" for node, database in found_places)
                lines += [comment(f"as a superuser on {where}; for {purpose}:"), *some]
    return lines


def comment(text: str) -> str:
    """Format the text as a one-line SQL comment that is safe whatever names it contains."""
    return "-- " + " ".join("".join(c if c.isprintable() else " " for c in text).split())


ADDRESS_PARAMETERS = ("host", "hostaddr", "port", "dbname", "service", "sslmode", "sslrootcert")
# A grant to a NOINHERIT role has no effect without WITH INHERIT TRUE, which was added in this version.
INHERIT_OPTION_VERSION = 160000
STANDBY_SNAPSHOT_VERSION = 160000
# A server that has just refused a connection is expected to answer again quickly.
CONNECT_SECONDS_MAX = "2"
ROLE_QUERY = """
SELECT rolname, rolsuper, rolreplication, rolinherit, rolcreaterole,
       pg_has_role('pg_read_all_stats', 'USAGE'), current_database(), current_setting('server_version_num')::int
  FROM pg_roles WHERE rolname = current_user
"""
# The functions that Cutline's statements call, and the functions behind the views that they read. PostgreSQL grants
# them to everybody, but an administrator may have revoked that.
FUNCTIONS = (
    "pg_advisory_unlock",
    "pg_backend_pid",
    "pg_blocking_pids",
    "pg_collation_actual_version",
    "pg_control_checkpoint",
    "pg_control_recovery",
    "pg_control_system",
    "pg_copy_logical_replication_slot",
    "pg_current_snapshot",
    "pg_current_wal_flush_lsn",
    "pg_current_wal_insert_lsn",
    "pg_current_wal_lsn",
    "pg_current_xact_id",
    "pg_database_collation_actual_version",
    "pg_database_size",
    "pg_drop_replication_slot",
    "pg_encoding_to_char",
    "pg_export_snapshot",
    "pg_get_constraintdef",
    "pg_get_expr",
    "pg_get_function_sqlbody",
    "pg_get_userbyid",
    "pg_get_wal_replay_pause_state",
    "pg_has_role",
    "pg_is_in_recovery",
    "pg_last_wal_replay_lsn",
    "pg_last_xact_replay_timestamp",
    "pg_logical_emit_message",
    "pg_logical_slot_get_binary_changes",
    "pg_logical_slot_peek_binary_changes",
    "pg_partition_ancestors",
    "pg_partition_root",
    "pg_postmaster_start_time",
    "pg_relation_filenode",
    "pg_relation_filepath",
    "pg_relation_size",
    "pg_replication_slot_advance",
    "pg_sequence_last_value",
    "pg_snapshot_xmax",
    "pg_stat_clear_snapshot",
    "pg_stat_get_db_stat_reset_time",
    "pg_stat_get_tuples_deleted",
    "pg_stat_get_tuples_updated",
    "pg_tablespace_location",
    "pg_terminate_backend",
    "pg_try_advisory_lock",
    "pg_wal_lsn_diff",
    "pg_walfile_name",
    "pg_xact_status",
    "pg_get_replication_slots",
    "pg_lock_status",
    "pg_prepared_xact",
    "pg_stat_get_activity",
    "pg_stat_get_wal_receiver",
    "pg_stat_get_wal_senders",
)
# While a slot is being created on a standby, Cutline uses this function to make its primary log the running
# transactions. By default only superusers may call it.
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


class Role(Struct, frozen=True):
    """The role of a node's sessions, its attributes, and the place where statements about it are run."""

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
        """The name, quoted for SQL."""
        return quote(self.name)

    def grant_membership(self, of: str) -> Iterator[str]:
        """Yield the statements that give our role the privileges of role `of`."""
        option = " WITH INHERIT TRUE" if not self.inherits and self.version >= INHERIT_OPTION_VERSION else ""
        yield f"GRANT {quote(of)} TO {self.quoted}{option};"
        if not self.inherits and not option:
            yield f"ALTER ROLE {self.quoted} INHERIT;"


def quote(name: str) -> str:
    """Quote the name as an SQL identifier."""
    return sql.Identifier(name).as_string()


def read_role(node: Node, connection: psycopg.Connection[Any]) -> Role:
    """Read the session's role."""
    row = connection.execute(ROLE_QUERY).fetchone()
    if row is None:
        raise RuntimeError("pg_roles has no row for the current role")
    *attributes, database, version = row
    values: list[Any] = [*attributes, Place(node.shard, database), version]
    return Role(*values)


def find_role_problems(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    """Yield the privileges that our role lacks on the server, independent of the database's contents."""
    role = read_role(node, connection)
    yield from find_decoding_problems(node, role)
    if not (role.is_super or role.sees_statistics):
        for statement in role.grant_membership("pg_read_all_stats"):
            yield NodeProblem(node.id, f"role {role.name} can't see other sessions", statement, role.place)
    yield from find_function_problems(node, connection, FUNCTIONS)


def find_decoding_problems(node: Node, role: Role) -> Iterator[NodeProblem]:
    """Yield a problem if the role may not read slots."""
    if not (role.is_super or role.may_replicate):
        statement = f"ALTER ROLE {role.quoted} REPLICATION;"
        yield NodeProblem(node.id, f"role {role.name} lacks the REPLICATION attribute", statement, role.place)


def find_function_problems(
    node: Node,
    connection: psycopg.Connection[Any],
    functions: tuple[str, ...],
    purpose: Purpose = Purpose.EVERYTHING,
) -> Iterator[NodeProblem]:
    """Yield a problem for each of the built-in `functions` that our role may not call."""
    role = read_role(node, connection)
    for (signature,) in connection.execute(FUNCTIONS_QUERY, (list(functions),)).fetchall():
        yield lacks_function(node.id, role, signature, purpose)


def find_catalog_problems(
    node: Node, connection: psycopg.Connection[Any], catalogs: Iterable[str]
) -> Iterator[NodeProblem]:
    """Yield a problem for each of the system catalogs that our role may not read."""
    role = read_role(node, connection)
    for (name,) in connection.execute(CATALOGS_QUERY, (list(catalogs),)).fetchall():
        statement = f"GRANT SELECT ON pg_catalog.{name} TO {role.quoted};"
        yield NodeProblem(node.id, f"role {role.name} can't read {name}", statement, role.place)


def lacks_function(node: str, role: Role, signature: str, purpose: Purpose = Purpose.EVERYTHING) -> NodeProblem:
    """Return the problem for a role that may not call a built-in function."""
    why = ", which slots on standbys need" if signature.startswith(STANDBY_FUNCTIONS) else ""
    statement = f"GRANT EXECUTE ON FUNCTION pg_catalog.{signature} TO {role.quoted};"
    return NodeProblem(node, f"role {role.name} can't call {signature}{why}", statement, role.place, purpose)


def find_connect_problems(node: Node) -> Iterator[NodeProblem]:
    """Yield a problem if the role can reach the server but may not connect to the node's database."""
    database = database_name(node.dsn)
    try:
        with connect(with_database(node, MAINTENANCE_DATABASE), connect_timeout=CONNECT_SECONDS_MAX) as connection:
            role = read_role(node, connection)
            may_connect = connection.execute(CONNECT_QUERY, (database,)).fetchone()
    except (psycopg.Error, SnapshotError):
        return
    if may_connect == (False,):
        statement = f"GRANT CONNECT ON DATABASE {quote(database)} TO {role.quoted};"
        yield NodeProblem(node.id, f"role {role.name} can't connect to database {database}", statement, role.place)
