"""What remains of a chain that a create could not continue: slots on the nodes, and transactions in the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cutline.fleet.messages import NODES_NAMED_MAX, list_some, restore_command
from cutline.fleet.units import size_text
from cutline.nodes.sessions import Sessions
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.lost_chains import ChainLostError
from cutline.snapshots.records.proven_chains import read_newest_part
from cutline.storage.errors import ChainEnd, SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import query_retained
from cutline.wal.drain.lineage import WalDivergedError
from cutline.wal.drain.slots import slot_name


@contextmanager
def naming_remains(store: ObjectStore, sessions: Sessions, chain: Chain) -> Iterator[None]:
    """If the block ends the chain for good, complete the error's hint and details.

    The hint then names the nodes that have slots of the chain, which retain WAL, and the command that drops them; and
    the restore of the last increment, if a failover has lost transactions that the increment contains. The slots of a
    chain that is marked as lost have been dropped before.
    """
    try:
        yield
    except SnapshotError as error:
        if error.ends_chain is ChainEnd.FOR_GOOD and not isinstance(error, ChainLostError):
            # The error is raised even if the store does not answer any more.
            with suppress(SnapshotError):
                _complete(error, store, sessions, chain)
        raise


def _complete(error: SnapshotError, store: ObjectStore, sessions: Sessions, chain: Chain) -> None:
    slot, name = slot_name(chain.full.operation), chain.name
    if retained := query_retained(sessions.fleet.nodes).of_slot(slot):
        nodes = [f"{one.node} ({size_text(one.size_bytes)})" for one in retained]
        error.hint += (
            f"\nslot {slot} still retains WAL on {list_some(nodes, NODES_NAMED_MAX)}; to end the chain, keep its"
            f" restore points, and drop the slot: snapshot end {name}"
        )
    error.details["slots"] = {one.node: one.size_bytes for one in retained}
    if isinstance(error, WalDivergedError):
        last = read_newest_part(store, name).last.increment
        error.hint += (
            "\nwhat the failover lost is still in the store, as far as an increment has it; to restore the last"
            f" increment beside the live fleet: {restore_command(name)} --increment {last} --to FILE"
        )
