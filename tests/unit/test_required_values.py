"""NULL in a column that the DDL at the cut declares NOT NULL is found, and nothing that only looks like NULL."""

from __future__ import annotations

import numpy as np
import pytest

from cutline.check.required_values import check_required, find_nulls, places_of, required_columns
from cutline.check.stored_rows import RowsInvalidError
from cutline.check.table_forms import TableForms
from cutline.columns.bytes_column import from_list
from cutline.nodes.groups import Column, Group
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.described_ddl import describe
from tests.unit.made_definitions import MadeChain, altered

# Lines as COPY prints them, and the places of their NULLs.
LINES = {
    b"1\t\\N\tx\n": [1],
    b"\\N\t\\N\n": [0, 1],
    b"1\tx\t\\N\n": [2],
    # A backslash and an N, an N after an escaped newline, and an N at the end of a value.
    b"\\\\N\t1\n": [],
    b"\\n\tN\n": [],
    b"1\t\\\\\\N\n": [],
    b"x\\\\\t\\N\n": [1],
    b"\n": [],
}


def test_only_a_whole_field_is_null() -> None:
    rows = from_list(list(LINES))
    line, place = find_nulls(rows)
    expected = [(number, place) for number, places in enumerate(LINES.values()) for place in places]
    assert list(zip(line.tolist(), place.tolist(), strict=True)) == expected
    # A part of a column has other offsets.
    line, place = find_nulls(rows.part(slice(1, 3)))
    assert list(zip(line.tolist(), place.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 2)]
    assert len(find_nulls(from_list([]))[0]) == 0


def test_a_null_is_wrong_only_in_a_required_column_of_a_row_of_the_state() -> None:
    columns = tuple(Column(name, "text", 25, -1, number) for number, name in enumerate(("id", "needed", "other")))
    forms = TableForms.of(
        [Group(7, "public", "t", "default", 1, columns), Group(9, "public", "u", "default", 1, columns)]
    )
    required = places_of({7: frozenset({1})})
    rows = from_list([b"1\ta\t\\N\n", b"2\t\\N\tb\n", b"3\t\\N\t\\N\n"])
    check_required(forms, np.array([7, 9, 9]), rows, required)
    check_required(forms, np.array([7, 7, 9]), rows, required, np.array([True, False, True]))
    with pytest.raises(RowsInvalidError, match="has NULL in column needed, which is NOT NULL"):
        check_required(forms, np.array([7, 7, 9]), rows, required, np.array([True, True, True]))


def test_the_columns_are_those_of_keys_and_of_the_ddl() -> None:
    made = MadeChain.kept()
    groups = {group.number: group for group in made.chain.groups("s1")}
    keys = {(group.table, column.name) for group in groups.values() for column in group.columns[: group.key_width]}
    assert ("entry", "id") in keys

    def required(ddl: DdlArchive) -> set[tuple[str, str]]:
        found = required_columns(made.chain, "s1", describe(ddl))
        return {
            (groups[number].table, groups[number].columns[place].name)
            for number, places in found.items()
            for place in places
        }

    changes = {"TABLE entry": ('"account" bigint', '"account" bigint NOT NULL')}
    changes |= {"TABLE unkeyed": ('"w" integer', '"w" integer CONSTRAINT "given" NOT NULL')}
    assert required(made.ddl("s1", 2)) == keys
    assert required(altered(made.ddl("s1", 2), changes)) == keys | {("entry", "account"), ("unkeyed", "w")}
