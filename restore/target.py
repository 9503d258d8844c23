"""The databases that a restore creates: check the servers, create under a temporary name, swap in at the end.

No restored database has its real name until all nodes are loaded and checked (docs/architecture.md, invariant 6). If
one rename fails, the renames on all nodes are undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from fleet.config import Node
from fleet.label import own_label
from fleet.nodes.baseline import BUILTIN, LIBC, NodeIdentity
from fleet.nodes.connections import connect, database_name, with_database
from fleet.nodes.lock import lock_key, take_lock
from fleet.nodes.sessions import in_parallel
from fleet.tables.groups import Group
from fleet.tables.table_state import TableState
from storage.errors import RefusedError, SnapshotError, UsageError

MAINTENANCE_DATABASE = "postgres"
NAME_BYTES_MAX, NAMED_MAX = 63, 5
LOADING, ASIDE = "_restoring_", "_before_"
LOCK_NAME = "restore"

SYSTEM_QUERY = "SELECT system_identifier::text FROM pg_control_system()"
FACTS_QUERY = """
SELECT pg_is_in_recovery(), current_setting('server_version_num')::int,
       (SELECT rolsuper OR rolcreatedb FROM pg_roles WHERE rolname = current_user),
       (SELECT system_identifier::text FROM pg_control_system())
"""

DATABASE_QUERY = "SELECT oid FROM pg_database WHERE datname = %s"
SLOTS_QUERY = "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline\\_%%' AND datoid = %s"


class TargetUnfitError(RefusedError):
    """The snapshot can't be restored to a target node."""


class TargetExistsError(RefusedError):
    """The database to restore exists already on a target node."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one shard is restored to: `database` is its real name, `loading` its name until the swap.

    `aside` is the name that an existing database gets.
    """

    shard: str
    node: Node
    database: str
    loading: str
    aside: str
    backups: tuple[Node, ...] = ()

    @property
    def maintenance(self) -> Node:
        """The maintenance database of the same server: others are created and renamed from there."""
        return with_database(self.node, MAINTENANCE_DATABASE)

    @property
    def loaded(self) -> Node:
        """The database being restored, under its name until the swap."""
        return with_database(self.node, self.loading)


def target_of(shard: str, node: Node, backups: tuple[Node, ...], operation: str) -> Target:
    """The target of one shard for one operation; raise UsageError for a database that can't be restored into."""
    database = database_name(node.dsn)
    if database in (MAINTENANCE_DATABASE, "template0", "template1"):
        raise UsageError(
            f"node {node.id}: its dsn names database {database}, which can't be restored into",
            hint="name the database to restore in the node's dsn",
        )
    suffix = operation.rsplit("-", 1)[-1]

    def temporary_name(middle: str) -> str:
        room = NAME_BYTES_MAX - len(middle) - len(suffix)
        return f"{database.encode()[:room].decode(errors='ignore')}{middle}{suffix}"

    return Target(shard, node, database, temporary_name(LOADING), temporary_name(ASIDE), backups)


@contextmanager
def lock_targets(targets: Iterable[Target]) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Yield sessions in the maintenance databases, by shard, that lock out other restores of the same databases.

    Raises FleetBusyError naming the holder of a lock.
    """
    with ExitStack() as stack:
        connections: dict[str, psycopg.Connection[Any]] = {}
        for target in sorted(targets, key=lambda one: one.node.id):
            connection = stack.enter_context(connect(target.maintenance))
            # The lock is per database name: two shards may be restored to two databases of one server.
            key = lock_key(f"{LOCK_NAME} {target.database}")
            take_lock(target.node, connection, key, own_label("restore", target.database))
            connections[target.shard] = connection
        yield connections


def check_target(
    target: Target,
    connection: psycopg.Connection[Any],
    source: NodeIdentity,
    *,
    replace: bool,
) -> str:
    """Raise TargetUnfitError or TargetExistsError; return what identifies the database among all servers."""
    row = connection.execute(FACTS_QUERY).fetchone()
    recovering, version, may_create, system = row or (True, 0, False, "")
    node = target.node.id
    if recovering:
        raise TargetUnfitError(f"node {node} is a standby", hint="name its primary in the target's fleet.toml")
    if version // 10000 < source.server_version // 10000:
        raise TargetUnfitError(
            f"node {node}: PostgreSQL {version // 10000} is older than the snapshot's {source.server_version // 10000}",
            hint="restore to servers of the snapshot's version or newer",
        )
    if not may_create:
        raise TargetUnfitError(
            f"node {node}: role {connection.info.user} may not create databases",
            hint=f'ALTER ROLE "{connection.info.user}" CREATEDB;',
        )
    if not replace and target.database in databases(connection):
        raise TargetExistsError(
            f"node {node}: database {target.database} exists already",
            hint="restore to other servers with --to FILE, or put the existing databases aside with --replace",
            details={"node": node, "database": target.database},
        )
    return f"{system}/{target.database}"


def find_xml_columns(groups: Iterable[Group], states: Mapping[str, TableState]) -> list[str]:
    """The groups' columns that contain XML, as `schema.table.column`; `states` are the tables' states by name."""
    names: list[str] = []
    for group in groups:
        numbers = states[group.name].xml_columns if group.name in states else frozenset[int]()
        columns = [one for one in group.columns if one.type in ("xml", "xml[]") or one.number in numbers]
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
        more = f" and {len(columns) - NAMED_MAX} more" if len(columns) > NAMED_MAX else ""
        raise TargetUnfitError(
            f"node {target.node.id}: its PostgreSQL is built without XML support, but the snapshot has XML in"
            f" {', '.join(columns[:NAMED_MAX])}{more}",
            hint="restore to a server that is built with libxml, or restore only other tables: --group PATTERN",
            details={"node": target.node.id, "columns": columns},
        ) from error


def databases(connection: psycopg.Connection[Any]) -> set[str]:
    """The names of the server's databases."""
    return {row[0] for row in connection.execute("SELECT datname FROM pg_database")}


def create_database(target: Target, connection: psycopg.Connection[Any], source: NodeIdentity) -> None:
    """Drop what restores that died left of this database, then create the empty database to load into."""
    prefix = target.loading[: -len(target.loading.rsplit("_", 1)[-1])]
    for name in databases(connection):
        if name.startswith(prefix):
            _drop(connection, name)
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {} LC_COLLATE {} LC_CTYPE {} {}").format(
        sql.Identifier(target.loading),
        sql.Literal(source.encoding),
        sql.Literal(source.collate),
        sql.Literal(source.ctype),
        _provider(source),
    )
    try:
        connection.execute(statement)
    except (
        psycopg.errors.InvalidParameterValue,
        psycopg.errors.FeatureNotSupported,
        psycopg.errors.WrongObjectType,
    ) as error:
        raise TargetUnfitError(
            f"node {target.node.id}: database {target.loading} can't be created: {str(error).strip()}",
            hint="install the locale on the target's machine, then repeat the command",
        ) from error


def _provider(source: NodeIdentity) -> sql.Composable:
    """The CREATE DATABASE options for the source's locale provider (PostgreSQL manual, "Locale Providers")."""
    if source.locale_provider == LIBC:
        return sql.SQL("LOCALE_PROVIDER libc")
    if source.locale_provider == BUILTIN:
        return sql.SQL("LOCALE_PROVIDER builtin BUILTIN_LOCALE {}").format(sql.Literal(source.locale))
    option = sql.SQL("LOCALE_PROVIDER icu ICU_LOCALE {}").format(sql.Literal(source.locale))
    if source.icu_rules:
        option += sql.SQL(" ICU_RULES {}").format(sql.Literal(source.icu_rules))
    return option


def drop_loading(targets: Iterable[Target]) -> None:
    """Drop the databases being loaded, on every node that answers; raise the first error."""

    def drop(target: Target) -> None:
        with connect(target.maintenance) as connection:
            _drop(connection, target.loading)

    in_parallel(drop, targets)


def _drop(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


class Rename(NamedTuple):
    """A rename that was done, and the session that did it."""

    connection: psycopg.Connection[Any]
    old: str
    new: str


def swap_databases(targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> list[str]:
    """Give every database its real name; return the existing databases that were put aside, as `node: name`.

    If a rename raises, the renames before it are undone and its error is raised.
    """
    done: list[Rename] = []
    aside: list[str] = []
    try:
        for target in targets:
            connection = connections[target.shard]
            steps = [(target.loading, target.database)]
            if target.database in databases(connection):
                steps.insert(0, (target.database, target.aside))
                aside.append(f"{target.node.id}: {target.aside}")
            for old, new in steps:
                _rename(connection, old, new)
                done.append(Rename(connection, old, new))
    except BaseException:
        for one in reversed(done):
            _rename(one.connection, one.new, one.old)
        raise
    return aside


def release_slots(
    targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]
) -> tuple[list[str], list[str]]:
    """Drop Cutline's slots in databases that were put aside: their chains have ended, and the slots would retain WAL.

    Returns the slots that were dropped and those that could not be, each as `node: slot`.
    """
    dropped: list[str] = []
    left: list[str] = []
    for target in targets:
        row = connections[target.shard].execute(DATABASE_QUERY, (target.aside,)).fetchone()
        # By the database's oid: a standby may not have replayed the rename yet.
        for node in (target.node, *target.backups) if row else ():
            try:
                with connect(with_database(node, MAINTENANCE_DATABASE)) as connection:
                    for slot in [name for (name,) in connection.execute(SLOTS_QUERY, row)]:
                        (dropped if _drop_slot(connection, slot) else left).append(f"{node.id}: {slot}")
            except (psycopg.Error, SnapshotError):
                left.append(f"{node.id}: every slot of database {target.aside}")
    return dropped, left


def _drop_slot(connection: psycopg.Connection[Any], slot: str) -> bool:
    try:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    except psycopg.errors.ObjectInUse:
        return False
    return True


def _rename(connection: psycopg.Connection[Any], old: str, new: str) -> None:
    """End the sessions in a database and rename it; nobody can connect to it until that is done."""
    name = sql.Identifier(old)
    connection.execute(sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false").format(name))
    try:
        connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", (old,))
        connection.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(name, sql.Identifier(new)))
        name = sql.Identifier(new)
    finally:
        connection.execute(sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS true").format(name))
