"""Compare the parts of global transactions: between shards, and between the copies of a shard.

An application can name the participants of a transaction (wal.decoding.transactions). Then each of them must have a
part that belongs to the state from the same cut on. Every shard's parts were reduced to combined hashes when its
segments were read (check.transaction_parts). Two comparisons of these settle most buckets:

- For each pair of shards, the parts on the first that name the second are those on the second that name the first. This
  holds if all parts of a transaction name its participants.
- For each shard, its parts that name nobody are the parts on other shards that name it. This holds if one part of each
  transaction names its participants.

Only for buckets in which neither holds, the parts are read again and compared one by one. Transactions whose
participants are not known are counted.

Copies of a shard decode the same WAL, so their archives have the same events of two-phase transactions; if they don't,
the events that only one of them has are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from cutline.check.cuts import READS_AT_ONCE, StoredEvents
from cutline.check.hashing import Sums, combine_all, differing_keys
from cutline.check.report import Conflict, Findings
from cutline.check.transaction_parts import (
    BARE,
    BARE_EARLY,
    COPY,
    KEY_COLUMNS,
    LATER,
    LED,
    LED_EARLY,
    NAMED,
    NAMES_MAX,
    PAIR,
    PART_SCHEMA,
    ROLLED_BACK,
    PartQuery,
    PartReport,
    PartRules,
    distinct,
    find_parts,
    named_shards,
)
from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.columns.row_batches import from_stream, to_stream
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.snapshots.records.chain import Chain
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import Dealing, SparkSource, run_tasks, shared_problem
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import COMMIT, PREPARE, read_events

# At most this many transactions are named for each pair of nodes.
NAMED_MAX = 100
# The driver holds about this many parts at a time, with their global ids, when it compares parts one by one.
PARTS_AT_ONCE = 500_000
TRANSACTION = "transaction"
NO_PART = (
    "the archive contains no part of it there. (A part that only reads leaves no trace in WAL, unless it writes a"
    " message: see docs/check.md)"
)


class PartTask(Struct, frozen=True):
    """A segment whose wanted parts are read from `store`; `query` is a broadcast of a PartQuery."""

    segment: Segment
    query: Any
    store: StoreLocation


class FoundParts(Struct, frozen=True):
    """The wanted parts in a segment (PART_SCHEMA, an Arrow stream), or the problem with the segment."""

    parts: bytes = b""
    problem: ErrorReport | None = None


# Reads the wanted parts in segments.
ReadsParts = Callable[[Sequence[Segment], PartQuery], list[FoundParts]]


def _find(read: Callable[[], pa.Table], segment: Segment, query: PartQuery) -> FoundParts:
    try:
        return FoundParts(to_stream(find_parts(read(), segment.node, query)))
    except SnapshotError as error:
        return FoundParts(problem=report_of(error))


def find_in_store(task: PartTask) -> FoundParts:
    """Read the task's segment and return the wanted parts."""
    return _find(lambda: read_events(task.store.open(), task.segment), task.segment, task.query.value)


def reading_here(events: StoredEvents) -> ReadsParts:
    """Return a reader of parts that reads the events in this process."""

    def read(segments: Sequence[Segment], query: PartQuery) -> list[FoundParts]:
        with ThreadPoolExecutor(READS_AT_ONCE) as threads:
            found = threads.map(lambda segment: _find(lambda: events.read(segment), segment, query), segments)
            return list(found)

    return read


def reading_in_jobs(spark: SparkSource, store: StoreLocation, progress: Progress) -> ReadsParts:
    """Return a reader of parts that reads the events in Spark jobs."""

    def read(segments: Sequence[Segment], query: PartQuery) -> list[FoundParts]:
        session = spark.session()
        sent = broadcast(session, query)
        try:
            tasks = [PartTask(segment, sent, store) for segment in segments]
            dealing = Dealing[PartTask](lambda task: task.segment.size)
            return run_tasks(session, find_in_store, tasks, progress, dealing, problem_of=shared_problem)
        finally:
            sent.unpersist()

    return read


def compare_transactions(
    chain: Chain, rules: PartRules, reports: Iterable[PartReport], read: ReadsParts, findings: Findings
) -> None:
    """Compare the parts that the intact segments of `chain` were reduced to; add conflicts to the report.

    If an earlier check has compared the parts in the first cuts (`rules.after`), these are left out. Also counts the
    transactions whose participants are not known. Raises StoreUnreachableError if the store does not answer.
    """
    reports = list(reports)
    sums = combine_all([report.sums for report in reports], KEY_COLUMNS)
    comparison = _Comparison(chain, rules, read, findings, sums)
    comparison.compare_copies()
    if len(rules.shards) < 2:
        return
    known = comparison.compare_shards()
    if findings.damaged.isdisjoint(rules.shards):
        total = sum(commit.cut.global_transactions for commit in chain.commits[rules.after + 1 :])
        # Every transaction whose participants are not known has a part that names nobody.
        bare = comparison.count(BARE) + comparison.count(BARE_EARLY)
        findings.report.unknown_participants = min(max(total - known, 0), bare)
    foreign = sorted(frozenset[str]().union(*(report.foreign for report in reports)))
    findings.report.foreign_participants = tuple(foreign[:NAMES_MAX])


class _Comparison(Struct):
    """The combined hashes of a chain's parts, and the means to read the parts behind them."""

    chain: Chain
    rules: PartRules
    read: ReadsParts
    findings: Findings
    sums: Sums

    def of_kind(self, kind: int) -> tuple[Ints, Ints]:
        """Return the keys and the values of the combined hashes of a kind."""
        chosen = self.sums.keys[:, 1] == kind
        return self.sums.keys[chosen], self.sums.values[chosen]

    def count(self, kind: int) -> int:
        """Return the number of parts of a kind."""
        return int(self.of_kind(kind)[1][:, 0].sum())

    def intact(self, keys: Ints) -> Flags:
        """Flag the nodes, given by number, whose copies are not damaged."""
        damaged = [number for number, node in enumerate(self.rules.nodes) if node in self.findings.damaged]
        return ~np.isin(keys, damaged)

    def compare_copies(self) -> None:
        """Name the events of two-phase transactions that only one of two copies of a shard has."""
        keys, values = self.of_kind(COPY)
        for number, node in enumerate(self.rules.nodes):
            shard = self.rules.shard_of[node]
            if number == shard or not self.intact(np.array([number, shard])).all():
                continue
            ours, theirs = keys[:, 0] == shard, keys[:, 0] == number
            differs = differing_keys(Sums(keys[ours][:, 3:], values[ours]), Sums(keys[theirs][:, 3:], values[theirs]))
            self._name_events_of_one_copy(np.unique(differs.ravel()), (self.rules.nodes[shard], node))

    def _name_events_of_one_copy(self, buckets: Ints, pair: tuple[str, str]) -> None:
        """Add a conflict for each transaction of which one of two copies, (primary, standby), lacks events."""
        found: list[tuple[str, str]] = []
        for batch in self._batches(buckets, (COPY,)):
            if len(found) <= NAMED_MAX:
                parts = self._read_parts(PartQuery(self.rules, batch, between_copies=True), pair)
                found += _events_of_one_copy(parts, self.rules, pair) if parts else ()
        for global_id, detail in found[:NAMED_MAX]:
            self.findings.conflict(Conflict(TRANSACTION, detail, *pair, global_id=global_id))
        if len(found) > NAMED_MAX:
            detail = "more transactions of which only one of the archives has events are not listed"
            self.findings.conflict(Conflict(TRANSACTION, detail, *pair))

    def compare_shards(self) -> int:
        """Find the transactions that a participant lacks; return the number of those whose participants are known."""
        keys, values = self.of_kind(PAIR)
        both = self.intact(keys[:, 0]) & self.intact(keys[:, 2])
        keys, values = keys[both], values[both]
        forward = keys[:, 0] < keys[:, 2]
        pairs = differing_keys(
            Sums(keys[forward][:, [0, 2, 3]], values[forward]), Sums(keys[~forward][:, [2, 0, 3]], values[~forward])
        )
        bare, of_bare = self.of_kind(BARE)
        nobody = self.intact(bare[:, 0])
        shards = differing_keys(Sums(bare[nobody][:, [0, 3]], of_bare[nobody]), Sums(keys[:, [2, 3]], values))
        one_sided = np.unique(pairs[:, 2])
        unsettled = np.intersect1d(one_sided, shards[:, 1])
        known = self.count(LED_EARLY)
        for kind, buckets, inside in ((LED, one_sided, False), (NAMED, np.setdiff1d(one_sided, unsettled), True)):
            of_kind, counted = self.of_kind(kind)
            known += int(counted[np.isin(of_kind[:, 3], buckets) == inside, 0].sum())
        return known + self._compare_one_by_one(pairs[np.isin(pairs[:, 2], unsettled)])

    def _compare_one_by_one(self, pairs: Ints) -> int:
        """Read the parts in the buckets of `pairs` (shard, shard, bucket); return how many transactions are known."""
        intact = [shard for shard in self.rules.shards if shard not in self.findings.damaged]
        missing = _MissingParts(self.rules, self.findings, frozenset(map(self.rules.shards.index, intact)))
        known = 0
        for buckets in self._batches(np.unique(pairs[:, 2]), (NAMED, BARE)):
            of_batch = pairs[np.isin(pairs[:, 2], buckets)]
            left = np.array([not missing.is_full(*pair) for pair in of_batch[:, :2].tolist()], np.bool_)
            wanted = np.intersect1d(of_batch[left, 2], buckets)
            missing.unread += len(buckets) - len(wanted)
            if len(wanted):
                parts = self._read_parts(PartQuery(self.rules, wanted), intact)
                known += missing.add(parts) if parts else 0
        missing.report()
        return known

    def _batches(self, buckets: Ints, kinds: Sequence[int]) -> Iterator[Ints]:
        """Divide buckets (ascending) into batches of about PARTS_AT_ONCE parts of these kinds."""
        chosen = np.isin(self.sums.keys[:, 1], kinds) & np.isin(self.sums.keys[:, 3], buckets)
        places = np.searchsorted(buckets, self.sums.keys[chosen, 3])
        parts = np.bincount(places, self.sums.values[chosen, 0], len(buckets))
        batch = (np.cumsum(parts) - parts) // PARTS_AT_ONCE
        for number in np.unique(batch):
            yield buckets[batch == number]

    def _read_parts(self, query: PartQuery, nodes: Sequence[str]) -> pa.Table | None:
        """Read the wanted parts on these nodes (PART_SCHEMA); None if a segment is damaged, which is reported."""
        cuts = self.rules.buckets.cuts_of(query.buckets)
        segments: list[Segment] = []
        for node in nodes:
            archive = self.chain.segments(node)
            needed = self.rules.cuts[self.rules.shard_of[node]].are_needed(archive, cuts)
            segments += [segment for segment, is_needed in zip(archive, needed, strict=True) if is_needed]
        reports = self.read(segments, query)
        problems = [found.problem for found in reports if found.problem is not None]
        for problem in problems:
            # The object was intact when it was first read, so earlier results hold.
            self.findings.damage(problem)
        if problems:
            return None
        return pa.concat_tables([PART_SCHEMA.empty_table(), *(from_stream(found.parts) for found in reports)])


def _events_of_one_copy(parts: pa.Table, rules: PartRules, pair: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the global id and the problem of each transaction of which only one node in `pair` has some events."""
    counted = parts.group_by(["global_id", "op", "lsn"]).aggregate([("node", "min"), ("node", "max")])
    only = counted.filter(pc.equal(counted["node_min"], counted["node_max"])).sort_by("lsn")
    events: dict[tuple[str, str], list[str]] = {}
    # A transaction has two events, unless it has several branches.
    for row in only.slice(0, 4 * NAMED_MAX).to_pylist():
        has = rules.nodes[row["node_min"]]
        events.setdefault((row["global_id"], has), []).append(f"{_event_name(row['op'])} at {Lsn(row['lsn'])}")
    lacking = dict(zip(pair, reversed(pair), strict=True))
    return [
        (
            global_id,
            f"the archive of {lacking[has]} lacks its {' and its '.join(found)}, which the archive of {has} contains",
        )
        for (global_id, has), found in events.items()
    ]


def _event_name(op: int) -> str:
    return {PREPARE: "PREPARE", COMMIT: "COMMIT"}.get(op, "COMMIT PREPARED")


class _MissingParts(Struct):
    """The transactions that a participant lacks.

    `intact` are the numbers of the shards whose parts are read. `unread` counts the buckets that were not read, because
    enough transactions were named.
    """

    rules: PartRules
    findings: Findings
    intact: frozenset[int]
    unread: int = 0
    counts: Counter[tuple[int, int]] = field(default_factory=Counter)

    def is_full(self, shard: int, other: int) -> bool:
        """Whether enough transactions are named for a pair of shards."""
        return self.counts[shard, other] + self.counts[other, shard] >= NAMED_MAX

    def add(self, parts: pa.Table) -> int:
        """Compare all parts in some buckets (PART_SCHEMA); return how many transactions have known participants."""
        encoded = parts["global_id"].combine_chunks().dictionary_encode()
        gid, shard, cut, lsn = (
            to_numpy(values).astype(np.int64) for values in (encoded.indices, parts["node"], parts["cut"], parts["lsn"])
        )
        named, lists = named_shards(parts["participants"], self.rules.names)
        included = np.flatnonzero(cut >= 0)
        rows, others = named.expand(lists[included])
        rows = included[rows]
        # A shard may have had a transaction of the first cut before its slot was created.
        certain_from = np.array([cuts.certain_from for cuts in self.rules.cuts], np.int64)
        is_certain = (cut[rows] != self.rules.first) | (lsn[rows] >= certain_from[shard[rows]])
        rows, others = rows[is_certain], others[is_certain]
        known = len(distinct(gid[rows], cut[rows])[1])
        is_intact = np.isin(others, list(self.intact))
        rows, others = rows[is_intact], others[is_intact]
        identity = gid * len(self.rules.cuts[0].positions) + np.maximum(cut, 0)
        shards = len(self.rules.shards)
        wanted = identity[rows] * shards + others
        is_missing = ~np.isin(wanted, identity[included] * shards + shard[included])
        rows, others, wanted = rows[is_missing], others[is_missing], wanted[is_missing]
        # Of the shards that name a participant, the first is reported.
        order = np.lexsort((shard[rows], wanted))
        order = order[np.unique(wanted[order], return_index=True)[1]]
        rows, others = rows[order], others[order]
        for has, lacks in np.unique(np.stack([shard[rows], others], axis=1), axis=0).tolist():
            of_pair = rows[(shard[rows] == has) & (others == lacks)]
            left = max(NAMED_MAX - self.counts[has, lacks], 0)
            self.counts[has, lacks] += len(of_pair)
            for row in of_pair[:left].tolist():
                on_other = cut[(gid == gid[row]) & (shard == lacks)]
                self._conflict(encoded.dictionary[int(gid[row])].as_py(), (has, lacks), on_other)
        return known

    def _conflict(self, global_id: str, pair: tuple[int, int], on_other: Ints) -> None:
        """Add a conflict; `on_other` has the cuts of the transaction's parts on the shard that lacks it."""
        has, lacks = (self.rules.shards[number] for number in pair)
        if (on_other == ROLLED_BACK).any():
            why = "it was rolled back there"
        elif (on_other == LATER).any():
            why = "the state does not include its part there"
        elif len(on_other):
            why = "its part there belongs to another cut"
        else:
            why = NO_PART
        if _is_reported(self.findings, global_id, {has, lacks}):
            return
        detail = f"it is included in the state on {has}, which names {lacks} as a participant, but {why}"
        self.findings.conflict(Conflict(TRANSACTION, detail, node=lacks, other_node=has, global_id=global_id))

    def report(self) -> None:
        """Add a conflict for each pair of shards with more transactions than are named."""
        for (has, lacks), count in sorted(self.counts.items()):
            if count > NAMED_MAX:
                more = f"{'at least ' * bool(self.unread)}{count - NAMED_MAX:,}"
                detail = f"{more} more transactions that it lacks are not listed"
                here, there = self.rules.shards[lacks], self.rules.shards[has]
                self.findings.conflict(Conflict(TRANSACTION, detail, node=here, other_node=there))


def _is_reported(findings: Findings, global_id: str, nodes: set[str]) -> bool:
    return any(
        one.kind == TRANSACTION and one.global_id == global_id and {one.node, one.other_node} == nodes
        for one in findings.report.conflicts
    )
