"""The checks of the causal chains find every fault that is put by hand into a small sound state and journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.causal.journal import NEVER, TakenIncrement, Transaction, count_occurrences, find_disagreements
from tests.causal.state import ChainState, Child, Parent, Row, Twin, find_faults

# Chain 0: link 1 (shards 0, 1), link 2 (shards 1, 0), link 3 (only its parent, on 0). Chain 1: trimmed to 4 and 5.
SOUND = ChainState(
    parents=(
        Parent(0, 1, 0, 1, None, None),
        Parent(1, 3, 0, 2, None, 2),
        Parent(0, 5, 0, 3, None, 4),
        Parent(2, 11, 1, 4, None, None),
        Parent(2, 13, 1, 5, 12, None),
    ),
    children=(Child(0, 2, 0, 1, 1, 1), Child(1, 4, 0, 2, 3, 0), Child(2, 12, 1, 4, 11, 3), Child(2, 14, 1, 5, 13, 3)),
    twins=(Twin(1, 2, 0, 1, 0), Twin(0, 4, 0, 2, 1), Twin(3, 12, 1, 4, 2), Twin(3, 14, 1, 5, 2)),
)
FAULTS: dict[str, tuple[Callable[[ChainState], ChainState], str]] = {
    "a foreign key is not valid": (
        lambda s: replace(s, bad_keys=("shard 1 has 2 valid foreign keys",)),
        "foreign keys",
    ),
    "a child lost its parent": (lambda s: replace(s, parents=s.parents[1:]), "has no parent"),
    "a child that a parent refers to is lost": (
        lambda s: replace(s, children=(*s.children[:2], s.children[3])),
        "refers to a child that is not there",
    ),
    "a twin that a parent refers to is lost": (lambda s: replace(s, twins=s.twins[1:]), "refers to a twin that is not"),
    "a child is lost": (lambda s: replace(s, children=(s.children[0], *s.children[2:])), "torn: Twin"),
    "a twin is lost": (lambda s: replace(s, twins=s.twins[:3]), "torn: Child"),
    "a twin is on another shard": (lambda s: replace(s, twins=(*s.twins[:3], Twin(1, 14, 1, 5, 2))), "torn: Child"),
    "a twin is of another chain": (lambda s: replace(s, twins=(*s.twins[:3], Twin(3, 14, 0, 5, 2))), "torn: Child"),
    "a whole link is lost": (
        lambda s: replace(
            s, parents=(s.parents[0], *s.parents[2:]), children=(s.children[0], *s.children[2:]), twins=s.twins[::2]
        ),
        "hole: chain 0",
    ),
    "the whole first link is lost": (
        lambda s: replace(s, parents=s.parents[1:], children=s.children[1:], twins=s.twins[1:]),
        "hole: Parent(shard=1, id=3",
    ),
    "a trim did not reach the parent": (
        lambda s: replace(s, parents=(*s.parents[:3], s.parents[3]._replace(prev_twin=9), s.parents[4])),
        "refers to a twin that is not there",
    ),
    "a parent refers to a link of another chain": (
        lambda s: replace(s, parents=(*s.parents[:4], Parent(2, 13, 0, 5, 12, None))),
        "hole",
    ),
    "a link is there twice": (
        lambda s: replace(s, children=(*s.children, Child(2, 15, 1, 5, 13, 3)), twins=(*s.twins, Twin(3, 15, 1, 5, 2))),
        "link 5 2 times",
    ),
    "a parent is there twice": (
        lambda s: replace(s, parents=(*s.parents, Parent(1, 6, 0, 3, 4, None))),
        "hole: chain 0",
    ),
}

CHILD, TWIN, PARENT, LOST = ("child", 0, 2), ("twin", 1, 2), ("parent", 0, 1), ("parent", 3, 7)


def new_journal() -> list[Transaction]:
    """A parent and its link, deleted by a later trim, and a link that is rolled back; all with hand-made times."""
    return [
        Transaction("", (PARENT,), (), (0,), NEVER, 1, 1, 2, 1),
        Transaction("link", (CHILD, TWIN), (), (0, 1), 3, 4, 4, 5, 30, is_tagged=True),
        Transaction("undone", (("child", 0, 3), ("twin", 2, 3)), (), (0, 2), 6, 40),
        Transaction("trim", (), (CHILD, PARENT, TWIN), (0, 1), 50, 51, 51, 55, 56),
    ]


def take_increments(*rows: set[Row]) -> list[TakenIncrement]:
    """Increments with these rows, taken from 10 to 13, 20 to 23 and 60 to 63."""
    times = (10, 20, 60)
    return [TakenIncrement(n, times[n], times[n] + 3, frozenset(part)) for n, part in enumerate(rows)]


WHOLE = {PARENT, CHILD, TWIN}
WRONG = {
    "lost where committed on one shard before": (({PARENT}, WHOLE, set()), "lost: increment 0 lacks ('child', 0, 2)"),
    "torn": (({PARENT, CHILD}, WHOLE, set()), "torn: increment 0 has a part of link"),
    "rolled back": ((WHOLE, {*WHOLE, ("child", 0, 3), ("twin", 2, 3)}, set()), "which was never committed"),
    "written by nobody": (({*WHOLE, LOST}, {*WHOLE, LOST}, {LOST}), "which nobody wrote"),
    "deleted and still there": ((WHOLE, WHOLE, WHOLE), "which was deleted before it began"),
    "half deleted": ((WHOLE, WHOLE, {TWIN}), "torn: increment 2 has a part of what trim deleted"),
    "gone without a deletion": ((WHOLE, {PARENT}, set()), "is in increment 0 and not in 1"),
}


def test_a_sound_state_has_no_fault() -> None:
    assert find_faults(SOUND) == []
    assert find_faults(ChainState()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_state_is_found(fault: str) -> None:
    spoil, words = FAULTS[fault]
    found = find_faults(spoil(SOUND))
    assert any(words in one for one in found), found


def test_increments_that_the_journal_allows_are_accepted() -> None:
    assert find_disagreements(new_journal(), take_increments(WHOLE, WHOLE, set())) == []
    # Sent, but not answered, when the command began: the increment may have it or not.
    unanswered = [Transaction("", (LOST,), (), (3,), NEVER, 9, 9, 15, 9)]
    assert find_disagreements(unanswered, take_increments({LOST}, {LOST})) == []
    assert find_disagreements(unanswered, take_increments(set(), {LOST})) == []
    assert find_disagreements(unanswered, take_increments({LOST}, set())) != []


def test_a_transaction_sent_after_an_increment_must_not_be_in_it() -> None:
    later = [Transaction("", (LOST,), (), (3,), NEVER, 14, 14, 15, 14)]
    assert find_disagreements(later, take_increments(set(), {LOST})) == []
    assert find_disagreements(later, take_increments({LOST}, {LOST})) == [
        "increment 0 has ('parent', 3, 7) of a local transaction, which was committed later"
    ]


def test_a_row_that_reappears_is_found() -> None:
    assert f"{CHILD} came back in increment 2" in find_disagreements(
        new_journal(), take_increments(WHOLE, {PARENT}, WHOLE)
    )


@pytest.mark.parametrize("case", WRONG)
def test_a_disagreement_is_found(case: str) -> None:
    rows, words = WRONG[case]
    found = find_disagreements(new_journal(), take_increments(*rows))
    assert any(words in one for one in found), found


def test_occurrences_are_counted_by_the_times_of_the_clients() -> None:
    happened = count_occurrences(new_journal(), take_increments(WHOLE, WHOLE, set()))
    assert (happened.transactions, happened.links, happened.trims, happened.tagged) == (3, 1, 1, 1)
    assert (happened.held, happened.rolled_back) == (1, 1)
    assert (happened.half, happened.early) == (1, 2)
