"""What the second stores have, according to the records of copies in the first store; no second store is contacted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field

from cutline.snapshots.operations.ended_operations import Ended, list_ended, read_batches
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.operation_records import CopiedPoint
from cutline.snapshots.records.proven_chains import point_label, read_full
from cutline.storage.store import ObjectStore

COPY = "copy"
# At most this many of the newest operations without an intent are read to find a copy into each second store.
READ_MAX = 128


class FirstStoreChain(Struct, frozen=True):
    """A snapshot in the first store: its restore points `first` to `last` (0 is the full snapshot).

    The full snapshot was stored at `stored_at`.
    """

    first: int
    last: int
    stored_at: datetime

    @classmethod
    def of(cls, full: FullSnapshot, first: int, last: int) -> FirstStoreChain:
        """Return the snapshot that begins with `full`."""
        return cls(first, last, datetime.fromisoformat(full.created_at) + timedelta(seconds=full.seconds))


class SecondStoreState(Struct, frozen=True):
    """The newest restore points that copies have left in the second store at `url`, by snapshot.

    `behind` maps snapshots to the number of restore points that the second store lacks. `missing` are the snapshots of
    which it has nothing. `stuck` maps snapshots that can't be continued there, because restore points that it lacks
    were given up in the first store, to the increment at which they begin in the first store. If `is_complete`, the
    records of a complete copy were read: they name every snapshot that was there then.
    """

    url: str
    points: Mapping[str, CopiedPoint]
    behind: Mapping[str, int]
    missing: tuple[str, ...] = ()
    stuck: Mapping[str, int] = field(default_factory=dict)
    is_complete: bool = False

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
                    "can_be_continued": name not in self.stuck,
                }
                for name, point in sorted(self.points.items())
            ],
            "missing": list(self.missing),
        }


def states_of(ended: Iterable[Ended], chains: Mapping[str, FirstStoreChain]) -> list[SecondStoreState]:
    """Return the state of each second store from the records of copies.

    `chains` are the snapshots in the first store. A snapshot that it lacks was deleted there, and does not count.
    Neither does one that a later complete copy of all snapshots did not find in the second store: it was deleted there,
    and is not copied again.
    """
    newest: dict[str, dict[str, CopiedPoint]] = {}
    # When the newest complete copy into each second store began, and the snapshots that only earlier copies know.
    complete: dict[str, datetime] = {}
    gone: set[tuple[str, str]] = set()
    for one in sorted(ended, key=lambda one: one.id, reverse=True):
        if one.kind == COPY and one.outcome is not None and isinstance(one.outcome.copied, tuple):
            for point in one.outcome.copied:
                if point.to in complete and point.snapshot not in newest[point.to]:
                    gone.add((point.to, point.snapshot))
                newest.setdefault(point.to, {}).setdefault(point.snapshot, point)
            if not one.snapshot and one.code == 0 and one.began_at is not None:
                for point in one.outcome.copied:
                    complete.setdefault(point.to, datetime.fromisoformat(one.began_at))
    return [_state_of(url, points, chains, complete.get(url), gone) for url, points in sorted(newest.items())]


def _state_of(
    url: str,
    points: Mapping[str, CopiedPoint],
    chains: Mapping[str, FirstStoreChain],
    complete_at: datetime | None,
    gone: Set[tuple[str, str]],
) -> SecondStoreState:
    there = {name: point for name, point in points.items() if name in chains and (url, name) not in gone}
    return SecondStoreState(
        url,
        points,
        {name: max(chains[name].last - point.increment, 0) for name, point in there.items()},
        # What was in the first store before a complete copy that does not name it was deleted in the second store.
        tuple(
            name
            for name, chain in sorted(chains.items())
            if name not in points and (complete_at is None or chain.stored_at >= complete_at)
        ),
        {name: chains[name].first for name, point in there.items() if point.increment < chains[name].first},
        is_complete=complete_at is not None,
    )


def read_states(
    store: ObjectStore, documents: Mapping[str, Set[str]], chains: Mapping[str, FirstStoreChain], stores: int
) -> list[SecondStoreState]:
    """Read the records of copies until `stores` second stores are known; `documents` is that of document_names.

    An earlier copy may name the snapshots that seem to be missing, unless it is known what a complete copy has found.
    """
    found: list[Ended] = []
    states: list[SecondStoreState] = []
    if stores:
        ids = list_ended(documents, has_intent=False)[:READ_MAX]
        for batch in read_batches(store, documents, ids):
            found += [one for one in batch if one.kind == COPY]
            states = states_of(found, chains)
            if len(states) >= stores and all(state.is_complete or not state.missing for state in states):
                break
    return states


def read_uncopied(store: ObjectStore, stores: int, given_up: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a warning for every second store that lacks restore points which are about to be given up.

    `given_up` are the increments, in order, by snapshot (0 is the full snapshot); `stores` is the number of second
    stores.
    """
    given_up = {name: points for name, points in given_up.items() if points}
    if not (stores and given_up):
        return []
    # Each chain begins with the next increment then.
    chains = {
        name: FirstStoreChain.of(read_full(store, name), points[0], points[-1] + 1) for name, points in given_up.items()
    }
    states = read_states(store, document_names(store), chains, stores)
    return [text for state in states for name in chains for text in _uncopied_texts(state, name, given_up[name])]


def _uncopied_texts(state: SecondStoreState, name: str, given_up: Sequence[int]) -> Iterator[str]:
    begin, hint = given_up[-1] + 1, f"to copy before: snapshot copy {name}"
    if name in state.missing:
        yield f"{state.url} has nothing of {name} yet, so it never gets {_label(given_up)}; {hint}"
    elif state.behind.get(name) and name not in state.stuck:
        last = state.points[name].increment
        lacks = [one for one in given_up if one > last]
        never = f" and never gets {_label(lacks)}" if lacks else ""
        yield (
            f"{state.url} has {name} only up to {point_label(last)}, so it can't be continued there once the chain"
            f" begins at increment {begin}{never}; {hint}"
        )


def _label(points: Sequence[int]) -> str:
    if len(points) == 1:
        return point_label(points[0])
    return f"increments {points[0]} to {points[-1]}" if points[0] else f"the full snapshot to increment {points[-1]}"
