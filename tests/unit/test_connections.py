from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet.config import Node
from fleet.nodes.connections import SECRET_PARAMETERS, program_connection, unreachable_error
from storage.errors import UsageError

LOST = """consuming input failed: server closed the connection unexpectedly
\tThis probably means the server terminated abnormally
\tbefore or while processing the request."""
REFUSED = """connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused
\tIs the server running on that host and accepting TCP/IP connections?"""


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
            with pytest.raises(UsageError, match=f"node a: the dsn has {secret}"):
                program_connection(Node("a", f"host=h {secret}=secret"), needs_tls=False)
    assert {"password", "sslpassword"} <= SECRET_PARAMETERS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOST, "consuming input failed: server closed the connection unexpectedly"),
        (REFUSED, 'connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused'),
        ("FATAL:  the database system is starting up", "FATAL:  the database system is starting up"),
        ('FATAL:  password is wrong\npassword retrieved from file "/passwords"', "FATAL:  password is wrong"),
    ],
)
def test_an_unreachable_node_is_reported_with_the_reason_but_not_with_libpqs_guess(text: str, reason: str) -> None:
    error = unreachable_error(Node("a", "dbname=x"), psycopg.OperationalError(text))
    assert error.message == f"node a: {reason}"
