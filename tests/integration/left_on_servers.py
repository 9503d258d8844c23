"""Checks that a test leaves the servers running that it shares with others, and its module nothing on them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import running_pid

LEFT_QUERY = """
SELECT 'slot ' || slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'
UNION ALL SELECT 'prepared transaction ' || gid FROM pg_prepared_xacts
UNION ALL SELECT 'setting ' || one FROM pg_db_role_setting CROSS JOIN unnest(setconfig) AS one
           WHERE one LIKE 'default_transaction_read_only=%'
"""
# The sessions of a killed command end a little later than the command.
LEFT_SECONDS_MAX = 10.0


def revive(fleet: EmbeddedFleet) -> list[str]:
    """Start servers that do not run, and continue those that a signal has stopped; say what was wrong with which.

    Raises SnapshotError if a server can't be started: its data is gone.
    """
    found = []
    for node in fleet.nodes:
        pid = running_pid(node)
        if pid is None:
            fleet.start_node(node)
            found.append(f"{fleet.directory.name} {node.id} was not running")
        elif stopped := [each for each in (pid, *_children_of(pid)) if is_stopped(each)]:
            for each in stopped:
                os.kill(each, signal.SIGCONT)
            found.append(f"{fleet.directory.name} {node.id} was stopped by a signal")
    return found


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    try:
        # The state follows the name, which may have any letters but is in parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def check_nothing_left(fleet: EmbeddedFleet) -> None:
    """Fail if slots, prepared transactions or read-only settings are left on the fleet's nodes."""
    deadline = time.monotonic() + LEFT_SECONDS_MAX
    while left := _left_on(fleet):
        assert time.monotonic() < deadline, f"left on {fleet.directory.name}: {left}"
        time.sleep(0.1)


def _left_on(fleet: EmbeddedFleet) -> list[str]:
    left: list[str] = []
    for node in fleet.nodes:
        with psycopg.connect(node.dsn(), autocommit=True) as connection:
            left += [f"{node.id}: {row[0]}" for row in connection.execute(LEFT_QUERY)]
    return left
