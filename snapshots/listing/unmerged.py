"""Chains that grow for ever because nothing merges them: `prune` gives up only what lies before a merge.

A watch that takes full snapshots ends its chains by itself, and with `[retention] merge`, it merges them.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.merge_records import newest_merge
from cutline.snapshots.records.proven_chains import cut_time, read_commit
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore

# A month of increments every 5 minutes has 8,928 restore points.
POINTS_MAX, AGE_MAX = 10_000, timedelta(days=400)


def unmerged_text(store: ObjectStore, chain: Chain, fleet: Fleet, now: datetime) -> str:
    """Return a warning about a chain with many restore points, or old ones, that nothing merges or ends; else "".

    Restore points count since the newest merge. The store is read only if the whole chain has too many of them.
    """
    is_ended_by_rule = bool(fleet.retention.merge_seconds or (fleet.watch and fleet.watch.full))
    began, points = cut_time(chain.stored_full), chain.last.increment + 1
    if is_ended_by_rule or chain.stored_full.only_cut or not _is_long(points, began, now):
        return ""
    # Damage is reported by the commands that need what is damaged.
    with suppress(SnapshotError):
        if merge := newest_merge(store, chain.name):
            began = cut_time(read_commit(store, chain.name, merge.increment))
            points -= merge.increment
        if _is_long(points, began, now):
            return (
                f"snapshot {chain.name} has {points:,} restore points since {began.astimezone(UTC):%Y-%m-%d} that no"
                " rule gives up, because only what lies before a merge can be given up; let a watch merge the chain"
                f' (merge = "monthly" under [retention]), or run: snapshot merge {chain.name}'
            )
    return ""


def note_unmerged(store: ObjectStore, chain: Chain, fleet: Fleet, progress: Progress) -> None:
    """Note that a chain grows for ever, at the first increment of each day since its full snapshot."""
    now, began = utc_now(), cut_time(chain.stored_full)
    is_first_of_day = (now - began).days > (cut_time(chain.last) - began).days
    if is_first_of_day and (text := unmerged_text(store, chain, fleet, now)):
        progress.note(text)


def _is_long(points: int, began: datetime, now: datetime) -> bool:
    return points > POINTS_MAX or now - began > AGE_MAX
