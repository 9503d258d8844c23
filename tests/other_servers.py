"""PostgreSQL servers of other versions than the wheel's, for tests of fleets that mix versions.

    SNAPSHOT_TEST_PG_BINS=/usr/lib/postgresql/16/bin:/opt/17/bin    the folders of their programs

The default is Debian's PostgreSQL 15. Tests of a folder without a server are skipped. What a server is built without
(ICU, XML, lz4, contrib) is left out of its tests.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest

POSTGRESQL_15 = Path("/usr/lib/postgresql/15/bin")
OTHERS = [Path(one) for one in os.environ.get("SNAPSHOT_TEST_PG_BINS", str(POSTGRESQL_15)).split(os.pathsep) if one]


def require_server(programs: Path) -> Path:
    """Return the folder; skip the test if it has no server."""
    if not (programs / "postgres").exists():
        pytest.skip(f"there is no PostgreSQL in {programs}")
    return programs


def major_of(programs: Path) -> int:
    """The major version of the server in the folder."""
    output = subprocess.run([programs / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\) (\d+)", output)
    assert found, output
    return int(found[1])


def has_icu(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server is built with ICU."""
    return _accepts(connection, "CREATE COLLATION tried (provider = icu, locale = 'und')")


def has_xml(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server is built with libxml."""
    return _accepts(connection, "SELECT '<a/>'::xml")


def has_lz4(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server is built with lz4."""
    return _accepts(connection, "CREATE TEMP TABLE tried (v text COMPRESSION lz4)")


def _accepts(connection: psycopg.Connection[Any], statement: str) -> bool:
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement.encode())
    except psycopg.errors.FeatureNotSupported:
        return False
    return True
