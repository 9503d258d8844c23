"""Checking what commits and listings alone can tell: commits that fit together, archives without a hole, objects."""

from __future__ import annotations

from check.report import Conflict, SnapshotReport
from snapshots.commits import read_chain
from snapshots.manifest import Chain
from storage.errors import IndeterminateError, SnapshotError, UnreachableError
from storage.store import ObjectStore


def check_structure(
    store: ObjectStore, fleet_id: str, name: str, increment: int | None
) -> tuple[Chain | None, SnapshotReport]:
    """Read the chain and see that all it lists is there; the chain is None where it can't be read."""
    try:
        chain = read_chain(store, name, increment)
    except (UnreachableError, IndeterminateError):
        raise
    except SnapshotError as error:
        return None, _unreadable(store, name, increment, error)
    report = SnapshotReport(name, chain.last.increment)
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


def _unreadable(store: ObjectStore, name: str, increment: int | None, error: SnapshotError) -> SnapshotReport:
    if not store.exists(f"snapshots/{name}/snapshot.json") and not store.list(f"snapshots/{name}/increments"):
        raise error
    report = SnapshotReport(name, increment or 0)
    found = _text(error, "object")
    report.conflicts.append(Conflict("commit", error.message, object=found))
    return report


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
