"""Where a restore goes: the target of every shard, and the sessions that lock it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.label import own_label
from cutline.fleet.nodes.beside import ASIDE, LOADING, name_beside
from cutline.fleet.nodes.connections import (
    MAINTENANCE_DATABASE,
    connect,
    database_name,
    unreachable_error,
    with_database,
)
from cutline.fleet.nodes.lock import take_lock
from cutline.fleet.nodes.problems import GRANT, raising_unfit
from cutline.fleet.nodes.sessions import in_parallel
from cutline.fleet.nodes.shut_down import shut_down
from cutline.fleet.nodes.watch import Watch
from cutline.restore.obstacles.obstacles import Obstacles
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
    """The target of one shard for one operation; raise UsageError for a database that can't be restored into."""
    database = database_name(node.dsn)
    if database in (MAINTENANCE_DATABASE, "template0", "template1"):
        raise UsageError(
            f"node {node.id}: its dsn names database {database}, which can't be restored into",
            hint="name the database to restore in the node's dsn",
        )
    loading, aside = (name_beside(database, middle, suffix_of(operation)) for middle in (LOADING, ASIDE))
    return Target(shard, node, database, loading, aside, backups)


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
    targets = sorted(targets, key=lambda one: one.node.id)
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
            # First: the lock of one would be in the way of the other.
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
    # The lock is per database name: two shards may be restored to two databases of one server.
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
