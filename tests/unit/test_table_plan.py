"""How a table is planned between two commits: unchanged, converted, copied again, or gone."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec import structs

from cutline.fleet.progress import Noting, Silent
from cutline.nodes.groups import Column, Group, Table
from cutline.nodes.publications import PublicationChangedError
from cutline.nodes.table_state import TableState
from cutline.snapshots.ddl.fingerprint import Moment
from cutline.snapshots.ddl.table_changes import (
    JOINING,
    LOST_ROWS,
    NEW,
    ChangedTable,
    KnownTables,
    NodeTables,
    ShardPlan,
    TableBefore,
    plan_ddl,
    plan_shard,
    report_changes,
)

INT, TEXT, VARCHAR = 23, 25, 1043


def column(name: str, number: int, type_oid: int = INT, modifier: int = -1, missing: str | None = None) -> Column:
    return Column(name, str(type_oid), type_oid, modifier, number - 1, number, missing)


ID, A, B = column("id", 1), column("a", 2, TEXT), column("b", 3)
OLD = Group(7, "public", "t", "default", 1, (ID, A, B), 4)
OID = 1000
# The highest number on all shards together, so that a number is a multiset's on all of them or on none.
HIGHEST = 40


def state(group: Group, attributes: int = 3, **changes: object) -> TableState:
    stamps = " ".join(f"{one.number}.700" for one in sorted(group.columns, key=lambda one: one.number))
    found = TableState(group.name, OID, "1.600", "2.600", 5000, attributes, stamps, (), None)
    return structs.replace(found, **changes)


def plan(
    new: Group | None,
    after: TableState | None = None,
    *,
    old: Group = OLD,
    before: TableState | None = None,
    archived: tuple[TableBefore, ...] = (),
    moved: tuple[int, ...] = (),
    oid: int = OID,
) -> ShardPlan:
    tables = (
        []
        if new is None
        else [Table(oid, structs.replace(new, number=0, partitions=2), 0, 0, readable=True, key_is_immediate=True)]
    )
    states = {} if new is None else {new.name: after or state(new)}
    return plan_shard("n", [TableBefore(OID, old, before or state(old))], archived, (tables, states), HIGHEST, moved)


def only_change(found: ShardPlan) -> ChangedTable:
    (one,) = found.changed
    return one


def is_converted(found: ShardPlan) -> bool:
    one = only_change(found)
    assert found.gone == (7,)
    if one.after is None:
        assert one.reason
        return False
    assert (one.after, one.table.group.partitions) == (7, 4)
    return True


def with_columns(*columns: Column, width: int = 1) -> Group:
    return structs.replace(OLD, columns=tuple(columns), key_width=width)


@pytest.mark.parametrize(("count", "reason", "note"), [
    (3, JOINING, f"node n: all 3 tables need a new base copy: {JOINING}"),
    (3, LOST_ROWS, f"node n: all 3 tables need a new base copy: {LOST_ROWS}"),
    (1, NEW, f"node n: table public.t0 needs a new base copy: {NEW}"),
])  # fmt: skip
def test_tables_that_the_last_commit_lacks_are_counted_with_the_true_reason(count: int, reason: str, note: str) -> None:
    groups = [structs.replace(OLD, number=0, table=f"t{number}") for number in range(count)]
    tables = tuple(
        Table(number, group, 0, 0, readable=True, key_is_immediate=True) for number, group in enumerate(groups)
    )
    now = NodeTables(tables, {group.name: state(group) for group in groups}, "", cast("Moment", None))
    known = KnownTables(
        {"n": ()}, {"n": {}}, {"n": ""}, 0,
        joining=frozenset(["n"] if reason == JOINING else []),
        unread={"n": frozenset(range(count))} if reason == LOST_ROWS else {},
    )  # fmt: skip
    noting = Noting(Silent())
    report_changes(plan_ddl({"n": now}, known, {}, {}), noting)
    assert noting.notes == [note]


def test_an_unchanged_table_keeps_its_definition() -> None:
    # A rewrite without any altered column, as by VACUUM FULL, changes no row.
    for after in (state(OLD), state(OLD, file=5001), state(OLD, columns="1.700 2.701 3.700")):
        found = plan(OLD, after)
        assert found == ShardPlan((OLD,), (), (), {"public.t": after})


def test_a_missing_value_alone_does_not_make_another_definition() -> None:
    with_missing = with_columns(ID, A, structs.replace(B, missing="7"))
    assert plan(OLD, state(OLD), old=with_missing).unchanged == (with_missing,)


C = column("c", 4, 1700, missing="1")


@pytest.mark.parametrize(
    ("new", "attributes"),
    [
        pytest.param(with_columns(ID, A, B, C), 4, id="column added"),
        pytest.param(with_columns(ID, structs.replace(B, position=1)), 3, id="column dropped"),
        pytest.param(with_columns(ID, structs.replace(A, name="x"), B), 3, id="column renamed"),
        pytest.param(with_columns(structs.replace(ID, name="x"), A, B), 3, id="key column renamed"),
        pytest.param(
            with_columns(ID, structs.replace(A, type_oid=VARCHAR, type_modifier=14), B), 3, id="text to varchar"
        ),
        pytest.param(with_columns(ID, A, structs.replace(B, type_modifier=9)), 3, id="another modifier"),
        pytest.param(structs.replace(OLD, table="u"), 3, id="table renamed"),
        pytest.param(structs.replace(OLD, schema="s"), 3, id="schema changed"),
        pytest.param(structs.replace(OLD, identity="index"), 3, id="the same key by an index"),
    ],
)
def test_a_table_whose_rows_can_be_converted_is_converted(new: Group, attributes: int) -> None:
    found = plan(new, state(new, attributes))
    assert is_converted(found)
    assert found.successions == {41: 7}
    assert found.groups == (structs.replace(new, number=41, partitions=4),)


@pytest.mark.parametrize(
    ("new", "attributes"),
    [
        pytest.param(with_columns(ID, A, structs.replace(B, type_oid=20)), 3, id="another type"),
        pytest.param(with_columns(ID, structs.replace(A, type_oid=17), B), 3, id="text to bytea"),
        pytest.param(with_columns(A, ID, B), 3, id="another key"),
        pytest.param(with_columns(ID, A, B, width=2), 3, id="a longer key"),
        pytest.param(structs.replace(with_columns(ID, A, B, width=0), identity="full"), 3, id="no key"),
        pytest.param(with_columns(ID, A, B, C), 5, id="another column added and dropped again"),
        pytest.param(OLD, 4, id="a column added and dropped again"),
        pytest.param(with_columns(ID, B, column("a", 4, TEXT)), 4, id="one dropped and one of its type added"),
        pytest.param(
            with_columns(ID, structs.replace(B, position=1), structs.replace(C, position=2)),
            4,
            id="one dropped, another added",
        ),
        pytest.param(with_columns(ID, A, column("b", 4)), 4, id="dropped and added again"),
    ],
)
def test_a_table_whose_rows_may_not_be_convertible_is_copied_again(new: Group, attributes: int) -> None:
    found = plan(new, state(new, attributes))
    assert not is_converted(found)
    assert [table.group for table in found.to_copy] == [structs.replace(new, number=41, partitions=2)]
    assert found.successions == {}


def test_a_generated_column_is_not_taken_for_a_dropped_one() -> None:
    new = with_columns(ID, A, B, C)
    # A generated column has number 5.
    assert is_converted(plan(new, state(new, 5, columns="1.700 2.700 3.700 4.800 5.800")))


def test_a_table_is_copied_again_if_a_generated_column_becomes_ordinary() -> None:
    new = with_columns(ID, A, B, C)
    generated = state(OLD, 4, columns="1.700 2.700 3.700 4.700")
    assert not is_converted(plan(new, state(new, 4), before=generated))


@pytest.mark.parametrize(
    "changes",
    [
        {"file": 5001, "columns": "1.700 2.701 3.700"},
        {"membership": "3.800"},
        {"types": ("enum 1 2 new.3",)},
        {"types": ()},
    ],
)
def test_a_table_is_copied_again_after_a_change_that_wal_does_not_show(changes: dict[str, object]) -> None:
    before = state(OLD, types=("enum 1 2 old.2",))
    assert not is_converted(plan(OLD, structs.replace(before, **changes), before=before))


def test_a_label_that_was_added_to_an_enum_changes_no_row() -> None:
    before, after = (state(OLD, types=labels) for labels in (("enum 1 2 a.2",), ("enum 1 2 a.2", "enum 1 3 b.9")))
    assert plan(OLD, after, before=before).unchanged == (OLD,)


def test_a_change_of_the_columns_with_xml_changes_no_row() -> None:
    before, after = state(OLD, types=("xml 2", "xml 3")), state(OLD, types=("xml 3",))
    assert plan(OLD, after, before=before).unchanged == (OLD,)
    assert before.xml_columns == {2, 3}


def test_a_multiset_is_converted_only_to_a_multiset_of_its_kind() -> None:
    full = structs.replace(with_columns(ID, A, B, width=0), identity="full")
    more = structs.replace(full, columns=(*full.columns, C))
    assert is_converted(plan(more, state(more, 4), old=full))
    assert not is_converted(plan(structs.replace(full, identity="append_only"), state(full), old=full))


def test_another_table_of_the_same_name_is_new_and_the_old_one_is_gone() -> None:
    found = plan(OLD, state(OLD), oid=OID + 1)
    assert only_change(found).reason == "it is new"
    assert found.gone == (7,)
    assert plan(None).gone == (7,)
    assert plan(None).changed == ()


def test_a_table_that_was_changed_under_an_unknown_definition_is_copied_again() -> None:
    assert not is_converted(plan(OLD, state(OLD), moved=(OID,)))


NEW = with_columns(ID, A, B, C)
TRIED = TableBefore(OID, structs.replace(NEW, number=30))


def test_a_definition_that_archived_segments_use_keeps_its_number() -> None:
    found = plan(NEW, state(NEW, 4), archived=(TRIED, TableBefore(OID + 1, structs.replace(OLD, number=33))))
    assert is_converted(found)
    assert found.successions == {30: 7}


@pytest.mark.parametrize(
    "tried",
    [TableBefore(OID, TRIED.group, is_copied=True), TableBefore(OID, structs.replace(OLD, number=30, table="x"))],
)
def test_a_table_that_a_failed_attempt_archived_differently_is_copied_again_under_a_new_number(
    tried: TableBefore,
) -> None:
    found = plan(NEW, state(NEW, 4), archived=(tried,))
    assert not is_converted(found)
    assert only_change(found).table.group.number == 41
    # So is a table that has not changed since the previous commit: the attempt may have skipped changes.
    assert not is_converted(plan(OLD, state(OLD), archived=(tried,)))


def test_an_unchanged_table_that_a_failed_attempt_archived_is_converted() -> None:
    again = TableBefore(OID, structs.replace(OLD, number=30))
    assert plan(OLD, state(OLD), archived=(again,)).successions == {30: 7}


def test_a_table_that_left_its_publication_is_copied_again() -> None:
    assert not is_converted(plan(OLD, state(OLD, publication="", membership="")))


def test_a_publication_that_was_altered_as_a_whole_is_refused() -> None:
    with pytest.raises(PublicationChangedError, match=r"node n: Cutline's publication of public\.t was altered"):
        plan(OLD, state(OLD, publication="1.900"))


def test_a_table_that_its_identity_moves_to_the_other_publication_is_copied_again() -> None:
    """The publication that it leaves was not altered."""
    append_only = structs.replace(with_columns(ID, A, B, width=0), identity="append_only")
    full = structs.replace(append_only, identity="full")
    there = state(append_only, publication="3.650", membership="4.650")
    assert only_change(plan(full, state(full), old=append_only, before=there)).after is None
    assert only_change(plan(append_only, there, old=full)).after is None
