"""The parts of global transactions in a segment: reduced to counts and hashes, or read one by one.

A *part* is a prepared transaction, or a transaction that was committed in one phase and tagged with the global id. Each
task that reads a segment reduces its parts to combined hashes of their global ids, by cut: the first cut whose state
contains the part. Nothing else is needed unless combined hashes differ; then the parts behind them are read again.

The transactions that a cut adds are divided into *buckets* by the hashes of their global ids. So only the parts in the
buckets that differ are read again, and only from the segments that can contain them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from cutline.check.hashing import Sums, combine_hashes
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Hashes, Ints, column_of, offsets_of, xxhash64
from cutline.fleet.lsn import Lsn
from cutline.fleet.participants import split_names
from cutline.snapshots.records.chain import Chain
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, PREPARE, are_of

# The kinds of combined hashes, which are the second of their keys (node, kind, other, bucket):
#   PAIR        parts on the node that name the shard `other` as a participant
#   NAMED       parts on the node that name participants
#   LED         parts of NAMED whose first participant is the node itself (only counted)
#   BARE        parts on the node that name no participant
#   COPY        all events of two-phase transactions that every copy of the node's shard must have
#   LED_EARLY, BARE_EARLY  as LED and BARE, of transactions that some shards may have had before their slots (counted)
PAIR, NAMED, LED, BARE, COPY, LED_EARLY, BARE_EARLY = range(7)
NO_OTHER = -1
KEY_COLUMNS = 4
# In place of the number of a cut: the last state does not contain the part; the part was rolled back.
LATER, ROLLED_BACK = -1, -2
# In place of the number of the last cut whose transactions were compared.
NONE_COMPARED = -1
# About this many events belong to a bucket, unless that makes too many combined hashes.
EVENTS_PER_BUCKET, HASHES_MAX = 1 << 16, 1 << 17
# At most this many names that belong to no shard are reported for a segment.
NAMES_MAX = 20
PART_SCHEMA = pa.schema(
    [
        ("node", pa.int32()), ("global_id", pa.string()), ("op", pa.int8()), ("lsn", pa.int64()), ("cut", pa.int32()),
        ("participants", pa.binary()),
    ]
)  # fmt: skip


class ShardCuts(Struct, frozen=True):
    """The cuts of a shard. They determine, by its position, the first cut that includes a transaction.

    `positions` are those of the cuts, in order. The transactions at `late_lsns` (ascending) were undecided at a cut;
    `late_cuts` has the first cut that contains each, or LATER. `rolled_back` are the positions of PREPAREs that were
    rolled back. Transactions from `certain_from` on ended after the slots of all nodes had been created.
    """

    positions: Ints
    late_lsns: Ints
    late_cuts: Ints
    rolled_back: Ints
    certain_from: Lsn

    @classmethod
    def of(cls, chain: Chain, shard: str) -> ShardCuts:
        """Return the cuts of a shard in a chain."""
        cuts, begun, began_at = chain.cuts_since(shard), chain.first_cut(shard), chain.bases[shard]
        end = cuts[-1].position
        late = {
            entry.lsn: number + 1
            for number, cut in enumerate(cuts, start=begun)
            for entry in cut.undecided
            if entry.lsn < end
        }
        lsns = np.array(sorted(late), np.int64)
        numbers = np.array([late[lsn] for lsn in sorted(late)], np.int64)
        return cls(
            # Earlier positions may be in WAL that is not the shard's any more.
            np.array([*[began_at] * begun, *(cut.position for cut in cuts)], np.int64),
            lsns,
            np.where(numbers < begun + len(cuts), numbers, LATER),
            np.array([lsn for cut in cuts for lsn in cut.rolled_back if lsn < end], np.int64),
            _slots_complete_at(chain, shard),
        )

    def by_position(self, lsn: Ints) -> Ints:
        """Return the number of the first cut after each position; the number of cuts if there is none."""
        return np.searchsorted(self.positions, lsn, side="right")

    def containing(self, lsn: Ints) -> Ints:
        """Return the number of the first cut whose state contains each transaction, LATER, or ROLLED_BACK."""
        cut = self.by_position(lsn)
        cut[cut == len(self.positions)] = LATER
        if len(self.late_lsns):
            place = np.minimum(np.searchsorted(self.late_lsns, lsn), len(self.late_lsns) - 1)
            is_late = self.late_lsns[place] == lsn
            cut[is_late] = self.late_cuts[place[is_late]]
        if len(self.rolled_back):
            cut[np.isin(lsn, self.rolled_back)] = ROLLED_BACK
        return cut

    def are_needed(self, segments: Sequence[Segment], cuts: Iterable[int]) -> list[bool]:
        """Whether each segment may contain parts or events that belong to one of the cuts."""
        begins = np.concatenate([[-1], self.positions[:-1]])
        ranges = [(int(begins[cut]), int(self.positions[cut])) for cut in cuts]
        late = self.late_lsns[np.isin(self.late_cuts, list(cuts))].tolist()
        return [
            any(segment.after < end and segment.through > begin for begin, end in ranges)
            or any(segment.after <= lsn < segment.through for lsn in late)
            for segment in segments
        ]


def _slots_complete_at(chain: Chain, shard: str) -> Lsn:
    """Return the position of the shard when the slots of all primaries that began last had been created."""
    for increment in reversed(chain.increments):
        if increment.slots_complete_at:
            return increment.slots_complete_at[shard]
    # Before that was recorded, only the first start marker is known to be late enough.
    return chain.full.slots_complete_at.get(shard, chain.cuts(shard)[0].start)


class Buckets(Struct, frozen=True):
    """The buckets of each cut: the numbers from `firsts[cut]` up to, but not including, `firsts[cut + 1]`."""

    firsts: Ints

    @classmethod
    def of(cls, chain: Chain) -> Buckets:
        """Return buckets for the transactions of a chain, in proportion to the events that each cut adds."""
        shards = chain.primaries
        events = [
            sum(segment.events for shard in shards for segment in commit.segments.get(shard, ()))
            for commit in chain.commits
        ]
        return cls.for_events(events, len(shards))

    @classmethod
    def for_events(cls, events: Sequence[int], shards: int) -> Buckets:
        """Return buckets for cuts that add this many events each."""
        wanted = np.array(events, np.float64) / EVENTS_PER_BUCKET
        most = HASHES_MAX / max(shards, 1) ** 2
        wanted *= min(1.0, most / max(float(wanted.sum()), 1.0))
        return cls(offsets_of(np.maximum(np.ceil(wanted), 1).astype(np.int64)))

    def numbers(self, cut: Ints, hashes: Hashes) -> Ints:
        """Return the bucket of each transaction, by its cut and the hash of its global id."""
        counts = (self.firsts[cut + 1] - self.firsts[cut]).astype(np.uint64)
        return self.firsts[cut] + (hashes % counts).astype(np.int64)

    def cuts_of(self, buckets: Ints) -> set[int]:
        """Return the cuts that these buckets belong to."""
        found: set[int] = set((np.searchsorted(self.firsts, buckets, side="right") - 1).tolist())
        return found


class PartRules(Struct, frozen=True):
    """The facts about a chain that tasks need: its nodes, primaries first, so a shard's number is its primary's.

    `shard_of` has the number of each node's shard; `names` maps all names of shards to their numbers. `since` is the
    position from which a node's archive must match those of the other copies of its shard; it has only nodes of shards
    with several copies. An earlier check has compared the transactions of the cuts up to number `after`. `first` is the
    number of the first cut since which the copies of all primaries have been the same.
    """

    nodes: tuple[str, ...]
    shard_of: Mapping[str, int]
    names: Mapping[str, int]
    cuts: tuple[ShardCuts, ...]
    since: Mapping[str, Lsn]
    buckets: Buckets
    after: int = NONE_COMPARED
    first: int = 0

    @classmethod
    def of(cls, chain: Chain, known_as: Mapping[str, str], after: int | None = None) -> PartRules:
        """Return the rules for a chain. `known_as` maps further names of shards to their primaries.

        With `after`, an earlier check has compared the transactions up to that increment.
        """
        shards = chain.primaries
        nodes = (*shards, *(node for node in chain.present if node not in shards))
        shard_of = {node: shards.index(chain.shard_of(node)) for node in nodes}
        others = {name: shards.index(shard) for name, shard in known_as.items() if shard in shards}
        copies = Counter(shard_of.values())
        base = chain.bases
        since = {
            node: max(base[other] for other in nodes if shard_of[other] == shard)
            for node, shard in shard_of.items()
            if copies[shard] > 1
        }
        cuts = tuple(ShardCuts.of(chain, shard) for shard in shards)
        # In place of the increments that were compared, the numbers of cuts. The first cut of a merged chain is known.
        compared = (NONE_COMPARED if not chain.beginning else 0) if after is None else after - chain.full.increment
        first = max(map(chain.first_cut, shards))
        return cls(nodes, shard_of, others | shard_of, cuts, since, Buckets.of(chain), compared, first)

    @property
    def shards(self) -> tuple[str, ...]:
        """The primaries, in the order of their numbers."""
        return self.nodes[: len(self.cuts)]


class PartReport(Struct, frozen=True):
    """The combined hashes of a segment's parts, keyed by (node, kind, other, bucket).

    `foreign` are names of participants that belong to no shard of the chain.
    """

    sums: Sums
    foreign: frozenset[str] = frozenset()


NO_PARTS = PartReport(combine_hashes(np.empty((0, KEY_COLUMNS), np.int64), np.empty(0, np.uint64)))


class _Events(Struct, frozen=True):
    """Events of two-phase transactions, and tagged commits, as columns; `hashes` are those of their global ids."""

    table: pa.Table
    op: Ints
    lsn: Ints
    hashes: Hashes

    @classmethod
    def of(cls, events: pa.Table) -> _Events:
        op = to_numpy(events["op"])
        table = events.filter(to_mask(are_of(op, (PREPARE, COMMIT, COMMIT_PREPARED))))
        # Most commits are local to one node and have no global id.
        table = table.filter(pc.is_valid(table["global_id"]))
        names = table["global_id"].cast(pa.binary())
        hashes = xxhash64(column_of(names)) if len(table) else np.empty(0, np.uint64)
        return cls(table, to_numpy(table["op"]), to_numpy(table["lsn"]), hashes)

    def where(self, rows: Flags) -> _Events:
        return _Events(self.table.filter(to_mask(rows)), self.op[rows], self.lsn[rows], self.hashes[rows])


class NamedShards(Struct, frozen=True):
    """The shards that lists of participants name: list i names `shards[offsets[i]:offsets[i + 1]]`, each once.

    A list that names no shard says nothing. `foreign` are names that belong to no shard.
    """

    offsets: Ints
    shards: Ints
    foreign: frozenset[str]

    @classmethod
    def of(cls, texts: Iterable[bytes], names: Mapping[str, int]) -> NamedShards:
        """Parse distinct lists, of which there are few; `names` maps names to the numbers of shards."""
        listed = [split_names(text.decode(errors="replace")) for text in texts]
        numbers = [sorted({names[name] for name in one if name in names}) for one in listed]
        foreign = sorted({name for one in listed for name in one if name not in names})
        lengths = np.array([len(one) for one in numbers], np.int64)
        flat = np.array([number for one in numbers for number in one], np.int64)
        return cls(offsets_of(lengths), flat, frozenset(foreign[:NAMES_MAX]))

    @property
    def lengths(self) -> Ints:
        """How many shards each list names."""
        return np.diff(self.offsets)

    @property
    def firsts(self) -> Ints:
        """The lowest number of a shard in each list; in a list that names no shard, more than any number."""
        firsts = np.full(len(self.lengths), np.iinfo(np.int64).max)
        is_named = self.lengths > 0
        firsts[is_named] = self.shards[self.offsets[:-1][is_named]]
        return firsts

    def expand(self, lists: Ints) -> tuple[Ints, Ints]:
        """Return (row, shard) for every shard that list `lists[row]` names."""
        lengths = self.lengths[lists]
        rows = np.repeat(np.arange(len(lists)), lengths)
        ends = np.cumsum(lengths)
        within = np.arange(len(rows)) - np.repeat(ends - lengths, lengths)
        return rows, self.shards[self.offsets[:-1][lists][rows] + within]


def named_shards(participants: Any, names: Mapping[str, int]) -> tuple[NamedShards, Ints]:
    """Return the distinct lists in a column of participants (binary), and for each row the number of its list."""
    # Applications name their participants in a few bytes, so the column fits into one array.
    encoded = participants.combine_chunks().dictionary_encode()
    return NamedShards.of(encoded.dictionary.to_pylist(), names), to_numpy(encoded.indices).astype(np.int64)


def reduce_parts(events: pa.Table, node: str, rules: PartRules) -> PartReport:
    """Reduce the parts among a segment's events (SEGMENT_SCHEMA) to combined hashes."""
    if events["global_id"].null_count == len(events):
        return NO_PARTS
    found, sets, foreign = _Events.of(events), list[_PartSet](), frozenset[str]()
    number, shard = rules.nodes.index(node), rules.shard_of[node]
    if node in rules.since:
        chosen, bucket = _compared_between_copies(found, node, rules)
        sets.append(_PartSet(COPY, bucket, _event_hashes(chosen)))
    if number == shard:
        parts = _Parts.of(found, shard, rules)
        foreign = parts.named.foreign
        sets += parts.sets(rules)
    keys = np.concatenate([np.empty((0, KEY_COLUMNS), np.int64), *(one.keys(number) for one in sets)])
    hashes = np.concatenate([np.empty(0, np.uint64), *(one.hashes for one in sets)])
    return PartReport(combine_hashes(keys, hashes), foreign)


class _PartSet(NamedTuple):
    """The hashes of parts or events of a kind; `bucket` and `other` are one number for all, or one for each."""

    kind: int
    bucket: Ints | int
    hashes: Hashes
    other: Ints | int = NO_OTHER

    def keys(self, node: int) -> Ints:
        """Return the keys (KEY_COLUMNS) of these hashes on a node."""
        columns = (node, self.kind, self.other, self.bucket)
        return np.stack([np.broadcast_to(np.asarray(one, np.int64), len(self.hashes)) for one in columns], axis=1)


def _compared_between_copies(found: _Events, node: str, rules: PartRules) -> tuple[_Events, Ints]:
    """Return the events that every copy of the node's shard must have, and their buckets.

    PostgreSQL may omit a transaction that was rolled back before it was decoded, or be asked for it later.
    """
    cuts = rules.cuts[rules.shard_of[node]]
    is_compared = (found.lsn >= rules.since[node]) & (found.lsn < cuts.positions[-1])
    is_compared &= ~np.isin(found.lsn, cuts.rolled_back)
    is_compared &= ~np.isin(found.lsn, cuts.late_lsns[cuts.late_cuts == LATER])
    # Also those of transactions that were undecided at the cut that was checked.
    is_compared &= (cuts.by_position(found.lsn) > rules.after) | np.isin(
        found.lsn, cuts.late_lsns[cuts.late_cuts > rules.after]
    )
    chosen = found.where(is_compared)
    return chosen, rules.buckets.numbers(cuts.by_position(chosen.lsn), chosen.hashes)


def _event_hashes(events: _Events) -> Hashes:
    """Hash the kind, position and global id of each event."""
    numbers = np.stack([events.lsn, events.op.astype(np.int64)], axis=1)
    data = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1)
    return xxhash64(BytesColumn(data, np.arange(len(numbers) + 1, dtype=np.int64) * 16), events.hashes)


class _Parts(Struct, frozen=True):
    """The parts on a shard that belong to the state, and the participants that they name."""

    shard: int
    hashes: Hashes
    cut: Ints
    is_early: Flags
    named: NamedShards
    lists: Ints

    @classmethod
    def of(cls, found: _Events, shard: int, rules: PartRules) -> _Parts:
        found = found.where(found.op != COMMIT_PREPARED)
        cuts = rules.cuts[shard]
        cut = cuts.containing(found.lsn)
        is_new = cut > rules.after
        found, cut = found.where(is_new), cut[is_new]
        named, lists = named_shards(found.table["key"], rules.names)
        return cls(shard, found.hashes, cut, (cut == rules.first) & (found.lsn < cuts.certain_from), named, lists)

    def sets(self, rules: PartRules) -> Iterable[_PartSet]:
        """Yield the sets of parts of each kind. A transaction counts once in a segment.

        It may have several branches on a shard, and a global id may occur again at a later cut.
        """
        if not len(self.hashes):
            return
        is_named, first = self.named.lengths[self.lists] > 0, self.named.firsts[self.lists]
        order, starts = distinct(self.hashes, self.cut)
        hashes, cut = self.hashes[order[starts]], self.cut[order[starts]]
        bucket = rules.buckets.numbers(cut, hashes)
        named = np.logical_or.reduceat(is_named[order], starts)
        led = named & (np.minimum.reduceat(first[order], starts) >= self.shard)
        early = np.logical_or.reduceat(self.is_early[order], starts)
        for kind, chosen in ((NAMED, named & ~early), (LED, led & ~early), (BARE, ~named & ~early)):
            yield _PartSet(kind, bucket[chosen], hashes[chosen])
        yield _PartSet(LED_EARLY, 0, hashes[led & early])
        yield _PartSet(BARE_EARLY, 0, hashes[~named & early])
        rows, others = self.named.expand(self.lists)
        is_pair = (others != self.shard) & ~self.is_early[rows]
        rows, others = rows[is_pair], others[is_pair]
        order, starts = distinct(self.hashes[rows], self.cut[rows], others)
        rows, others = rows[order[starts]], others[order[starts]]
        bucket = rules.buckets.numbers(self.cut[rows], self.hashes[rows])
        yield _PartSet(PAIR, bucket, self.hashes[rows], others)


def distinct(*columns: Any) -> tuple[Ints, Ints]:
    """Return an order of rows that puts equal rows next to each other, and the places where new rows begin in it."""
    order = np.lexsort(columns)
    differs = np.zeros(max(len(order) - 1, 0), np.bool_)
    for column in columns:
        ordered = column[order]
        differs |= ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(np.concatenate([np.ones(min(len(order), 1), np.bool_), differs]))


class PartQuery(Struct, frozen=True):
    """The parts in `buckets` (ascending) that are wanted; between copies, all events of two-phase transactions."""

    rules: PartRules
    buckets: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    between_copies: bool = False


def find_parts(events: pa.Table, node: str, query: PartQuery) -> pa.Table:
    """Return the wanted parts among a segment's events (PART_SCHEMA).

    `cut` is LATER or ROLLED_BACK for a part that is not in the state; its bucket is that of the cut after its position.
    """
    found, rules = _Events.of(events), query.rules
    if query.between_copies:
        found, bucket = _compared_between_copies(found, node, rules)
        cut = rules.cuts[rules.shard_of[node]].by_position(found.lsn)
    else:
        cuts = rules.cuts[rules.shard_of[node]]
        found = found.where(found.op != COMMIT_PREPARED)
        cut = cuts.containing(found.lsn)
        place = np.where(cut >= 0, cut, np.minimum(cuts.by_position(found.lsn), len(cuts.positions) - 1))
        bucket = rules.buckets.numbers(place, found.hashes)
    chosen = np.isin(bucket, query.buckets)
    found, cut = found.where(chosen), cut[chosen]
    node_number = np.full(len(cut), rules.nodes.index(node), np.int32)
    columns = [
        to_arrow(node_number), found.table["global_id"], found.table["op"], found.table["lsn"],
        to_arrow(cut.astype(np.int32)), found.table["key"],
    ]  # fmt: skip
    return pa.table(columns, schema=PART_SCHEMA)
