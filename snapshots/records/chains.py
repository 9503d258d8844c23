"""Read chains from the store: whole, or only the part that continues them.

The commit of an increment names the commits that changed definitions by their digests, and summarizes the increments
before it. Commits that are not read are not verified; `show`, `restore` and `check` read them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.commit import Commit, CommitSummary, FullSnapshot, Increment
from cutline.snapshots.records.commit_rules import check_fits
from cutline.snapshots.records.commits import (
    ASKING_THREADS_MAX,
    VOID_BYTES_MAX,
    CommitPlace,
    SnapshotMissingError,
    check_name,
    commit_at,
    commit_key,
    find_place,
    increment_label,
    increments_pruned_error,
    listed_numbers,
    listed_sizes,
    read_commit,
    read_full,
    read_place,
)
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.tombstones import check_not_deleted, is_known_only_full, is_only_full
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore


class OnlyCutError(RefusedError):
    """The snapshot is a restore point, which has no rows."""


def check_has_rows(chain: Chain, hint: str) -> None:
    """Raise OnlyCutError with this hint if the snapshot is a restore point."""
    if chain.full.only_cut:
        raise OnlyCutError(
            f"snapshot {chain.name} is a restore point (--only-cut): it has a cut and no rows",
            hint=hint,
            details={"snapshot": chain.name},
        )


def read_chain(store: ObjectStore, name: str, increment: int | None = None) -> Chain:
    """Read a snapshot with its increments up to `increment` (None: all).

    Raises SnapshotDeletedError; SnapshotMissingError if a commit is missing, at the end or in between; ManifestError if
    a commit belongs to another chain. What can't be read as the mark of pruned increments hides none that is there.
    """
    check_not_deleted(store, check_name(name))
    chain = Chain(read_full(store, name))
    if is_known_only_full(store, name):
        if increment:
            raise increments_pruned_error(name)
        return chain
    chain = replace(chain, increments=tuple(_increments(store, chain, increment)))
    last = len(chain.increments)
    if increment in (None, last):
        return chain
    # If the mark can't be read, it may have been pruned.
    if is_only_full(store, name):
        raise increments_pruned_error(name)
    raise SnapshotMissingError(
        f"there is no increment {increment} of snapshot {name}",
        hint=f"its newest increment is {last}" if last else "it has no increments; 0 is the full snapshot",
        details={"snapshot": name, "increment": increment},
    )


def read_readable_part(store: ObjectStore, name: str) -> Chain:
    """Read a snapshot with its increments before the first one that is missing, damaged or of another chain.

    Raises what read_full raises.
    """
    chain, increments = Chain(read_full(store, name)), list[Increment]()
    if not is_known_only_full(store, name):
        with suppress(ManifestError, RefusedError):
            increments.extend(_increments(store, chain, None))
    return replace(chain, increments=tuple(increments))


def _increments(store: ObjectStore, chain: Chain, increment: int | None) -> Iterator[Increment]:
    """Yield the increments that follow a full snapshot, up to `increment` (None: all), each once it is verified."""
    for number, place in enumerate(_places(store, chain.name, increment), start=1):
        commit = commit_at(place, chain.name, number)
        if not isinstance(commit, Increment):
            raise RuntimeError("check_commit lets only a full snapshot have number 0")
        _check_linked(chain.full, chain.last, commit, place.key)
        check_fits(chain, commit, place.key)
        chain = replace(chain, increments=(*chain.increments, commit))
        yield commit


def read_newest_part(store: ObjectStore, name: str) -> Chain:
    """Read what continues a chain: its full snapshot, its newest increment, and those that changed definitions.

    Reads the whole chain if the newest commit has no history, or if it is in doubt which one is the newest. Raises what
    read_chain raises.
    """
    check_not_deleted(store, check_name(name))
    full = read_full(store, name)
    if is_known_only_full(store, name):
        return Chain(full)
    newest = _find_newest(store, name)
    if newest is None or newest.history is None:
        return read_chain(store, name)
    if newest.chain != full.chain:
        raise _foreign_error(newest, commit_key(name, newest.increment))
    _check_named(full, newest.history.full, newest)
    chain = Chain(full, is_partial=True)
    for number, commit in _read_increments(store, name, newest.history.redefinitions).items():
        _check_named(commit, newest.history.redefinitions[number], newest)
        chain = _continued(chain, commit)
    chain = _continued(chain, newest)
    # The next cut needs every segment beyond the last cut's position. If this commit does not have them all, others do.
    reaches_back = all(
        (segments := newest.segments[node]) and segments[0].after <= chain.position(node) for node in full.parts
    )
    return chain if reaches_back else read_chain(store, name)


def _find_newest(store: ObjectStore, name: str) -> Increment | None:
    """The newest increment that a listing shows.

    None without any, after a gap, if one is no larger than a void, or if another was committed since.
    """
    sizes = listed_sizes(store, name)
    last = max(sizes, default=0)
    if sorted(sizes) != list(range(1, last + 1)):
        return None
    place = find_place(store, name, last)
    if last > 1 and place.commit is None:
        # It was voided.
        last -= 1
        place = find_place(store, name, last)
    elif find_place(store, name, last + 1).commit is not None:
        return None
    if any(size <= VOID_BYTES_MAX for number, size in sizes.items() if number <= last):
        return None
    if place.commit is None:
        return None
    commit = commit_at(place, name, last)
    return commit if isinstance(commit, Increment) else None


def _read_increments(store: ObjectStore, name: str, numbers: Iterable[int]) -> dict[int, Increment]:
    """The increments of these numbers, in order."""
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        commits = threads.map(lambda number: read_commit(store, name, number), sorted(numbers))
        return {one.increment: one for one in commits if isinstance(one, Increment)}


def _continued(chain: Chain, commit: Increment) -> Chain:
    check_fits(chain, commit, commit_key(chain.name, commit.increment))
    return replace(chain, increments=(*chain.increments, commit))


def read_summaries(store: ObjectStore, chain: Chain) -> tuple[CommitSummary, ...]:
    """The summaries of all increments of a chain, in order; raises what read_chain raises.

    Of a partial chain, one commit in SUMMARIZED_MAX is read.
    """
    if not chain.is_partial or isinstance(chain.last, FullSnapshot):
        return tuple(map(summary_of, chain.increments))
    commit, found = chain.last, [summary_of(chain.last)]
    while commit.history is not None:
        found = [*commit.history.recent, *found]
        if (first := found[0]).increment == 1:
            return tuple(found)
        (before,) = _read_increments(store, chain.name, [first.increment]).values()
        _check_named(before, first.digest, commit)
        commit = before
    whole = read_chain(store, chain.name, commit.increment - 1)
    return (*map(summary_of, whole.increments), *found)


def _check_named(commit: Commit, digest: str, by: Increment) -> None:
    """Raise ManifestError unless the commit is the one that a later one names."""
    if commit.digest == digest:
        return
    key = commit_key(commit.snapshot, commit.increment)
    raise ManifestError(
        f"object {key} is not the commit that {increment_label(by.snapshot, by.increment)} names",
        hint="it was replaced: put the right object back from a copy of the store; see: snapshot check",
        details={"snapshot": commit.snapshot, "increment": commit.increment, "object": key},
    )


def _places(store: ObjectStore, name: str, increment: int | None) -> Iterator[CommitPlace]:
    """The places of the increments from 1 on, up to `increment` or to the first free one.

    Those that a listing shows without a gap are read in parallel, since each is one request. So the number in a name
    never decides how many are read.
    """
    numbers = [number for at, number in enumerate(listed_numbers(store, name, first=1), start=1) if number == at]
    number = 0
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        for place in threads.map(lambda number: find_place(store, name, number), numbers[:increment]):
            if place.commit is None:
                # Voided or gone: the loop below decides which.
                break
            number += 1
            yield place
    while increment is None or number < increment:
        number += 1
        place = read_place(store, name, number)
        if place.commit is None:
            return
        yield place


def _check_linked(full: Commit, last: Commit, commit: Commit, key: str) -> None:
    """Raise ManifestError unless the increment belongs to the full snapshot and follows the commit before it."""
    previous = commit.previous
    if commit.chain == full.chain and (
        previous is None or (previous.operation, previous.digest) == (last.operation, last.digest)
    ):
        return
    raise _foreign_error(commit, key)


def _foreign_error(commit: Commit, key: str) -> ManifestError:
    return ManifestError(
        f"object {key}: {increment_label(commit.snapshot, commit.increment)} belongs to another chain",
        hint="objects were copied there by hand: put the right ones back from a copy of the store; see: snapshot check",
        details={"snapshot": commit.snapshot, "increment": commit.increment, "object": key},
    )
