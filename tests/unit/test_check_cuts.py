"""Every cut of a chain is resolved again from its archived events."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from cutline.check.cuts import READS_AT_ONCE, StoredEvents, check_cuts, check_markers
from cutline.check.report import Findings, SnapshotReport
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore, StoreUnreachableError
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.markers import Marker
from cutline.wal.segments.archive import Segment, SegmentRange
from cutline.wal.segments.segments import create_segment
from tests.unit.made_commits import MARKED_AT, full_commit, increment_commit, memory, unused_url
from tests.unit.made_segments import event, table
from tests.unit.made_shards import MadeShards, Row, rolled_back, transaction


class SilentStore(InMemoryStore):
    """A store that answers no read."""

    def read_range(self, key: str, start: int, length: int) -> bytes:
        raise StoreUnreachableError(url=self.url, reason=f"no answer about {key} from {start} on, {length} bytes")


@dataclass(slots=True)
class Traffic:
    """The reads that a store has answered, and those at once."""

    reads: int = 0
    under_way: int = 0
    under_way_max: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class SlowStore(InMemoryStore):
    """A store that answers a read after a moment."""

    traffic: Traffic = field(default_factory=Traffic)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        traffic = self.traffic
        with traffic.lock:
            traffic.reads += 1
            traffic.under_way += 1
            traffic.under_way_max = max(traffic.under_way, traffic.under_way_max)
        time.sleep(0.02)
        with traffic.lock:
            traffic.under_way -= 1
        return InMemoryStore.read_range(self, key, start, length)


@dataclass(slots=True)
class Steps(Silent):
    """Keeps the steps, and how far the last one is."""

    steps: list[tuple[str, int | None]] = field(default_factory=list)
    done: int = 0

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.steps.append((name, total))

    def advance(self, done: int) -> None:
        self.done += done


def findings_of(store: ObjectStore, chain: Chain, steps: Steps | None = None) -> Findings:
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    check_cuts(chain, StoredEvents(store), findings, steps or Steps())
    return findings


def made_chain(store: ObjectStore, increments: int, segments: int = 1) -> Chain:
    """A chain with a cut in the last segment of each commit: a transaction before it, and one after it."""
    commits = [made_commit(store, number, segments) for number in range(increments + 1)]
    return Chain(commits[0], tuple(commits[1:]))  # type: ignore[arg-type]


def made_commit(store: ObjectStore, number: int, segments: int) -> Commit:
    numbers = range(number * segments + 1, (number + 1) * segments + 1)
    listed = tuple(made_segment(store, one, is_last=one == numbers[-1]) for one in numbers)
    at = (listed[-1].number - 1) * 100
    # The first window lacks the transaction after the cut before.
    cut = NodeCut("a", Lsn(at + 50), Lsn(at + 60), Lsn(at + 50), segments + bool(number), (), (), (), MARKED_AT)
    made = increment_commit(number) if number else full_commit()
    return structs.replace(made, cut=structs.replace(made.cut, nodes=(cut,)), segments={"a": listed})


def made_segment(store: ObjectStore, number: int, *, is_last: bool) -> Segment:
    begin = (number - 1) * 100
    events = table([event(begin + 10), *([event(begin + 80)] if is_last else [])])
    wal_range = SegmentRange("a", "op", Lsn(begin), Lsn(begin + 100))
    return create_segment(store, "wal", number, wal_range, (table([]), events), continued=None).segment


def test_a_store_that_does_not_answer_is_no_conflict() -> None:
    with pytest.raises(StoreUnreachableError) as raised:
        findings_of(SilentStore(unused_url()), Chain(full_commit()))
    assert raised.value.exit_code == 6


def test_an_archive_that_is_missing_is_damage_of_its_node() -> None:
    findings = findings_of(memory(), Chain(full_commit()))
    assert [one.kind for one in findings.report.conflicts] == ["missing"]
    assert findings.damaged == {"a"}


def test_every_cut_is_resolved_from_the_segments_of_its_window() -> None:
    store, steps = SlowStore(unused_url()), Steps()
    chain = made_chain(store, increments=20)
    assert findings_of(store, chain, steps).report.conflicts == []
    assert (steps.steps, steps.done) == ([("resolve cuts again", 21)], 21)
    # A segment with a cut belongs to two windows, the last to one.
    assert store.traffic.reads == 2 * 21 - 1


def test_only_the_cuts_of_later_increments_are_resolved_from_the_segments_of_their_windows() -> None:
    store, steps = SlowStore(unused_url()), Steps()
    chain = made_chain(store, increments=20)
    findings = Findings(SnapshotReport(chain.name, 20))
    check_cuts(chain, StoredEvents(store), findings, steps, after=10)
    assert findings.report.conflicts == []
    assert (steps.steps, steps.done) == ([("resolve cuts again", 10)], 10)
    assert store.traffic.reads == 2 * 10
    # A wrong count is found if its cut is resolved.
    for wrong, found in ((10, []), (11, ["cut op-11.1"])):
        commit = chain.increments[wrong - 1]
        (node,) = commit.cut.nodes
        cut = structs.replace(commit.cut, nodes=(structs.replace(node, local_transactions=7),))
        increments = list(chain.increments)
        increments[wrong - 1] = structs.replace(commit, cut=cut)
        findings = Findings(SnapshotReport(chain.name, 20))
        check_cuts(Chain(chain.full, tuple(increments)), StoredEvents(store), findings, steps, after=10)
        assert [one.detail.partition(":")[0] for one in findings.report.conflicts] == found


@pytest.mark.parametrize("lacking", [None, (1, "start"), (2, "finish"), (0, "start")])
def test_markers_are_wanted_of_later_cuts_and_of_those_for_which_the_node_was_idle(
    lacking: tuple[int, str] | None,
) -> None:
    """The archive of node b was not extended for increment 1, and was for increment 2."""
    chain = made_chain(memory(), increments=2)
    full, first, second = chain.commits
    (idle,) = full.segments["a"]
    first = structs.replace(first, idle={"b": idle})
    cuts = {commit.increment: commit.cut for commit in chain.commits}
    markers = {
        Marker("op-0", cuts[number].id, kind).to_bytes(): position
        for number in (0, 1, 2)
        for kind, position in (
            ("start", cuts[number].nodes[0].start),
            ("finish", cuts[number].nodes[0].finish),
        )
        if (number, kind) != lacking
    }
    findings = Findings(SnapshotReport(chain.name, 2))
    check_markers(Chain(chain.full, (first, second)), {"b": markers}, findings, after=1)  # type: ignore[arg-type]
    # The cut of the full snapshot was checked with the segment that was there then.
    expected = [] if lacking in (None, (0, "start")) else [cuts[lacking[0]].id]
    assert [one.detail.split()[-3] for one in findings.report.conflicts] == expected


def test_a_changed_position_is_a_conflict_of_its_cut_and_of_the_next() -> None:
    store = memory()
    chain = made_chain(store, increments=3)
    wrong = chain.increments[1]
    (node,) = wrong.cut.nodes
    cut = structs.replace(wrong.cut, nodes=(structs.replace(node, position=Lsn(node.position + 40)),))
    chain = Chain(chain.full, (chain.increments[0], structs.replace(wrong, cut=cut), chain.increments[2]))
    details = [one.detail for one in findings_of(store, chain).report.conflicts]
    assert [detail.partition(":")[0] for detail in details] == ["cut op-2.1", "cut op-3.1"]
    assert "position is 0/122 in the commit, but 0/FA in the archived events" in details[0]


@pytest.mark.parametrize(
    ("stored", "conflicts"),
    [("2000-01-01T00:30:00.000Z", 0), ("2000-01-01T01:00:00.000Z", 1)],
    ids=["limited by the marker", "not limited"],
)
def test_the_last_commit_of_a_clock_that_was_set_back_is_limited_by_the_marker(stored: str, conflicts: int) -> None:
    """The transaction before the cut was committed at 1:00, the marker was written at 0:30."""
    store = memory()
    events = table([event(10) | {"seq": 3600 * 10**6}])
    listed = create_segment(
        store, "wal", 1, SegmentRange("a", "op", Lsn(0), Lsn(100)), (table([]), events), continued=None
    ).segment
    cut = NodeCut(
        "a", Lsn(50), Lsn(60), Lsn(50), 1, (), (), (),
        last_commit_at=Time(stored), marked_at=Time("2000-01-01T00:30:00.000Z"),
    )  # fmt: skip
    made = full_commit()
    full = structs.replace(made, cut=structs.replace(made.cut, nodes=(cut,)), segments={"a": (listed,)})
    details = [one.detail for one in findings_of(store, Chain(full)).report.conflicts]
    assert len(details) == conflicts, details


def test_the_segments_of_a_window_are_read_at_once_but_not_all() -> None:
    store = SlowStore(unused_url())
    chain = made_chain(store, increments=1, segments=3 * READS_AT_ONCE)
    assert findings_of(store, chain).report.conflicts == []
    assert store.traffic.under_way_max == READS_AT_ONCE


def at_time(rows: list[Row], prepared: int, ended: int) -> list[Row]:
    """A part that was prepared, and then committed or rolled back, at these times."""
    return [one | {"seq": prepared if one["op"] == ord("P") else ended} for one in rows]


@pytest.mark.parametrize(
    ("committed", "rolled_back_elsewhere", "is_doubtful"),
    [((1, 5), (2, 4), True), ((3, 5), (1, 4), True), ((4, 6), (1, 3), False), ((1, 2), (3, 4), False)],
)
def test_a_transaction_that_shards_decided_differently_is_doubtful(
    committed: tuple[int, int], rolled_back_elsewhere: tuple[int, int], *, is_doubtful: bool
) -> None:
    """Attempts after each other may use one gid; parts that were prepared at the same time belong together."""
    made = MadeShards(
        {
            "a": at_time(transaction("pay", 100), *committed),
            "b": at_time(rolled_back("pay", 100), *rolled_back_elsewhere),
        }
    )
    store = memory()
    findings = findings_of(store, made.chain(store))
    assert findings.report.conflicts == []
    details = [one.detail for one in findings.report.doubts if one.kind == "transaction"]
    assert [" was committed on a, but rolled back on b: somebody" in one for one in details] == [True] * is_doubtful


def test_a_transaction_that_was_tried_again_is_not_doubtful() -> None:
    """The second attempt was committed on both shards, whichever attempts were rolled back before."""
    tried = at_time(rolled_back("pay", 100), 1, 2)
    again = at_time(transaction("pay", 300), 3, 4)
    store = memory()
    findings = findings_of(store, MadeShards({"a": tried + again, "b": again, "c": tried + again}).chain(store))
    assert [one for one in findings.report.doubts if one.kind == "transaction"] == []
    # One part was tried again while the other waited.
    waited = at_time(transaction("pay", 100, committed=350), 1, 4)
    findings = findings_of(third := memory(), MadeShards({"a": waited, "b": tried + again}).chain(third))
    assert [one for one in findings.report.doubts if one.kind == "transaction"] == []
    # Rolled back on both shards, and then committed on one of them alone.
    findings = findings_of(other := memory(), MadeShards({"a": tried + again, "b": tried}).chain(other))
    assert [one for one in findings.report.doubts if one.kind == "transaction"] == []
