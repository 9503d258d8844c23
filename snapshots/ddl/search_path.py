"""The search_path of a database, for what its own functions do while its rows are loaded.

Functions in CHECK constraints, domains and generated columns are called by COPY, and some name tables and other
functions without a schema. With the search_path of our sessions, which is PostgreSQL's own schema alone, such rows
could never be loaded. What is set for the database (ALTER DATABASE … SET) is stored before its DDL, as a comment.
"""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg

# Of PostgreSQL itself, where nothing is set.
DEFAULT = '"$user", public'
PATH_QUERY = """
SELECT substr(setting, length('search_path=') + 1)
  FROM pg_db_role_setting s, unnest(s.setconfig) AS of (setting)
 WHERE s.setrole = 0 AND s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND setting ^@ 'search_path='
"""
STORED = re.compile(r'\A-- search_path: (".*")\n')


def read_search_path(connection: psycopg.Connection[Any]) -> str:
    """The line that says what search_path is set for the database; "" if none is."""
    (path,) = connection.execute(PATH_QUERY).fetchone() or (None,)
    # A schema's name may have a line's end in it.
    return "" if path is None else f"-- search_path: {json.dumps(path)}\n"


def search_path_of(script: str) -> str:
    """What to load rows with, by the stored DDL: names in PostgreSQL's own schema stay what they are."""
    found = STORED.match(script)
    return f"pg_catalog, {json.loads(found[1]) if found else DEFAULT}"
