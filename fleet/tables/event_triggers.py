"""DDL of Cutline's own in the databases of others, whose event triggers act on it as on any other.

An event trigger's function runs in our session, as our role. Many name tables without a schema: they work under the
search_path that sessions of the database have, and not under ours. So the statement runs under that path, in its own
transaction or savepoint. Nothing else does: whoever may create objects in a schema of the path could make them run as
our role by what a statement calls. These call nothing, and qualify what they name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from cutline.fleet.nodes.connections import node_of
from cutline.fleet.nodes.privileges import quote
from cutline.fleet.nodes.server_messages import shorten_message
from cutline.storage.errors import RefusedError

# PostgreSQL's default, without "$user": nobody keeps objects there for our role.
DEFAULT_PATH = "public"
USER_SCHEMA = re.compile(r'"\$user"\s*(?:,\s*|$)')
# In the order in which they count (miscinit.c, process_settings).
PATH_QUERY = """
SELECT substr(setting, length('search_path=') + 1)
  FROM pg_db_role_setting s, unnest(s.setconfig) AS of (setting)
 WHERE s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
   AND s.setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = session_user)) AND setting ^@ 'search_path='
 ORDER BY s.setrole = 0, s.setdatabase = 0 LIMIT 1
"""
SET_PATH = "SELECT pg_catalog.set_config('search_path', %s, true)"
# Since this version, a role's sessions can do without event triggers.
EXEMPTION_VERSION = 170000
# The name of each function as the context of an error may have it: qualified or not.
TRIGGERS_QUERY = """
SELECT t.evtname::text, format('%I.%I()', n.nspname, p.proname), format('%I()', p.proname)
  FROM pg_event_trigger t JOIN pg_proc p ON p.oid = t.evtfoid JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE t.evtenabled <> 'D' AND t.evtevent <> 'login'
"""


class EventTriggerError(RefusedError):
    """An event trigger of the database refuses a statement of Cutline's own."""


class _Trigger(NamedTuple):
    """An event trigger, and its function, quoted: with its schema, and without."""

    name: str
    function: str
    bare: str

    def last_called(self, context: str) -> int:
        """Where an error's context, which servers translate, names the function last; -1 if it does not."""
        names = "|".join(map(re.escape, (self.function, self.bare)))
        return max((found.start() for found in re.finditer(rf'(?<![\w$.")])(?:{names})', context)), default=-1)


def run_ddl(connection: psycopg.Connection[Any], statement: sql.Composed) -> None:
    """Run a DDL statement, which calls nothing and qualifies what it names; raise EventTriggerError, psycopg.Error.

    Within a transaction an error ends the transaction.
    """
    words = " ".join(statement.as_string(connection).split()[:2])
    with naming_event_triggers(connection, words, "or let a superuser run: snapshot init") as exist:
        if not exist:
            connection.execute(statement)
            return
        (path,) = connection.execute(PATH_QUERY).fetchone() or (DEFAULT_PATH,)
        (own,) = connection.execute("SELECT current_setting('search_path')").fetchone() or ("",)
        with connection.transaction():
            # pg_catalog comes first, whatever the path says: nothing hides its types.
            connection.execute(SET_PATH, (", ".join(filter(None, ("pg_catalog", USER_SCHEMA.sub("", path)))),))
            connection.execute(statement)
            connection.execute(SET_PATH, (own,))


@contextmanager
def naming_event_triggers(
    connection: psycopg.Connection[Any], what: str, instead: str = "or disable it meanwhile"
) -> Iterator[bool]:
    """Raise EventTriggerError if an event trigger refuses `what` the block runs; say whether there are any."""
    triggers = [_Trigger(*row) for row in connection.execute(TRIGGERS_QUERY.encode())]
    try:
        yield bool(triggers)
    except psycopg.Error as error:
        context = error.diag.context or ""
        # The function that was called first comes last.
        called = sorted((at, one) for one in triggers if (at := one.last_called(context)) >= 0)
        if not called:
            raise
        raise _event_trigger_error(connection, called[-1][1], what, instead, error) from error


def _event_trigger_error(
    connection: psycopg.Connection[Any], trigger: _Trigger, what: str, instead: str, error: psycopg.Error
) -> EventTriggerError:
    role = quote(connection.info.user)
    exempt = f"; or exempt the role: ALTER ROLE {role} SET event_triggers = off;"
    return EventTriggerError(
        f"node {node_of(connection)}: event trigger {trigger.name} of database {connection.info.dbname}, which calls"
        f" {trigger.function}, refuses {what}: {shorten_message(error)}",
        hint=[
            f"if it names objects without a schema: ALTER FUNCTION {trigger.function} SET search_path = …;",
            f"if role {role} lacks a privilege, grant it, or: ALTER FUNCTION {trigger.function} SECURITY DEFINER;",
            instead + (exempt if connection.info.server_version >= EXEMPTION_VERSION else ""),
        ],
        details={"node": node_of(connection), "event_trigger": trigger.name, "function": trigger.function},
    )
