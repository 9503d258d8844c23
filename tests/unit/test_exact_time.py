"""Exact times on small cases that can be followed by hand; tests/simulation has the interleavings."""

from __future__ import annotations

from datetime import datetime, timedelta

import pyarrow as pa
import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.snapshots.listing.exact_point import (
    ExactDefinitionsError,
    ExactPoint,
    ExactTimeError,
    check_same_definitions,
    find_exact_point,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DefinitionChanges, Increment
from cutline.storage.memory import InMemoryStore
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.exact_time import position_at, resolve_at
from cutline.wal.cut.resolve import GlobalIdReusedError
from cutline.wal.cut.safe_time import POSTGRESQL_EPOCH
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.unit.made_commits import MARKED_AT, full_commit, increment_commit

# The op, the LSN of its record, its time in microseconds, and its global id; every record is 10 bytes long.
Event = tuple[str, int, int] | tuple[str, int, int, str]


def events(*found: Event) -> pa.Table:
    rows = [
        {
            "lsn": lsn, "end_lsn": lsn + 10, "seq": at, "xid": ord(gid[0]) if gid else 1000 + number,
            "global_id": gid[0] if gid else None, "op": ord(op), "group": 0, "partition": -1, "key": b"", "row": b"",
        }
        for number, (op, lsn, at, *gid) in enumerate(found)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA)


def cut_at(node: str, position: int) -> NodeCut:
    return NodeCut(node, Lsn(position), Lsn(position), Lsn(position), 0, (), (), (), MARKED_AT)


def at(microseconds: int) -> datetime:
    return POSTGRESQL_EPOCH + timedelta(microseconds=microseconds)


@pytest.mark.parametrize(
    ("microseconds", "position"), [(0, 100), (999, 100), (1000, 120), (1999, 120), (2000, 180), (9999, 180)]
)
def test_a_node_stands_before_its_first_later_commit(microseconds: int, position: int) -> None:
    # The PREPARE is no commit; what begins at the later cut's position or after it does not count.
    found = events(("C", 110, 1000), ("P", 130, 1500, "g"), ("C", 150, 2000), ("K", 170, 1800, "h"), ("C", 200, 2500))
    assert position_at(found, Lsn(100), Lsn(200), microseconds) == position


def test_a_commit_that_follows_a_later_one_is_late() -> None:
    found = events(("C", 110, 1000), ("C", 120, 3000), ("C", 130, 2000))
    resolved = resolve_at({"a": cut_at("a", 100)}, {"a": cut_at("a", 200)}, {"a": found}, at(2500))
    (node,) = resolved.nodes
    assert (node.at, node.position, node.early, node.late) == (120, 120, 0, 1)
    assert node.last_commit_at == Time.exactly(at(1000))


def test_a_commit_without_a_time_is_in_the_state_if_those_around_it_are() -> None:
    found = events(("C", 110, 0), ("C", 120, 1000), ("C", 130, 0), ("C", 140, 2000), ("C", 150, 0))
    assert position_at(found, Lsn(100), Lsn(200), 1500) == 140
    assert position_at(found, Lsn(100), Lsn(200), 2000) == 160


def test_what_another_node_committed_in_time_is_included_early_with_what_precedes_it() -> None:
    first = events(("P", 110, 900, "g"), ("K", 130, 1000, "g"), ("C", 150, 3000))
    second = events(("C", 110, 1500), ("C", 120, 2500), ("P", 130, 950, "g"), ("C", 140, 2600), ("K", 150, 2700, "g"))
    cuts = {node: cut_at(node, 100) for node in "ab"}, {node: cut_at(node, 200) for node in "ab"}
    resolved = resolve_at(*cuts, {"a": first, "b": second}, at(2000))
    assert [(node.at, node.position) for node in resolved.nodes] == [(140, 140), (120, 140)]
    early = resolved.nodes[1]
    # The local commit at 120, and the part of g, which b commits after the position.
    assert early.early == 2
    assert [(one.global_id, one.committed_at) for one in early.named] == [
        (None, Time.exactly(at(2500))),
        ("g", Time.exactly(at(2700))),
    ]
    assert resolved.cut.included_early == 1


def test_an_idle_node_stands_where_the_earlier_cut_was() -> None:
    resolved = resolve_at({"a": cut_at("a", 100)}, {"a": cut_at("a", 200)}, {"a": events()}, at(5))
    assert resolved.nodes[0].position == 100
    assert resolved.nodes[0].last_commit_at is None


def test_a_gid_that_is_used_twice_in_between_is_refused() -> None:
    found = events(("P", 110, 1, "g"), ("K", 120, 2, "g"), ("P", 130, 3, "g"), ("K", 140, 4, "g"))
    with pytest.raises(GlobalIdReusedError):
        resolve_at({"a": cut_at("a", 100)}, {"a": cut_at("a", 200)}, {"a": found}, at(2))


BEGAN = datetime.fromisoformat("2026-11-20T10:00:00Z")


def minute(number: float) -> datetime:
    return BEGAN + timedelta(minutes=number)


def chain_of(*times: tuple[float, float]) -> Chain:
    """A chain whose cuts were made, and are safe, at these minutes; its nodes are idle."""
    full, *increments = [full_commit(), *(increment_commit(number) for number in range(1, len(times)))]
    made = []
    for commit, (made_at, safe_at) in zip([full, *increments], times, strict=True):
        cut = structs.replace(commit.cut, made_at=Time.of(minute(made_at)), safe_at=Time.of(minute(safe_at)))
        made.append(structs.replace(commit, cut=cut, segments={node: () for node in commit.segments}))
    return Chain(made[0], tuple(made[1:]))


def found(chain: Chain, number: float) -> ExactPoint:
    return find_exact_point(InMemoryStore("memory://timed"), chain, minute(number))


@pytest.mark.parametrize(
    ("at_minute", "before", "after"), [(0, 0, 1), (5, 0, 1), (9, 0, 1), (9.5, 0, 2), (10, 1, 2), (19, 1, 2)]
)
def test_the_state_lies_between_the_cuts_around_the_time(at_minute: float, before: int, after: int) -> None:
    """Close to a cut, clocks that differ by a minute leave it open whether the time is before or after the cut."""
    point = found(chain_of((0, -1), (10, 9), (20, 19)), at_minute)
    assert (point.before.increment, point.after.increment) == (before, after)
    assert point.chain.last.increment == after
    assert point.chain.digest != point.after.digest


def test_the_newest_time_can_be_restored_although_the_last_cut_seems_to_be_before_it() -> None:
    """The time of a cut is cut off after milliseconds; its safe time, that of a commit, has microseconds."""
    chain = chain_of((0, -1), (10, 9), (20, 20))
    (last,) = chain.increments[1:]
    later = timedelta(microseconds=900)
    cut = structs.replace(last.cut, safe_at=Time.exactly(minute(20) + later))
    chain = replace(chain, increments=(chain.increments[0], structs.replace(last, cut=cut)))
    point = find_exact_point(InMemoryStore("memory://timed"), chain, minute(20) + later)
    assert (point.before.increment, point.after.increment) == (1, 2)


@pytest.mark.parametrize(("at_minute", "message"), [(-0.5, "has no state at"), (19.5, "complete only up to")])
def test_times_outside_the_archived_wal_are_refused_with_the_possible_ones(at_minute: float, message: str) -> None:
    with pytest.raises(ExactTimeError, match=message) as raised:
        found(chain_of((0, -1), (10, 9), (20, 19)), at_minute)
    assert raised.value.details["earliest"] == "2026-11-20T10:00:00.000000Z"
    assert raised.value.details["newest"] == "2026-11-20T10:19:00.000000Z"


def test_a_full_snapshot_alone_has_no_exact_times() -> None:
    chain = chain_of((0, -1))
    with pytest.raises(ExactTimeError, match="no increment with WAL after the full snapshot"):
        found(chain, 0)
    # As a chain begins that was merged at its newest increment.
    with pytest.raises(ExactTimeError, match="after increment 3") as raised:
        found(replace(chain, full=structs.replace(chain.full, increment=3)), 0)
    assert raised.value.hint.endswith("or restore increment 3 without --exact")


def test_changed_definitions_are_refused_on_their_shards_only() -> None:
    chain = chain_of((0, -1), (10, 9), (20, 19))
    shard = chain.full.primaries[0]
    changed = structs.replace(
        chain.increments[1], definition_changes=DefinitionChanges(fingerprints={shard: "changed"})
    )
    assert isinstance(changed, Increment)
    chain = Chain(chain.full, (chain.increments[0], changed))
    check_same_definitions(found(chain, 5), [shard])
    check_same_definitions(found(chain, 15), [])
    with pytest.raises(ExactDefinitionsError, match=f"on {shard}: DDL") as raised:
        check_same_definitions(found(chain, 15), [shard])
    assert "--increment 1" in raised.value.hint
    assert "--increment 2" in raised.value.hint
    command = "snapshot restore daily --node s1 --replace"
    with pytest.raises(ExactDefinitionsError) as raised:
        check_same_definitions(found(chain, 15), [shard], command)
    assert raised.value.hint.split("\n") == [
        f"restore the state before the change: {command} --increment 1",
        f"or the state after it: {command} --increment 2",
    ]
