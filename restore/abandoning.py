"""Undo a restore that ended unfinished, and drop what restores have put aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from fleet.config import Fleet
from fleet.nodes.beside import OldDatabase, read_old
from fleet.nodes.sessions import in_parallel
from fleet.progress import Progress
from restore.crash_points import RestoreCrashPoint
from restore.database_records import Phase, list_databases, write_record
from restore.databases import drop_database
from restore.plan import provisional_targets
from restore.publishing import is_restored, put_back
from restore.run import lock_target_fleet
from restore.target import Target, lock_targets, place_of, target_of
from restore.unfinished import UnfinishedRestore, UnfinishedRestoreError, check_no_unfinished, find_unfinished
from snapshots.operations.operation import is_open, read_open_intents, record_outcome
from snapshots.operations.restore_decisions import ABANDON, decide_restore
from snapshots.records.operation_records import read_intent
from storage.errors import RefusedError
from storage.store import ObjectMissingError, ObjectStore

Connections = Mapping[str, psycopg.Connection[Any]]


class OldDatabaseMissingError(RefusedError):
    """A database that a restore put aside is gone, so it can't be put back."""


@dataclass(slots=True)
class AbandonReport:
    """What was undone: operations, databases that were dropped and that were put back, as `node: name`."""

    operations: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)


def abandon_restore(source: Fleet, target: Fleet, name: str, progress: Progress) -> AbandonReport:
    """Undo every unfinished restore into the target's databases: old databases get their names back.

    Raises UnfinishedRestoreError if there is none, or if one is of another snapshot than `name`; and
    OldDatabaseMissingError if a database can't be put back, before anything is changed.
    """
    progress.step("find unfinished restores")
    targets, store, report = provisional_targets(target), source.store.open(), AbandonReport()
    with lock_targets(targets) as connections, lock_target_fleet(target, targets, connections):
        found = find_unfinished(store, targets, connections)
        for one in found:
            if one.is_published:
                raise UnfinishedRestoreError(
                    f"{one.label()} has published all databases, and can't be undone",
                    hint=f"to end it: snapshot restore {name} --resume",
                )
            if one.record is not None and one.record.snapshot != name:
                raise UnfinishedRestoreError(
                    f"{one.label()} is not of snapshot {name}",
                    hint=f"run: snapshot restore {one.record.snapshot} --abandon",
                )
        progress.step("undo")
        # The newest first: it may have replaced what an older one published.
        for one in reversed(found):
            own = [_named(place, one.suffix) for place in targets if place.shard in one.databases]
            _abandon(store, one, own, connections, progress, report)
        report.operations += _end_recorded(
            store, name, frozenset(place_of(one, connections[one.shard]) for one in targets)
        )
    if not report.operations:
        raise UnfinishedRestoreError("no restore into these databases is unfinished", hint="run: snapshot list")
    return report


def _abandon(
    store: ObjectStore,
    found: UnfinishedRestore,
    targets: list[Target],
    connections: Connections,
    progress: Progress,
    report: AbandonReport,
) -> None:
    operation = found.record.operation if found.record else ""
    _check_old_are_there(found, targets, connections)
    intent = None
    if found.record is not None and found.record.in_store:
        with suppress(ObjectMissingError):
            intent = read_intent(store, operation)
            # A process that was only suspended ends by this.
            decide_restore(store, intent, ABANDON)

    def mark(target: Target) -> None:
        if record := found.records.get(target.shard):
            write_record(connections[target.shard], found.databases[target.shard], record, phase=Phase.ABANDONED)
        progress.reached(RestoreCrashPoint.ABANDONED, node=target.node.id)

    def undo(target: Target) -> None:
        connection = connections[target.shard]
        was_aside = target.aside in list_databases(connection)
        put_back(target, connection, operation)
        if was_aside and target.aside not in list_databases(connection):
            report.put_back.append(f"{target.node.id}: {target.database}")

    def drop(target: Target) -> None:
        drop_database(target, connections[target.shard], target.loading)
        report.dropped.append(f"{target.node.id}: {target.loading}")

    # From the first mark on nobody can resume it, and it is dropped only when all old databases are back.
    for work in (mark, undo, drop):
        in_parallel(work, targets)
    if intent is not None and is_open(store, operation):
        record_outcome(store, intent, "failed", "abandoned")
    report.operations.append(operation or f"…{found.suffix}")


def _named(target: Target, suffix: str) -> Target:
    """The target with the names that the operation with this suffix gives."""
    return target_of(target.shard, target.node, target.backups, suffix)


def _check_old_are_there(found: UnfinishedRestore, targets: list[Target], connections: Connections) -> None:
    for target in targets:
        databases, record = list_databases(connections[target.shard]), found.records.get(target.shard)
        if not record or not record.aside or not is_restored(databases, target, record.operation):
            continue
        if target.aside not in databases:
            raise OldDatabaseMissingError(
                f"node {target.node.id}: database {target.aside}, which the restore put aside, is gone: the old"
                " databases can't be put back on all nodes",
                hint=f"to finish the restore instead: snapshot restore {record.snapshot} --resume",
                details={"node": target.node.id, "database": target.aside},
            )


def _end_recorded(store: ObjectStore, name: str, places: frozenset[str]) -> list[str]:
    """Record that restores have failed of which the store knows and the targets have nothing; return their ids.

    The caller holds the locks of the databases at `places`, so none of them is running.
    """
    ended: list[str] = []
    for intent in read_open_intents(store, skips_unreadable=True):
        targets = intent.targets if isinstance(intent.targets, tuple) else ()
        if intent.kind == "restore" and intent.snapshot == name and targets and places.issuperset(targets):
            record_outcome(store, intent, "failed", "abandoned")
            ended.append(intent.operation)
    return ended


def discard_old(
    source: Fleet, target: Fleet, confirm: Callable[[list[OldDatabase]], None], progress: Progress
) -> list[OldDatabase]:
    """Drop the databases that restores have put aside on the target's primaries; return them.

    `confirm` is given them before, and may raise. Raises UnfinishedRestoreError: an unfinished restore may need them.
    """
    progress.step("find databases put aside")
    targets = provisional_targets(target)
    with lock_targets(targets) as connections:
        check_no_unfinished(source.store.open(), targets, connections)
        found = {one: read_old(one.node, connections[one.shard]) for one in targets}
        confirm([old for databases in found.values() for old in databases])
        progress.step("drop databases")

        def drop(one: Target) -> None:
            for old in found[one]:
                drop_database(one, connections[one.shard], old.database)

        in_parallel(drop, targets)
    return [old for databases in found.values() for old in databases]
