"""The schema that a restore with `--data-only` keeps in the database it fills: its record, ledger and list of tables.

One transaction creates the schema before the first row is loaded, and another removes it. A process that finds the
schema can therefore tell which tables were empty before. The database's comment belongs to its owner, so the record is
not stored there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import psycopg
from msgspec import Struct

from cutline.nodes.connections import refuse_views
from cutline.nodes.groups import Group, qualify
from cutline.nodes.other_databases import FILLING
from cutline.nodes.publications import naming_event_triggers
from cutline.restore.rows.filled_tables import find_acting
from cutline.restore.rows.load import TablesInUseError, create_ledger
from cutline.restore.rows.references import LOCK_SECONDS_MAX, find_orphan
from cutline.storage.errors import RefusedError

# Identifies the session's database, because a copied database also contains the restore's objects.
PLACE = """
(SELECT system_identifier || '/' || d.oid FROM pg_control_system(), pg_database d WHERE d.datname = current_database())
"""
RELATIONS = ("record", "tables", "ledger")
# The schemas with such names, their owners, and whether all relations that would be read belong to our role or a
# superuser. Any role with CREATE on the database can create such a schema, and reading a view in it would run code as
# our role.
SCHEMAS_QUERY = f"""
WITH trusted AS (SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user)
SELECT n.nspname, pg_get_userbyid(n.nspowner), n.nspowner IN (SELECT oid FROM trusted) AND (
       SELECT count(*) FROM pg_class c
        WHERE c.relnamespace = n.oid AND c.relname = ANY (%s) AND c.relkind = 'r' AND c.relpersistence = 'p'
          AND c.relowner IN (SELECT oid FROM trusted) AND NOT c.relhasrules AND NOT c.relrowsecurity
          AND NOT EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhparent, i.inhrelid))) = {len(RELATIONS)}
  FROM pg_namespace n WHERE n.nspname ~ '^{FILLING}[0-9a-f]{{10}}$' ORDER BY 1
"""
# Suppresses triggers, event triggers and foreign key checks in the transaction.
REPLICA = "SET LOCAL session_replication_role = replica"
END_MILLISECONDS_MAX = 5000
# The sessions that load rows: each holds a lock on the ledger until it commits. Autovacuum, which has no user, gives
# way by itself. If our role may not end a session, the session does not belong to a restore that our role may undo.
END_LOADING_QUERY = """
SELECT pg_terminate_backend(l.pid, %s)
  FROM pg_locks l JOIN pg_stat_activity a USING (pid) JOIN pg_roles r ON r.oid = a.usesysid
  JOIN pg_roles our ON our.rolname = current_user
 WHERE l.relation = to_regclass(%s) AND l.pid <> pg_backend_pid()
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (our.rolsuper OR NOT r.rolsuper
        AND (pg_has_role('pg_signal_backend', 'USAGE') OR pg_has_role(r.oid, 'USAGE')))
"""
# The `filled` tables that can't be truncated, because TRUNCATE must include every table that references them. Their
# rows are deleted instead, and then the rows of the tables that they reference must be deleted too. A partitioned table
# that references a filled table is never truncated itself.
DELETED = """deleted AS (
    SELECT k.confrelid AS relid FROM pg_constraint k
     WHERE k.contype = 'f' AND k.confrelid IN (SELECT relid FROM filled)
       AND k.conrelid NOT IN (SELECT relid FROM filled)
    UNION SELECT k.confrelid FROM deleted d JOIN pg_constraint k ON k.contype = 'f' AND k.conrelid = d.relid
     WHERE k.confrelid IN (SELECT relid FROM filled))"""
# Dropped tables are not found.
FILLED_QUERY = f"""
WITH RECURSIVE filled AS (SELECT relid::oid, name FROM {{schema}}.tables),
{DELETED}
SELECT c.oid::bigint, t.name, to_regclass(t.name) IS NOT DISTINCT FROM c.oid,
       format('%%I.%%I', n.nspname, c.relname), c.oid IN (SELECT relid FROM deleted)
  FROM filled t JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' ORDER BY 4
"""


class TablesChangedError(RefusedError):
    """The tables that a restore filled can't be emptied, because other sessions have changed them."""


class _Filled(NamedTuple):
    """A filled table; the names are quoted. `is_deleted`: its rows are deleted, because it can't be truncated."""

    oid: int
    former_name: str
    has_name: bool
    name: str
    is_deleted: bool


class Filling(Struct, frozen=True):
    """A restore's filling of one database: the node, a session in the database, and the suffix of the restore's id."""

    node: str
    connection: psycopg.Connection[Any]
    suffix: str

    @property
    def schema(self) -> str:
        """The name of the schema."""
        return f"{FILLING}{self.suffix}"

    @property
    def ledger(self) -> str:
        """The load's ledger (restore/rows/load.py)."""
        return f"{self.schema}.ledger"

    @property
    def exists(self) -> bool:
        """Whether the filling has begun and has not been removed; other roles' schemas don't count."""
        return self.schema in _find_schemas(self.connection)[0]

    def oids(self) -> set[int]:
        """Return the oids of the tables that were empty when the filling began, including tables dropped since."""
        query = f"SELECT relid::oid::bigint FROM {self.schema}.tables"
        return {oid for (oid,) in self.connection.execute(query.encode())}

    def names(self) -> list[str]:
        """Return the quoted names of the tables that `undo` would empty; [] if the filling has been removed."""
        return [table.name for table in self._find_tables()] if self.exists else []

    def begin(self, groups: Iterable[Group]) -> None:
        """Create the schema in the caller's transaction; `groups` are the tables to fill, which must be empty.

        Raises EventTriggerError if an event trigger that is enabled ALWAYS prevents that.
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
        """Remove the schema and keep the rows. Does nothing if the schema has already been removed.

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
                f" {self.connection.info.dbname} can't be removed: other sessions have held locks on its tables for"
                f" {LOCK_SECONDS_MAX} s",
                hint="end the sessions that use them (see pg_locks), for example a pg_dump",
                details={"node": self.node, "database": self.connection.info.dbname},
            ) from error

    def end_loading(self) -> None:
        """End the sessions that load rows, including any left over from an earlier process."""
        self.connection.execute(END_LOADING_QUERY, (END_MILLISECONDS_MAX, self.ledger))

    def undo(self) -> list[str]:
        """Empty the tables and remove the schema in one transaction; return the tables' quoted names.

        Does nothing if the schema has already been removed. Raises TablesInUseError, TablesChangedError.
        """
        if not self.exists:
            return []
        tables = self._empty(f"DROP SCHEMA {self.schema} CASCADE")
        return [table.name for table in tables]

    def start_again(self) -> None:
        """Empty the tables and the ledger in one transaction; raise any error of `undo`."""
        self._empty(f"TRUNCATE {self.ledger}")

    def _empty(self, last: str) -> list[_Filled]:
        self.end_loading()
        execute = self.connection.execute
        try:
            with self.connection.transaction():
                execute(REPLICA)
                execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS_MAX}s'")
                # A task first writes to the ledger, so from here on no task is running and no task can start.
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
            why = (
                "locked them in a different order"
                if is_deadlock
                else f"have held locks on them for {LOCK_SECONDS_MAX} s"
            )
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
                self._refuse(f"table {table.name} has just been renamed or dropped", "repeat the command")
        # Read the tables again: now that they are locked, they can't change any more.
        tables = self._find_tables()
        for table in tables:
            if not table.has_name:
                self._refuse(
                    f"table {table.name} was named {table.former_name} when it was filled",
                    "rename it back, then repeat the command",
                )
        deleted = {table.oid for table in tables if table.is_deleted}
        for acting in find_acting(self.connection, [table.oid for table in tables]):
            if acting.on_delete if acting.oid in deleted else acting.on_truncate:
                self._refuse(f"{acting.label} would fire", "disable it, then repeat the command")
        return tables

    def _check_orphans(self, tables: list[_Filled]) -> None:
        if orphan := find_orphan(self.node, self.connection, [table.oid for table in tables], only_into=True):
            self._refuse(
                f"a row of {orphan.table} references a row of {orphan.referenced} through foreign key {orphan.name}:"
                f" ({orphan.columns}) = ({orphan.values})",
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
    """Read the records of running and unfinished restores that fill the database, keyed by the suffix of their ids.

    Also list similarly named schemas of other roles, which are not read.
    """
    records: dict[str, str] = {}
    own, others = _find_schemas(connection)
    for schema in own:
        with connection.transaction():
            refuse_views(connection)
            connection.execute(f"LOCK TABLE {schema}.record IN ACCESS SHARE MODE".encode())
            # Check again: now that the table is locked, it can't be replaced any more.
            if schema in _find_schemas(connection)[0]:
                query = f"SELECT text, place = {PLACE} FROM ONLY {schema}.record"
                text, is_here = connection.execute(query.encode()).fetchone() or ("", True)
                if is_here:
                    records[schema.removeprefix(FILLING)] = text
                else:
                    others.append(f"schema {schema}, from a copy of another database")
    return records, others


def _find_schemas(connection: psycopg.Connection[Any]) -> tuple[list[str], list[str]]:
    """Find the schemas of fillings, and other roles' schemas with such names, each with its owner."""
    rows = connection.execute(SCHEMAS_QUERY, (list(RELATIONS),)).fetchall()
    own = [schema for schema, _, is_own in rows if is_own]
    return own, [f"schema {schema} of role {owner}" for schema, owner, is_own in rows if not is_own]
