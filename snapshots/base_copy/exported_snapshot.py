"""A session that shows a node as an exported snapshot of it does (PostgreSQL manual, "Snapshot Synchronization")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import connect, unreachable_error
from fleet.nodes.relation_locks import bound_lock_waits, locked_error


@contextmanager
def open_exported(node: Node, exported: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of its own in the snapshot `exported` of `node`, read-only; it ends with the block.

    Raises RelationLockedError where a wait for a lock is too long, and NodeUnreachableError for whatever else the
    server or libpq raise, within the block too: a snapshot that is not there any more went with the session that
    exported it, as the server was restarted or somebody ended that.
    """
    try:
        with connect(node) as connection:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{exported}'".encode())
            bound_lock_waits(connection)
            yield connection
    except psycopg.errors.LockNotAvailable as error:
        raise locked_error(node, "reading the catalogs", None) from error
    except psycopg.Error as error:
        raise unreachable_error(node, error) from error
