"""The databases that a restore makes: found fit, created under a name of their own, published at the end.

Nobody sees a restored database under its real name until all nodes are loaded and checked (docs/architecture.md,
invariant 6). A publication that can't be carried through on every node is undone on all of them.
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
    """A target node can't take the snapshot."""


class TargetExistsError(RefusedError):
    """A target node has the database already."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one shard goes: `database` is the real name, `loading` the name until it is published."""

    shard: str
    node: Node
    database: str
    loading: str
    aside: str
    backups: tuple[Node, ...] = ()

    @property
    def maintenance(self) -> Node:
        """The same server, in the database from which others are created and renamed."""
        return with_database(self.node, MAINTENANCE_DATABASE)

    @property
    def loaded(self) -> Node:
        """The database that is being restored."""
        return with_database(self.node, self.loading)


def target_of(shard: str, node: Node, backups: tuple[Node, ...], operation: str) -> Target:
    """The target of one shard for one operation."""
    database = database_name(node.dsn)
    if database in (MAINTENANCE_DATABASE, "template0", "template1"):
        raise UsageError(
            f"node {node.id}: its dsn leads to database {database}, which can't be restored into",
            hint="name the database to be restored in the node's dsn",
        )
    suffix = operation.rsplit("-", 1)[-1]

    def named(middle: str) -> str:
        room = NAME_BYTES_MAX - len(middle) - len(suffix)
        return f"{database.encode()[:room].decode(errors='ignore')}{middle}{suffix}"

    return Target(shard, node, database, named(LOADING), named(ASIDE), backups)


@contextmanager
def lock_targets(targets: Iterable[Target]) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Sessions in the maintenance databases, by shard; no other restore runs on these servers meanwhile.

    Raises FleetBusyError saying who restores.
    """
    with ExitStack() as stack:
        connections: dict[str, psycopg.Connection[Any]] = {}
        for target in sorted(targets, key=lambda found: found.node.id):
            connection = stack.enter_context(connect(target.maintenance))
            # Two shards may go to two databases of one server; the lock is per database name.
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
    """Raise TargetUnfitError or TargetExistsError; return what tells the server's databases from others'."""
    recovering, version, may_create, system = connection.execute(FACTS_QUERY).fetchone() or (
        True,
        0,
        False,
        "",
    )
    node = target.node.id
    if recovering:
        raise TargetUnfitError(f"node {node} is a standby", hint="name its primary in the target's fleet.toml")
    if version // 10000 < source.server_version // 10000:
        raise TargetUnfitError(
            f"node {node}: PostgreSQL {version // 10000} is older than the snapshot's {source.server_version // 10000}"
        )
    if not may_create:
        raise TargetUnfitError(
            f"node {node}: role {connection.info.user} may not create databases",
            hint=f'ALTER ROLE "{connection.info.user}" CREATEDB;',
        )
    if not replace and target.database in databases(connection):
        raise TargetExistsError(
            f"node {node} has a database {target.database} already",
            hint="restore elsewhere with --to FILE, or put the existing databases aside with --replace",
            details={"node": node, "database": target.database},
        )
    return f"{system}/{target.database}"


def columns_of_xml(groups: Iterable[Group], states: Mapping[str, TableState]) -> list[str]:
    """The groups' columns that have XML in them, as `schema.table.column`; `states` are the tables' by name."""
    found: list[str] = []
    for group in groups:
        numbers = states[group.name].xml_columns if group.name in states else frozenset[int]()
        of_xml = [one for one in group.columns if one.type in ("xml", "xml[]") or one.number in numbers]
        found += [f"{group.name}.{column.name}" for column in of_xml]
    return found


def check_xml(target: Target, connection: psycopg.Connection[Any], source: NodeIdentity, of_xml: list[str]) -> None:
    """Raise TargetUnfitError where there are columns of XML and the target's server is built without: it reads none.

    The server that the snapshot was taken from has read what there is: built without, it has nothing in them.
    """
    (system,) = connection.execute(SYSTEM_QUERY).fetchone() or ("",)
    try:
        if of_xml and system != source.system_identifier:
            connection.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported as error:
        more = f" and {len(of_xml) - NAMED_MAX} more" if len(of_xml) > NAMED_MAX else ""
        raise TargetUnfitError(
            f"node {target.node.id}: its PostgreSQL is built without XML, which the snapshot has in"
            f" {', '.join(of_xml[:NAMED_MAX])}{more}",
            hint="restore to a server that is built with libxml, or only other tables: --group PATTERN",
            details={"node": target.node.id, "columns": of_xml},
        ) from error


def databases(connection: psycopg.Connection[Any]) -> set[str]:
    """The server's databases."""
    return {row[0] for row in connection.execute("SELECT datname FROM pg_database")}


def create_database(target: Target, connection: psycopg.Connection[Any], source: NodeIdentity) -> None:
    """Create the empty database to load into, after those that a restore that died has left."""
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
            f"node {target.node.id}: {str(error).strip()}", hint="install the locale on the target's machine"
        ) from error


def _provider(source: NodeIdentity) -> sql.Composable:
    """The options that give a database the source's locale provider (PostgreSQL manual, "Locale Providers")."""
    if source.locale_provider == LIBC:
        return sql.SQL("LOCALE_PROVIDER libc")
    if source.locale_provider == BUILTIN:
        return sql.SQL("LOCALE_PROVIDER builtin BUILTIN_LOCALE {}").format(sql.Literal(source.locale))
    option = sql.SQL("LOCALE_PROVIDER icu ICU_LOCALE {}").format(sql.Literal(source.locale))
    if source.icu_rules:
        option += sql.SQL(" ICU_RULES {}").format(sql.Literal(source.icu_rules))
    return option


def drop_loading(targets: Iterable[Target]) -> None:
    """Drop what was being loaded, on every node that answers."""

    def drop(target: Target) -> None:
        with connect(target.maintenance) as connection:
            _drop(connection, target.loading)

    in_parallel(drop, targets)


def _drop(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


class Rename(NamedTuple):
    """A database that was renamed."""

    connection: psycopg.Connection[Any]
    old: str
    new: str


def swap_databases(targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> list[str]:
    """Give every database its real name; return the names under which existing ones were put aside.

    Raises what a rename raised, after undoing the renames that were done.
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
    """Drop Cutline's slots in databases that were put aside: no chain goes on there, and they would keep WAL.

    Returns those that were dropped and those that are left, each as `node: slot`.
    """
    dropped: list[str] = []
    left: list[str] = []
    for target in targets:
        row = connections[target.shard].execute(DATABASE_QUERY, (target.aside,)).fetchone()
        # By the database's oid: a standby may not have replayed its new name yet.
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
    """Rename a database, ending the sessions in it; nobody can connect anew meanwhile."""
    name = sql.Identifier(old)
    connection.execute(sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false").format(name))
    try:
        connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", (old,))
        connection.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(name, sql.Identifier(new)))
        name = sql.Identifier(new)
    finally:
        connection.execute(sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS true").format(name))
