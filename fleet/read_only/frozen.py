"""A database that accepts no writes: read-only by default, with what it was before kept beside that.

`default_transaction_read_only` is on for the database, and for every role that has a setting of its own, because a
role's wins over its database's. What was set before is written down on the node by the same transaction, as the comment
of the fleet's publication: a node is frozen and says how to undo that, or neither, whoever dies and whatever becomes of
the store. It is copied with the node (a standby that is promoted, pg_upgrade), as the settings are.

A session that sets the variable itself still writes: who relies on the freeze has to look
(snapshots/create/terminal.py). Our own sessions do, in their connection strings (fleet/nodes/connections.py).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql

from fleet.config import Node
from fleet.nodes.other_sessions import OtherSession, end_sessions, server_time
from fleet.progress import Progress
from fleet.tables.publications import publication_names

SCHEMA = "cutline/frozen/1"
END_SECONDS_MAX = 10.0
SETTING = sql.SQL("default_transaction_read_only")
# A setting of ours, by role ('' for the database) as it is now; of roles all that have one, here or everywhere.
SETTINGS_QUERY = """
SELECT coalesce(r.rolname, ''), here.value, coalesce(here.value, everywhere.value),
       r.oid IS NULL OR (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) OR r.rolname = current_user
       OR (NOT r.rolsuper AND (SELECT rolcreaterole FROM pg_roles WHERE rolname = current_user)
           AND (current_setting('server_version_num')::int < 160000
                OR pg_has_role(current_user, r.oid, 'MEMBER WITH ADMIN OPTION')))
  FROM (SELECT 0::oid UNION ALL SELECT oid FROM pg_roles) AS every (oid)
  LEFT JOIN pg_roles r ON r.oid = every.oid
  LEFT JOIN LATERAL (
       SELECT split_part(setting, '=', 2) FROM pg_db_role_setting g CROSS JOIN unnest(g.setconfig) AS setting
        WHERE g.setrole = every.oid
          AND g.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND split_part(setting, '=', 1) = 'default_transaction_read_only') AS here (value) ON true
  LEFT JOIN LATERAL (
       SELECT split_part(setting, '=', 2) FROM pg_db_role_setting g CROSS JOIN unnest(g.setconfig) AS setting
        WHERE g.setrole = every.oid AND every.oid <> 0 AND g.setdatabase = 0
          AND split_part(setting, '=', 1) = 'default_transaction_read_only') AS everywhere (value) ON true
 WHERE every.oid = 0 OR coalesce(here.value, everywhere.value) IS NOT NULL
 ORDER BY 1
"""
RECORD_QUERY = """
SELECT pubname, obj_description(oid, 'pg_publication') FROM pg_publication
 WHERE pubname LIKE 'cutline\\_%' AND obj_description(oid, 'pg_publication') LIKE '{"schema": "cutline/frozen/%'
 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class ReadOnlySetting:
    """What a role (the database, if None) has set in the database, as PostgreSQL keeps it; None: nothing."""

    role: str | None
    value: str | None


@dataclass(frozen=True, slots=True)
class Effective:
    """A setting, what holds with it for who connects now, and whether our role may change it."""

    setting: ReadOnlySetting
    holds: str | None
    may_change: bool

    @property
    def is_on(self) -> bool:
        """Whether transactions are read-only with it."""
        return is_on(self.holds)


@dataclass(frozen=True, slots=True)
class Frozen:
    """What froze a database, and what was set before. `since` by the node's clock, in RFC 3339."""

    operation: str
    snapshot: str
    since: str
    before: tuple[ReadOnlySetting, ...]

    def text(self) -> str:
        """Since when and for what, for a message."""
        return f"read-only since {self.since[:19]}Z by terminal snapshot {self.snapshot} (operation {self.operation})"


@dataclass(frozen=True, slots=True)
class Thawed:
    """A node that accepts writes again. Sessions that began while it did not are read-only: those that are `left`."""

    node: str
    was: Frozen
    ended: int
    left: tuple[OtherSession, ...]


def is_on(value: str | None) -> bool:
    """Whether PostgreSQL takes the text of a boolean setting for on (guc.c, parse_bool: any unique beginning)."""
    text = (value or "").lower()
    return bool(text) and (text in ("on", "1") or "true".startswith(text) or "yes".startswith(text))


def read_settings(connection: psycopg.Connection[Any]) -> list[Effective]:
    """The database's setting, and those of all roles that have one; the database's first."""
    return [
        Effective(ReadOnlySetting(role or None, here), holds, may_change)
        for role, here, holds, may_change in connection.execute(SETTINGS_QUERY)
    ]


def read_record(connection: psycopg.Connection[Any]) -> Frozen | None:
    """What is written down of the freeze that the database is in, if it is in one."""
    row = connection.execute(RECORD_QUERY).fetchone()
    if row is None:
        return None
    document = json.loads(row[1])
    before = tuple(ReadOnlySetting(**entry) for entry in document["before"])
    return Frozen(document["operation"], document["snapshot"], document["since"], before)


def read_frozen(connection: psycopg.Connection[Any]) -> Frozen | None:
    """The record of a freeze that holds: a copy of the database by pg_dump may have the record alone."""
    found = read_record(connection)
    return found if found and read_settings(connection)[0].is_on else None


def freeze(connection: psycopg.Connection[Any], fleet_id: str, operation: str, snapshot: str) -> Frozen:
    """Make new sessions on the connection's database read-only, and write down what was before, in one transaction.

    Sessions that are open stay as they are. The database must not be frozen; a record without effect is put back first.
    """
    since = server_time(connection).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    with connection.transaction():
        if stale := read_record(connection):
            _put_back(connection, stale)
        settings = read_settings(connection)
        changed = [one.setting for number, one in enumerate(settings) if number == 0 or not one.is_on]
        frozen = Frozen(operation, snapshot, since, tuple(changed))
        for setting in changed:
            _set(connection, ReadOnlySetting(setting.role, "on"))
        document = json.dumps({"schema": SCHEMA, **asdict(frozen)})
        _comment(connection, publication_names(fleet_id)[0], document)
    return frozen


def thaw(
    node: Node, connection: psycopg.Connection[Any], progress: Progress, operation: str | None = None
) -> Thawed | None:
    """Set what was set before, and end the sessions that began read-only; None if nothing is frozen.

    With `operation` only what that one froze. A setting that is not on any more was changed since, and stays.
    """
    found = read_record(connection)
    if found is None or operation not in (None, found.operation):
        return None
    with connection.transaction():
        _put_back(connection, found)
    ended, left = end_sessions(node, connection, datetime.fromisoformat(found.since), END_SECONDS_MAX, progress)
    return Thawed(node.id, found, ended, tuple(left))


def _put_back(connection: psycopg.Connection[Any], frozen: Frozen) -> None:
    now = {one.setting.role: one.setting.value for one in read_settings(connection)}
    for setting in frozen.before:
        if is_on(now.get(setting.role)):
            _set(connection, setting)
    for name, _ in connection.execute(RECORD_QUERY).fetchall():
        _comment(connection, name, None)


def _set(connection: psycopg.Connection[Any], setting: ReadOnlySetting) -> None:
    (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
    database = sql.Identifier(name)
    where = sql.SQL("DATABASE {}").format(database)
    if setting.role is not None:
        where = sql.SQL("ROLE {} IN DATABASE {}").format(sql.Identifier(setting.role), database)
    change = sql.SQL("RESET {}").format(SETTING)
    if setting.value is not None:
        change = sql.SQL("SET {} = {}").format(SETTING, sql.Literal(setting.value))
    connection.execute(sql.SQL("ALTER {} {}").format(where, change))


def _comment(connection: psycopg.Connection[Any], publication: str, text: str | None) -> None:
    statement = sql.SQL("COMMENT ON PUBLICATION {} IS {}")
    connection.execute(statement.format(sql.Identifier(publication), sql.Literal(text)))
