"""The databases that a restore creates and drops, and the record that it keeps on each.

The record names the restore that created the database, its progress, and everything that another process needs to
continue. It is valid even if the store accepts no writes. The record is the database's comment. If existing tables are
filled, the comment belongs to the database's owner, so the record is in a table (restore/rows/filling.py).

No restored database gets its real name until all nodes are loaded and checked (docs/architecture.md, invariant 6).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from typing import Any

import msgspec
import psycopg
from msgspec import Struct, structs
from msgspec.structs import replace
from psycopg import sql

from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import abandon_command, resume_command
from cutline.fleet.own_process import own_label
from cutline.fleet.record import Count, Record, Time, from_json, to_builtins
from cutline.nodes.baseline import BUILTIN, LIBC, NodeIdentity
from cutline.nodes.connections import (
    MAINTENANCE_DATABASE,
    NodeUnreachableError,
    connect,
    disrupted_error,
    is_full,
    node_of,
    raising_unreachable,
    refuses_database,
    unreachable_error,
    with_database,
)
from cutline.nodes.encodings import readable
from cutline.nodes.lock import FleetBusyError, find_holder, take_lock
from cutline.nodes.other_databases import REHEARSING, is_beside, name_beside
from cutline.nodes.problems import quote
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.restore.scope.scope import WHOLE, RestoreScope
from cutline.restore.targets.target import Target, TargetUnfitError
from cutline.snapshots.operations.slot_guard import mark_set_aside
from cutline.snapshots.records.commit import DatabasePrivilege, DatabaseProperties
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import list_own_slots


class RestoreCrashPoint(StrEnum):
    """A point after an externally visible effect of a restore; the value is the text that `--verbose` prints.

    Each point is reported to `Progress.reached` after its effect. There may be further effects on each node between two
    points: each database is created before its record, and databases are closed, put back or dropped one by one.
    """

    LOCKED = "targets locked"
    INTENT_STORED = "intent stored"
    ROLES_CREATED = "roles created"
    CREATED = "created"
    LOADING = "loading"
    ROWS_LOADED = "rows loaded"
    INDEXING = "indexing"
    FINISHED = "finished"
    CLOSED = "old databases closed"
    DECIDED = "publishing decided"
    RENAMED = "renamed"
    PUBLISHED = "published"
    SLOTS_RELEASED = "slots of ended chains dropped"
    OUTCOME_STORED = "outcome stored"
    ABANDONED = "abandoned"


DATABASES_QUERY = """
SELECT d.datname, d.datallowconn, shobj_description(d.oid, 'pg_database'), pg_get_userbyid(d.datdba),
       d.datdba IN (SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user), d.datconnlimit <> -2
  FROM pg_database d ORDER BY 1
"""


# The prefix of the `schema` field in records of all versions.
SCHEMAS = "cutline/restoring/"
LEDGER_NAME = re.compile(r"cutline_[0-9a-z_]{1,50}\.ledger")


class Phase(StrEnum):
    """How far a restore has got with one of its databases."""

    CREATED = "created"
    # The tables and the ledger exist; rows recorded in the ledger are loaded.
    LOADING = "loading"
    # The rows are loaded and counted; indexes and the rest of the DDL follow.
    INDEXING = "indexing"
    # The database needs only its real name.
    FINISHED = "finished"
    # All databases in the restore have their real names.
    PUBLISHED = "published"
    # The restore is being undone and can't be finished.
    ABANDONED = "abandoned"


class DatabaseRecord(Record, frozen=True, kw_only=True, tag_field="schema", tag="cutline/restoring/1"):
    """The record that a restore of the targets `shards` keeps on its database for `shard`.

    `digest` is the digest of the last restored commit. `version` is Cutline's version and `parts` the number of Spark
    partitions of the changed rows: the tasks of another process match those in `ledger` only if both are the same.
    `in_store`: whether the restore's intent, and therefore its decision, is in the store. If not, the decision is
    `publishes` in the first database's record. `aside`: whether an old database was set aside for this one.
    `sequences_set`: whether the sequences of filled tables have their values. `undoing`: whether the process that fills
    tables has started to empty them again; a process that resumes the restore resets this. `allow_refused_ddl`: the
    restore continues without the statements that the target refuses, and `refused` names them. `owner` ("" keeps the
    owner), `comment` and `is_template` are set when the restore ends; `own_privileges` are the privileges that the
    owner then grants to the restoring role. `borrowed` maps standbys to the numbers of the groups whose rows are taken
    from their copies. `exact_at` is the time whose exact state is restored; None if it is a cut's.
    """

    operation: str
    snapshot: str
    increment: Count
    digest: str
    began_at: Time
    by: str
    version: str
    groups: tuple[str, ...]
    routes: tuple[str, ...] = ()
    replace: bool
    create_roles: bool
    in_store: bool
    shards: tuple[str, ...]
    shard: str = ""
    phase: Phase
    publishes: bool = False
    aside: bool = False
    allow_refused_ddl: bool
    refused: tuple[str, ...] = ()
    sequences_set: bool = False
    undoing: bool = False
    ledger: str | None = None
    parts: Count = 0
    rows: Count = 0
    owner: str = ""
    comment: str | None = None
    is_template: bool = False
    own_privileges: tuple[DatabasePrivilege, ...] = ()
    borrowed: dict[str, tuple[Count, ...]] = msgspec.field(default_factory=dict)
    scope: RestoreScope = WHOLE
    exact_at: Time | None = None

    @property
    def resume_command(self) -> str:
        """The command that finishes the restore."""
        return resume_command(self.snapshot, self.scope.nodes)

    @property
    def abandon_command(self) -> str:
        """The command that undoes the restore."""
        return abandon_command(self.snapshot, self.scope.nodes)


class FoundDatabase(Struct, frozen=True):
    """A database on a server: whether it accepts connections, its owner, and its record if a restore created it.

    A record is valid only if our role or a superuser owns the database (`is_trusted`), because the owner can write the
    comment, and anyone with CREATEDB may create a database with any name. `claim` is the record in the comment, valid
    or not. `is_valid` is false after an interrupted DROP DATABASE.
    """

    name: str
    is_open: bool
    claim: DatabaseRecord | None
    owner: str
    is_trusted: bool
    is_valid: bool = True

    @property
    def record(self) -> DatabaseRecord | None:
        """The record, if the database's owner is trusted."""
        return self.claim if self.is_trusted else None


def list_databases(connection: psycopg.Connection[Any]) -> Mapping[str, FoundDatabase]:
    """Return the server's databases, keyed by name."""
    rows = connection.execute(DATABASES_QUERY).fetchall()
    databases: dict[str, FoundDatabase] = {}
    for name, is_open, comment, owner, is_trusted, is_valid in rows:
        databases[name] = FoundDatabase(name, is_open, _parse_comment(comment), owner, is_trusted, is_valid)
    return databases


def _parse_comment(comment: str | None) -> DatabaseRecord | None:
    """Parse a comment as a record; reject records of restores with `--data-only`, which are never kept in a comment."""
    record = parse_record(comment)
    return None if record is None or record.scope.data_only else record


def parse_record(comment: str | None) -> DatabaseRecord | None:
    """Parse a record; return None for any other text."""
    try:
        record: DatabaseRecord = from_json(comment or "", DatabaseRecord)
    except (msgspec.DecodeError, ValueError):
        return None
    # Validate the ledger's name: it is used in statements, and the database's owner can write the comment.
    return record if record.ledger is None or LEDGER_NAME.fullmatch(record.ledger) else None


def without_record(properties: DatabaseProperties) -> tuple[DatabaseProperties, list[str]]:
    """Remove a comment in the form of a record from a database's properties; also return a line if there was one.

    Such a comment was written by the owner on the source, but on the target it would be trusted, because our role
    writes it there.
    """
    if not _is_record(properties.comment or ""):
        return properties, []
    return structs.replace(properties, comment=None), ["comment of the database: it has the form of a restore's record"]


def _is_record(comment: str) -> bool:
    """Whether the comment has the form of a record, of this version or any other."""
    if parse_record(comment) is not None:
        return True
    try:
        document = json.loads(comment, strict=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and str(document.get("schema")).startswith(SCHEMAS)


def record_text(record: DatabaseRecord) -> str:
    """Return the record as JSON in ASCII, which databases of every encoding can store."""
    return json.dumps(to_builtins(record))


def write_record(
    connection: psycopg.Connection[Any], database: str, record: DatabaseRecord, **changes: Any
) -> DatabaseRecord:
    """Write the record, with `changes`, to a database's comment; return the changed record.

    The session may be raw (nodes.encodings).
    """
    changed = structs.replace(record, **changes)
    comment = sql.SQL("COMMENT ON DATABASE {} IS {}")
    statement = comment.format(sql.Identifier(database), sql.Literal(record_text(changed)))
    # Without a connection psycopg composes the statement in UTF-8: in a raw session it would allow only ASCII.
    connection.execute(statement.as_bytes())
    return changed


def clear_record(connection: psycopg.Connection[Any], database: str, record: DatabaseRecord) -> str:
    """In one transaction, replace the record with the comment it contains, and set the owner and privileges.

    If the server refuses the statements, only removes the record. Returns a line that says what remains to be done, or
    "". If the statements did not cause the error, raises NodeDisruptedError and keeps the record.
    """
    name = sql.Identifier(database)
    comment = sql.SQL("COMMENT ON DATABASE {} IS {}").format(name, sql.Literal(record.comment))
    rest: list[sql.Composed] = []
    if record.is_template:
        rest.append(sql.SQL("ALTER DATABASE {} IS_TEMPLATE true").format(name))
    if record.owner:
        rest.append(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(name, sql.Identifier(record.owner)))
    if record.own_privileges:
        # Grant as the owner: otherwise the grantor might be any role that gave ours the grant option.
        rest.append(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(record.owner)))
    for own_privilege in record.own_privileges:
        option = sql.SQL(" WITH GRANT OPTION" if own_privilege.with_grant_option else "")
        what = sql.SQL("GRANT {} ON DATABASE {} TO {}")
        rest.append(what.format(sql.SQL(own_privilege.privilege), name, sql.Identifier(own_privilege.grantee)) + option)
    try:
        with connection.transaction():
            for statement in (comment, *rest):
                connection.execute(statement)
    except psycopg.Error as error:
        if connection.broken:
            raise
        if remedy_of(error):
            raise disrupted_error(node_of(connection), error, f"database {database}") from error
        connection.execute(sql.SQL("COMMENT ON DATABASE {} IS NULL").format(name))
        statements = "; ".join(composed.as_string(connection) for composed in (comment, *rest))
        why = shorten_message(error)
        # Only sessions with this database's encoding may know the role under this name.
        return f"database {database} was not altered: {why}; to alter it, run in it: BEGIN; {statements}; COMMIT;"
    return ""


# A database or template is in use, or our role lacks a privilege.
REFUSALS = (psycopg.errors.ObjectInUse, psycopg.errors.InsufficientPrivilege)
# The comment on a dry run's database.
REHEARSAL = "a dry run of snapshot restore rehearses its DDL here; this database can be dropped afterwards"
REHEARSALS_QUERY = """
SELECT d.datname, d.comment IS NOT NULL
  FROM (SELECT datname, datdba, datallowconn, shobj_description(oid, 'pg_database') AS comment FROM pg_database) AS d
 WHERE d.datdba IN (SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user)
   AND (d.comment = %s OR d.comment IS NULL AND d.datallowconn)
"""
# Objects with lower oids exist in every database (transam.h, FirstNormalObjectId).
EMPTY_QUERY = """
SELECT NOT EXISTS (SELECT FROM pg_class WHERE oid >= 16384) AND NOT EXISTS (SELECT FROM pg_proc WHERE oid >= 16384)
"""
TEMPLATE_QUERY = "SELECT datistemplate FROM pg_database WHERE datname = %s"
LIMIT_QUERY = "SELECT datconnlimit FROM pg_database WHERE datname = %s"
DATABASE_QUERY = "SELECT oid FROM pg_database WHERE datname = %s"
# The owner of a database that was set aside, if its replacement belongs to a different role.
PREVIOUS_OWNER_QUERY = f"""
SELECT {readable("pg_get_userbyid(old.datdba)")}, {readable("pg_get_userbyid(new.datdba)")}
  FROM pg_database old, pg_database new
 WHERE old.datname = %s AND new.datname = %s AND old.datdba <> new.datdba
"""


class OwnerChange(Struct, frozen=True):
    """A restored database whose owner differs from the replaced database's owner; `statement` restores the owner."""

    node: str
    database: str
    owner: str
    previous: str
    statement: str


def create_database(
    target: Target, connection: psycopg.Connection[Any], source: NodeIdentity, tablespace: str = ""
) -> None:
    """Create the empty database to load, after dropping any left over from the same restore.

    Tablespace "" is the default.
    """
    drop_database(target, connection, target.loading)
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {} LC_COLLATE {} LC_CTYPE {} {}").format(
        sql.Identifier(target.loading),
        sql.Literal(source.encoding),
        sql.Literal(source.collate),
        sql.Literal(source.ctype),
        _provider(source),
    )
    if tablespace:
        statement += sql.SQL(" TABLESPACE {}").format(sql.Identifier(tablespace))
    try:
        with refusing(target.node, f"database {target.loading} can't be created"):
            connection.execute(statement)
    except (
        psycopg.errors.InvalidParameterValue,
        psycopg.errors.FeatureNotSupported,
        psycopg.errors.WrongObjectType,
    ) as error:
        raise TargetUnfitError(
            f"node {target.node.id}: database {target.loading} can't be created: {str(error).strip()}",
            hint="install the locale on the target's machine, then repeat the command",
        ) from error


@contextmanager
def rehearsal_database(
    target: Target, connection: psycopg.Connection[Any], source: NodeIdentity, tablespace: str
) -> Iterator[Target]:
    """Create an empty database for a dry run, yield the target with it, and drop it at the end of the block.

    First drops the remains of killed dry runs. The caller must hold the target's lock.
    """
    drop_rehearsals(target, connection)
    suffix = target.loading.rsplit("_", 1)[-1]
    own = replace(target, loading=name_beside(target.database, REHEARSING, suffix))
    try:
        create_database(own, connection, source, tablespace)
        comment = sql.SQL("COMMENT ON DATABASE {} IS {}")
        connection.execute(comment.format(sql.Identifier(own.loading), sql.Literal(REHEARSAL)))
        yield own
    finally:
        drop_database(own, connection, own.loading)


def drop_rehearsals(target: Target, connection: psycopg.Connection[Any]) -> None:
    """Drop the databases that killed dry runs left next to the target's; the caller must hold the target's lock.

    A dry run that was killed before it wrote the comment left an empty database.
    """
    for name, is_marked in connection.execute(REHEARSALS_QUERY, (REHEARSAL,)).fetchall():
        if is_beside(name, target.database, REHEARSING) and (is_marked or is_empty(with_database(target.node, name))):
            drop_database(target, connection, name)


def is_empty(database: Node) -> bool:
    """Whether the database has no user-defined tables or functions; raise NodeUnreachableError."""
    with raising_unreachable(database), connect(database) as connection:
        return connection.execute(EMPTY_QUERY).fetchone() == (True,)


@contextmanager
def refusing(node: Node, what: str) -> Iterator[None]:
    """Raise TargetUnfitError if the server refuses the block's work, or NodeUnreachableError if the session is lost."""
    try:
        yield
    except REFUSALS as error:
        raise TargetUnfitError(
            f"node {node.id}: {what}: {shorten_message(error)}",
            hint="ask the owner of the database or a superuser to remove the cause, then repeat the command",
            details={"node": node.id},
        ) from error
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error


def _provider(source: NodeIdentity) -> sql.Composable:
    """Return the CREATE DATABASE options for the source's locale provider (PostgreSQL manual, "Locale Providers")."""
    if source.locale_provider == LIBC:
        return sql.SQL("LOCALE_PROVIDER libc")
    if source.locale_provider == BUILTIN:
        return sql.SQL("LOCALE_PROVIDER builtin BUILTIN_LOCALE {}").format(sql.Literal(source.locale))
    option = sql.SQL("LOCALE_PROVIDER icu ICU_LOCALE {}").format(sql.Literal(source.locale))
    if source.icu_rules:
        option += sql.SQL(" ICU_RULES {}").format(sql.Literal(source.icu_rules))
    return option


def drop_database(target: Target, connection: psycopg.Connection[Any], name: str) -> None:
    """Drop a database on the target's server if it exists, even if it is a template.

    Raises TargetUnfitError, NodeUnreachableError.
    """
    try:
        with refusing(target.node, f"database {name} can't be dropped"):
            _drop(connection, name)
    except psycopg.errors.WrongObjectType as error:
        raise TargetUnfitError(
            f"node {target.node.id}: database {name} can't be dropped: {shorten_message(error)}",
            hint=f"if nobody needs it as a template: ALTER DATABASE {quote(name)} IS_TEMPLATE false;",
            details={"node": target.node.id, "database": name},
        ) from error


def _drop(connection: psycopg.Connection[Any], name: str) -> None:
    # The source owners' code, which ran as the database's owner, may have made the database a template.
    if connection.execute(TEMPLATE_QUERY, (name,)).fetchone() == (True,):
        connection.execute(sql.SQL("ALTER DATABASE {} IS_TEMPLATE false").format(sql.Identifier(name)))
    statement = sql.SQL("DROP DATABASE IF EXISTS {}").format(sql.Identifier(name))
    try:
        connection.execute(statement + sql.SQL(" WITH (FORCE)"))
    except psycopg.errors.InsufficientPrivilege:
        # FORCE needs superuser rights to end an autovacuum worker. Without FORCE, PostgreSQL itself ends the worker.
        connection.execute(statement)


def clear_records(targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> list[str]:
    """Remove the records of ended restores from the databases with the targets' real names.

    At the same time, the databases get their owners and comments. Returns a line for each database where the server
    refuses that.
    """
    problems: list[str] = []
    for target in targets:
        connection = connections[target.shard]
        database: FoundDatabase | None = list_databases(connection).get(target.database)
        if database is not None and database.record is not None:
            with raising_unreachable(target.node):
                problem = clear_record(connection, target.database, database.record)
            problems += [f"node {target.node.id}: {problem}"] if problem else []
    return problems


def find_owner_changes(
    targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]
) -> list[OwnerChange]:
    """Find the restored databases whose owner differs from the owner of the database that was set aside."""
    changes: list[OwnerChange] = []
    for target in targets:
        query = (PREVIOUS_OWNER_QUERY, (target.aside, target.database))
        for previous, owner in connections[target.shard].execute(*query):
            statement = f"ALTER DATABASE {quote(target.database)} OWNER TO {quote(previous)};"
            changes.append(OwnerChange(target.node.id, target.database, owner, previous, statement))
    return changes


def find_slots(connection: psycopg.Connection[Any], database: str) -> list[str]:
    """Find Cutline's slots in a database on the server."""
    row = connection.execute(DATABASE_QUERY, (database,)).fetchone()
    return list_own_slots(connection, *row) if row else []


def end_chains(
    store: ObjectStore | None,
    fleet: Fleet,
    targets: Iterable[Target],
    connections: Mapping[str, psycopg.Connection[Any]],
    operation: str,
) -> tuple[list[str], list[str]]:
    """End the chains of databases that a restore set aside, by dropping Cutline's slots, which would retain WAL.

    First records in the store that the chains have ended, unless `store` is None because it accepts no writes. Returns
    the dropped and the remaining slots, each as `node: slot`. A chain has a slot of one name on every node: if a node
    can't be reached, those of its primary are named, and a database in which that has none feeds no chain.
    """
    targets = list(targets)
    if store is not None:
        slots = [
            (slot, target.node.id) for target in targets for slot in find_slots(connections[target.shard], target.aside)
        ]
        mark_set_aside(store, slots, operation)
    dropped: list[str] = []
    left: list[str] = []
    for target in targets:
        row = connections[target.shard].execute(DATABASE_QUERY, (target.aside,)).fetchone()
        if row is None:
            continue
        slots_of_primary = list_own_slots(connections[target.shard], *row)
        # Identify the database by its oid, because a standby may not have replayed the rename yet.
        for node in (target.node, *target.backups):
            try:
                with connect(with_database(node, MAINTENANCE_DATABASE)) as connection:
                    for slot in list_own_slots(connection, *row):
                        (dropped if _drop_slot(connection, slot) else left).append(f"{node.id}: {slot}")
            except (psycopg.Error, SnapshotError):
                names = (f"{node.id}: {slot}" for slot in slots_of_primary)
                left += [name for name in names if name not in (*dropped, *left)]
    return dropped, left + _find_slots_elsewhere(fleet, targets, dropped)


def _find_slots_elsewhere(fleet: Fleet, targets: Sequence[Target], dropped: Iterable[str]) -> list[str]:
    """List the ended chains' slots on the nodes of other shards, as `node: slot`; a chain has a slot on every node."""
    slots = dict.fromkeys(slot_name.rpartition(": ")[2] for slot_name in dropped)
    shards = {target.node.id for target in targets}
    others = [node.id for node in fleet.nodes if (node.backup_of or node.id) not in shards]
    return [f"{node}: {slot}" for node in others for slot in slots]


def _drop_slot(connection: psycopg.Connection[Any], slot: str) -> bool:
    try:
        connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    except REFUSALS:
        return False
    return True


def open_session(target: Target, connection: psycopg.Connection[Any]) -> psycopg.Connection[Any] | None:
    """Open a session in the target's database; return None if it doesn't exist or refuses our role.

    Raises NodeUnreachableError.
    """
    database: FoundDatabase | None = list_databases(connection).get(target.database)
    if database is None or not database.is_open:
        return None
    try:
        return connect(target.node)
    except NodeUnreachableError as error:
        if _refuses(target, connection, error):
            return None
        raise


def _refuses(target: Target, connection: psycopg.Connection[Any], error: NodeUnreachableError) -> bool:
    """Whether the target's database refuses our role for good, not only because it is full at present."""
    if is_full(target.node, error.__cause__):
        return connection.execute(LIMIT_QUERY, (target.database,)).fetchone() == (0,)
    return refuses_database(target.node, error.__cause__)


def is_shut(target: Target, connection: psycopg.Connection[Any]) -> bool:
    """Whether the target's database exists but refuses our role; raise NodeUnreachableError."""
    if session := open_session(target, connection):
        session.close()
        return False
    return target.database in list_databases(connection)


def find_closed(targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> dict[str, str]:
    """Find the targets' databases that accept no connections; return the statements that open them, keyed by database.

    A database may be closed because, for example, a process was killed while publishing.
    """
    return {
        f"database {target.database} on {target.node.id}": (
            f"ALTER DATABASE {quote(target.database)} ALLOW_CONNECTIONS true;"
        )
        for target in targets
        if (database := list_databases(connections[target.shard]).get(target.database)) and not database.is_open
    }


@contextmanager
def lock_target_fleet(
    fleet: Fleet, targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]
) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Hold the target fleet's lock in its existing databases, so that no other operation changes the fleet.

    A lock is released when its database is renamed, because that ends the session. Yields the sessions that hold the
    lock, keyed by shard. Raises FleetBusyError naming the holder, and NodeUnreachableError.
    """
    sessions: dict[str, psycopg.Connection[Any]] = {}
    with ExitStack() as stack:
        for target in sorted(targets, key=lambda target: target.node.id):
            database: FoundDatabase | None = list_databases(connections[target.shard]).get(target.database)
            if database is None or not database.is_open:
                continue
            try:
                connection = connect(target.node)
            except NodeUnreachableError as error:
                if _refuses(target, connections[target.shard], error):
                    # A role that may not connect can't set the database aside either. Later checks name the missing
                    # privilege.
                    continue
                raise
            else:
                stack.callback(close_quietly, connection)
                take_lock(target.node, connection, fleet.name, own_label("restore", target.database))
                sessions[target.shard] = connection
        yield sessions


def find_busy(fleet: Fleet, targets: Iterable[Target], connections: Mapping[str, psycopg.Connection[Any]]) -> list[str]:
    """Return a line that names the operation that holds the target fleet's lock; nothing if the lock is free.

    A restore takes the lock and is refused while another operation holds it (lock_target_fleet).
    """
    held = {
        target.node.id: holder
        for target in sorted(targets, key=lambda target: target.node.id)
        if (holder := find_holder(connections[target.shard], fleet.name, target.database))
    }
    if not held:
        return []
    holder = next(iter(held.values()))
    return [
        f"another operation is running on {', '.join(held)}: {holder.text()}; until it ends, the restore is refused"
        f" (exit code {FleetBusyError.exit_code})"
    ]


def close_quietly(connection: psycopg.Connection[Any]) -> None:
    """Close a session that may already be lost."""
    with suppress(psycopg.Error):
        connection.close()
