"""What has no second copy is skipped at the checked cut, and only named at the restore points before it."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from cutline.check.copies import Copies
from cutline.check.report import Compared, Findings, SnapshotReport, UncomparedPoints
from cutline.check.uncompared import PassedCopies, note_uncompared, skip_uncompared
from cutline.fleet.lsn import ORIGIN
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import UNLISTED, AbsentCopy, DefinitionChanges, FullSnapshot, Increment, Renewal
from tests.unit.made_commits import full_commit, identity, increment_commit, segment

AWAY = "it is away"
NO_BACKUP = "no backup copy to compare with"


def full(*, has_other: bool = False) -> FullSnapshot:
    """Shard a with standby b; `has_other` adds shard c without a standby."""
    made = full_commit()
    if not has_other:
        return made
    others = {"baseline": (*made.baseline, identity("c")), "groups": {**made.groups, "c": ()}}
    return structs.replace(made, **others, base={**made.base, "c": ORIGIN})


def chain_of(full_snapshot: FullSnapshot, count: int, changed: Mapping[int, Mapping[str, object]]) -> Chain:
    """A chain of so many increments; `changed` are fields of increments by number."""
    increments: list[Increment] = []
    for number in range(1, count + 1):
        increments.append(structs.replace(increment_commit(number), **changed.get(number, {})))
    return Chain(full_snapshot, tuple(increments))


def absent(since: int) -> dict[str, object]:
    return {"absent": {"b": AbsentCopy(since, AWAY, segment("b", 1, 0, 100))}}


def checked(chain: Chain, *, allows_one_copy: bool = False) -> SnapshotReport:
    report = SnapshotReport("daily", chain.last.increment, Compared(objects=1), allows_one_copy=allows_one_copy)
    note_uncompared(chain, Findings(report))
    return report


def test_a_shard_that_has_left_is_named_at_the_restore_points_that_have_it() -> None:
    chain = chain_of(full(has_other=True), 4, {3: {"retired": ("c",)}})
    report = checked(chain)
    assert (report.result, report.skipped) == ("valid", [])
    assert report.uncompared_points == (UncomparedPoints(0, 2, "rows of shard c", NO_BACKUP, is_one_copy=True),)
    # One of these restore points is still checked as before.
    earlier = checked(chain.up_to(2))
    assert (earlier.result, [part.what for part in earlier.skipped]) == ("inconclusive", ["rows of shard c"])
    assert earlier.uncompared_points == ()
    assert checked(chain.up_to(2), allows_one_copy=True).result == "one-copy"


def test_a_standby_that_was_away_and_is_back_is_named_at_the_restore_points_without_it() -> None:
    chain = chain_of(full(), 6, {3: absent(3), 4: absent(3)})
    report = checked(chain)
    assert (report.result, report.skipped) == ("valid", [])
    assert [(one.first, one.last, one.what, one.why) for one in report.uncompared_points] == [
        (3, 4, "rows of shard a", NO_BACKUP),
        (3, 4, "the copy of b", f"it was left out: {AWAY}"),
    ]
    for number in (3, 4):
        earlier = checked(chain.up_to(number))
        assert (earlier.result, earlier.uncompared_points) == ("inconclusive", ())
        assert [part.what for part in earlier.skipped] == ["rows of shard a", "the copy of b"]
    assert checked(chain.up_to(2)).uncompared_points == ()


def test_a_standby_that_is_still_away_is_skipped_also_if_one_copy_is_allowed() -> None:
    chain = chain_of(full(), 5, {2: absent(2), 4: absent(4), 5: absent(4)})
    report = checked(chain, allows_one_copy=True)
    assert report.result == "inconclusive"
    assert {part.why for part in report.skipped} == {NO_BACKUP, f"increment 4 and later leave it out: {AWAY}"}
    # Only the first time ended before this increment.
    assert {(one.first, one.last) for one in report.uncompared_points} == {(2, 2)}


def test_a_shard_that_has_had_one_copy_from_the_beginning_is_skipped_and_not_named_again() -> None:
    report = checked(chain_of(full(has_other=True), 5, {2: absent(2)}))
    assert [part.what for part in report.skipped] == ["rows of shard c"]
    assert "c" not in {one.what.rpartition(" ")[2] for one in report.uncompared_points}
    assert report.result == "inconclusive"


def test_a_shard_whose_standby_was_added_later_is_named_until_then() -> None:
    alone = structs.replace(full_commit(), baseline=(identity("a"),), base={"a": ORIGIN})
    added = Renewal(identity("b", "a"), ORIGIN, "no commit of the chain has a copy of it", is_new=True)
    report = checked(chain_of(alone, 4, {2: {"renewed": {"b": added}}}))
    assert report.uncompared_points == (UncomparedPoints(0, 1, "rows of shard a", NO_BACKUP, is_one_copy=True),)
    assert report.result == "valid"


def test_the_restore_points_of_which_a_check_would_be_inconclusive_are_recorded() -> None:
    chain = chain_of(full(), 9, {3: absent(3), 4: absent(3), 7: absent(7)})
    for allows_one_copy in (False, True):
        report = checked(chain, allows_one_copy=allows_one_copy)
        for number in range(10):
            is_named = any(first <= number <= last for first, last in report.uncompared_spans)
            own = checked(chain.up_to(number), allows_one_copy=allows_one_copy)
            assert is_named == (own.result == "inconclusive")
        assert report.uncompared_spans == ((3, 4), (7, 7))
    left = chain_of(full(has_other=True), 4, {3: {"retired": ("c",)}})
    assert checked(left).uncompared_spans == ((0, 2),)
    assert checked(left, allows_one_copy=True).uncompared_spans == ()


def test_a_record_has_no_more_than_a_thousand_spans() -> None:
    points = tuple(UncomparedPoints(2 * number, 2 * number, "the copy of b", "why") for number in range(1500))
    spans = SnapshotReport("daily", 4000, uncompared_points=points[::-1]).uncompared_spans
    assert (len(spans), spans[:2], spans[-1]) == (1000, ((0, 0), (2, 2)), (1998, 2998))


def test_a_copy_that_began_again_is_named_where_no_pass_compared_it() -> None:
    again = Renewal(identity("b", "a"), ORIGIN, "its slot was lost")
    chain = chain_of(full(), 5, {3: {"renewed": {"b": again}}})
    report = checked(chain)
    assert report.result == "valid"
    why = "it began again with increment 3; a check up to increment 2 compares it"
    assert report.uncompared_points == (UncomparedPoints(0, 2, "the copy of b", why),)
    passed = PassedCopies.of(chain)
    assert not passed.are_all
    read = {(node, number) for node in ("a", "b") for number in range(6) if passed.is_read(node, number)}
    assert read == {("a", number) for number in range(6)} | {("b", number) for number in (3, 4, 5)}
    assert PassedCopies.of(chain.up_to(2)).are_all


def test_a_copy_that_is_absent_where_a_pass_ends_is_read_by_none() -> None:
    """The pass ends before the increment with which the primary's copy begins again."""
    again = {"renewed": {node: Renewal(identity(node, of), ORIGIN, "lost") for node, of in (("a", None), ("b", "a"))}}
    chain = chain_of(full(), 4, {2: absent(2), 3: again})
    passed = PassedCopies.of(chain)
    assert [passed.is_read("b", number) for number in range(5)] == [False, False, False, True, True]
    assert all(passed.is_read("a", number) for number in range(5))
    found = [(one.first, one.last, one.what) for one in checked(chain).uncompared_points]
    assert (0, 1, "the copy of b") in found


def test_a_standby_that_was_removed_from_the_file_is_not_waited_for() -> None:
    gone = {"absent": {"b": AbsentCopy(2, UNLISTED, segment("b", 1, 0, 100), has_ended=True)}}
    report = checked(chain_of(full(), 3, {2: gone, 3: gone}), allows_one_copy=True)
    assert report.result == "one-copy"
    assert [part.what for part in report.skipped] == ["rows of shard a"]


def test_a_chain_in_which_nothing_changes_is_looked_at_once() -> None:
    """A chain may have thousands of increments, each with a change of definitions."""
    looked_at: list[int] = []

    class Counted(Chain):
        def up_to(self, increment: int) -> Chain:
            looked_at.append(increment)
            return Chain.up_to(self, increment)

    same = chain_of(full(), 50, {number: {"definition_changes": DefinitionChanges()} for number in range(1, 51)})
    note_uncompared(Counted(same.full, same.increments), Findings(SnapshotReport("daily", 50)))
    assert looked_at == [0]


def test_the_same_part_is_skipped_once() -> None:
    chain = chain_of(full(has_other=True), 1, {})
    findings = Findings(SnapshotReport("daily", 1))
    skip_uncompared(Copies.of(chain), findings)
    skip_uncompared(Copies.of(chain), findings)
    assert [part.what for part in findings.report.skipped] == ["rows of shard c"]
