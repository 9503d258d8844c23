"""The checks of the causal chains can fail: every fault, put by hand into a small sound state and journal, is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.causal.journal import NEVER, Taken, Transaction, disagreements, occurred
from tests.causal.state import ChainState, Child, Parent, Row, Twin, faults_of

# Chain 0 goes 1 (on shards 0, 1), 2 (on 1, 0), 3 (only its parent, on 0). Chain 1 was trimmed to its links 4 and 5.
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
    "a child is lost that a parent refers to": (
        lambda s: replace(s, children=(*s.children[:2], s.children[3])),
        "refers to a child that is not there",
    ),
    "a twin is lost that a parent refers to": (lambda s: replace(s, twins=s.twins[1:]), "refers to a twin that is not"),
    "a child is lost": (lambda s: replace(s, children=(s.children[0], *s.children[2:])), "torn: Twin"),
    "a twin is lost": (lambda s: replace(s, twins=s.twins[:3]), "torn: Child"),
    "a twin is on another shard": (lambda s: replace(s, twins=(*s.twins[:3], Twin(1, 14, 1, 5, 2))), "torn: Child"),
    "a twin is of another chain": (lambda s: replace(s, twins=(*s.twins[:3], Twin(3, 14, 0, 5, 2))), "torn: Child"),
    "a link is lost whole": (
        lambda s: replace(
            s, parents=(s.parents[0], *s.parents[2:]), children=(s.children[0], *s.children[2:]), twins=s.twins[::2]
        ),
        "hole: chain 0",
    ),
    "the first link is lost whole": (
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


def journal() -> list[Transaction]:
    """A parent and its link, which a trim deletes in the end, and a link that is rolled back. Times by hand."""
    return [
        Transaction("", (PARENT,), (), (0,), NEVER, 1, 1, 2, 1),
        Transaction("link", (CHILD, TWIN), (), (0, 1), 3, 4, 4, 5, 30, is_tagged=True),
        Transaction("undone", (("child", 0, 3), ("twin", 2, 3)), (), (0, 2), 6, 40),
        Transaction("trim", (), (CHILD, PARENT, TWIN), (0, 1), 50, 51, 51, 55, 56),
    ]


def taken(*rows: set[Row]) -> list[Taken]:
    """Increments from 10 to 13, 20 to 23, 60 to 63."""
    times = (10, 20, 60)
    return [Taken(n, times[n], times[n] + 3, frozenset(part)) for n, part in enumerate(rows)]


WHOLE = {PARENT, CHILD, TWIN}
WRONG = {
    "lost where committed on one shard before": (({PARENT}, WHOLE, set()), "lost: increment 0 has not ('child', 0, 2)"),
    "torn": (({PARENT, CHILD}, WHOLE, set()), "torn: increment 0 has a part of link"),
    "rolled back": ((WHOLE, {*WHOLE, ("child", 0, 3), ("twin", 2, 3)}, set()), "which was never committed"),
    "written by nobody": (({*WHOLE, LOST}, {*WHOLE, LOST}, {LOST}), "which nobody wrote"),
    "deleted and still there": ((WHOLE, WHOLE, WHOLE), "which was deleted before it began"),
    "deleted by half": ((WHOLE, WHOLE, {TWIN}), "torn: increment 2 has a part of what trim deleted"),
    "gone without a deletion": ((WHOLE, {PARENT}, set()), "is in increment 0 and not in 1"),
}


def test_a_sound_state_has_no_fault() -> None:
    assert faults_of(SOUND) == []
    assert faults_of(ChainState()) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_state_is_found(fault: str) -> None:
    spoil, words = FAULTS[fault]
    found = faults_of(spoil(SOUND))
    assert any(words in one for one in found), found


def test_a_journal_agrees_with_what_it_allows() -> None:
    assert disagreements(journal(), taken(WHOLE, WHOLE, set())) == []
    # Sent and not answered when the command began: it may be in or not.
    under_way = [Transaction("", (LOST,), (), (3,), NEVER, 9, 9, 15, 9)]
    assert disagreements(under_way, taken({LOST}, {LOST})) == []
    assert disagreements(under_way, taken(set(), {LOST})) == []
    assert disagreements(under_way, taken({LOST}, set())) != []


def test_what_was_sent_after_an_increment_is_not_in_it() -> None:
    later = [Transaction("", (LOST,), (), (3,), NEVER, 14, 14, 15, 14)]
    assert disagreements(later, taken(set(), {LOST})) == []
    assert disagreements(later, taken({LOST}, {LOST})) == [
        "increment 0 has ('parent', 3, 7) of a local transaction, which was committed later"
    ]


def test_a_row_that_comes_back_is_found() -> None:
    assert f"{CHILD} came back in increment 2" in disagreements(journal(), taken(WHOLE, {PARENT}, WHOLE))


@pytest.mark.parametrize("case", WRONG)
def test_a_disagreement_is_found(case: str) -> None:
    rows, words = WRONG[case]
    found = disagreements(journal(), taken(*rows))
    assert any(words in one for one in found), found


def test_what_happened_is_counted_by_the_clients_times() -> None:
    happened = occurred(journal(), taken(WHOLE, WHOLE, set()))
    assert (happened.transactions, happened.links, happened.trims, happened.tagged) == (3, 1, 1, 1)
    assert (happened.held, happened.rolled_back) == (1, 1)
    assert (happened.half, happened.early) == (1, 2)
