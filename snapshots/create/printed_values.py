"""Find tables whose changes contain values in a form that their types no longer have.

Changes contain names as they were when the changes were written: labels of enum types, names in regclass and similar
columns, the fields of composite types. The labels and types that a table used at the last commit have stamps in that
commit, so the table is copied again if they were renamed since (`TableState.printed`). A label or a type that is new in
a table has no such stamp: `ADD VALUE 'x'`, an INSERT and `RENAME VALUE 'x' TO 'y'` between two cuts leave an `x` in
the WAL.

A label that was renamed and then added again under its old name is not found: the type has the label of the change, and
nothing in the catalogs shows that another label was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import column_of
from cutline.columns.fields import field_of
from cutline.columns.lines import NULL_MARK, UNCHANGED_MARK
from cutline.nodes.groups import Group, copy_line, copy_text
from cutline.nodes.table_state import LABEL_STAMP, TableState
from cutline.snapshots.ddl.table_changes import ShardPlan, TableBefore
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.segments import INSERT, PARTIAL, UPSERT, read_changes

MARKS = (NULL_MARK, UNCHANGED_MARK)
# Returns the enum types that occur within values of other types (arrays, domains, ranges, composites) in these tables.
ReadNested: TypeAlias = Callable[[Collection[int]], Mapping[int, Collection[int]]]


class NewForms(Struct, frozen=True):
    """A table with new types or labels, and its definitions, by number.

    `labels` are those of its enum types at the cut, by the oid of the type, as COPY prints them. It is None if the new
    labels may be part of other values, or if other types are new: then each change counts.
    """

    name: str
    oid: int
    groups: Mapping[int, Group]
    labels: Mapping[int, frozenset[bytes]] | None


def new_forms(plan: ShardPlan, before: Iterable[TableBefore], read_nested: ReadNested) -> list[NewForms]:
    """Return the tables that have new types or labels, except for those that are copied again.

    `read_nested` is called only if there are any.
    """
    copied = {table.oid for table in plan.to_copy}
    states = {state.oid: state for state in plan.states.values()}
    changed = {table.table.oid: table.table.group for table in plan.changed}
    found: list[tuple[TableBefore, frozenset[str]]] = []
    for was in before:
        now = states.get(was.oid)
        if now is None or was.state is None or was.oid in copied or now.types == was.state.types:
            continue
        if new := now.printed - was.state.printed:
            found.append((was, new))
    nested = read_nested([was.oid for was, _ in found]) if found else {}
    forms: list[NewForms] = []
    for was, new in found:
        group, now = changed.get(was.oid, was.group), states[was.oid]
        groups = {was.group.number: was.group, group.number: group}
        labels = _labels(group, now, new, nested.get(was.oid, frozenset()))
        forms.append(NewForms(now.table, was.oid, groups, labels))
    return forms


def _labels(
    group: Group, state: TableState, new: Collection[str], nested: Collection[int]
) -> Mapping[int, frozenset[bytes]] | None:
    """Return the labels of the table's enum types; None if `new` stamps are not only those of its enum columns.

    Also returns None if one of these types is also `nested` in values of other types.
    """
    columns = {column.type_oid for column in group.columns}
    changed = [LABEL_STAMP.fullmatch(stamp) for stamp in new]
    types = {int(match[1]) if match else 0 for match in changed}
    if not types <= columns or types.intersection(nested):
        return None
    return {
        oid: frozenset(copy_line(copy_text(label.encode()) or "") for label in labels)
        for oid, labels in state.labels.items()
    }


def find_outdated(
    store: ObjectStore, segments: Iterable[Segment], tables: Collection[NewForms], *, is_utf8: bool
) -> list[NewForms]:
    """Return the tables whose changes in these segments contain a value in a form that it no longer has.

    Labels with other letters than those of ASCII are compared only in a database in UTF-8. Raises ObjectDamagedError.
    """
    waiting = {number: table for table in tables for number in table.groups}
    outdated: list[NewForms] = []
    for segment in segments:
        for changes in read_changes(store, segment, ["op", "group", "row"]) if segment.changes else ():
            has_row = np.isin(to_numpy(changes["op"]), (INSERT, UPSERT, PARTIAL))
            numbers = to_numpy(changes["group"])
            for number in np.unique(numbers[has_row]).tolist():
                if (table := waiting.get(number)) is None:
                    continue
                rows = changes["row"].filter(to_mask(has_row & (numbers == number)))
                if any(_is_outdated(table, value, is_utf8=is_utf8) for value in _values(table, number, rows)):
                    outdated.append(table)
                    for other in table.groups:
                        del waiting[other]
            if not waiting:
                return outdated
    return outdated


def _values(table: NewForms, number: int, rows: pa.ChunkedArray) -> Iterator[tuple[int, bytes]]:
    """Yield the different values of enum columns, each with the oid of its type; (0, b"") if each change counts."""
    if table.labels is None:
        yield 0, b""
        return
    columns = table.groups[number].columns
    for place, column in enumerate(columns):
        if column.type_oid in table.labels:
            fields = field_of(column_of(rows), len(columns), place)
            # No more than the type has ever had labels.
            yield from ((column.type_oid, value) for value in pc.unique(fields.to_large_arrow()).to_pylist())


def _is_outdated(table: NewForms, value: tuple[int, bytes], *, is_utf8: bool) -> bool:
    oid, text = value
    if table.labels is None:
        return True
    return text not in MARKS and text not in table.labels[oid] and (is_utf8 or text.isascii())
