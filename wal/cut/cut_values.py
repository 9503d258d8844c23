"""A resolved cut as a value: the positions of the nodes, and the transactions that are left out.

Pure values, as commits have them; `wal.cut.resolve` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.lsn import Lsn
from fleet.record import Count, Record


class Undecided(Record, frozen=True):
    """A transaction prepared before a cut that the cut leaves out because nobody has committed it yet."""

    global_id: str
    lsn: Lsn
    end_lsn: Lsn


class NodeCut(Record, frozen=True):
    """One node's part of a resolved cut: the state is every change before `position` but those left out.

    `undecided` are left out and may come in at a later cut; `rolled_back` (positions of their PREPAREs) never
    will. `local_transactions` counts the commits since the cut before that were not two-phase.
    """

    node: str
    start: Lsn
    finish: Lsn
    position: Lsn
    local_transactions: Count
    undecided: tuple[Undecided, ...]
    rolled_back: tuple[Lsn, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A resolved cut; `global_transactions` came into the state with it.

    `in_flight` ones were prepared and not committed everywhere when it was made; `included_early` of those came
    into the state with it, because somebody had committed them. One that an earlier cut took in is not counted again,
    however long its last COMMIT PREPARED stays away.
    """

    nodes: tuple[NodeCut, ...]
    global_transactions: int
    included_early: int
    in_flight: int
