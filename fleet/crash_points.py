"""The crash points of a create: one right after each effect that is visible from outside the process.

Each point is reported to `Progress.reached`, which also shows where the time goes. If a command ends between two
points, only the effects up to the first of them exist. tests/integration/test_points.py tests that a point follows
every effect on a node or the store.
"""

from __future__ import annotations

from enum import StrEnum


class CrashPoint(StrEnum):
    """The latest effect; the value is the text that `--verbose` prints."""

    CHECKED = "checks passed"
    LOCKED = "fleet locked"
    SETTLED = "earlier operations settled"
    SLOTS_DROPPED = "slots over the limit or of ended chains dropped"
    RESUMED = "interrupted snapshot continued"
    SPARK_BEGUN = "Spark starting"
    INTENT_STORED = "intent stored"
    SLOT_MADE = "slot made"
    SPARK_READY = "Spark ready"
    BASE_COPIED = "base copied"
    DDL_STORED = "DDL stored"
    SNAPSHOTS_RELEASED = "exported snapshots released"
    TABLES_PUBLISHED = "new tables published"
    COPY_SLOTS_DROPPED = "slots of the copy dropped"
    PREPARED_OVER = "older prepared transactions decided"
    FROZEN = "new sessions read-only"
    SESSIONS_ENDED = "other sessions ended"
    STARTS_WRITTEN = "start markers written"
    FINISHES_WRITTEN = "finish markers written"
    ARCHIVED = "WAL archived"
    RESOLVED = "cut resolved"
    SEQUENCES_READ = "sequences read"
    LISTS_STORED = "object lists stored"
    COMMITTED = "commit stored"
    OUTCOME_STORED = "outcome stored"
    RELEASED = "fleet released"
    STEP_STORED = "tables copied in the background"
