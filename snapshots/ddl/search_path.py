"""The search_path of a database, which its functions need while its rows are loaded.

COPY calls functions in CHECK constraints, domains and generated columns, and some of them name tables and other
functions without a schema. The search_path of our sessions is pg_catalog alone, so such rows could never be loaded. The
setting of the database (ALTER DATABASE … SET) is stored with its DDL.
"""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg

# PostgreSQL's default.
DEFAULT = '"$user", public'
PATH_QUERY = """
SELECT substr(setting, length('search_path=') + 1)
  FROM pg_db_role_setting s, unnest(s.setconfig) AS of (setting)
 WHERE s.setrole = 0 AND s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND setting ^@ 'search_path='
"""
# How earlier versions of Cutline stored it: a comment before the DDL.
STORED = re.compile(r'\A-- search_path: (".*")\n')


def read_search_path(connection: psycopg.Connection[Any]) -> str | None:
    """The search_path that is set for the database; None if none is set."""
    (path,) = connection.execute(PATH_QUERY).fetchone() or (None,)
    return path


def search_path_of(path: str | None) -> str:
    """The search_path to load rows with, if `path` is set. pg_catalog comes first, so nothing hides its names."""
    return f"pg_catalog, {DEFAULT if path is None else path}"


def read_stored_path(script: str) -> str | None:
    """The database's search_path in a stored script; None if it has none."""
    match = STORED.match(script)
    return str(json.loads(match[1])) if match else None
