"""Restore points that operations have recorded as committed, and whose commit files are gone.

Nothing else shows that somebody has removed the newest increments of a chain, or a whole snapshot, without Cutline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby

from cutline.snapshots.activity.ended_operations import Ended, list_ended, read_batches
from cutline.snapshots.listing.entry import Entry
from cutline.snapshots.records.commits import find_place, increment_label
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import DONE
from cutline.snapshots.records.tombstones import is_deleted, is_only_full
from cutline.storage.store import ObjectStore

# Operations that have committed nothing, or whose commit is gone, are few, unless snapshots were deleted.
READ_MAX = 200


@dataclass(frozen=True, slots=True)
class MissingPoint:
    """A full snapshot (increment 0) or an increment whose commit file, `key`, is gone."""

    snapshot: str
    increment: int
    key: str


def missing_texts(missing: Iterable[MissingPoint]) -> list[str]:
    """A line for each snapshot: what is missing of it, and what to do. They are in the order of their increments."""
    return [_text_of(name, list(points)) for name, points in groupby(missing, key=lambda one: one.snapshot)]


def _text_of(name: str, points: list[MissingPoint]) -> str:
    first, more = points[0], len(points) - 1
    others = f" (and those of later increments: {more:,})" if more else ""
    text = (
        f"{increment_label(name, first.increment)} was committed, but its commit file is gone from the store{others}:"
        f" put it back from a copy of the store: {first.key}"
    )
    if first.increment:
        return text
    return f"{text}   or give the snapshot up, if it is lost for good: snapshot delete {name} --force"


def read_missing(store: ObjectStore, documents: Mapping[str, Set[str]], entries: Iterable[Entry]) -> list[MissingPoint]:
    """What is missing beside these entries, all of the store's, by the newest operations.

    `documents` are those of document_names, listed before the entries were read.
    """
    entries = list(entries)
    committed = committed_by(entries)
    ids = [one for one in list_ended(documents, has_intent=True) if one not in committed]
    return find_missing(store, _read(store, documents, ids[:READ_MAX]), entries)


def read_missing_after(store: ObjectStore, documents: Mapping[str, Set[str]], entry: Entry) -> list[MissingPoint]:
    """The increments after the last one of a snapshot, by the operations that began next."""
    if entry.chain is None:
        return []
    second = _second_of(entry.chain.last.operation)
    ids = sorted(set(list_ended(documents, has_intent=True)) - committed_by([entry]))
    later = _read(store, documents, [one for one in ids if one >= second][:READ_MAX])
    return find_missing(store, [one for one in later if one.snapshot == entry.name], [entry])


def find_missing(store: ObjectStore, ended: Iterable[Ended], entries: Iterable[Entry]) -> list[MissingPoint]:
    """Those of the operations whose restore points are missing, by snapshot and increment.

    The entries, as a listing has them, only spare reads: each commit file is looked for by its key.
    """
    by_name = {one.name: one for one in entries}
    points: dict[str, set[int]] = {}
    for one in ended:
        is_done = one.outcome is not None and one.outcome.state == DONE
        is_commit = one.kind == "create" and one.increment is not None and is_done
        if is_commit and _may_be_missing(one.id, by_name.get(one.snapshot)):
            points.setdefault(one.snapshot, set()).add(one.increment or 0)
    return [one for name in sorted(points) for one in _look_for(store, name, sorted(points[name]))]


def committed_by(entries: Iterable[Entry]) -> set[str]:
    """The operations that have committed the restore points of the entries."""
    found = set[str]()
    for one in entries:
        found |= {one.chain.full.operation} if one.chain else set()
        found |= {summary.operation for summary in one.summaries}
    return found


def _may_be_missing(operation: str, entry: Entry | None) -> bool:
    if entry is None:
        return True
    # What is wrong with a chain that can't be read is its problem; a damaged mark may be that of pruned increments.
    if entry.chain is None or entry.problem:
        return False
    # Ids of different seconds sort by time: operations before the full snapshot's worked on another one of that name.
    return operation >= _second_of(entry.chain.full.operation)


def _look_for(store: ObjectStore, name: str, increments: Iterable[int]) -> Iterator[MissingPoint]:
    # What can't be read is there, whatever it says.
    with suppress(ManifestError):
        if is_deleted(store, name):
            return
        is_pruned = is_only_full(store, name)
        for increment in increments:
            if increment and is_pruned:
                return
            with suppress(ManifestError):
                place = find_place(store, name, increment)
                if place.commit is None:
                    yield MissingPoint(name, increment, place.key)


def _second_of(operation: str) -> str:
    return operation.rpartition("-")[0]


def _read(store: ObjectStore, documents: Mapping[str, Set[str]], operations: Sequence[str]) -> Iterable[Ended]:
    return chain.from_iterable(read_batches(store, documents, operations))
