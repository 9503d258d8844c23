"""Commits that name an unknown definition, or list a position twice, are refused; the error says what is wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.records.commit import BASE, DefinitionChanges, FullSnapshot, Previous, StoredObject
from cutline.snapshots.records.commit_rules import check_commit
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.proven_chains import commit_key, read_chain, read_commit
from cutline.storage.memory import InMemoryStore
from cutline.wal.cut.cut_values import InDoubt
from tests.unit.made_commits import commit, counted, full_commit, memory

COLUMN = Column("id", "integer", 23, -1, 0, 1)
FIRST, SECOND = (Group(number, "public", "t", "default", 1, (COLUMN,)) for number in (1, 2))
# Number 2 continues number 1 of table t, on the primary and on its standby.
CONTINUED = DefinitionChanges(
    groups={"a": (SECOND,)}, gone={"a": (1,)}, successions={"a": {2: 1}}, begun={"a": {2: Lsn(50)}, "b": {2: Lsn(50)}}
)
WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("groups", {"groups": {"a": (FIRST,)}}),
    ("groups", {"groups": {"a": (SECOND, SECOND)}}),
    ("successions", {"successions": {"a": {2: 3}}}),
    ("successions", {"successions": {"a": {3: 1}}}),
    ("gone", {"gone": {"a": (3,)}}),
    ("begun", {"begun": {"a": {2: Lsn(50)}}}),
    ("begun", {"begun": {"a": {2: Lsn(50)}, "b": {3: Lsn(50)}}}),
)


def full_with(changes: DefinitionChanges | None) -> FullSnapshot:
    return replace(full_commit(), groups={"a": (FIRST,)}, definition_changes=changes)


def chain_with(*found: DefinitionChanges | None) -> InMemoryStore:
    """A chain whose increments have these changes of definitions."""
    store = memory()
    put_commit(store, full_with(None))
    for number, changes in enumerate(found, start=1):
        before = read_commit(store, "daily", number - 1)
        previous = Previous(before.operation, before.digest)
        made = replace(commit(number), definition_changes=changes, previous=previous)
        store.create(commit_key("daily", number), seal(counted(made)))
    return store


def test_definitions_that_continue_earlier_ones_are_read() -> None:
    store = memory()
    put_commit(store, full_with(CONTINUED))
    assert read_chain(store, "daily").groups("b") == (SECOND,)
    third = replace(SECOND, number=3)
    again = DefinitionChanges({"a": (third,)}, {"a": (2,)}, {"a": {3: 2}}, {"a": {3: Lsn(60)}, "b": {3: Lsn(60)}})
    assert read_chain(chain_with(CONTINUED, None, again), "daily").groups("a") == (third,)


@pytest.mark.parametrize(("what", "wrong"), WRONG)
def test_numbers_without_a_definition_are_refused(what: str, wrong: dict[str, Any]) -> None:
    damaged = replace(CONTINUED, **wrong)
    increment = chain_with(damaged)
    with pytest.raises(ManifestError, match=f"{commit_key('daily', 1)}.*{what}"):
        read_chain(increment, "daily")
    full = memory()
    full.create(commit_key("daily", 0), seal(full_with(damaged)))
    with pytest.raises(ManifestError, match=f"{commit_key('daily', 0)}.*{what}"):
        read_chain(full, "daily")


def copied(**values: Any) -> DefinitionChanges:
    """Changes in which a new table of 3 rows was copied, on the primary and on its standby."""
    third = replace(SECOND, number=3, table="u")
    objects = tuple(
        StoredObject(f"snapshots/daily/base/{node}/op-1/part-1.parquet", BASE, node, 1, "d", {3: 3}) for node in "ab"
    )
    changes = DefinitionChanges(
        groups={"a": (third,)}, begun={node: {3: Lsn(100)} for node in "ab"}, copied={node: {3: 3} for node in "ab"},
        objects=objects,
    )  # fmt: skip
    return replace(changes, **values)


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        ({}, ""),
        # The base copies are lost, or some of them; as if an earlier table was continued, nothing is copied.
        ({"objects": ()}, "copied.a does not match"),
        ({"objects": copied().objects[:1]}, "copied.b does not match"),
        ({"copied": {}}, "copied.a does not match"),
        ({"copied": {"a": {3: 3}, "b": {3: 2}}}, "copied.b does not match"),
        ({"objects": (), "copied": {node: {3: 0} for node in "ab"}}, ""),
        ({"begun": {"a": {3: Lsn(101)}, "b": {3: Lsn(100)}}}, "begun.a.3 is after the cut"),
        ({"pending": {"a": (Lsn(98), Lsn(99))}}, ""),
        ({"pending": {"a": (Lsn(99), Lsn(98))}}, "pending.a is not ascending"),
        ({"pending": {"b": (Lsn(98), Lsn(100))}}, "pending.b is not ascending, or not before 0/64"),
        ({"readers": {"a": "b"}}, ""),
        ({"readers": {"a": "a"}}, "readers.a: a is not a standby of a that takes part"),
        ({"readers": {"a": "c"}}, "readers.a: c is not a standby of a"),
        ({"readers": {"a": "b"}, "copied": {"a": {3: 3}}}, "readers.a: the copies of a and b differ"),
        ({"readers": {"a": "b"}, "begun": {"a": {3: Lsn(100)}, "b": {3: Lsn(99)}}}, "readers.a: the copies of a and b"),
    ],
)
def test_every_new_table_was_copied_with_all_its_rows_before_the_cut(values: dict[str, Any], detail: str) -> None:
    store = chain_with(copied(**values))
    if not detail:
        assert len(read_chain(store, "daily").groups("b")) == 2
        return
    with pytest.raises(ManifestError, match=f"schema_changes.{detail}"):
        read_chain(store, "daily")


@pytest.mark.parametrize("values", [{"readers": {"b": "a"}}, {"pending": {"c": (Lsn(1),)}}])
def test_only_primaries_have_readers_and_only_nodes_pending_transactions(values: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="names a node that is not in the snapshot"):
        read_chain(chain_with(copied(**values)), "daily")


def test_a_table_that_continues_no_other_needs_a_copy() -> None:
    with pytest.raises(ManifestError, match=r"schema_changes\.copied\.a does not match"):
        read_chain(chain_with(replace(CONTINUED, successions={})), "daily")


def test_columns_are_in_the_order_of_their_numbers() -> None:
    columns = (COLUMN, Column("v", "text", 25, -1, 1, 2))
    full = replace(full_commit(), groups={"a": (replace(FIRST, columns=columns),)})
    check_commit(full)
    exchanged = tuple(replace(one, number=3 - one.number) for one in columns)
    with pytest.raises(ValueError, match="not in the order of their positions"):
        check_commit(replace(full, groups={"a": (replace(FIRST, columns=exchanged),)}))


def test_a_transaction_that_is_twice_in_doubt_is_refused() -> None:
    made, part = full_commit(), InDoubt("g", "g", 7, Lsn(30), is_prepared=True, is_included=False)
    (node,) = made.cut.nodes
    once, twice = (replace(made.cut, nodes=(replace(node, in_doubt=(part,) * times),)) for times in (1, 2))
    stores = memory(), memory()
    for store, cut in zip(stores, (once, twice), strict=True):
        store.create(commit_key("daily", 0), seal(counted(replace(made, cut=cut))))
    assert read_chain(stores[0], "daily").full.cut == once
    with pytest.raises(ManifestError, match=r"position in doubt .* twice"):
        read_chain(stores[1], "daily")


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({"b": 1}, "slots_complete_at lists b instead of a"),
        ({"a": 4}, "slots_complete_at.a: 0/4 is not between the base position and the cut"),
        ({"a": 11}, "slots_complete_at.a: 0/B is not between the base position and the cut"),
    ],
)
def test_all_slots_existed_between_the_base_positions_and_the_cut(positions: dict[str, int], message: str) -> None:
    made = full_commit()
    (node,) = made.cut.nodes
    cut = replace(made.cut, nodes=(replace(node, start=Lsn(10), finish=Lsn(11)),))
    made = replace(made, base={"a": Lsn(5), "b": Lsn(7)}, cut=cut, segments={"a": (), "b": ()})
    for at in (5, 10):
        check_commit(counted(replace(made, slots_complete_at={"a": Lsn(at)})))
    with pytest.raises(ValueError, match=re.escape(message)):
        check_commit(counted(replace(made, slots_complete_at={name: Lsn(at) for name, at in positions.items()})))
