"""The outcomes of operations that have committed nothing, or whose commit is gone: the newest ones, each read once.

What has committed is not read here: its commit says more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from fleet.record import Time
from snapshots.activity.history import Ended, read_ended
from snapshots.operations.recorded import document_names
from snapshots.records.commits import ASKING_THREADS_MAX
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import read_outcome
from storage.store import ObjectStore


@dataclass(frozen=True, slots=True)
class EndedOperations:
    """Operations that have ended, the newest first.

    `since`: from when on they are complete; None if all were read.
    """

    found: tuple[Ended, ...]
    since: float | None = None


class EndedReader:
    """Reads up to `count_max` operations that had an intent, and as many of those that had none: checks, gc, prunes.

    So the many checks of a busy schedule hide no restore. An outcome never changes: it is read once.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._known: dict[str, Ended] = {}

    def read(self, store: ObjectStore, committed: Collection[str]) -> EndedOperations:
        """The operations without those that have committed, by id."""
        names = document_names(store)
        ended = [one for one in reversed(names) if "outcome.json" in names[one] and one not in committed]
        classes = [
            [one for one in ended if ("intent.json" in names[one]) == has_intent] for has_intent in (True, False)
        ]
        with_intent, without = (ids[: self._count_max] for ids in classes)
        self._known = {one: self._known[one] for one in (*with_intent, *without) if one in self._known}
        with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
            self._keep(threads.map(lambda one: read_ended(store, one), self._new(with_intent)))
            self._keep(threads.map(lambda one: _read_without_intent(store, one), self._new(without)))
        cut_off = [ids[: self._count_max] for ids in classes if len(ids) > self._count_max]
        since = max((time for ids in cut_off if (time := self._first_end(ids)) is not None), default=None)
        return EndedOperations(tuple(self._known[one] for one in sorted(self._known, reverse=True)), since)

    def _first_end(self, operations: Iterable[str]) -> float | None:
        outcomes = (self._known[one].outcome for one in operations if one in self._known)
        return min((moment_of(one.ended_at) for one in outcomes if one), default=None)

    def _new(self, operations: Iterable[str]) -> list[str]:
        return [one for one in operations if one not in self._known]

    def _keep(self, found: Iterable[Ended | None]) -> None:
        self._known |= {one.id: one for one in found if one is not None}


def _read_without_intent(store: ObjectStore, operation: str) -> Ended | None:
    try:
        outcome = read_outcome(store, operation)
    except ManifestError as error:
        return Ended(operation, None, None, error.message)
    return Ended(operation, None, outcome) if outcome else None


def moment_of(time: Time) -> float:
    """A stored time in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()
