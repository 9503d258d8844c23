"""Operations that have ended, as their documents in the store say: listed, and read the newest first.

Whoever needs more than one of them reads them here. Records of operations that have committed stay as long as their
snapshot; others are removed by gc after 30 days. What can't be read has a `problem`, and hides no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, groupby, islice
from typing import Any, TypeVar

from msgspec import UnsetType

from cutline.fleet.label import read_label
from cutline.fleet.record import Time, to_builtins
from cutline.snapshots.activity.kinds import DRILL
from cutline.snapshots.operations.recorded import document_names
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import CheckedPoint, Intent, Outcome, read_intent, read_outcome
from cutline.storage.store import ObjectMissingError, ObjectStore

AT_ONCE = 16
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that has ended. `intent` is None if it had none, or none that is still there.

    `problem` says which of its documents can't be read, and why; then `outcome` is None.
    """

    id: str
    intent: Intent | None
    outcome: Outcome | None
    problem: str = ""

    @property
    def snapshot(self) -> str:
        """The snapshot that it worked on; "" for all, or if it is not known."""
        if self.intent is not None:
            return self.intent.snapshot
        return _or(self.outcome.snapshot, "") if self.outcome else ""

    @property
    def kind(self) -> str:
        """Which command it was of, or "drill"; "" if that is not known."""
        if self.intent is not None:
            return DRILL if self.intent.is_drill else self.intent.kind
        return _or(self.outcome.kind, "") if self.outcome else ""

    @property
    def increment(self) -> int | None:
        """The increment that it worked on; 0 is the full snapshot."""
        if self.intent is not None:
            return self.intent.increment
        return _or(self.outcome.increment, None) if self.outcome else None

    @property
    def began_at(self) -> Time | None:
        """When it began."""
        if self.intent is not None:
            return self.intent.began_at
        return _or(self.outcome.began_at, None) if self.outcome else None

    @property
    def ended_at(self) -> datetime | None:
        """When it ended; None if its outcome can't be read."""
        return datetime.fromisoformat(self.outcome.ended_at) if self.outcome else None

    @property
    def label(self) -> str:
        """The label of its process; "" if that is not known."""
        by = self.intent.by if self.intent else self.outcome.by if self.outcome else ""
        return _or(by, "")

    @property
    def seconds(self) -> float | None:
        """How long it took, until its outcome was recorded; None if others have found out how it ended."""
        if self.ended_at is None or self.began_at is None or self.code is None:
            return None
        return max((self.ended_at - datetime.fromisoformat(self.began_at)).total_seconds(), 0.0)

    @property
    def volumes(self) -> dict[str, int]:
        """What it worked on, by unit."""
        return dict(_or(self.outcome.volumes, {})) if self.outcome else {}

    @property
    def causes(self) -> tuple[str, ...]:
        """Why it had to try again."""
        return tuple(_or(self.outcome.causes, ())) if self.outcome else ()

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase, in order; empty if they are not recorded."""
        if self.outcome is None:
            return {}
        if isinstance(figures := self.outcome.figures, UnsetType):
            return dict(_or(self.outcome.phases, {}))
        return {name: step.seconds for name, step in figures.steps.items()}

    @property
    def checked(self) -> tuple[CheckedPoint, ...]:
        """What a check found of each restore point; empty if that is not recorded."""
        return _or(self.outcome.checked, ()) if self.outcome else ()

    @property
    def code(self) -> int | None:
        """The exit code of its command, if that is known: a settled operation has none."""
        return _or(self.outcome.code, None) if self.outcome else None

    def to_json(self) -> dict[str, Any]:
        """The operation as JSON output has it; unknown values are null."""
        owner, outcome = read_label(self.label), self.outcome
        return {
            "operation": self.id,
            "kind": self.kind or None,
            "snapshot": self.snapshot or None,
            "increment": self.increment,
            "state": outcome.state if outcome else None,
            "reason": (outcome.reason or None) if outcome else None,
            "code": self.code,
            "who": f"{owner.user}@{owner.host}" if owner else None,
            "began_at": self.began_at,
            "ended_at": outcome.ended_at if outcome else None,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "volumes": self.volumes,
            "causes": list(self.causes),
            "phases": self.phases,
            "checked": to_builtins(self.checked),
            "problem": self.problem or None,
        }


def list_ended(documents: Mapping[str, Set[str]], *, has_intent: bool | None = None) -> list[str]:
    """The ids of operations with an outcome, the newest first; `documents` are those of document_names.

    With `has_intent`, only those that have an intent, or only those that have none: checks, gc and prunes.
    """
    return [
        one
        for one in sorted(documents, reverse=True)
        if "outcome.json" in documents[one] and has_intent in (None, "intent.json" in documents[one])
    ]


def read_ended(store: ObjectStore, operation: str, *, has_intent: bool = True) -> Ended | None:
    """One operation that has ended; None if it has no outcome. Without `has_intent` no intent is looked for."""
    intent: Intent | None = None
    try:
        if has_intent:
            with suppress(ObjectMissingError):
                intent = read_intent(store, operation)
        outcome = read_outcome(store, operation)
    except ManifestError as error:
        return Ended(operation, intent, None, error.message)
    return Ended(operation, intent, outcome) if outcome else None


def read_batches(
    store: ObjectStore, documents: Mapping[str, Set[str]], operations: Sequence[str]
) -> Iterator[list[Ended]]:
    """The operations in their order, AT_ONCE at a time; a batch is read when it is asked for.

    An operation is left out if its outcome has been removed since `documents` were listed. It takes one read for each,
    and another one if it has an intent.
    """
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for first in range(0, len(operations), AT_ONCE):
            batch = operations[first : first + AT_ONCE]
            found = threads.map(lambda one: read_ended(store, one, has_intent="intent.json" in documents[one]), batch)
            yield [one for one in found if one is not None]


def read_history(store: ObjectStore, count: int, snapshot: str | None = None) -> list[Ended]:
    """The last `count` operations that have ended, of one snapshot or of all, the newest first."""
    documents = document_names(store)
    read = chain.from_iterable(read_batches(store, documents, list_ended(documents)))
    return list(islice((one for one in _newest_first(read) if snapshot in (None, one.snapshot)), count))


def _newest_first(read: Iterable[Ended]) -> Iterator[Ended]:
    """Operations in the order of their ids; those whose ids are of one second, by when they ended."""
    for _, same_second in groupby(read, key=lambda one: one.id.partition("-")[0]):
        yield from sorted(same_second, key=lambda one: one.outcome.ended_at if one.outcome else "", reverse=True)


@dataclass(frozen=True, slots=True)
class EndedOperations:
    """Operations that have ended, the newest first.

    `since`: from when on they are complete; None if all were read.
    """

    found: tuple[Ended, ...]
    since: datetime | None = None


class EndedReader:
    """Reads again and again the newest operations that have committed nothing, or whose commit is gone.

    What has committed is not read: its commit says more. Up to `count_max` operations that had an intent are read, and
    as many of those that had none: so the many checks of a busy schedule hide no restore. An outcome never changes: it
    is read once.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._known: dict[str, Ended] = {}

    def read(
        self, store: ObjectStore, committed: Collection[str], documents: Mapping[str, Set[str]] | None = None
    ) -> EndedOperations:
        """The operations without those that have committed, by id; `documents` are those of document_names."""
        documents = document_names(store) if documents is None else documents
        classes = [
            [one for one in list_ended(documents, has_intent=has_intent) if one not in committed]
            for has_intent in (True, False)
        ]
        wanted = [one for ids in classes for one in ids[: self._count_max]]
        self._known = {one: self._known[one] for one in wanted if one in self._known}
        new = [one for one in wanted if one not in self._known]
        self._known |= {one.id: one for batch in read_batches(store, documents, new) for one in batch}
        cut_off = [ids[: self._count_max] for ids in classes if len(ids) > self._count_max]
        since = max((time for ids in cut_off if (time := self._first_end(ids)) is not None), default=None)
        return EndedOperations(tuple(self._known[one] for one in sorted(self._known, reverse=True)), since)

    def _first_end(self, operations: Iterable[str]) -> datetime | None:
        ends = (self._known[one].ended_at for one in operations if one in self._known)
        return min((end for end in ends if end is not None), default=None)


def _or(value: Value | UnsetType, default: Value) -> Value:
    return default if isinstance(value, UnsetType) else value
