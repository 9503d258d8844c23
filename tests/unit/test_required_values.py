"""NULL in a column that the DDL at the cut declares NOT NULL is found, and nothing that only looks like NULL."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from cutline.check.required_values import (
    RequiredSince,
    check_changes,
    check_required,
    find_nulls,
    follow_required,
    places_of,
    required_columns,
)
from cutline.check.stored_rows import RowsInvalidError
from cutline.check.table_forms import TableForms
from cutline.columns.bytes_column import from_list
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.described_ddl import describe
from cutline.snapshots.fold.sources import SegmentSource, Source
from cutline.snapshots.records.chain import Chain
from tests.unit.made_commits import segment
from tests.unit.made_definitions import MadeChain, altered
from tests.unit.made_segments import table

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
    nulls = find_nulls(from_list([b"1\ta\t\\N\n", b"2\t\\N\tb\n", b"3\t\\N\t\\N\n"]))
    check_required(forms, np.array([7, 9, 9]), nulls, required)
    check_required(forms, np.array([7, 7, 9]), nulls, required, np.array([True, False, True]))
    with pytest.raises(RowsInvalidError, match="has NULL in column needed, which is NOT NULL"):
        check_required(forms, np.array([7, 7, 9]), nulls, required, np.array([True, True, True]))
    check_required(forms, np.array([7, 7, 9]), nulls, places_of({}))


@pytest.mark.parametrize(
    ("group", "line", "column"),
    [(7, b"1\t\\N\tx\n", "needed"), (9, b"\\N\tx\ty\n", "id"), (9, b"1\tx\t\\N\n", "other")],
)
def test_every_required_column_of_every_table_is_found(group: int, line: bytes, column: str) -> None:
    columns = tuple(Column(name, "text", 25, -1, number) for number, name in enumerate(("id", "needed", "other")))
    groups = [Group(number, "public", f"t{number}", "default", 1, columns) for number in (5, 7, 9, 11)]
    # In no order.
    required = places_of({9: frozenset({2, 0}), 7: frozenset({1})})
    nulls = find_nulls(from_list([line]))
    for other in {5, 7, 9, 11} - {group}:
        check_required(TableForms.of(groups), np.array([other]), nulls, required)
    with pytest.raises(RowsInvalidError, match=f"a row of .*t{group} has NULL in column {column}"):
        check_required(TableForms.of(groups), np.array([group]), nulls, required)


def test_a_change_has_a_value_where_the_column_was_not_null_when_it_was_made() -> None:
    columns = tuple(Column(name, "text", 25, -1, number) for number, name in enumerate(("id", "needed")))
    forms = TableForms.of([Group(7, "public", "t", "default", 1, columns), Group(9, "public", "u", "full", 0, columns)])
    listed = segment("a", 1, 0, 100)
    source = SegmentSource(Source(listed.key, "a", 0, 1, ""), listed, Lsn(80), frozenset({Lsn(60)}), {})
    required = RequiredSince.of({7: {1: Lsn(30), 0: Lsn(30)}, 9: {}})

    def check(op: str, lsn: int, row: bytes = b"1\t\\N\n", group: int = 7) -> None:
        complete = {"lsn": lsn, "op": ord("U"), "group": 7, "row": b"2\tx\n"}
        rest = {"end_lsn": 0, "seq": 1, "xid": 1, "global_id": None, "partition": 0, "key": b""}
        found = {"lsn": lsn, "op": ord(op), "group": group, "row": row}
        check_changes(forms, table([rest | complete, rest | found]), source, required)

    for op in "IUu":
        with pytest.raises(
            RowsInvalidError, match=r"of public\.t at 0/1E has NULL in column needed, which was NOT NULL"
        ):
            check(op, 30)
    # The old row of a table without a key, a change before the constraint was known, one after the cut, one of a
    # transaction that was rolled back, one of another table, and a value.
    check("D", 30)
    check("U", 29)
    check("U", 80)
    check("U", 60)
    check("U", 30, group=9)
    check("U", 30, b"1\tN\n")
    check_changes(forms, table([]), source, RequiredSince.of({}))


def test_a_column_is_required_from_the_cut_at_which_its_stamp_was_first_seen() -> None:
    chain = MadeChain.kept().chain
    groups = {group.name: group for group in chain.groups("s1")}
    entry = groups["public.entry"].number
    now, required = chain.position("s1"), {entry: frozenset({0, 1})}
    before = Chain(chain.full)
    assert follow_required(None, chain, "s1", {}, required) == {entry: {0: now, 1: now}}
    known = {entry: {0: Lsn(5), 2: Lsn(6)}}
    # Column 1 became NOT NULL, and column 2 is no longer.
    assert follow_required(chain, chain, "s1", known, required) == {entry: {0: Lsn(5), 1: now}}
    altered_state = structs.replace(chain.tables("s1")["public.entry"], columns="other")
    others = tuple(one for name, one in before.tables("s1").items() if name != "public.entry")
    altered_chain = Chain(structs.replace(chain.full, tables={**chain.full.tables, "s1": (*others, altered_state)}))
    assert follow_required(altered_chain, chain, "s1", known, required) == {entry: {0: now, 1: now}}


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
