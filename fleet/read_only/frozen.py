"""Make databases read-only by default, and store the previous settings so that this can be undone.

`default_transaction_read_only` is set to on for the database, and for every role that has its own setting, because a
role's setting overrides the database's. The same transaction stores the previous settings on the node, as the comment
of the fleet's publication: a node is either frozen and knows how to undo that, or not frozen, whatever happens to the
process or the store. Like the settings, the comment is copied with the node (a promoted standby, pg_upgrade).

A session that sets the variable itself can still write, so whoever relies on the freeze must check for writes
(snapshots/create/terminal.py). Cutline's own sessions set it in their connection strings (fleet/nodes/connections.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.nodes.other_sessions import (
    OtherSession,
    SessionFilter,
    end_sessions,
    other_sessions,
    server_time,
    sessions_text,
)
from cutline.fleet.nodes.problems import (
    INHERIT_OPTION_VERSION,
    NodeProblem,
    Purpose,
    Role,
    quote,
    read_role,
    unfit_error,
)
from cutline.fleet.nodes.sessions import Sessions
from cutline.fleet.progress import Progress
from cutline.fleet.record import Record, Time, fields_of, from_json
from cutline.fleet.tables.names import quote_identifier
from cutline.fleet.tables.publications import publication_names, run_ddl
from cutline.storage.errors import RefusedError

END_SECONDS_MAX = 10.0
SETTING = sql.SQL("default_transaction_read_only")
# The current setting by role ('' for the database): of the roles, all that have one in this database or in general.
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


class FreezeRecordError(RefusedError):
    """The record of a terminal snapshot on a node is not readable."""


class ReadOnlySetting(Record, frozen=True):
    """The setting of a role in the database, or of the database if `role` is None. `value` None: not set."""

    role: str | None
    value: str | None


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting, the value that a new session gets from it, and whether our role may change it."""

    setting: ReadOnlySetting
    value_in_effect: str | None
    may_change: bool

    @property
    def is_on(self) -> bool:
        """Whether it makes transactions read-only."""
        return is_on(self.value_in_effect)


class Frozen(Record, frozen=True, forbid_unknown_fields=False, tag_field="schema", tag="cutline/frozen/1"):
    """The operation that froze a database, and the previous settings. `since` is the time of the node's clock.

    A newer version may add fields; none of them can be needed to undo the freeze.
    """

    operation: str
    snapshot: str
    since: Time
    before: tuple[ReadOnlySetting, ...]

    def text(self) -> str:
        """The freeze, for a message."""
        return f"read-only since {self.since[:19]}Z by terminal snapshot {self.snapshot} (operation {self.operation})"


@dataclass(frozen=True, slots=True)
class ThawResult:
    """A node that accepts writes again. Of its sessions that began read-only, `ended` were ended and `left` remain."""

    node: str
    was: Frozen
    ended: int
    left: tuple[OtherSession, ...]


def is_on(value: str | None) -> bool:
    """Whether PostgreSQL reads the boolean setting as on: any unique prefix will do (parse_bool in bool.c)."""
    text = (value or "").lower()
    return bool(text) and (text in ("on", "1") or "true".startswith(text) or "yes".startswith(text))


def read_settings(connection: psycopg.Connection[Any]) -> list[EffectiveSetting]:
    """The database's setting first, then the settings of all roles that have one."""
    return [
        EffectiveSetting(ReadOnlySetting(role or None, here), value_in_effect, may_change)
        for role, here, value_in_effect, may_change in connection.execute(SETTINGS_QUERY)
    ]


def read_record(node: Node, connection: psycopg.Connection[Any]) -> Frozen | None:
    """The stored record of the database's freeze; None if there is none. Raises FreezeRecordError."""
    row = connection.execute(RECORD_QUERY).fetchone()
    if row is None:
        return None
    publication, comment = row
    try:
        frozen: Frozen = from_json(comment, Frozen)
    except msgspec.MsgspecError as error:
        database = quote_identifier(connection.info.dbname)
        raise FreezeRecordError(
            f"node {node.id}: the comment of publication {publication} is not a record of a terminal snapshot that this"
            f" version can read: {error}",
            hint="a newer version of Cutline may have written it: use that one; or undo it by hand:"
            f" SET default_transaction_read_only = off; ALTER DATABASE {database} RESET default_transaction_read_only;"
            f" COMMENT ON PUBLICATION {quote_identifier(publication)} IS NULL; and for each role that \\drds lists with"
            f" it: ALTER ROLE … IN DATABASE {database} RESET default_transaction_read_only",
            details={"node": node.id, "publication": publication},
        ) from error
    return frozen


def read_frozen(node: Node, connection: psycopg.Connection[Any]) -> Frozen | None:
    """The record of a freeze that is in effect: a database restored from pg_dump may have only the record."""
    frozen = read_record(node, connection)
    return frozen if frozen and read_settings(connection)[0].is_on else None


def freeze(node: Node, connection: psycopg.Connection[Any], fleet_id: str, operation: str, snapshot: str) -> Frozen:
    """Make new sessions on the database read-only and store the previous settings, in one transaction.

    Open sessions are not changed. The database must not be frozen; a record that is not in effect is undone first.
    """
    since = Time.of(server_time(connection))
    with connection.transaction():
        if stale := read_record(node, connection):
            _undo(connection, stale)
        settings = read_settings(connection)
        changed = [one.setting for number, one in enumerate(settings) if number == 0 or not one.is_on]
        frozen = Frozen(operation, snapshot, since, tuple(changed))
        for setting in changed:
            _set(connection, ReadOnlySetting(setting.role, "on"))
        _comment(connection, publication_names(fleet_id)[0], json.dumps(fields_of(frozen)))
    return frozen


def thaw(
    node: Node, connection: psycopg.Connection[Any], progress: Progress, operation: str | None = None
) -> ThawResult | None:
    """Restore the previous settings, and end the sessions that began read-only; None if nothing is frozen.

    With `operation`, undo only a freeze by that operation. A setting that is no longer on was changed later and stays.
    """
    frozen = read_record(node, connection)
    if frozen is None or operation not in (None, frozen.operation):
        return None
    with connection.transaction():
        _undo(connection, frozen)
    ended, left = end_sessions(node, connection, datetime.fromisoformat(frozen.since), END_SECONDS_MAX, progress)
    return ThawResult(node.id, frozen, ended, tuple(left))


def _undo(connection: psycopg.Connection[Any], frozen: Frozen) -> None:
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
    run_ddl(connection, statement.format(sql.Identifier(publication), sql.Literal(text)))


PRIVILEGES_QUERY = """
SELECT pg_has_role(d.datdba, 'USAGE'), o.rolname, o.rolsuper, pg_has_role('pg_signal_backend', 'USAGE'),
       (SELECT pg_get_userbyid(pubowner) FROM pg_publication
         WHERE pubname = %s AND NOT pg_has_role(pubowner, 'USAGE'))
  FROM pg_database d JOIN pg_roles o ON o.oid = d.datdba WHERE d.datname = current_database()
"""
# A subscription's apply worker bypasses the checks for read-only transactions (worker.c).
SUBSCRIPTIONS_QUERY = """
SELECT subname FROM pg_subscription
 WHERE subenabled AND subdbid = (SELECT oid FROM pg_database WHERE datname = current_database()) ORDER BY 1
"""


def check_freezable(sessions: Sessions, fleet_id: str) -> None:
    """Raise NodeUnfitError naming everything that prevents our role from ending all writes to the primaries."""

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        return [*find_freeze_problems(node, connection, fleet_id), *_find_obstacles(node, connection)]

    problems = [problem for some in sessions.ask_named_primaries(find).values() for problem in some]
    if problems:
        raise unfit_error(problems)


def find_freeze_problems(
    node: Node, connection: psycopg.Connection[Any], fleet_id: str | None
) -> Iterator[NodeProblem]:
    """The privileges that our role lacks to make the node's database read-only, and to undo that."""
    role = read_role(node, connection)
    if role.is_super:
        return
    for problem, statement in _find_lacking(connection, role, fleet_id):
        yield NodeProblem(node.id, f"role {role.name} {problem}", statement, role.place, Purpose.TERMINAL)
    yield from _find_own_settings(node, connection, role)


def _find_lacking(connection: psycopg.Connection[Any], role: Role, fleet_id: str | None) -> Iterator[tuple[str, str]]:
    """Yield what the role lacks, each with a statement that grants it."""
    database = role.place.database
    publication = publication_names(fleet_id)[0] if fleet_id else ""
    row = connection.execute(PRIVILEGES_QUERY, (publication,)).fetchone()
    owns, owner, is_owner_super, signals, publisher = row or (False, "", True, False, None)
    if not owns:
        # Not another owner, where there is a choice: the owner has privileges on the schema public.
        change = f"ALTER DATABASE {quote(database)} OWNER TO {role.quoted};"
        for statement in [change] if is_owner_super else role.grant_membership(owner):
            yield f"does not own database {database}", statement
    if publisher:
        yield (
            f"does not own publication {publication}",
            f"ALTER PUBLICATION {quote(publication)} OWNER TO {role.quoted};",
        )
    if not signals:
        for statement in role.grant_membership("pg_signal_backend"):
            yield "may not end other roles' sessions", statement
    if not role.sees_statistics:
        for statement in role.grant_membership("pg_read_all_stats"):
            yield "may not see other sessions", statement


def _find_own_settings(node: Node, connection: psycopg.Connection[Any], role: Role) -> Iterator[NodeProblem]:
    """Yield the roles whose own setting would have to be changed, and may not be."""
    for one in read_settings(connection):
        other = one.setting.role
        if not other or one.is_on or one.may_change:
            continue
        problem = (
            f"role {role.name} may not change role {other}, which has its own default_transaction_read_only ="
            f" {one.value_in_effect}"
        )
        if connection.execute("SELECT FROM pg_roles WHERE rolname = %s AND rolsuper", (other,)).fetchone() is not None:
            action = f"only a superuser may change superuser {other}: create the snapshot as a superuser"
            yield NodeProblem(node.id, problem, action, purpose=Purpose.TERMINAL)
            continue
        for statement in _administer(role, other):
            yield NodeProblem(node.id, problem, statement, role.place, Purpose.TERMINAL)


def _administer(role: Role, other: str) -> Iterator[str]:
    """The statements that let our role change the settings of another one."""
    if not role.may_create_roles:
        yield f"ALTER ROLE {role.quoted} CREATEROLE;"
    if role.version >= INHERIT_OPTION_VERSION:
        yield f"GRANT {quote(other)} TO {role.quoted} WITH ADMIN TRUE, INHERIT FALSE, SET FALSE;"


def _find_obstacles(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    """Yield what else writes to the database, or can't be stopped."""
    role, database = read_role(node, connection), connection.info.dbname
    others = [] if role.is_super else other_sessions(node.id, connection, SessionFilter())
    if protected := [one for one in others if one.is_superuser]:
        yield NodeProblem(
            node.id,
            f"role {role.name} may not end superusers' sessions: {sessions_text(protected, names_node=False)}",
            "end them, or create the snapshot as a superuser",
            purpose=Purpose.TERMINAL,
        )
    for (name,) in connection.execute(SUBSCRIPTIONS_QUERY):
        yield NodeProblem(
            node.id,
            f"subscription {name} writes to database {database} even if it is read-only",
            f"ALTER SUBSCRIPTION {quote(name)} DISABLE;",
            role.place,
            Purpose.TERMINAL,
        )
