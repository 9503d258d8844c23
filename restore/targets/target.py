"""The target of every shard, the obstacles on its server, and the sessions that lock it.

In a drill, a superuser creates roles and extensions while the databases are still empty, so none of the source's code
can run in the superuser's session. Afterwards no superuser connects to a database.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import SAME_TARGET, list_some
from cutline.fleet.own_process import own_label
from cutline.nodes.baseline import FleetTopologyError, NodeIdentity
from cutline.nodes.connections import (
    MAINTENANCE_DATABASE,
    connect,
    connect_with_path,
    database_name,
    disrupted_error,
    is_pooled,
    on_each_host,
    raising_unreachable,
    unreachable_error,
    with_database,
)
from cutline.nodes.encodings import RAW, can_name_database, database_of, encoding_of, raw_bytes
from cutline.nodes.groups import Group
from cutline.nodes.lock import take_lock
from cutline.nodes.open_sessions import shut_down
from cutline.nodes.other_databases import ASIDE, LOADING, name_beside
from cutline.nodes.problems import GRANT, comment, quote, raising_unfit, read_role
from cutline.nodes.roles import with_exchanged
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.nodes.sessions import ask_current_roles, in_parallel
from cutline.nodes.table_state import TableState
from cutline.nodes.watch import Watch
from cutline.restore.ddl.ddl import Ddl, shorten_statement
from cutline.restore.ddl.running import reset_settings
from cutline.restore.ddl.unprivileged import CREATES
from cutline.restore.scope.scope import choose_nodes
from cutline.restore.targets.obstacles import Obstacles, TargetLacksError
from cutline.restore.targets.requirements import WITHOUT, find_lacking_tablespaces
from cutline.restore.targets.tablespaces import create_tablespaces, grant_tablespaces
from cutline.snapshots.ddl.database_facts import DEFAULT
from cutline.snapshots.operations.operation import new_operation
from cutline.storage.errors import RefusedError, SnapshotError, UsageError

LOCK_NAME = "restore"
DEFAULT_PORT = "5432"
# The sessions in the maintenance databases that hold the targets' locks, keyed by shard.
Connections = Mapping[str, psycopg.Connection[Any]]

START_QUERY = "SELECT pg_postmaster_start_time()::text"
OID_QUERY = "SELECT oid FROM pg_database WHERE datname = %s"
OWN_OID_QUERY = "SELECT oid FROM pg_database WHERE datname = current_database()"
SYSTEM_QUERY = "SELECT system_identifier::text FROM pg_control_system()"
# The sessions that must end before a database is renamed. Sessions without a user belong to autovacuum: only superusers
# may end them, and PostgreSQL ends them itself if necessary.
SESSIONS = """
  FROM pg_stat_activity a WHERE a.datname = %s
   AND (a.usesysid IS NOT NULL OR (SELECT u.rolsuper FROM pg_roles u WHERE u.rolname = current_user))
"""


class TargetUnfitError(RefusedError):
    """The snapshot can't be restored to a target node."""


class TargetExistsError(RefusedError):
    """The database to restore already exists on a target node."""


class Target(Struct, frozen=True):
    """One shard's target: `database` is the database's real name, and `loading` is its name until the swap.

    `aside` is the new name for an existing database. If the targets are not the snapshot's shards, `shard` is the
    target's own id, and `sources` are the shards whose rows it gets; otherwise `sources` is empty.
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
        """Return the target with the database names of the operation whose id has this suffix."""
        return target_of(self.shard, self.node, self.backups, suffix)

    @property
    def maintenance(self) -> Node:
        """The maintenance database on the same server, used to create and rename other databases."""
        return with_database(self.node, MAINTENANCE_DATABASE)

    @property
    def loaded(self) -> Node:
        """The database being restored, under the name that it has until the swap."""
        return with_database(self.node, self.loading)


def target_of(shard: str, node: Node, backups: tuple[Node, ...], operation: str) -> Target:
    """Return a shard's target for one operation; raise UsageError if the database can't be a target."""
    database = database_name(node.dsn)
    if database in (MAINTENANCE_DATABASE, "template0", "template1"):
        raise UsageError(
            f"node {node.id}: its dsn names database {database}, which can't be the target of a restore",
            hint="name the database to restore in the node's dsn",
        )
    loading, aside = (name_beside(database, middle, suffix_of(operation)) for middle in (LOADING, ASIDE))
    return Target(shard, node, database, loading, aside, backups)


def find_targets(fleet: Fleet, ids: list[str], operation: str) -> tuple[Target, ...]:
    """Return targets for those ids that exist in the fleet."""
    primaries = {node.id: node for node in fleet.primaries}
    backups = {shard: tuple(node for node in fleet.nodes if node.backup_of == shard) for shard in ids}
    return tuple(target_of(shard, primaries[shard], backups[shard], operation) for shard in ids if shard in primaries)


def provisional_targets(fleet: Fleet, nodes: tuple[str, ...]) -> tuple[Target, ...]:
    """Return targets for all primaries, or only for `nodes`.

    Used before it is known which restore the targets belong to. Raises UsageError naming a node that is not a primary.
    """
    operation = new_operation("restore", "", 0, ()).operation
    chosen = choose_nodes(nodes, [node.id for node in fleet.primaries], str(fleet.path))
    return find_targets(fleet, chosen, operation)


def with_current_servers(fleet: Fleet, nodes: Iterable[str] = ()) -> Fleet:
    """Return the fleet with promoted standbys in their primaries' places, whether or not the databases exist.

    Only the shards in `nodes` are asked; all, if there are none or the fleet knows one of them by another id. If no
    server of a shard is known to accept writes, its servers stay as they are listed.

    Raises FleetTopologyError if two servers of a shard accept writes.
    """
    shards, chosen = {node.id for node in fleet.primaries}, set(nodes)
    asked = tuple(with_database(node, MAINTENANCE_DATABASE) for node in fleet.nodes)

    def ask(shard: str) -> dict[str, str]:
        try:
            return ask_current_roles(replace(fleet, nodes=tuple(node for node in asked if node.shard == shard)))
        except FleetTopologyError:
            raise
        except SnapshotError:
            # The restore connects to the server as well, and then names all obstacles together.
            return {}

    answers = in_parallel(ask, sorted(chosen if chosen and chosen <= shards else shards))
    return with_exchanged(fleet, {primary: standby for answer in answers for primary, standby in answer.items()})


def suffix_of(operation: str) -> str:
    """Return the part of an operation's id that appears in its databases' names."""
    return operation.rsplit("-", 1)[-1]


@contextmanager
def lock_targets(
    targets: Iterable[Target], obstacles: Obstacles | None = None
) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Yield sessions in the maintenance databases, keyed by shard, which lock out other restores of the same databases.

    Raises NodeUnreachableError naming all unreachable nodes, and TargetUnfitError naming nodes that are the same
    database, or whose dsn has an alias of a pooler. If `obstacles` is given, these errors are added there instead, and
    the remaining sessions are yielded. Raises FleetBusyError naming the holder of a lock, TargetUnfitError if our role
    lacks a privilege in the block, and NodeUnreachableError naming the node if a session is lost.
    """
    targets = sorted(targets, key=lambda target: target.node.id)
    unreachable = Obstacles() if obstacles is None else obstacles
    with ExitStack() as stack:
        stack.enter_context(raising_unfit(TargetUnfitError, hint=f"restore as a superuser, or {GRANT}"))
        connections: dict[str, psycopg.Connection[Any]] = {}

        def open_session(target: Target) -> None:
            with unreachable.collecting(target.node.id):
                session = connect(target.maintenance)
                try:
                    _check_alias(target, session)
                except BaseException:
                    session.close()
                    raise
                connections[target.shard] = session

        stack.callback(close_all, connections)
        in_parallel(open_session, targets)
        if obstacles is None:
            unreachable.raise_found()
        reached = [target for target in targets if target.shard in connections]
        with naming_lost_nodes(reached, connections):
            # Find duplicates before locking, because one target's lock would block the other's.
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
    """Shut down all these sessions if a node stops answering or the command is interrupted while the block runs."""
    with ExitStack() as stack:
        for connection in connections:
            stack.enter_context(watch.on_silence(partial(shut_down, connection)))
        yield


@contextmanager
def naming_lost_nodes(targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> Iterator[None]:
    """Raise NodeUnreachableError naming the node if its session is lost in the block."""
    try:
        yield
    except psycopg.OperationalError as error:
        for target in targets:
            if connections[target.shard].broken:
                raise unreachable_error(target.node, error) from error
        raise


def lock_target(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Lock out other restores of the same database while the session lasts; raise FleetBusyError naming the holder."""
    # Lock by database name, because two shards may be restored to two databases on the same server.
    take_lock(target.node, connection, f"{LOCK_NAME} {target.database}", own_label("restore", target.database))


def _find_apart(targets: Iterable[Target], connections: Connections, obstacles: Obstacles) -> list[Target]:
    """Return the targets with distinct databases; add an obstacle for each target whose database is taken."""
    apart: dict[str, Target] = {}
    for target in targets:
        first = apart.setdefault(place_of(target, connections[target.shard]), target)
        if first is not target:
            error = TargetUnfitError(
                f"nodes {first.node.id} and {target.node.id} refer to the same database on the same server",
                hint="give each node of the target its own database",
            )
            obstacles.add(error, target.node.id)
    return list(apart.values())


def _check_alias(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Raise TargetUnfitError if a pooler leads sessions to another database than that of the target's name.

    The restore would create one of this name on the server, and the pooler's clients would not see it.
    """
    if not is_pooled(connection):
        return
    try:
        # While the session is open, the database keeps its name.
        with connect(target.node) as session:
            own, name = session.execute(OWN_OID_QUERY).fetchone(), database_of(session)
            is_alias = own != connection.execute(OID_QUERY, (target.database,)).fetchone()
    except (psycopg.Error, SnapshotError):
        # Usually, there is no database of this name yet.
        return
    if is_alias:
        raise TargetUnfitError(
            f"node {target.node.id}: its dsn names database {target.database}, but sessions come to database {name}: a"
            " pooler has it under another name",
            hint="point the dsn at the server itself, and let dbname be the name that the database has there",
            details={"node": target.node.id, "database": target.database},
        )


def place_of(target: Target, connection: psycopg.Connection[Any]) -> str:
    """Return a name that identifies the target's database across all servers."""
    (system,) = connection.execute(SYSTEM_QUERY).fetchone() or ("",)
    return f"{system}/{target.database}"


def start_of(connection: psycopg.Connection[Any]) -> str:
    """Return the server's start time, to the microsecond."""
    (start,) = connection.execute(START_QUERY).fetchone() or ("",)
    return str(start)


def server_of(connection: psycopg.Connection[Any]) -> str:
    """Return the connected server as host (or socket folder) and port."""
    return f"{connection.info.host}:{connection.info.port}"


def addresses_of(node: Node) -> list[str]:
    """Return the servers that the dsn names, in the form of server_of."""
    named = [conninfo_to_dict(host.dsn) for host in on_each_host(node)]
    return [f"{one.get('host') or one.get('hostaddr') or ''}:{one.get('port') or DEFAULT_PORT}" for one in named]


def databases(connection: psycopg.Connection[Any]) -> set[str]:
    """Return the names of the databases on the server."""
    return {row[0] for row in connection.execute("SELECT datname FROM pg_database")}


# Extension scripts read the session's initial search_path, and may change the search_path.
SET_PATH = "SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)"

# The comment on a drill's roles, which is also the random name of its restoring role.
MARK = re.compile(r"cutline_drill_[0-9a-f]{10}")
# A comment alone proves nothing, because anyone may write it: the role must be the restoring role or have it as a
# member. The restoring role comes last.
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
    """Return the roles that drills created as superusers, with the drill's mark; the login role comes last."""
    return [(role, mark) for role, mark in connection.execute(MARKED_QUERY)]


def mark_role(connection: psycopg.Connection[Any], role: str, mark: str) -> None:
    """Record, in a comment on a role, the drill that created it."""
    statement = sql.SQL("COMMENT ON ROLE {} IS {}")
    connection.execute(statement.format(sql.Identifier(role), sql.Literal(mark)))


class Superusers(Struct, frozen=True):
    """Superuser connections to each target's server, keyed by shard; `role` is the restoring role.

    `extensions` may be created in addition to trusted extensions. `data_directories`, keyed by shard, are needed
    because the restoring role may not see them (None if unknown). `mark` is the comment on the created roles, and
    `install` is the hint for missing extensions. With `creates_tablespaces` the servers are temporary and get the
    snapshot's tablespaces.
    """

    nodes: Mapping[str, Node]
    role: str
    extensions: frozenset[str]
    data_directories: Mapping[str, Path | None]
    mark: str = ""
    install: str = ""
    creates_tablespaces: bool = False

    def node_of(self, target: Target) -> Node:
        """Return the database being restored, for a superuser's connection; use it only while the database is empty."""
        return with_database(self.nodes[target.shard], target.loading)

    def prepare_tablespaces(self, target: Target, needed: set[str]) -> None:
        """Let the restoring role use the tablespaces (raw text); create them first if the server is temporary."""
        if needed:
            superuser = with_database(self.nodes[target.shard], MAINTENANCE_DATABASE)
            if self.creates_tablespaces and (lacking := find_lacking_tablespaces(superuser, needed)):
                create_tablespaces(superuser, lacking)
            grant_tablespaces(superuser, needed, self.role)

    def run_beforehand(self, target: Target, ddl: Ddl, *, allows_refused: bool) -> None:
        """Run the DDL's superuser statements in the empty database; raise TargetLacksError if one is refused.

        With `allows_refused`, skip refused extensions; the DDL contains them too and reports the refusal.
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
                        hint=[WITHOUT, "or restore to servers that can run the statement"],
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
# The users of the sessions that our role may not end.
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
    is_partial: bool,
    is_resumed: bool,
) -> None:
    """Add the obstacles to creating the database on the target, for a new restore or one that `is_resumed`.

    `into_tables`: the command that loads the same rows into existing tables; "" if no command can do that. `is_partial`
    is set if only some tables get rows: then --replace is refused.
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
    encodings = {"it": source.encoding, f"the server's database {MAINTENANCE_DATABASE}": encoding_of(connection)}
    for what, encoding in encodings.items():
        if not can_name_database(target.database, encoding):
            error = TargetUnfitError(
                f"node {node}: database {target.database} can't be restored under this name: {what} has encoding"
                f" {encoding}, and only UTF8 and SQL_ASCII allow characters other than ASCII in it",
                hint="name the database in ASCII in the target's fleet file; it can be renamed after the restore:"
                " ALTER DATABASE … RENAME TO …",
                details={"node": node, "database": target.database},
            )
            obstacles.add(error, node)
    exists = target.database in databases(connection)
    if exists and replace:
        with obstacles.collecting(node):
            _check_replaceable(target, connection)
    if exists and not replace:
        what = f"node {node}: database {target.database} already exists"
        lines = [
            "restore to other servers with --to FILE"
            + ("" if is_partial else ", or set the existing databases aside with --replace")
        ]
        if is_resumed:
            lines = [
                "it was created during the restore, which runs without --replace: rename or drop it, then resume"
                " the restore"
            ]
        elif into_tables:
            # Don't suggest --replace, which would set the whole database aside just to restore some of its tables.
            lines = [
                f"to load the rows into its existing tables, which must be empty: {into_tables}",
                SAME_TARGET,
                "or create a database with only these rows on other servers: --to FILE",
            ]
        obstacles.add(TargetExistsError(what, hint=lines, details={"database": target.database}), node)


def _check_replaceable(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Raise TargetUnfitError unless our role may set the existing database aside and end the sessions in it."""
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
        if others:
            roles = ", ".join(sorted({name for name, _ in others}))
            reasons.append(f"may not terminate the sessions of {roles} in it")
        raise TargetUnfitError(
            f"node {target.node.id}: database {target.database} can't be set aside, because role {role.name}"
            f" {' and '.join(reasons)}",
            hint=statements,
            details={"node": target.node.id, "database": target.database},
        )


def find_xml_columns(groups: Iterable[Group], states: Mapping[str, TableState]) -> list[str]:
    """Find the groups' columns that contain XML, as `schema.table.column`; `states` are keyed by table name."""
    names: list[str] = []
    for group in groups:
        numbers = states[group.name].xml_columns if group.name in states else frozenset[int]()
        columns = [column for column in group.columns if column.type in ("xml", "xml[]") or column.number in numbers]
        names += [f"{group.name}.{column.name}" for column in columns]
    return names


def check_xml(target: Target, connection: psycopg.Connection[Any], source: NodeIdentity, columns: list[str]) -> None:
    """Raise TargetUnfitError if there are XML `columns` and the target's server is built without XML support.

    The snapshot's own server always passes: if it is built without XML, these columns contain no values.
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
