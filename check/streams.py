"""Hash the segments of all copies, and find the last changes in the same tasks, so that each segment is read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from cutline.check.copies import Copies
from cutline.check.cuts import READS_AT_ONCE
from cutline.check.deleted_rows import CHANGES_MAX, ExpectedRows, KeyDeletes, expected_rows
from cutline.check.hashing import Sums, combine_all
from cutline.check.last_changes import last_tasks
from cutline.check.new_part import NewPart
from cutline.check.report import Conflict, Findings
from cutline.check.required_values import RequiredSince
from cutline.check.segment_hashes import StreamReport, StreamRun, StreamTask, hash_run
from cutline.check.table_forms import forms_of_shards
from cutline.check.transaction_parts import PartReport, PartRules
from cutline.check.truncates import note_contradicted
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.progress import Progress
from cutline.snapshots.fold.sources import SegmentSource, Sources, runs_of
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit_rules import operations_of
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import LANES_AT_LEAST, Dealing, NodeShares, SparkSource, run_tasks, shared_problem
from cutline.spark.task_processes import InDriver
from cutline.storage.errors import ErrorReport, report_of
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import HeldObjects, ObjectDamagedError, OpensStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The driver keeps at most this many events from primaries (10 to 30 bytes each, compressed), so that their segments are
# not read again.
EVENTS_MAX = 2_000_000
RUNS_PER_READER = 2


class StreamHashes(Struct, frozen=True):
    """Combined hashes of all streams, keyed by (node number, group), and each node's markers: position by content.

    `store` is where the segments were read. `last` maps object keys to the reports of last changes of `sources` until
    they are used. `events` maps object keys to the events from primaries, or to None if they were not kept. `parts`
    are the reduced parts of global transactions, of every intact segment. `expected` are the base rows that changes
    delete, by node number.
    """

    sums: Sums
    markers: Mapping[str, Mapping[bytes, Lsn]]
    store: OpensStore
    sources: Sources | None = None
    last: dict[str, bytes | None] = field(default_factory=dict)
    events: dict[str, bytes] | None = None
    parts: tuple[PartReport, ...] = ()
    expected: Mapping[int, ExpectedRows] = field(default_factory=dict)

    @property
    def held(self) -> HeldObjects | None:
        """The segments, if the driver holds them."""
        return self.store if isinstance(self.store, HeldObjects) else None


def hash_streams(
    spark: SparkSource,
    copies: Copies,
    store: OpensStore,
    findings: Findings,
    progress: Progress,
    sources: Sources | None = None,
    rules: PartRules | None = None,
    part: NewPart | None = None,
) -> StreamHashes:
    """Hash every copy's segments, in a Spark job unless the driver holds them; report unreadable segments as damage.

    With `sources`, the last changes and the events from primaries are kept if they are small enough, so that the
    segments are not read again. With `rules`, the parts of global transactions are reduced. With `part`, only its
    segments are read, and only their new changes and events are hashed.
    """
    part = part or NewPart(copies.chain)
    segments = _segments_to_read(copies, part)
    before = _segments_before(copies)
    with_events = sources is not None and _count_primary_events(segments, copies) <= EVENTS_MAX
    is_here = isinstance(store, HeldObjects)
    send = InDriver if is_here else lambda value: broadcast(spark.session(), value)
    with _sending_facts(copies, rules, send) as facts:
        tasks = _tasks_of(segments, before, copies, part, store, facts, sources, with_events=with_events)
        progress.step("read WAL archive", total=len(tasks), unit="objects")
        reports = _run_here(tasks, progress) if is_here else _run_tasks(spark.session(), tasks, progress)
    checks = _ReportChecks.of(copies, before, segments, reports, findings)
    results = _ReportedResults.of_nodes(copies.nodes)
    for segment, report in zip(segments, reports, strict=True):
        checks.check(segment, report)
        if report.problem is not None:
            findings.damage(report.problem)
        elif report.sums is not None:
            results.add(segment, report, report.sums)
            findings.count(objects=1, size_bytes=segment.source.size, changes=report.changes)
    note_contradicted(results.deletes, copies, findings)
    return StreamHashes(
        combine_all(results.sums, 2),
        results.markers,
        store,
        sources,
        results.last,
        results.events if with_events else None,
        tuple(report.parts for report in reports if report.parts is not None),
        {number: expected_rows(of_node) for number, of_node in results.deletes.items()},
    )


def _segments_to_read(copies: Copies, part: NewPart) -> list[SegmentSource]:
    return [
        segment
        for number, node in enumerate(copies.nodes)
        for segment in part.segment_sources(number, node, copies.same_shard(node))
    ]


def _count_primary_events(segments: Iterable[SegmentSource], copies: Copies) -> int:
    return sum(segment.segment.events for segment in segments if _is_primary(segment, copies))


class _SentFacts(Struct, frozen=True):
    """The facts that many tasks share, as broadcasts: the fields of StreamTask with these names, by shard, and `parts`.

    `required` lacks the shards without columns that are NOT NULL.
    """

    forms: Mapping[str, Any]
    required: Mapping[str, Any]
    parts: Any


@contextmanager
def _sending_facts(copies: Copies, rules: PartRules | None, send: Callable[[Any], Any]) -> Iterator[_SentFacts]:
    """Send the facts with `send`; at the end of the block, executors may forget them."""
    forms = forms_of_shards(copies.chain, set(copies.shard.values()), copies.own_types, send)
    columns = {shard: RequiredSince.of(since) for shard, since in copies.required_since.items()}
    required = {shard: send(found) for shard, found in columns.items() if len(found.columns)}
    parts = send(rules) if rules is not None else None
    try:
        yield _SentFacts(forms, required, parts)
    finally:
        for sent in (*forms.values(), *required.values(), *([parts] if parts else [])):
            sent.unpersist()


def _tasks_of(
    segments: Sequence[SegmentSource],
    before: Mapping[str, Segment],
    copies: Copies,
    part: NewPart,
    store: OpensStore,
    facts: _SentFacts,
    sources: Sources | None,
    *,
    with_events: bool,
) -> list[StreamTask]:
    """Return the task of each segment; `before` is the segment before each in its archive, by key."""
    since = {node: copies.since(node) for node in copies.nodes}
    decided = {node: part.decided(node) for node in copies.nodes}
    alone = copies.alone
    last = last_tasks(sources, alone) if sources else {}
    # For a part of a chain, the base copies are not read again, so nothing shows whether they have deleted rows.
    with_deletes = part.after is None and sum(segment.segment.changes for segment in segments) <= CHANGES_MAX

    def task_of(segment: SegmentSource) -> StreamTask:
        key, node = segment.source.key, segment.source.node
        shard = copies.shard[node]
        return StreamTask(
            segment,
            since[node],
            store,
            facts.forms[shard],
            last=last.get(key),
            with_events=with_events and _is_primary(segment, copies),
            parts=facts.parts,
            # A new segment of an idle node may begin before the cut that was checked.
            checked_to=ORIGIN if part.is_new(segment.segment) else part.checked_to(node),
            decided=decided[node],
            continued=before[key].open if key in before else None,
            base=copies.chain.slot_position(node),
            with_deletes=with_deletes,
            required=facts.required.get(shard),
            is_compared=segment.source.number not in alone,
        )

    return [task_of(segment) for segment in segments]


class _ReportChecks(Struct, frozen=True):
    """Compares the reports with each other and with the chain's commits.

    `reports` are keyed by the segment's key, and so is `before`, the segment before each in its archive. `ended` are
    the definitions that had ended before a segment, by node and segment number, and `continued` the results of
    `continued_from` by node.
    """

    chain: Chain
    before: Mapping[str, Segment]
    reports: Mapping[str, StreamReport]
    ended: Mapping[tuple[str, int], frozenset[int]]
    continued: Mapping[str, Mapping[int, Lsn]]
    findings: Findings

    @classmethod
    def of(
        cls,
        copies: Copies,
        before: Mapping[str, Segment],
        segments: Iterable[SegmentSource],
        reports: Iterable[StreamReport],
        findings: Findings,
    ) -> _ReportChecks:
        chain = copies.chain
        by_key = {segment.source.key: report for segment, report in zip(segments, reports, strict=True)}
        ended = {(node, number): groups for node in copies.nodes for number, groups in find_ended(chain, node).items()}
        return cls(chain, before, by_key, ended, {node: continued_from(chain, node) for node in copies.nodes}, findings)

    def check(self, segment: SegmentSource, report: StreamReport) -> None:
        """Add what a segment's report contradicts to the findings."""
        self._check_end(segment, report)
        self._check_ended(segment, report)
        self._check_first_changes(segment, report)

    def _check_end(self, segment: SegmentSource, report: StreamReport) -> None:
        """Check that the segment has the end of the transaction that the segment before it has begun."""
        before = self.before.get(segment.source.key)
        if before is None or not report.lacks_end:
            return
        begun = self.reports.get(before.key)
        if begun is not None and begun.is_open_prepared is False:
            self.findings.damage(_lacks_end(segment, before))

    def _check_ended(self, segment: SegmentSource, report: StreamReport) -> None:
        """Check that the segment has no changes under definitions that had ended before it."""
        ended = self.ended.get((segment.source.node, segment.segment.number), frozenset()) & report.groups
        if ended:
            self.findings.damage(_is_ended(self.chain, segment, min(ended)))

    def _check_first_changes(self, segment: SegmentSource, report: StreamReport) -> None:
        """Check that no change precedes the position from which the changes of its definition count."""
        source, continued = segment.source, self.continued[segment.source.node]
        for number, first in report.first_changes.items():
            if first < (counted_from := continued.get(number, first)):
                group = self.chain.definitions(source.node)[number].name
                detail = f"changes under group {number} count from {counted_from}, but one is at {first}"
                self.findings.conflict(Conflict("commit", detail, node=source.node, group=group, object=source.key))


class _ReportedResults(Struct, frozen=True):
    """The results of the reports on intact segments, as in StreamHashes; `deletes` are keyed by node number."""

    markers: Mapping[str, dict[bytes, Lsn]]
    sums: list[Sums] = field(default_factory=list)
    last: dict[str, bytes | None] = field(default_factory=dict)
    events: dict[str, bytes] = field(default_factory=dict)
    deletes: dict[int, list[KeyDeletes]] = field(default_factory=dict)

    @classmethod
    def of_nodes(cls, nodes: Iterable[str]) -> _ReportedResults:
        return cls({node: {} for node in nodes})

    def add(self, segment: SegmentSource, report: StreamReport, sums: Sums) -> None:
        """Add a report whose sums are `sums`."""
        source = segment.source
        self.sums.append(sums)
        self.markers[source.node].update(dict(report.markers))
        self.last[source.key] = report.last
        if report.events is not None:
            self.events[source.key] = report.events
        if report.deletes is not None:
            self.deletes.setdefault(source.number, []).append(report.deletes)


def _segments_before(copies: Copies) -> dict[str, Segment]:
    """Return the segment before each in the archive of its node, by the later segment's key."""
    archives = (copies.chain.segments(node) for node in copies.nodes)
    return {later.key: earlier for archive in archives for earlier, later in pairwise(archive)}


def find_ended(chain: Chain, node: str) -> dict[int, frozenset[int]]:
    """Return the definitions that no longer existed when each of a node's segments was written, by segment number.

    A drain knows the definitions in the commit before it, and those that are new. Segments without such definitions are
    left out.
    """
    found: dict[int, frozenset[int]] = {}
    shard, ended, ended_at = chain.shard_of(node), frozenset[int](), dict[str, frozenset[int]]()
    for commit in chain.commits:
        ended_at[commit.operation] = ended
        if ended and commit.increment >= chain.begun(node):
            # Of a copy that was made in the background, several increments have written the archive.
            *_, first = operations_of(commit, node)
            found |= {segment.number: ended_at.get(first, frozenset()) for segment in commit.segments.get(node, ())}
        if commit.definition_changes:
            ended |= set(commit.definition_changes.gone.get(shard, ()))
    return found


def continued_from(chain: Chain, node: str) -> dict[int, Lsn]:
    """Return the positions from which changes of a node count under definitions that continue others, by number.

    A create sets them to the first change. In a table that was copied, changes before the copy don't count.
    """
    shard = chain.shard_of(node)
    changes = [
        commit.definition_changes
        for commit in chain.commits
        if commit.definition_changes and commit.increment >= chain.begun(node)
    ]
    return {
        number: begun
        for one in changes
        for number, begun in one.begun.get(node, {}).items()
        if number in one.successions.get(shard, {})
    }


def _is_ended(chain: Chain, segment: SegmentSource, number: int) -> ErrorReport:
    group, node = chain.definitions(segment.source.node)[number], segment.source.node
    detail = f"it contains changes of table {group.name} under a definition that had ended before (group {number})"
    return report_of(ObjectDamagedError(key=segment.source.key, kind="rows", node=node, detail=detail))


def _lacks_end(segment: SegmentSource, before: Segment) -> ErrorReport:
    """Return the error for a segment that lacks the end of the transaction that the segment before it has begun.

    PostgreSQL may omit the rest of a two-phase transaction that was rolled back meanwhile.
    """
    at = before.open.lsn if before.open else segment.segment.after
    detail = f"it lacks the end of the transaction at {at}, which begins in segment {before.number}"
    return report_of(ObjectDamagedError(key=segment.source.key, kind="rows", node=segment.source.node, detail=detail))


def _segment_of(task: StreamTask) -> Segment:
    return task.segment.segment


def _shared_by_run(task: StreamTask) -> object:
    """Return what the tasks of a run have in common; all tasks of a node have the rest in common."""
    return task.segment.source.number, task.checked_to, task.continued


def _is_primary(segment: SegmentSource, copies: Copies) -> bool:
    return copies.shard[segment.source.node] == segment.source.node


def _run_tasks(session: SparkSession, tasks: Sequence[StreamTask], progress: Progress) -> list[StreamReport]:
    runs = list(runs_of(tasks, _segment_of, _shared_by_run, LANES_AT_LEAST))
    dealing = Dealing[StreamRun](lambda run: sum(task.segment.source.size for task in run))
    reports = run_tasks(session, hash_run, runs, _shares_of(tasks, progress), dealing, problem_of=_problem_of_run)
    return [report for of_run in reports for report in of_run]


def _problem_of_run(reports: list[StreamReport]) -> ErrorReport | None:
    return next(filter(None, map(shared_problem, reports)), None)


def _run_here(tasks: Sequence[StreamTask], progress: Progress) -> list[StreamReport]:
    shares = _shares_of(tasks, progress)

    def read(run: StreamRun) -> list[StreamReport]:
        reports = hash_run(run)
        shares.end([run])
        return reports

    with ThreadPoolExecutor(READS_AT_ONCE) as threads:
        of_runs = threads.map(read, runs_of(tasks, _segment_of, _shared_by_run, RUNS_PER_READER * READS_AT_ONCE))
        return [report for of_run in of_runs for report in of_run]


def _shares_of(tasks: Sequence[StreamTask], progress: Progress) -> NodeShares[StreamRun]:
    def shares_of(run: Sequence[StreamTask]) -> list[tuple[str, int]]:
        return [(task.segment.source.node, task.segment.source.size) for task in run]

    totals = Counter[str]()
    for node, size in shares_of(tasks):
        totals[node] += size
    shares = NodeShares[StreamRun](progress, totals, shares_of)
    shares.begin()
    return shares
