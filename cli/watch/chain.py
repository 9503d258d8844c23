"""The chain that `watch` continues: that of the newest snapshot whose name its template can have made."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fleet.config import Fleet
from snapshots.listing.name_templates import newest_name
from snapshots.records.chains import read_newest_part
from snapshots.records.commits import SnapshotMissingError
from snapshots.records.cut_times import cut_time
from snapshots.records.lost_chains import is_lost
from snapshots.records.store_identity import open_own_store
from snapshots.records.tombstones import is_only_full


@dataclass(frozen=True, slots=True)
class WatchedChain:
    """The newest snapshot, when its first and its last cut were made, and why it gets no increments ("": it does)."""

    name: str
    began_at: datetime
    last_at: datetime
    ended: str = ""


def find_chain(fleet: Fleet, template: str) -> WatchedChain | None:
    """The chain, None if no snapshot has such a name; raises what reading the store raises."""
    try:
        name = newest_name(fleet, template)
    except SnapshotMissingError:
        return None
    store = open_own_store(fleet)
    chain = read_newest_part(store, name)
    ended = ""
    if is_lost(store, name, chain.full.chain):
        ended = "its chain was given up or ended"
    elif is_only_full(store, name):
        ended = "its increments were pruned"
    elif chain.full.only_cut:
        ended = "it is a restore point"
    return WatchedChain(name, cut_time(chain.full), cut_time(chain.last), ended)
