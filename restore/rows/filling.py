"""The schema that a restore of rows alone keeps in the database that it fills, with its record, ledger and tables.

One transaction creates the schema before the first row is loaded, and one removes it. So a process that finds it knows
which tables were empty before. The comment of the database is its owner's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import psycopg

from cutline.nodes.connections import refuse_views
from cutline.nodes.groups import Group, qualify
from cutline.nodes.other_databases import FILLING
from cutline.nodes.publications import naming_event_triggers
from cutline.restore.rows.filled_tables import find_acting
from cutline.restore.rows.load import TablesInUseError, create_ledger
from cutline.restore.rows.references import LOCK_SECONDS_MAX, find_orphan
from cutline.storage.errors import RefusedError

# Which database the session is in: a copy of a database has a copy of the restore's objects in it.
PLACE = """
(SELECT system_identifier || '/' || d.oid FROM pg_control_system(), pg_database d WHERE d.datname = current_database())
"""
RELATIONS = ("record", "tables", "ledger")
# The schemas of such names, their owners, and whether all in them that is read belongs to our role or to a superuser.
# Every role with CREATE on the database can make such a schema, and reading a view in it runs code as our role.
SCHEMAS_QUERY = f"""
WITH trusted AS (SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user)
SELECT n.nspname, pg_get_userbyid(n.nspowner), n.nspowner IN (SELECT oid FROM trusted) AND (
       SELECT count(*) FROM pg_class c
        WHERE c.relnamespace = n.oid AND c.relname = ANY (%s) AND c.relkind = 'r' AND c.relpersistence = 'p'
          AND c.relowner IN (SELECT oid FROM trusted) AND NOT c.relhasrules AND NOT c.relrowsecurity
          AND NOT EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhparent, i.inhrelid))) = {len(RELATIONS)}
  FROM pg_namespace n WHERE n.nspname ~ '^{FILLING}[0-9a-f]{{10}}$' ORDER BY 1
"""
# No trigger fires in the transaction, on a table or on DDL, and no foreign key is checked.
REPLICA = "SET LOCAL session_replication_role = replica"
END_MILLISECONDS_MAX = 5000
# The sessions that load rows: each has a lock on the ledger until it commits. Autovacuum, which has no user, gives way;
# those that our role may not end are not of a restore that it may undo.
END_LOADING_QUERY = """
SELECT pg_terminate_backend(l.pid, %s)
  FROM pg_locks l JOIN pg_stat_activity a USING (pid) JOIN pg_roles r ON r.oid = a.usesysid
  JOIN pg_roles our ON our.rolname = current_user
 WHERE l.relation = to_regclass(%s) AND l.pid <> pg_backend_pid()
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (our.rolsuper OR NOT r.rolsuper
        AND (pg_has_role('pg_signal_backend', 'USAGE') OR pg_has_role(r.oid, 'USAGE')))
"""
# Of the `filled` tables those that can't be truncated: TRUNCATE takes a table only with all that refer to it. So their
# rows are deleted, and then also those of the tables to which these refer. A partitioned table that refers to one is
# never truncated itself.
DELETED = """deleted AS (
    SELECT k.confrelid AS relid FROM pg_constraint k
     WHERE k.contype = 'f' AND k.confrelid IN (SELECT relid FROM filled)
       AND k.conrelid NOT IN (SELECT relid FROM filled)
    UNION SELECT k.confrelid FROM deleted d JOIN pg_constraint k ON k.contype = 'f' AND k.conrelid = d.relid
     WHERE k.confrelid IN (SELECT relid FROM filled))"""
# A table that was dropped is not found.
FILLED_QUERY = f"""
WITH RECURSIVE filled AS (SELECT relid::oid, name FROM {{schema}}.tables),
{DELETED}
SELECT c.oid::bigint, t.name, to_regclass(t.name) IS NOT DISTINCT FROM c.oid,
       format('%%I.%%I', n.nspname, c.relname), c.oid IN (SELECT relid FROM deleted)
  FROM filled t JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' ORDER BY 4
"""


class TablesChangedError(RefusedError):
    """Others have changed the tables that a restore has filled, so that they can't be emptied."""


class _Filled(NamedTuple):
    """A filled table; the names are quoted. `is_deleted`: its rows are deleted, because it can't be truncated."""

    oid: int
    former_name: str
    has_name: bool
    name: str
    is_deleted: bool


@dataclass(frozen=True, slots=True)
class Filling:
    """A restore's filling of one database: its node, a session in it, and the suffix of the restore's id."""

    node: str
    connection: psycopg.Connection[Any]
    suffix: str

    @property
    def schema(self) -> str:
        """The schema that it keeps."""
        return f"{FILLING}{self.suffix}"

    @property
    def ledger(self) -> str:
        """The load's ledger (restore/rows/load.py)."""
        return f"{self.schema}.ledger"

    @property
    def exists(self) -> bool:
        """Whether it has begun and is not removed. A schema of others is none."""
        return self.schema in _find_schemas(self.connection)[0]

    def oids(self) -> set[int]:
        """The tables that were empty when it began, by oid; those that were dropped since, too."""
        query = f"SELECT relid::oid::bigint FROM {self.schema}.tables"
        return {oid for (oid,) in self.connection.execute(query.encode())}

    def names(self) -> list[str]:
        """The quoted names of the tables that `undo` would empty; [] if it is removed."""
        return [table.name for table in self._find_tables()] if self.exists else []

    def begin(self, groups: Iterable[Group]) -> None:
        """Create the schema, in the caller's transaction; `groups` are the tables to fill, which are empty.

        Raises EventTriggerError: those that are enabled ALWAYS act on it.
        """
        with naming_event_triggers(self.connection, f"CREATE SCHEMA {self.schema}"):
            self._begin(groups)

    def _begin(self, groups: Iterable[Group]) -> None:
        self.connection.execute(REPLICA)
        create_ledger(self.connection, self.schema)
        for definition in (
            "record (one boolean PRIMARY KEY DEFAULT true CHECK (one), text text NOT NULL, place text NOT NULL)",
            "tables (relid regclass PRIMARY KEY, name text NOT NULL)",
        ):
            self.connection.execute(f"CREATE TABLE {self.schema}.{definition}".encode())
        statement = f"INSERT INTO {self.schema}.tables SELECT name::regclass, name FROM unnest(%s::text[]) AS t (name)"
        self.connection.execute(statement.encode(), ([qualify(group) for group in groups],))

    def write(self, text: str) -> None:
        """Write the restore's record; raise psycopg.errors.UndefinedTable if the filling was removed."""
        statement = (
            f"INSERT INTO {self.schema}.record (text, place) VALUES (%s, {PLACE})"
            " ON CONFLICT (one) DO UPDATE SET text = %s"
        )
        with self.connection.transaction():
            self.connection.execute(REPLICA)
            self.connection.execute(statement.encode(), (text, text))

    def remove(self) -> None:
        """Remove the schema; the rows stay. Does nothing if that is done.

        Raises TablesInUseError, EventTriggerError.
        """
        try:
            with self.connection.transaction():
                self.connection.execute(REPLICA)
                self.connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS_MAX}s'")
                if self.exists:
                    with naming_event_triggers(self.connection, f"DROP SCHEMA {self.schema}"):
                        self.connection.execute(f"DROP SCHEMA {self.schema} CASCADE".encode())
        except psycopg.errors.LockNotAvailable as error:
            raise TablesInUseError(
                f"node {self.node}: the rows are restored, but schema {self.schema} of database"
                f" {self.connection.info.dbname} can't be removed: other sessions have had its tables locked for"
                f" {LOCK_SECONDS_MAX} s",
                hint="end the sessions that use them (see pg_locks): a pg_dump may be one",
                details={"node": self.node, "database": self.connection.info.dbname},
            ) from error

    def end_loading(self) -> None:
        """End the sessions that load rows, also those of a process that is gone."""
        self.connection.execute(END_LOADING_QUERY, (END_MILLISECONDS_MAX, self.ledger))

    def undo(self) -> list[str]:
        """Empty the tables, remove the schema, and return their quoted names, in one transaction.

        Does nothing if that is done. Raises TablesInUseError, TablesChangedError.
        """
        if not self.exists:
            return []
        tables = self._empty(f"DROP SCHEMA {self.schema} CASCADE")
        return [table.name for table in tables]

    def start_again(self) -> None:
        """Empty the tables and the ledger, in one transaction; raise as `undo` does."""
        self._empty(f"TRUNCATE {self.ledger}")

    def _empty(self, last: str) -> list[_Filled]:
        """Empty the tables, run the `last` statement, and return them."""
        self.end_loading()
        execute = self.connection.execute
        try:
            with self.connection.transaction():
                execute(REPLICA)
                execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS_MAX}s'")
                # A task enters itself in the ledger first: from here on none begins, and none is under way.
                execute(f"LOCK TABLE {self.ledger} IN ACCESS EXCLUSIVE MODE".encode())
                tables = self._lock_tables()
                if alone := [table.name for table in tables if not table.is_deleted]:
                    execute(f"TRUNCATE ONLY {', ONLY '.join(alone)}".encode())
                for table in tables:
                    if table.is_deleted:
                        execute(f"DELETE FROM ONLY {table.name}".encode())
                self._check_orphans(tables)
                with naming_event_triggers(self.connection, last):
                    execute(last.encode())
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            database, is_deadlock = self.connection.info.dbname, isinstance(error, psycopg.errors.DeadlockDetected)
            why = "locked them in another order" if is_deadlock else f"have had them locked for {LOCK_SECONDS_MAX} s"
            raise TablesInUseError(
                f"node {self.node}: tables of database {database} can't be emptied: other sessions {why}",
                hint="end the sessions that use them (see pg_locks), then repeat the command",
                details={"node": self.node, "database": database},
            ) from error
        return tables

    def _find_tables(self) -> list[_Filled]:
        query = FILLED_QUERY.format(schema=self.schema).encode()
        return [_Filled._make(row) for row in self.connection.execute(query, ()).fetchall()]

    def _lock_tables(self) -> list[_Filled]:
        """Lock the tables; raise TablesChangedError if they have changed since they were filled."""
        for table in self._find_tables():
            try:
                self.connection.execute(f"LOCK TABLE ONLY {table.name} IN ACCESS EXCLUSIVE MODE".encode())
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                self._refuse(f"table {table.name} has just got another name, or is gone", "repeat the command")
        # Under the locks nobody changes them any more.
        tables = self._find_tables()
        for table in tables:
            if not table.has_name:
                self._refuse(
                    f"table {table.name} was {table.former_name} when it was filled",
                    "give it that name again, then repeat the command",
                )
        deleted = {table.oid for table in tables if table.is_deleted}
        for acting in find_acting(self.connection, [table.oid for table in tables]):
            if acting.on_delete if acting.oid in deleted else acting.on_truncate:
                self._refuse(f"{acting.label} would act", "disable it, then repeat the command")
        return tables

    def _check_orphans(self, tables: list[_Filled]) -> None:
        if orphan := find_orphan(self.node, self.connection, [table.oid for table in tables], only_into=True):
            self._refuse(
                f"a row of {orphan.table} refers to one of {orphan.referenced}: ({orphan.columns}) = ({orphan.values}),"
                f" by foreign key {orphan.name}",
                "delete such rows, then repeat the command",
            )

    def _refuse(self, why: str, hint: str) -> NoReturn:
        database = self.connection.info.dbname
        raise TablesChangedError(
            f"node {self.node}: tables of database {database} can't be emptied: {why}",
            hint=hint,
            details={"node": self.node, "database": database},
        )


def find_fillings(connection: psycopg.Connection[Any]) -> tuple[dict[str, str], list[str]]:
    """The records of the restores that fill the database, or have ended unfinished, by the suffix of their ids.

    The second list names schemas that only look so: they belong to others, and nothing in them is read.
    """
    records: dict[str, str] = {}
    own, others = _find_schemas(connection)
    for schema in own:
        with connection.transaction():
            refuse_views(connection)
            connection.execute(f"LOCK TABLE {schema}.record IN ACCESS SHARE MODE".encode())
            # Under the lock it can't be exchanged any more.
            if schema in _find_schemas(connection)[0]:
                query = f"SELECT text, place = {PLACE} FROM ONLY {schema}.record"
                text, is_here = connection.execute(query.encode()).fetchone() or ("", True)
                if is_here:
                    records[schema.removeprefix(FILLING)] = text
                else:
                    others.append(f"schema {schema}, which came with a copy of another database")
    return records, others


def _find_schemas(connection: psycopg.Connection[Any]) -> tuple[list[str], list[str]]:
    """The schemas of fillings, and those of others that have such names, each with its owner."""
    rows = connection.execute(SCHEMAS_QUERY, (list(RELATIONS),)).fetchall()
    own = [schema for schema, _, is_own in rows if is_own]
    return own, [f"schema {schema} of role {owner}" for schema, owner, is_own in rows if not is_own]
