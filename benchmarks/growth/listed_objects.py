"""What the driver of a check or a restore holds of a large fleet's base copies: 16,384 objects of each node.

The commit and its object lists are made up (benchmarks.growth.fleet_size) and stored in a folder; objects are only in
its listing. Each size runs in two processes: one makes the documents, the other does what the driver does, and its peak
memory counts. Needs 350 MB of disk for 1 TB of a node's rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec import structs

from benchmarks.growth.fleet_size import (
    NAME,
    NODE_LISTS,
    NODE_OBJECTS,
    OBJECT_BYTES,
    OPERATION,
    SIZES,
    TABLES,
    new_full,
)
from benchmarks.memory import peak_bytes
from cutline.restore.plan.copies import find_listed_damage
from cutline.snapshots.fold.sources import BaseSource, Sources, sources_of
from cutline.snapshots.operations.object_lists import read_chain_lists, split_entries, store_lists_above
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, ObjectList, StoredObject
from cutline.snapshots.records.documents import base_prefix, seal
from cutline.snapshots.records.proven_chains import commit_key, count_listed, read_full
from cutline.spark.spark_jobs import TASKS_PER_JOB_MAX
from cutline.storage.local import LocalStore
from cutline.storage.store import Inventory, Listed

MADE_AT = datetime(2026, 11, 23, tzinfo=UTC)


class ListedStore(LocalStore):
    """A folder that lists the base copies of a node as if they were there."""

    def inventory(self, prefix: str) -> Inventory:
        node = prefix.split("/")[-2]
        if prefix != base_prefix(NAME, node, OPERATION):
            return super().inventory(prefix)
        return [Listed(one.key, one.size, MADE_AT) for one in copies(node)]


def main() -> None:
    """Print the figures of every size as JSON, or of the sizes that are given."""
    match sys.argv[1:]:
        case ["make", folder, nodes]:
            make(LocalStore(Path(folder)), int(nodes))
        case ["read", folder]:
            sys.stdout.write(json.dumps(measure(ListedStore(Path(folder)))) + "\n")
        case sizes:
            for nodes in sizes or map(str, SIZES):
                with tempfile.TemporaryDirectory() as folder:
                    for work in (["make", folder, nodes], ["read", folder]):
                        subprocess.run([sys.executable, "-m", "benchmarks.growth.listed_objects", *work], check=True)


def make(store: LocalStore, nodes: int) -> None:
    """Store the object lists of so many nodes, and the commit that names them."""
    lists: list[ObjectList] = []
    names = [f"node-{number:04d}" for number in range(nodes)]
    for node in names:
        objects = copies(node)
        for at in range(NODE_LISTS):
            part = objects[at::NODE_LISTS]
            lists += split_entries(store_lists_above(store, NAME, OPERATION, part, 0))[1]
    full = structs.replace(new_full(names), lists=tuple(lists))
    counts = count_listed(set(names), full)
    store.create(commit_key(NAME, 0), seal(structs.replace(full, counts=counts)))


def copies(node: str) -> list[StoredObject]:
    """The base copies of a node, with digests, names and sizes that can't be compressed, as real ones."""
    prefix, found = base_prefix(NAME, node, OPERATION), list[StoredObject]()
    for at in range(NODE_OBJECTS):
        drawn = sha256(f"{node} {at}".encode()).hexdigest()
        key, size = f"{prefix}/part-{at:06d}-000000-{drawn[:8]}.parquet", OBJECT_BYTES - int(drawn[:4], 16)
        found.append(StoredObject(key, BASE, node, size, drawn, {at % TABLES + 1: int(drawn[:5], 16)}))
    return found


def measure(store: ListedStore) -> dict[str, Any]:
    """Peak memory of the process, and seconds, as the driver reads the lists, makes a check's tasks and lists objects.

    `before` is the process with its imports, `commit` with the commit.
    """
    found: dict[str, Any] = {"before": peak_mib()}
    full = read_full(store, NAME)
    found |= {"nodes": len(full.baseline), "commit": peak_mib()}
    chains: list[Chain] = []
    found["lists"] = measured(lambda: chains.append(read_chain_lists(store, Chain(full))))
    sources: list[Sources] = []
    found["sources"] = measured(lambda: sources.append(sources_of(chains[0], tuple(full.parts), store)))
    found["objects"] = len(sources[0].bases)
    found["tasks"] = measured(lambda: pass_jobs(iter(sources[0].bases)))
    found["listings of a restore"] = measured(lambda: find_listed_damage(store, chains[0]))
    found["tasks of a restore"] = measured(lambda: pass_jobs(sources[0].bases.interleaved()))
    return found


def pass_jobs(bases: Iterator[BaseSource]) -> None:
    """Hold the base sources of one job after the other."""
    while list(islice(bases, TASKS_PER_JOB_MAX)):
        pass


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Seconds, and the peak memory of the process until then."""
    began = time.monotonic()
    work()
    return {"seconds": round(time.monotonic() - began, 1), "peak_mib": peak_mib()}


def peak_mib() -> int:
    """The peak memory of this process until now."""
    return peak_bytes(os.getpid()) >> 20


if __name__ == "__main__":
    main()
