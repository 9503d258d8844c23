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
def test_a_node_is_unreachable_for_the_reason_that_was_given_and_not_for_a_guess(text: str, reason: str) -> None:
    error = unreachable_error(Node("a", "dbname=x"), psycopg.OperationalError(text))
    assert error.message == f"node a: {reason}"
