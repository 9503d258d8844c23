"""Databases that restores create (for loading, for dry runs) or set aside (if replaced) on a node's server.

Their names are derived from the name of the node's database and the restore's id.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import psycopg
from msgspec import Struct

from cutline.fleet.config import Node
from cutline.nodes.connections import database_name

NAME_BYTES_MAX = 63
LOADING, REHEARSING, ASIDE = "_restoring_", "_rehearsing_", "_before_"
# A restore into existing tables uses a schema whose name is this prefix followed by the restore's suffix.
FILLING = "cutline_restoring_"
# The random part of an operation's id.
SUFFIX_LENGTH = 10
DIGEST_LENGTH = 8
# A suffix never consists of digits alone (storage/ids.py), because users may name a copy after the date.
SUFFIX = re.compile(rf"(?=.*[a-f])[0-9a-f]{{{SUFFIX_LENGTH}}}")
SIZES_QUERY = """
SELECT datname, CASE WHEN has_database_privilege(oid, 'CONNECT') THEN pg_database_size(oid) END
  FROM pg_database WHERE starts_with(datname, %s) ORDER BY 1
"""


REPLICATION_QUERY = """
SELECT ARRAY(SELECT slot_name::text FROM pg_replication_slots
              WHERE datoid = d.oid AND NOT slot_name ^@ 'cutline_' AND NOT temporary ORDER BY 1),
       ARRAY(SELECT subname::text FROM pg_subscription WHERE subdbid = d.oid ORDER BY 1)
  FROM pg_database d WHERE d.datname = %(database)s
"""


class OldDatabase(Struct, frozen=True):
    """A database that a restore set aside. Its size is None if our role may not query it.

    `slots` are its logical replication slots, which are dropped with it, and `subscriptions` those of it, with which it
    can't be dropped.
    """

    node: str
    database: str
    bytes: int | None
    slots: tuple[str, ...] = ()
    subscriptions: tuple[str, ...] = ()


class Replication(Struct, frozen=True):
    """The logical replication from and to a database: the slots in it that Cutline did not make, and subscriptions."""

    slots: tuple[str, ...]
    subscriptions: tuple[str, ...]


def name_beside(database: str, middle: str, suffix: str) -> str:
    """Derive a name from `database`, with LOADING or ASIDE in the middle; a long name is shortened with a digest."""
    return f"{_prefix(database, middle)}{suffix}"


def is_beside(name: str, database: str, middle: str) -> bool:
    """Whether a restore derived this name from `database`."""
    prefix = _prefix(database, middle)
    return name.startswith(prefix) and SUFFIX.fullmatch(name.removeprefix(prefix)) is not None


def read_old(node: Node, connection: psycopg.Connection[Any]) -> list[OldDatabase]:
    """List the databases that restores have set aside for the node's database."""
    database = database_name(node.dsn)
    rows = connection.execute(SIZES_QUERY, (_prefix(database, ASIDE),)).fetchall()
    found: list[OldDatabase] = []
    for name, size in rows:
        if is_beside(name, database, ASIDE):
            others = read_replication(connection, name)
            found.append(OldDatabase(node.id, name, size, others.slots, others.subscriptions))
    return found


def read_replication(connection: psycopg.Connection[Any], database: str) -> Replication:
    """Read which logical replication a database on the session's server takes part in, apart from Cutline's own."""
    slots, subscriptions = connection.execute(REPLICATION_QUERY, {"database": database}).fetchone() or ([], [])
    return Replication(tuple(slots), tuple(subscriptions))


def _prefix(database: str, middle: str) -> str:
    room = NAME_BYTES_MAX - len(middle) - SUFFIX_LENGTH
    if len(database.encode()) <= room:
        return f"{database}{middle}"
    # Two names may differ only in the part that is cut off.
    digest = hashlib.sha256(database.encode()).hexdigest()[:DIGEST_LENGTH]
    return f"{database.encode()[: room - DIGEST_LENGTH - 1].decode(errors='ignore')}_{digest}{middle}"
