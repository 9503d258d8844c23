"""`check`: one snapshot or all of them, read back and compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from check.checking import Checking
from check.report import CheckReport, Compared, Conflict, Skipped, SnapshotReport
from check.structure import check_listing, check_structure, names_to_check
from fleet.config import Fleet
from fleet.progress import Progress
from snapshots.documents import ManifestError
from snapshots.jobs import SparkSource
from snapshots.open_operations import read_open_operations, told_where_missing
from snapshots.operations import recorded_commits
from snapshots.schema import SECTIONS, read_schema
from snapshots.store_identity import read_identity
from snapshots.tombstones import SnapshotDeletedError, is_deleted, is_only_full
from storage.errors import SnapshotError
from storage.open import open_store
from storage.store import ObjectStore
from wal.damage import ObjectDamagedError, read_listed


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
    open_operations = read_open_operations(store, request.name)
    unread: list[ManifestError] = []
    recorded = recorded_commits(store, unread=unread)
    names = [request.name] if request.name else names_to_check(store, recorded)
    reports: list[SnapshotReport] = []
    for name in names:
        progress.step(f"check {name}")
        try:
            with told_where_missing(open_operations):
                chain, report = check_structure(store, fleet_id, name, request.increment, recorded.get(name, {}))
        except SnapshotDeletedError:
            if request.name:
                raise
            # Since it was listed: there is nothing to check any more.
            continue
        if chain is not None:
            checking = Checking(chain, store, (fleet.store_url, dict(fleet.store_options)), report, set())
            with _told_if_gone(checking):
                _check_chain(checking, request, spark, progress)
        # Whose they are can't be told from them.
        report.conflicts += [Conflict("operation", one.message, object=str(one.details["object"])) for one in unread]
        reports.append(report)
    return CheckReport(tuple(reports), time.monotonic() - began, open_operations)


def _check_chain(checking: Checking, request: CheckRequest, spark: SparkSource, progress: Progress) -> None:
    if request.metadata_only:
        check_listing(checking.store, checking.chain, checking.report)
        return
    spark.begin()
    _check_schemas(checking, checking.store)
    from check.run import check_contents

    check_contents(checking, spark, progress)


@contextmanager
def _told_if_gone(checking: Checking) -> Iterator[None]:
    """Say of a snapshot that is deleted or pruned while the block reads it just that, and of no damage."""
    store, chain, report = checking.store, checking.chain, checking.report
    problem: SnapshotError | None = None
    try:
        yield
    except SnapshotError as error:
        problem = error
    if is_deleted(store, chain.name):
        gone = Skipped(f"snapshot {chain.name}", "it was deleted while it was read")
    elif chain.increments and is_only_full(store, chain.name):
        gone = Skipped(f"increments of {chain.name}", "they were pruned while they were read")
    elif problem:
        raise problem
    else:
        return
    report.compared, report.conflicts, report.skipped = Compared(), [], [gone]


def _check_schemas(checking: Checking, store: ObjectStore) -> None:
    """Read all objects of DDL."""
    for stored in [one for commit in checking.chain.commits for one in commit.objects if one.kind in SECTIONS]:
        try:
            read_schema(read_listed(store, stored.node, stored.key, (stored.size, stored.digest)), stored)
        except ObjectDamagedError as error:
            # No row is in it: the copy can be compared all the same.
            checking.report.conflicts.append(Conflict(error.kind, error.message, node=stored.node, object=stored.key))
            continue
        checking.report.compared.objects += 1
        checking.report.compared.bytes += stored.size
