"""Giving up chains that nobody continues, before the WAL kept for them fills a node's disk.

See docs/architecture.md, invariant 9. What a chain has stored stays and can be restored; it only gets no further
increment.
"""

from __future__ import annotations

from fleet.progress import Progress
from fleet.sessions import Sessions

# Below this, what an older chain keeps is not worth a line in every command's output.
NOTED_BYTES_MIN = 1 << 30
RETAINED_QUERY = """
SELECT slot_name,
       pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
                       restart_lsn)::bigint
  FROM pg_replication_slots
 WHERE slot_name LIKE 'cutline\\_%%' AND database = current_database() AND NOT active
   AND slot_name IS DISTINCT FROM %s
"""


def give_up_chains(sessions: Sessions, continued: str | None, bytes_max: int, progress: Progress) -> list[str]:
    """Drop the slots that keep more than `bytes_max` of WAL, but for the chain that is `continued` now.

    Returns the names of the slots dropped. The caller holds the fleet's lock.
    """
    dropped: set[str] = set()
    for node, connection in sessions.connections.items():
        for slot, retained in connection.execute(RETAINED_QUERY, (continued,)).fetchall():
            if retained is None or retained <= min(bytes_max, NOTED_BYTES_MIN):
                continue
            if retained <= bytes_max:
                progress.note(f"node {node}: slot {slot} of another chain keeps {retained >> 20} MiB of WAL")
            else:
                connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
                dropped.add(slot)
                progress.note(
                    f"node {node}: slot {slot} kept {retained >> 20} MiB of WAL and was dropped; its chain gets no"
                    " more increments (wal.retained_bytes_max)"
                )
    return sorted(dropped)
