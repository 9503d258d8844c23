"""What a store says of its fleet: its snapshots, their newest cut, and the operations on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from msgspec import UnsetType

from cutline.fleet.config import Fleet
from cutline.fleet.lsn import Lsn
from cutline.snapshots.activity.checks import NewestChecks
from cutline.snapshots.activity.ended_operations import EndedOperations, EndedReader
from cutline.snapshots.activity.kinds import FULL, INCREMENT, ONLY_CUT
from cutline.snapshots.activity.under_way import UnderWay, read_under_way
from cutline.snapshots.listing.entry import BROKEN, COMPLETE, ENDED, LOST, ONLY_FULL, Entry
from cutline.snapshots.listing.missing_points import MissingPoint, committed_by, find_missing
from cutline.snapshots.metrics import catalog
from cutline.snapshots.metrics.catalog import Sample
from cutline.snapshots.metrics.command_samples import (
    KindEnd,
    end_of_commit,
    moment_of,
    samples_of_ends,
    samples_of_open,
)
from cutline.snapshots.metrics.entry_reader import EntryReader
from cutline.snapshots.operations.recorded import document_names
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.cut_times import cut_time

STATES = (COMPLETE, BROKEN, LOST, ENDED, ONLY_FULL)
# So many snapshots are named in labels.
NAMED_MAX = 20


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What was read from a store."""

    entries: tuple[Entry, ...]
    open_operations: tuple[UnderWay, ...]
    ended: EndedOperations
    missing: tuple[MissingPoint, ...] = ()

    @property
    def chains(self) -> list[Chain]:
        """The chains that can be read, by the time of their newest cut."""
        return chains_by_cut(self.entries)


def read_facts(fleet: Fleet, ended: EndedReader, reader: EntryReader | None = None) -> StoreFacts:
    """Read the fleet's store, with a `reader` only what has changed since it read last; raises as EntryReader.read."""
    store = fleet.store.open()
    # First: what is recorded as committed then is there.
    documents = document_names(store)
    entries = (reader or EntryReader()).read(store, fleet)
    operations = ended.read(store, committed_by(entries), documents)
    missing = tuple(find_missing(store, operations.found, entries))
    return StoreFacts(entries, tuple(read_under_way(store, documents)), operations, missing)


def chains_by_cut(entries: Iterable[Entry]) -> list[Chain]:
    """The chains that can be read, by the time of their newest cut."""
    return sorted((one.chain for one in entries if one.chain), key=lambda one: cut_time(one.last))


def archived_positions(chains: Iterable[Chain]) -> dict[str, Lsn]:
    """By node the position up to which its WAL is in the store, by the newest commit; `chains` are in that order.

    Not the highest one: a server that was made anew begins before those of the chains that ended with it.
    """
    return {
        node: segments[-1].through for chain in chains for node, segments in chain.last.segments.items() if segments
    }


def samples_of_store(facts: StoreFacts, now: datetime) -> Iterator[Sample]:
    """All samples of a store."""
    states = Counter(one.state for one in facts.entries)
    for state in STATES:
        yield catalog.SNAPSHOTS.of(states[state], state)
    yield catalog.DAMAGED_MARKS.of(sum(one.has_damaged_mark for one in facts.entries))
    yield catalog.MISSING_POINTS.of(len(facts.missing))
    checks = NewestChecks()
    checks.add_all(facts.ended.found)
    conflicts = [one.name for one in facts.entries if checks.standing_conflicts(one.name, 1 + len(one.summaries))]
    yield catalog.STANDING_CONFLICTS.of(len(conflicts))
    sizes = {one.name: _size_bytes(one) for one in facts.entries if one.chain}
    yield catalog.RESTORE_POINTS.of(sum(1 + len(one.summaries) for one in facts.entries if one.chain))
    yield catalog.COMMITTED_BYTES.of(sum(sizes.values()))
    chains = facts.chains
    yield from _samples_of_names(facts.entries, chains, sizes)
    if restorable := chains_by_cut(one for one in facts.entries if _has_rows(one) and one.state != BROKEN):
        yield from _samples_of_newest(restorable[-1])
    yield from samples_of_open(facts.open_operations, {one.id: one.state(now) for one in facts.open_operations})
    yield from samples_of_ends(facts.ended, _committed_ends(facts.entries), now.timestamp())


def _size_bytes(entry: Entry) -> int:
    full = entry.chain.full.counts.get("bytes", 0) if entry.chain else 0
    return full + sum(one.bytes for one in entry.summaries)


def _has_rows(entry: Entry) -> bool:
    return entry.chain is not None and not entry.chain.full.only_cut


def _samples_of_names(entries: Iterable[Entry], chains: list[Chain], sizes: Mapping[str, int]) -> Iterator[Sample]:
    increments = {one.name: len(one.summaries) for one in entries}
    for chain in chains[-NAMED_MAX:]:
        yield catalog.SNAPSHOT_BYTES.of(sizes[chain.name], chain.name)
        yield catalog.SNAPSHOT_INCREMENTS.of(increments[chain.name], chain.name)


def _samples_of_newest(chain: Chain) -> Iterator[Sample]:
    commit = chain.last
    yield catalog.NEWEST_CUT.of(cut_time(commit).timestamp())
    yield catalog.CUT_SECONDS.of(commit.cut.seconds)
    yield catalog.CUT_RETRIES.of(max(commit.cut.attempts - 1, 0))
    if isinstance(commit.cut.safe_at, str):
        yield catalog.SAFE_TIME.of(moment_of(commit.cut.safe_at))
    if not isinstance(commit.cut.skew_seconds, UnsetType):
        yield catalog.CLOCK_SKEW.of(commit.cut.skew_seconds)
    for one in commit.cut.nodes:
        if isinstance(one.last_commit_at, str):
            yield catalog.NODE_LAST_COMMIT.of(moment_of(one.last_commit_at), one.node)


def _committed_ends(entries: Iterable[Entry]) -> Iterator[KindEnd]:
    """How the operations ended whose commits are there: all details only of the newest of a chain."""
    for entry in entries:
        if (chain := entry.chain) is None:
            continue
        yield end_of_commit(chain.full, ONLY_CUT if chain.full.only_cut else FULL)
        for one in entry.summaries:
            if one.operation == chain.last.operation:
                yield end_of_commit(chain.last, INCREMENT)
            else:
                ended_at = moment_of(one.created_at) + one.seconds
                volumes = {"bytes": one.bytes, "changes": one.changes, "transactions": one.transactions}
                yield KindEnd(INCREMENT, ended_at, code=0, is_done=True, seconds=one.seconds, volumes=volumes)
