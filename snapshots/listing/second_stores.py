"""What the second stores have, according to the records of copies in the first store; no second store is contacted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cutline.snapshots.operations.ended_operations import Ended, list_ended, read_batches
from cutline.snapshots.records.operation_records import CopiedPoint
from cutline.storage.store import ObjectStore

COPY = "copy"
# At most this many of the newest operations without an intent are read to find a copy into each second store.
READ_MAX = 128


@dataclass(frozen=True, slots=True)
class SecondStoreState:
    """The newest restore points that copies have left in the second store at `url`, by snapshot.

    `behind` maps snapshots to the number of restore points that the second store lacks.
    """

    url: str
    points: Mapping[str, CopiedPoint]
    behind: Mapping[str, int]

    @property
    def newest_cut_at(self) -> datetime:
        """The time of the newest cut in the second store."""
        return max(datetime.fromisoformat(point.cut_at) for point in self.points.values())

    def to_json(self) -> dict[str, Any]:
        """Return the state for `list --json`."""
        return {
            "to": self.url,
            "newest_cut_at": max(point.cut_at for point in self.points.values()),
            "snapshots": [
                {
                    "snapshot": name,
                    "increment": point.increment,
                    "cut_at": point.cut_at,
                    "behind": self.behind.get(name, 0),
                }
                for name, point in sorted(self.points.items())
            ],
        }


def states_of(ended: Iterable[Ended], increments: Mapping[str, int]) -> list[SecondStoreState]:
    """Return the state of each second store from the records of copies.

    `increments` is the number of increments of each snapshot in the first store. A snapshot that it lacks was deleted
    there, and does not count. Neither does one that a later complete copy of all snapshots did not find in the second
    store: it was deleted there, and is not copied again.
    """
    newest: dict[str, dict[str, CopiedPoint]] = {}
    # The second stores of which a complete copy was read, and their snapshots that only earlier copies know.
    complete: set[str] = set()
    gone: set[tuple[str, str]] = set()
    for one in sorted(ended, key=lambda one: one.id, reverse=True):
        if one.kind == COPY and one.outcome is not None and isinstance(one.outcome.copied, tuple):
            for point in one.outcome.copied:
                if point.to in complete and point.snapshot not in newest[point.to]:
                    gone.add((point.to, point.snapshot))
                newest.setdefault(point.to, {}).setdefault(point.snapshot, point)
            if not one.snapshot and one.code == 0:
                complete |= {point.to for point in one.outcome.copied}
    return [
        SecondStoreState(
            url,
            points,
            {
                name: max(increments[name] - point.increment, 0)
                for name, point in points.items()
                if name in increments and (url, name) not in gone
            },
        )
        for url, points in sorted(newest.items())
    ]


def read_states(
    store: ObjectStore, documents: Mapping[str, Set[str]], increments: Mapping[str, int], stores: int
) -> list[SecondStoreState]:
    """Read the records of copies until `stores` second stores are known; `documents` is that of document_names."""
    found: list[Ended] = []
    states: list[SecondStoreState] = []
    if stores:
        ids = list_ended(documents, has_intent=False)[:READ_MAX]
        for batch in read_batches(store, documents, ids):
            found += [one for one in batch if one.kind == COPY]
            states = states_of(found, increments)
            if len(states) >= stores:
                break
    return states
