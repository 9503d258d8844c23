"""The settings that every session has, and how it is asked whether it has them.

A session asks for its settings when it begins, by the startup parameter `options`. A server applies them or refuses the
session. A connection pooler between may drop them, and a login trigger may set others: so each session is asked once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from psycopg.conninfo import conninfo_to_dict

from cutline.fleet.config import KnownServer

# Settings that change the text of a value (PostgreSQL manual, "Client Connection Defaults"), each as the server shows
# it. search_path is one: regclass and similar types print a schema only if it is not in the path. With
# row_security=off a query that policies would filter fails, instead of silently copying less.
PINNED_SETTINGS = {
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "timezone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    # Settings that change how a value is read: with others, only a document would be XML, and {NULL} one string.
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
    # Each commit would wait for a synchronous standby that is away.
    "synchronous_commit": "local",
    # With "on", the planner would run functions in CHECK constraints of a table that is copied in ranges.
    "constraint_exclusion": "partition",
    # Compiling a long catalog query takes longer than running it.
    "jit": "off",
    # The server ends a session whose client is gone, even during a query, and releases its locks and slots.
    "client_connection_check_interval": "2s",
}
# A session over a Unix socket does not have them, and shows 0.
KEEPALIVES = {"tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3"}
# A role may have a setting that makes its sessions act as another role. Privileges would be asked of that one, and
# granted to it. The dsn may name a role in its own options.
ROLE = {"role": "none"}
# Since 17, and older servers refuse a session that asks for it when it begins.
LATER_SETTINGS = {"transaction_timeout": "0"}
# What a restore asks for.
ASKED_ALSO = ("role", "session_replication_role")
# What a dump depends on and pg_dump does not set itself (pg_dump.c, setup_connection).
DUMP_SETTINGS = (
    "timezone", "lc_monetary", "bytea_output", "xmlbinary", "standard_conforming_strings", "role",
)  # fmt: skip
OPTION = re.compile(r"(?:-c\s*|--)([A-Za-z_][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


class SessionState(NamedTuple):
    """What a session answered: its server process, the settings that it lacks, and its server if that was asked."""

    process: int
    lacking: dict[str, str]
    server: KnownServer | None


def startup_options(given: str) -> str:
    """The startup parameter `options` with the pinned settings; of the `given` options only the role counts more."""
    pinned = " ".join(option(name, value) for name, value in (PINNED_SETTINGS | KEEPALIVES).items())
    return " ".join(part for part in (option("role", ROLE["role"]), given.strip(), pinned) if part)


def option(name: str, value: str) -> str:
    """A setting as the startup parameter `options` has it; of several of one name the last counts."""
    escaped = re.sub(r"([\\\s])", r"\\\1", value)
    return f"-c {name}={escaped}"


def read_options(options: str) -> dict[str, str]:
    """The settings in the startup parameter `options`, the last of each name (PostgreSQL manual, "postgres")."""
    words = [re.sub(r"\\(.)", r"\1", word, flags=re.DOTALL) for word in re.findall(r"(?:\\.|[^\s\\])+", options)]
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        follows = words[number + 1] if word == "-c" and number + 1 < len(words) else ""
        if match := OPTION.fullmatch(f"-c{follows}" if follows else word):
            found[match[1].replace("-", "_").lower()] = match[2]
    return found


def wanted_settings(conninfo: str) -> dict[str, str]:
    """The settings of a session that is opened by this connection string, with those that are set after it began."""
    parameters = conninfo_to_dict(conninfo)
    encoding = {"client_encoding": str(parameters["client_encoding"])} if parameters.get("client_encoding") else {}
    return read_options(str(parameters.get("options") or "")) | LATER_SETTINGS | encoding


def state_query(wanted: Mapping[str, str], *, asks_server: bool) -> str:
    """The query for the state of a session, which `read_state` reads.

    Until it has answered, the session may have any search_path, so it uses no operator, and of functions those of
    pg_catalog alone: whoever may create functions in this database could have made better matches of others.
    """
    server = "(pg_catalog.pg_control_system()).system_identifier, pg_catalog.pg_is_in_recovery()"
    settings = "".join(f", pg_catalog.current_setting('{name}', true)" for name in _asked(wanted))
    return f"SELECT pg_catalog.pg_backend_pid(), {server if asks_server else 'NULL, NULL'}{settings}"


def read_state(row: Sequence[Any], wanted: Mapping[str, str]) -> SessionState:
    """The state that the row of `state_query` describes."""
    process, system_identifier, in_recovery, *values = row
    # A server that does not know a setting shows nothing.
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
    """The query that sets the settings for the rest of the session; like `state_query`, it trusts no search_path."""
    # The role comes last: another one may not set what ours may.
    ordered = sorted(settings.items(), key=lambda one: one[0] == "role")
    return "SELECT " + ", ".join(
        f"pg_catalog.set_config({_literal(name)}, {_literal(value)}, false)" for name, value in ordered
    )


def _literal(text: str) -> str:
    # In this form, backslashes mean the same whatever standard_conforming_strings is.
    escaped = text.replace("\\", "\\\\").replace("'", "''")
    return f"E'{escaped}'"
