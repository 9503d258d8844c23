"""What a command refuses that meets an unfinished restore: to begin another one, and to end what can't be ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg

from fleet.hints import SAME_TARGET, restore_command
from fleet.progress import Progress
from restore.database_records import list_databases
from restore.databases import find_closed, is_shut
from restore.target import Connections, Target
from restore.unfinished import UnfinishedRestore, UnfinishedRestoreError, find_unfinished, settle_recorded
from storage.errors import UsageError
from storage.store import ObjectStore


def check_readable(found: UnfinishedRestore) -> None:
    """Raise UnfinishedRestoreError if the restore fills tables and one of its records can't be read."""
    if unreadable := sorted(found.databases.keys() - found.records.keys()) if found.is_filling else []:
        where = ", ".join(f"database {found.databases[shard]} of {shard}" for shard in unreadable)
        raise UnfinishedRestoreError(
            f"{found.label()} ended unfinished, and its record in {where} can't be read",
            hint="resume or undo it with the version of Cutline that began it",
            details={"databases": found.databases},
        )


def check_whole(found: UnfinishedRestore, targets: Iterable[Target], connections: Connections) -> None:
    """Raise UsageError unless `targets` are all that the restore has: it ends as a whole.

    Raises UnfinishedRestoreError if it is not known what it has left in one of them.
    """
    targets, shards = list(targets), {shard for one in found.records.values() for shard in one.shards}
    if lacking := sorted(shards - {one.shard for one in targets}):
        raise UsageError(
            f"{found.label()} has shards that are not named here: {', '.join(lacking)}",
            hint="give the --to FILE and the --node that the restore had",
        )
    for target in (one for one in targets if one.shard in shards - found.databases.keys()):
        _check_not_lost(found, target, connections[target.shard])


def _check_not_lost(found: UnfinishedRestore, target: Target, connection: psycopg.Connection[Any]) -> None:
    """Raise UnfinishedRestoreError if the restore may have left something that is not found on this target."""
    where, target = f"on {target.node.id}", target.named(found.suffix)
    if found.is_filling and is_shut(target, connection):
        what, hint = f"has left in database {target.database} {where}: our role can't connect", "let it connect"
    elif found.is_filling and found.fills_all:
        what = f"has left {where}: what it kept in database {target.database} is gone"
        hint = "give the database that it has filled its name again"
    elif not found.is_filling and target.aside in list_databases(connection):
        what = f"has made of database {target.database} {where}: its comment is gone, which was its record"
        hint = f"drop or rename it, give {target.aside} its name again"
    else:
        return
    raise UnfinishedRestoreError(
        f"{found.label()} ended unfinished, and nobody knows what it {what}",
        hint=f"{hint}, then repeat the command",
        details={"operation": found.record.operation if found.record else None, "node": target.node.id},
    )


def check_no_unfinished(
    store: ObjectStore,
    name: str,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    progress: Progress,
) -> None:
    """Raise UnfinishedRestoreError if an earlier restore of the targets' databases ended unfinished.

    `name` is the snapshot that is to be restored.
    """
    targets = list(targets)
    nodes = {target.shard: target.node.id for target in targets}
    for found in find_unfinished(store, targets, connections, progress):
        check_readable(found)
        what = "rows in tables of database " * found.is_filling
        where = ", ".join(f"{what}{name} on {nodes[shard]}" for shard, name in sorted(found.databases.items()))
        command = restore_command(found.record.snapshot if found.record else name, found.scope.nodes)
        ends = [f"to undo it: {command} --abandon"] if found.may_be_undone(store) else []
        if found.record is not None and not found.is_abandoned:
            ends.insert(0, f"to go on with it: {command} --resume")
        closed = find_closed(targets, connections)
        until = f"; nobody can connect to {', '.join(closed)} until it is ended" if closed else ""
        raise UnfinishedRestoreError(
            f"{found.label()} ended unfinished: it left {where}{until}",
            hint=[*ends, SAME_TARGET],
            details={"operation": found.record.operation if found.record else None, "databases": found.databases},
        )


def find_resumable(
    store: ObjectStore,
    name: str,
    targets: Sequence[Target],
    connections: Connections,
    progress: Progress,
    *,
    settles: bool,
) -> UnfinishedRestore:
    """The only unfinished restore, of snapshot `name`; raise UnfinishedRestoreError if it can't be resumed.

    If it `settles`, the outcome of those that have left nothing is recorded.
    """
    unfinished = find_unfinished(store, targets, connections, progress)
    if not unfinished:
        if settles:
            settle_recorded(store, targets, connections)
        raise UnfinishedRestoreError(
            "no restore into these databases is unfinished",
            hint="see: snapshot list   If it had --to FILE, give the same; one that has ended needs no --resume",
        )
    if len(unfinished) > 1:
        raise UnfinishedRestoreError(
            f"several restores are unfinished: {'; '.join(one.label() for one in unfinished)}",
            hint=f"undo them, and begin again: snapshot restore {name} --abandon; or name the --node of one of them",
        )
    (found,) = unfinished
    check_readable(found)
    if found.record is None or found.is_abandoned:
        what = "is being undone" if found.is_abandoned else "ended before it recorded anything"
        raise UnfinishedRestoreError(
            f"{found.label()} {what}", hint=f"run: {restore_command(name, found.scope.nodes)} --abandon"
        )
    if found.record.snapshot != name:
        raise UnfinishedRestoreError(
            f"the unfinished restore is of snapshot {found.record.snapshot}, not of {name}",
            hint=f"run: {found.record.command} --resume",
        )
    return found
