"""The search_path of a database, which its functions need while its rows are loaded.

COPY calls functions in CHECK constraints, domains and generated columns, and some of them name tables and other
functions without a schema. The search_path of our sessions is pg_catalog alone, so such rows could never be loaded. The
setting of the database (ALTER DATABASE … SET) is stored with its DDL.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

SEARCH_PATH = "search_path"
ELEMENT = re.compile(r'\s*("(?:[^"]|"")*"|[^,]*)\s*(?:,|\Z)')
# As PostgreSQL folds identifiers in UTF-8 (scansup.c): no other letters.
FOLDED = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
# PostgreSQL's default.
DEFAULT = '"$user", public'
PATH_QUERY = """
SELECT substr(setting, length('search_path=') + 1)
  FROM pg_db_role_setting s, unnest(s.setconfig) AS of (setting)
 WHERE s.setrole = 0 AND s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND setting ^@ 'search_path='
"""


def list_elements(value: str, *, folds: bool = True) -> list[str]:
    """The names in the value of a setting that is a list, as pg_db_role_setting has it.

    In names without quotes `folds` makes A to Z small letters, as PostgreSQL does in identifiers, but not in files.
    """
    found = (match[1].strip() for match in ELEMENT.finditer(value))
    return [
        text[1:-1].replace('""', '"') if text.startswith('"') else text.translate(FOLDED) if folds else text
        for text in found
        if text
    ]


def read_search_path(connection: psycopg.Connection[Any]) -> str | None:
    """The search_path that is set for the database; None if none is set."""
    (path,) = connection.execute(PATH_QUERY).fetchone() or (None,)
    return path


def search_path_of(path: str | None) -> str:
    """The search_path to load rows with, if `path` is set. pg_catalog comes first, so nothing hides its names."""
    return f"pg_catalog, {DEFAULT if path is None else path}"


@contextmanager
def having_path(connection: psycopg.Connection[Any], path: str | None) -> Iterator[None]:
    """While the block runs, let the session have the search_path of its database, after pg_catalog.

    The planner calls functions of a table's indexes whatever the query is, and these may name others without a schema.
    The block's own queries name nothing without a schema but what pg_catalog has with exactly their types.
    """
    connection.execute(
        "SELECT pg_catalog.set_config('search_path', pg_catalog.convert_from(%s, 'UTF8'), false)",
        (search_path_of(path).encode(),),
    )
    try:
        yield
    finally:
        # A transaction that has failed takes the setting back.
        if connection.info.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS):
            # Not RESET: behind a pooler the session began with another one.
            connection.execute("SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)")
