"""Give restored databases their real names, or give the replaced databases theirs back.

First the old databases on all nodes are closed to connections, and their sessions are ended. If a node refuses this
step, nothing has been decided yet. Then one transaction on each node renames both databases. At any time, users see the
old database, the new database, or a database that refuses connections.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
from msgspec import structs
from psycopg import sql

from cutline.nodes.problems import quote
from cutline.nodes.sessions import in_parallel
from cutline.restore.targets.databases import DatabaseRecord, FoundDatabase, list_databases, refusing, write_record
from cutline.restore.targets.target import SESSIONS, Connections, Target, TargetExistsError, TargetUnfitError
from cutline.restore.targets.waits import TargetBlockedError

# A session that started before the database was closed may end late.
ATTEMPTS = 3
END_MILLISECONDS_MAX = 5000
END_POLL_SECONDS = 0.1
PREPARED_QUERY = "SELECT count(*) FROM pg_prepared_xacts WHERE database = %s"
END_PREPARED = "stop the applications, and commit or roll back the transactions in pg_prepared_xacts"


class RestoredMissingError(TargetUnfitError):
    """A restore that is being finished is missing one of its databases."""


def is_restored(databases: Mapping[str, FoundDatabase], target: Target, operation: str) -> bool:
    """Whether the restore created the database with the target's real name."""
    database = databases.get(target.database)
    return database is not None and database.record is not None and database.record.operation == operation


def close_databases(targets: Iterable[Target], connections: Connections, records: Mapping[str, DatabaseRecord]) -> None:
    """Close the databases to rename, on all nodes, and end the sessions in them; `records` are keyed by shard.

    Raises TargetUnfitError if a node refuses, and TargetBlockedError if there are prepared transactions in a database;
    the caller must then reopen all the databases. Raises RestoredMissingError, and TargetExistsError if a database with
    the real name was created during a restore without --replace.
    """
    targets = list(targets)

    def close(target: Target) -> None:
        connection, record = connections[target.shard], records[target.shard]
        databases = list_databases(connection)
        if is_restored(databases, target, record.operation):
            return
        check_swappable(target, databases, record)
        if target.database in databases:
            with refusing(target.node, f"database {target.database} can't be set aside"):
                _check_decided(target, connection)
                _close(connection, target.database)
                # Check again, because a session may have prepared a transaction before it was ended.
                _check_decided(target, connection)
                _check_nobody_inside(target, connection)
        with refusing(target.node, f"database {target.loading} can't be renamed"):
            _close(connection, target.loading)

    in_parallel(close, targets)


def open_databases(targets: Iterable[Target], connections: Connections) -> list[str]:
    """Open the databases with the targets' real names; return a line with the remedy for each that stays closed."""
    left: list[str] = []
    for target in targets:
        try:
            _set_open(connections[target.shard], target.database, is_open=True)
        except psycopg.errors.InvalidCatalogName:
            continue
        except psycopg.Error:
            statement = f"ALTER DATABASE {quote(target.database)} ALLOW_CONNECTIONS true;"
            left.append(f"database {target.database} on {target.node.id} may still be closed; to open it: {statement}")
    return left


def publish_database(target: Target, connection: psycopg.Connection[Any], record: DatabaseRecord) -> bool:
    """In one transaction, give the restored database its real name; return whether an old database was set aside.

    Does nothing if it already has that name. Raises RestoredMissingError, TargetUnfitError, NodeUnreachableError.
    """
    databases = list_databases(connection)
    if is_restored(databases, target, record.operation):
        return target.aside in databases
    check_swappable(target, databases, record)
    is_replacing = target.database in databases
    steps = [(target.database, target.aside)] if is_replacing else []
    # An earlier process may have set a database aside before its published database was lost.
    is_aside = is_replacing or target.aside in databases
    marked = structs.replace(record, aside=is_aside)
    _rename(target, connection, [*steps, (target.loading, target.database)], marked)
    return is_aside


def check_swappable(target: Target, databases: Mapping[str, FoundDatabase], record: DatabaseRecord) -> None:
    """Raise RestoredMissingError or TargetExistsError unless the loaded database may get the real name."""
    if target.loading not in databases:
        raise RestoredMissingError(
            f"node {target.node.id}: database {target.loading}, which the restore created, is missing",
            hint="somebody dropped or renamed it",
            details={"node": target.node.id, "database": target.loading},
        )
    if target.database in databases and not record.replace:
        raise TargetExistsError(
            f"node {target.node.id}: database {target.database} was created during the restore, which runs without"
            " --replace",
            hint="rename or drop it first",
            details={"node": target.node.id, "database": target.database},
        )


def put_back(target: Target, connection: psycopg.Connection[Any], operation: str) -> None:
    """Undo `publish_database`: give the database that was set aside its name back, and open it.

    Does nothing if that has already been done. Raises TargetUnfitError, NodeUnreachableError.
    """
    databases = list_databases(connection)
    steps: list[tuple[str, str]] = []
    if is_restored(databases, target, operation):
        steps.append((target.database, target.loading))
    if target.aside in databases and (steps or target.database not in databases):
        steps.append((target.aside, target.database))
    if steps:
        if target.database in databases:
            check_nothing_prepared(target, connection)
        _rename(target, connection, steps)
    elif target.database in databases and not databases[target.database].is_open:
        with refusing(target.node, f"database {target.database} can't be opened"):
            _set_open(connection, target.database, is_open=True)


def end_sessions(connection: psycopg.Connection[Any], database: str) -> None:
    """End all sessions that our role may end in a database, and wait a limited time for each."""
    connection.execute(f"SELECT pg_terminate_backend(a.pid, {END_MILLISECONDS_MAX}) {SESSIONS}", (database,))


def _rename(
    target: Target,
    connection: psycopg.Connection[Any],
    steps: list[tuple[str, str]],
    record: DatabaseRecord | None = None,
) -> None:
    """End the sessions in the databases, then rename and open them in one transaction.

    If given, `record` is written to the last database's comment.
    """
    what = " and ".join(f"database {old} can't be renamed to {new}" for old, new in steps)
    with refusing(target.node, what):
        for attempt in range(ATTEMPTS):
            for old, _ in steps:
                _close(connection, old)
            try:
                with connection.transaction():
                    for old, new in steps:
                        connection.execute(
                            sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(old), sql.Identifier(new))
                        )
                    for _, new in steps:
                        _set_open(connection, new, is_open=True)
                    if record is not None:
                        write_record(connection, steps[-1][1], record)
            except psycopg.errors.ObjectInUse:
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return


def _close(connection: psycopg.Connection[Any], database: str) -> None:
    _set_open(connection, database, is_open=False)
    end_sessions(connection, database)


def _set_open(connection: psycopg.Connection[Any], database: str, *, is_open: bool) -> None:
    statement = sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS {}")
    connection.execute(statement.format(sql.Identifier(database), sql.SQL(str(is_open).lower())))


def _check_nobody_inside(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Raise TargetUnfitError if user sessions in the closed database have not ended in time."""
    deadline = time.monotonic() + END_MILLISECONDS_MAX / 1000
    # Ignore autovacuum workers: PostgreSQL ends them itself, and new workers may start.
    query = f"SELECT a.pid {SESSIONS} AND a.usesysid IS NOT NULL ORDER BY 1"
    while left := [pid for (pid,) in connection.execute(query, (target.database,))]:
        if time.monotonic() < deadline:
            time.sleep(END_POLL_SECONDS)
            continue
        raise TargetUnfitError(
            f"node {target.node.id}: these sessions in database {target.database} could not be terminated:"
            f" {', '.join(map(str, left))}",
            hint="end their processes on the server's machine, then repeat the command",
            details={"node": target.node.id, "database": target.database, "sessions": left},
        )


def prepared_text(target: Target, connection: psycopg.Connection[Any]) -> str:
    """Return how many prepared transactions keep the database with the real name from being renamed; "" if none do."""
    (prepared,) = connection.execute(PREPARED_QUERY, (target.database,)).fetchone() or (0,)
    return f"{prepared:,} prepared transaction{'' if prepared == 1 else 's'}" if prepared else ""


def check_nothing_prepared(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Raise TargetUnfitError if prepared transactions prevent renaming the database with the real name."""
    if prepared := prepared_text(target, connection):
        raise TargetUnfitError(
            f"node {target.node.id}: database {target.database} can't be renamed: it has {prepared}",
            hint=f"{END_PREPARED}, then repeat the command",
            details={"node": target.node.id, "database": target.database},
        )


def _check_decided(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Do the same for a restore that has loaded its rows: with this error, it can be resumed."""
    try:
        check_nothing_prepared(target, connection)
    except TargetUnfitError as error:
        raise TargetBlockedError(error.message, hint=END_PREPARED, details=error.details) from None
