"""Measure the commits of large fleets: their size, and the time and memory that a create takes to seal and read them.

The commits are generated, with the columns of an ordinary table, and with random oids, positions and digests, so that
they are compressed no better than real ones. Each measurement runs in a process of its own.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from msgspec import structs

from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Column, Group
from cutline.nodes.table_state import TableState
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    CutRecord,
    DatabaseFacts,
    FullInParts,
    FullSnapshot,
    Increment,
    ObjectList,
    Previous,
    StoredObject,
)
from cutline.snapshots.records.commit_rules import check_commit, count_listed
from cutline.snapshots.records.documents import parse_document, seal, unseal
from cutline.snapshots.records.proven_chains import commit_key
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.segments.archive import Segment

# Nodes, and tables of each.
SIZES = ((10, 20), (100, 20), (1000, 20), (1, 5000), (20, 5000), (100, 5000), (1, 100_000))
NAME, OPERATION = "nightly", "20261120T010000Z-0123456789"
TYPES = (
    ("bigint", 20), ("text", 25), ("timestamp with time zone", 1184), ("numeric(12,2)", 1700), ("integer", 23),
    ("uuid", 2950), ("jsonb", 3802), ("boolean", 16),
)  # fmt: skip
AT = Time("2026-11-20T01:00:00.000Z")
# A terabyte in base-copy objects of 64 MB takes two object lists.
LISTS, LISTED = 2, 8192


def full_commit(nodes: int, tables: int, chosen: random.Random) -> FullSnapshot:
    """Return the commit of a full snapshot of `nodes` primaries with `tables` tables each, in two object lists each."""
    shards = [f"shard{number:04}" for number in range(nodes)]
    columns = tuple(
        Column(f"column_{place}", type_, oid, -1, place, place + 1) for place, (type_, oid) in enumerate(TYPES)
    )
    groups = tuple(
        Group(number + 1, f"tenant_{number // 50:05}", f"table_{number % 50:02}", "default", 1, columns)
        for number in range(tables)
    )
    rows = {group.number: 1000 for group in groups}
    made = FullSnapshot(
        snapshot=NAME, increment=0, operation=OPERATION, chain=OPERATION, created_at=AT, seconds=1.0, comment="",
        counts={}, cut=_cut(shards, 0, chosen), sequences=dict.fromkeys(shards, ()),
        segments={shard: (_segment(shard, 1, chosen),) for shard in shards}, fleet_id="fleet", global_id_form="exact",
        baseline=tuple(
            _identity(shard, chosen)
            for shard in shards
        ),
        groups=dict.fromkeys(shards, groups), base={shard: Lsn(1 << 30) for shard in shards},
        copied=tuple(
            StoredObject(
                f"snapshots/{NAME}/schema/{shard}/{OPERATION}/archive-{chosen.randbytes(4).hex()}.dump.zst", DDL, shard,
                10_000, _digest(chosen), {},
            )
            for shard in shards
        ),
        roles=dict.fromkeys(shards, ()), rules=GroupRules(),
        tables={shard: _states(groups, chosen) for shard in shards},
        fingerprints={shard: chosen.randbytes(16).hex() for shard in shards},
        databases={shard: DatabaseFacts(1 << 40) for shard in shards},
        lists=tuple(
            ObjectList(
                f"snapshots/{NAME}/lists/{shard}/{OPERATION}/base-{part:06d}-{chosen.randbytes(4).hex()}.json", BASE,
                shard, 1 << 20, _digest(chosen), LISTED, LISTED << 26, rows if part == 0 else {},
            )
            for shard in shards
            for part in range(LISTS)
        ),
    )  # fmt: skip
    return structs.replace(made, counts=count_listed(set(shards), made))


def next_commit(full: FullSnapshot, chosen: random.Random, number: int = 1) -> Increment:
    """Return the commit of an increment, with a segment of each node; the history is that of the first."""
    shards = list(full.primaries)
    made = Increment(
        snapshot=NAME, increment=number, operation=f"20261120T020000Z-{number:010d}", chain=OPERATION, created_at=AT,
        seconds=1.0, comment="", counts={}, cut=_cut(shards, number, chosen), sequences=dict.fromkeys(shards, ()),
        segments={shard: (_segment(shard, number + 1, chosen),) for shard in shards}, history=Chain(full).next_history,
        previous=Previous(full.operation, full.digest), databases={shard: DatabaseFacts(1 << 40) for shard in shards},
    )  # fmt: skip
    return structs.replace(made, counts=count_listed(set(shards), made))


def _identity(shard: str, chosen: random.Random) -> NodeIdentity:
    system = str(chosen.getrandbits(62))
    return NodeIdentity(shard, None, system, 1, 5, "shop", 180006, "UTF8", "C", "C", in_recovery=False)


def _states(groups: tuple[Group, ...], chosen: random.Random) -> tuple[TableState, ...]:
    states, oid = [], chosen.randrange(16_384, 1 << 24)
    for group in groups:
        oid += chosen.randrange(3, 12)
        stamp = oid // 7
        columns = " ".join(f"{column.number}.{stamp}" for column in group.columns)
        states.append(TableState(group.name, oid, "16450 801", f"{oid + 3} {stamp}", oid, 8, columns, (), None))
    return tuple(states)


def _cut(shards: list[str], number: int, chosen: random.Random) -> CutRecord:
    # Near the end of the commit's segments.
    start = ((number + 2) << 30) - 2000
    nodes = tuple(
        NodeCut(shard, Lsn(start + 1), Lsn(start + 1000), Lsn(start + chosen.randrange(2, 999)), 0, (), (), (), AT)
        for shard in shards
    )
    return CutRecord(
        id=f"{OPERATION}.{number + 1}", attempts=1, seconds=0.1, nodes=nodes, global_transactions=0, included_early=0,
        in_flight=0, made_at=AT, safe_at=AT, skew_seconds=0.0,
    )  # fmt: skip


def _segment(shard: str, number: int, chosen: random.Random) -> Segment:
    after = (1 << 30) + ((number - 1) << 30)
    return Segment(
        key=f"snapshots/{NAME}/wal/{shard}/{OPERATION}/{number:020d}.parquet", number=number, size=2600,
        digest=_digest(chosen), changes=3, events=2, partials=0, truncates=0, node=shard, operation=OPERATION,
        after=Lsn(after), through=Lsn(after + (1 << 30)), open=None,
    )  # fmt: skip


def _digest(chosen: random.Random) -> str:
    return chosen.randbytes(32).hex()


def measure(nodes: int, tables: int) -> dict[str, object]:
    """Seal, read and check both commits; return the sizes, the processor seconds and the peak memory in MiB."""
    chosen = random.Random(nodes * tables)
    full = full_commit(nodes, tables, chosen)
    began = time.process_time()
    body = seal(full)
    sealed = time.process_time() - began
    full = structs.replace(full, digest=unseal(commit_key(NAME, 0), body)[1])
    increment = next_commit(full, chosen)
    following = seal(increment)
    del full, increment
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    for key, stored in ((commit_key(NAME, 0), body), (commit_key(NAME, 1), following)):
        content, _ = unseal(key, stored)
        check_commit(parse_document(key, content, FullInParts | Increment))
    return {
        "nodes": nodes,
        "tables": nodes * tables,
        "full bytes": len(body),
        "increment bytes": len(following),
        "seal seconds": round(sealed, 2),
        "read seconds": round(time.process_time() - began, 2),
        "MiB before reading": before >> 10,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def measure_all() -> Iterator[str]:
    """Measure each size in a process of its own; yield its row."""
    for nodes, tables in SIZES:
        command = [sys.executable, "-m", "benchmarks.documents", str(nodes), str(tables)]
        yield subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    """Print a row for each size, or for the numbers of nodes and of tables of each in the arguments."""
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
        return
    for row in measure_all():
        print(row, flush=True)


if __name__ == "__main__":
    main()
