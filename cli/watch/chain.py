"""The chain that `watch` continues: that of the newest snapshot whose name its template can have made.

Chains of older ones that still go on are those that the newest has replaced; the watch ends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fleet.config import Fleet
from snapshots.listing.name_templates import read_template
from snapshots.records.chains import read_newest_part
from snapshots.records.commit import FullSnapshot
from snapshots.records.commits import read_full, snapshot_names
from snapshots.records.cut_times import cut_time
from snapshots.records.lost_chains import is_lost
from snapshots.records.store_identity import open_own_store
from snapshots.records.tombstones import is_only_full
from storage.store import ObjectStore

# Older ones were ended, or are none of this watch's.
REPLACED_MAX = 3


@dataclass(frozen=True, slots=True)
class WatchedChain:
    """The newest snapshot, when its first and its last cut were made, and why it gets no increments ("": it does).

    `replaced` are older snapshots whose chains still go on.
    """

    name: str
    began_at: datetime
    last_at: datetime
    ended: str = ""
    replaced: tuple[str, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether it gets increments."""
        return not self.ended


def find_chain(fleet: Fleet, template: str) -> WatchedChain | None:
    """The chain, None if no snapshot has such a name; raises what reading the store raises."""
    store, parsed = open_own_store(fleet), read_template(template)
    matching = {name: values for name in snapshot_names(store) if (values := parsed.values_in(name))}
    if not matching:
        return None
    *older, name = sorted(matching, key=lambda one: matching[one])
    chain = read_newest_part(store, name)
    replaced = tuple(one for one in older[-REPLACED_MAX:] if not _why_ended(store, read_full(store, one)))
    return WatchedChain(name, cut_time(chain.full), cut_time(chain.last), _why_ended(store, chain.full), replaced)


def _why_ended(store: ObjectStore, full: FullSnapshot) -> str:
    """Why the chain of this full snapshot gets no increments, "" if it does."""
    if is_lost(store, full.snapshot, full.chain):
        return "its chain was given up or ended"
    if is_only_full(store, full.snapshot):
        return "its increments were pruned"
    return "it is a cut without rows (--only-cut)" if full.only_cut else ""
