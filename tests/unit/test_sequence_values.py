"""Sequences that are behind the keys of their tables, or behind themselves: what is noted, and what users do."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from cutline.check.copies import Copies
from cutline.check.report import Findings, SnapshotReport
from cutline.check.sequence_values import KeyExtremes, add_extremes, check_sequences, fed_groups, merge
from cutline.nodes.groups import Column, Group
from cutline.snapshots.ddl.described_ddl import Description
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DefinitionChanges, Sequence
from tests.unit.made_commits import commit, segment

GROUP = Group(3, "public", "t", "default", 1, (Column("id", "bigint", 20, -1, 0, 1), Column("v", "text", 25, -1, 1, 2)))
FED = Description(fed={("public", "t_id_seq"): (("public", "t", "id"),)})
NAME = "sequence public.t_id_seq"


def sequence(value: int, *, called: bool = True, increment: int = 1, cycles: bool = False) -> Sequence:
    return Sequence("public", "t_id_seq", value, called, increment, cycles, 1, 2**63 - 1)


def chain_of(*values: Sequence, redefined: tuple[int, ...] = ()) -> Chain:
    """A chain with these values of the sequence; increments in `redefined` list new DDL."""
    commits = [structs.replace(commit(number), sequences={"a": (value,)}) for number, value in enumerate(values)]
    changes = DefinitionChanges(fingerprints={"a": "new"})
    commits = [
        structs.replace(one, definition_changes=changes) if one.increment in redefined else one for one in commits
    ]
    full, *increments = commits
    return Chain(structs.replace(full, groups={"a": (GROUP,)}), tuple(increments))


def doubts(chain: Chain, *keys: int, described: Description = FED) -> list[str]:
    """What is noted if the table has these keys."""
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    extremes: KeyExtremes = {(0, 3): (min(keys), max(keys))} if keys else {}
    check_sequences(Copies.of(chain), {"a": described}, extremes, findings)
    assert findings.report.conflicts == []
    return [doubt.detail for doubt in findings.report.doubts]


def test_a_sequence_at_or_beyond_its_keys_is_not_noted() -> None:
    assert doubts(chain_of(sequence(10)), 1, 10) == []
    # Values in a session's cache, and the keys of deleted rows.
    assert doubts(chain_of(sequence(32)), 1, 10) == []
    assert doubts(chain_of(sequence(-10, increment=-1)), -10, -1) == []
    assert doubts(chain_of(sequence(10))) == []


def test_a_sequence_that_will_yield_a_key_again_is_noted() -> None:
    said = "somebody inserted the key or set the sequence, or changed the store"
    assert doubts(chain_of(sequence(10)), 1, 11) == [f"{NAME} is at 10, but the table has key 11: {said}"]
    assert doubts(chain_of(sequence(-10, increment=-1)), -12, -1) == [
        f"{NAME} is at -10, but the table has key -12: {said}"
    ]
    # It will yield 10 itself next.
    assert len(doubts(chain_of(sequence(9), sequence(10, called=False)), 1, 10)) == 1
    assert doubts(chain_of(sequence(500), sequence(20)), 1, 500) == [
        f"{NAME} is at 20, but the table has key 500; it was at 500 in the full snapshot: {said}"
    ]


def test_what_users_do_with_sequences_is_not_noted() -> None:
    # Nobody uses the sequence: the application has its own keys.
    assert doubts(chain_of(sequence(1, called=False)), 1, 10**15) == []
    assert doubts(chain_of(sequence(5, cycles=True)), 1, 100) == []
    # A table with another key, and one whose key is set by a function of its own.
    assert doubts(chain_of(sequence(5)), 1, 100, described=Description()) == []
    wide = structs.replace(GROUP, key_width=2)
    assert fed_groups(Chain(structs.replace(commit(0), groups={"a": (wide,)})), "a", FED) == {}


def test_a_sequence_that_goes_back_once_is_noted() -> None:
    assert doubts(chain_of(sequence(10), sequence(30), sequence(20), sequence(25))) == [
        f"{NAME} was at 30 in increment 1 and is at 20 in increment 2: somebody set it back, or changed the store"
    ]
    assert len(doubts(chain_of(sequence(-10, increment=-1), sequence(-5, increment=-1)))) == 1


def test_each_step_back_is_noted_if_there_are_two() -> None:
    assert [doubt.partition(": ")[0] for doubt in doubts(chain_of(*map(sequence, (30, 2, 40, 3))))] == [
        f"{NAME} was at 30 in the full snapshot and is at 2 in increment 1",
        f"{NAME} was at 40 in increment 2 and is at 3 in increment 3",
    ]


def test_a_sequence_that_is_reset_again_and_again_or_restarted_is_not() -> None:
    assert doubts(chain_of(*map(sequence, (30, 2, 40, 3, 50, 1)))) == []
    # ALTER SEQUENCE … RESTART changes the catalogs.
    assert doubts(chain_of(sequence(30), sequence(1), redefined=(1,))) == []
    # TRUNCATE … RESTART IDENTITY does not.
    chain = chain_of(sequence(30), sequence(1))
    (increment,) = chain.increments
    for truncates in (0, 1):
        segments = {"a": (structs.replace(segment("a", 1, 0, 8), truncates=truncates),)}
        found = Chain(chain.full, (structs.replace(increment, segments=segments),))
        assert len(doubts(found)) == 1 - truncates
    assert doubts(chain_of(sequence(30, cycles=True), sequence(1, cycles=True))) == []


@pytest.mark.parametrize("is_chosen", [None, (True, True, False, True)])
def test_the_extremes_of_keys_are_numbers(is_chosen: tuple[bool, ...] | None) -> None:
    extremes: KeyExtremes = {}
    chosen = None if is_chosen is None else np.array(is_chosen)
    keys = pa.array([b"9", b"-10", b"100", b"7"], pa.binary())
    add_extremes(extremes, 2, np.array([3, 3, 3, 4]), keys, {3}, chosen)
    assert extremes == {(2, 3): (-10, 100 if chosen is None else 9)}
    add_extremes(extremes, 2, np.array([5]), pa.array([b"x"], pa.binary()), {3, 4})
    merge(extremes, {(2, 3): (-11, 8), (2, 4): (1, 1)})
    assert extremes == {(2, 3): (-11, 100 if chosen is None else 9), (2, 4): (1, 1)}
