"""What the steps of a copy in the background have copied, and from which positions changes of its tables count."""

from __future__ import annotations

from msgspec import structs

from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.fold.schema_at_cut import mapping_to_cut
from cutline.snapshots.records.background_records import CopyStep, find_copied, read_steps, steps_prefix, store_step
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import CopiedLater, DefinitionChanges, Renewal
from tests.unit.made_commits import full_commit, identity, increment_commit, memory

BEGUN = "20261120T000000Z-0000000001"
KEY = Column(name="id", type="integer", type_oid=23, type_modifier=-1, position=1, number=1)


def group(number: int, name: str) -> Group:
    return Group(number, "public", name, "default", 1, (KEY,))


def step(position: int, *numbers: int) -> CopyStep:
    return CopyStep(
        snapshot="daily",
        operation=BEGUN,
        node="b",
        position=Lsn(position),
        rows=dict.fromkeys(numbers, 3),
        bytes=8192,
        objects=(),
    )


def test_tables_are_copied_once_and_under_definitions_that_others_continue() -> None:
    # 7 continues 2; 3 is gone.
    at_cut = {1: 1, 2: 7, 7: 7, 4: 4, 5: 5}
    steps = (step(10, 1, 2), step(20, 3), step(30, 4), step(40, 7, 5), step(50, 5))
    copied = find_copied(steps, at_cut, (1, 7, 4, 5, 6))
    # The step with 7 has a table that is copied already: it does not count, and so 5 comes from the next.
    assert [one.position for one in copied.steps] == [10, 30, 50]
    assert copied.copied == {1: 1, 2: 7, 4: 4, 5: 5}
    assert copied.missing == {6}
    assert copied.bytes == 3 * 8192


def test_steps_are_read_in_order_and_what_is_not_one_is_left_out() -> None:
    store = memory()
    for position in (300, 20):
        store_step(store, step(position, position))
    store.create(f"{steps_prefix('daily', 'b', BEGUN)}/0000000000000001-01234567.json", b"{}")
    known: dict[str, CopyStep] = {}
    found = read_steps(store, "daily", "b", BEGUN, known)
    assert [one.position for one in found] == [20, 300]
    assert read_steps(store, "daily", "b", BEGUN, known) == found
    assert not read_steps(store, "daily", "b", "20261120T000000Z-0000000002")


def chain() -> Chain:
    """Standby b is copied again with increment 3: group 1 at 40, and 2, which 5 continues since increment 2, at 60."""
    tables = {"a": (group(1, "one"), group(2, "two"))}
    full = structs.replace(full_commit(), groups=tables)
    changes = DefinitionChanges(
        groups={"a": (group(5, "two"),)}, gone={"a": (2,)}, successions={"a": {5: 2}}, begun={"a": {5: Lsn(70)}}
    )
    later = (CopiedLater(Lsn(40), (1,), (Lsn(35),)), CopiedLater(Lsn(60), (2,)))
    renewal = Renewal(identity("b", "a"), Lsn(30), "lost", {1: 3, 2: 3}, began_by=BEGUN, later=later)
    return Chain(
        full,
        (
            increment_commit(1),
            structs.replace(increment_commit(2), definition_changes=changes),
            structs.replace(increment_commit(3), definition_changes=DefinitionChanges(), renewed={"b": renewal}),
        ),
    )


def test_changes_count_from_the_position_of_each_table_under_all_of_its_definitions() -> None:
    found = chain()
    assert found.archive("b") == BEGUN
    assert (found.bases["b"], found.complete_at["b"]) == (30, 60)
    assert found.copy_positions("b") == {1: 40, 2: 60}
    assert found.pending_at_copies("b") == {1: {35}}
    mapping = mapping_to_cut(found, "b")
    assert mapping.since == {1: 40, 2: 60, 5: 60}
    assert mapping.pending_at_copies == {1: {35}}
    # Compared with the standby, changes on the primary count from there on, too.
    assert mapping_to_cut(found, "a", ["b"]).since == {1: 40, 2: 60, 5: 60}
    assert mapping_to_cut(found, "a").since == {}


def test_a_table_that_was_copied_later_does_not_get_changes_that_an_earlier_copy_of_another_lacks() -> None:
    """A transaction is prepared before the copy of 1 and decided before that of 2."""
    tables = {"a": (group(9, "old"),)}
    first = DefinitionChanges(
        groups={"a": (group(1, "one"),)},
        begun={"a": {1: Lsn(40)}},
        copied={"a": {1: 3}},
        pending={"a": (Lsn(35),)},
    )
    second = DefinitionChanges(groups={"a": (group(2, "two"),)}, begun={"a": {2: Lsn(60)}}, copied={"a": {2: 3}})
    found = Chain(
        structs.replace(full_commit(), groups=tables),
        (
            structs.replace(increment_commit(1), definition_changes=first),
            structs.replace(increment_commit(2), definition_changes=second),
        ),
    )
    assert mapping_to_cut(found, "a").pending_at_copies == {1: {35}}
