"""Checks that a module leaves nothing on the servers that it shares with others."""

from __future__ import annotations

import time

import psycopg

from cutline.embedded.fleet import EmbeddedFleet

LEFT_QUERY = """
SELECT 'slot ' || slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'
UNION ALL SELECT 'prepared transaction ' || gid FROM pg_prepared_xacts
UNION ALL SELECT 'setting ' || one FROM pg_db_role_setting CROSS JOIN unnest(setconfig) AS one
           WHERE one LIKE 'default_transaction_read_only=%'
"""
# The sessions of a killed command end a little later than the command.
LEFT_SECONDS_MAX = 10.0


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
