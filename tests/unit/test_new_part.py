"""Which segments a check of what is new reads, and when it can't be made."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec import structs

from cutline.check.copies import Copies
from cutline.check.new_part import NewPart
from cutline.fleet.lsn import Lsn
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, DefinitionChanges, StoredObject
from cutline.wal.cut.cut_values import NodeCut, Undecided
from cutline.wal.segments.archive import OpenTransaction, Segment
from tests.chains.redefined_chain import group
from tests.unit.made_commits import MARKED_AT, full_commit, increment_commit


def undecided(*positions: int) -> tuple[Undecided, ...]:
    return tuple(Undecided(f"g{position}", Lsn(position), Lsn(position + 1)) for position in positions)


def with_cut(
    commit: Commit, position: int, left_out: tuple[int, ...] = (), rolled_back: tuple[int, ...] = ()
) -> Commit:
    cut = NodeCut(
        "a", Lsn(position), Lsn(position + 20), Lsn(position), 0, undecided(*left_out),
        tuple(map(Lsn, rolled_back)), (), MARKED_AT,
    )  # fmt: skip
    return structs.replace(commit, cut=structs.replace(commit.cut, nodes=(cut,)))


def made_chain(*cuts: Mapping[str, tuple[int, ...]], opens: Mapping[int, int] | None = None) -> Chain:
    """A chain with a segment of 100 bytes of WAL and a cut near its end for each commit: at 80, 180, …

    `opens` maps the number of a segment to the position of the transaction of which it has the beginning.
    """
    commits: list[Commit] = []
    for number, given in enumerate(cuts):
        commit: Commit = increment_commit(number) if number else full_commit()
        commit = with_cut(commit, number * 100 + 80, **given)
        segments = {node: (_opened(listed[0], opens or {}),) for node, listed in commit.segments.items()}
        commits.append(structs.replace(commit, segments=segments))
    return Chain(commits[0], tuple(commits[1:]))  # type: ignore[arg-type]


def _opened(listed: Segment, opens: Mapping[int, int]) -> Segment:
    if listed.number not in opens:
        return listed
    return structs.replace(listed, open=OpenTransaction(Lsn(opens[listed.number]), 1, 0))


def numbers(part: NewPart, node: str = "b") -> list[int]:
    return [one.number for one in part.segments(node)]


def test_the_whole_chain_is_new_if_nothing_was_checked() -> None:
    part = NewPart(made_chain({}, {}, {}))
    assert numbers(part) == [1, 2, 3]
    assert part.has_copies
    assert len(part.commits) == 3
    assert (part.checked_to("a"), part.decided("a"), part.problem(Copies.of(part.chain))) == (Lsn(0), frozenset(), "")


def test_segments_are_read_that_are_new_or_extend_beyond_the_cut_that_was_checked() -> None:
    part = NewPart(made_chain({}, {}, {}, {}), 1)
    # The cut of increment 1 is at 180, in segment 2.
    assert part.checked_to("b") == Lsn(180)
    assert numbers(part) == numbers(part, "a") == [2, 3, 4]
    assert [part.is_new(one) for one in part.segments("b")] == [False, True, True]
    assert not part.has_copies
    assert [commit.increment for commit in part.commits] == [2, 3]


def test_a_segment_with_the_beginning_of_a_transaction_that_the_checked_cut_lacks_is_read() -> None:
    # The transaction at 185 began in segment 1, before the cut of increment 1.
    part = NewPart(made_chain({}, {}, {}, opens={1: 185}), 1)
    assert numbers(part) == [1, 2, 3]


def test_segments_of_transactions_that_were_undecided_and_have_been_committed_are_read() -> None:
    # 30 is committed, 130 is rolled back, and 150 stays undecided.
    chain = made_chain(
        {"left_out": (30,)}, {"left_out": (30, 130, 150)}, {}, {"left_out": (150,), "rolled_back": (130,)}
    )
    part = NewPart(chain, 1)
    assert part.decided("b") == {Lsn(30)}
    assert numbers(part) == [1, 2, 3, 4]
    assert part.problem(Copies.of(chain)) == ""
    # If none of them is decided, their segments are not read again.
    assert numbers(NewPart(chain.up_to(1), 1)) == [2]


def test_what_contradicts_the_checked_state_is_not_checked_by_itself() -> None:
    # Increment 2 leaves out a transaction at 50, which the state at increment 1 contains.
    chain = made_chain({}, {}, {"rolled_back": (50,)})
    assert "no longer belongs" in NewPart(chain, 1).problem(Copies.of(chain))
    # The base copy of the standby is at 40, and does not contain the transaction that was prepared at 30.
    chain = made_chain({"left_out": (30,)}, {})
    full = structs.replace(chain.full, base={"a": Lsn(0), "b": Lsn(40)})
    chain = Chain(full, chain.increments)
    assert "before its base copy" in NewPart(chain, 0).problem(Copies.of(chain))


@pytest.mark.parametrize(("begun", "problem"), [(190, ""), (170, "before the cut that was checked")])
def test_tables_that_were_copied_since_are_compared(begun: int, problem: str) -> None:
    old, new, continued = group(1, "old", "12"), group(2, "copied", "12"), group(3, "old", "123")
    chain = made_chain({}, {}, {})
    changes = DefinitionChanges(
        groups={"a": (new, continued)},
        gone={"a": (1,)},
        successions={"a": {3: 1}},
        begun={node: {2: Lsn(begun), 3: Lsn(1)} for node in ("a", "b")},
        objects=tuple(StoredObject(f"base/{node}/2", "base", node, 5, "d", {2: 1}) for node in ("a", "b")),
    )
    full = structs.replace(chain.full, groups={"a": (old,)})
    second = structs.replace(chain.increments[1], definition_changes=changes)
    chain = Chain(full, (chain.increments[0], second))
    part = NewPart(chain, 1)
    assert part.copied_groups("b") == {2}
    assert part.has_copies
    assert [source.source.key for source in part.bases(0, "a")] == ["base/a/2"]
    found = part.problem(Copies.of(chain))
    assert (problem in found) if problem else found == ""
    # For a later check, nothing is new.
    assert not NewPart(chain, 2).has_copies
    assert NewPart(chain, 2).copied_groups("b") == frozenset()
