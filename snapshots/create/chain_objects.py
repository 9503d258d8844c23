"""Check that the store has the objects that an increment of a chain relies on.

Contents are not read, and the cost is bounded: a long chain's segments are checked in turns, and objects that only an
object list names are not looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress

from cutline.fleet.messages import NEW_CHAIN
from cutline.snapshots.operations.committing import listed_sizes, sizes_of
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import EXTENSION_ROWS, GLOBALS, Commit, NamedObject, parts_of_entries
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.proven_chains import point_label, read_chain
from cutline.storage.errors import ChainEnd, RefusedError
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.segments.archive import Segment, archive_prefix, last_number, segment_key

# The maximum number of requests, of 1,000 keys each, with which an increment lists segments: listing all of them would
# make each increment slower than the one before. More are needed only if a single node has more segments.
LISTINGS_MAX, LISTED_KEYS = 10, 1000


class ChainObjectMissingError(RefusedError):
    """An object that the chain needs is missing from the store."""


def check_objects(store: ObjectStore, chain: Chain) -> str:
    """Raise ChainObjectMissingError unless the store has the objects that the chain's commits name.

    If it lacks objects that only restore points before the newest merge need, return a warning; otherwise "".

    Server globals and the rows of extension tables may be missing, because the next commit stores them again. Objects
    that only an object list names are not checked: there may be millions. Of the segments of a long chain, only those
    of some nodes are checked (`_nodes_in_turn`). Sizes are compared for the commits that were read; the other segments
    of a partial chain only have to exist.
    """
    copies = "lists" if any(commit.object_lists for commit in chain.commits) else "base"
    nodes = _nodes_in_turn(chain)
    archives = [f"snapshots/{chain.name}/wal"]
    if len(nodes) < len(chain.parts):
        archives = [archive_prefix(chain.name, node, chain.archive(node)) for node in nodes]
    folders = [f"snapshots/{chain.name}/{copies}", *archives, f"snapshots/{chain.name}/schema"]
    sizes: dict[str, int | None] = {listed.key: listed.size for folder in folders for listed in store.inventory(folder)}
    if not _expected_keys(chain, nodes) <= sizes.keys() and first_increment(store, chain.name):
        # The objects before the merge may be gone.
        chain = read_from_merge(store, chain.name)
    try:
        _check_sizes(store, chain, nodes, sizes)
    except ChainObjectMissingError as error:
        merged = _read_merged(store, chain)
        if merged is None:
            raise
        _check_sizes(store, merged, nodes, sizes)
        number = merged.full.increment
        return (
            f"{error.message}. Only restore points before increment {number} need it; to give them up: snapshot merge"
            f" {chain.name} --to {number} --drop-earlier"
        )
    return ""


def _read_merged(store: ObjectStore, chain: Chain) -> Chain | None:
    """Return the chain from its newest merge on; None if it has none, begins with it already, or can't be read."""
    if chain.beginning is None:
        with suppress(RefusedError):
            merged = read_from_merge(store, chain.name)
            return merged if merged.beginning else None
    return None


def _check_sizes(store: ObjectStore, chain: Chain, nodes: Collection[str], listed: Mapping[str, int | None]) -> None:
    """Raise ChainObjectMissingError if an object is missing or has another size; `listed` has sizes from listings."""
    sizes = dict(listed)
    if chain.is_partial and any(key not in sizes for key in _segment_keys(chain, nodes)):
        # The error names the increment that lost the object.
        chain = read_chain(store, chain.name)
    named = {entry.key: entry.size for commit in chain.commits for entry in _entries_to_check(commit, nodes)}
    if any(commit.object_lists for commit in chain.commits):
        sizes |= listed_sizes(store, (key for key in named if key not in sizes))
    # A listing may be out of date, so an object that it lacks or lists with a different size is looked up by key.
    sizes |= sizes_of(store, [key for key, size in named.items() if sizes.get(key) != size])
    stored_again = {
        own_object.key
        for commit in chain.commits
        for own_object in commit.own_objects
        if own_object.kind in (GLOBALS, EXTENSION_ROWS)
    }
    for commit in chain.commits:
        for key, size in ((entry.key, entry.size) for entry in _entries_to_check(commit, nodes)):
            if key not in stored_again and sizes[key] != size and (problem := object_problem(store, key, size)):
                raise ChainObjectMissingError(
                    f"object {key} of {point_label(commit.increment)} {problem}",
                    hint=f"replace it from the other copy, or from a copy of the store: snapshot repair {chain.name};"
                    f" or {NEW_CHAIN}   (to see what else is missing: snapshot check {chain.name})",
                    ends_chain=ChainEnd.PERHAPS,
                    details={"object": key, "increment": commit.increment},
                )


def _expected_keys(chain: Chain, nodes: Collection[str]) -> set[str]:
    """Return the keys to check, in a partial chain also those of the segments that it does not list."""
    keys = {entry.key for commit in chain.commits for entry in _entries_to_check(commit, nodes)}
    return keys.union(_segment_keys(chain, nodes)) if chain.is_partial else keys


def _nodes_in_turn(chain: Chain) -> tuple[str, ...]:
    """Return the nodes whose segments the next increment checks.

    These are all nodes, unless listing the segments of a partial chain takes more than LISTINGS_MAX requests. Then
    increments check those of some nodes in turn, by the increment's number.
    """
    if not chain.is_partial:
        return tuple(chain.parts)
    counts = {node: last_number(chain.newest_segments(node)) for node in chain.parts}
    if sum(counts.values()) <= LISTINGS_MAX * LISTED_KEYS:
        return tuple(counts)
    turns: list[list[str]] = [[]]
    left = LISTINGS_MAX
    for node, count in counts.items():
        listings = max(-(-count // LISTED_KEYS), 1)
        if turns[-1] and listings > left:
            turns.append([])
            left = LISTINGS_MAX
        turns[-1].append(node)
        left -= listings
    return tuple(turns[chain.last.increment % len(turns)])


def _entries_to_check(commit: Commit, nodes: Container[str]) -> Iterator[NamedObject | Segment]:
    """Yield the commit's entries, of its segments only those of these nodes."""
    yield from parts_of_entries(commit.entries)
    for node, segments in commit.segments.items():
        if node in nodes:
            yield from segments


def _segment_keys(chain: Chain, nodes: Iterable[str]) -> Iterator[str]:
    """Yield the keys of all segments of these nodes in the chain: their numbers have no gaps."""
    for node in nodes:
        prefix = archive_prefix(chain.name, node, chain.archive(node))
        for number in range(1, last_number(chain.newest_segments(node)) + 1):
            yield segment_key(prefix, number)


def object_problem(store: ObjectStore, key: str, size: int) -> str | None:
    """Return the problem if the object is missing or has a different size; None otherwise. Its content is not read."""
    try:
        actual = store.size(key)
    except ObjectMissingError:
        return "is missing from the store"
    return None if actual == size else f"is {actual} bytes long instead of {size}"
