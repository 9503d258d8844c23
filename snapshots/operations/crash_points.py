"""The points of a create: one right after everything that can be seen from outside the process.

Whoever watches is told when each is reached (`Progress.reached`), which says where the time goes. A command that
ends between two of them has left at most what belongs to the first. tests/integration/test_points.py holds that
nothing is done to a node or the store without a point after it.
"""

from __future__ import annotations

from enum import StrEnum


class CrashPoint(StrEnum):
    """What has just been done; a value is what the person watching reads."""

    CHECKED = "checks passed"
    LOCKED = "fleet locked"
    SETTLED = "earlier operations settled"
    GIVEN_UP = "chains over the limit given up"
    SPARK_BEGUN = "Spark begun"
    INTENT_STORED = "intent stored"
    SLOT_MADE = "slot made"
    SPARK_READY = "Spark ready"
    BASE_COPIED = "base copied"
    SCHEMA_STORED = "schema stored"
    SNAPSHOTS_RELEASED = "exported snapshots released"
    TABLES_PUBLISHED = "new tables published"
    COPY_SLOTS_DROPPED = "slots of the copy dropped"
    PREPARED_OVER = "older prepared transactions over"
    FROZEN = "new sessions read-only"
    SESSIONS_ENDED = "other sessions ended"
    STARTS_WRITTEN = "start markers written"
    FINISHES_WRITTEN = "finish markers written"
    ARCHIVED = "WAL archived"
    RESOLVED = "cut resolved"
    SEQUENCES_READ = "sequences read"
    COMMITTED = "commit stored"
    OUTCOME_STORED = "outcome stored"
    RELEASED = "fleet released"


# Reached once for every node, in any order.
PER_NODE = frozenset({CrashPoint.SLOT_MADE})
# Reached once for every primary, where the snapshot is a terminal one: all of the first, then all of the second.
FREEZE_POINTS = (CrashPoint.FROZEN, CrashPoint.SESSIONS_ENDED)

# Repeated where a cut is made again.
CUT_POINTS = (
    CrashPoint.STARTS_WRITTEN,
    CrashPoint.FINISHES_WRITTEN,
    CrashPoint.SPARK_READY,
    CrashPoint.ARCHIVED,
    CrashPoint.RESOLVED,
)
LAST_POINTS = (CrashPoint.SEQUENCES_READ, CrashPoint.COMMITTED, CrashPoint.OUTCOME_STORED, CrashPoint.RELEASED)

FULL_POINTS = (
    CrashPoint.CHECKED,
    CrashPoint.LOCKED,
    CrashPoint.SETTLED,
    CrashPoint.GIVEN_UP,
    CrashPoint.SPARK_BEGUN,
    CrashPoint.INTENT_STORED,
    CrashPoint.SLOT_MADE,
    CrashPoint.SPARK_READY,
    CrashPoint.BASE_COPIED,
    CrashPoint.SCHEMA_STORED,
    CrashPoint.SNAPSHOTS_RELEASED,
    CrashPoint.PREPARED_OVER,
    *CUT_POINTS,
    *LAST_POINTS,
)

# Reached once for every attempt at a cut that copies tables anew, before its markers; the first where one is new.
ANEW_POINTS = (
    CrashPoint.TABLES_PUBLISHED,
    CrashPoint.SLOT_MADE,
    CrashPoint.SPARK_READY,
    CrashPoint.BASE_COPIED,
    CrashPoint.COPY_SLOTS_DROPPED,
)

INCREMENT_POINTS = (
    CrashPoint.LOCKED,
    CrashPoint.SETTLED,
    CrashPoint.GIVEN_UP,
    CrashPoint.CHECKED,
    CrashPoint.SPARK_BEGUN,
    CrashPoint.INTENT_STORED,
    *CUT_POINTS,
    *LAST_POINTS,
)


def ddl_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same command where a table is new since the commit before."""
    at, last = points.index(CUT_POINTS[0]), points.index(CrashPoint.SEQUENCES_READ) + 1
    return (*points[:at], *ANEW_POINTS, *points[at:last], CrashPoint.SCHEMA_STORED, *points[last:])


def void_attempt_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same full create where the schema is changed while it makes its slots: it makes them anew."""
    at = points.index(CrashPoint.SLOT_MADE)
    return (*points[:at], CrashPoint.SLOT_MADE, CrashPoint.COPY_SLOTS_DROPPED, *points[at:])


def terminal_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same command where its snapshot is a terminal one."""
    at = points.index(CUT_POINTS[0])
    return (*points[:at], *FREEZE_POINTS, *points[at:])
