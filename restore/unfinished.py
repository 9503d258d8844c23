"""Restores that ended unfinished, as the databases on the targets show them: find them, and name what ends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from fleet.hints import SAME_TARGET, restore_command
from fleet.nodes.beside import LOADING, is_beside
from fleet.nodes.connections import connect, raising_unreachable
from fleet.progress import Progress
from fleet.some_names import list_some
from restore.data_only.filling import find_fillings
from restore.database_records import DatabaseRecord, Phase, list_databases, parse_record
from restore.databases import find_closed, is_shut
from restore.parts.scope import WHOLE, RestoreScope
from restore.target import Connections, Target, place_of, suffix_of
from snapshots.operations.open_operations import RESTORE
from snapshots.operations.operation import read_open_intents, record_outcome
from snapshots.operations.restore_decisions import PUBLISH
from snapshots.records.operation_records import DONE, FAILED, Intent, read_decision, read_outcome
from storage.errors import IndeterminateError, RefusedError, UnreachableError, UsageError
from storage.store import ObjectStore

OTHERS_MAX = 5


class UnfinishedRestoreError(RefusedError):
    """An earlier restore of the same databases ended unfinished, and this command does not go on with it."""


@dataclass(slots=True)
class UnfinishedRestore:
    """A restore whose process is gone.

    `databases` are its databases by shard, under the names that they have now, and `records` their records. A database
    whose process was gone before it had a record has none. `is_filling`: it loads rows into tables that existed before
    it.
    """

    suffix: str
    is_filling: bool = False
    databases: dict[str, str] = field(default_factory=dict)
    records: dict[str, DatabaseRecord] = field(default_factory=dict)

    @property
    def record(self) -> DatabaseRecord | None:
        """The record of any of its databases; None if none has one."""
        return next(iter(self.records.values()), None)

    @property
    def scope(self) -> RestoreScope:
        """What it restores; the whole snapshot if no record says so."""
        return self.record.scope if self.record else WHOLE

    @property
    def last_record(self) -> DatabaseRecord:
        """The record of the database that is furthest; raise StopIteration if none has one."""
        return next(iter(sorted(self.records.values(), key=lambda one: [*Phase].index(one.phase), reverse=True)))

    def is_over(self, store: ObjectStore) -> bool:
        """Whether nothing is left to do but to remove the records: it has ended well, as its outcome says."""
        if not self.records or any(one.phase != Phase.PUBLISHED or not one.in_store for one in self.records.values()):
            return False
        outcome = read_outcome(store, next(iter(self.records.values())).operation)
        return outcome is not None and outcome.state == DONE

    @property
    def fills_all(self) -> bool:
        """Whether it has begun to fill the tables of all databases, and nothing of that was undone or has ended."""
        records = self.records.values()
        if any(one.undoing or one.phase in (Phase.PUBLISHED, Phase.ABANDONED) for one in records):
            return False
        return any(one.parts or one.phase in (Phase.INDEXING, Phase.FINISHED) for one in records)

    @property
    def was_closing(self) -> bool:
        """Whether it may have closed databases: it does when all are loaded."""
        return any(one.phase in (Phase.FINISHED, Phase.PUBLISHED, Phase.ABANDONED) for one in self.records.values())

    @property
    def is_published(self) -> bool:
        """Whether all of its databases have their real names, so that it can't be undone."""
        return bool(self.records) and all(one.phase == Phase.PUBLISHED for one in self.records.values())

    def may_be_undone(self, store: ObjectStore) -> bool:
        """Whether it can be undone: one that fills tables only until it is decided that their rows stay."""
        if not self.is_filling:
            return not self.is_published
        record = self.last_record
        decision = read_decision(store, record.operation) if record.in_store else None
        is_decided = decision is not None and decision.decision == PUBLISH
        return not is_decided and not any(one.publishes for one in self.records.values())

    @property
    def is_abandoned(self) -> bool:
        """Whether a command has begun to undo it."""
        return any(one.phase == Phase.ABANDONED for one in self.records.values())

    def label(self) -> str:
        """The restore, for a message."""
        one = self.record
        if one is None:
            return f"a restore (…{self.suffix})"
        return (
            f"restore {one.operation} of {one.snapshot} at increment {one.increment}, begun {one.began_at} ({one.by})"
        )


def find_unfinished(
    store: ObjectStore,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    progress: Progress,
) -> list[UnfinishedRestore]:
    """The unfinished restores of the targets' databases, oldest first. The caller holds their locks.

    Notes schemas and databases that look like those of a restore but belong to others.
    """
    restores: dict[str, UnfinishedRestore] = {}
    for target in targets:
        for name, database in list_databases(connections[target.shard]).items():
            record = database.record
            if name == target.database and record is not None:
                suffix = suffix_of(record.operation)
            elif is_beside(name, target.database, LOADING):
                if not database.is_trusted:
                    progress.note(
                        f"{target.node.id}: database {name} looks like one of a restore, but belongs to role"
                        f" {database.owner}, and is left alone; what that role restores, it ends itself"
                    )
                    continue
                suffix = name.rsplit("_", 1)[-1]
            else:
                continue
            found = restores.setdefault(suffix, UnfinishedRestore(suffix))
            # The real name, if it has that, is that of a later step.
            if name == target.database or target.shard not in found.databases:
                found.databases[target.shard] = name
                if record is not None and suffix_of(record.operation) == suffix:
                    found.records[target.shard] = record
        for suffix, record in _find_filled(target, connections[target.shard], progress).items():
            found = restores.setdefault(suffix, UnfinishedRestore(suffix, is_filling=True))
            found.databases[target.shard] = target.database
            if record is not None:
                found.records[target.shard] = record
    unfinished = [one for one in restores.values() if not one.is_over(store)]
    return sorted(unfinished, key=lambda one: one.record.operation if one.record else "")


def _find_filled(
    target: Target, connection: psycopg.Connection[Any], progress: Progress
) -> dict[str, DatabaseRecord | None]:
    """The records of the restores that fill the target's database, by the suffix of their ids; None: unreadable."""
    if target.database not in list_databases(connection) or is_shut(target, connection):
        return {}
    with raising_unreachable(target.node), connect(target.node) as session:
        found, others = find_fillings(session)
    if others:
        # To refuse would let anybody who may create schemas block restores.
        progress.note(
            f"{target.node.id}: database {target.database} has schemas that look like a restore's, and are not read:"
            f" {list_some(others, OTHERS_MAX)}; if nobody needs them, drop them"
        )
    return {suffix: parse_record(text) for suffix, text in found.items()}


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


def settle_recorded(
    store: ObjectStore, targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]
) -> tuple[list[str], list[str]]:
    """Record the outcome of restores of which the store knows, and the targets have nothing unfinished.

    The caller holds the targets' locks, so their processes are gone. Returns the ids of those that are done, and of
    those that made nothing.
    """
    done: list[str] = []
    failed: list[str] = []
    for intent, is_done in list(find_recorded(store, targets, connections)):
        # A store that accepts no writes keeps it open.
        with suppress(UnreachableError, IndeterminateError):
            record_outcome(store, intent, DONE if is_done else FAILED, "found so on its targets")
            (done if is_done else failed).append(intent.operation)
    return done, failed


def find_recorded(
    store: ObjectStore, targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]
) -> Iterator[tuple[Intent, bool]]:
    """The open restores into these targets of which the store knows, and whether they have decided to publish.

    Without those into databases that our role can't enter: nobody knows what they have left there.
    """
    asked = [one for one in targets if not is_shut(one, connections[one.shard])]
    places = frozenset(place_of(target, connections[target.shard]) for target in asked)
    for intent in read_open_intents(store, skips_unreadable=True):
        made = intent.targets if isinstance(intent.targets, tuple) else ()
        if intent.kind == RESTORE and made and places.issuperset(made):
            decision = read_decision(store, intent.operation)
            yield intent, decision is not None and decision.decision == PUBLISH


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
