"""Cutline's publications: they select the tables whose changes are decoded. Event triggers may fire on DDL for them.

An event trigger's function runs in our session, as our role. Many such functions name tables without a schema, which
works under the database's default search_path but not under ours. So each DDL statement on publications runs under the
default path, in its own transaction or savepoint. No other statement does: a role that may create objects in a schema
on that path could create functions for the statement to call, which would run as our role. The DDL statements don't
call any functions, and qualify all names.

PostgreSQL rejects UPDATEs of a published table that has no replica identity. So such tables are never added to the
publication for updates; append-only tables have a separate publication for inserts and truncates only. A table may
still lose its identity later. Then its updates fail until it is removed from the publication: the next create reports
it, and `init` removes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct
from psycopg import sql

from cutline.fleet.config import GroupRules
from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.fleet.table_names import table_name
from cutline.nodes.connections import node_of
from cutline.nodes.encodings import digest_of
from cutline.nodes.groups import Group, Table, qualify, read_tables
from cutline.nodes.problems import quote
from cutline.nodes.server_errors import shorten_message
from cutline.storage.errors import RefusedError

# PostgreSQL's default without "$user": nobody keeps objects in a schema named after our role.
DEFAULT_PATH = "public"
TABLES_NAMED_MAX = 5
# A pattern for the names of Cutline's publications of any fleet.
OWN_PUBLICATION = r"cutline_[0-9a-f]{8}(_append_only)?"
# A comment may say how to end the read-only state of a terminal snapshot (nodes/read_only.py): its record must stay.
OWN_NAMES_QUERY = f"""
SELECT pubname::text FROM pg_publication
 WHERE pubname ~ '^({OWN_PUBLICATION})$' AND obj_description(oid, 'pg_publication') IS NULL ORDER BY 1
"""
USER_SCHEMA = re.compile(r'"\$user"\s*(?:,\s*|$)')
# The setting that takes precedence (miscinit.c, process_settings).
PATH_QUERY = """
SELECT substr(setting, length('search_path=') + 1)
  FROM pg_db_role_setting s, unnest(s.setconfig) AS of (setting)
 WHERE s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
   AND s.setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = session_user)) AND setting ^@ 'search_path='
 ORDER BY s.setrole = 0, s.setdatabase = 0 LIMIT 1
"""
SET_PATH = "SELECT pg_catalog.set_config('search_path', %s, true)"
# Since this version, a role's sessions can disable event triggers.
EXEMPTION_VERSION = 170000
# Each function's name as an error's context may show it: qualified or unqualified.
TRIGGERS_QUERY = """
SELECT t.evtname::text, format('%I.%I()', n.nspname, p.proname), format('%I()', p.proname)
  FROM pg_event_trigger t JOIN pg_proc p ON p.oid = t.evtfoid JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE t.evtenabled <> 'D' AND t.evtevent <> 'login'
"""


class EventTriggerError(RefusedError):
    """An event trigger in the database refuses one of Cutline's statements."""


class _Trigger(NamedTuple):
    """An event trigger and the quoted name of its function, with and without its schema."""

    name: str
    function: str
    bare: str

    def last_called(self, context: str) -> int:
        """Return the offset at which an error's context (servers translate it) last names the function, or -1."""
        names = "|".join(map(re.escape, (self.function, self.bare)))
        return max((match.start() for match in re.finditer(rf'(?<![\w$.")])(?:{names})', context)), default=-1)


def run_ddl(connection: psycopg.Connection[Any], statement: sql.Composed) -> None:
    """Run a DDL statement that calls no functions and qualifies its names; raise EventTriggerError or psycopg.Error.

    An error aborts the open transaction, if any.
    """
    words = " ".join(statement.as_string(connection).split()[:2])
    with naming_event_triggers(connection, words, "or let a superuser run: snapshot init") as exist:
        if not exist:
            connection.execute(statement)
            return
        (path,) = connection.execute(PATH_QUERY).fetchone() or (DEFAULT_PATH,)
        (own,) = connection.execute("SELECT current_setting('search_path')").fetchone() or ("",)
        with connection.transaction():
            # pg_catalog comes first in any path, so that nothing hides its types.
            connection.execute(SET_PATH, (", ".join(filter(None, ("pg_catalog", USER_SCHEMA.sub("", path)))),))
            connection.execute(statement)
            connection.execute(SET_PATH, (own,))


@contextmanager
def naming_event_triggers(
    connection: psycopg.Connection[Any], what: str, instead: str = "or disable it temporarily"
) -> Iterator[bool]:
    """Raise EventTriggerError if an event trigger refuses the block's statement, described by `what`.

    The context's value is whether the database has any enabled event triggers.
    """
    triggers = [_Trigger(*row) for row in connection.execute(TRIGGERS_QUERY.encode())]
    try:
        yield bool(triggers)
    except psycopg.Error as error:
        context = error.diag.context or ""
        # The context lists the outermost function last.
        called = sorted((at, trigger) for trigger in triggers if (at := trigger.last_called(context)) >= 0)
        if not called:
            raise
        raise _event_trigger_error(connection, called[-1][1], what, instead, error) from error


def _event_trigger_error(
    connection: psycopg.Connection[Any], trigger: _Trigger, what: str, instead: str, error: psycopg.Error
) -> EventTriggerError:
    role = quote(connection.info.user)
    exempt = f"; or exempt the role: ALTER ROLE {role} SET event_triggers = off;"
    return EventTriggerError(
        f"node {node_of(connection)}: event trigger {trigger.name} in database {connection.info.dbname}, which calls"
        f" {trigger.function}, rejected {what}: {shorten_message(error)}",
        hint=[
            "if the function names objects without their schema:"
            f" ALTER FUNCTION {trigger.function} SET search_path = …;",
            f"if role {role} lacks a privilege, grant it, or: ALTER FUNCTION {trigger.function} SECURITY DEFINER;",
            instead + (exempt if connection.info.server_version >= EXEMPTION_VERSION else ""),
        ],
        details={"node": node_of(connection), "event_trigger": trigger.name, "function": trigger.function},
    )


# The third and fourth columns are stamps that change whenever the catalogs' rows change, and only then.
MEMBERS_QUERY = """
SELECT p.pubname, n.nspname, c.relname,
       format('%%s.%%s', p.oid, p.xmin), format('%%s.%%s', r.oid, r.xmin),
       concat_ws(' and ', CASE WHEN r.prqual IS NOT NULL THEN 'a row filter' END,
                          CASE WHEN r.prattrs IS NOT NULL THEN 'a column list' END)
  FROM pg_publication p
  JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = ANY (%s)
"""
SOME_MEMBERS_QUERY = f"{MEMBERS_QUERY.rstrip()} AND r.prrelid = ANY (%s)"
# A digest of all memberships in the given publications, as `have_same_members` computes it; NULL if there are none.
MEMBERSHIPS = """
string_agg(format('%%s %%s.%%s %%s.%%s', r.prrelid, p.oid, p.xmin, r.oid, r.xmin), ',' ORDER BY r.prrelid, r.oid)
"""
DIGEST_QUERY = f"""
SELECT {digest_of(MEMBERSHIPS.strip())}
  FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
 WHERE p.pubname = ANY (%s)
"""
# With publish_via_partition_root, changes are published under the root's name. PostgreSQL 18 can publish generated
# columns.
OPTIONS_QUERY = """
SELECT p.pubname,
       concat_ws(', ', CASE WHEN p.pubinsert THEN 'insert' END, CASE WHEN p.pubupdate THEN 'update' END,
                       CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END),
       concat_ws(' and ', CASE WHEN p.pubviaroot THEN 'partitions as their root' END,
                          CASE WHEN coalesce(to_jsonb(p) ->> 'pubgencols', 'n') <> 'n' THEN 'generated columns' END)
  FROM pg_publication p WHERE p.pubname = ANY (%s)
"""
# The tables among the given oids that our role may not publish.
OTHERS_QUERY = "SELECT oid::bigint FROM pg_class WHERE oid = ANY (%s) AND NOT pg_has_role(relowner, 'USAGE')"
# The given tables that our role may lock: of PostgreSQL 15's privileges, one is enough.
LOCKABLE_QUERY = """
SELECT oid::bigint FROM unnest({oids}::oid[], {names}::text[]) AS of (oid, name)
 WHERE to_regclass(name) = oid AND has_table_privilege(oid, 'UPDATE, DELETE, TRUNCATE')
"""
KEYED_OPERATIONS, APPEND_ONLY_OPERATIONS = "insert, update, delete, truncate", "insert, truncate"
GENERATED_COLUMNS_VERSION = 180000


class TableNotAdmissibleError(RefusedError):
    """A table's changes can't be captured, or its rows can't be copied and loaded again."""


class NotOwnerError(RefusedError):
    """Our role may not add a table to a publication."""


class PublicationChangedError(RefusedError):
    """A publication does not publish all changes to the snapshot's tables, or did not do so for some time."""


class Membership(Struct, frozen=True):
    """The stamps of a table's rows in pg_publication and pg_publication_rel.

    `limits` names the features that withhold some of its changes (a row filter, a column list); "" if there are none.
    """

    publication: str
    membership: str
    limits: str


class TableStamps(NamedTuple):
    """A table's oid, and the two stamps of its Membership."""

    oid: int
    publication: str
    membership: str


NOWHERE = Membership("", "", "")
# Memberships, keyed by publication, then by table.
Members = dict[str, dict[str, Membership]]


def publication_names(fleet_id: str) -> tuple[str, str]:
    """Return the names of each primary's publications: for keyed and full tables, and for append-only tables."""
    return f"cutline_{fleet_id}", f"cutline_{fleet_id}_append_only"


def read_own_names(connection: psycopg.Connection[Any]) -> tuple[str, ...]:
    """Return the names of the publications without a comment that Cutline has made here, for whichever store."""
    return tuple(name for (name,) in connection.execute(OWN_NAMES_QUERY.encode()))


def other_publications_texts(found: Mapping[str, Iterable[str]], fleet_id: str | None) -> list[str]:
    """Return what to say of publications `found`, by node, that are not those of the fleet: they outlive their store.

    PostgreSQL rejects updates of a table that one of them publishes once it has lost its replica identity.
    """
    own = publication_names(fleet_id) if fleet_id else ()
    others: dict[tuple[str, ...], list[str]] = {}
    for node, names in sorted(found.items()):
        if left := tuple(sorted(set(names).difference(own))):
            others.setdefault(left, []).append(node)
    return [
        f"{'publication' if len(names) == 1 else 'publications'} {' and '.join(names)} on"
        f" {list_some(nodes, NODES_NAMED_MAX)}: not of this store; if the store that made"
        f" {'it' if len(names) == 1 else 'them'} is gone, run there: DROP PUBLICATION {', '.join(names)}"
        for names, nodes in others.items()
    ]


def check_admissible(tables: Mapping[str, Iterable[Table]]) -> None:
    """Raise TableNotAdmissibleError naming every table that a snapshot can't include, with the remedies."""
    refused = [(node, table) for node, listed in tables.items() for table in listed if not table.is_admissible]
    if refused:
        names = ", ".join(f"{table.group.name} on {node}" for node, table in refused)
        remedies = sorted({f"  {table.remedy};" for _, table in refused})
        failing = ", ".join(f"{table.group.name} on {node}" for node, table in refused if table.is_published)
        raise TableNotAdmissibleError(
            f"no usable replica identity, so updates and deletes can't be captured: {names}"
            + (
                f"; PostgreSQL rejects updates and deletes in {failing}, because these tables are still published"
                if failing
                else ""
            ),
            hint=[
                "give them a replica identity, or list them in fleet.toml under groups.exclude or groups.append_only:",
                *remedies,
                *(
                    ["then remove tables without a replica identity from the publication: snapshot init"]
                    if failing
                    else []
                ),
            ],
            details={"tables": [{"node": node, "table": table.group.name} for node, table in refused]},
        )
    _check_readable(tables)


def _check_readable(tables: Mapping[str, Iterable[Table]]) -> None:
    places = [
        (f"{table.group.name} on {node}", table)
        for node, listed in tables.items()
        for table in listed
        if not table.readable or table.hides_rows or table.special_columns.unloadable
    ]
    if unreadable := [name for name, table in places if not table.readable]:
        raise TableNotAdmissibleError(
            f"the role of the dsn can't read {list_some(unreadable, TABLES_NAMED_MAX)}",
            hint="grant the role SELECT on the tables, or membership in pg_read_all_data",
            details={"tables": unreadable},
        )
    unloadable = [
        f"column {column} ({type_}) of {name}"
        for name, table in places
        for column, type_ in table.special_columns.unloadable
    ]
    if unloadable:
        raise TableNotAdmissibleError(
            f"PostgreSQL can't read back the values that it prints for {list_some(unloadable, TABLES_NAMED_MAX)}",
            hint="change the columns' types, or exclude the tables in fleet.toml under groups.exclude",
            details={"columns": unloadable},
        )
    if hidden := [name for name, table in places if table.hides_rows]:
        raise TableNotAdmissibleError(
            f"row-level security hides rows of {list_some(hidden, TABLES_NAMED_MAX)} from the role of the dsn",
            hint="ALTER ROLE … BYPASSRLS, or exclude the tables in fleet.toml under groups.exclude",
            details={"tables": hidden},
        )


def check_exists(connection: psycopg.Connection[Any], node: str, name: str) -> None:
    """Raise PublicationChangedError unless the node's database has the publication."""
    if connection.execute("SELECT FROM pg_publication WHERE pubname = %s", (name,)).fetchone() is None:
        raise PublicationChangedError(
            f"node {node}: publication {name} does not exist",
            hint="create it, then repeat the command: snapshot init",
            details={"node": node, "publication": name},
        )


def ensure_publications(connection: psycopg.Connection[Any], fleet_id: str, tables: Iterable[Table]) -> list[str]:
    """Create both publications, add missing tables, and repair altered publications; return the tables added.

    A table whose updates PostgreSQL rejects is removed. Safe to repeat: it changes only what is wrong, so chains can
    continue. If it raises NotOwnerError or EventTriggerError, it has changed nothing.
    """
    wanted: dict[str, dict[str, Table]] = {name: {} for name in publication_names(fleet_id)}
    for table in tables:
        wanted[publication_of(table.group, fleet_id)][table.group.name] = table
    try:
        with connection.transaction():
            members, options = _members(connection, fleet_id), _options(connection, fleet_id)
            lacking = {name: wanted[name].keys() - members.get(name, {}).keys() for name in wanted}
            _check_owned(connection, [wanted[name][table] for name in wanted for table in lacking[name]])
            _remove_tables(connection, fleet_id, members)
            added: list[str] = []
            for name, operations in operations_of(fleet_id).items():
                _ensure_options(connection, name, operations, options)
                present = {
                    table: membership for table, membership in members.get(name, {}).items() if table in wanted[name]
                }
                limited = sorted(table for table, membership in present.items() if membership.limits)
                _alter(connection, name, "DROP TABLE", [wanted[name][table] for table in limited])
                missing = sorted({*limited, *lacking[name]})
                _alter(connection, name, "ADD TABLE", [wanted[name][table] for table in missing])
                added += missing
    except psycopg.errors.InsufficientPrivilege as error:
        raise _not_owner_error(connection, str(error.diag.message_primary)) from error
    return added


def add_to_publications(connection: psycopg.Connection[Any], fleet_id: str, tables: Iterable[Table]) -> None:
    """Add tables to the publication of their kind without limits, and remove them from the other; repair the options.

    PostgreSQL rejects updates of a table without a replica identity as long as the publication for updates has it. If
    it raises NotOwnerError or EventTriggerError, it has changed nothing.
    """
    listed = list(tables)
    try:
        with connection.transaction():
            options = _options(connection, fleet_id)
            members = _members(connection, fleet_id, [table.oid for table in listed])
            _check_owned(connection, listed)
            for name, operations in operations_of(fleet_id).items():
                _ensure_options(connection, name, operations, options)
                present = members.get(name, {})
                _alter(connection, name, "DROP TABLE", [table for table in listed if table.group.name in present])
                own = [table for table in listed if publication_of(table.group, fleet_id) == name]
                _alter(connection, name, "ADD TABLE", own)
    except psycopg.errors.InsufficientPrivilege as error:
        raise _not_owner_error(connection, str(error.diag.message_primary)) from error


def repair_options(connection: psycopg.Connection[Any], fleet_id: str) -> list[str]:
    """Create the publications that are missing, and repair what the others publish; return both. Their tables stay.

    If it raises NotOwnerError or EventTriggerError, it has changed nothing.
    """
    try:
        with connection.transaction():
            options = _options(connection, fleet_id)
            return [
                name
                for name, operations in operations_of(fleet_id).items()
                if _ensure_options(connection, name, operations, options)
            ]
    except psycopg.errors.InsufficientPrivilege as error:
        raise _not_owner_error(connection, str(error.diag.message_primary)) from error


def _check_owned(connection: psycopg.Connection[Any], tables: Iterable[Table]) -> None:
    names = {table.oid: table.group.name for table in tables}
    if others := [names[oid] for (oid,) in connection.execute(OTHERS_QUERY, (list(names),))]:
        raise _not_owner_error(connection, f"must be owner of {list_some(sorted(others), TABLES_NAMED_MAX)}")


def _not_owner_error(connection: psycopg.Connection[Any], reason: str) -> NotOwnerError:
    return NotOwnerError(
        f"role {connection.info.user} can't publish tables of database {connection.info.dbname}: {reason}",
        hint=f'make "{connection.info.user}" a member of the owner, or let a superuser run: snapshot init',
    )


def _remove_tables(connection: psycopg.Connection[Any], fleet_id: str, members: Members) -> None:
    """Remove the tables whose updates PostgreSQL rejects from the publication for updates."""
    name, _ = publication_names(fleet_id)
    published = members.get(name, {})
    # Ignore the rules: a table that fleet.toml has since excluded is still published.
    tables = [table for table in read_tables(connection, GroupRules()) if table.group.name in published]
    _alter(connection, name, "DROP TABLE", [table for table in tables if not table.is_admissible])


def drop_publications(connection: psycopg.Connection[Any], fleet_id: str) -> list[str]:
    """Drop the fleet's publications and return their names.

    Raises EventTriggerError, and psycopg.Error if our role may not drop them.
    """
    publications = sorted(_options(connection, fleet_id))
    for name in publications:
        run_ddl(connection, sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))
    return publications


def operations_of(fleet_id: str) -> dict[str, str]:
    """Return the operations that each of the fleet's publications publishes, keyed by its name."""
    return dict(zip(publication_names(fleet_id), (KEYED_OPERATIONS, APPEND_ONLY_OPERATIONS), strict=True))


def publication_of(group: Group, fleet_id: str) -> str:
    """Return the name of the publication that the group belongs to."""
    keyed, append_only = publication_names(fleet_id)
    return append_only if group.identity == "append_only" else keyed


def _ensure_options(
    connection: psycopg.Connection[Any], name: str, operations: str, options: Mapping[str, tuple[str, str]]
) -> bool:
    """Make the publication publish the operations of all rows; return whether it did not."""
    if name not in options:
        statement = "CREATE PUBLICATION {} WITH (publish = {})"
    elif options[name] != (operations, ""):
        statement = "ALTER PUBLICATION {} SET (publish = {}, publish_via_partition_root = false"
        statement += ", publish_generated_columns = none" if _has_generated(connection) else ""
        statement += ")"
    else:
        return False
    run_ddl(connection, sql.SQL(statement).format(sql.Identifier(name), sql.Literal(operations)))
    return True


def _has_generated(connection: psycopg.Connection[Any]) -> bool:
    return connection.info.server_version >= GENERATED_COLUMNS_VERSION


def _alter(connection: psycopg.Connection[Any], name: str, action: str, tables: list[Table]) -> None:
    if tables:
        _lock(connection, tables)
        # ADD needs ONLY; DROP without it removes just the named table.
        only = "ONLY " if action == "ADD TABLE" else ""
        listed = ", ".join(f"{only}{qualify(table.group)}" for table in tables)
        run_ddl(
            connection,
            sql.SQL("ALTER PUBLICATION {} {} {}").format(sql.Identifier(name), sql.SQL(action), sql.SQL(listed)),
        )


def _lock(connection: psycopg.Connection[Any], tables: Iterable[Table]) -> None:
    """Take the locks of ALTER PUBLICATION with LOCK, because only LOCK waits without a database snapshot.

    CREATE INDEX CONCURRENTLY and similar statements hold such a lock while they wait for all older snapshots. If they
    waited for ours, PostgreSQL would find a deadlock and end one of the two.
    """
    by_oid = {table.oid: qualify(table.group) for table in tables}
    # This query also loads the session's cache of catalogs. Otherwise LOCK would read them with a snapshot, and
    # keep it. With parameters, this query would keep one as well, in the unnamed portal.
    query = sql.SQL(LOCKABLE_QUERY).format(oids=list(by_oid), names=list(by_oid.values()))
    found = connection.execute(query).fetchall()
    if names := ", ".join(f"ONLY {by_oid[oid]}" for (oid,) in found):
        connection.execute(sql.SQL("LOCK TABLE {} IN SHARE UPDATE EXCLUSIVE MODE").format(sql.SQL(names)))


def check_published(
    connection: psycopg.Connection[Any],
    node: str,
    fleet_id: str,
    groups: Iterable[Group],
    *,
    accepts_altered: bool = False,
    oids: Collection[int] | None = None,
) -> dict[str, Membership]:
    """Return the memberships, by table, of the groups all of whose changes Cutline's publications publish.

    Raises PublicationChangedError if a publication is missing, or does not publish all operations, unless this
    `accepts_altered` publications. If the groups are few, their `oids` save reading the memberships of all others.
    """
    options, members = _options(connection, fleet_id), _members(connection, fleet_id, oids)
    wanted: dict[str, list[str]] = {}
    for group in groups:
        wanted.setdefault(publication_of(group, fleet_id), []).append(group.name)
    published: dict[str, Membership] = {}
    for name, tables in sorted(wanted.items()):
        present = members.get(name, {})
        problem = ""
        if name not in options:
            problem = f"publication {name} no longer exists; it published {list_some(sorted(tables), TABLES_NAMED_MAX)}"
        elif options[name] != (operations_of(fleet_id)[name], ""):
            operations, additions = options[name]
            some = list_some(sorted(tables), TABLES_NAMED_MAX)
            problem = f"publication {name} ({some}) was altered: it publishes {operations}"
            problem += f", {additions}" if additions else ""
        if problem and not accepts_altered:
            raise changed_error(node, problem, sorted(tables))
        published |= {
            table: membership for table in tables if (membership := present.get(table)) and not membership.limits
        }
    return published


def changed_error(node: str, problem: str, tables: Sequence[str]) -> PublicationChangedError:
    """Return the error for a publication that may not have published all changes to these tables."""
    return PublicationChangedError(
        f"node {node}: {problem}",
        hint="repair the publications, then repeat the command: snapshot init",
        details={"node": node, "tables": list(tables)},
    )


def have_same_members(connection: psycopg.Connection[Any], fleet_id: str, memberships: Iterable[TableStamps]) -> bool:
    """Whether Cutline's publications have exactly these memberships.

    The stamps also show that neither a publication nor what limits a table in it was altered. The server computes a
    digest, because sending a row for each of thousands of tables takes longer.
    """
    (found,) = connection.execute(DIGEST_QUERY, (list(publication_names(fleet_id)),)).fetchone() or (None,)
    lines = (f"{oid} {publication} {membership}" for oid, publication, membership in sorted(memberships))
    return bool(found == hashlib.sha256(",".join(lines).encode()).hexdigest())


def _members(connection: psycopg.Connection[Any], fleet_id: str, oids: Collection[int] | None = None) -> Members:
    members: Members = {}
    names = list(publication_names(fleet_id))
    if oids is None:
        found = connection.execute(MEMBERS_QUERY, (names,))
    else:
        found = connection.execute(SOME_MEMBERS_QUERY, (names, list(oids)))
    for publication, schema, table, *membership in found:
        members.setdefault(publication, {})[table_name(schema, table)] = Membership(*membership)
    return members


def _options(connection: psycopg.Connection[Any], fleet_id: str) -> dict[str, tuple[str, str]]:
    rows = connection.execute(OPTIONS_QUERY, (list(publication_names(fleet_id)),)).fetchall()
    return {name: (operations, additions) for name, operations, additions in rows}
