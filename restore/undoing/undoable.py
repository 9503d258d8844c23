"""Find the unfinished restores that can be undone, and what would have to be confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fleet.config import Fleet
from fleet.hints import restore_command
from fleet.progress import Progress
from restore.plan import provisional_targets
from restore.publishing import is_restored
from restore.run import lock_target_fleet
from restore.targets.database_records import list_databases
from restore.targets.target import Connections, Target, lock_targets
from restore.unfinished import UnfinishedRestore, UnfinishedRestoreError, find_unfinished
from restore.unfinished_checks import check_readable, check_whole
from storage.errors import RefusedError
from storage.store import ObjectStore


class OldDatabaseMissingError(RefusedError):
    """A database that a restore put aside is gone, so it can't be put back."""


@dataclass(frozen=True, slots=True)
class Undoable:
    """The unfinished restores of the targets' databases, each with its own targets, by suffix, and what holds them.

    `inside` are sessions in the databases, if there are tables to empty.
    """

    store: ObjectStore
    targets: tuple[Target, ...]
    connections: Connections
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
    with lock_targets(targets) as connections, lock_target_fleet(target, targets, connections) as inside:
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
            _check_undoable(store, one, name)
            check_whole(one, targets, connections, store, undoes=True)
            _check_old_are_there(one, own[one.suffix], connections)
        yield Undoable(store, targets, connections, inside, found, own)


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
    for target in targets:
        databases, record = list_databases(connections[target.shard]), found.records.get(target.shard)
        if not record or not record.aside or not is_restored(databases, target, record.operation):
            continue
        if target.aside not in databases:
            raise OldDatabaseMissingError(
                f"node {target.node.id}: database {target.aside}, which the restore put aside, is gone: the old"
                " databases can't be put back on all nodes",
                hint=f"to finish the restore instead: {record.command} --resume",
                details={"node": target.node.id, "database": target.aside},
            )
