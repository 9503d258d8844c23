"""An increment calls no function for each of thousands of unchanged tables."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from benchmarks.documents import full_commit
from cutline.fleet.config import Node
from cutline.snapshots.create.cut_attempt import list_definitions
from cutline.snapshots.create.prepare_tables import PreparedTables
from cutline.snapshots.ddl.table_changes import DdlPlan, KnownTables, ShardPlan, known_tables
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import FullInParts, FullSnapshot
from cutline.snapshots.records.documents import parse_document, seal, unseal
from cutline.wal.decoding.known_definitions import KnownDefinitions

FEW, MANY = 50, 5_000


def count_calls(work: Callable[[], object]) -> int:
    """Count the calls of functions, in Python and in C, and the steps of generators."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def calls_for(tables: int) -> int:
    content, _ = unseal("snapshots/nightly/snapshot.json", seal(full_commit(1, tables, random.Random(1))))
    full: FullSnapshot = parse_document("snapshots/nightly/snapshot.json", content, FullInParts, is_proven=True)
    (shard,) = full.primaries

    def prepare() -> None:
        chain = Chain(full)
        assert chain.count_groups(shard) == tables
        known = known_tables(chain)
        definitions = list_definitions(Node(shard, "postgresql:///x"), known, unchanged(known))
        assert [definition.is_gone for definition in definitions] == [False] * tables
        KnownDefinitions(definitions)

    prepare()  # What is computed once for all is not counted.
    return count_calls(prepare)


def test_no_function_is_called_for_each_unchanged_table() -> None:
    # Garbage that is collected meanwhile may have its own calls.
    assert 0 < calls_for(MANY) < calls_for(FEW) + (MANY - FEW) / 10


def unchanged(known: KnownTables) -> PreparedTables:
    """The plan of an increment without DDL."""
    plans = {shard: ShardPlan(groups, (), (), known.states[shard]) for shard, groups in known.groups.items()}
    return PreparedTables(DdlPlan(plans, {}), {})
