"""Find the unfinished restores that can be undone, and what would have to be confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cutline.fleet.config import Fleet
from cutline.fleet.hints import restore_command
from cutline.fleet.nodes.privileges import quote
from cutline.fleet.nodes.watch import Watch, watch_nodes
from cutline.fleet.progress import Progress
from cutline.restore.plan import provisional_targets
from cutline.restore.publishing import check_nothing_prepared, is_restored
from cutline.restore.run import lock_target_fleet
from cutline.restore.targets.database_records import list_databases
from cutline.restore.targets.target import Connections, Target, ending_on_silence, lock_targets
from cutline.restore.unfinished import UnfinishedRestore, UnfinishedRestoreError, find_unfinished
from cutline.restore.unfinished_checks import (
    check_readable,
    check_recorded,
    check_whole,
    find_taken_for_old,
)
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore


class OldDatabaseMissingError(RefusedError):
    """A database that a restore put aside is gone, so it can't be put back."""


@dataclass(frozen=True, slots=True)
class Undoable:
    """The unfinished restores of the targets' databases, each with its own targets, by suffix, and what holds them.

    `inside` are sessions in the databases, if there are tables to empty. `watch` ends all of them if a node is silent.
    """

    store: ObjectStore
    targets: tuple[Target, ...]
    connections: Connections
    watch: Watch
    inside: Connections
    found: list[UnfinishedRestore]
    own: Mapping[str, list[Target]]


@contextmanager
def hold_undoable(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...]
) -> Iterator[Undoable]:
    """Hold the targets and find what can be undone there; raises what abandon_restore raises."""
    progress.step("find unfinished restores")
    targets, store = provisional_targets(target, nodes), source.store.open()
    with (
        watch_nodes(one.maintenance for one in targets) as watch,
        lock_targets(targets) as connections,
        lock_target_fleet(target, targets, connections) as inside,
        ending_on_silence(watch, (*connections.values(), *inside.values())),
    ):
        found = find_unfinished(store, targets, connections, progress)
        own = {
            one.suffix: [
                place
                for place in (place.named(one.suffix) for place in targets)
                if place.shard in one.databases or place.aside in list_databases(connections[place.shard])
            ]
            for one in found
        }
        for one in found:
            check_readable(one, targets)
            check_recorded(one, store)
            _check_undoable(store, one, name)
            check_whole(one, targets, connections, store, undoes=True)
            for line in find_taken_for_old(one, targets, connections):
                progress.note(line)
            _check_old_are_there(one, own[one.suffix], connections)
        yield Undoable(store, targets, connections, watch, inside, found, own)


def find_entered(found: UnfinishedRestore, targets: Iterable[Target]) -> list[str]:
    """The restored databases that have their real names already, or the databases with tables to empty, a line each."""
    if found.is_filling:
        return [
            f"{one.node.id}: the tables of database {one.database} that the restore found empty are emptied, whoever"
            " wrote their rows"
            for one in targets
        ]
    return [
        f"{one.node.id}: database {one.database}, which the restore has published, is dropped"
        for one in targets
        if found.databases.get(one.shard) == one.database
    ]


def _check_undoable(store: ObjectStore, found: UnfinishedRestore, name: str) -> None:
    if found.record is not None and found.record.snapshot != name:
        raise UnfinishedRestoreError(
            f"{found.label()} is not of snapshot {name}",
            hint=f"run: {found.record.command} --abandon",
        )
    if not found.may_be_undone(store):
        what = "has decided that its rows stay" if found.is_filling else "has published all databases"
        raise UnfinishedRestoreError(
            f"{found.label()} {what}, and can't be undone",
            hint=f"to end it: {restore_command(name, found.scope.nodes)} --resume",
        )


def _check_old_are_there(found: UnfinishedRestore, targets: list[Target], connections: Connections) -> None:
    """Raise what keeps an old database from getting its name back, before anything is marked as undone."""
    for target in targets:
        connection, record = connections[target.shard], found.records.get(target.shard)
        databases = list_databases(connection)
        if not record or not is_restored(databases, target, record.operation):
            continue
        check_nothing_prepared(target, connection)
        if not record.aside or (target.aside in databases and databases[target.aside].is_valid):
            continue
        is_gone = target.aside not in databases
        finish = f"to finish the restore instead: {record.command} --resume"
        if found.is_abandoned:
            # Nobody can finish it any more.
            finish = f"if it is lost for good, make an empty one: CREATE DATABASE {quote(target.aside)};"
        why = "is gone" if is_gone else "is invalid, as an interrupted DROP DATABASE leaves it"
        drop = [] if is_gone else [f"DROP DATABASE {quote(target.aside)};"]
        raise OldDatabaseMissingError(
            f"node {target.node.id}: database {target.aside}, which the restore put aside, {why}: the old databases"
            " can't be put back on all nodes",
            hint=[*drop, finish],
            details={"node": target.node.id, "database": target.aside},
        )
