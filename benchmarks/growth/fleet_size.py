"""What commands read of a large fleet's chain: nodes of 1 TB each, 20 tables, and 10,000 increments.

The documents are made up: the commits that `create --incremental` and `list` read, as they read them, and the object
lists of one node. The rest of the chain is only in the listing. All are in memory, so seconds are those of the command
alone. Each size runs in a process of its own, whose peak memory counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from benchmarks.memory import peak_bytes
from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import Lsn
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Column, Group
from cutline.nodes.table_state import TableState
from cutline.snapshots.operations.object_lists import read_chain_lists, split_entries, store_lists_above
from cutline.snapshots.records.chain import Chain, first_summarized
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    ChainHistory,
    CommitSummary,
    CutRecord,
    FullSnapshot,
    Increment,
    ObjectList,
    Previous,
    StoredObject,
)
from cutline.snapshots.records.documents import base_prefix, ddl_prefix, list_prefix, seal
from cutline.snapshots.records.proven_chains import (
    VOID_BYTES_MAX,
    commit_key,
    count_listed,
    read_commit,
    read_newest_part,
    read_summaries,
)
from cutline.storage.digest import digest
from cutline.storage.memory import InMemoryStore
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.segments.segments import Segment, archive_prefix, segment_key

SIZES = (10, 100, 1000)
NAME, OPERATION, TABLES, COLUMNS = "daily", "20261123T000000Z-0123456789", 20, 10
INCREMENTS, SUMMARIZED = 10_000, 64
# 1 TB in objects of 64 MB; an executor's task copies a sixteenth of it and lists what it stored.
NODE_OBJECTS, NODE_LISTS, OBJECT_BYTES = 16_384, 16, 64 << 20
DIGEST, TIME = "0123456789abcdef" * 4, "2026-11-23T00:00:00.000Z"


@dataclass(frozen=True, slots=True)
class CountingStore(InMemoryStore):
    """A store that counts what is read; a listing takes a request for 1,000 keys."""

    counts: dict[str, int] = field(default_factory=lambda: {"requests": 0, "bytes": 0})

    def read_range(self, key: str, start: int, length: int) -> bytes:
        body = InMemoryStore.read_range(self, key, start, length)
        self.counts["requests"] += 1
        self.counts["bytes"] += len(body)
        return body

    def inventory(self, prefix: str) -> Any:
        found = InMemoryStore.inventory(self, prefix)
        self.counts["requests"] += 1 + len(found) // 1000
        return found


def main() -> None:
    """Print the figures of every size as JSON, or those of the size that is given."""
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(measure(int(sys.argv[1]))) + "\n")
        return
    for nodes in SIZES:
        subprocess.run([sys.executable, "-m", "benchmarks.growth.fleet_size", str(nodes)], check=True)


def measure(nodes: int) -> dict[str, Any]:
    """What reading a chain of so many nodes takes, per command."""
    store = CountingStore("memory://fleet")
    names = [f"node-{number:04d}" for number in range(nodes)]
    full = put(store, new_full(names))
    put_increments(store, full, names)
    own = len(json.dumps([structs.asdict(one) for one in copies(names[0], 1000)])) / 1000
    found: dict[str, Any] = {
        "nodes": nodes,
        "full_bytes": store.size(commit_key(NAME, 0)),
        "full_bytes_without_lists": round(nodes * NODE_OBJECTS * own),
        "increment_bytes": store.size(commit_key(NAME, INCREMENTS)),
    }
    parts: list[Chain] = []
    found["create"] = measured(store, lambda: parts.append(read_newest_part(store, NAME)))
    found["list"] = measured(store, lambda: read_summaries(store, parts[0]))
    del parts[:]
    one = new_full(names[:1], store=store)
    found["lists of a node"] = measured(store, lambda: read_chain_lists(store, Chain(one)))
    return found


def measured(store: CountingStore, read: Callable[[], object]) -> dict[str, Any]:
    """Requests, bytes and seconds of a command, and the peak memory of the process until then."""
    store.counts.update(requests=0, bytes=0)
    began = time.monotonic()
    read()
    seconds = round(time.monotonic() - began, 2)
    return {**store.counts, "seconds": seconds, "peak_mib": peak_bytes(os.getpid()) >> 20}


def put(store: CountingStore, commit: Any) -> Any:
    """Store the commit with its counts, and read it."""
    primaries = {one.node for one in commit.cut.nodes}
    counts = count_listed(primaries, commit)
    store.create(commit_key(NAME, commit.increment), seal(structs.replace(commit, counts=counts)))
    return read_commit(store, NAME, commit.increment)


def new_full(names: list[str], store: CountingStore | None = None) -> FullSnapshot:
    """A full snapshot of these primaries; with a store, its lists are there."""
    lists: list[ObjectList] = []
    for node in names:
        if store is not None:
            for at in range(NODE_LISTS):
                part = copies(node, NODE_OBJECTS)[at::NODE_LISTS]
                lists += split_entries(store_lists_above(store, NAME, OPERATION, part, 0))[1]
            continue
        objects = NODE_OBJECTS // NODE_LISTS
        keys = [f"{list_prefix(NAME, node, OPERATION)}/base-{at:06d}-01234567.json" for at in range(NODE_LISTS)]
        rows = dict.fromkeys(range(1, TABLES + 1), 10_000_000)
        lists += [
            ObjectList(key, BASE, node, 350 * objects, DIGEST, objects, objects * OBJECT_BYTES, rows) for key in keys
        ]
    ddl = [
        StoredObject(f"{ddl_prefix(NAME, node, OPERATION)}/archive-01234567.dump.zst", DDL, node, 9999, DIGEST, {})
        for node in names
    ]
    groups = tuple(
        Group(number, "public", f"table_{number:04d}", "default", 1, tuple(columns()), 64)
        for number in range(1, TABLES + 1)
    )
    states = tuple(
        TableState(group.name, 16_384 + group.number, "739:12", "740:12", 20_000, COLUMNS, DIGEST[:32], (), None)
        for group in groups
    )
    return FullSnapshot(
        snapshot=NAME, increment=0, operation=OPERATION, chain=OPERATION, created_at=TIME, seconds=1.0, comment="",
        counts={}, cut=cut(names, 0), sequences={node: () for node in names},
        segments={node: (segment(node, 1),) for node in names}, left_out=(), fleet_id="fleet", global_id_form="exact",
        baseline=tuple(identity(node) for node in names), groups=dict.fromkeys(names, groups),
        base={node: Lsn(1) for node in names}, copied=tuple(ddl), roles={node: () for node in names},
        rules=GroupRules(), tables=dict.fromkeys(names, states), fingerprints=dict.fromkeys(names, DIGEST),
        lists=tuple(lists),
    )  # fmt: skip


def columns() -> list[Column]:
    """The columns of a table."""
    return [Column(f"column_{at}", "text", 25, -1, at, at + 1) for at in range(COLUMNS)]


def copies(node: str, count: int) -> list[StoredObject]:
    """So many base copies of a node."""
    prefix = base_prefix(NAME, node, OPERATION)
    return [
        StoredObject(
            f"{prefix}/part-{at:06d}-000000-01234567.parquet", BASE, node, OBJECT_BYTES, DIGEST, {at % TABLES + 1: 9999}
        )
        for at in range(count)
    ]


def put_increments(store: CountingStore, full: FullSnapshot, names: list[str]) -> None:
    """Store the increments that commands read; of the others only something that is no void."""
    before: Any = full
    for number in range(1, INCREMENTS + 1):
        if number % SUMMARIZED and number not in (1, INCREMENTS):
            store.create(commit_key(NAME, number), bytes(VOID_BYTES_MAX + 1))
            continue
        recent = tuple(
            summary(each, before.digest if each == before.increment else DIGEST)
            for each in range(first_summarized(number), number)
        )
        previous = Previous(
            f"op-{number - 1}" if number > 1 else OPERATION, recent[-1].digest if recent else full.digest
        )
        new = Increment(
            snapshot=NAME, increment=number, operation=f"op-{number}", chain=OPERATION, created_at=TIME, seconds=1.0,
            comment="", counts={}, cut=cut(names, number), sequences={node: () for node in names},
            segments={node: (segment(node, number + 1),) for node in names}, previous=previous,
            history=ChainHistory(full.digest, {}, recent), left_out=(),
        )  # fmt: skip
        before = put(store, new)


def summary(number: int, of_digest: str) -> CommitSummary:
    """What later commits say of an increment."""
    return CommitSummary(number, f"op-{number}", of_digest, TIME, 1.0, 1000, 100, 1 << 20, f"cut-{number}")


def segment(node: str, number: int) -> Segment:
    """A node's segment of that number: a thousand bytes of WAL."""
    key = segment_key(archive_prefix(NAME, node, OPERATION), number)
    return Segment(
        key=key, number=number, size=1 << 20, digest=DIGEST, events_at=1 << 19, events_digest=DIGEST, changes=1000,
        events=100, partials=0, truncates=0, node=node, operation=OPERATION, after=Lsn(1 + (number - 1) * 1000),
        through=Lsn(1 + number * 1000), open=None,
    )  # fmt: skip


def cut(names: list[str], number: int) -> CutRecord:
    """The cut of a commit: at the end of its segment."""
    end = Lsn(1 + (number + 1) * 1000)
    nodes = tuple(NodeCut(node, Lsn(int(end) - 1), end, end, 100, (), (), ()) for node in names)
    return CutRecord(
        id=f"cut-{number}", attempts=1, seconds=1.0, nodes=nodes, global_transactions=0, included_early=0, in_flight=0,
        made_at=TIME,
    )  # fmt: skip


def identity(node: str) -> NodeIdentity:
    """A primary."""
    return NodeIdentity(node, None, digest(node.encode())[:19], 1, 16384, "shop", 180006, "UTF8", "C", "C", False)  # noqa: FBT003


if __name__ == "__main__":
    main()
