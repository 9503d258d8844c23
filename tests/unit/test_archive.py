"""pg_dump's archive is read within its bounds, and changed entry by entry."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.snapshots.ddl.ddl_archive import (
    DumpFormatError,
    NewEntry,
    extract,
    read_contents,
    rewrite,
    statements_of_entry,
    with_dependents,
)
from tests.unit.made_archives import MadeEntry, header, integer, made_archive, made_body, made_entry

ENTRIES = [
    MadeEntry("TABLE", "a b", 'o"p', "CREATE TABLE x;\n", 7, dependencies=(9,)),
    MadeEntry("SCHEMA", "\udcff\n", None, "", 8, 2615),
    MadeEntry("INDEX", "i", "m", "CREATE INDEX;\n", 9, section=4, dependencies=(1, 2)),
]


@pytest.mark.parametrize("version", [14, 15, 16])
def test_entries_are_read_as_they_were_written(version: int) -> None:
    body = made_body(ENTRIES, version)
    contents = read_contents(body)
    assert contents.writer == 18
    assert [(one.number, one.kind, one.name, one.oid, one.catalog, one.dependencies) for one in contents.entries] == [
        (1, "TABLE", "a b", 7, 1259, (9,)), (2, "SCHEMA", "\udcff\n", 8, 2615, ()), (3, "INDEX", "i", 9, 1259, (1, 2)),
    ]  # fmt: skip
    assert [one.schema for one in contents.entries] == ['o"p', "", "m"]
    assert [statements_of_entry(body, one) for one in contents.entries] == [one.statements for one in ENTRIES]
    again = rewrite(body, contents, {3: "other;\udcff"}, [NewEntry("DROP", "one", "DROP;"), NewEntry("PATH", "two")])
    changed = read_contents(again)
    assert [(one.number, one.kind, one.name) for one in changed.entries[:2]] == [(4, "DROP", "one"), (5, "PATH", "two")]
    statements = [statements_of_entry(again, one) for one in changed.entries]
    assert statements == ["DROP;", "", "CREATE TABLE x;\n", "", "other;\udcff"]
    assert rewrite(body, contents, {}, []) == body


@pytest.mark.parametrize(("version", "major"), [("18.6", 18), ("19devel", 19), ("19beta2", 19), ("9.6", 9)])
def test_the_version_of_pg_dump_is_read_in_all_its_forms(version: str, major: int) -> None:
    assert read_contents(header(writer=version) + integer(0)).writer == major


@given(st.integers(0, len(made_body(ENTRIES)) - 1))
def test_an_archive_that_ends_early_is_refused(size: int) -> None:
    with pytest.raises(DumpFormatError):
        read_contents(made_body(ENTRIES)[:size])


@given(st.integers(0, len(made_body(ENTRIES)) - 1), st.integers(0, 255))
def test_a_changed_byte_raises_nothing_else(place: int, value: int) -> None:
    body = bytearray(made_body(ENTRIES))
    body[place] = value
    with suppress(DumpFormatError):
        read_contents(bytes(body))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"-- a script", "not a pg_dump archive"),
        (header(17) + integer(0), "version 1.17"),
        (header(13) + integer(0), "version 1.13"),
        (header()[:9] + b"\x03" + header()[10:] + integer(0), "archive format is unknown"),
        (header(writer="new") + integer(0), "pg_dump version that it names"),
        (header() + integer(1 << 31), "ends early"),
        (header() + integer(-1), "number of entries is -1"),
        # Refused before any entry is read: this one has data.
        (header() + integer(1000) + integer(1) + integer(1) + made_entry(1, ENTRIES[0]), "ends early"),
        (header() + integer(1) + integer(1) + integer(1) + made_entry(1, ENTRIES[0]), "contains data"),
        (header() + integer(2) + 2 * made_entry(1, ENTRIES[0]), "not unique"),
        (header() + integer(1) + made_entry(0, ENTRIES[0]), "not unique"),
        (header() + integer(1) + made_entry(1, MadeEntry("TABLE", dependencies=(1 << 40,))), "entry number is invalid"),
    ],
)  # fmt: skip
def test_what_is_no_archive_of_a_known_kind_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(DumpFormatError, match=why):
        read_contents(body)


def test_dependents_are_found_through_others_and_in_circles() -> None:
    _, contents = made_archive([MadeEntry("X", dependencies=one) for one in ((), (1,), (2, 5), (9,), (3,), ())])
    assert with_dependents(contents.entries, [1]) == {1, 2, 3, 5}
    assert with_dependents(contents.entries, [4, 6]) == {4, 6}


@pytest.mark.parametrize("version", [14, 15, 16])
def test_some_entries_make_an_archive_with_the_settings_of_the_whole(version: int) -> None:
    """The archive is, byte by byte, that of these entries with their numbers."""
    entries = [MadeEntry("ENCODING"), *ENTRIES, MadeEntry("SEARCHPATH", "x"), *ENTRIES]
    body = made_body(entries, version)
    contents = read_contents(body)
    some = [contents.entries[3], contents.entries[6]]
    first, last = NewEntry("DROP", "one", "DROP;"), NewEntry("DROP", "other")
    alone = extract(body, contents, [first, some[0], last, some[1]])
    found = read_contents(alone)
    assert [(one.number, one.kind) for one in found.entries] == [
        (1, "ENCODING"), (5, "SEARCHPATH"), (9, "DROP"), (4, "INDEX"), (10, "DROP"), (7, "SCHEMA"),
    ]  # fmt: skip
    assert [statements_of_entry(alone, found.entries[number]) for number in (2, 4)] == ["DROP;", ""]
    for one in found.entries:
        if one.kind != "DROP":
            assert alone[one.entry_begin : one.entry_end] == made_entry(one.number, entries[one.number - 1], version)
    assert alone.startswith(header(version) + integer(6))
