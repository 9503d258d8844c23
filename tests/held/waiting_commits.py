"""A commit of an application that waits for a synchronous standby that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from tests.integration.refusing import execute

SECONDS_MAX = 120.0
APPLICATION = "till"


def without_standby(dsn: str) -> str:
    """The dsn for sessions whose own commits wait for nobody."""
    return make_conninfo(dsn, options="-c synchronous_commit=local")


def await_rows(dsn: str, query: str) -> list[Any]:
    """Wait until the query has rows; return them."""
    deadline = time.monotonic() + SECONDS_MAX
    with psycopg.connect(without_standby(dsn), autocommit=True) as connection:
        while not (found := connection.execute(query.encode()).fetchall()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found


@contextmanager
def commit_waiting(dsn: str) -> Iterator[int]:
    """Have a commit in this database wait while the block runs, whatever happens; yield its server process."""
    execute(without_standby(dsn), "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")

    def commit() -> None:
        with suppress(psycopg.Error):
            execute(make_conninfo(dsn, application_name=APPLICATION), "CREATE TABLE waited ()", "DROP TABLE waited")

    committing = threading.Thread(target=commit)
    try:
        await_rows(dsn, "SELECT FROM pg_settings WHERE name = 'synchronous_standby_names' AND setting = 'nobody'")
        committing.start()
        ((process,),) = await_rows(dsn, "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        yield process
    finally:
        execute(without_standby(dsn), "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        committing.join()
