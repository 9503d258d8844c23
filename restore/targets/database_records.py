"""The record that a restore keeps on every database it makes: a comment, which a rename takes along.

It says which restore made the database, how far that is, and what another process needs to go on with it. It is right
even where the store accepts no writes. A database that a restore only fills has its record in a table
(restore/data_only/filling.py): the comment is its owner's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import psycopg
from msgspec import structs
from psycopg import sql

from cutline.fleet.hints import restore_command
from cutline.fleet.nodes.connections import disrupted_error, node_of
from cutline.fleet.nodes.disruptions import remedy_of
from cutline.fleet.nodes.server_messages import shorten_message
from cutline.fleet.record import Count, Record, Time, from_json, to_builtins
from cutline.restore.parts.scope import WHOLE, RestoreScope
from cutline.snapshots.records.database_facts import DatabasePrivilege, DatabaseProperties

DATABASES_QUERY = """
SELECT d.datname, d.datallowconn, shobj_description(d.oid, 'pg_database'), pg_get_userbyid(d.datdba),
       d.datdba IN (SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user), d.datconnlimit <> -2
  FROM pg_database d ORDER BY 1
"""


# With which the schemas of records of all versions begin.
SCHEMAS = "cutline/restoring/"
LEDGER_NAME = re.compile(r"cutline_[0-9a-z_]{1,50}\.ledger")


class Phase(StrEnum):
    """How far a database of a restore is."""

    CREATED = "created"
    # Its tables and its ledger exist: what the ledger has is loaded.
    LOADING = "loading"
    # Its rows are loaded and counted; indexes and the rest of the DDL follow.
    INDEXING = "indexing"
    # Nothing is missing but its real name.
    FINISHED = "finished"
    # All databases of the restore have their real names.
    PUBLISHED = "published"
    # The restore is being undone: nobody may finish it any more.
    ABANDONED = "abandoned"


class DatabaseRecord(Record, frozen=True, kw_only=True, tag_field="schema", tag="cutline/restoring/1"):
    """What a restore, which restores the targets `shards`, records on one of its databases, that of `shard`.

    `digest` is that of the last commit restored. `version` is Cutline's, `parts` the number of Spark partitions of the
    changed rows: only with the same of both are the tasks of another process those in `ledger`. `in_store`: whether the
    restore has an intent in the store, and so its decision; else the decision is `publishes`, on the first
    database. `aside`: whether another database was put aside for it. `sequences_set`: whether the sequences of tables
    that were filled have their values, `undoing` whether the process that fills tables has begun to empty them again;
    one that resumes the restore resets it.
    `allow_refused_ddl`: the restore does without what the target refuses, and `refused` names that.
    `owner` ("": it stays), `comment` and `is_template` are what the database gets when the restore has ended, and
    `own_privileges` are what the role that restores has from the owner then.
    `borrowed` are by standby the groups, by number, whose rows are taken from its copy.
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

    @property
    def command(self) -> str:
        """The command that ends the restore, without the word that says how."""
        return restore_command(self.snapshot, self.scope.nodes)


@dataclass(frozen=True, slots=True)
class FoundDatabase:
    """A database of a server: whether it accepts connections, its owner, and its record if a restore made it.

    A record counts only if our role or a superuser owns the database (`is_trusted`): its owner writes the comment, and
    anybody with CREATEDB may make a database of any name. `claim` is the record in its comment, whether that counts or
    not. `is_valid`: no interrupted DROP DATABASE has left it.
    """

    name: str
    is_open: bool
    claim: DatabaseRecord | None
    owner: str
    is_trusted: bool
    is_valid: bool = True

    @property
    def record(self) -> DatabaseRecord | None:
        """The record, if it counts."""
        return self.claim if self.is_trusted else None


def list_databases(connection: psycopg.Connection[Any]) -> Mapping[str, FoundDatabase]:
    """The databases of the server, by name."""
    rows = connection.execute(DATABASES_QUERY).fetchall()
    found: dict[str, FoundDatabase] = {}
    for name, is_open, comment, owner, is_trusted, is_valid in rows:
        found[name] = FoundDatabase(name, is_open, _parse_comment(comment), owner, is_trusted, is_valid)
    return found


def _parse_comment(comment: str | None) -> DatabaseRecord | None:
    """As parse_record; a restore of rows alone keeps no record in a comment, which the database's owner may write."""
    record = parse_record(comment)
    return None if record is None or record.scope.data_only else record


def parse_record(comment: str | None) -> DatabaseRecord | None:
    """The record in a database's comment; None if it is another comment."""
    try:
        record: DatabaseRecord = from_json(comment or "", DatabaseRecord)
    except (msgspec.DecodeError, ValueError):
        return None
    # It is written into statements, and who owns a database can write its comment.
    return record if record.ledger is None or LEDGER_NAME.fullmatch(record.ledger) else None


def without_record(properties: DatabaseProperties) -> tuple[DatabaseProperties, list[str]]:
    """What a database is to have without a comment that is, or once was, a record; and a line if it had one.

    Its owner on the source chose the comment: on the target it would count, because our role has written it.
    """
    if not _is_record(properties.comment or ""):
        return properties, []
    return structs.replace(properties, comment=None), ["comment of the database: it has the form of a restore's record"]


def _is_record(comment: str) -> bool:
    """Whether it has the form of a record, of this version or another one."""
    if parse_record(comment) is not None:
        return True
    try:
        found = json.loads(comment, strict=False)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and str(found.get("schema")).startswith(SCHEMAS)


def record_text(record: DatabaseRecord) -> str:
    """The record as JSON, in ASCII: databases of every encoding can have it."""
    return json.dumps(to_builtins(record))


def write_record(
    connection: psycopg.Connection[Any], database: str, record: DatabaseRecord, **changes: Any
) -> DatabaseRecord:
    """Put the record, with `changes`, on a database; return it as it is now."""
    changed = structs.replace(record, **changes)
    comment = sql.SQL("COMMENT ON DATABASE {} IS {}")
    connection.execute(comment.format(sql.Identifier(database), sql.Literal(record_text(changed))))
    return changed


def clear_record(connection: psycopg.Connection[Any], database: str, record: DatabaseRecord) -> str:
    """Put the comment and the owner that `record` names in its place, in one transaction.

    If the server refuses that, the record is removed alone; returns what is left to do then, "" if nothing. Raises
    NodeDisruptedError, and the record stays, if that was not for the statements.
    """
    name = sql.Identifier(database)
    comment = sql.SQL("COMMENT ON DATABASE {} IS {}").format(name, sql.Literal(record.comment))
    rest: list[sql.Composed] = []
    if record.is_template:
        rest.append(sql.SQL("ALTER DATABASE {} IS_TEMPLATE true").format(name))
    if record.owner:
        rest.append(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(name, sql.Identifier(record.owner)))
    if record.own_privileges:
        # The grantor would be another one if our role has the option from others, too.
        rest.append(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(record.owner)))
    for one in record.own_privileges:
        option = sql.SQL(" WITH GRANT OPTION" if one.with_grant_option else "")
        what = sql.SQL("GRANT {} ON DATABASE {} TO {}")
        rest.append(what.format(sql.SQL(one.privilege), name, sql.Identifier(one.grantee)) + option)
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
        statements = "; ".join(one.as_string(connection) for one in (comment, *rest))
        return f"database {database} is not altered: {shorten_message(error)}; to do it: BEGIN; {statements}; COMMIT;"
    return ""
