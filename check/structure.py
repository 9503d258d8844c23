"""Checking what commits and listings alone can tell: commits that fit together, archives without a hole, objects."""

from __future__ import annotations

from collections.abc import Mapping

from check.report import Conflict, SnapshotReport
from snapshots.commits import SnapshotMissingError, commit_key, increment_numbers, read_chain, snapshot_names
from snapshots.manifest import Chain
from storage.errors import IndeterminateError, SnapshotError, UnreachableError, UsageError
from storage.store import ObjectStore


def names_to_check(store: ObjectStore, recorded: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Every snapshot that exists, and those that are recorded and of which something is left."""
    left = [name for name in recorded if store.list_children(f"snapshots/{name}")]
    return sorted({*snapshot_names(store), *left})


def check_structure(
    store: ObjectStore, fleet_id: str, name: str, increment: int | None, recorded: Mapping[str, int]
) -> tuple[Chain | None, SnapshotReport]:
    """Read the chain and see that it is whole; the chain is None where it can't be read.

    `recorded` are the increments that operations say they have committed: a commit file that is gone leaves no
    other trace where it was the last.
    """
    try:
        chain = read_chain(store, name, increment)
    except (UnreachableError, IndeterminateError, UsageError):
        raise
    except SnapshotError as error:
        if isinstance(error, SnapshotMissingError) and not _was_there(store, name, error, recorded):
            raise
        report = SnapshotReport(name, increment or 0)
        report.conflicts.append(Conflict("commit", error.message, object=_text(error, "object")))
        return None, report
    report = SnapshotReport(name, chain.last.increment, append_only=chain.append_only)
    if increment is None:
        report.conflicts += _lost(chain, recorded)
    if chain.part.fleet_id != fleet_id:
        detail = f"the store is of fleet {fleet_id}, the snapshot of {chain.part.fleet_id}"
        report.conflicts.append(Conflict("fleet", detail, object="fleet.json"))
    try:
        chain.check_archive()
    except SnapshotError as error:
        report.conflicts.append(
            Conflict("archive", error.message, node=_text(error, "node"), object=_text(error, "object"))
        )
    return chain, report


def _lost(chain: Chain, recorded: Mapping[str, int]) -> list[Conflict]:
    # Ids sort by time: operations before the full snapshot's were of another chain of that name.
    numbers = {number for operation, number in recorded.items() if operation > chain.full.operation}
    return [
        Conflict(
            "missing",
            f"increment {number} was committed, and its commit file is gone",
            object=commit_key(chain.name, number),
        )
        for number in sorted(numbers)
        if number > chain.last.increment
    ]


def _was_there(store: ObjectStore, name: str, missing: SnapshotMissingError, recorded: Mapping[str, int]) -> bool:
    """Whether the commit that is missing was there once: later ones are, or an operation says so."""
    number = int(str(missing.details["increment"]))
    if number < max(increment_numbers(store, name), default=-1):
        return True
    return number in recorded.values() and bool(store.list_children(f"snapshots/{name}"))


def _text(error: SnapshotError, name: str) -> str | None:
    value = error.details.get(name)
    return str(value) if value is not None else None


def check_listing(store: ObjectStore, chain: Chain, report: SnapshotReport) -> set[str]:
    """See that every object that the chain lists is there in its size; return the nodes that lack one."""
    damaged: set[str] = set()
    nodes = {s.key: node for commit in chain.commits for node, found in commit.segments.items() for s in found}
    nodes |= {stored.key: stored.node for stored in chain.part.objects}
    present = {key for part in ("base", "wal", "schema") for key in store.list(f"snapshots/{chain.name}/{part}")}
    for commit in chain.commits:
        for key, size in commit.object_sizes.items():
            if key not in present:
                kind, detail = "missing", f"object {key} is not in the store"
            elif (found := store.size(key)) != size:
                kind, detail = "size", f"object {key} has {found} bytes instead of {size}"
            else:
                continue
            report.conflicts.append(Conflict(kind, detail, node=nodes[key], object=key))
            damaged.add(nodes[key])
    return damaged
