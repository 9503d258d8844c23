"""End a chain in whose place another snapshot has begun: nodes keep no more WAL for it."""

from __future__ import annotations

from fleet.config import Fleet
from fleet.nodes.sessions import open_sessions
from fleet.progress import Progress
from snapshots.operations.exclusive import exclusive
from snapshots.operations.operation import current_time
from snapshots.records.chains import read_newest_part
from snapshots.records.lost_chains import LostChain, mark_lost
from snapshots.records.store_identity import check_of_fleet, read_identity
from wal.slots.slots import drop_slots, slot_name


def supersede(fleet: Fleet, name: str, successor: str, progress: Progress) -> list[str]:
    """Mark the snapshot's chain as ended, then drop its slots; return the nodes on which they may be left.

    Its restore points stay. The next create drops what is left. Raises FleetBusyError, and what reading a chain
    raises.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, "watch", name):
        chain = read_newest_part(store, name)
        check_of_fleet(chain, identity)
        last = chain.last.increment
        mark_lost(store, LostChain(name, chain.full.chain, last, "", 0, 0, current_time(), successor=successor))
        progress.note(f"{name} gets no more increments: {successor} has taken its place")
        return drop_slots(fleet.nodes, slot_name(chain.full.operation))
