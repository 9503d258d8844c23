"""The timelines of a server: where each of its earlier timelines ended, as the server's history file records it.

A promotion starts a new timeline at a position of the WAL, the *switch*. The promoted server has all WAL of the old
timeline before the switch, and nothing after it (PostgreSQL manual, "Timelines").
"""

from __future__ import annotations

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import connect_replication, unreachable_error


def read_switches(node: Node, timeline: int) -> dict[int, Lsn]:
    """Read where the timelines before `timeline` ended on the server; raise NodeUnreachableError.

    Returns nothing if the server has lost the history file of the timeline: then no other timeline is known to belong
    to it.
    """
    if timeline == 1:
        # The first timeline has no history file.
        return {}
    try:
        with connect_replication(node) as connection:
            row = connection.execute(f"TIMELINE_HISTORY {int(timeline)}".encode()).fetchone()
    except psycopg.errors.UndefinedFile:
        return {}
    except psycopg.Error as error:
        raise unreachable_error(node, error) from error
    # The server declares the content as text since version 15, in no particular encoding.
    content = row[1] if row else ""
    return parse_history(content if isinstance(content, str) else bytes(content).decode("utf-8", "replace"))


def read_timeline(node: Node) -> int:
    """Read the timeline of the last record that a standby has replayed; raise NodeUnreachableError.

    Its control file gets a new timeline only with the next restartpoint, which may take minutes.
    """
    try:
        with connect_replication(node) as connection:
            row = connection.execute(b"IDENTIFY_SYSTEM").fetchone()
    except psycopg.Error as error:
        raise unreachable_error(node, error) from error
    if row is None:
        raise RuntimeError("IDENTIFY_SYSTEM returned no row")
    return int(row[1])


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
