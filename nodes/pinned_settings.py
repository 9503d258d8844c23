"""The settings of every session, so that a value always has the same text, and how a session is asked for them.

COPY and logical decoding print values under the session's settings: a row read by COPY and the same row read from WAL
have the same bytes only because both sessions have these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from psycopg.conninfo import conninfo_to_dict

from cutline.fleet.config import KnownServer

# Settings that change the text of a value (PostgreSQL manual, "Client Connection Defaults"), with each value written as
# the server shows it. search_path matters because regclass and similar types print a schema only if it is not in the
# path. With row_security=off a query that policies would filter fails, instead of silently copying less.
PINNED_SETTINGS = {
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    # Settings that change how a value is parsed: otherwise XML might have to be a document, or {NULL} might be a
    # string.
    "xmloption": "content",
    "array_nulls": "on",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "lock_timeout": "0",
    "synchronize_seqscans": "off",
    "default_transaction_read_only": "off",
    # A standby refuses serializable transactions.
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "default_tablespace": "",
    # With "on", a server ends the session of a statement that it refuses, and seems to be out of reach.
    "exit_on_error": "off",
    # With "on", each commit would wait for a synchronous standby that is down.
    "synchronous_commit": "local",
    # With "on", the planner would run functions in the CHECK constraints on a table that is copied in ranges.
    "constraint_exclusion": "partition",
    # Compiling a long catalog query takes longer than running it.
    "jit": "off",
    # Enough for a hash table of the catalogs of 100,000 tables. Without one, the server would search all of them for
    # each.
    "work_mem": "64MB",
    # The server ends a session whose client has disconnected, even during a query, and releases its locks and slots.
    "client_connection_check_interval": "2s",
}
# Over a Unix socket these settings are shown as 0.
KEEPALIVES = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3"}
# ALTER ROLE … SET role makes a role's sessions act as a different role. Privileges would be checked for that role, and
# granted to it. The dsn may name a role in its own options.
ROLE = {"role": "none"}
# Servers before 17 refuse a session that requests this setting in `options`.
LATER_SETTINGS = {"transaction_timeout": "0"}
# Additional settings that a restore requests.
ASKED_ALSO = ("role", "session_replication_role")
# The settings that a dump depends on but that pg_dump does not set itself (pg_dump.c, setup_connection).
DUMP_SETTINGS = (
    "timezone",
    "lc_monetary",
    "bytea_output",
    "xmlbinary",
    "standard_conforming_strings",
    "role",
)
OPTION = re.compile(r"(?:-c\s*|--)([A-Za-z_][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


class SessionState(NamedTuple):
    """The state of a session: its server process, the settings that it lacks (with the values to set), and its server.

    `server` is None if the query did not ask for it.
    """

    process: int
    lacking: dict[str, str]
    server: KnownServer | None


def startup_options(given: str) -> str:
    """Return the `options` startup parameter with the pinned settings, which override the `given` options.

    Of the `given` options, only a role takes precedence.
    """
    pinned = " ".join(option(name, value) for name, value in (PINNED_SETTINGS | KEEPALIVES).items())
    return " ".join(part for part in (option("role", ROLE["role"]), given.strip(), pinned) if part)


def option(name: str, value: str) -> str:
    """Format a setting for the `options` startup parameter; if a name is repeated, the last setting counts."""
    escaped = re.sub(r"([\\\s])", r"\\\1", value)
    return f"-c {name}={escaped}"


def read_options(options: str) -> dict[str, str]:
    """Parse the `options` startup parameter; if a name is repeated, the last counts (PostgreSQL manual, "postgres")."""
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in re.findall(r"(?:\\.|[^\s\\])+", options)]
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        follows = words[number + 1] if word == "-c" and number + 1 < len(words) else ""
        if match := OPTION.fullmatch(f"-c{follows}" if follows else word):
            found[match[1].replace("-", "_").lower()] = match[2]
    return found


def wanted_settings(conninfo: str) -> dict[str, str]:
    """Return the settings of a session with this connection string, including those that are set after it starts."""
    parameters = conninfo_to_dict(conninfo)
    encoding = {"client_encoding": str(parameters["client_encoding"])} if parameters.get("client_encoding") else {}
    return read_options(str(parameters.get("options") or "")) | LATER_SETTINGS | encoding


def state_query(wanted: Mapping[str, str], *, asks_server: bool) -> str:
    """Return the query for the state of a session, for `read_state`.

    The session's search_path is not known yet, so the query uses no operators and qualifies every function with
    pg_catalog: otherwise the server might choose a better-matching function that another role created in this database.
    """
    server = "(pg_catalog.pg_control_system()).system_identifier, pg_catalog.pg_is_in_recovery()"
    settings = "".join(f", pg_catalog.current_setting('{name}', true)" for name in _asked(wanted))
    return f"SELECT pg_catalog.pg_backend_pid(), {server if asks_server else 'NULL, NULL'}{settings}"


def read_state(row: Sequence[Any], wanted: Mapping[str, str]) -> SessionState:
    """Read the state of a session from the row that `state_query` returns."""
    process, system_identifier, in_recovery, *values = row
    # A setting that the server does not recognize is NULL.
    lacking = {
        name: wanted[name]
        for name, value in zip(_asked(wanted), values, strict=True)
        if value is not None and value != wanted[name]
    }
    server = None if system_identifier is None else KnownServer(str(system_identifier), bool(in_recovery))
    return SessionState(int(process), lacking, server)


def _asked(wanted: Mapping[str, str]) -> list[str]:
    names = (*PINNED_SETTINGS, *LATER_SETTINGS, *ASKED_ALSO, "client_encoding")
    return [name for name in names if name in wanted]


def set_query(settings: Mapping[str, str]) -> str:
    """Return the query that sets the settings for the rest of the session; it trusts no search_path either."""
    # The role is set last: the new role might not be allowed to change the other settings.
    ordered = sorted(settings.items(), key=lambda one: one[0] == "role")
    return "SELECT " + ", ".join(
        f"pg_catalog.set_config({_literal(name)}, {_literal(value)}, false)" for name, value in ordered
    )


def _literal(text: str) -> str:
    # In an E'' string, backslashes mean the same whatever standard_conforming_strings is set to.
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"
