"""Read commits and chains from the store, proven by their digests and by the rules for commits.

A number whose commit was voided (snapshots/operations/committing.py) gets another *turn*. Turns are read in order, and
the first that is not a void counts. Listings only find candidates; every decision is based on a read by key.

An increment's commit contains the digests of the commits that changed definitions, and summarizes the increments before
it. Commits that are not read are not verified; `show`, `restore` and `check` read all commits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TypeAlias

from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.fleet.messages import NEW_CHAIN, NODES_NAMED_MAX, list_some
from cutline.fleet.record import Time, from_json
from cutline.snapshots.records.chain import Chain, RenewalGap, gaps_of, summary_of
from cutline.snapshots.records.commit import (
    ChainHistory,
    Commit,
    CommitSummary,
    FullInParts,
    FullSnapshot,
    Increment,
    Void,
)
from cutline.snapshots.records.commit_rules import check_commit, check_fits, definition_counts
from cutline.snapshots.records.documents import (
    COMPRESSED_FROM,
    NAME,
    ManifestError,
    check_about,
    checking,
    has_digest,
    parse_document,
    read_body,
    unseal,
)
from cutline.snapshots.records.end_marks import has_end
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.operation_records import read_outcome
from cutline.snapshots.records.repaired_chain import with_repairs
from cutline.snapshots.records.tombstones import (
    ANOTHER_NAME,
    SnapshotDeletedError,
    check_not_deleted,
    is_deleted,
    is_known_only_full,
    is_only_full,
)
from cutline.storage.errors import ChainEnd, RefusedError, SnapshotError, UsageError
from cutline.storage.ids import OPERATION_ID
from cutline.storage.store import ObjectMissingError, ObjectStore

INCREMENT_FILE = re.compile(r"(\d{16})(\.\d+)?\.json")
# No void is larger, but even the commit of a single node without tables is.
VOID_BYTES_MAX = 500
ASKING_THREADS_MAX = 8
# The fields of a commit that are mostly equal to those of the commit before it.
REPEATED = ("sequences", "left_out", "databases")


# The digest by which an operation that has proven a commit names it ("": none does), or a function that finds it in
# the store, given the commit's content (read_turn).
Named: TypeAlias = str | Callable[[bytes], str]
# The proof of a smaller commit takes less time than the requests that could save it: about 300 tables.
LARGE_BYTES = COMPRESSED_FROM


class SnapshotMissingError(RefusedError):
    """There is no snapshot with that name, or no increment with that number."""


class SnapshotExistsError(RefusedError):
    """Another operation has committed this snapshot or increment."""


class CommitPlace(Struct, frozen=True):
    """The location of a number's commit: the first turn not voided. `commit` is None if that turn is not taken."""

    key: str
    turn: int
    commit: Commit | None


# How `keep` names an increment.
POINT = re.compile(r"([^@]+)@(\d+)")


def check_name(name: str) -> str:
    """Return `name` if it is a valid snapshot name; raise UsageError if not."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid snapshot name",
            hint=f"only keep names increments in this way; restore, drill, check and show take --increment {point[2]}"
            if (point := POINT.fullmatch(name))
            else "use up to 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )
    return name


def commit_key(name: str, increment: int, turn: int = 1) -> str:
    """Return the key of a commit; increment 0 is the full snapshot."""
    suffix = f".{turn}.json" if turn > 1 else ".json"
    if increment == 0:
        return f"snapshots/{name}/snapshot{suffix}"
    return f"snapshots/{name}/increments/{increment:016d}{suffix}"


def find_place(store: ObjectStore, name: str, increment: int, named: Named = "") -> CommitPlace:
    """Find the commit, or the free turn after its voids; raise ManifestError if a turn can't be read.

    `named` is as in read_turn.
    """
    turn = 1
    while True:
        key = commit_key(name, increment, turn)
        try:
            turn_document = read_turn(store, key, named)
        except ObjectMissingError:
            return CommitPlace(key, turn, None)
        if not isinstance(turn_document, Void):
            return CommitPlace(key, turn, turn_document)
        # A void copied here from another commit's location would hide a commit.
        check_about(
            key, increment_label(turn_document.snapshot, turn_document.increment), increment_label(name, increment)
        )
        turn += 1


def read_turn(store: ObjectStore, key: str, named: Named = "") -> Commit | Void:
    """Read a commit, or the void in its place; raise ObjectMissingError or ManifestError.

    `named` is the digest by which a later commit, or the outcome of the create that wrote the commit, names it. The
    operation that named it has proven these bytes or written them itself, so their canonical form and rules need no
    second proof; their digest does. A function that returns the digest is called only if the commit is so large that
    the proof takes time.
    """
    content, digest = unseal(key, read_body(store, key))
    if callable(named):
        named = named(content) if len(content) >= LARGE_BYTES else ""
    is_proven = digest == named
    found: Commit | Void = parse_document(key, content, FullInParts | Increment | Void, is_proven=is_proven)
    if isinstance(found, Void):
        return found
    if not is_proven:
        with checking(key):
            check_commit(found)
    return structs.replace(found, digest=digest)


def is_stored(store: ObjectStore, key: str, named: str) -> bool:
    """Whether the store has a document at `key` with this digest; its content is not parsed."""
    try:
        return has_digest(key, read_body(store, key), named)
    except (ObjectMissingError, ManifestError):
        return False


def free_turn(store: ObjectStore, name: str, increment: int) -> int:
    """Return the turn in which the increment can be committed; raise SnapshotExistsError if it is already committed."""
    place = find_place(store, name, increment)
    if place.commit is None:
        return place.turn
    other = "choose a different name"
    if increment or not has_end(store, name, place.commit.operation):
        other = f"take its next increment: snapshot create {name} --incremental   or {other}"
    raise SnapshotExistsError(
        f"{increment_label(name, increment)} already exists",
        hint=other,
        details={"snapshot": name, "increment": increment},
    )


def operation_of(store: ObjectStore, key: str) -> str:
    """Return the operation that wrote the commit at `key`, "" for a void; raise ObjectMissingError or ManifestError."""
    turn = read_turn(store, key)
    return "" if isinstance(turn, Void) else turn.operation


def increment_label(name: str, increment: int) -> str:
    """Return the name that messages use for a snapshot or increment."""
    return f"increment {increment} of {name}" if increment else f"snapshot {name}"


def point_label(increment: int) -> str:
    """Return the name that messages about one snapshot use for its full snapshot or an increment."""
    return f"increment {increment}" if increment else "the full snapshot"


def lost_text(gap: RenewalGap) -> str:
    """Name the restore points that may hold lost transactions, and why; "" if there are none."""
    if gap.lost_since is None:
        return ""
    server = f"its server at {point_label(gap.increment)} has their WAL"
    why = f"{server} only up to {gap.lost_after}"
    if not gap.is_loss_known:
        why = f"it is not known up to where {server}"
    return f"{lost_points_text(gap.lost_since, gap.increment - 1, [gap.node])}: {why}"


def lost_points_text(first: int, last: int, nodes: Iterable[str]) -> str:
    """Name the restore points, from the `first` to the `last`, that may hold lost transactions of the primaries."""
    points = f"increments {first} to {last}" if first else f"the full snapshot to {point_label(last)}"
    points = point_label(first) if first == last else points
    return f"{points} may hold transactions of {list_some(nodes, NODES_NAMED_MAX)} that are lost"


def read_commit(store: ObjectStore, name: str, increment: int, named: Named = "") -> Commit:
    """Read one commit; raise SnapshotMissingError or ManifestError. `named` is as in read_turn."""
    place = read_place(store, name, increment, named)
    if place.commit is None:
        what = f"increment {increment} of snapshot {name}" if increment else f"snapshot {name}"
        raise SnapshotMissingError(
            f"there is no {what}",
            hint="see: snapshot list" if increment else f"{_similar_snapshots(store, name)}see: snapshot list",
            details={"snapshot": name, "increment": increment, "object": place.key},
        )
    return commit_at(place, name, increment)


def _similar_snapshots(store: ObjectStore, name: str) -> str:
    """Ask whether a snapshot with a similar name was meant; "" if there is none, or the store can't list them."""
    # Imported here, because it is only needed for a mistake.
    from difflib import get_close_matches

    with suppress(SnapshotError):
        close = get_close_matches(name, store.list_children("snapshots"))
        if similar := [one for one in close if one != name and is_committed(store, one)]:
            return f"did you mean {' or '.join(similar)}?   "
    return ""


def read_full(store: ObjectStore, name: str, named: Named = "") -> FullSnapshot:
    """Read the commit of a full snapshot; raise SnapshotMissingError or ManifestError. `named` is as in read_turn."""
    commit = read_commit(store, name, 0, named)
    if not isinstance(commit, FullSnapshot):
        raise RuntimeError("check_commit lets only a full snapshot have number 0")
    return commit


def read_place(store: ObjectStore, name: str, increment: int, named: Named = "") -> CommitPlace:
    """Find the commit; raise SnapshotMissingError if it is missing but a listing shows it or a later commit.

    `named` is as in read_turn.
    """
    place = find_place(store, name, increment, named)
    # List again, even after a listing that did not show it, because a listing may be out of date.
    if place.commit is None and increment_numbers(store, name, increment):
        # The commit may have been stored between the first read and the listing.
        place = find_place(store, name, increment, named)
        if place.commit is None:
            raise _missing_error(store, name, increment)
    return place


def _missing_error(store: ObjectStore, name: str, increment: int) -> SnapshotMissingError:
    """Return the error for a missing commit; raise SnapshotDeletedError if the snapshot is being deleted."""
    check_not_deleted(store, name)
    return (
        increments_pruned_error(name)
        if increment and is_only_full(store, name)
        else commit_missing_error(name, increment)
    )


def commit_at(place: CommitPlace, name: str, increment: int) -> Commit:
    """Return the commit at `place`; raise ManifestError if it has a different name or number."""
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
    """Return the error for a commit that is missing although later commits or an operation record prove it existed."""
    key = commit_key(name, increment)
    what = f"increment {increment} of snapshot {name}" if increment else f"the full snapshot {name}"
    return SnapshotMissingError(
        f"{what} was committed, but its commit file is missing from the store: {key}",
        hint=f"fetch it from a copy of the store: snapshot repair {name} --from URL; or {NEW_CHAIN}",
        ends_chain=ChainEnd.PERHAPS,
        details={"snapshot": name, "increment": increment, "object": key},
    )


def increments_pruned_error(name: str) -> SnapshotMissingError:
    """Return the error for reading an increment of a snapshot whose increments were pruned."""
    return SnapshotMissingError(
        _pruned_text(name), hint=f"restore the full snapshot: snapshot restore {name}", details={"snapshot": name}
    )


def chain_pruned_error(name: str) -> SnapshotMissingError:
    """Return the error for adding to a snapshot whose increments were pruned."""
    return SnapshotMissingError(
        _pruned_text(name), hint=NEW_CHAIN, ends_chain=ChainEnd.FOR_GOOD, details={"snapshot": name}
    )


def _pruned_text(name: str) -> str:
    return f"the increments of snapshot {name} were pruned; only its full snapshot remains"


def check_not_pruned(store: ObjectStore, name: str) -> None:
    """Raise SnapshotMissingError if the snapshot's increments were pruned, after which no increment can follow."""
    if is_only_full(store, name):
        raise chain_pruned_error(name)


def increment_numbers(store: ObjectStore, name: str, first: int = 0) -> list[int]:
    """Return the numbers of the committed increments that a listing shows, in order, starting at `first`."""
    numbers = listed_numbers(store, name, first)
    # Only the newest can be a void: a number is used only after the previous number has been committed.
    if numbers and find_place(store, name, numbers[-1]).commit is None:
        numbers.pop()
    return numbers


def listed_numbers(store: ObjectStore, name: str, first: int = 0) -> list[int]:
    """Return the numbers for which a listing shows a commit or a void, in order, starting at `first`."""
    matches = map(INCREMENT_FILE.fullmatch, store.list_children(f"snapshots/{name}/increments"))
    return sorted({int(match[1]) for match in matches if match and int(match[1]) >= first})


def commit_sizes(store: ObjectStore, name: str, first: int) -> dict[int, int]:
    """For every listed number from `first` up, return the bytes in its largest turn: the commit, unless it is voided.

    `first` is at least 1.
    """
    folder, found = f"snapshots/{name}/increments", dict[int, int]()
    # "/" sorts between "." and the digits, so between the commits of one number and those of the next.
    for listed in store.inventory(folder, f"{folder}/{first - 1:016d}/"):
        match = INCREMENT_FILE.fullmatch(listed.key.rpartition("/")[2])
        if match and (number := int(match[1])) >= first:
            found[number] = max(found.get(number, 0), listed.size)
    return found


def snapshot_names(store: ObjectStore) -> list[str]:
    """Return the names of all committed snapshots, whether or not their commits can be read."""
    names = [name for name in store.list_children("snapshots") if NAME.fullmatch(name)]
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        committed = list(threads.map(lambda name: is_committed(store, name), names))
    return [name for name, has_commit in zip(names, committed, strict=True) if has_commit]


def is_committed(store: ObjectStore, name: str) -> bool:
    """Whether the snapshot is committed and not deleted; True if its commit or tombstone can't be read."""
    try:
        if is_deleted(store, name):
            return False
        # Most commits are larger than any void.
        if store.size(commit_key(name, 0)) > VOID_BYTES_MAX:
            return True
        return find_place(store, name, 0).commit is not None
    except ObjectMissingError:
        return False
    except ManifestError:
        return True


def cut_time(commit: Commit | CommitSummary) -> datetime:
    """Return the time of the commit's cut."""
    return datetime.fromisoformat(commit.cut_at if isinstance(commit, CommitSummary) else commit.cut.made_at)


def safe_time(commit: Commit | CommitSummary) -> Time:
    """Return the safe time of the commit's cut."""
    return commit.safe_at if isinstance(commit, CommitSummary) else commit.cut.safe_at


def chain_at(chain: Chain, moment: datetime) -> Chain:
    """Return the chain up to the newest cut at or before `moment`; raise SnapshotMissingError if there is none."""
    numbers = [commit.increment for commit in chain.commits if cut_time(commit) <= moment]
    if not numbers:
        raise SnapshotMissingError(
            f"snapshot {chain.name} has no cut at or before {_shown(moment)}",
            hint=f"its first cut was made at {_shown(cut_time(chain.full))}; for other snapshots: snapshot list",
            details={"snapshot": chain.name},
        )
    return chain.up_to(numbers[-1])


def next_cut_time(whole: Chain, chain: Chain) -> datetime | None:
    """Return the time of the first cut in `whole` after `chain`, which is its beginning; None if there is none."""
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
            f"snapshot {chain.name} is a restore point (--only-cut): it has a cut but no rows",
            hint=hint,
            details={"snapshot": chain.name},
        )


def read_chain(store: ObjectStore, name: str, increment: int | None = None) -> Chain:
    """Read a snapshot with its increments up to `increment` (None: all), and apply its repairs.

    Raises SnapshotDeletedError; SnapshotMissingError if a commit is missing, whether at the end or in the middle;
    ManifestError if a commit belongs to another chain, or a repair can't be trusted. If the mark of pruned increments
    is unreadable, no increments are hidden.
    """
    return with_repairs(store, read_as_committed(store, name, increment))


def read_as_committed(store: ObjectStore, name: str, increment: int | None = None) -> Chain:
    """Read a snapshot like read_chain, without applying its repairs."""
    check_not_deleted(store, check_name(name))
    full = read_full(store, name)
    if increment == 0:
        return Chain(full)
    if not is_known_only_full(store, name):
        return _read_whole(store, full, increment)
    if increment:
        raise increments_pruned_error(name)
    return Chain(full)


def _read_whole(store: ObjectStore, full: FullSnapshot, increment: int | None = None) -> Chain:
    """Read the increments that follow `full`, up to `increment` (None: all); raise the errors of read_chain."""
    name, chain = full.snapshot, Chain(full)
    chain = replace(chain, increments=tuple(read_following(store, chain, increment)))
    last = len(chain.increments)
    if increment in (None, last):
        return chain
    # This raises ManifestError if the mark can't be read: the increment may have been pruned.
    if is_only_full(store, name):
        raise increments_pruned_error(name)
    raise SnapshotMissingError(
        f"snapshot {name} has no increment {increment}",
        hint=f"its newest increment is {last}" if last else "it has no increments; 0 is the full snapshot",
        details={"snapshot": name, "increment": increment},
    )


def read_readable_part(store: ObjectStore, name: str) -> Chain:
    """Read a snapshot and all increments before the first that is missing, damaged or part of another chain.

    Raises the errors of read_full.
    """
    chain, increments = Chain(read_full(store, name)), list[Increment]()
    if not is_known_only_full(store, name):
        with suppress(ManifestError, RefusedError):
            increments.extend(read_following(store, chain, None))
    return replace(chain, increments=tuple(increments))


def read_following(store: ObjectStore, chain: Chain, increment: int | None) -> Iterator[Increment]:
    """Yield the increments that follow a chain, up to `increment` (None: all), each after verifying it.

    Raises the errors of read_chain.
    """
    groups = definition_counts(chain)["groups"]
    first = chain.last.increment + 1
    for number, place in enumerate(_places(store, chain.name, increment, first), start=first):
        commit = commit_at(place, chain.name, number)
        if not isinstance(commit, Increment):
            raise RuntimeError("check_commit lets only a full snapshot have number 0")
        _check_linked(chain.full, chain.last, commit, place.key)
        check_fits(chain, commit, place.key, groups)
        commit = _sharing(chain, commit)
        chain = chain.followed_by(commit)
        groups = definition_counts(chain)["groups"] if commit.definition_changes else groups
        yield commit


def _sharing(chain: Chain, commit: Increment) -> Increment:
    """Return the commit that follows the chain, with the chain's own objects in place of equal ones.

    Every commit repeats up to 64 summaries, the sequences and facts about the databases, and the names of the nodes.
    """
    names, last = {node: node for node in (*chain.parts, *commit.renewed)}, chain.last
    same = {name: getattr(last, name) for name in REPEATED if getattr(commit, name) == getattr(last, name)}
    segments = {
        names[node]: tuple(
            structs.replace(segment, node=names[node], operation=commit.operation)
            if segment.operation == commit.operation
            else segment
            for segment in listed
        )
        for node, listed in commit.segments.items()
    }
    history = commit.history if commit.history is None else chain.next_history
    return structs.replace(commit, history=history, segments=segments, **same)


def read_newest_part(store: ObjectStore, name: str) -> Chain:
    """Read only the commits needed to continue a chain: full snapshot, newest increment, and definition changes.

    Reads the whole chain if the newest commit has no history, or if it is unclear which commit is the newest. Raises
    the errors of read_chain.
    """
    check_not_deleted(store, check_name(name))
    full = read_full(store, name)
    return with_repairs(store, Chain(full) if is_known_only_full(store, name) else _read_newest_part(store, full))


def read_lost_since(store: ObjectStore, chain: Chain) -> tuple[RenewalGap, ...]:
    """Return the gaps after a chain's last increment that name it among those that may hold lost transactions.

    Returns none if later commits can't be read: they matter to no restore of this increment.
    """
    last = chain.last.increment
    if is_known_only_full(store, chain.name):
        return ()
    try:
        newest = _read_newest_part(store, chain.stored_full)
    except (ManifestError, RefusedError):
        return ()
    gaps = (gap for one in newest.increments if one.increment > last for gap in gaps_of(one))
    return tuple(gap for gap in gaps if gap.lost_since is not None and gap.lost_since <= last)


def read_continued_full(store: ObjectStore, name: str) -> FullSnapshot:
    """Read the commit of the full snapshot of a chain that is to be continued, without repairs.

    If it is large, and the newest increment or the outcome of its own create names it by its digest, its rules and
    canonical form are not proven again (read_turn): with thousands of tables, that takes longer than all other checks.
    Raises the errors of read_full and check_not_deleted.
    """

    def find_named(content: bytes) -> str:
        newest = None
        # read_continued reports damage to the newest increment.
        with suppress(ManifestError):
            newest = _find_newest(store, name)
        if newest and newest.history:
            return newest.history.full
        return _named_by_create(store, commit_key(name, 0), content)

    check_not_deleted(store, check_name(name), ANOTHER_NAME)
    return read_full(store, name, find_named)


class _Writer(Struct):
    """The field of a commit that names the operation that wrote it."""

    operation: str


def _named_by_create(store: ObjectStore, key: str, content: bytes) -> str:
    """Return the digest in the outcome of the create that wrote this commit; "" if there is none."""
    # Without a digest, the commit is proven, which reports damage to the content.
    with suppress(ManifestError):
        with checking(key):
            operation = from_json(content, _Writer).operation
        outcome = read_outcome(store, operation) if OPERATION_ID.fullmatch(operation) else None
        if outcome is not None and isinstance(outcome.commit_digest, str):
            return outcome.commit_digest
    return ""


@contextmanager
def naming_contradictions(store: ObjectStore, name: str) -> Iterator[None]:
    """Raise ManifestError if the block fails over a commit that contradicts itself or others.

    `read_continued` doesn't prove the commits that the newest increment names, nor a full snapshot that the outcome of
    its create names. Whoever can write to the store can exchange all of them, and their digests.
    """
    try:
        yield
    except (LookupError, ValueError):
        read_newest_part(store, name)
        raise


def read_continued(store: ObjectStore, name: str, full: FullSnapshot | None = None) -> Chain:
    """Read the part of a chain that the next increment continues.

    Pass the commit of the full snapshot as `full` if read_continued_full has returned it: it never changes. Commits
    that the newest increment names are not proven again, except for their digests. Raises the errors of
    read_newest_part and check_not_pruned.
    """
    check_not_deleted(store, check_name(name), ANOTHER_NAME)
    check_not_pruned(store, name)
    full = full or read_continued_full(store, name)
    return with_repairs(store, _read_newest_part(store, full, is_continued=True))


def read_all_shards(store: ObjectStore, name: str) -> tuple[str, ...]:
    """Return all shards that the snapshot has at any increment that can be read; raise the errors of read_full."""
    try:
        chain = read_newest_part(store, name)
    except (ManifestError, SnapshotMissingError):
        chain = read_readable_part(store, name)
    joined = (node for one in chain.increments for node, new in one.renewed.items() if new.identity.backup_of is None)
    return tuple(dict.fromkeys((*chain.full.primaries, *joined)))


def read_renamed(store: ObjectStore, name: str) -> Mapping[str, str]:
    """Return the ids in fleet.toml of the nodes that the snapshot knows by others; none if it can't be read."""
    with suppress(ManifestError, SnapshotMissingError, SnapshotDeletedError):
        return read_newest_part(store, name).renamed
    with suppress(ManifestError, SnapshotMissingError, SnapshotDeletedError):
        return read_readable_part(store, name).renamed
    return {}


def read_part_at(store: ObjectStore, name: str, increment: int) -> Chain:
    """Read a chain up to an increment, without its repairs: only the commits with which its definitions are known.

    Reads the whole chain up to the increment if its commit has no history. Raises the errors of read_chain.
    """
    check_not_deleted(store, check_name(name))
    full, commit = read_full(store, name), read_commit(store, name, increment)
    if not isinstance(commit, Increment) or commit.history is None:
        return read_as_committed(store, name, increment)
    return _read_part(store, full, commit, commit.history)


def _read_newest_part(store: ObjectStore, full: FullSnapshot, *, is_continued: bool = False) -> Chain:
    """Read the newest part of the chain; `is_continued` is as in read_continued: named commits are not proven again."""
    newest = _find_newest(store, full.snapshot)
    if newest is None or newest.history is None:
        return _read_whole(store, full)
    chain = _read_part(store, full, newest, newest.history, is_continued=is_continued)
    # The next cut needs every segment beyond the last cut's position. Earlier commits may list some of them.
    reaches_back = all(
        (segments := chain.newest_segments(node)) and segments[0].after <= chain.position(node) for node in chain.parts
    )
    return chain if reaches_back else _read_whole(store, full)


def _read_part(
    store: ObjectStore, full: FullSnapshot, newest: Increment, history: ChainHistory, *, is_continued: bool = False
) -> Chain:
    """Return the partial chain that ends with `newest`; `is_continued` is as in read_continued."""
    name = full.snapshot
    if newest.chain != full.chain:
        raise _foreign_error(newest, commit_key(name, newest.increment))
    _check_named(full, history.full, newest)
    chain = Chain(full, is_partial=True)
    redefinitions = history.redefinitions
    for number, commit in _read_increments(store, name, redefinitions, are_proven=is_continued).items():
        _check_named(commit, redefinitions[number], newest)
        chain = chain.followed_by(commit) if is_continued else _continued(chain, commit)
    return _continued(chain, newest)


def _find_newest(store: ObjectStore, name: str) -> Increment | None:
    """Return the newest increment in a listing.

    Returns None if there is none, if the listing has a gap, if a commit is no larger than a void, or if an increment
    was committed since the listing.
    """
    # What was given up is not listed: a chain that is merged again and again would have more and more of it.
    first = max(first_increment(store, name), 1)
    sizes = commit_sizes(store, name, first)
    last = max(sizes, default=0)
    if not last or sorted(sizes) != list(range(first, last + 1)):
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


def _read_increments(
    store: ObjectStore, name: str, digests: Mapping[int, str], *, are_proven: bool = False
) -> dict[int, Increment]:
    """Read the increments that a commit names by `digests`; the caller compares these.

    If they `are_proven`, the operation that wrote that commit has proven them (read_turn).
    """

    def read(number: int) -> Commit:
        return read_commit(store, name, number, digests[number] if are_proven else "")

    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        commits = threads.map(read, sorted(digests))
        return {commit.increment: commit for commit in commits if isinstance(commit, Increment)}


def _continued(chain: Chain, commit: Increment) -> Chain:
    check_fits(chain, commit, commit_key(chain.name, commit.increment))
    return chain.followed_by(commit)


def read_summaries(store: ObjectStore, chain: Chain) -> tuple[CommitSummary, ...]:
    """Return the summaries of all increments in a chain, in order; raise the errors of read_chain.

    If the chain begins with a merge, these are the merge's increment and those after it. For a partial chain, this
    reads only one in SUMMARIZED_MAX commits.
    """
    if chain.beginning is not None:
        return tuple(map(summary_of, (chain.beginning.commit, *chain.increments)))
    if not chain.is_partial or isinstance(chain.last, FullSnapshot):
        return tuple(map(summary_of, chain.increments))
    commit, summaries = chain.last, [summary_of(chain.last)]
    while commit.history is not None:
        summaries = [*commit.history.recent, *summaries]
        if (first := summaries[0]).increment == 1:
            return tuple(summaries)
        (before,) = _read_increments(store, chain.name, {first.increment: first.digest}).values()
        _check_named(before, first.digest, commit)
        commit = before
    whole = read_chain(store, chain.name, commit.increment - 1)
    return (*map(summary_of, whole.increments), *summaries)


def _check_named(commit: Commit, digest: str, by: Increment) -> None:
    """Raise ManifestError unless a later commit names this commit by its digest."""
    if commit.digest == digest:
        return
    key = commit_key(commit.snapshot, commit.increment)
    raise ManifestError(
        f"object {key} is not the commit that {increment_label(by.snapshot, by.increment)} names",
        hint="it was replaced: put the right object back from a copy of the store; see: snapshot check",
        details={"snapshot": commit.snapshot, "increment": commit.increment, "object": key},
    )


def _places(store: ObjectStore, name: str, increment: int | None, first: int = 1) -> Iterator[CommitPlace]:
    """Yield the locations of the increments, starting at `first`, up to `increment` or to the first that is not taken.

    Increments that a listing shows are read in parallel, up to the first gap, since each takes a request. A stray
    object with a high number therefore causes no extra reads.
    """
    listed = enumerate(listed_numbers(store, name, first), start=first)
    numbers = [number for at, number in listed if number == at and (increment is None or number <= increment)]
    number = first - 1
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        for place in threads.map(lambda number: find_place(store, name, number), numbers):
            if place.commit is None:
                # The commit is voided or gone: the loop below determines which.
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
        hint="objects were copied by hand: put the right objects back from a copy of the store; see: snapshot check",
        details={"snapshot": commit.snapshot, "increment": commit.increment, "object": key},
    )
