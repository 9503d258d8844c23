"""Which objects of a chain the state of its copies is folded from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from cutline.columns.arrow_numbers import to_mask
from cutline.snapshots.fold.base_sources import BaseForm, BasePart, BaseSources, HeldBases, ListedBases, NodeBases
from cutline.snapshots.fold.schema_at_cut import mapping_to_cut
from cutline.snapshots.fold.sources import SegmentSource, Source, numbers_of, read_at_cut
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import ObjectList, StoredObject
from cutline.storage.store import ObjectStore
from cutline.wal.segments.segment_schema import SEGMENT_SCHEMA, TRUNCATE


@dataclass(frozen=True, slots=True)
class Sources:
    """All objects from which the state of some nodes' copies is folded.

    A node's number is its index in `nodes`. `column_counts` is by node number and group.
    """

    nodes: tuple[str, ...]
    bases: BaseSources
    segments: tuple[SegmentSource, ...]
    multisets: frozenset[int]
    column_counts: Mapping[tuple[int, int], int]

    @property
    def changes(self) -> int:
        """How many changes the segments hold, including those that do not belong to the state."""
        return sum(one.segment.changes for one in self.segments)

    @property
    def has_partials(self) -> bool:
        """Whether a segment holds partial images."""
        return any(one.segment.partials for one in self.segments)

    def without(self, nodes: Collection[str]) -> Sources:
        """The sources without those of these nodes, whose numbers stay."""
        segments = tuple(one for one in self.segments if one.source.node not in nodes)
        numbers = {number for number, node in enumerate(self.nodes) if node in nodes}
        return replace(self, bases=self.bases.without(numbers), segments=segments)


def sources_of(
    chain: Chain,
    nodes: tuple[str, ...],
    store: ObjectStore,
    skip: Collection[str] = (),
    chosen: Mapping[str, frozenset[int]] = MappingProxyType({}),
) -> Sources:
    """Find the sources of the state of `nodes` at the chain's last commit.

    Nodes in `skip` keep their numbers, but have no sources. `chosen` are by node the groups, by number at the cut,
    whose state is wanted; of other nodes all groups are. Reads only the segments that hold a TRUNCATE.
    """
    bases: list[NodeBases] = []
    segments: list[SegmentSource] = []
    multisets = frozenset(number for node in nodes for number in multiset_numbers_of(chain, node))
    for number, node in enumerate(nodes):
        groups = chosen.get(node)
        if node in skip or (groups is not None and not groups):
            continue
        needed = [
            one
            for one in segment_sources(chain, number, node)
            if one.segment.changes and one.segment.after < one.position
        ]
        truncated = truncations(store, needed)
        segments += [replace(one, truncated=truncated, groups=groups) for one in needed]
        bases.append(node_bases(chain, number, node, frozenset(truncated), groups))
    counts = {
        (number, group.number): len(group.columns) for number, node in enumerate(nodes) for group in chain.groups(node)
    }
    return Sources(nodes, BaseSources(tuple(bases)), tuple(segments), multisets, counts)


def segment_sources(chain: Chain, number: int, node: str, among: Collection[str] = ()) -> list[SegmentSource]:
    """All segments of the node's archive, without regard to TRUNCATEs; for `among` see `mapping_to_cut`."""
    position, excluded = chain.position(node), chain.excluded(node)
    mapping = mapping_to_cut(chain, node, among)
    return [
        SegmentSource(
            Source(one.key, node, number, one.size, one.digest, segment=one), one, position, excluded, {}, mapping
        )
        for one in chain.segments(node)
    ]


def multiset_numbers_of(chain: Chain, node: str) -> frozenset[int]:
    """The numbers of all definitions of the node's groups whose rows have no key."""
    return frozenset(number for number, group in chain.definitions(node).items() if group.is_multiset)


def node_bases(
    chain: Chain,
    number: int,
    node: str,
    truncated: frozenset[int] = frozenset(),
    chosen: frozenset[int] | None = None,
) -> NodeBases:
    """The objects of the node's base copies, including those without any row that still counts.

    With `chosen`, only those with rows of these groups, by number at the cut.
    """
    mapping, entries = mapping_to_cut(chain, node), chain.base_entries(node)
    # Most chains have no ended definitions; then base rows need no conversion.
    is_unchanged = len(mapping.unchanged) == len(chain.definitions(node))
    multisets = multiset_numbers_of(chain, node)
    form = BaseForm(node, number, truncated, multisets, None if is_unchanged else mapping, chosen)
    own = HeldBases(form.sources(one for one in entries if isinstance(one, StoredObject)))
    parts: list[BasePart] = [own, *(ListedBases.of(form, one) for one in entries if isinstance(one, ObjectList))]
    return NodeBases(number, tuple(part for part in parts if len(part)))


def truncations(store: ObjectStore, segments: list[SegmentSource]) -> dict[int, tuple[int, int]]:
    """Find the last TRUNCATE of every truncated group, as (lsn, seq)."""
    last: dict[int, tuple[int, int]] = {}
    for one in segments:
        if not one.segment.truncates:
            continue
        for table in read_at_cut(store, one, SEGMENT_SCHEMA):
            truncates = table.filter(to_mask(numbers_of(table, "op") == TRUNCATE)).select(["lsn", "seq", "group"])
            for row in truncates.to_pylist():  # bounded by the TRUNCATE commands
                if row["lsn"] < one.position and row["lsn"] not in one.excluded:
                    last[row["group"]] = max(last.get(row["group"], (0, 0)), (row["lsn"], row["seq"]))
    return last
