"""Making again what a change of the schema has made void: an attempt keeps nothing that was read before the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import psycopg

from fleet.hints import NEW_CHAIN
from fleet.nodes.connections import CopyError
from fleet.programs.wheel import ProgramFailedError
from fleet.progress import Progress
from fleet.tables.groups import SchemaChangedError

# What PostgreSQL says where something is gone, or is something else, that was there when the catalogs were read; and
# where one who changes it waits for us, and we for him.
PASSING = (psycopg.ProgrammingError, psycopg.InternalError, psycopg.errors.DeadlockDetected)
# Of something that came and went meanwhile no trace is left.
GONE = (
    psycopg.errors.UndefinedTable, psycopg.errors.UndefinedObject, psycopg.errors.InvalidSchemaName,
    psycopg.errors.DeadlockDetected,
)  # fmt: skip
Result = TypeVar("Result")


class ChangedError(Exception):
    """An attempt is void: its text says what was changed; `moved` are the oids of tables to be copied anew by shard."""

    def __init__(self, cause: str, moved: Mapping[str, set[int]] | None = None) -> None:
        super().__init__(cause)
        self.moved = moved or {}


def until_unchanged(attempt: Callable[[], Result], retries: int, progress: Progress) -> Result:
    """What the attempt returns; one that raises ChangedError is made again, `retries` times.

    Raises SchemaChangedError where each of them was void.
    """
    cause, attempts = "", retries + 1
    for number in range(1, attempts + 1):
        try:
            return attempt()
        except ChangedError as error:
            cause = str(error)
            progress.note(f"attempt {number} of {attempts} met a change of the schema: {cause}")
    raise SchemaChangedError(
        f"the schema was changed during each of {attempts} attempts; last: {cause}",
        hint=f"repeat the command once nobody changes the schema, or try more often: --retries N; or {NEW_CHAIN}",
    )


@contextmanager
def void_if(changed: Callable[[], str]) -> Iterator[None]:
    """Raise ChangedError where PostgreSQL refuses something in the block, and `changed` says what was changed since.

    What it refuses while nothing was changed is no change's fault, and stays what it is.
    """
    try:
        yield
    except (*PASSING, ProgramFailedError, CopyError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, GONE):
            raise ChangedError(text) from error
        if not (cause := changed()):
            raise
        raise ChangedError(f"{cause}: {text}") from error
