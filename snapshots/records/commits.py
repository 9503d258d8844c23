"""Commits in the store: their keys, and reading them.

A number whose commit was voided (snapshots/operations/deciding.py) gets another *turn*. Turns are read in order, and
the first that is not a void counts. A listing only finds candidates; every decision rests on a read by key.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msgspec import structs

from cutline.fleet.hints import NEW_CHAIN
from cutline.snapshots.records.commit import Commit, FullSnapshot, Increment, Void
from cutline.snapshots.records.commit_rules import check_commit
from cutline.snapshots.records.documents import ManifestError, check_about, checking, parse_document, read_body, unseal
from cutline.snapshots.records.tombstones import check_not_deleted, is_deleted, is_only_full
from cutline.storage.errors import ChainEnd, RefusedError, UsageError
from cutline.storage.store import ObjectMissingError, ObjectStore

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
INCREMENT_FILE = re.compile(r"(\d{16})(\.\d+)?\.json")
# Even the commit of one node without a table is larger.
VOID_BYTES_MAX = 500
ASKING_THREADS_MAX = 8


class SnapshotMissingError(RefusedError):
    """There is no snapshot of that name, or no increment of that number."""


class SnapshotExistsError(RefusedError):
    """Another operation has committed this snapshot or increment."""


@dataclass(frozen=True, slots=True)
class CommitPlace:
    """Where the commit of a number is or would be: its first turn without a void. `commit` is None if it is free."""

    key: str
    turn: int
    commit: Commit | None


def check_name(name: str) -> str:
    """Return `name` if it is a valid snapshot name; raise UsageError if not."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid snapshot name",
            hint="use up to 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )
    return name


def commit_key(name: str, increment: int, turn: int = 1) -> str:
    """The key of a commit; increment 0 is the full snapshot."""
    suffix = f".{turn}.json" if turn > 1 else ".json"
    if increment == 0:
        return f"snapshots/{name}/snapshot{suffix}"
    return f"snapshots/{name}/increments/{increment:016d}{suffix}"


def find_place(store: ObjectStore, name: str, increment: int) -> CommitPlace:
    """Find the commit, or the free turn after its voids; raise ManifestError if a turn can't be read."""
    turn = 1
    while True:
        key = commit_key(name, increment, turn)
        try:
            found = read_turn(store, key)
        except ObjectMissingError:
            return CommitPlace(key, turn, None)
        if not isinstance(found, Void):
            return CommitPlace(key, turn, found)
        # A void copied here from another commit's place would hide a commit.
        check_about(key, increment_label(found.snapshot, found.increment), increment_label(name, increment))
        turn += 1


def read_turn(store: ObjectStore, key: str) -> Commit | Void:
    """Read a commit, or the void in its place; raise ObjectMissingError, ManifestError."""
    content, digest = unseal(key, read_body(store, key))
    found: Commit | Void = parse_document(key, content, FullSnapshot | Increment | Void)
    if isinstance(found, Void):
        return found
    with checking(key):
        check_commit(found)
    return structs.replace(found, digest=digest)


def free_turn(store: ObjectStore, name: str, increment: int) -> int:
    """The turn in which the number can be committed; raise SnapshotExistsError if it is committed already."""
    place = find_place(store, name, increment)
    if place.commit is None:
        return place.turn
    raise SnapshotExistsError(
        f"{increment_label(name, increment)} exists already",
        hint=f"take its next increment: snapshot create {name} --incremental   or choose another name",
        details={"snapshot": name, "increment": increment},
    )


def operation_of(store: ObjectStore, key: str) -> str:
    """The operation that wrote the commit at `key`, "" for a void; raise ObjectMissingError, ManifestError."""
    found = read_turn(store, key)
    return "" if isinstance(found, Void) else found.operation


def increment_label(name: str, increment: int) -> str:
    """How messages name a snapshot or increment."""
    return f"increment {increment} of {name}" if increment else f"snapshot {name}"


def read_commit(store: ObjectStore, name: str, increment: int) -> Commit:
    """Read one commit; raise SnapshotMissingError or ManifestError."""
    place = read_place(store, name, increment)
    if place.commit is None:
        what = f"increment {increment} of snapshot {name}" if increment else f"snapshot {name}"
        raise SnapshotMissingError(
            f"there is no {what}",
            hint="see: snapshot list",
            details={"snapshot": name, "increment": increment, "object": place.key},
        )
    return commit_at(place, name, increment)


def read_full(store: ObjectStore, name: str) -> FullSnapshot:
    """Read the commit of a full snapshot; raise SnapshotMissingError or ManifestError."""
    commit = read_commit(store, name, 0)
    if not isinstance(commit, FullSnapshot):
        raise RuntimeError("check_commit lets only a full snapshot have number 0")
    return commit


def read_place(store: ObjectStore, name: str, increment: int) -> CommitPlace:
    """Find the commit; raise SnapshotMissingError if it is gone although a listing shows it or a later one."""
    place = find_place(store, name, increment)
    if place.commit is None and max(increment_numbers(store, name), default=-1) >= increment:
        # It may have been committed between that read and the listing.
        place = find_place(store, name, increment)
        if place.commit is None:
            raise _missing_error(store, name, increment)
    return place


def _missing_error(store: ObjectStore, name: str, increment: int) -> SnapshotMissingError:
    """The error for a commit that is gone; raise SnapshotDeletedError if the snapshot is being deleted."""
    check_not_deleted(store, name)
    return (
        increments_pruned_error(name)
        if increment and is_only_full(store, name)
        else commit_missing_error(name, increment)
    )


def commit_at(place: CommitPlace, name: str, increment: int) -> Commit:
    """The commit in that place; raise ManifestError if it is that of another."""
    commit = place.commit
    if commit is None:
        raise RuntimeError(f"there is no commit at {place.key}")
    if (commit.snapshot, commit.increment) != (name, increment):
        raise ManifestError(
            f"object {place.key} is the commit of {increment_label(commit.snapshot, commit.increment)}",
            hint="it was copied there by hand: put the right object back from a copy of the store; see: snapshot check",
            details={"object": place.key},
        )
    return commit


def commit_missing_error(name: str, increment: int) -> SnapshotMissingError:
    """The error for a commit that is gone: later commits, or an operation's record, prove that it existed."""
    key = commit_key(name, increment)
    what = f"increment {increment} of snapshot {name}" if increment else f"the full snapshot {name}"
    return SnapshotMissingError(
        f"{what} was committed, but its commit file is gone from the store: {key}",
        hint=f"put it back from a copy of the store, or {NEW_CHAIN}",
        ends_chain=ChainEnd.PERHAPS,
        details={"snapshot": name, "increment": increment, "object": key},
    )


def increments_pruned_error(name: str) -> SnapshotMissingError:
    """The error for who reads a snapshot whose increments were pruned."""
    return SnapshotMissingError(
        _pruned_text(name), hint=f"restore the full snapshot: snapshot restore {name}", details={"snapshot": name}
    )


def chain_pruned_error(name: str) -> SnapshotMissingError:
    """The error for who adds to a snapshot whose increments were pruned."""
    return SnapshotMissingError(
        _pruned_text(name), hint=NEW_CHAIN, ends_chain=ChainEnd.FOR_GOOD, details={"snapshot": name}
    )


def _pruned_text(name: str) -> str:
    return f"the increments of snapshot {name} were pruned; only its full snapshot remains"


def check_not_pruned(store: ObjectStore, name: str) -> None:
    """Raise SnapshotMissingError if the snapshot's increments were pruned: no further one can follow."""
    if is_only_full(store, name):
        raise chain_pruned_error(name)


def increment_numbers(store: ObjectStore, name: str) -> list[int]:
    """The numbers of the committed increments that a listing shows, in order."""
    numbers = listed_numbers(store, name)
    # Only the newest can be a void: the next number begins only after this one is committed.
    if numbers and find_place(store, name, numbers[-1]).commit is None:
        numbers.pop()
    return numbers


def listed_numbers(store: ObjectStore, name: str, first: int = 0) -> list[int]:
    """The numbers from `first` on for which a listing shows a commit or a void, in order."""
    matches = map(INCREMENT_FILE.fullmatch, store.list_children(f"snapshots/{name}/increments"))
    return sorted({int(match[1]) for match in matches if match and int(match[1]) >= first})


def listed_sizes(store: ObjectStore, name: str) -> dict[int, int]:
    """For the numbers from 1 on that a listing shows, the bytes of the largest: of a commit, if it is not voided."""
    found: dict[int, int] = {}
    for one in store.inventory(f"snapshots/{name}/increments"):
        match = INCREMENT_FILE.fullmatch(one.key.rpartition("/")[2])
        if match and (number := int(match[1])):
            found[number] = max(found.get(number, 0), one.size)
    return found


def snapshot_names(store: ObjectStore) -> list[str]:
    """The names of all committed snapshots, whether or not their commits can be read."""
    names = [name for name in store.list_children("snapshots") if NAME.fullmatch(name)]
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        committed = list(threads.map(lambda name: is_committed(store, name), names))
    return [name for name, has_commit in zip(names, committed, strict=True) if has_commit]


def is_committed(store: ObjectStore, name: str) -> bool:
    """Whether the snapshot is committed and not deleted; also if its commit or its tombstone can't be read."""
    try:
        if is_deleted(store, name):
            return False
        # The size alone tells most commits from a void.
        if store.size(commit_key(name, 0)) > VOID_BYTES_MAX:
            return True
        return find_place(store, name, 0).commit is not None
    except ObjectMissingError:
        return False
    except ManifestError:
        return True
