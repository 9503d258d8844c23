"""`check`: one snapshot or all of them, read back and compared."""

from __future__ import annotations

import time
from dataclasses import dataclass

from check.checking import Checking
from check.report import CheckReport, Conflict, Skipped, SnapshotReport
from check.structure import check_listing, check_structure, names_to_check
from fleet.config import Fleet
from fleet.progress import Progress
from snapshots.jobs import SparkSource
from snapshots.operations import recorded_commits
from snapshots.store_identity import read_identity
from storage.digest import digest
from storage.open import open_store
from storage.store import ObjectMissingError, ObjectStore


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What to check: one snapshot up to an increment (None: the newest), or without a name all of them."""

    name: str | None = None
    increment: int | None = None
    metadata_only: bool = False


def check_snapshots(fleet: Fleet, request: CheckRequest, spark: SparkSource, progress: Progress) -> CheckReport:
    """Check what is asked for. Spark is started only once there is something to read."""
    began = time.monotonic()
    store = open_store(fleet.store_url, fleet.store_options)
    fleet_id = read_identity(store, fleet).fleet_id
    recorded = recorded_commits(store)
    names = [request.name] if request.name else names_to_check(store, recorded)
    reports: list[SnapshotReport] = []
    for name in names:
        progress.step(f"check {name}")
        chain, report = check_structure(store, fleet_id, name, request.increment, recorded.get(name, {}))
        reports.append(report)
        if chain is None:
            continue
        checking = Checking(chain, store, (fleet.store_url, dict(fleet.store_options)), report, set())
        if request.metadata_only:
            checking.damaged |= check_listing(store, chain, report)
            report.compared.objects = sum(len(commit.object_sizes) for commit in chain.commits)
            report.skipped.append(Skipped("contents of the objects", "--metadata-only"))
            continue
        spark.begin()
        _check_schemas(checking, store)
        from check.run import check_contents

        check_contents(checking, spark, progress)
    return CheckReport(tuple(reports), time.monotonic() - began)


def _check_schemas(checking: Checking, store: ObjectStore) -> None:
    """Read the DDL objects, of which each shard has two."""
    for stored in checking.chain.part.objects:
        if stored.kind == "base":
            continue
        try:
            body = store.read(stored.key)
        except ObjectMissingError:
            kind, detail = "missing", f"object {stored.key} is not in the store"
        else:
            if digest(body) == stored.digest:
                checking.report.compared.objects += 1
                checking.report.compared.bytes += len(body)
                continue
            kind, detail = "digest", f"object {stored.key}: its bytes are not those that were committed"
        checking.report.conflicts.append(Conflict(kind, detail, node=stored.node, object=stored.key))
