"""Find unfinished restores by what they left in the targets' databases, and refuse commands because of them.

Only objects that belong to our role or a superuser are read (restore/targets/databases.py). A restore must not be
reported as undone or complete just because its objects belong to another role.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import psycopg
from msgspec import Struct, field

from cutline.fleet.messages import SAME_TARGET, abandon_command, list_some, restore_command, resume_command
from cutline.fleet.progress import Progress
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.other_databases import FILLING, LOADING, is_beside
from cutline.nodes.problems import quote
from cutline.restore.rows.filling import find_fillings
from cutline.restore.scope.scope import WHOLE, RestoreScope
from cutline.restore.targets.databases import (
    DatabaseRecord,
    FoundDatabase,
    Phase,
    clear_records,
    find_closed,
    is_empty,
    is_shut,
    list_databases,
    open_session,
    parse_record,
)
from cutline.restore.targets.target import Connections, Target, addresses_of, place_of, server_of, start_of, suffix_of
from cutline.snapshots.operations.open_operations import RESTORE, document_names, read_open_intents
from cutline.snapshots.operations.operation import PUBLISH, list_decided, record_outcome
from cutline.snapshots.records.operation_records import (
    DONE,
    FAILED,
    Intent,
    operation_key,
    read_decision,
    read_intent,
    read_outcome,
)
from cutline.storage.errors import IndeterminateError, RefusedError, SnapshotError, UnreachableError, UsageError
from cutline.storage.store import ObjectStore

# Exclude schemas that belong to our role or superusers: they are read elsewhere, and may come from a copied database.
SCHEMAS_QUERY = f"""
SELECT nspname FROM pg_namespace
 WHERE nspname ~ '^{FILLING}[0-9a-f]{{10}}$'
   AND nspowner NOT IN (SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user)
"""


def find_remains(targets: Iterable[Target], connections: Connections) -> dict[str, str]:
    """Describe the databases and schemas that unfinished restores left behind, keyed by the suffix of the restore's id.

    Raises NodeUnreachableError.
    """
    remains: dict[str, str] = {}
    for target in targets:
        connection = connections[target.shard]
        for name, database in list_databases(connection).items():
            what = f"database {name} on {target.node.id}, which belongs to role {database.owner}"
            if is_beside(name, target.database, LOADING):
                remains[name.rsplit("_", 1)[-1]] = what
            elif name == target.database and database.claim is not None:
                remains[suffix_of(database.claim.operation)] = what
        session = open_session(target, connection)
        if session is None:
            continue
        with raising_unreachable(target.node), session:
            for (schema,) in session.execute(SCHEMAS_QUERY.encode()):
                where = f"database {target.database} on {target.node.id}"
                remains[schema.removeprefix(FILLING)] = f"schema {schema} in {where}"
    return remains


OTHERS_MAX = 5


class UnfinishedRestoreError(RefusedError):
    """An earlier restore of the same databases did not finish, and this command can't continue it."""


class UnfinishedRestore(Struct):
    """A restore whose process has ended.

    `databases` are the current names of its databases, keyed by shard, and `records` are their records. A database has
    no record if the process ended before writing it. `is_filling`: the restore loads rows into tables that existed
    before. `foreign`: for shards where no database of the restore was found, a database with the right name and its
    owner, a role whose records are not trusted. `doubled`: shards where two databases claim to belong to the restore,
    which a restore itself never causes.
    """

    suffix: str
    is_filling: bool = False
    databases: dict[str, str] = field(default_factory=dict)
    records: dict[str, DatabaseRecord] = field(default_factory=dict)
    foreign: dict[str, tuple[str, str]] = field(default_factory=dict)
    doubled: set[str] = field(default_factory=set)

    @property
    def record(self) -> DatabaseRecord | None:
        """The record of one of the databases, or None."""
        return next(iter(self.records.values()), None)

    @property
    def scope(self) -> RestoreScope:
        """The scope of the restore; the whole snapshot if there is no record."""
        return self.record.scope if self.record else WHOLE

    @property
    def last_record(self) -> DatabaseRecord:
        """The record of the database with the most progress; raise ValueError if there is no record."""
        return max(self.records.values(), key=lambda record: [*Phase].index(record.phase))

    @property
    def shards(self) -> set[str]:
        """All shards that the restore includes, according to its records."""
        return {shard for record in self.records.values() for shard in record.shards}

    def is_over(self, store: ObjectStore) -> bool:
        """Whether the stored outcome says that the restore succeeded, so only its records remain to be removed."""
        if not self.records or any(
            record.phase != Phase.PUBLISHED or not record.in_store for record in self.records.values()
        ):
            return False
        outcome = read_outcome(store, next(iter(self.records.values())).operation)
        return outcome is not None and outcome.state == DONE

    @property
    def fills_all(self) -> bool:
        """Whether the restore has started to fill tables in all databases, and none is published or being undone."""
        records = self.records.values()
        if any(record.undoing or record.phase in (Phase.PUBLISHED, Phase.ABANDONED) for record in records):
            return False
        return any(record.parts or record.phase in (Phase.INDEXING, Phase.FINISHED) for record in records)

    @property
    def was_closing(self) -> bool:
        """Whether the restore may have closed databases, which happens after all are loaded."""
        return any(
            record.phase in (Phase.FINISHED, Phase.PUBLISHED, Phase.ABANDONED) for record in self.records.values()
        )

    @property
    def is_published(self) -> bool:
        """Whether all databases have their real names, so the restore can't be undone."""
        return bool(self.records) and all(record.phase == Phase.PUBLISHED for record in self.records.values())

    def is_decided(self, store: ObjectStore) -> bool:
        """Whether the restore has decided to rename its databases, or to keep the loaded rows."""
        record = self.record
        if record is None:
            return False
        # A published restore has decided, even if the record with the decision has already been removed.
        if any(
            database_record.publishes or database_record.phase == Phase.PUBLISHED
            for database_record in self.records.values()
        ):
            return True
        decision = read_decision(store, record.operation) if record.in_store else None
        return self.may_be_decided and decision is not None and decision.decision == PUBLISH

    @property
    def may_be_decided(self) -> bool:
        """Whether the restore's process may have decided to publish: it decides only after all databases are finished.

        A decision stored before that is a forgery. All databases have records before any of them is finished, so a
        missing record was lost.
        """
        return bool(self.records) and {record.phase for record in self.records.values()} <= {
            Phase.FINISHED,
            Phase.PUBLISHED,
        }

    def may_be_undone(self, store: ObjectStore) -> bool:
        """Whether the restore can be undone: until it decides to keep the rows, or all databases are published."""
        return not (self.is_decided(store) if self.is_filling else self.is_published)

    @property
    def is_abandoned(self) -> bool:
        """Whether a command has started to undo the restore."""
        return any(record.phase == Phase.ABANDONED for record in self.records.values())

    def label(self) -> str:
        """Return the text that identifies the restore in messages."""
        record = self.record
        if record is None:
            return f"a restore (…{self.suffix})"
        return (
            f"restore {record.operation} of {record.snapshot} at {record.exact_at or f'increment {record.increment}'},"
            f" begun {record.began_at} ({record.by})"
        )


def find_unfinished(
    store: ObjectStore,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    progress: Progress,
) -> list[UnfinishedRestore]:
    """Find the unfinished restores of the targets' databases, oldest first.

    The caller must hold the targets' locks. Notes schemas and databases that look like a restore's but belong to other
    roles.
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
                    f"{target.node.id}: database {name} looks like a restore's database but belongs to role"
                    f" {database.owner}, so it is left alone: only that role can resume or undo its restores"
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
            # Prefer the database that already has the real name, because it is one step further along.
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
        found.foreign = {shard: owned for shard, owned in foreign.get(suffix, {}).items() if shard in lacking}
    unfinished = [restore for restore in restores.values() if not restore.is_over(store)]
    return sorted(unfinished, key=lambda restore: restore.record.operation if restore.record else "")


def _claimed(database: FoundDatabase) -> str:
    return database.claim.operation if database.claim else ""


def _find_filled(
    target: Target, connection: psycopg.Connection[Any], progress: Progress
) -> dict[str, DatabaseRecord | None]:
    """Read the records of restores that fill the target's database, keyed by id suffix; unreadable records are None."""
    session = open_session(target, connection)
    if session is None:
        return {}
    with raising_unreachable(target.node), session:
        records, others = find_fillings(session)
    if others:
        # Don't refuse: otherwise anyone who may create schemas could block restores.
        progress.note(
            f"{target.node.id}: database {target.database} has schemas that are named like a restore's but belong to"
            f" other roles, so they are ignored: {list_some(others, OTHERS_MAX)}; if nobody needs them, drop them"
        )
    return {suffix: parse_record(text) for suffix, text in records.items()}


def settle_recorded(
    store: ObjectStore, targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]
) -> tuple[list[str], list[str]]:
    """Record the outcomes of restores that are open in the store but have nothing unfinished on the targets.

    The caller must hold the targets' locks, which ensures that the restores' processes have ended. Returns the ids of
    the restores that succeeded, and of those that created nothing.
    """
    done: list[str] = []
    failed: list[str] = []
    for intent, is_done in list(find_recorded(store, targets, connections)):
        # If the store accepts no writes, the restore stays open.
        with suppress(UnreachableError, IndeterminateError):
            record_outcome(store, intent, DONE if is_done else FAILED, "according to its targets")
            (done if is_done else failed).append(intent.operation)
    return done, failed


def find_recorded(
    store: ObjectStore,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    without: Iterable[str] = (),
) -> Iterator[tuple[Intent, bool]]:
    """Yield the open restores into these targets that the store lists, and whether each has decided to publish.

    Excludes restores into databases that our role can't connect to, because it is unknown what they left there, and
    restores that left anything behind, no matter who owns it. Also excludes restores started on servers with a
    different address and start time, because two servers may be physical copies of the same server. Objects with the
    suffixes `without` are ignored.
    """
    asked = [target for target in targets if not is_shut(target, connections[target.shard])]
    places = frozenset(place_of(target, connections[target.shard]) for target in asked)
    servers, started = (frozenset(ask(connections[target.shard]) for target in asked) for ask in (server_of, start_of))
    remains = find_remains(asked, connections).keys() - set(without)
    for intent in read_open_intents(store, skips_unreadable=True):
        made = intent.targets if isinstance(intent.targets, tuple) else ()
        at, since = (one if isinstance(one, tuple) else () for one in (intent.servers, intent.started))
        is_here = places.issuperset(made) and (servers.issuperset(at) or bool(since and started.issuperset(since)))
        if intent.kind == RESTORE and made and is_here and suffix_of(intent.operation) not in remains:
            decision = read_decision(store, intent.operation)
            yield intent, decision is not None and decision.decision == PUBLISH


NONE_UNFINISHED = "there is no unfinished restore into these databases"
WHERE_UNFINISHED = (
    "see: snapshot list   If the restore had --to FILE, pass the same FILE; a restore that has ended needs nothing more"
)
# How many of the newest restores to search for the last restore of the snapshot.
READ_MAX = 20


class NothingUnfinishedError(UnfinishedRestoreError):
    """A command that ends unfinished restores found none. For `closed`, see find_closed."""

    def __init__(self, store: ObjectStore, name: str, closed: Mapping[str, str]) -> None:
        last, details = "", dict[str, object]()
        for operation in islice(list_decided(document_names(store)), READ_MAX):
            with suppress(SnapshotError):
                outcome = read_outcome(store, operation)
                is_drill = read_intent(store, operation).is_drill
                if outcome is not None and outcome.snapshot == name and not is_drill:
                    how = "was published" if outcome.state == "done" else f"was undone ({outcome.reason})"
                    last = f"; the last decided restore of {name}, {operation}, {how}"
                    details = {"last": operation, "state": outcome.state}
                    break
        # If someone dropped a restore's databases, only the store still contains a record of the restore, which may
        # have closed the old databases.
        shut = "".join(f"; {database} does not accept connections" for database in closed)
        opens = [f"to open {database}, then repeat the command: {statement}" for database, statement in closed.items()]
        super().__init__(f"{NONE_UNFINISHED}{last}{shut}", hint=[*opens, WHERE_UNFINISHED], details=details)


def check_readable(restore: UnfinishedRestore, targets: Iterable[Target]) -> None:
    """Raise UnfinishedRestoreError if a record belongs to another target's database or can't be read.

    An unreadable record is an error only if the restore fills tables.
    """
    nodes = {target.shard: target.node.id for target in targets}
    for shard, record in sorted(restore.records.items()):
        if record.shard != shard:
            raise UnfinishedRestoreError(
                f"{restore.label()} did not finish, and its database {restore.databases[shard]} on {nodes[shard]}"
                f" belongs to shard {record.shard}, not to {shard}",
                hint="pass the --to FILE of the restore, with the addresses that its nodes had then",
                details={"operation": record.operation, "node": nodes[shard]},
            )
    for shard in sorted(restore.doubled):
        raise UnfinishedRestoreError(
            f"{restore.label()} did not finish, and node {nodes[shard]} has two databases with its record: the"
            f" comment of {restore.databases[shard]} is a copy",
            hint="remove the comment from the database that the restore did not create, then repeat the command:"
            f" COMMENT ON DATABASE {quote(restore.databases[shard])} IS NULL;",
            details={"databases": restore.databases, "node": nodes[shard]},
        )
    for shard, (name, owner) in sorted(restore.foreign.items()):
        raise UnfinishedRestoreError(
            f"{restore.label()} did not finish, and database {name} on {nodes[shard]} belongs to role {owner}, so"
            " it is unknown whether the restore created it",
            hint="if the restore created it, make the restoring role its owner again: ALTER DATABASE … OWNER TO; if"
            " not, drop or rename it; then repeat the command",
            details={"databases": restore.databases, "node": nodes[shard]},
        )
    if unreadable := sorted(restore.databases.keys() - restore.records.keys()) if restore.is_filling else []:
        where = ", ".join(f"database {restore.databases[shard]} of {shard}" for shard in unreadable)
        raise UnfinishedRestoreError(
            f"{restore.label()} did not finish, and its record in {where} can't be read",
            hint="resume or undo it with the version of Cutline that began it",
            details={"databases": restore.databases},
        )


def check_recorded(restore: UnfinishedRestore, store: ObjectStore) -> None:
    """Raise UnfinishedRestoreError if the decision is in another store, or is in this one but the record is lost."""
    record = restore.record
    if record is None:
        for intent in read_open_intents(store, skips_unreadable=True):
            decision = read_decision(store, intent.operation) if suffix_of(intent.operation) == restore.suffix else None
            if decision is not None and decision.decision == PUBLISH:
                where = ", ".join(f"{name} of {shard}" for shard, name in sorted(restore.databases.items()))
                raise UnfinishedRestoreError(
                    f"restore {intent.operation} has decided to publish, but its record, the comment on {where}, is"
                    " missing",
                    hint="if it is the restored database, rename it to its real name, otherwise drop it; then repeat"
                    " the command",
                    details={"operation": intent.operation},
                )
        return
    if record.in_store and not store.exists(operation_key(record.operation, "intent")):
        raise UnfinishedRestoreError(
            f"{restore.label()} belongs to a different store: {store.url} has no record of it",
            hint="pass the --fleet FILE whose store contains the snapshot, because the restore's decision is stored"
            " there too",
            details={"operation": record.operation, "store": store.url},
        )


def check_same_servers(
    store: ObjectStore,
    name: str,
    restores: Collection[UnfinishedRestore],
    targets: Iterable[Target],
    connections: Connections,
) -> None:
    """Raise UnfinishedRestoreError if a restore began on another server of a shard than the one that is its primary.

    The promoted server may lack the last steps of the restore, and the old primary keeps what the restore left there.
    Without `restores`, those of snapshot `name` that are open in the store are checked.
    """
    suffixes = {restore.suffix: restore for restore in restores}
    for intent in read_open_intents(store, skips_unreadable=True):
        known = suffix_of(intent.operation) in suffixes if suffixes else intent.snapshot == name
        servers, started = (one if isinstance(one, tuple) else () for one in (intent.servers, intent.started))
        if intent.kind != RESTORE or not known:
            continue
        for target in targets:
            connection = connections[target.shard]
            here = server_of(connection)
            if here in servers or start_of(connection) in started:
                continue
            others = [address for node in (target.node, *target.backups) for address in addresses_of(node)]
            if before := [address for address in others if address in servers]:
                raise UnfinishedRestoreError(
                    f"restore {intent.operation} of {intent.snapshot} did not finish; it began on {before[0]}, but"
                    f" {here} is the primary of shard {target.shard} now",
                    hint=[
                        f"make {before[0]} the primary again, then repeat the command",
                        f"if it is lost: undo the restore on {here}, in a file that lists only this server for"
                        f" {target.shard}: {abandon_command(intent.snapshot)} --to FILE   then restore again",
                    ],
                    details={
                        "operation": intent.operation,
                        "node": target.node.id,
                        "began_on": before[0],
                        "server": here,
                    },
                )


def check_whole(
    restore: UnfinishedRestore,
    targets: Iterable[Target],
    connections: Connections,
    store: ObjectStore,
    *,
    undoes: bool = False,
) -> None:
    """Raise UsageError unless `targets` are all of the restore's targets: it can only be ended as a whole.

    Raises UnfinishedRestoreError if it is unknown what the restore left on a target, or if a database with a restore's
    name but no record is not empty. Unless the command `undoes` the restore, a missing published database is also an
    error.
    """
    targets = list(targets)
    if not restore.is_filling:
        _check_unrecorded_empty(restore, targets, connections, undoes=undoes)
    if lacking := sorted(restore.shards - {target.shard for target in targets}):
        raise UsageError(
            f"{restore.label()} also includes {', '.join(lacking)}, which this command does not name",
            hint="pass the --to FILE and the --node options of the restore",
        )
    for target in (target for target in targets if target.shard in restore.shards - restore.records.keys()):
        connection, own = connections[target.shard], target.named(restore.suffix)
        databases = list_databases(connection)
        if restore.is_filling:
            problem = _lost_filling(restore, own, connection)
        elif own.aside in databases or _may_be_published(restore, target, targets, databases, store):
            problem = _lost_published(restore, own, connection, undoes=undoes)
        else:
            problem = None
        if problem is not None:
            closed = find_closed(targets, connections)
            until = f"; nobody can connect to {', '.join(closed)} until it is resumed or undone" if closed else ""
            raise UnfinishedRestoreError(
                f"{restore.label()} did not finish; {problem.what}{until}",
                hint=problem.hint,
                details={"operation": restore.record.operation if restore.record else None, "node": target.node.id},
            )


def find_taken_for_old(
    restore: UnfinishedRestore, targets: Iterable[Target], connections: Connections
) -> Iterator[str]:
    """Yield a line for each database that an undo takes for the old database only because of its name."""
    if not restore.is_abandoned or restore.is_filling:
        return
    for target in (target for target in targets if target.shard in restore.shards - restore.databases.keys()):
        databases, own = list_databases(connections[target.shard]), target.named(restore.suffix)
        if target.database in databases and own.aside not in databases:
            yield (
                f"node {target.node.id}: database {target.database} has no record of the restore, so it is assumed to"
                " be the previous database"
            )


def _check_unrecorded_empty(
    restore: UnfinishedRestore, targets: Iterable[Target], connections: Connections, *, undoes: bool
) -> None:
    """Raise UnfinishedRestoreError if a database that would be dropped only because of its name is not empty.

    A restore writes a database's record before it creates objects in the database.
    """
    for target in (
        target.named(restore.suffix) for target in targets if target.shard in restore.databases.keys() - restore.records
    ):
        database = list_databases(connections[target.shard])[target.loading]
        # A restore does not close any database until everything is loaded.
        if not database.is_open or not is_empty(target.loaded):
            lines = [f"DROP DATABASE {quote(target.loading)};"] if undoes else _empty_again(target.loading, target)
            raise UnfinishedRestoreError(
                f"node {target.node.id}: database {target.loading} is named like a restore's database, but has no"
                " record of a restore and is not empty",
                hint=["if nobody needs it, drop it, otherwise rename it; then repeat the command:", *lines],
                details={"node": target.node.id, "database": target.loading},
            )


def _may_be_published(
    restore: UnfinishedRestore, target: Target, targets: Iterable[Target], databases: Container[str], store: ObjectStore
) -> bool:
    """Whether the target's database, which has no record, may have its real name; `databases` are existing names."""
    if restore.is_abandoned:
        # The earlier phase is unknown. The database is either the restored database, or the old database after it was
        # put back.
        return target.database in databases and not restore.last_record.replace
    is_renamed = any(restore.databases.get(target.shard) == target.database for target in targets)
    # If the store accepts no writes, the missing record may have contained the decision.
    return is_renamed or restore.is_decided(store) or (restore.was_closing and not restore.last_record.in_store)


class _Lost(Struct, frozen=True):
    """A problem caused by missing parts of a restore, and the lines of its hint."""

    what: str
    hint: list[str]


def _lost_filling(restore: UnfinishedRestore, target: Target, connection: psycopg.Connection[Any]) -> _Lost | None:
    """Return the reason, if any, why it is unknown what the restore left in existing tables."""
    node, database = target.node.id, target.database
    if is_shut(target, connection):
        what = (
            f"node {node}: our role can't connect to database {database}, so it is unknown what the restore left there"
        )
        return _Lost(what, ["allow the role to connect, then repeat the command"])
    if restore.fills_all:
        what = (
            f"node {node}: the restore's schema in database {database} is missing, so it is unknown which tables it"
            " filled"
        )
        return _Lost(what, ["if the filled database was renamed, rename it back, then repeat the command"])
    return None


def _lost_published(
    restore: UnfinishedRestore, target: Target, connection: psycopg.Connection[Any], *, undoes: bool
) -> _Lost | None:
    """Return the reason, if any, why it is unknown what became of a database that the restore may have published.

    Users recognize a restore's databases by the restore's id in their temporary names.
    """
    node, database, databases, record = target.node.id, target.database, list_databases(connection), restore.last_record
    exists, again = database in databases, "then repeat the command"
    unknown = f"node {node}: database {database} has no record of the restore, so its origin is unknown"
    gone = f"node {node}: database {database}, which the restore created, is missing"
    bring_back = f"bring back the server or the restored database, {again}"
    if restore.is_published:
        if exists and not record.in_store:
            # If the outcome can't be stored, all that remains is to remove the records one by one.
            return None
        forget = f"on all other nodes: COMMENT ON DATABASE {quote(database)} IS NULL;"
        alone = f"{forget}   then restore it alone: {restore_command(record.snapshot, [node])}"
        if exists:
            lines = [f"if it is the restored one, {forget}", f"if it is not, rename or drop it, and {alone}"]
        else:
            lines = [bring_back, f"if it is permanently lost, {alone}"]
        return _Lost(unknown if exists else gone, [*lines, SAME_TARGET])
    if target.loading in databases:
        return None
    if exists:
        # The name alone does not justify dropping the database or loading it again.
        lines = [f"if it is the restored one, drop it: DROP DATABASE {quote(database)};   {again}"]
        if not undoes:
            lines = ["if it is the restored database, it must be loaded again and will lose later writes:"]
            lines += [*_empty_again(database, target), again]
        if record.replace and target.aside not in databases:
            lines.append(f"if it is the previous database, rename it to {target.aside}, {again}")
        else:
            lines.append(f"if it is any other database, rename or drop it, {again}")
        return _Lost(f"{unknown}; there is no database {target.loading}", lines)
    if undoes:
        return None
    lines = [bring_back, f"if it is permanently lost, undo the restore: {record.abandon_command}", SAME_TARGET]
    return _Lost(gone, lines)


def _empty_again(database: str, target: Target) -> list[str]:
    """Return the statements that replace this database with an empty one, so that the restore can be resumed."""
    return [f"DROP DATABASE {quote(database)};", f"CREATE DATABASE {quote(target.loading)} TEMPLATE template0;"]


def check_no_unfinished(
    store: ObjectStore,
    name: str,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    progress: Progress,
) -> None:
    """Raise UnfinishedRestoreError if an earlier restore of the targets' databases did not finish.

    `name` is the snapshot to restore.
    """
    targets = list(targets)
    nodes = {target.shard: target.node.id for target in targets}
    for restore in find_unfinished(store, targets, connections, progress):
        check_readable(restore, targets)
        what = "rows in tables of database " * restore.is_filling
        where = ", ".join(f"{what}{name} on {nodes[shard]}" for shard, name in sorted(restore.databases.items()))
        snapshot = restore.record.snapshot if restore.record else name
        ends = list[str]()
        if restore.record is not None and not restore.is_abandoned:
            ends.append(f"to finish it: {resume_command(snapshot, restore.scope.nodes)}")
        if restore.may_be_undone(store):
            ends.append(f"to undo it: {abandon_command(snapshot, restore.scope.nodes)}")
        closed = find_closed(targets, connections)
        until = f"; nobody can connect to {', '.join(closed)} until it is resumed or undone" if closed else ""
        raise UnfinishedRestoreError(
            f"{restore.label()} did not finish; it left behind {where}{until}",
            hint=[*ends, SAME_TARGET],
            details={"operation": restore.record.operation if restore.record else None, "databases": restore.databases},
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
    """Find the unfinished restore of snapshot `name`; raise UnfinishedRestoreError if it can't be resumed.

    If none is unfinished and `settles` is set, records the outcomes of restores that left nothing behind.
    """
    unfinished = find_unfinished(store, targets, connections, progress)
    check_same_servers(store, name, unfinished, targets, connections)
    if not unfinished:
        if settles:
            settle_recorded(store, targets, connections)
            # A process that ended after recording the outcome may have left records behind.
            for line in clear_records(targets, connections):
                progress.note(line)
        raise NothingUnfinishedError(store, name, find_closed(targets, connections))
    if len(unfinished) > 1:
        raise UnfinishedRestoreError(
            f"several restores are unfinished: {'; '.join(restore.label() for restore in unfinished)}",
            hint=f"undo them and start over: {abandon_command(name)}; or select one of them with --node",
        )
    (found,) = unfinished
    check_readable(found, targets)
    check_recorded(found, store)
    if found.record is None or found.is_abandoned:
        what = "is being undone" if found.is_abandoned else "ended before it wrote a record"
        command = abandon_command(found.record.snapshot if found.record else name, found.scope.nodes)
        raise UnfinishedRestoreError(f"{found.label()} {what}", hint=f"run: {command}")
    if found.record.snapshot != name:
        raise UnfinishedRestoreError(
            f"the unfinished restore belongs to snapshot {found.record.snapshot}, not to {name}",
            hint=f"run: {found.record.resume_command}",
        )
    return found
