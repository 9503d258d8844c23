"""What remains on the nodes of a chain that a create could not continue: its slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.fleet.units import size_text
from cutline.nodes.sessions import Sessions
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.end_marks import ChainEndedError
from cutline.storage.errors import ChainEnd, SnapshotError
from cutline.wal.drain.lags import query_retained
from cutline.wal.drain.slots import slot_name


@contextmanager
def naming_remains(sessions: Sessions, chain: Chain) -> Iterator[None]:
    """If the block ends the chain for good, name in the error the nodes that have slots of the chain, which retain WAL.

    The slots of a chain that is marked as ended have been dropped before.
    """
    try:
        yield
    except SnapshotError as error:
        if error.ends_chain is ChainEnd.FOR_GOOD and not isinstance(error, ChainEndedError):
            # The error is raised even if a node does not answer any more.
            with suppress(SnapshotError):
                _complete(error, sessions, chain)
        raise


def _complete(error: SnapshotError, sessions: Sessions, chain: Chain) -> None:
    slot, name = slot_name(chain.full.operation), chain.name
    if retained := query_retained(sessions.fleet.nodes).of_slot(slot):
        nodes = [f"{one.node} ({size_text(one.size_bytes)})" for one in retained]
        error.hint += (
            f"\nslot {slot} still retains WAL on {list_some(nodes, NODES_NAMED_MAX)}; to end the chain, keep its"
            f" restore points, and drop the slot: snapshot end {name}"
        )
    error.details["slots"] = {one.node: one.size_bytes for one in retained}
