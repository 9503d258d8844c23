"""Read commits and chains from the store: whole, or only the part that continues them.

A number whose commit was voided (snapshots/operations/committing.py) gets another *turn*. Turns are read in order, and
the first that is not a void counts. A listing only finds candidates; every decision rests on a read by key.

The commit of an increment names the commits that changed definitions by their digests, and summarizes the increments
before it. Commits that are not read are not verified; `show`, `restore` and `check` read them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from msgspec import UnsetType, structs

from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.commit import Commit, CommitSummary, FullSnapshot, Increment, Void
from cutline.snapshots.records.commit_rules import check_commit, check_fits
from cutline.snapshots.records.documents import ManifestError, check_about, checking, parse_document, read_body, unseal
from cutline.snapshots.records.tombstones import check_not_deleted, is_deleted, is_known_only_full, is_only_full
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


def cut_time(commit: Commit | CommitSummary) -> datetime:
    """When the commit's cut was made; if that is not recorded, when the commit was put, which is later."""
    made_at = commit.cut_at if isinstance(commit, CommitSummary) else commit.cut.made_at
    if isinstance(made_at, str):
        return datetime.fromisoformat(made_at)
    return datetime.fromisoformat(commit.created_at) + timedelta(seconds=commit.seconds)


def safe_time(commit: Commit | CommitSummary) -> Time | None:
    """The safe time of the commit's cut; None if it is not recorded."""
    safe_at = commit.safe_at if isinstance(commit, CommitSummary) else commit.cut.safe_at
    return None if isinstance(safe_at, UnsetType) else safe_at


def chain_at(chain: Chain, moment: datetime) -> Chain:
    """The chain up to the newest cut that was made not after `moment`; raise SnapshotMissingError if there is none."""
    numbers = [commit.increment for commit in chain.commits if cut_time(commit) <= moment]
    if not numbers:
        raise SnapshotMissingError(
            f"snapshot {chain.name} has no cut that was made by {_shown(moment)}",
            hint=f"its first one was made at {_shown(cut_time(chain.full))}; for other snapshots: snapshot list",
            details={"snapshot": chain.name},
        )
    return replace(chain, increments=chain.increments[: numbers[-1]])


def next_cut_time(whole: Chain, chain: Chain) -> datetime | None:
    """When the first cut of the whole chain after `chain`, which begins it, was made; None if there is none."""
    later = whole.commits[len(chain.commits) :]
    return cut_time(later[0]) if later else None


def _shown(moment: datetime) -> str:
    return Time.of(moment.astimezone(UTC))


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
