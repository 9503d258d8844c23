"""The part of a chain that an earlier check has not read, and what else is needed to check it.

If an earlier check found the copies of a shard equal at one cut, and the changes and events since then are equal in
all copies, the copies are equal at the new cut: folding is deterministic. So only the new segments are read, and the
earlier segments with changes that the earlier cut left out: those after its position, and those of transactions that
were undecided then and have been committed since. Tables that were copied again since are folded and compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from cutline.check.copies import Copies
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.snapshots.fold.amounts import amount_of
from cutline.snapshots.fold.sources import (
    BaseSources,
    NodeBases,
    SegmentSource,
    Sources,
    effective_sources,
    node_bases,
    segment_sources,
    sources_of,
    truncated_groups,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, Commit, DefinitionChanges, Increment
from cutline.spark.amount import Amount
from cutline.storage.store import ObjectStore
from cutline.wal.cut.cut_values import Undecided
from cutline.wal.segments.archive import Segment


class NewPart(Struct, frozen=True, dict=True):
    """The part of `chain` after its commit of increment `after`, up to which it was checked; None: everything.

    Not slotted, so that facts from the chain are computed once.
    """

    chain: Chain
    after: int | None = None

    @cached_property
    def before(self) -> Chain | None:
        """The chain up to the increment that was checked; None if there is none."""
        return None if self.after is None else self.chain.up_to(self.after)

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The commits that are new."""
        return self.chain.commits if self.after is None else self.chain.commits_after(self.after)

    def has(self, commit: Commit) -> bool:
        """Whether the commit is new."""
        return self.after is None or commit.increment > self.after

    def checked_to(self, node: str) -> Lsn:
        """Return the position up to which the node's state was checked."""
        return self.before.position(node) if self.before else ORIGIN

    def undecided(self, node: str) -> tuple[Undecided, ...]:
        """Return the transactions that the checked cut left undecided on the node's shard."""
        return self.before.last.cut.of(self.chain.shard_of(node)).undecided if self.before else ()

    def decided(self, node: str) -> frozenset[Lsn]:
        """Return the positions of the transactions undecided at the checked cut that belong to the state now."""
        undecided = frozenset(entry.lsn for entry in self.undecided(node))
        return undecided - self.chain.excluded(node) if undecided else undecided

    def is_new(self, segment: Segment) -> bool:
        """Whether the segment is listed by a new commit."""
        return self.after is None or segment.key in self.new_segments

    @cached_property
    def new_segments(self) -> Set[str]:
        """The keys of the segments that the new commits list."""
        return {segment.key for commit in self.commits for segments in commit.segments.values() for segment in segments}

    def segments(self, node: str) -> tuple[Segment, ...]:
        """Return the segments to read: new segments, and earlier segments with changes that the checked cut omits."""
        if self.before is None:
            return self.chain.segments(node)
        position, decided = self.checked_to(node), self.decided(node)
        return tuple(
            segment
            for segment in self.chain.segments(node)
            if self.is_new(segment) or any(map(segment.contains, decided)) or _reaches(segment, position)
        )

    @cached_property
    def all_segments(self) -> tuple[Segment, ...]:
        """The segments to read of all nodes."""
        return tuple(segment for node in self.chain.present for segment in self.segments(node))

    @property
    def changes(self) -> int:
        """How many changes there are in the segments to read."""
        return sum(segment.changes for segment in self.all_segments)

    @property
    def amount(self) -> Amount:
        """About how much there is to read."""
        return amount_of(self.all_segments, [entry for commit in self.commits for entry in commit.entries])

    def segment_sources(self, number: int, node: str, among: Collection[str] = ()) -> list[SegmentSource]:
        """Return the sources of `segments`, as snapshots.fold.sources.segment_sources does for all segments."""
        found = segment_sources(self.chain, number, node, among)
        if self.before is None:
            return found
        keys = {segment.key for segment in self.segments(node)}
        return [source for source in found if source.segment.key in keys]

    def copied_groups(self, node: str) -> frozenset[int]:
        """Return the groups (numbers at the cut) that were copied again, or created, since the checked cut."""
        begun = {number for changes in self._new_changes for number in changes.begun.get(node, {})}
        copied = begun & self.chain.copy_positions(node).keys()
        numbers = self.chain.numbers_at_cut(node)
        return frozenset(numbers[number] for number in copied if number in numbers)

    @property
    def has_copies(self) -> bool:
        """Whether rows must be folded and compared: tables were copied, so the streams alone prove nothing."""
        if self.after is None:
            return True
        is_base = any(entry.kind == BASE for commit in self.commits for entry in commit.entries)
        return is_base or any(self.copied_groups(node) for node in self.chain.present)

    @property
    def _new_changes(self) -> Iterator[DefinitionChanges]:
        return (commit.definition_changes for commit in self.commits if commit.definition_changes)

    def bases(self, number: int, node: str) -> NodeBases:
        """Return the objects of the node's new base copies, including objects whose rows no longer count."""
        return node_bases(self.chain, number, node, after=self.after)

    def sources(self, nodes: tuple[str, ...], store: ObjectStore, skip: Collection[str] = ()) -> Sources:
        """Return the sources for folding the rows to compare; raise ObjectDamagedError (see `sources_of`)."""
        if self.before is None:
            return sources_of(self.chain, nodes, store, skip)
        bases: list[NodeBases] = []
        segments: list[SegmentSource] = []
        for number, node in enumerate(nodes):
            if node in skip:
                continue
            groups = self.copied_groups(node)
            needed = effective_sources(store, self.segment_sources(number, node) if groups else [])
            segments += [replace(source, groups=groups) for source in needed]
            bases.append(node_bases(self.chain, number, node, truncated_groups(needed), after=self.after))
        without_objects = sources_of(self.chain, nodes, store, skip=nodes)
        return replace(without_objects, bases=BaseSources(tuple(bases)), segments=tuple(segments))

    def problem(self, copies: Copies) -> str:
        """Return the reason why the new part can't be checked by itself; "" if it can."""
        if self.before is None:
            return ""
        if back := [node for node in copies.nodes if node in self.before.absent]:
            return f"the copy of {back[0]} ended before the cut that was checked"
        increments = [commit for commit in self.commits if isinstance(commit, Increment)]
        if renewed := [node for commit in increments for node in commit.renewed]:
            return f"the copy of {renewed[0]} began after the cut that was checked"
        if retired := [shard for commit in increments for shard in commit.retired]:
            return f"shard {retired[0]} was retired since the cut that was checked"
        for node in copies.nodes:
            position = self.checked_to(node)
            if any(lsn < copies.since(node) for lsn in self.decided(node)):
                return f"a transaction that was prepared on {node} before its base copy has been committed since"
            pending = frozenset[Lsn]().union(*self.chain.pending_at_copies(node).values())
            if pending.intersection(self.decided(node)):
                return f"a transaction that was prepared on {node} before a table was copied has been committed since"
            late = self.chain.excluded(node) - self.before.excluded(node)
            if any(lsn < position for lsn in late):
                return f"on {node}, the state that was checked contains a transaction that no longer belongs to it"
            positions = self.chain.copy_positions(node)
            begun = {number: at for changes in self._new_changes for number, at in changes.begun.get(node, {}).items()}
            if any(at < position for number, at in begun.items() if number in positions):
                return f"a table of {node} was copied at a position before the cut that was checked"
        return ""


def _reaches(segment: Segment, position: Lsn) -> bool:
    """Whether the segment contains anything at or after the position."""
    return segment.through > position or (segment.open is not None and segment.open.lsn >= position)
