"""Read-only databases: after a terminal snapshot the fleet accepts no writes until `resume`.

`default_transaction_read_only` is turned on for the database, and for every role that has its own setting, because a
role's setting overrides the database's. The same transaction stores the previous settings on the node, in the comment
of the fleet's publication. So even if the process or the store is lost, a node is either not frozen, or frozen with a
record of how to undo the freeze. Copies of the node (a promoted standby, pg_upgrade) contain the comment and the
settings.

A session that sets the variable itself can still write, so a command that relies on the freeze must check for writes
(snapshots/create/terminal.py). Cutline's own sessions set it in their connection strings (nodes/pinned_settings.py).
Undoing the freeze does not require Arrow, Spark or the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from msgspec import Struct
from psycopg import sql

from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import News, Progress
from cutline.fleet.record import Record, Time, fields_of, from_json
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import NodeUnreachableError, connect, raising_unreachable
from cutline.nodes.encodings import database_of
from cutline.nodes.lock import take_lock
from cutline.nodes.open_sessions import shut_down_after
from cutline.nodes.other_sessions import (
    OtherSession,
    SessionFilter,
    end_sessions,
    other_sessions,
    server_time,
    sessions_text,
)
from cutline.nodes.problems import (
    INHERIT_OPTION_VERSION,
    NodeProblem,
    NodeUnfitError,
    Purpose,
    Role,
    quote,
    read_role,
    unfit_error,
)
from cutline.nodes.publications import publication_names, run_ddl
from cutline.nodes.sessions import Sessions, in_parallel, let_end, with_current_roles
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError

END_SECONDS_MAX = 10.0
SETTING = sql.SQL("default_transaction_read_only")
# The settings of the database (role '') and of every role that has its own, for this database or for all: the value
# for this database, the effective value, and whether our role may change it.
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
    """A node's record of a terminal snapshot can't be read."""


class ReadOnlySetting(Record, frozen=True):
    """The setting of a role in the database, or of the database if `role` is None. A `value` of None means not set."""

    role: str | None
    value: str | None


class EffectiveSetting(Struct, frozen=True):
    """A setting, the value that it gives to new sessions, and whether our role may change it."""

    setting: ReadOnlySetting
    value_in_effect: str | None
    may_change: bool

    @property
    def is_on(self) -> bool:
        """Whether the setting makes transactions read-only."""
        return is_on(self.value_in_effect)


class Frozen(Record, frozen=True, forbid_unknown_fields=False, tag_field="schema", tag="cutline/frozen/1"):
    """The operation that froze a database, and the previous settings. `since` is a time by the node's clock.

    A newer version may add fields, but only fields that are not needed to undo the freeze.
    """

    operation: str
    snapshot: str
    since: Time
    before: tuple[ReadOnlySetting, ...]

    def text(self) -> str:
        """Describe the freeze, for a message."""
        return f"read-only since {self.since[:19]}Z by terminal snapshot {self.snapshot} (operation {self.operation})"


class ThawResult(Struct, frozen=True):
    """A node that accepts writes again. `ended` counts its read-only sessions that ended; `left` are still open."""

    node: str
    was: Frozen
    ended: int
    left: tuple[OtherSession, ...]


def is_on(value: str | None) -> bool:
    """Whether PostgreSQL reads the boolean setting as true; it accepts any unique prefix (parse_bool in bool.c)."""
    text = (value or "").lower()
    return bool(text) and (text in ("on", "1") or "true".startswith(text) or "yes".startswith(text))


def read_settings(connection: psycopg.Connection[Any]) -> list[EffectiveSetting]:
    """Read the database's setting, followed by the settings of all roles that have their own."""
    return [
        EffectiveSetting(ReadOnlySetting(role or None, here), value_in_effect, may_change)
        for role, here, value_in_effect, may_change in connection.execute(SETTINGS_QUERY)
    ]


def read_record(node: Node, connection: psycopg.Connection[Any]) -> Frozen | None:
    """Read the record of the database's freeze; return None if it has none. Raises FreezeRecordError."""
    row = connection.execute(RECORD_QUERY).fetchone()
    if row is None:
        return None
    publication, comment = row
    try:
        frozen: Frozen = from_json(comment, Frozen)
    except msgspec.MsgspecError as error:
        database = quote_identifier(database_of(connection))
        raise FreezeRecordError(
            f"node {node.id}: the comment on publication {publication} is not a record of a terminal snapshot that this"
            f" version can read: {error}",
            hint="a newer version of Cutline may have written it: use that version; or undo the freeze by hand:"
            f" SET default_transaction_read_only = off; ALTER DATABASE {database} RESET default_transaction_read_only;"
            f" COMMENT ON PUBLICATION {quote_identifier(publication)} IS NULL; and for each role for which \\drds lists"
            f" the setting: ALTER ROLE … IN DATABASE {database} RESET default_transaction_read_only",
            details={"node": node.id, "publication": publication},
        ) from error
    return frozen


def read_frozen(node: Node, connection: psycopg.Connection[Any]) -> Frozen | None:
    """Read the record of a freeze that is in effect: a database restored from pg_dump may have only the record."""
    frozen = read_record(node, connection)
    return frozen if frozen and read_settings(connection)[0].is_on else None


def freeze(node: Node, connection: psycopg.Connection[Any], fleet_id: str, operation: str, snapshot: str) -> Frozen:
    """Make new sessions on the database read-only and store the previous settings, in one transaction.

    Open sessions are not affected. The database must not be frozen. A record that is not in effect is undone first.
    """
    since = Time.of(server_time(connection))
    with connection.transaction():
        if stale := read_record(node, connection):
            _undo(connection, stale)
        settings = read_settings(connection)
        changed = [
            role_setting.setting
            for number, role_setting in enumerate(settings)
            if number == 0 or not role_setting.is_on
        ]
        frozen = Frozen(operation, snapshot, since, tuple(changed))
        for setting in changed:
            _set(connection, ReadOnlySetting(setting.role, "on"))
        _comment(connection, publication_names(fleet_id)[0], json.dumps(fields_of(frozen)))
    return frozen


def thaw(
    node: Node, connection: psycopg.Connection[Any], progress: Progress, operation: str | None = None
) -> ThawResult | None:
    """Restore the previous settings, and end the sessions that started read-only; return None if nothing is frozen.

    With `operation`, undo only a freeze by that operation. A setting that is no longer on has since been changed, and
    is left alone.
    """
    frozen = read_record(node, connection)
    if frozen is None or operation not in (None, frozen.operation):
        return None
    with connection.transaction():
        _undo(connection, frozen)
    ended, left = end_sessions(node, connection, datetime.fromisoformat(frozen.since), END_SECONDS_MAX, progress)
    return ThawResult(node.id, frozen, ended, tuple(left))


def _undo(connection: psycopg.Connection[Any], frozen: Frozen) -> None:
    now = {
        effective_setting.setting.role: effective_setting.setting.value
        for effective_setting in read_settings(connection)
    }
    for setting in frozen.before:
        if is_on(now.get(setting.role)):
            _set(connection, setting)
    for name, _ in connection.execute(RECORD_QUERY).fetchall():
        _comment(connection, name, None)


def _set(connection: psycopg.Connection[Any], setting: ReadOnlySetting) -> None:
    database = sql.Identifier(database_of(connection))
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
    """Raise NodeUnfitError naming everything that keeps our role from stopping all writes to the primaries."""

    def find(node: Node, connection: psycopg.Connection[Any]) -> list[NodeProblem]:
        return [*find_freeze_problems(node, connection, fleet_id), *_find_obstacles(node, connection)]

    problems = [problem for some in sessions.ask_named_primaries(find).values() for problem in some]
    if problems:
        raise unfit_error(problems)


def find_freeze_problems(
    node: Node, connection: psycopg.Connection[Any], fleet_id: str | None
) -> Iterator[NodeProblem]:
    """Yield the missing privileges that our role needs to make the node's database read-only and to undo that."""
    role = read_role(node, connection)
    if role.is_super:
        return
    for problem, statement in _find_lacking(connection, role, fleet_id):
        yield NodeProblem(node.id, f"role {role.name} {problem}", statement, role.place, Purpose.TERMINAL)
    yield from _find_own_settings(node, connection, role)


def _find_lacking(connection: psycopg.Connection[Any], role: Role, fleet_id: str | None) -> Iterator[tuple[str, str]]:
    database = role.place.database
    publication = publication_names(fleet_id)[0] if fleet_id else ""
    row = connection.execute(PRIVILEGES_QUERY, (publication,)).fetchone()
    owns, owner, is_owner_super, signals, publisher = row or (False, "", True, False, None)
    if not owns:
        # Prefer membership to a change of owner: the database's owner has privileges on the public schema.
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
            yield "can't end other roles' sessions", statement
    if not role.sees_statistics:
        for statement in role.grant_membership("pg_read_all_stats"):
            yield "can't see other sessions", statement


def _find_own_settings(node: Node, connection: psycopg.Connection[Any], role: Role) -> Iterator[NodeProblem]:
    """Yield a problem for each role whose own setting must be changed but can't be changed by our role."""
    for setting in read_settings(connection):
        other = setting.setting.role
        if not other or setting.is_on or setting.may_change:
            continue
        problem = (
            f"role {role.name} can't change role {other}, which has its own default_transaction_read_only ="
            f" {setting.value_in_effect}"
        )
        if connection.execute("SELECT FROM pg_roles WHERE rolname = %s AND rolsuper", (other,)).fetchone() is not None:
            action = f"only a superuser can change superuser {other}: create the snapshot as a superuser"
            yield NodeProblem(node.id, problem, action, purpose=Purpose.TERMINAL)
            continue
        for statement in _administer(role, other):
            yield NodeProblem(node.id, problem, statement, role.place, Purpose.TERMINAL)


def _administer(role: Role, other: str) -> Iterator[str]:
    """Yield the statements that let our role change the settings of role `other`."""
    if not role.may_create_roles:
        yield f"ALTER ROLE {role.quoted} CREATEROLE;"
    if role.version >= INHERIT_OPTION_VERSION:
        yield f"GRANT {quote(other)} TO {role.quoted} WITH ADMIN TRUE, INHERIT FALSE, SET FALSE;"


def _find_obstacles(node: Node, connection: psycopg.Connection[Any]) -> Iterator[NodeProblem]:
    """Yield other writers: superusers' sessions that our role may not end, and subscriptions."""
    role, database = read_role(node, connection), database_of(connection)
    others = [] if role.is_super else other_sessions(node.id, connection, SessionFilter())
    if protected := [session for session in others if session.is_superuser]:
        yield NodeProblem(
            node.id,
            f"role {role.name} can't end superusers' sessions: {sessions_text(protected, names_node=False)}",
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


THAW_SECONDS_MAX = 30.0


class FleetFrozenError(RefusedError):
    """An earlier terminal snapshot has already made the fleet read-only."""


def check_terminal(sessions: Sessions, fleet_id: str, progress: Progress, *, terminal: bool) -> None:
    """Warn about read-only nodes. Before a `terminal` snapshot, raise if any node is read-only or can't be frozen.

    Raises FleetFrozenError, NodeUnfitError, FreezeRecordError.
    """

    def read(node: Node, connection: psycopg.Connection[Any]) -> Frozen | None:
        try:
            return read_frozen(node, connection)
        except FreezeRecordError as error:
            if terminal:
                raise
            progress.note(f"{error.message}; {error.hint}")
            return None

    frozen_nodes = {node: frozen for node, frozen in sessions.ask_named_primaries(read).items() if frozen}
    if terminal:
        for node, frozen in frozen_nodes.items():
            raise FleetFrozenError(
                f"node {node} is already {frozen.text()}",
                hint="a snapshot without --terminal has the same contents; before another terminal snapshot, run:"
                " snapshot resume",
                details={"node": node, "operation": frozen.operation, "since": frozen.since},
            )
        check_freezable(sessions, fleet_id)
    for text in dict.fromkeys(frozen.text() for frozen in frozen_nodes.values()):
        nodes = list_some((node for node, frozen in frozen_nodes.items() if frozen.text() == text), NODES_NAMED_MAX)
        progress.note(f"{nodes}: {text}; to accept writes again, run: snapshot resume")


def undo_freeze(nodes: Iterable[Node], operation: str, progress: Progress) -> bool:
    """Undo the operation's freeze on all primaries; return False if some, named in notes, may still be frozen."""

    def undo(node: Node) -> bool:
        try:
            with connect(node) as connection, shut_down_after(connection, THAW_SECONDS_MAX):
                thawed = thaw(node, connection, progress, operation)
        except RefusedError as error:
            progress.note(f"node {node.id} may still be read-only ({error.message}); {error.hint}")
            return False
        except (psycopg.Error, SnapshotError) as error:
            progress.note(f"node {node.id} may still be read-only ({error}); once it answers, run: snapshot resume")
            return False
        if thawed:
            progress.note(News(f"node {node.id} accepts writes again"))
        return True

    return all(in_parallel(undo, [node for node in nodes if node.backup_of is None], let_end))


class ReadOnlyLeftError(UnreachableError):
    """Some nodes could not be reached and may still be read-only; the others accept writes again."""


class ResumeReport(Struct, frozen=True):
    """The results for nodes that a terminal snapshot had made read-only; `asked` are all primaries."""

    results: tuple[ThawResult, ...]
    asked: tuple[str, ...]


def resume_fleet(fleet: Fleet, progress: Progress) -> ResumeReport:
    """Undo the freeze of any terminal snapshot on every primary that answers. Safe to repeat; needs no store.

    If another operation is running, raises FleetBusyError without changing anything, and FleetTopologyError if two
    servers of a shard are primaries. Raises ReadOnlyLeftError, NodeUnfitError or FreezeRecordError once all other nodes
    accept writes again.
    """
    with suppress(NodeUnreachableError):
        fleet = with_current_roles(fleet)
    progress.step("accept writes", total=len(fleet.primaries), unit="nodes")
    with ExitStack() as stack:
        connections: dict[str, psycopg.Connection[Any]] = {}
        problems: dict[str, SnapshotError] = {}
        for node, opened in zip(fleet.primaries, in_parallel(_connect, fleet.primaries), strict=True):
            if isinstance(opened, SnapshotError):
                problems[node.id] = opened
            else:
                connections[node.id] = stack.enter_context(closing(opened))
        reached = sorted((node for node in fleet.primaries if node.id in connections), key=lambda one: one.id)
        # Take all locks before any change: another operation would hold them all.
        for node in reached:
            with raising_unreachable(node):
                take_lock(node, connections[node.id], fleet.name, own_label("resume"))

        def undo(node: Node) -> ThawResult | None:
            try:
                return _thaw(node, connections[node.id], progress)
            except SnapshotError as error:
                problems[node.id] = error
                return None

        results = tuple(result for result in in_parallel(undo, reached, let_end) if result)
    if problems:
        raise _left_error(problems, results)
    return ResumeReport(results, tuple(node.id for node in fleet.primaries))


def _connect(node: Node) -> psycopg.Connection[Any] | SnapshotError:
    try:
        return connect(node)
    except SnapshotError as error:
        return error


def _thaw(node: Node, connection: psycopg.Connection[Any], progress: Progress) -> ThawResult | None:
    try:
        with raising_unreachable(node), shut_down_after(connection, THAW_SECONDS_MAX):
            result = thaw(node, connection, progress)
    except psycopg.Error as error:
        raise NodeUnfitError(
            f"node {node.id}: {str(error).splitlines()[0]}",
            hint="run it as the role that created the terminal snapshot or as a superuser, and only on primaries",
            details={"node": node.id},
        ) from error
    if result:
        progress.note(News(f"node {node.id} accepts writes again"))
    progress.advance(1)
    return result


def _left_error(problems: Mapping[str, SnapshotError], results: tuple[ThawResult, ...]) -> SnapshotError:
    text = "; ".join(error.message for error in problems.values())
    refused = [error for error in problems.values() if isinstance(error, RefusedError)]
    return (type(refused[0]) if refused else ReadOnlyLeftError)(
        f"these nodes may still be read-only: {', '.join(problems)}: {text}"
        + (f"; writable again: {', '.join(result.node for result in results)}" if results else ""),
        hint=refused[0].hint.split("\n") if refused else "once they answer, repeat: snapshot resume",
        details={"nodes": list(problems), "thawed": [result.node for result in results]},
    )
