from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.fleet.config import KnownServer, Node
from cutline.nodes.connections import SECRET_PARAMETERS, conninfo, probe_conninfo, program_connection, unreachable_error
from cutline.nodes.pinned_settings import (
    KEEPALIVES,
    LATER_SETTINGS,
    PINNED_SETTINGS,
    read_options,
    read_state,
    set_query,
    state_query,
    wanted_settings,
)
from cutline.nodes.server_errors import called_functions
from cutline.storage.errors import UsageError

LOST = """consuming input failed: server closed the connection unexpectedly
\tThis probably means the server terminated abnormally
\tbefore or while processing the request."""
REFUSED = """connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused
\tIs the server running on that host and accepting TCP/IP connections?"""
# After a refusal, libpq tries again without TLS.
TWICE = """connection failed: connection to server at "h", port 1 failed: FATAL:  password is wrong
connection to server at "h", port 1 failed: FATAL:  password is wrong"""
# What follows the error says nothing without it.
LOGIN = """FATAL:  permission denied
CONTEXT:  PL/pgSQL function public.f() line 1 at SQL statement"""
WHERE = """relation "log" does not exist
LINE 1: INSERT INTO log VALUES (1)
                    ^
QUERY:  INSERT INTO log VALUES (1)"""
SEVERAL = """connection failed: connection to server at "b", port 2 failed: FATAL:  no such role
DETAIL:  x
Multiple connection attempts failed. All failures were:
- host: 'a', port: '1', hostaddr: '127.0.0.1': connection failed: connection to server at "a", port 1 failed: refused
\tIs the server running on that host and accepting TCP/IP connections?
- host: 'b', port: '2': connection failed: connection to server at "b", port 2 failed: FATAL:  no role
DETAIL:  x"""
EACH = (
    'connection failed: connection to server at "a", port 1 failed: refused; connection failed: connection to server at'
    ' "b", port 2 failed: FATAL:  no role; DETAIL:  x'
)


@pytest.mark.parametrize("password", ["se cret", "se'cret", "se%cret@", "se\\cret"])
def test_a_password_is_on_no_command_line(password: str) -> None:
    dsn = make_conninfo("", host="h", user="u", password=password)
    access = program_connection(Node("a", dsn), needs_tls=False, application_name="cutline pg_dump")
    assert access.environment == {"PGPASSWORD": password}
    given = conninfo_to_dict(access.conninfo)
    assert "password" not in given
    assert (given["host"], given["application_name"]) == ("h", "cutline pg_dump")
    assert program_connection(Node("a", "host=h"), needs_tls=False).environment == {}
    for secret in ("sslpassword", "oauth_client_secret", "scram_client_key"):
        if secret in SECRET_PARAMETERS:
            with pytest.raises(UsageError, match=f"node a: the dsn contains {secret}"):
                program_connection(Node("a", f"host=h {secret}=secret"), needs_tls=False)
    assert {"password", "sslpassword"} <= SECRET_PARAMETERS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOST, "consuming input failed: server closed the connection unexpectedly"),
        (REFUSED, 'connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused'),
        ("FATAL:  the database system is starting up", "FATAL:  the database system is starting up"),
        ('FATAL:  password is wrong\npassword retrieved from file "/passwords"', "FATAL:  password is wrong"),
        (LOGIN, "FATAL:  permission denied; CONTEXT:  PL/pgSQL function public.f() line 1 at SQL statement"),
        (WHERE, 'relation "log" does not exist'),
        (SEVERAL, EACH),
        (TWICE, 'connection failed: connection to server at "h", port 1 failed: FATAL:  password is wrong'),
    ],
)
def test_an_unreachable_node_is_reported_with_the_reason_but_not_with_libpqs_guess(text: str, reason: str) -> None:
    error = unreachable_error(Node("a", "dbname=x"), psycopg.OperationalError(text))
    assert error.message == f"node a: {reason}"


def test_the_settings_of_the_startup_parameter_are_read_as_the_server_reads_them() -> None:
    asked = wanted_settings(conninfo("host=h options='-c temp_buffers=4MB --enable-seqscan=off -c role=app -e'"))
    assert asked.items() >= (PINNED_SETTINGS | KEEPALIVES | LATER_SETTINGS).items()
    assert (asked["temp_buffers"], asked["enable_seqscan"], asked["role"]) == ("4MB", "off", "app")
    assert asked["client_encoding"] == "UTF8"
    # Those that Cutline pins count more than the dsn's.
    assert wanted_settings(conninfo("host=h options='-c datestyle=SQL'"))["datestyle"] == "ISO, YMD"
    assert wanted_settings(conninfo("host=h"))["role"] == "none"
    assert read_options(r"-ca=1\ 2 -c b=\\x --c-d=") == {"a": "1 2", "b": "\\x", "c_d": ""}


def test_only_what_a_session_lacks_is_set_and_its_role_last() -> None:
    wanted = {"role": "none", "datestyle": "ISO, YMD", "transaction_timeout": "0", "client_encoding": "UTF8"}
    query = state_query(wanted, asks_server=False)
    assert [name for name in wanted if f"'{name}'" in query] == list(wanted)
    names = [name for name in ("datestyle", "transaction_timeout", "role", "client_encoding")]
    # An older server does not know transaction_timeout.
    values = {"datestyle": "SQL, DMY", "transaction_timeout": None, "role": "app", "client_encoding": "UTF8"}
    state = read_state([7, None, None, *(values[name] for name in names)], wanted)
    assert (state.process, state.server, state.lacking) == (7, None, {"datestyle": "ISO, YMD", "role": "none"})
    assert read_state([7, 5, True, "ISO, YMD", "0", "none", "UTF8"], wanted).server == KnownServer(
        "5", in_recovery=True
    )
    assert set_query({"role": "it's", "datestyle": "a\\b"}) == (
        "SELECT pg_catalog.set_config(E'datestyle', E'a\\\\b', false), pg_catalog.set_config(E'role', E'it''s', false)"
    )


def test_sessions_that_only_ask_whether_a_server_answers_ask_for_no_setting() -> None:
    assert not conninfo_to_dict(probe_conninfo("host=h options='-c datestyle=SQL'")).get("options")


def test_the_name_of_our_sessions_is_not_the_dsns() -> None:
    """Other commands tell sessions of Cutline by it."""
    given = conninfo_to_dict(conninfo("host=h application_name=mine"))
    assert given["application_name"] == "cutline"


def test_the_functions_in_an_errors_context_are_named_innermost_first() -> None:
    context = """SQL statement "SELECT f(1)"
PL/pgSQL function f(integer) line 1 at PERFORM
SQL function "my schema"."odd (name)" statement 1
PL/pgSQL function "my schema"."g.h"(text, character varying) line 3 at SQL statement"""
    assert called_functions(context) == ["f(integer)", '"my schema"."g.h"(text, character varying)']


def test_a_server_without_the_database_that_a_restore_begins_in_is_told_with_what_to_run() -> None:
    text = 'connection failed: FATAL:  database "postgres" does not exist'
    hint = unreachable_error(Node("a", "dbname=postgres"), psycopg.OperationalError(text)).hint
    assert hint.endswith("as a superuser: CREATE DATABASE postgres;")
    other = unreachable_error(Node("a", "dbname=x"), psycopg.OperationalError(text.replace("postgres", "x"))).hint
    assert other.startswith("check the database name in fleet.toml")
