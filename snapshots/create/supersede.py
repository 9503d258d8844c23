"""End a chain in whose place another snapshot has begun: nodes keep no more WAL for it."""

from __future__ import annotations

from msgspec.structs import replace

from cutline.fleet.config import Fleet
from cutline.fleet.progress import News, Progress
from cutline.nodes.sessions import open_sessions
from cutline.nodes.watch import NodesQuery
from cutline.snapshots.operations.operation import current_time, exclusive
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.lost_chains import LostChain, mark_lost
from cutline.snapshots.records.proven_chains import read_newest_part
from cutline.snapshots.records.store_identity import check_of_fleet, read_identity
from cutline.wal.slots.lags import ASKING_SECONDS_MAX
from cutline.wal.slots.slots import drop_slots, slot_name, slot_problem, slot_state


def supersede(fleet: Fleet, name: str, successor: str, progress: Progress) -> list[str]:
    """Mark the snapshot's chain as ended, then drop its slots; return the nodes on which they may be left.

    If the chain ended because a slot was gone before, the mark says so. Its restore points stay. The next create drops
    slots that are left. Raises FleetBusyError, and the errors of reading a chain.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, "watch", name):
        chain = read_newest_part(store, name)
        check_of_fleet(chain, identity)
        node, problem = _find_problem(fleet, chain)
        lost = LostChain(name, chain.full.chain, chain.last.increment, node, 0, 0, current_time())
        mark_lost(store, replace(lost, successor=successor, slot_problem=problem))
        progress.note(News(f"{name} gets no more increments: {successor} has taken its place"))
        return drop_slots(fleet.nodes, slot_name(chain.full.operation))


def _find_problem(fleet: Fleet, chain: Chain) -> tuple[str, str]:
    """The first node on which something is wrong with the chain's slot, and what; "" for both if none answers so."""
    slot = slot_name(chain.full.operation)
    nodes = [node for node in fleet.nodes if node.id in chain.baseline]
    query = NodesQuery(nodes, lambda _, connection: slot_state(connection, slot), ASKING_SECONDS_MAX)
    states = query.answers().found
    problems = ((node, slot_problem(slot, state)) for node, state in states.items())
    return next((problem for problem in problems if problem[1]), ("", ""))
