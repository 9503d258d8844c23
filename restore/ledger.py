"""The ledger of a database that is being loaded: which tasks have put how many rows of each group there."""

from __future__ import annotations

from typing import Any

import psycopg

from storage.errors import RefusedError

LEDGER_SCHEMA = "cutline_restore"
LEDGER = f"{LEDGER_SCHEMA}.ledger"


class LoadError(RefusedError):
    """A target node did not take rows; nothing of the restore stays there."""


def create_ledger(connection: psycopg.Connection[Any]) -> None:
    """Create the ledger in a database to be loaded."""
    connection.execute(f"CREATE SCHEMA {LEDGER_SCHEMA}")
    connection.execute(
        f"CREATE TABLE {LEDGER} (task text, groupno int, rows bigint NOT NULL, PRIMARY KEY (task, groupno))"
    )
