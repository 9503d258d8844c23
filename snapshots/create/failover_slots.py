"""Read the failover slots of primaries although a standby that the server would wait for is down.

A server reads a slot with the failover property only up to where all standbys in `synchronized_standby_slots` have its
WAL, so that no standby is behind a consumer of changes when it is promoted (PostgreSQL manual, "Logical Replication
Failover"). It waits for them without a limit. A create waits as long as for any standby that it can do without. Then it
turns the property off while it reads, and on again afterwards. No cut becomes wrong: if a standby without this WAL is
promoted, the next increment finds that its server lacks WAL of the chain. But other standbys whose slot synchronization
runs meanwhile drop their copies of the slot (slotsync.c, drop_local_obsolete_slots), and a new copy stays temporary
until the primary's slot has passed the position and the xid that the standby reserved. A failover to such a standby
copies the shard again. The setting is the server's: a session can't do without it otherwise.

A process that dies in between leaves a slot without the property. So each reading ends with turning it on for all slots
that should have it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.connections import connect_replication, raising_unreachable
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.nodes.surroundings import FAILOVER_VERSION
from cutline.storage.errors import SnapshotError

POLL_SECONDS = 0.1
SLOTS_NAMED_MAX = 5
HAS_FAILOVER_QUERY = """
SELECT to_jsonb(s) ->> 'failover' = 'true' FROM pg_replication_slots s
 WHERE slot_name = %s AND database = current_database()
"""
# The physical slots that the server would wait for, as StandbySlotsHaveCaughtup does (slot.c).
BEHIND_QUERY = """
SELECT name, coalesce(r.active, false)
  FROM regexp_split_to_table(current_setting('synchronized_standby_slots'), '\\s*,\\s*') AS of (listed)
 CROSS JOIN LATERAL (SELECT trim(both ' "' from listed)) AS trimmed (name)
  LEFT JOIN pg_replication_slots r ON r.slot_name = name AND r.slot_type = 'physical'
 WHERE name <> '' AND NOT coalesce(r.restart_lsn >= %s::pg_lsn, false)
 ORDER BY name
"""


@contextmanager
def reading_failover_slots(
    sessions: Sessions, slot: str, positions: Mapping[str, Lsn], wait_seconds: float, progress: Progress
) -> Iterator[None]:
    """Let the block read the slot of every primary up to its position, without waiting for standbys that are down.

    Waits at most `wait_seconds` for them. Raises NodeUnreachableError.
    """
    nodes = [node for node in sessions.nodes if node.id in positions and _may_have(sessions, node)]
    began, altered = time.monotonic(), set[str]()

    def prepare(node: Node) -> None:
        notes, connection = WaitNotes("reading the failover slot", progress, began), sessions.connections[node.id]
        with raising_unreachable(node):
            while _has_failover(connection, slot) and (behind := _find_behind(connection, positions[node.id])):
                if time.monotonic() - began > wait_seconds:
                    altered.add(node.id)
                    _alter(node, slot, has_failover=False)
                    progress.note(
                        f"node {node.id}: slot {slot} is read without its failover property, because"
                        f" {list_some(behind, SLOTS_NAMED_MAX)} in synchronized_standby_slots did not confirm the WAL"
                        f" within {wait_seconds:.0f} s: start the standby, or take its slot out of that setting"
                    )
                    return
                notes.report(node.id, f"up to {wait_seconds:.0f} s: {list_some(behind, SLOTS_NAMED_MAX)} is behind")
                time.sleep(POLL_SECONDS)

    def restore(node: Node) -> None:
        try:
            with raising_unreachable(node):
                is_wanted = node.id in altered or sessions.fleet.has_failover_slots(node)
                if is_wanted and _has_failover(sessions.connections[node.id], slot) is False:
                    _alter(node, slot, has_failover=True)
        except (psycopg.Error, SnapshotError) as error:
            progress.note(f"node {node.id}: slot {slot} has no failover property until the next increment: {error}")

    try:
        in_parallel(prepare, nodes)
        yield
    finally:
        in_parallel(restore, nodes)


def _may_have(sessions: Sessions, node: Node) -> bool:
    return node.backup_of is None and sessions.connections[node.id].info.server_version >= FAILOVER_VERSION


def _has_failover(connection: psycopg.Connection[Any], slot: str) -> bool | None:
    """Whether the slot has the failover property; None if it does not exist."""
    row = connection.execute(HAS_FAILOVER_QUERY, (slot,)).fetchone()
    return None if row is None else bool(row[0])


def _find_behind(connection: psycopg.Connection[Any], position: Lsn) -> list[str]:
    """Return the standbys' slots that the server would wait for, and say which of them are inactive."""
    found = connection.execute(BEHIND_QUERY.encode(), (str(position),)).fetchall()
    return [name if is_active else f"{name} (inactive)" for name, is_active in found]


def _alter(node: Node, slot: str, *, has_failover: bool) -> None:
    statement = sql.SQL("ALTER_REPLICATION_SLOT {} (FAILOVER {})")
    with connect_replication(node) as connection:
        connection.execute(statement.format(sql.Identifier(slot), sql.SQL("true" if has_failover else "false")))
