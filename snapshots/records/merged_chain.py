"""Read chains that begin with a merge.

Such a chain has the definitions, DDL, roles and facts of the merge's increment, which the commits of the full snapshot,
of the increments that changed definitions or DDL, and of the increment itself have. No other earlier commit is read.
The digests in the increment's history prove that these commits are the right ones.

A chain up to an increment begins with the newest merge at or before it. Earlier increments are folded as before, from
the objects of the earlier commits, until the chain begins with a merge for good (merge_records.Begin).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.record import Time
from cutline.nodes.groups import Group
from cutline.snapshots.records.chain import Chain, MergedBeginning
from cutline.snapshots.records.commit import (
    DDL,
    GLOBALS,
    LARGE_OBJECTS,
    FullSnapshot,
    Increment,
    NamedObject,
    split_entries,
)
from cutline.snapshots.records.commit_rules import check_objects
from cutline.snapshots.records.documents import checking
from cutline.snapshots.records.merge_records import (
    Merge,
    MergedCopy,
    begin_key,
    first_increment,
    merge_key,
    newest_merge,
)
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    check_name,
    cut_time,
    point_label,
    read_chain,
    read_following,
    read_part_at,
)
from cutline.snapshots.records.repaired_chain import with_repairs
from cutline.snapshots.records.tombstones import check_not_deleted, is_known_only_full
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment, check_contiguous


def read_from_merge(store: ObjectStore, name: str, increment: int | None = None, merge_max: int | None = None) -> Chain:
    """Read a chain up to `increment` (None: the newest) as read_chain does, from the newest merge on, if there is one.

    Merges after increment `merge_max`, which is at most `increment`, are not used. Raises the errors of read_chain, and
    MergedAwayError if the chain begins after `increment` for good.
    """
    check_not_deleted(store, check_name(name))
    newest = increment if merge_max is None else merge_max
    if increment == 0 or is_known_only_full(store, name):
        check_kept(store, name, increment or 0)
        return read_chain(store, name, increment)
    if newest is not None:
        # Earlier merges are still there, but not their objects.
        check_kept(store, name, newest)
    merge = newest_merge(store, name, newest)
    if merge is None:
        return read_chain(store, name, increment)
    chain = begin_with(read_part_at(store, name, merge.increment), merge)
    chain = replace(chain, increments=tuple(read_following(store, chain, increment)))
    if increment is not None and chain.last.increment < increment:
        # Its errors say which increments there are.
        return read_chain(store, name, increment)
    return with_repairs(store, chain)


class MergedAwayError(SnapshotMissingError):
    """The increment is before the beginning of the chain: only a merge at a later increment remains."""


def before_beginning_error(chain: Chain, moment: datetime, error: MergedAwayError) -> MergedAwayError:
    """Return the error for a time before the cut with which a merged chain begins for good."""
    at, first = (Time.of(time.astimezone(UTC)) for time in (moment, cut_time(chain.full)))
    return MergedAwayError(
        f"snapshot {chain.name} has no cut at or before {at} any more: what lay before increment"
        f" {chain.full.increment} was given up",
        hint=f"its first cut was made at {first}; for other snapshots: snapshot list",
        details=error.details,
    )


def check_kept(store: ObjectStore, name: str, increment: int) -> None:
    """Raise MergedAwayError if the chain begins after `increment` for good."""
    first = first_increment(store, name)
    if increment < first:
        raise MergedAwayError(
            f"{point_label(increment)} of {name} was given up: the chain begins at increment {first}",
            hint=f"restore increment {first} or a later one: snapshot list",
            details={"snapshot": name, "increment": increment, "first": first, "object": begin_key(name, first)},
        )


def begin_with(part: Chain, merge: Merge) -> Chain:
    """Return the chain that begins with the merge; `part` ends at its increment. Raises ManifestError."""
    commit = part.last
    if not isinstance(commit, Increment):
        raise RuntimeError("a merge is at an increment")
    with checking(merge_key(merge.snapshot, merge.increment)):
        return _begin_with(part, commit, merge)


def _begin_with(part: Chain, commit: Increment, merge: Merge) -> Chain:
    original = part.full
    if (merge.snapshot, merge.increment, merge.chain) != (commit.snapshot, commit.increment, commit.chain):
        raise ValueError("it belongs to another chain or increment")
    if (merge.commit, merge.full) != (commit.digest, original.digest):
        raise ValueError("it names other commits of the full snapshot or of its increment")
    if merge.copies.keys() != part.parts.keys():
        raise ValueError("it does not have the nodes of its increment")
    for node, copy in merge.copies.items():
        _check_copy(part, node, copy)
        check_segments_of(part, node, merge.segments[node], copy)
    shards = part.primaries
    groups = {shard: part.groups(shard) for shard in shards}
    numbers = {shard: {group.number for group in groups[shard]} for shard in shards}
    ended: dict[str, tuple[Group, ...]] = {
        shard: tuple(group for number, group in part.definitions(shard).items() if number not in numbers[shard])
        for shard in shards
    }
    objects, lists = split_entries([*merge.entries, *_entries_to_keep(part)])
    for entry in merge.entries:
        shard = part.shard_of(entry.node)
        if not entry.rows.keys() <= part.definitions(shard).keys():
            raise ValueError(f"object {entry.key} contains rows of an unknown group")
    if merge.counts != merge.counts | count_base(merge, part):
        raise ValueError("counts does not match the objects that it lists")
    full = FullSnapshot(
        **{name: getattr(commit, name) for name in KEPT},
        previous=None,
        segments=merge.segments,
        definition_changes=None,
        fleet_id=original.fleet_id,
        global_id_form=original.global_id_form,
        baseline=part.nodes,
        groups=groups,
        base={node: copy.base for node, copy in merge.copies.items()},
        copied=objects,
        roles={shard: part.roles(shard) for shard in shards},
        rules=original.rules,
        tables={shard: tuple(part.tables(shard).values()) for shard in shards},
        fingerprints={
            shard: part.fingerprint(shard)
            for shard in shards
            if shard in original.fingerprints or shard not in original.groups
        },
        lists=lists,
    )
    check_objects(full, allows_any_operation=True)
    nodes = list(part.parts)
    beginning = MergedBeginning(
        merge,
        commit,
        original,
        {node: part.archive(node) for node in nodes},
        {node: part.slot_position(node) for node in nodes},
        ended,
        {shard: part.successions(shard) for shard in shards},
        {node: part.copy_positions(node) for node in nodes},
        {shard: part.tables_read_once(shard) for shard in shards},
        {node: _pending_at_copies(part, node, merge.copies[node]) for node in nodes},
    )
    return Chain(full, beginning=beginning)


def _pending_at_copies(part: Chain, node: str, copy: MergedCopy) -> dict[int, frozenset[Lsn]]:
    """Return `part.pending_at_copies` without the transactions that the base has."""
    found = part.pending_at_copies(node)
    if node in part.last.absent:
        return found
    left = {number: pending.intersection(copy.pending) for number, pending in found.items()}
    return {number: pending for number, pending in left.items() if pending}


def count_base(merge: Merge, chain: Chain) -> dict[str, int]:
    """Count the rows on primaries, and all objects and bytes, of the base that a merge lists."""
    primaries = set(chain.primaries)
    return {
        "rows": sum(sum(entry.rows.values()) for entry in merge.entries if entry.node in primaries),
        "objects": sum(len(one.parts) for one in merge.objects) + sum(one.parts for one in merge.lists),
        "bytes": sum(one.stored_bytes for one in merge.objects) + sum(one.bytes for one in merge.lists),
    }


# The fields in which the beginning of a chain has the values of the increment's commit.
KEPT = (
    "snapshot",
    "increment",
    "operation",
    "chain",
    "created_at",
    "seconds",
    "comment",
    "counts",
    "cut",
    "sequences",
    "idle",
    "absent",
    "copying",
    "timelines",
    "switches",
    "renamed",
    "left_out",
    "terminal",
    "databases",
    "extension_rows",
    "digest",
)


def _entries_to_keep(part: Chain) -> Iterator[NamedObject]:
    """Yield the entries other than rows of tables with which the chain begins: DDL, globals and large objects."""
    for shard in part.primaries:
        for stored in (part.ddl_object(shard), part.globals_object(shard)):
            if stored is not None:
                yield stored
    yield from (entry for entry in part.full.entries if entry.kind == LARGE_OBJECTS and entry.node in part.parts)


def is_kept(entry: NamedObject | Segment) -> bool:
    """Whether later commits may refer to the object although it is neither rows of a table nor a segment."""
    return not isinstance(entry, Segment) and entry.kind in (DDL, GLOBALS, LARGE_OBJECTS)


def _check_copy(part: Chain, node: str, copy: MergedCopy) -> None:
    """Raise ValueError unless the positions of the copy are those of the cut, or the copy is carried as it is."""
    if node in part.last.absent:
        if copy.pending and not copy.counted_from:
            raise ValueError(f"copies.{node}: all of its changes count, but pending is set")
        return
    expected = merged_copy(part, node)
    if structs.replace(copy, pending=()) != structs.replace(expected, pending=()):
        raise ValueError(f"copies.{node}: its positions are not those of the cut")
    if set(copy.pending) != set(expected.pending):
        raise ValueError(f"copies.{node}: pending does not name the transactions that are undecided at the cut")


def merged_copy(part: Chain, node: str) -> MergedCopy:
    """Return how changes continue the base of a node whose copy reaches the last cut of `part`."""
    cut = part.last.cut.of(part.shard_of(node))
    pending = tuple(sorted(entry.lsn for entry in cut.undecided if entry.lsn < cut.position))
    return MergedCopy(base=cut.position, counted_from=cut.position, pending=pending)


def needed_segments(
    segments: tuple[Segment, ...], copy: MergedCopy, in_doubt: Iterable[Lsn] = ()
) -> tuple[Segment, ...]:
    """Return the last of a node's segments, from the first that a chain that begins with `copy` still needs.

    These contain the changes that still count, and the PREPAREs of transactions that are `in_doubt`. The last segment
    is always among them, because the next one has to follow it. They begin with no transaction's end alone: the end of
    a transaction counts its changes, which `check` compares.
    """
    if not copy.counted_from:
        return segments
    wanted = [*copy.pending, *in_doubt]
    first = next(
        (
            number
            for number, segment in enumerate(segments)
            if segment.reaches(copy.counted_from) or any(map(segment.contains, wanted))
        ),
        len(segments) - 1,
    )
    while first > 0 and segments[first - 1].open is not None:
        first -= 1
    return segments[max(first, 0) :]


def check_segments_of(part: Chain, node: str, segments: tuple[Segment, ...], copy: MergedCopy) -> None:
    """Raise ValueError unless the segments end as the node's archive does, and contain what still counts."""
    listed = part.last.segments[node]
    last = listed[-1] if listed else part.last.end_of_archive(node)
    if last is None and not segments:
        return
    if last is None or not segments:
        raise ValueError(f"archived.{node} and the increment disagree about whether the archive has segments")
    if (segments[-1].number, segments[-1].through) != (last.number, last.through):
        raise ValueError(f"archived.{node}: segment {segments[-1].number} is not the last one of the archive")
    check_contiguous(node, segments[0].after, segments, ORIGIN, segments[0].number)
    for lsn in copy.pending:
        if not any(segment.contains(lsn) for segment in segments):
            raise ValueError(f"archived.{node} does not contain the transaction at {lsn}")
    reaches_back = segments[0].number == 1 or segments[0].after <= copy.counted_from
    if not reaches_back and segments[-1].through > copy.counted_from:
        raise ValueError(f"archived.{node} begins at {segments[0].after}, after the base")
