"""The starting point of a chain's next cut: tables, archive and last cut as the commits record them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import Lsn
from cutline.snapshots.create.make_cut import LastCut
from cutline.snapshots.ddl.table_changes import KnownTables, NodeTables, TableSelection, known_tables
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.cut_times import cut_time
from cutline.wal.segments.archive import Segment


@dataclass(frozen=True, slots=True)
class ChainState:
    """A chain before its next cut.

    `chain` is the id of the operation that began it. `known` are the tables as its last commit records them, `seen` as
    the primaries' catalogs were last read. `base` is the position at which each node's archive begins, `segments` the
    newest that commits list, `last_cut` the last cut on each primary, `last_at` when it was made.
    """

    chain: str
    selection: TableSelection
    known: KnownTables
    seen: Mapping[str, NodeTables]
    base: Mapping[str, Lsn]
    segments: Mapping[str, tuple[Segment, ...]]
    last_cut: Mapping[str, LastCut]
    last_at: datetime | None = None


def state_of(chain: Chain, rules: GroupRules, seen: Mapping[str, NodeTables]) -> ChainState:
    """The state of a chain that is continued under `rules`."""
    return ChainState(
        chain.full.operation,
        TableSelection(chain.full.fleet_id, rules),
        known_tables(chain),
        seen,
        chain.full.base,
        {node.node: chain.newest_segments(node.node) for node in chain.nodes},
        {
            cut.node: LastCut(cut.position, cut.undecided, cut.in_doubt, cut.last_commit_at)
            for cut in chain.last.cut.nodes
        },
        cut_time(chain.last),
    )
