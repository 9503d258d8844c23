"""Restores that ended unfinished, as the databases on the targets show them: find them, and name what ends them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from cutline.fleet.nodes.beside import LOADING, is_beside
from cutline.fleet.nodes.connections import raising_unreachable
from cutline.fleet.progress import Progress
from cutline.fleet.some_names import list_some
from cutline.restore.data_only.filling import find_fillings
from cutline.restore.parts.scope import WHOLE, RestoreScope
from cutline.restore.remains import find_remains
from cutline.restore.targets.database_records import DatabaseRecord, FoundDatabase, Phase, list_databases, parse_record
from cutline.restore.targets.databases import is_shut, open_session
from cutline.restore.targets.target import Target, place_of, server_of, start_of, suffix_of
from cutline.snapshots.operations.open_operations import RESTORE
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.operations.recorded import read_open_intents
from cutline.snapshots.operations.restore_decisions import PUBLISH
from cutline.snapshots.records.operation_records import DONE, FAILED, Intent, read_decision, read_outcome
from cutline.storage.errors import IndeterminateError, RefusedError, UnreachableError
from cutline.storage.store import ObjectStore

OTHERS_MAX = 5


class UnfinishedRestoreError(RefusedError):
    """An earlier restore of the same databases ended unfinished, and this command does not go on with it."""


@dataclass(slots=True)
class UnfinishedRestore:
    """A restore whose process is gone.

    `databases` are its databases by shard, under the names that they have now, and `records` their records. A database
    whose process was gone before it had a record has none. `is_filling`: it loads rows into tables that existed before
    it. `foreign`: by shard where none is found, a database of its name that belongs to a role whose records do not
    count, and that role. `doubled`: shards where two databases are of it, which no restore makes.
    """

    suffix: str
    is_filling: bool = False
    databases: dict[str, str] = field(default_factory=dict)
    records: dict[str, DatabaseRecord] = field(default_factory=dict)
    foreign: dict[str, tuple[str, str]] = field(default_factory=dict)
    doubled: set[str] = field(default_factory=set)

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
        """The record of the database that is furthest; raise ValueError if none has one."""
        return max(self.records.values(), key=lambda one: [*Phase].index(one.phase))

    @property
    def shards(self) -> set[str]:
        """All that it restores, as far as records say so."""
        return {shard for one in self.records.values() for shard in one.shards}

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

    def is_decided(self, store: ObjectStore) -> bool:
        """Whether it is decided that its databases get their real names, or that the rows stay."""
        record = self.record
        if record is None:
            return False
        # Whoever is published was decided: the record with the decision may be removed already.
        if any(one.publishes or one.phase == Phase.PUBLISHED for one in self.records.values()):
            return True
        decision = read_decision(store, record.operation) if record.in_store else None
        return self.may_be_decided and decision is not None and decision.decision == PUBLISH

    @property
    def may_be_decided(self) -> bool:
        """Whether its process can have decided to publish: it does when all databases are finished.

        So a decision in the store before that was planted there. All databases have records before one is finished: one
        without a record has lost it.
        """
        return bool(self.records) and {one.phase for one in self.records.values()} <= {Phase.FINISHED, Phase.PUBLISHED}

    def may_be_undone(self, store: ObjectStore) -> bool:
        """Whether it can be undone: one that fills tables only until it is decided that their rows stay."""
        return not (self.is_decided(store) if self.is_filling else self.is_published)

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
    foreign: dict[str, dict[str, tuple[str, str]]] = {}
    for target in targets:
        for name, database in list_databases(connections[target.shard]).items():
            record = database.record
            is_loading = is_beside(name, target.database, LOADING)
            if not database.is_trusted and (is_loading or (name == target.database and database.claim is not None)):
                suffix = name.rsplit("_", 1)[-1] if is_loading else suffix_of(_claimed(database))
                foreign.setdefault(suffix, {})[target.shard] = (name, database.owner)
                progress.note(
                    f"{target.node.id}: database {name} looks like one of a restore, but belongs to role"
                    f" {database.owner}, and is left alone: only that role can resume or undo a restore of its own"
                )
                continue
            if name == target.database and record is not None:
                suffix = suffix_of(record.operation)
            elif is_loading:
                suffix = name.rsplit("_", 1)[-1]
            else:
                continue
            found = restores.setdefault(suffix, UnfinishedRestore(suffix))
            if target.shard in found.databases:
                found.doubled.add(target.shard)
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
    for suffix, found in restores.items():
        lacking = found.shards - found.databases.keys()
        found.foreign = {shard: one for shard, one in foreign.get(suffix, {}).items() if shard in lacking}
    unfinished = [one for one in restores.values() if not one.is_over(store)]
    return sorted(unfinished, key=lambda one: one.record.operation if one.record else "")


def _claimed(database: FoundDatabase) -> str:
    return database.claim.operation if database.claim else ""


def _find_filled(
    target: Target, connection: psycopg.Connection[Any], progress: Progress
) -> dict[str, DatabaseRecord | None]:
    """The records of the restores that fill the target's database, by the suffix of their ids; None: unreadable."""
    session = open_session(target, connection)
    if session is None:
        return {}
    with raising_unreachable(target.node), session:
        found, others = find_fillings(session)
    if others:
        # To refuse would let anybody who may create schemas block restores.
        progress.note(
            f"{target.node.id}: database {target.database} has schemas that have the names of a restore's, and are not"
            f" read: {list_some(others, OTHERS_MAX)}; if nobody needs them, drop them"
        )
    return {suffix: parse_record(text) for suffix, text in found.items()}


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
    store: ObjectStore,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    without: Iterable[str] = (),
) -> Iterator[tuple[Intent, bool]]:
    """The open restores into these targets of which the store knows, and whether they have decided to publish.

    Without those into databases that our role can't enter: nobody knows what they have left there. And without those of
    which anything is left, whoever owns it, or that were begun on servers that have another address and were started at
    another time: of one server the other may be a physical copy. What is left of those with the suffixes `without` is
    not looked at.
    """
    asked = [one for one in targets if not is_shut(one, connections[one.shard])]
    places = frozenset(place_of(target, connections[target.shard]) for target in asked)
    servers, started = (frozenset(ask(connections[one.shard]) for one in asked) for ask in (server_of, start_of))
    remains = find_remains(asked, connections).keys() - set(without)
    for intent in read_open_intents(store, skips_unreadable=True):
        made = intent.targets if isinstance(intent.targets, tuple) else ()
        at, since = (one if isinstance(one, tuple) else () for one in (intent.servers, intent.started))
        is_here = places.issuperset(made) and (servers.issuperset(at) or bool(since and started.issuperset(since)))
        if intent.kind == RESTORE and made and is_here and suffix_of(intent.operation) not in remains:
            decision = read_decision(store, intent.operation)
            yield intent, decision is not None and decision.decision == PUBLISH
