"""Sessions that use a node's exported snapshot (PostgreSQL manual, "Snapshot Synchronization Functions")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect, refuse_views, unreachable_error
from cutline.fleet.nodes.relation_locks import bound_lock_waits, locked_error


@contextmanager
def open_exported(node: Node, exported: str) -> Iterator[psycopg.Connection[Any]]:
    """Open a read-only session of `node` in the snapshot `exported`; it ends with the block.

    Raises RelationLockedError if a wait for a lock is too long, and NodeUnreachableError for any other error of the
    server or libpq, within the block too. A snapshot disappears with the session that exported it, which ends when the
    server restarts or somebody terminates it.
    """
    try:
        with connect(node) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{exported}'".encode())
            bound_lock_waits(connection)
            refuse_views(connection)
            yield connection
    except psycopg.errors.LockNotAvailable as error:
        raise locked_error(node, "reading the catalogs", None) from error
    except psycopg.Error as error:
        raise unreachable_error(node, error) from error
