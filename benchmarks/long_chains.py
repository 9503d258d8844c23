"""Measure what commands need for the commits of a long chain of a large fleet: seconds and peak memory of the driver.

The commits are written as a create and a merge write them, without the objects that they list: so this measures what a
command reads and plans before its jobs. With a merge, commands that restore or check the newest increment read only the
commits since then. Each measurement runs in a process of its own.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import structs

from benchmarks.documents import AT, NAME, OPERATION, full_commit, next_commit
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, Commit, FullSnapshot, Increment, Previous, StoredObject
from cutline.snapshots.records.commit_rules import count_listed
from cutline.snapshots.records.documents import base_prefix, seal, unseal
from cutline.snapshots.records.merge_records import COUNTS, Begin, Merge, begin_key, merge_key
from cutline.snapshots.records.merged_chain import count_base, merged_copy, needed_segments
from cutline.snapshots.records.proven_chains import commit_key
from cutline.storage.local import LocalStore
from cutline.storage.store import ObjectStore

# Nodes, increments, and the increment of the merge; 0: none.
SIZES = ((100, 1000, 0), (1000, 1000, 0), (1000, 1000, 900), (1000, 10_000, 9900))
TABLES, FLEET = 20, "fleet"


def write_chain(store: ObjectStore, nodes: int, increments: int, merged: int) -> None:
    """Write the commits of a chain, with a merge at the increment `merged`, before which everything is given up."""
    chosen = random.Random(nodes)
    full = full_commit(nodes, TABLES, chosen)
    # One object for each copy: lists would have to be stored as well.
    bases = tuple(_base(shard, OPERATION, chosen) for shard in full.primaries)
    full = structs.replace(full, lists=(), copied=(*full.copied, *bases))
    full = structs.replace(full, counts=count_listed(set(full.primaries), full))
    full = structs.replace(full, digest=_put(store, commit_key(NAME, 0), full))
    last: Commit = full
    for number in range(1, increments + 1):
        chain = Chain(full, (last,) if isinstance(last, Increment) else (), is_partial=True)
        increment = next_commit(full, chosen, number)
        increment = structs.replace(
            increment, history=chain.next_history, previous=Previous(last.operation, last.digest)
        )
        last = structs.replace(increment, digest=_put(store, commit_key(NAME, number), increment))
        if number == merged:
            _merge(store, full, last, chosen)


def _merge(store: ObjectStore, full: FullSnapshot, commit: Increment, chosen: random.Random) -> None:
    part, operation = Chain(full, (commit,), is_partial=True), "20261121T010000Z-0123456789"
    copies = {node: merged_copy(part, node) for node in part.parts}
    merge = Merge(
        snapshot=NAME, increment=commit.increment, operation=operation, chain=full.chain, made_at=AT, seconds=1.0,
        by="", commit=commit.digest, full=full.digest, counts={}, copies=copies,
        objects=tuple(_base(node, operation, chosen) for node in copies),
        segments={node: needed_segments(commit.segments[node], copy) for node, copy in copies.items()}, proof="",
    )  # fmt: skip
    merge = structs.replace(merge, counts=dict.fromkeys(COUNTS, 0) | count_base(merge, part))
    digest = _put(store, merge_key(NAME, commit.increment), merge)
    begin = Begin(
        snapshot=NAME, chain=full.chain, increment=commit.increment, merge=digest, operation=operation, made_at=AT
    )
    _put(store, begin_key(NAME, commit.increment), begin)


def _base(node: str, operation: str, chosen: random.Random) -> StoredObject:
    key = f"{base_prefix(NAME, node, operation)}/part-000000-000000-{chosen.randbytes(4).hex()}.parquet"
    return StoredObject(key, BASE, node, 10_000, chosen.randbytes(32).hex(), dict.fromkeys(range(1, TABLES + 1), 1000))


def _put(store: ObjectStore, key: str, document: Commit | Merge | Begin) -> str:
    body = seal(document)
    store.create(key, body)
    return unseal(key, body)[1]


def continue_chain(store: ObjectStore) -> None:
    """Read what an increment reads."""
    from cutline.snapshots.ddl.table_changes import known_tables
    from cutline.snapshots.records.proven_chains import read_continued, read_continued_full

    known_tables(read_continued(store, NAME, read_continued_full(store, NAME)))


def list_chain(store: ObjectStore) -> None:
    """Read what `list` reads."""
    from cutline.snapshots.listing.listing import entry_of
    from cutline.snapshots.records.proven_chains import read_newest_part

    entry_of(store, read_newest_part(store, NAME))


def show_chain(store: ObjectStore) -> None:
    """Read what `show` reads, and write its text."""
    from cutline.cli.commands.show import lines_of
    from cutline.snapshots.listing.listing import entry_of, read_shown

    chain = read_shown(store, NAME)
    lines_of(entry_of(store, chain), chain)


def plan_check(store: ObjectStore) -> None:
    """Read the chain as a check does, and list the segments and base objects that it would read."""
    from cutline.check.new_part import NewPart
    from cutline.check.structure import check_structure

    chain, report = check_structure(store, FLEET, NAME, None, {})
    if chain is None or report.conflicts:
        raise RuntimeError(f"the chain that was written is not valid: {report.conflicts}")
    part = NewPart(chain)
    kept = [(part.segment_sources(number, node), part.bases(number, node)) for number, node in enumerate(chain.present)]
    if not kept or not part.changes:
        raise RuntimeError("the chain that was written has no segments")


def plan_restore(store: ObjectStore) -> None:
    """Read the chain as a restore does, and list the segments and base objects that it would read."""
    from cutline.snapshots.fold.amounts import amount_of_copies
    from cutline.snapshots.fold.sources import sources_of
    from cutline.snapshots.listing.listing import read_restorable

    chain = read_restorable(store, NAME, None)
    amount_of_copies(chain, chain.present)
    if not sources_of(chain, chain.primaries, store).segments:
        raise RuntimeError("the chain that was written has no segments")


COMMANDS: dict[str, Callable[[ObjectStore], None]] = {
    "increment": continue_chain,
    "list": list_chain,
    "show": show_chain,
    "check": plan_check,
    "restore": plan_restore,
}


def measure(folder: Path, command: str) -> dict[str, object]:
    """Run the part of a command that reads commits; return its processor seconds and the peak memory in MiB."""
    began = time.process_time()
    COMMANDS[command](LocalStore(folder))
    return {
        "command": command,
        "CPU seconds": round(time.process_time() - began, 2),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def measure_all(nodes: int, increments: int, merged: int) -> Iterator[str]:
    """Write a chain and measure each command in a process of its own; yield its row."""
    with tempfile.TemporaryDirectory(prefix="cutline-long-") as name:
        write_chain(LocalStore(Path(name)), nodes, increments, merged)
        for command in COMMANDS:
            words = [sys.executable, "-m", "benchmarks.long_chains", name, command]
            ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
            row = json.loads(ran.stdout) if ran.returncode == 0 else {"command": command, "failed": ran.returncode}
            yield json.dumps({"nodes": nodes, "increments": increments, "merge at": merged} | row)


def main() -> None:
    """Print a row for each size and command, or for the numbers of nodes, increments and merge in the arguments."""
    match sys.argv[1:]:
        case [folder, command]:
            print(json.dumps(measure(Path(folder), command)))
            return
        case [nodes, increments, merged]:
            sizes = [(int(nodes), int(increments), int(merged))]
        case _:
            sizes = list(SIZES)
    for size in sizes:
        for row in measure_all(*size):
            print(row, flush=True)


if __name__ == "__main__":
    main()
