"""A table whose changes have labels that its types no longer have is found, and no other table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest

from cutline.nodes.groups import Column, Group, Table
from cutline.nodes.table_state import TableState
from cutline.snapshots.create.printed_values import NewForms, find_outdated, new_forms
from cutline.snapshots.ddl.table_changes import ChangedTable, ShardPlan, TableBefore
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import create_segment
from tests.unit.made_segments import HELD, event, memory, table

MOOD, OID = 70_000, 9
ID = Column("id", "integer", 23, -1, 0, 1)
COLUMNS = (ID, Column("mood", "public.mood", MOOD, -1, 1, 2))
OLD, NEW = f"enum {MOOD} 1 sad.5", f"enum {MOOD} 2 calm.8"


def group(columns: tuple[Column, ...] = COLUMNS, number: int = 4) -> Group:
    return Group(number, "public", "t", "default", 1, columns)


def state(*types: str) -> TableState:
    return TableState("public.t", OID, "p", "m", 1, 2, "c", tuple(types), None)


def none_nested(_: Collection[int]) -> dict[int, frozenset[int]]:
    return {}


def forms(
    was: tuple[str, ...],
    now: tuple[str, ...],
    columns: tuple[Column, ...] = COLUMNS,
    nested: Callable[[Collection[int]], Mapping[int, Collection[int]]] = none_nested,
) -> list[NewForms]:
    plan = ShardPlan((group(columns),), (), (), {"public.t": state(*now)})
    return new_forms(plan, [TableBefore(OID, group(columns), state(*was))], nested)


def found_table(of: Group) -> Table:
    return Table(OID, of, 1, 1, readable=True, key_is_immediate=True)


def segment(store: ObjectStore, *rows: bytes, op: str = "U", number: int = 1, of: int = 4) -> Segment:
    changes = [{**event(number * 10 + at, op), "group": of, "row": row} for at, row in enumerate(rows)]
    return create_segment(store, "wal", number, HELD, (table(changes), table([event(99)])), continued=None).segment


def names_of(found: list[NewForms]) -> list[str]:
    return [outdated.name for outdated in found]


@pytest.mark.parametrize(("row", "op", "is_outdated"), [
    (b"1\tcalm\n", "U", False), (b"1\tsad\n", "I", False), (b"1\t\\N\n", "U", False), (b"1\t\\u\n", "u", False),
    (b"1\tquiet\n", "U", True), (b"1\tquiet\n", "I", True), (b"1\tquiet\n", "u", True), (b"", "D", False),
    ("1\tgelöst\n".encode(), "U", True),
])  # fmt: skip
def test_a_value_must_be_a_label_of_its_type_at_the_cut(row: bytes, op: str, *, is_outdated: bool) -> None:
    store, tables = memory(), forms((OLD,), (OLD, NEW))
    found = find_outdated(store, [segment(store, b"1\tsad\n", row, op=op)], tables, is_utf8=True)
    assert names_of(found) == ["public.t"] * is_outdated


def test_labels_with_other_letters_are_compared_only_in_utf_8() -> None:
    store, tables = memory(), forms((OLD,), (OLD, NEW))
    assert find_outdated(store, [segment(store, b"1\tst\xe4ndig\n")], tables, is_utf8=False) == []


def test_labels_are_compared_as_copy_prints_them() -> None:
    store, tables = memory(), forms((OLD,), (OLD, f"enum {MOOD} 2 a\\b\tc.8"))
    assert find_outdated(store, [segment(store, b"1\ta\\\\b\\tc\n")], tables, is_utf8=True) == []


def test_changes_of_other_tables_do_not_count() -> None:
    store, tables = memory(), forms((OLD,), (OLD, NEW))
    assert find_outdated(store, [segment(store, b"1\tquiet\n", of=5)], tables, is_utf8=True) == []


def test_each_change_counts_if_the_labels_may_be_part_of_other_values() -> None:
    other = (*COLUMNS, Column("mask", "public.mask", MOOD + 1, -1, 2, 3))
    for was, now, columns, enums in (
        ((OLD,), (OLD, NEW), other, {MOOD}),
        ((OLD,), (OLD, NEW), (ID, other[2]), {MOOD}),
        ((OLD,), (OLD, NEW, "fields 80000 1.5"), COLUMNS, set[int]()),
        ((OLD,), (OLD, "names abc"), COLUMNS, set[int]()),
    ):
        store, (made,) = memory(), forms(was, now, columns, lambda oids, enums=enums: dict.fromkeys(oids, enums))
        assert made.labels is None
        assert names_of(find_outdated(store, [segment(store, b"1\tsad\n")], [made], is_utf8=True)) == ["public.t"]
        gone = segment(store, b"", op="D", number=2)
        assert find_outdated(store, [gone], [made], is_utf8=True) == []


def test_another_enum_within_other_values_does_not_matter() -> None:
    store, tables = memory(), forms((OLD,), (OLD, NEW), nested=lambda oids: {oid: {MOOD + 5} for oid in oids})
    assert find_outdated(store, [segment(store, b"1\tcalm\n")], tables, is_utf8=True) == []


def test_a_table_without_new_labels_or_types_is_not_read() -> None:
    assert forms((OLD,), (OLD,)) == []
    assert forms((OLD,), (OLD, "xml 3")) == []
    copied = ShardPlan((), (ChangedTable(found_table(group()), None),), (), {"public.t": state(OLD, NEW)})
    assert new_forms(copied, [TableBefore(OID, group(), state(OLD))], none_nested) == []


def test_changes_under_the_earlier_definition_count_too() -> None:
    wider = found_table(group((*COLUMNS, Column("n", "integer", 23, -1, 2, 3)), 5))
    plan = ShardPlan((), (ChangedTable(wider, 4),), (4,), {"public.t": state(OLD, NEW)})
    tables = new_forms(plan, [TableBefore(OID, group(), state(OLD))], none_nested)
    for label, count in ((b"quiet", 1), (b"calm", 0)):
        for of, row in ((4, b"1\t" + label + b"\n"), (5, b"1\t" + label + b"\t3\n")):
            store = memory()
            assert len(find_outdated(store, [segment(store, row, of=of)], tables, is_utf8=True)) == count


def test_nothing_more_is_read_once_all_tables_are_found() -> None:
    store, tables = memory(), forms((OLD,), (OLD, NEW))
    first, second = segment(store, b"1\tquiet\n"), segment(store, b"1\tsad\n", number=2)
    store.delete(second.key)
    assert names_of(find_outdated(store, [first, second], tables, is_utf8=True)) == ["public.t"]
