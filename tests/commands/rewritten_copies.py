"""Run `snapshot` so that a table is rewritten while it is copied: `python -m … DSN TABLE STATEMENTS WORDS…`.

The statements, separated by semicolons, are executed in the database DSN, once the first range of the table's pages has
been read there, or on the standby whose DSN is in the environment (READ_ON), which then has replayed them. Ranges are
small, so that a small table has several.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import psycopg

from cutline.cli.main import main
from cutline.snapshots.base_copy import copy_ranges, copy_tables

READ_ON = "CUTLINE_TEST_READ_ON"
RANGE_PAGES = 4


def rewrite(dsn: str, statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements.split(";"):
            connection.execute(statement.encode())
        ((position,),) = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchall()
    if standby := os.environ.get(READ_ON):
        with psycopg.connect(standby, autocommit=True) as connection:
            while connection.execute("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", (position,)).fetchone() == (True,):
                time.sleep(0.05)


def run(dsn: str, table: str, statements: str) -> None:
    copy, is_done, lock = copy_ranges.copy_ranges, False, threading.Lock()

    def copy_and_rewrite(task: copy_ranges.CopyTask) -> copy_ranges.CopyReport:
        nonlocal is_done
        is_range = any(part.group.table == table and part.high is not None for part in task.ranges)
        if not is_range or task.node.dsn != os.environ.get(READ_ON, dsn):
            return copy(task)
        # No other range is read until the table has been rewritten.
        with lock:
            report = copy(task)
            if not is_done:
                is_done = True
                rewrite(dsn, statements)
        return report

    copy_tables.copy_ranges = copy_and_rewrite
    copy_tables.TASK_PAGES = RANGE_PAGES
    main()
    assert is_done


if __name__ == "__main__":
    arguments = sys.argv[1:4]
    sys.argv[1:4] = []
    run(*arguments)
