"""The timelines of a server: where each of its earlier timelines ended, as the server's history file records it.

A promotion starts a new timeline at a position of the WAL, the *switch*. The promoted server has all WAL of the old
timeline before the switch, and nothing after it (PostgreSQL manual, "Timelines").
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import (
    NO_REPLICATION,
    WAL_SENDERS,
    NodeUnreachableError,
    connect_replication,
    no_connection_hint,
    unreachable_error,
)
from cutline.nodes.problems import NodeProblem, unfit_error
from cutline.nodes.server_errors import shorten_message

# Other commands of Cutline, too, need a WAL sender for milliseconds only.
SENDER_POLL_SECONDS, SENDER_SECONDS_MAX = 0.2, 2.0
# The name of a WAL file begins with its timeline.
CURRENT_QUERY = """
SELECT CASE WHEN pg_is_in_recovery() THEN (SELECT to_hex(received_tli) FROM pg_stat_wal_receiver)
            ELSE left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END
"""


def read_switches(node: Node, timeline: int) -> dict[int, Lsn]:
    """Read where the timelines before `timeline` ended on the server; raise the errors of read_timeline.

    Returns nothing if the server has lost the history file of the timeline: then no other timeline is known to belong
    to it.
    """
    if timeline == 1:
        # The first timeline has no history file.
        return {}
    try:
        row = _ask(node, "TIMELINE_HISTORY", timeline)
    except psycopg.errors.UndefinedFile:
        return {}
    # The server declares the content as text since version 15, in no particular encoding.
    content = row[1] if row else ""
    return parse_history(content if isinstance(content, str) else bytes(content).decode("utf-8", "replace"))


def read_timeline(node: Node) -> int:
    """Read the timeline of the last record that a standby has replayed.

    Its control file gets a new timeline only with the next restartpoint, which may take minutes. Raises
    NodeUnreachableError, and NodeUnfitError if no WAL sender is free or replication commands are refused.
    """
    row = _ask(node, "IDENTIFY_SYSTEM")
    if row is None:
        raise RuntimeError("IDENTIFY_SYSTEM returned no row")
    return int(row[1])


def current_timeline(connection: psycopg.Connection[Any]) -> int | None:
    """Return the timeline of the WAL that the server writes, or receives as a standby; None if it receives none.

    Unlike read_timeline, it asks an ordinary session. A standby may not have replayed this timeline yet.
    """
    (timeline,) = connection.execute(CURRENT_QUERY).fetchone() or (None,)
    return None if timeline is None else int(timeline, 16)


def _ask(node: Node, command: str, *values: int) -> tuple[Any, ...] | None:
    """Return the row with which the server answers a replication command; raise the errors of read_timeline.

    Also raises UndefinedFile.
    """
    deadline = time.monotonic() + SENDER_SECONDS_MAX
    while True:
        try:
            with connect_replication(node) as connection:
                return connection.execute(" ".join([command, *map(str, values)]).encode()).fetchone()
        except NodeUnreachableError as error:
            if WAL_SENDERS not in (message := str(error.__cause__)):
                raise
            if time.monotonic() > deadline:
                problem = "no WAL sender is free, and one is needed"
                raise unfit_error([NodeProblem(node.id, problem, no_connection_hint(message))]) from error
            time.sleep(SENDER_POLL_SECONDS)
        except psycopg.errors.UndefinedFile:
            raise
        except psycopg.OperationalError as error:
            raise unreachable_error(node, error) from error
        except psycopg.Error as error:
            problem = f"the replication command {command} was refused: {shorten_message(error)}"
            raise unfit_error([NodeProblem(node.id, problem, NO_REPLICATION)]) from error


def parse_history(content: str) -> dict[int, Lsn]:
    """Return the timelines in a history file, and where each ended; raise ValueError for anything else.

    A line contains a timeline, the position, and a reason; lines may also be empty or comments (timeline.c). A server
    that is promoted before it has replayed up to a switch of which it knows writes an earlier position after that
    switch: then it has nothing of the timelines between the two.
    """
    lines = [fields for line in content.splitlines() if (fields := line.split()) and not fields[0].startswith("#")]
    switches: dict[int, Lsn] = {}
    for timeline, position, *_ in reversed(lines):
        switches[int(timeline)] = min([Lsn.parse(position), *switches.values()])
    return dict(reversed(switches.items()))
