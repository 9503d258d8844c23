"""Databases that restores create (for loading, for dry runs) or set aside (if replaced) on a node's server.

Their names are derived from the name of the node's database and the restore's id.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import psycopg

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


@dataclass(frozen=True, slots=True)
class OldDatabase:
    """A database that a restore set aside. Its size is None if our role may not query it."""

    node: str
    database: str
    bytes: int | None


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
    return [OldDatabase(node.id, name, size) for name, size in rows if is_beside(name, database, ASIDE)]


def _prefix(database: str, middle: str) -> str:
    room = NAME_BYTES_MAX - len(middle) - SUFFIX_LENGTH
    if len(database.encode()) <= room:
        return f"{database}{middle}"
    # Two names may differ only in the part that is cut off.
    digest = hashlib.sha256(database.encode()).hexdigest()[:DIGEST_LENGTH]
    return f"{database.encode()[: room - DIGEST_LENGTH - 1].decode(errors='ignore')}_{digest}{middle}"
