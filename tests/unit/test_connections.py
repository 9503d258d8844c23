from __future__ import annotations

import psycopg
import pytest

from fleet.config import Node
from fleet.nodes.connections import unreachable_error

LOST = """consuming input failed: server closed the connection unexpectedly
\tThis probably means the server terminated abnormally
\tbefore or while processing the request."""
REFUSED = """connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused
\tIs the server running on that host and accepting TCP/IP connections?"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOST, "consuming input failed: server closed the connection unexpectedly"),
        (REFUSED, 'connection failed: connection to server at "127.0.0.1", port 1 failed: Connection refused'),
        ("FATAL:  the database system is starting up", "FATAL:  the database system is starting up"),
    ],
)
def test_an_unreachable_node_is_reported_with_the_reason_but_not_with_libpqs_guess(text: str, reason: str) -> None:
    error = unreachable_error(Node("a", "dbname=x"), psycopg.OperationalError(text))
    assert error.message == f"node a: {reason}"
