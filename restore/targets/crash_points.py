"""The crash points of a restore: after its effects that are visible from outside the process.

Each is reported to `Progress.reached`. Between two points there may be an effect on each node: every database is made
before its record, and closed, put back or dropped one after the other.
"""

from __future__ import annotations

from enum import StrEnum


class RestoreCrashPoint(StrEnum):
    """The effect that was just made; the value is the text that `--verbose` prints."""

    LOCKED = "targets locked"
    INTENT_STORED = "intent stored"
    ROLES_CREATED = "roles created"
    CREATED = "created"
    LOADING = "loading"
    ROWS_LOADED = "rows loaded"
    INDEXING = "indexing"
    FINISHED = "finished"
    CLOSED = "old databases closed"
    DECIDED = "publishing decided"
    RENAMED = "renamed"
    PUBLISHED = "published"
    SLOTS_RELEASED = "slots of ended chains dropped"
    OUTCOME_STORED = "outcome stored"
    ABANDONED = "abandoned"


PER_NODE = frozenset(
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
