"""Transactions that one shard lacks are found if their participants are known; what is not known is counted.

Each chain is intact when its cuts are made; then events are lost from the stored archives, as if whoever can write to
the store had removed them and sealed everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import cutline.check.transactions
from cutline.check.cuts import StoredEvents, check_cuts
from cutline.check.new_part import NewPart
from cutline.check.report import CheckReport, Compared, Conflict, Findings, SnapshotReport
from cutline.check.restore_points import check_restore_point
from cutline.check.transaction_parts import Buckets, PartRules, reduce_parts
from cutline.check.transactions import FoundParts, PartQuery, compare_transactions, reading_here
from cutline.cli.commands.check import lines_of
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.snapshots.records.chain import Chain
from cutline.storage.local import LocalStore
from cutline.storage.store import ObjectStore
from cutline.wal.cut.cut_values import Undecided
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import COMMIT_PREPARED
from tests.stores.damage import flip_byte
from tests.unit.made_commits import memory
from tests.unit.made_shards import MadeShards, Row, rolled_back, row, transaction

BOTH = "s1,s2"
Lost = Callable[[str, Row], bool]


def never(*_: object) -> bool:
    return False


def losing(node: str, *gids: str, ops: str = "PKC") -> Lost:
    """The events of these kinds of transactions `gids` are lost on the node."""
    return lambda on, one: on == node and one["global_id"] in gids and chr(one["op"]) in ops


def compare(
    made: MadeShards,
    is_lost: Lost = never,
    known_as: dict[str, str] | None = None,
    *,
    cuts: bool = False,
    after: int | None = None,
    **options: Any,
) -> tuple[SnapshotReport, list[Sequence[Segment]]]:
    """Compare a chain after the loss; return the report, and the segments that were read once more."""
    store = memory()
    chain = made.chain(store, is_lost, **options)
    return compare_chain(store, chain, known_as or {}, cuts=cuts, after=after)


def compare_chain(
    store: ObjectStore, chain: Chain, known_as: dict[str, str], *, cuts: bool = False, after: int | None = None
) -> tuple[SnapshotReport, list[Sequence[Segment]]]:
    findings = Findings(SnapshotReport(chain.name, chain.last.increment, Compared(objects=1)))
    stored, rules = StoredEvents(store), PartRules.of(chain, known_as, after)
    if cuts:
        check_cuts(chain, stored, findings, Silent(), after)
    again: list[Sequence[Segment]] = []

    def read(segments: Sequence[Segment], query: PartQuery) -> list[FoundParts]:
        again.append(segments)
        return reading_here(stored)(segments, query)

    reports = [
        reduce_parts(stored.read(segment), node, rules)
        for node in chain.baseline
        for segment in NewPart(chain, after).segments(node)
    ]
    compare_transactions(chain, rules, reports, read, findings)
    return findings.report, again


def found(report: SnapshotReport) -> list[tuple[str | None, str | None, str | None]]:
    """The node, other node and global id of each conflict."""
    assert {one.kind for one in report.conflicts} <= {"transaction"}
    return [(one.node, one.other_node, one.global_id) for one in report.conflicts]


def shared(participants: Sequence[str], *gids: str, start: int = 100) -> dict[str, list[Row]]:
    """Transactions on s1 and s2, whose parts there name `participants`."""
    return {
        node: [
            event
            for number, gid in enumerate(gids)
            for event in transaction(gid, start + 100 * number + 5 * place, participants=names)
        ]
        for place, (node, names) in enumerate(zip(("s1", "s2"), participants, strict=True))
    }


@pytest.mark.parametrize("names", [(BOTH, BOTH), (BOTH, ""), ("s2", "s1"), ("", BOTH)])
def test_a_transaction_that_a_participant_lacks_is_named(names: tuple[str, str]) -> None:
    """Its participants may be named on all of its shards, or on one."""
    made = MadeShards(shared(names, "a", "b", "c"))
    report, again = compare(made)
    assert (found(report), again, report.unknown_participants) == ([], [], 0)
    lacks = "s2" if names[0] else "s1"
    report, again = compare(made, losing(lacks, "b"))
    has = "s1" if lacks == "s2" else "s2"
    assert found(report) == [(lacks, has, "b")]
    detail = report.conflicts[0].detail
    assert detail.startswith(f"it is included in the state on {has}, which names {lacks} as a participant, but the")
    assert "contains no part of it there" in detail
    assert len(again) == 1


def test_after_an_earlier_check_only_transactions_that_the_new_cuts_add_are_compared() -> None:
    """Also those that were prepared before the cut that was checked, and committed since."""
    old, new = shared((BOTH, BOTH), "a", "b"), shared((BOTH, BOTH), "c", "d", start=1100)
    late = {node: transaction("late", 500 + at, participants=BOTH, committed=1500) for at, node in enumerate(old)}
    made = MadeShards({node: [*old[node], *late[node], *new[node]] for node in old}, commits=2)
    for names, expected in (("b", []), ("c", ["c"]), ("late", ["late"]), ("bd", ["d"])):
        lost = losing("s2", *([names] if names == "late" else names))
        report, _ = compare(made, lost, after=0, segments=2)
        assert found(report) == [("s2", "s1", gid) for gid in expected], names
    report, again = compare(made, after=0, segments=2)
    assert (found(report), again, report.unknown_participants) == ([], [], 0)


def test_after_an_earlier_check_only_unnamed_transactions_that_the_new_cuts_add_are_compared() -> None:
    old, new = shared(("", ""), "a", "b"), shared(("", ""), "c", "d", start=1100)
    made = MadeShards({node: [*old[node], *new[node]] for node in old}, commits=2)
    report, _ = compare(made, after=0, cuts=True)
    assert (found(report), report.unknown_participants) == ([], 2)


def test_after_an_earlier_check_the_new_events_of_copies_are_compared() -> None:
    events = {node: [*transaction("a", 100), *transaction("c", 1100)] for node in ("s1", "s1-b")}
    events |= {node: [*rows, *transaction("late", 500, committed=1500)] for node, rows in events.items()}
    made = MadeShards(events, {"s1-b": "s1"}, commits=2)
    for gid, expected in (("a", []), ("c", ["c"]), ("late", ["late"])):
        report, _ = compare(made, losing("s1-b", gid), after=0, segments=2)
        assert [one.global_id for one in report.conflicts] == expected, gid


def test_a_transaction_whose_participants_are_not_known_is_counted() -> None:
    made = MadeShards(shared(("", ""), "a", "b", "c"))
    report, again = compare(made, losing("s2", "b"))
    assert (found(report), again, report.unknown_participants) == ([], [], 3)
    (line,) = [line for line in lines_of(CheckReport((report,), 1.0)) if "participants" in line]
    assert line.startswith("  participants not known: 3 global transactions (a check can't tell")
    assert report.result == "valid", "most applications name no participants"
    assert report.to_json()["unknown_participants"] == 3


def test_of_some_transactions_the_participants_are_known() -> None:
    named, unnamed = shared((BOTH, BOTH), "a", "b"), shared(("", ""), "x", start=400)
    both = MadeShards({node: [*named[node], *unnamed[node]] for node in named})
    report, again = compare(both)
    assert (found(report), again, report.unknown_participants) == ([], [], 1)
    # One part of each names them: parts that name nobody are then compared one by one.
    named = shared((BOTH, ""), "a", "b")
    both = MadeShards({node: [*named[node], *unnamed[node]] for node in named})
    report, again = compare(both)
    assert (found(report), len(again), report.unknown_participants) == ([], 1, 1)
    report, again = compare(both, losing("s2", "a"))
    assert (found(report), report.unknown_participants) == ([("s2", "s1", "a")], 1)


def test_a_fleet_of_one_shard_has_nothing_to_compare() -> None:
    report, again = compare(MadeShards({"s1": transaction("a", 100, participants=BOTH)}))
    assert (found(report), again, report.unknown_participants, report.foreign_participants) == ([], [], None, ())


def test_names_other_than_ids_are_mapped_and_unknown_names_are_reported() -> None:
    made = MadeShards({**shared(("db1+db2", "db1+db2"), "a"), "s2-b": []}, {"s2-b": "s2"})
    report, _ = compare(made, losing("s2", "a"))
    assert (report.foreign_participants, report.unknown_participants) == (("db1", "db2"), 1)
    assert not [one for one in report.conflicts if one.node == "s2" and one.other_node == "s1"]
    (line,) = [line for line in lines_of(CheckReport((report,), 1.0)) if "not shards" in line]
    assert "db1, db2" in line
    report, _ = compare(made, losing("s2", "a"), {"db1": "s1", "db2": "s2", "of another fleet": "s9"})
    assert ("s2", "s1", "a") in found(report)
    assert report.foreign_participants == ()
    # A standby's id names its shard.
    made = MadeShards({**shared(("s2-b", "s1"), "a"), "s2-b": shared(("s2-b", "s1"), "a")["s2"]}, {"s2-b": "s2"})
    assert found(compare(made)[0]) == []
    assert ("s2", "s1", "a") in found(compare(made, losing("s2", "a"))[0])


def test_a_coordinators_one_phase_commit_is_a_part() -> None:
    coordinator = [row("C", 190, "a", participants=BOTH), row("C", 300, None)]
    made = MadeShards({"s1": coordinator, "s2": transaction("a", 100, participants=BOTH, committed=250)})
    assert found(compare(made)[0]) == []
    assert found(compare(made, losing("s1", "a"))[0]) == [("s1", "s2", "a")]
    assert found(compare(made, losing("s2", "a"))[0]) == [("s2", "s1", "a")]


def test_a_transaction_of_three_shards_is_missing_on_the_third() -> None:
    names = "s1,s2,s3"
    events = {f"s{place}": transaction("a", 100 + place, participants=names) for place in (1, 2, 3)}
    made = MadeShards(events)
    assert found(compare(made)[0]) == []
    assert found(compare(made, losing("s3", "a"))[0]) == [("s3", "s1", "a")]
    # Of those that have it, the first is reported.
    assert found(compare(made, losing("s1", "a"))[0]) == [("s1", "s2", "a")]


def test_what_is_undecided_or_rolled_back_is_not_compared() -> None:
    """PostgreSQL may omit transactions that were rolled back; the state contains neither of these."""
    made = MadeShards(
        {
            "s1": [row("P", 100, "undecided", participants=BOTH), *rolled_back("back", 300, participants=BOTH)],
            "s2": [],
        }
    )
    report, again = compare(made)
    assert (found(report), again) == ([], [])


def test_a_gid_that_was_rolled_back_may_be_used_again_on_other_shards() -> None:
    made = MadeShards(
        {
            "s1": [*rolled_back("a", 100, participants=BOTH), *transaction("a", 200, participants="s1,s3")],
            "s2": rolled_back("a", 105, participants=BOTH),
            "s3": transaction("a", 205, participants="s1,s3"),
        }
    )
    report, again = compare(made, cuts=True)
    assert (found(report), again) == ([], [])


def test_a_participant_that_rolled_back_what_another_committed_is_named() -> None:
    """No create can repair that: the application has torn its data."""
    made = MadeShards({"s1": transaction("a", 100, participants=BOTH), "s2": rolled_back("a", 105, participants=BOTH)})
    report, _ = compare(made)
    assert found(report) == [("s2", "s1", "a")]
    assert report.conflicts[0].detail.endswith("but it was rolled back there")


def test_a_part_belongs_to_the_first_cut_that_includes_it() -> None:
    """Prepared before the first cut and committed after it; or committed on one shard before the other's cut."""
    late = {"s1": transaction("late", 800, participants=BOTH, committed=1100)}
    late["s2"] = transaction("late", 810, participants=BOTH, committed=1110)
    ahead = {"s1": transaction("ahead", 1700, participants=BOTH, committed=1750)}
    ahead["s2"] = transaction("ahead", 1710, participants=BOTH, committed=2300)
    made = MadeShards({node: [*late[node], *ahead[node]] for node in late}, commits=3)
    report, again = compare(made, cuts=True)
    assert (found(report), again, report.unknown_participants) == ([], [], 0)
    for gid, segments in (("late", {1, 2}), ("ahead", {1, 2})):
        report, again = compare(made, losing("s2", gid))
        assert found(report) == [("s2", "s1", gid)]
        # Only the segments that may contain parts of that cut are read once more.
        assert {segment.number for segment in again[0]} == segments, gid


def test_the_same_gid_at_two_cuts_names_two_transactions() -> None:
    events = {
        node: [*transaction("a", 100 + place, participants=BOTH), *transaction("a", 1300 + place, participants=BOTH)]
        for place, node in enumerate(("s1", "s2"))
    }
    made = MadeShards(events, commits=2)
    assert found(compare(made)[0]) == []

    def lose_the_first(node: str, one: Row) -> bool:
        return node == "s2" and one["lsn"] < 1000

    assert found(compare(made, lose_the_first)[0]) == [("s2", "s1", "a")]


def test_branches_of_a_transaction_on_one_shard_count_once() -> None:
    """In different segments they are compared one by one, because each segment counts them."""
    branches = [
        *transaction("a", 100, participants=BOTH, committed=700),
        *transaction("a", 600, participants=BOTH, committed=710),
    ]
    made = MadeShards({"s1": branches, "s2": transaction("a", 605, participants=BOTH, committed=720)})
    report, again = compare(made)
    assert (found(report), again) == ([], [])
    report, again = compare(made, segments=2)
    assert (found(report), len(again)) == ([], 1)
    assert found(compare(made, losing("s2", "a"), segments=2)[0]) == [("s2", "s1", "a")]


@pytest.mark.parametrize(("complete_at", "is_expected"), [({}, False), ({"s1": 50, "s2": 50}, True)])
def test_a_transaction_from_before_a_shards_slot_is_not_expected_there(
    complete_at: dict[str, int], *, is_expected: bool
) -> None:
    """Without the position at which all slots existed, only what follows the first start marker is certain."""
    made = MadeShards(shared((BOTH, BOTH), "early"), slots_complete_at=complete_at)
    report, _ = compare(made, losing("s2", "early"))
    assert found(report) == ([("s2", "s1", "early")] if is_expected else [])


def test_a_transaction_that_is_early_on_one_shard_only_is_complete() -> None:
    """Prepared before all slots existed on one shard, and after that on the other."""
    made = MadeShards(shared((BOTH, BOTH), "a"), slots_complete_at={"s1": 102, "s2": 102})
    report, _ = compare(made)
    assert (found(report), report.unknown_participants) == ([], 0)


def test_many_missing_transactions_are_named_in_part_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.check.transactions, "NAMED_MAX", 2)
    gids = [f"g{number}" for number in range(7)]
    made = MadeShards(shared((BOTH, BOTH), *gids))
    report, _ = compare(made, losing("s2", *gids[:5]))
    assert [one.global_id is None for one in report.conflicts] == [False, False, True]
    assert report.conflicts[2].detail == "3 more transactions that it lacks are not listed"
    assert found(report)[2] == ("s2", "s1", None)


def test_parts_are_compared_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buckets, "of", classmethod(lambda cls, _: cls(np.array([0, 4], np.int64))))
    monkeypatch.setattr(cutline.check.transactions, "PARTS_AT_ONCE", 1)
    gids = [f"g{number}" for number in range(7)]
    made = MadeShards(shared((BOTH, ""), *gids))
    assert found(compare(made)[0]) == []
    report, again = compare(made, losing("s2", *gids[:3]))
    assert sorted(found(report)) == [("s2", "s1", gid) for gid in gids[:3]]
    assert len(again) > 1


def copies() -> MadeShards:
    events = shared(("", ""), "a", "b")
    return MadeShards({**events, "s1-b": events["s1"], "s2-b": events["s2"]}, {"s1-b": "s1", "s2-b": "s2"})


def test_a_transaction_lost_on_all_primaries_is_named_from_the_standbys() -> None:
    report, again = compare(copies())
    assert (found(report), again) == ([], [])
    report, _ = compare(copies(), lambda node, one: node in ("s1", "s2") and one["global_id"] == "b")
    assert sorted(found(report)) == [("s1", "s1-b", "b"), ("s2", "s2-b", "b")]  # type: ignore[type-var]
    (first,) = [one.detail for one in report.conflicts if one.node == "s1"]
    lacks = "the archive of s1 lacks its PREPARE at 0/C8 and its COMMIT PREPARED at 0/FA"
    assert first == f"{lacks}, which the archive of s1-b contains"


@pytest.mark.parametrize("ops", ["P", "K"])
def test_an_event_that_one_copy_lacks_is_named(ops: str) -> None:
    report, _ = compare(copies(), losing("s1-b", "a", ops=ops))
    assert found(report) == [("s1", "s1-b", "a")]
    what = "PREPARE at 0/64" if ops == "P" else "COMMIT PREPARED at 0/96"
    assert report.conflicts[0].detail == f"the archive of s1-b lacks its {what}, which the archive of s1 contains"


def test_damage_of_a_segment_that_is_read_again_is_reported_and_nothing_is_inferred_from_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    chain = MadeShards(shared((BOTH, BOTH), "a")).chain(store, losing("s2", "a"))
    findings = Findings(SnapshotReport(chain.name, 0))
    rules = PartRules.of(chain, {})
    stored = StoredEvents(store)
    reports = [
        reduce_parts(stored.read(segment), node, rules) for node in chain.baseline for segment in chain.segments(node)
    ]
    flip_byte(tmp_path / chain.segments("s1")[0].key)
    compare_transactions(chain, rules, reports, reading_here(stored), findings)
    assert [(one.kind, one.node) for one in findings.report.conflicts] == [("digest", "s1")]
    assert findings.report.unknown_participants is None


def test_a_restore_point_is_compared_too() -> None:
    store = memory()
    chain = MadeShards(shared((BOTH, BOTH), "a")).chain(store, losing("s2", "a"))
    findings = Findings(SnapshotReport(chain.name, 0))
    check_restore_point(chain, store, findings, Silent(), {})
    # These archives contain no markers, and the cut does not add up without one half.
    found = [(one.node, one.global_id) for one in findings.report.conflicts if one.kind == "transaction"]
    assert found == [("s2", "a")]


def test_a_damaged_shard_is_not_expected_to_have_anything() -> None:
    """The others are compared as far as they go; how many participants are not known can't be told."""
    names = "s1,s2,s3"
    events = {f"s{place}": transaction("a", 100 + place, participants=names) for place in (1, 2, 3)}
    store = memory()
    chain = MadeShards(events).chain(store, losing("s2", "a"))
    findings = Findings(SnapshotReport(chain.name, 0), damaged={"s3"})
    rules, stored = PartRules.of(chain, {}), StoredEvents(store)
    reports = [reduce_parts(stored.read(chain.segments(node)[0]), node, rules) for node in ("s1", "s2")]
    compare_transactions(chain, rules, reports, reading_here(stored), findings)
    assert found(findings.report) == [("s2", "s1", "a")]
    assert findings.report.unknown_participants is None


def cut_conflicts(made: MadeShards, is_lost: Lost) -> list[Conflict]:
    store = memory()
    chain = made.chain(store, is_lost)
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    check_cuts(chain, StoredEvents(store), findings, Silent())
    return findings.report.conflicts


def test_a_commit_prepared_without_its_prepare_is_named() -> None:
    made = MadeShards(shared(("", ""), "a", "b"), commits=2)
    assert cut_conflicts(made, never) == []
    conflicts = cut_conflicts(made, losing("s2", "b", ops="P"))
    assert [(one.kind, one.node, one.global_id) for one in conflicts] == [("transaction", "s2", "b")]
    assert conflicts[0].detail == (
        "the archive contains the COMMIT PREPARED of the transaction, at 0/FF, but not its PREPARE"
    )


def test_a_commit_prepared_with_the_xid_of_another_prepare_is_named() -> None:
    """Each of the two has the other's xid, so a PREPARE with that xid is there."""
    events = shared(("", ""), "a", "b")
    for at in events["s2"]:
        if at["op"] == COMMIT_PREPARED:
            at["xid"] = next(one["xid"] for one in events["s2"] if one["global_id"] not in (at["global_id"], None))
    conflicts = cut_conflicts(MadeShards(events, commits=2), never)
    named = {(one.kind, one.node, one.global_id) for one in conflicts if "not its PREPARE" in one.detail}
    assert named == {("transaction", "s2", "a"), ("transaction", "s2", "b")}


@pytest.mark.parametrize("committed", [700, 960, 1100, 1960])
def test_a_prepare_is_found_wherever_its_commit_prepared_is(committed: int) -> None:
    """Before the cut, between its position and its finish marker, and at later cuts."""
    events = {"s1": transaction("a", 600, committed=650), "s2": transaction("a", 605, committed=committed)}
    assert cut_conflicts(MadeShards(events, commits=2), never) == []


def test_a_lost_commit_is_named_where_the_cut_does_not_add_up() -> None:
    """Shard 2 prepared it after its start marker, so the commit on shard 1 raised the cut there."""
    made = MadeShards(
        {"s1": transaction("a", 800, committed=850), "s2": transaction("a", 920, committed=1200)}, commits=2
    )
    assert cut_conflicts(made, never) == []
    conflicts = cut_conflicts(made, losing("s1", "a", ops="K"))
    raised = [one for one in conflicts if "position" in one.detail]
    assert [(one.kind, one.node, one.global_id) for one in raised] == [("cut", "s2", "a")]
    assert "position is 0/3A2 in the commit, but 0/384 in the archived events; between them" in raised[0].detail
    undecided = [one for one in conflicts if "undecided" in one.detail]
    assert ("s1", "a") in [(one.node, one.global_id) for one in undecided]
    assert any(
        "(prepared at 0/320) according to the archived events, but not according to the commit" in one.detail
        for one in undecided
    )


def test_a_part_that_a_commit_leaves_out_is_torn_from_the_others() -> None:
    """At any cut, not only at the last; nobody has named its participants."""
    store = memory()
    chain = MadeShards(shared(("", ""), "a", "b"), commits=2).chain(store)
    first, second = chain.full.cut.nodes
    wrong = structs.replace(second, undecided=(Undecided("b", Lsn(205), Lsn(215)),))
    full = structs.replace(chain.full, cut=structs.replace(chain.full.cut, nodes=(first, wrong)))
    findings = Findings(SnapshotReport(chain.name, 1))
    assert check_cuts(Chain(chain.full, chain.increments), StoredEvents(store), findings, Silent()) == 2
    assert findings.report.conflicts == []
    check_cuts(Chain(full, chain.increments), StoredEvents(store), findings, Silent())
    torn, cut, *_ = findings.report.conflicts
    assert (torn.kind, torn.node, torn.other_node, torn.global_id) == ("transaction", "s1", "s2", "b")
    assert torn.detail == "it is included in the state on s1, but not in the state on s2"
    assert (cut.kind, cut.node, cut.global_id) == ("cut", "s2", "b")
    assert "(prepared at 0/CD) according to the commit, but not according to the archived events" in cut.detail
