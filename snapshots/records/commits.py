"""Where commits are, and reading them back.

A number whose commit was voided (snapshots/operations/deciding.py) gets another *turn*: turns are read in order, and
the first that is no void counts. Listings only find candidates; what counts is read by key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from msgspec import structs

from fleet.hints import NEW_CHAIN
from snapshots.records.chain import Chain
from snapshots.records.commit import Commit, FullSnapshot, Increment, Void
from snapshots.records.commit_rules import check_commit, check_fits
from snapshots.records.documents import ManifestError, check_about, checking, parse_document, unseal
from snapshots.records.tombstones import check_not_deleted, is_deleted, is_only_full
from storage.errors import RefusedError, UsageError
from storage.store import ObjectMissingError, ObjectStore

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
INCREMENT_FILE = re.compile(r"(\d{16})(\.\d+)?\.json")
# A commit of one node and no table has more than that.
VOID_BYTES_MAX = 500
ASKING_THREADS_MAX = 8


class SnapshotMissingError(RefusedError):
    """There is no snapshot, or no increment, of that name and number."""


class SnapshotExistsError(RefusedError):
    """Another operation has committed this snapshot or increment."""


@dataclass(frozen=True, slots=True)
class CommitPlace:
    """Where the commit of some number is, or would be: its first turn that is no void. No commit: it is free."""

    key: str
    turn: int
    commit: Commit | None


def check_name(name: str) -> str:
    """Return `name` if a snapshot can be called so; raise UsageError if not."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"a snapshot can't be called {name!r}",
            hint="up to 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )
    return name


def commit_key(name: str, increment: int, turn: int = 1) -> str:
    """The key of a commit file; increment 0 is the full snapshot."""
    suffix = f".{turn}.json" if turn > 1 else ".json"
    if increment == 0:
        return f"snapshots/{name}/snapshot{suffix}"
    return f"snapshots/{name}/increments/{increment:016d}{suffix}"


def find_place(store: ObjectStore, name: str, increment: int) -> CommitPlace:
    """Where the commit is, or the next one would be put; raise ManifestError where a turn can't be read."""
    turn = 1
    while True:
        key = commit_key(name, increment, turn)
        try:
            found = read_turn(store, key)
        except ObjectMissingError:
            return CommitPlace(key, turn, None)
        if not isinstance(found, Void):
            return CommitPlace(key, turn, found)
        # Another one's void would make a commit disappear.
        check_about(key, (found.snapshot, found.increment), (name, increment))
        turn += 1


def read_turn(store: ObjectStore, key: str) -> Commit | Void:
    """Read a commit file, or the void in its place; raise ObjectMissingError, ManifestError."""
    content, digest = unseal(key, store.read(key))
    found: Commit | Void = parse_document(key, content, FullSnapshot | Increment | Void)
    if isinstance(found, Void):
        return found
    with checking(key):
        check_commit(found)
    return structs.replace(found, digest=digest)


def free_turn(store: ObjectStore, name: str, increment: int) -> int:
    """The turn in which the number can be committed; raise SnapshotExistsError if it is."""
    place = find_place(store, name, increment)
    if place.commit is None:
        return place.turn
    raise SnapshotExistsError(
        f"{increment_label(name, increment)} exists already",
        hint=f"its next increment: snapshot create {name} --incremental; or choose another name",
        details={"snapshot": name, "increment": increment},
    )


def operation_of(store: ObjectStore, key: str) -> str:
    """The operation that wrote the commit file `key`, "" for a void; raises ObjectMissingError, ManifestError."""
    found = read_turn(store, key)
    return "" if isinstance(found, Void) else found.operation


def increment_label(name: str, increment: int) -> str:
    """What a snapshot or increment is called in messages."""
    return f"increment {increment} of {name}" if increment else f"snapshot {name}"


def read_commit(store: ObjectStore, name: str, increment: int) -> Commit:
    """Read one commit; raise SnapshotMissingError or ManifestError."""
    place = _read_place(store, name, increment)
    if place.commit is None:
        what = f"increment {increment} of snapshot {name}" if increment else f"snapshot {name}"
        raise SnapshotMissingError(
            f"there is no {what}",
            hint="see: snapshot list",
            details={"snapshot": name, "increment": increment, "object": place.key},
        )
    return _commit_at(place, name, increment)


def read_full(store: ObjectStore, name: str) -> FullSnapshot:
    """Read the commit of a full snapshot; raise SnapshotMissingError or ManifestError."""
    commit = read_commit(store, name, 0)
    if not isinstance(commit, FullSnapshot):
        raise RuntimeError("check_commit lets only a full snapshot have number 0")
    return commit


def _read_place(store: ObjectStore, name: str, increment: int) -> CommitPlace:
    """Where the commit is, or would be; raise SnapshotMissingError if a listing shows it or a later one: it is gone."""
    place = find_place(store, name, increment)
    if place.commit is None and max(increment_numbers(store, name), default=-1) >= increment:
        # One that was committed between that read and the listing is found now.
        place = find_place(store, name, increment)
        if place.commit is None:
            raise _missing_error(store, name, increment)
    return place


def _missing_error(store: ObjectStore, name: str, increment: int) -> SnapshotMissingError:
    """Why a commit that was there is not; raises SnapshotDeletedError if somebody deletes the snapshot now."""
    check_not_deleted(store, name)
    return (
        increments_pruned_error(name)
        if increment and is_only_full(store, name)
        else commit_missing_error(name, increment)
    )


def _commit_at(place: CommitPlace, name: str, increment: int) -> Commit:
    commit = place.commit
    if commit is None:
        raise RuntimeError(f"there is no commit at {place.key}")
    if (commit.snapshot, commit.increment) != (name, increment):
        raise ManifestError(
            f"object {place.key} is the commit of {increment_label(commit.snapshot, commit.increment)}",
            hint="somebody copied objects by hand",
            details={"object": place.key},
        )
    return commit


def commit_missing_error(name: str, increment: int) -> SnapshotMissingError:
    """The error for a commit that was there: later ones are, or an operation says so."""
    key = commit_key(name, increment)
    what = f"increment {increment} of snapshot {name}" if increment else f"the full snapshot {name}"
    return SnapshotMissingError(
        f"{what} was committed, and its commit file is gone from the store: {key}",
        hint=f"put it back from a copy of the store; or {NEW_CHAIN}",
        details={"snapshot": name, "increment": increment, "object": key},
    )


def increments_pruned_error(name: str) -> SnapshotMissingError:
    """The error for increments that were taken away."""
    return SnapshotMissingError(
        f"the increments of snapshot {name} were pruned; its full snapshot is left",
        hint=f"restore that: snapshot restore {name}   or {NEW_CHAIN}",
        details={"snapshot": name},
    )


def check_not_pruned(store: ObjectStore, name: str) -> None:
    """Raise SnapshotMissingError if the snapshot's increments were taken away: it gets no others."""
    if is_only_full(store, name):
        raise increments_pruned_error(name)


def increment_numbers(store: ObjectStore, name: str) -> list[int]:
    """The numbers of the increments that a listing shows as committed, in order."""
    numbers = listed_numbers(store, name)
    # Only the newest can be a void: another number is not begun before this one is decided and taken.
    if numbers and find_place(store, name, numbers[-1]).commit is None:
        numbers.pop()
    return numbers


def listed_numbers(store: ObjectStore, name: str) -> list[int]:
    """The numbers of which a listing shows an increment's commit file, or a void."""
    found = map(INCREMENT_FILE.fullmatch, store.list_children(f"snapshots/{name}/increments"))
    return sorted({int(match[1]) for match in found if match})


def read_chain(store: ObjectStore, name: str, increment: int | None = None) -> Chain:
    """Read a snapshot with its increments up to `increment` (None: all).

    Raises SnapshotDeletedError, SnapshotMissingError where a commit is missing, also one in the middle, and
    ManifestError where one belongs to another chain.
    """
    check_not_deleted(store, check_name(name))
    chain = Chain(read_full(store, name))
    if is_only_full(store, name):
        if increment:
            raise increments_pruned_error(name)
        return chain
    increments: list[Increment] = []
    for number, place in enumerate(_places(store, name, increment), start=1):
        commit = _commit_at(place, name, number)
        if not isinstance(commit, Increment):
            raise RuntimeError("check_commit lets only a full snapshot have number 0")
        check_fits(replace(chain, increments=tuple(increments)), commit, place.key)
        _check_linked(chain.full, increments[-1] if increments else chain.full, commit, place.key)
        increments.append(commit)
    chain, last = replace(chain, increments=tuple(increments)), len(increments)
    if increment in (None, last):
        return chain
    raise SnapshotMissingError(
        f"there is no increment {increment} of snapshot {name}",
        hint=f"its newest is {last}" if last else "it has none; 0 is the full snapshot",
        details={"snapshot": name, "increment": increment},
    )


def _places(store: ObjectStore, name: str, increment: int | None) -> Iterator[CommitPlace]:
    """The increments' places from 1 on, up to `increment` or to the first that is free.

    Those that a listing shows are read several at a time: each is a request of its own.
    """
    listed = max(listed_numbers(store, name), default=0)
    number, last = 0, listed if increment is None else min(increment, listed)
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        for place in threads.map(lambda number: find_place(store, name, number), range(1, last + 1)):
            if place.commit is None:
                # A void, or gone: it is looked at again below.
                break
            number += 1
            yield place
    while increment is None or number < increment:
        number += 1
        place = _read_place(store, name, number)
        if place.commit is None:
            return
        yield place


def _check_linked(full: Commit, last: Commit, commit: Commit, key: str) -> None:
    """Raise ManifestError unless the increment was made for the full snapshot, and for the commit before it."""
    previous = commit.previous
    if commit.chain == full.chain and (
        previous is None or (previous.operation, previous.digest) == (last.operation, last.digest)
    ):
        return
    raise ManifestError(
        f"object {key}: {increment_label(commit.snapshot, commit.increment)} belongs to another chain",
        hint="somebody copied objects by hand: put back the ones that belong to it; see: snapshot check",
        details={"snapshot": commit.snapshot, "increment": commit.increment, "object": key},
    )


def snapshot_names(store: ObjectStore) -> list[str]:
    """Every snapshot that is committed, by name, its commit readable or not."""
    names = [name for name in store.list_children("snapshots") if NAME.fullmatch(name)]
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        found = list(threads.map(lambda name: _is_committed(store, name), names))
    return [name for name, is_there in zip(names, found, strict=True) if is_there]


def _is_committed(store: ObjectStore, name: str) -> bool:
    if is_deleted(store, name):
        return False
    try:
        # Most are told from a void without reading them.
        if store.size(commit_key(name, 0)) > VOID_BYTES_MAX:
            return True
        return find_place(store, name, 0).commit is not None
    except ObjectMissingError:
        return False
    except ManifestError:
        return True
