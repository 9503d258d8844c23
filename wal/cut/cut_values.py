"""A resolved cut: the positions of the nodes, and the transactions before them that are not part of the state.

Plain values, which commits store; `wal.cut.resolve` computes them.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Count, Record, Time


class Undecided(Record, frozen=True):
    """A transaction that is prepared before a cut but not part of its state, because no node has committed it yet."""

    global_id: str
    lsn: Lsn
    end_lsn: Lsn


class InDoubt(Record, frozen=True):
    """One node's part of a transaction that is prepared but not yet decided on some node at the cut.

    `is_prepared`: the part is prepared on this node; otherwise it was committed here before the cut. `is_included`: the
    cut's state contains the transaction, so it must be committed; otherwise it must be rolled back. `lsn` is where the
    PREPARE of the part begins, or its COMMIT if it was committed in one phase.
    """

    gid: str
    global_id: str
    xid: Count
    lsn: Lsn
    is_prepared: bool
    is_included: bool


class NodeCut(Record, frozen=True):
    """One node's part of a resolved cut: the state contains every change before `position`, with two exceptions.

    The transactions in `undecided` are not part of the state, but may be part of a later cut's state. The transactions
    in `rolled_back`, given by the positions of their PREPAREs, never will be. `local_transactions` counts the commits
    since the previous cut that were not two-phase. `in_doubt` lists the parts of transactions that are not decided
    everywhere at the cut.

    `last_commit_at` is when the newest transaction before `position` was committed, and `marked_at` is when the start
    marker was written, both by the node's clock. If the clock was set back between a commit and the marker, the commit
    gets the marker's time. A node without commits has no `last_commit_at`.
    """

    node: str
    start: Lsn
    finish: Lsn
    position: Lsn
    local_transactions: Count
    undecided: tuple[Undecided, ...]
    rolled_back: tuple[Lsn, ...]
    in_doubt: tuple[InDoubt, ...]
    marked_at: Time
    last_commit_at: Time | UnsetType = UNSET


class Cut(Struct, frozen=True):
    """A resolved cut; `global_transactions` counts the transactions that it adds to the state.

    `in_flight` counts the transactions that were prepared but not committed everywhere at the cut. `included_early`
    counts those that the cut adds to the state because a node had committed them. A transaction that an earlier cut
    added is not counted again, even if its last COMMIT PREPARED is after that cut.
    """

    nodes: tuple[NodeCut, ...]
    global_transactions: int
    included_early: int
    in_flight: int
