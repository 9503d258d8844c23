"""What an increment does with each of thousands of tables of which none has changed takes less than reading them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.documents import full_commit
from cutline.fleet.config import Node
from cutline.snapshots.create.cut_attempt import list_definitions
from cutline.snapshots.create.prepare_tables import PreparedTables
from cutline.snapshots.ddl.table_changes import DdlPlan, KnownTables, ShardPlan, known_tables
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import FullInParts, FullSnapshot
from cutline.snapshots.records.documents import parse_document, seal, unseal
from cutline.wal.decoding.known_definitions import KnownDefinitions

TABLES, ATTEMPTS = 20_000, 5
# Of the processor time for reading the commit. It was 0.7, and 1.3 while each table was asked for its name.
RATIO_MAX = 1.0


def least_seconds(work: Callable[[], object]) -> float:
    """Of processor time, which other load does not add to."""
    taken: list[float] = []
    for _ in range(ATTEMPTS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


def test_tables_that_have_not_changed_are_not_gone_through_one_by_one() -> None:
    content, _ = unseal("snapshots/nightly/snapshot.json", seal(full_commit(1, TABLES, random.Random(1))))

    def read() -> FullSnapshot:
        full: FullSnapshot = parse_document("snapshots/nightly/snapshot.json", content, FullInParts, is_proven=True)
        return full

    full = read()
    (shard,) = full.primaries

    def prepare() -> None:
        chain = Chain(full)
        assert chain.count_groups(shard) == TABLES
        known = known_tables(chain)
        definitions = list_definitions(Node(shard, "postgresql:///x"), known, unchanged(known))
        assert [definition.is_gone for definition in definitions] == [False] * TABLES
        KnownDefinitions(definitions)

    assert least_seconds(prepare) < RATIO_MAX * least_seconds(read)


def unchanged(known: KnownTables) -> PreparedTables:
    """The plan of an increment without DDL."""
    plans = {shard: ShardPlan(groups, (), (), known.states[shard]) for shard, groups in known.groups.items()}
    return PreparedTables(DdlPlan(plans, {}), {})
