"""Where a restore goes: the target of every shard, what keeps its server from it, and the sessions that lock it.

A superuser's session creates the roles that the snapshot names and the extensions, in databases that are empty: nothing
of the source has run there, and no session of a superuser enters a database from then on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import SAME_TARGET, list_some
from cutline.fleet.own_process import own_label
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.connections import (
    MAINTENANCE_DATABASE,
    connect,
    connect_with_path,
    database_name,
    disrupted_error,
    raising_unreachable,
    shut_down,
    unreachable_error,
    with_database,
)
from cutline.nodes.encodings import RAW, raw_bytes
from cutline.nodes.groups import Group
from cutline.nodes.lock import take_lock
from cutline.nodes.other_databases import ASIDE, LOADING, name_beside
from cutline.nodes.problems import GRANT, comment, quote, raising_unfit, read_role
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.nodes.sessions import in_parallel
from cutline.nodes.table_state import TableState
from cutline.nodes.watch import Watch
from cutline.restore.ddl.ddl import Ddl, shorten_statement
from cutline.restore.ddl.running import reset_settings
from cutline.restore.ddl.unprivileged import CREATES
from cutline.restore.scope.scope import choose_nodes
from cutline.restore.targets.obstacles import Obstacles, TargetLacksError
from cutline.restore.targets.requirements import WITHOUT
from cutline.snapshots.ddl.database_facts import DEFAULT
from cutline.snapshots.operations.operation import new_operation
from cutline.storage.errors import RefusedError, UsageError

LOCK_NAME = "restore"
# The sessions in the maintenance databases that hold the targets' locks, by shard.
Connections = Mapping[str, psycopg.Connection[Any]]

START_QUERY = "SELECT pg_postmaster_start_time()::text"
SYSTEM_QUERY = "SELECT system_identifier::text FROM pg_control_system()"
# The sessions that have to end before a database is renamed. Those without a user are autovacuum's: only superusers may
# end them, and PostgreSQL itself ends them where it has to.
SESSIONS = """
  FROM pg_stat_activity a WHERE a.datname = %s
   AND (a.usesysid IS NOT NULL OR (SELECT u.rolsuper FROM pg_roles u WHERE u.rolname = current_user))
"""


class TargetUnfitError(RefusedError):
    """The snapshot can't be restored to a target node."""


class TargetExistsError(RefusedError):
    """The database to restore exists already on a target node."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one shard is restored to: `database` is its real name, `loading` its name until the swap.

    `aside` is the name that an existing database gets. If the targets are not the snapshot's shards, `shard` is the
    target's own id, and `sources` are the shards whose rows it gets; otherwise these are empty.
    """

    shard: str
    node: Node
    database: str
    loading: str
    aside: str
    backups: tuple[Node, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The shard whose DDL and settings the database gets."""
        return self.sources[0] if self.sources else self.shard

    def named(self, suffix: str) -> Target:
        """The target with the names that the operation with this suffix gives."""
        return target_of(self.shard, self.node, self.backups, suffix)

    @property
    def maintenance(self) -> Node:
        """The maintenance database of the same server: others are created and renamed from there."""
        return with_database(self.node, MAINTENANCE_DATABASE)

    @property
    def loaded(self) -> Node:
        """The database being restored, under its name until the swap."""
        return with_database(self.node, self.loading)


def target_of(shard: str, node: Node, backups: tuple[Node, ...], operation: str) -> Target:
    """A shard's target for one operation; raise UsageError for a database that can't be restored into."""
    database = database_name(node.dsn)
    if database in (MAINTENANCE_DATABASE, "template0", "template1"):
        raise UsageError(
            f"node {node.id}: its dsn names database {database}, which can't be restored into",
            hint="name the database to restore in the node's dsn",
        )
    loading, aside = (name_beside(database, middle, suffix_of(operation)) for middle in (LOADING, ASIDE))
    return Target(shard, node, database, loading, aside, backups)


def find_targets(fleet: Fleet, ids: list[str], operation: str) -> tuple[Target, ...]:
    """The targets with these ids that the fleet has."""
    primaries = {node.id: node for node in fleet.primaries}
    backups = {shard: tuple(node for node in fleet.nodes if node.backup_of == shard) for shard in ids}
    return tuple(target_of(shard, primaries[shard], backups[shard], operation) for shard in ids if shard in primaries)


def provisional_targets(fleet: Fleet, nodes: tuple[str, ...] = ()) -> tuple[Target, ...]:
    """The targets of all primaries, or of `nodes` alone, before it is known which restore they are of.

    Raises UsageError naming a node that is no primary.
    """
    operation = new_operation("restore", "", 0, ()).operation
    chosen = choose_nodes(nodes, [node.id for node in fleet.primaries], str(fleet.path))
    return find_targets(fleet, chosen, operation)


def suffix_of(operation: str) -> str:
    """The part of an operation's id that is in the names of its databases."""
    return operation.rsplit("-", 1)[-1]


@contextmanager
def lock_targets(
    targets: Iterable[Target], obstacles: Obstacles | None = None
) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Yield sessions in the maintenance databases, by shard, that lock out other restores of the same databases.

    Raises NodeUnreachableError naming all nodes that can't be reached, and TargetUnfitError naming those that are one
    database; with `obstacles` these are added there instead, and the block has the sessions that there are. Raises
    FleetBusyError naming the holder of a lock, and TargetUnfitError if our role lacks a privilege in the block. Raises
    NodeUnreachableError naming the node if one of the sessions is lost.
    """
    targets = sorted(targets, key=lambda target: target.node.id)
    unreachable = Obstacles() if obstacles is None else obstacles
    with ExitStack() as stack:
        stack.enter_context(raising_unfit(TargetUnfitError, hint=f"restore as a superuser, or {GRANT}"))
        connections: dict[str, psycopg.Connection[Any]] = {}

        def open_session(target: Target) -> None:
            with unreachable.collecting(target.node.id):
                connections[target.shard] = connect(target.maintenance)

        stack.callback(close_all, connections)
        in_parallel(open_session, targets)
        if obstacles is None:
            unreachable.raise_found()
        reached = [target for target in targets if target.shard in connections]
        with naming_lost_nodes(reached, connections):
            # First: one target's lock would be in the way of the other.
            apart = _find_apart(reached, connections, unreachable)
            if obstacles is None:
                unreachable.raise_found()
            for target in apart:
                lock_target(target, connections[target.shard])
            yield connections


def close_all(connections: Connections) -> None:
    """Close the sessions."""
    for connection in connections.values():
        connection.close()


@contextmanager
def ending_on_silence(watch: Watch, connections: Iterable[psycopg.Connection[Any]]) -> Iterator[None]:
    """While the block runs, shut all these sessions down when a node falls silent or the command is interrupted."""
    with ExitStack() as stack:
        for connection in connections:
            stack.enter_context(watch.on_silence(partial(shut_down, connection)))
        yield


@contextmanager
def naming_lost_nodes(targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> Iterator[None]:
    """Raise NodeUnreachableError naming the node if its session, by shard, is lost in the block."""
    try:
        yield
    except psycopg.OperationalError as error:
        for target in targets:
            if connections[target.shard].broken:
                raise unreachable_error(target.node, error) from error
        raise


def lock_target(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Lock out other restores of the same database while the session lasts; raise FleetBusyError naming the holder."""
    # The lock is per database name: two shards may be restored to two databases of the same server.
    take_lock(target.node, connection, f"{LOCK_NAME} {target.database}", own_label("restore", target.database))


def _find_apart(targets: Iterable[Target], connections: Connections, obstacles: Obstacles) -> list[Target]:
    """The targets that are databases of their own; add those that are the same as one before."""
    apart: dict[str, Target] = {}
    for target in targets:
        first = apart.setdefault(place_of(target, connections[target.shard]), target)
        if first is not target:
            error = TargetUnfitError(
                f"nodes {first.node.id} and {target.node.id} are the same database of one server",
                hint="give every node of the target a database of its own",
            )
            obstacles.add(error, target.node.id)
    return list(apart.values())


def place_of(target: Target, connection: psycopg.Connection[Any]) -> str:
    """What identifies the target's database among all servers."""
    (system,) = connection.execute(SYSTEM_QUERY).fetchone() or ("",)
    return f"{system}/{target.database}"


def start_of(connection: psycopg.Connection[Any]) -> str:
    """When the server was started, to the microsecond."""
    (start,) = connection.execute(START_QUERY).fetchone() or ("",)
    return str(start)


def server_of(connection: psycopg.Connection[Any]) -> str:
    """The server that was reached, as host (or folder of the socket) and port."""
    return f"{connection.info.host}:{connection.info.port}"


def databases(connection: psycopg.Connection[Any]) -> set[str]:
    """The names of the server's databases."""
    return {row[0] for row in connection.execute("SELECT datname FROM pg_database")}


# Scripts of extensions ask for the search_path with which their session began, and may set another one.
SET_PATH = "SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)"

# The comment on roles that a drill has made, and the name of the restoring role, which is drawn.
MARK = re.compile(r"cutline_drill_[0-9a-f]{10}")
# A comment alone could be anybody's: the role is the restoring role, or has it as a member. The restoring role comes
# last.
MARKED_QUERY = f"""
WITH marked AS (
  SELECT oid, rolname, shobj_description(oid, 'pg_authid') AS mark FROM pg_roles
   WHERE shobj_description(oid, 'pg_authid') ~ '^{MARK.pattern}$' AND NOT rolsuper
)
SELECT rolname, mark FROM marked AS one
 WHERE rolname = mark
    OR EXISTS (SELECT FROM pg_auth_members m JOIN marked login ON login.oid = m.member
                WHERE m.roleid = one.oid AND login.rolname = one.mark AND login.mark = one.mark)
 ORDER BY rolname = mark, rolname
"""


def find_marked(connection: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """The roles of the server that superusers' drills have made, each with its drill's mark, the login role last."""
    return [(role, mark) for role, mark in connection.execute(MARKED_QUERY)]


def mark_role(connection: psycopg.Connection[Any], role: str, mark: str) -> None:
    """Record the maker of a role in a comment on it."""
    statement = sql.SQL("COMMENT ON ROLE {} IS {}")
    connection.execute(statement.format(sql.Identifier(role), sql.Literal(mark)))


@dataclass(frozen=True, slots=True)
class Superusers:
    """A superuser's sessions on each target's server, by shard; `role` is the restoring role.

    `extensions` are those that it may create in addition to the trusted ones. `data_directories` are by shard, too,
    None if they are not known: the role may not see where they are. `mark` is a comment on the roles that are made,
    `install` the hint for missing extensions.
    """

    nodes: Mapping[str, Node]
    role: str
    extensions: frozenset[str]
    data_directories: Mapping[str, Path | None]
    mark: str = ""
    install: str = ""

    def node_of(self, target: Target) -> Node:
        """The database being restored, as a superuser enters it: only as long as it is empty."""
        return with_database(self.nodes[target.shard], target.loading)

    def run_beforehand(self, target: Target, ddl: Ddl, *, allows_refused: bool) -> None:
        """Run the statements that the DDL needs in the empty database; raise TargetLacksError if one is refused.

        If it `allows_refused`, an extension may be: the DDL has it, too.
        """
        if not ddl.beforehand:
            return
        node = self.node_of(target)
        with raising_unreachable(node), connect_with_path(node, DEFAULT, client_encoding=RAW) as connection:
            for statement in ddl.beforehand:
                try:
                    connection.execute(SET_PATH)
                    connection.execute(raw_bytes(statement))
                except psycopg.Error as error:
                    if connection.broken:
                        raise
                    if remedy_of(error):
                        raise disrupted_error(
                            target.node.id, error, shorten_statement(statement).rstrip(";")
                        ) from error
                    if allows_refused and statement.startswith(CREATES):
                        continue
                    raise TargetLacksError(
                        f"node {target.node.id}: {shorten_statement(statement)} {shorten_message(error)}",
                        hint=[WITHOUT, "or restore to servers that can create it"],
                        details={"node": target.node.id},
                    ) from error
            reset_settings(connection, node)


NAMED_MAX = 5
FACTS_QUERY = """
SELECT pg_is_in_recovery(), current_setting('server_version_num')::int,
       (SELECT rolsuper OR rolcreatedb FROM pg_roles WHERE rolname = current_user)
"""

OWNER_QUERY = """
SELECT r.rolname, r.rolsuper, pg_has_role(r.oid, 'USAGE')
  FROM pg_database d JOIN pg_roles r ON r.oid = d.datdba WHERE d.datname = %s
"""
# The users of those that our role may not end.
OTHERS_QUERY = f"""
SELECT r.rolname, r.rolsuper {SESSIONS.replace("WHERE", "JOIN pg_roles r ON r.oid = a.usesysid WHERE")}
   AND (r.rolsuper OR NOT (pg_has_role('pg_signal_backend', 'USAGE') OR pg_has_role(r.oid, 'USAGE')))
 ORDER BY 1
"""


def check_target(
    target: Target,
    connection: psycopg.Connection[Any],
    source: NodeIdentity,
    obstacles: Obstacles,
    into_tables: str = "",
    *,
    replace: bool,
    is_resumed: bool,
) -> None:
    """Add what keeps the target from taking the database, of a restore that begins or `is_resumed`.

    `into_tables`: the command that loads the same rows into tables of a database that exists; "" if there is none.
    """
    recovering, version, may_create = connection.execute(FACTS_QUERY).fetchone() or (True, 0, False)
    node = target.node.id
    if recovering:
        error = TargetUnfitError(f"node {node} is a standby", hint="name its primary in the target's fleet.toml")
        obstacles.add(error, node)
    if version // 10000 < source.server_version // 10000:
        what = f"PostgreSQL {version // 10000} is older than the snapshot's {source.server_version // 10000}"
        hint = "restore to servers of the snapshot's version or newer"
        obstacles.add(TargetUnfitError(f"node {node}: {what}", hint=hint), node)
    if not may_create:
        what = f"role {connection.info.user} may not create databases"
        hint = f'ALTER ROLE "{connection.info.user}" CREATEDB;'
        obstacles.add(TargetUnfitError(f"node {node}: {what}", hint=hint), node)
    exists = target.database in databases(connection)
    if exists and replace:
        with obstacles.collecting(node):
            _check_replaceable(target, connection)
    if exists and not replace:
        what = f"node {node}: database {target.database} exists already"
        lines = ["restore to other servers with --to FILE, or put the existing databases aside with --replace"]
        if is_resumed:
            lines = ["it was made while the restore ran, and --replace was not given: rename or drop it, then go on"]
        elif into_tables:
            # --replace would put all of the database aside for some of its tables.
            lines = [
                f"to load the rows into its own tables, which have to be empty: {into_tables}",
                SAME_TARGET,
                "or make a database that has only these rows: on other servers, with --to FILE",
            ]
        obstacles.add(TargetExistsError(what, hint=lines, details={"database": target.database}), node)


def _check_replaceable(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Raise TargetUnfitError unless our role may put the existing database aside, and end the sessions in it."""
    role = read_role(target.node, connection)
    if role.is_super:
        return
    row = connection.execute(OWNER_QUERY, (target.database,)).fetchone()
    owner, is_super, is_owned = row or ("", False, True)
    statements: list[str] = []
    if not is_owned:
        change = f"ALTER DATABASE {quote(target.database)} OWNER TO {role.quoted};"
        statements += [change] if is_super else role.grant_membership(owner)
    others = connection.execute(OTHERS_QUERY, (target.database,)).fetchall()
    if not all(is_super for _, is_super in others):
        statements += role.grant_membership("pg_signal_backend")
    if supers := sorted({name for name, is_super in others if is_super}):
        statements.append(comment(f"end the sessions of {', '.join(supers)}, or restore as a superuser"))
    if statements:
        reasons = [] if is_owned else ["does not own it"]
        reasons += [f"may not end its sessions of {', '.join(sorted({name for name, _ in others}))}"] if others else []
        raise TargetUnfitError(
            f"node {target.node.id}: database {target.database} can't be put aside, because role {role.name}"
            f" {' and '.join(reasons)}",
            hint=statements,
            details={"node": target.node.id, "database": target.database},
        )


def find_xml_columns(groups: Iterable[Group], states: Mapping[str, TableState]) -> list[str]:
    """The groups' columns that contain XML, as `schema.table.column`; `states` are the tables' states by name."""
    names: list[str] = []
    for group in groups:
        numbers = states[group.name].xml_columns if group.name in states else frozenset[int]()
        columns = [column for column in group.columns if column.type in ("xml", "xml[]") or column.number in numbers]
        names += [f"{group.name}.{column.name}" for column in columns]
    return names


def check_xml(target: Target, connection: psycopg.Connection[Any], source: NodeIdentity, columns: list[str]) -> None:
    """Raise TargetUnfitError if there are XML `columns` and the target's server is built without XML support.

    The server that the snapshot was taken from passes: if it is built without XML, these columns hold no values.
    """
    (system,) = connection.execute(SYSTEM_QUERY).fetchone() or ("",)
    try:
        if columns and system != source.system_identifier:
            connection.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported as error:
        raise TargetUnfitError(
            f"node {target.node.id}: its PostgreSQL is built without XML support, but the snapshot has XML in"
            f" {list_some(columns, NAMED_MAX)}",
            hint="restore to a server that is built with libxml, or restore only other tables: --group PATTERN",
            details={"node": target.node.id, "columns": columns},
        ) from error
