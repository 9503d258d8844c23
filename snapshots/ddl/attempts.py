"""Retry an attempt that concurrent DDL invalidated: the next attempt uses nothing that was read before the change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import psycopg

from cutline.fleet.progress import News, Progress
from cutline.nodes.connections import CopyError
from cutline.nodes.groups import SchemaChangedError
from cutline.nodes.programs import ProgramFailedError
from cutline.storage.errors import SnapshotError

# Concurrent DDL causes these errors if it drops or changes an object read from the catalogs, or if there is a deadlock.
DDL_RACE_ERRORS = (psycopg.ProgrammingError, psycopg.InternalError, psycopg.errors.DeadlockDetected)
# These errors invalidate an attempt even if no change is found: an object created and dropped meanwhile leaves no
# trace.
DROPPED_ERRORS = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.DeadlockDetected,
)
# SQLSTATE classes that DDL never causes: lost connections (08), operator intervention or shutdown (57), and lack of
# resources (53, 58).
OTHER_CAUSES = ("08", "53", "57", "58")
# The pause before each retry beyond the usual number: an attempt at a cut leaves segments behind.
PAUSE_SECONDS = 1.0
Result = TypeVar("Result")


class ChangedError(Exception):
    """An attempt is invalid. The text names the change; `moved` holds the oids of tables to copy again, by shard.

    If only some shards have changed, `moved` names them all, also those without such tables.
    """

    def __init__(self, cause: str, moved: Mapping[str, set[int]] | None = None) -> None:
        super().__init__(cause)
        self.moved = moved or {}


def retry_until_unchanged(
    attempt: Callable[[], Result], retries: int, seconds_min: float, progress: Progress
) -> Result:
    """Run `attempt` and return its result; if it raises ChangedError, retry up to `retries` times.

    After that, it is retried until `seconds_min` have passed. Raises SchemaChangedError if all attempts were invalid.
    """
    began, number = time.monotonic(), 0
    while True:
        number += 1
        try:
            return attempt()
        except ChangedError as error:
            # With a minimum time, the usual number is not the last.
            of = "" if seconds_min else f" of {retries + 1}"
            progress.note(News(f"attempt {number}{of} was invalidated by DDL: {error}"))
            if number > retries:
                if time.monotonic() - began >= seconds_min:
                    raise SchemaChangedError(
                        f"DDL was executed during each of {number} attempts; last: {error}",
                        hint="repeat the command when no DDL is running, and no VACUUM FULL or CLUSTER, or allow more"
                        " attempts: --retries N",
                    ) from error
                time.sleep(PAUSE_SECONDS)


@contextmanager
def invalidate_if(find_change: Callable[[], str]) -> Iterator[None]:
    """Turn a PostgreSQL or pg_dump error into ChangedError if an object is missing or `find_change` finds a change.

    Other errors are raised unchanged.
    """
    try:
        yield
    except (*DDL_RACE_ERRORS, ProgramFailedError, CopyError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, DROPPED_ERRORS):
            raise ChangedError(text) from error
        if not may_be_ddl(error) or not (cause := find_change()):
            raise
        raise ChangedError(f"{cause}: {text}") from error


def may_be_ddl(error: Exception) -> bool:
    """Whether DDL can have caused a PostgreSQL or pg_dump error; it never does if a COPY ends without an SQLSTATE."""
    state = _sqlstate(error)
    return not state.startswith(OTHER_CAUSES) and not (isinstance(error, CopyError) and not state)


def _sqlstate(error: Exception) -> str:
    if isinstance(error, psycopg.Error):
        return error.sqlstate or ""
    return str(error.details.get("sqlstate", "")) if isinstance(error, SnapshotError) else ""
