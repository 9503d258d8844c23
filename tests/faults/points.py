"""The crash points that every kind of create reaches, in order, and those that are reached once per node."""

from __future__ import annotations

from cutline.fleet.crash_points import CrashPoint
from cutline.restore.targets.databases import RestoreCrashPoint

# Reached once per node, in any order.
PER_NODE = frozenset({CrashPoint.SLOT_MADE})
RESTORE_PER_NODE = frozenset(
    {
        RestoreCrashPoint.CREATED,
        RestoreCrashPoint.LOADING,
        RestoreCrashPoint.INDEXING,
        RestoreCrashPoint.FINISHED,
        RestoreCrashPoint.RENAMED,
        RestoreCrashPoint.PUBLISHED,
        RestoreCrashPoint.ABANDONED,
    }
)
# Of a terminal snapshot: reached once per primary, all of the first, then all of the second.
FREEZE_POINTS = (CrashPoint.FROZEN, CrashPoint.SESSIONS_ENDED)

# Repeated when an attempt at a cut is retried.
CUT_POINTS = (
    CrashPoint.STARTS_WRITTEN,
    CrashPoint.FINISHES_WRITTEN,
    CrashPoint.ARCHIVED,
    CrashPoint.RESOLVED,
)
LAST_POINTS = (CrashPoint.SEQUENCES_READ, CrashPoint.COMMITTED, CrashPoint.OUTCOME_STORED, CrashPoint.RELEASED)

FULL_POINTS = (
    CrashPoint.CHECKED,
    CrashPoint.LOCKED,
    CrashPoint.SETTLED,
    CrashPoint.SLOTS_DROPPED,
    CrashPoint.SPARK_BEGUN,
    CrashPoint.INTENT_STORED,
    CrashPoint.SLOT_MADE,
    CrashPoint.SPARK_READY,
    CrashPoint.BASE_COPIED,
    CrashPoint.DDL_STORED,
    CrashPoint.SNAPSHOTS_RELEASED,
    CrashPoint.PREPARED_OVER,
    *CUT_POINTS,
    *LAST_POINTS,
)

# Reached once per attempt at a cut that copies tables, before its markers; the first only if a table is new.
COPY_POINTS = (
    CrashPoint.TABLES_PUBLISHED,
    CrashPoint.SLOT_MADE,
    CrashPoint.SPARK_READY,
    CrashPoint.BASE_COPIED,
    CrashPoint.COPY_SLOTS_DROPPED,
)

# Reached once per node whose copy begins again, or once, before the tables of primaries are copied.
RENEWAL_POINTS = (
    CrashPoint.SLOT_MADE,
    CrashPoint.SPARK_READY,
    CrashPoint.BASE_COPIED,
    CrashPoint.SNAPSHOTS_RELEASED,
    CrashPoint.PREPARED_OVER,
)

INCREMENT_POINTS = (
    CrashPoint.LOCKED,
    CrashPoint.SETTLED,
    CrashPoint.SLOTS_DROPPED,
    CrashPoint.CHECKED,
    CrashPoint.INTENT_STORED,
    *CUT_POINTS,
    *LAST_POINTS,
)


def spark_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same command if Spark archives the WAL, as there is more than little."""
    points = _with_spark_begun(points)
    at = points.index(CrashPoint.ARCHIVED)
    return (*points[:at], CrashPoint.SPARK_READY, *points[at:])


def _with_spark_begun(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    if CrashPoint.SPARK_BEGUN in points:
        return points
    at = points.index(CrashPoint.INTENT_STORED)
    return (*points[:at], CrashPoint.SPARK_BEGUN, *points[at:])


def listed_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same command if its commit names object lists that the driver stores."""
    at = points.index(CrashPoint.COMMITTED)
    return (*points[:at], CrashPoint.LISTS_STORED, *points[at:])


def ddl_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same command if a table was created since the previous commit."""
    points = _with_spark_begun(points)
    at, last = points.index(CUT_POINTS[0]), points.index(CrashPoint.SEQUENCES_READ) + 1
    return (*points[:at], *COPY_POINTS, *points[at:last], CrashPoint.DDL_STORED, *points[last:])


def renewing_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same increment if it copies a standby again, and then the tables of a primary."""
    points = _with_spark_begun(points)
    at = points.index(CUT_POINTS[0])
    return (*points[:at], *RENEWAL_POINTS, *COPY_POINTS[1:], *points[at:])


def invalidated_attempt_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same full create if DDL invalidates an attempt while it makes its slots."""
    at = points.index(CrashPoint.SLOT_MADE)
    return (*points[:at], CrashPoint.SLOT_MADE, CrashPoint.COPY_SLOTS_DROPPED, *points[at:])


def terminal_crash_points(points: tuple[CrashPoint, ...]) -> tuple[CrashPoint, ...]:
    """The points of the same command if it takes a terminal snapshot."""
    at = points.index(CUT_POINTS[0])
    return (*points[:at], *FREEZE_POINTS, *points[at:])
