"""What a stored row shows by itself to be damaged."""

from __future__ import annotations

import re
from contextlib import nullcontext
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.check import stored_rows
from cutline.check.own_types import CompositeType, DomainType, EnumType, OwnType, own_types
from cutline.check.stored_rows import (
    BaseChecks,
    RowsInvalidError,
    SegmentChecks,
    _are_usual_numerics,
    _Words,
)
from cutline.check.table_forms import TableForms
from cutline.columns.bytes_column import from_list, partition_of, xxhash64
from cutline.nodes.groups import Column, Group
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DefinitionChanges
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.unit.made_commits import full_commit, increment_commit

# name, type, oid and modifier, as PostgreSQL 18 has them in pg_attribute.
COLUMNS = [
    ("id", "bigint", 20, -1), ("small", "smallint", 21, -1), ("number", "integer", 23, -1), ("oid", "oid", 26, -1),
    ("flag", "boolean", 16, -1), ("uuid", "uuid", 2950, -1), ("day", "date", 1082, -1),
    ("at", "timestamp with time zone", 1184, -1), ("short", "character varying(3)", 1043, 7), ("text", "text", 25, -1),
]  # fmt: skip
KEYED = Group(
    7, "public", "t", "default", 1,
    tuple(Column(name, type_, oid, modifier, number) for number, (name, type_, oid, modifier) in enumerate(COLUMNS)),
    partitions=4,
)  # fmt: skip
BAG = structs.replace(KEYED, number=8, table="bag", identity="full", key_width=0)
FORMS = TableForms.of([KEYED, BAG])
VALUES = [
    b"-9223372036854775808", b"32767", b"-1", b"4294967295", b"t", b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    b"0044-03-15 BC", b"2024-02-29 12:00:00.5+00", "äöü".encode(), rb"a\tb\\c\n\\N",
]  # fmt: skip


@pytest.fixture(autouse=True, params=[1, stored_rows.LINES_BY_COLUMN_MIN], ids=["by-column", "by-type"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with both ways to go through the values of a type: these tests have few lines."""
    monkeypatch.setattr(stored_rows, "LINES_BY_COLUMN_MIN", request.param)


def line(**values: bytes) -> bytes:
    named = dict(zip((column.name for column in KEYED.columns), VALUES, strict=True)) | values
    return b"\t".join(named.values()) + b"\n"


def base(*lines: bytes, group: Group = KEYED, keys: list[bytes] | None = None) -> pa.RecordBatch:
    found = [b"" if group.is_multiset else one.partition(b"\t")[0] for one in lines] if keys is None else keys
    places = partition_of(from_list([*lines] if group.is_multiset else found), group.partitions)
    columns = [
        np.full(len(lines), group.number, np.int32),
        places,
        pa.array(found, pa.binary()),
        pa.array(lines, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=BASE_SCHEMA)


def check(*batches: pa.RecordBatch) -> None:
    checks = BaseChecks(FORMS)
    for batch in batches:
        checks.add(batch, xxhash64(from_list(batch.column("key").to_pylist())))
    checks.end(lambda: iter(batches))


def test_what_copy_prints_is_accepted() -> None:
    marks = {column.name: rb"\N" for column in KEYED.columns[1:]}
    check(
        base(
            line(), line(id=b"5", **marks), line(id=b"6", day=b"infinity", at=b"-infinity", text=b"", short=b"a\\t\\\\")
        )
    )
    check(base(line(), line(), group=BAG))
    check(base())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"id": b"9223372036854775808"}, "column id"),
        ({"small": b"32768"}, "column small"),
        ({"number": b"1.5"}, "column number"),
        ({"number": b""}, "column number"),
        ({"oid": b"-1"}, "column oid"),
        # The types accept these, but print them otherwise: two rows may have the same key.
        ({"id": b"007"}, "column id"),
        ({"number": b"-0"}, "column number"),
        ({"small": b"-07"}, "column small"),
        ({"flag": b"true"}, "column flag"),
        ({"flag": b"x"}, "column flag"),
        ({"uuid": b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a1"}, "column uuid"),
        ({"uuid": b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a1g"}, "column uuid"),
        ({"uuid": b"a0eebc9909c0b-4ef8-bb6d-6bb9bd380a11"}, "column uuid"),
        ({"uuid": b"a0eebc99-9c0b-4ef8-bb6d,6bb9bd380a11"}, "column uuid"),
        ({"day": b"2024-13-xx"}, "column day"),
        ({"at": b""}, "column at"),
        ({"short": "äöüx".encode()}, "column short"),
        ({"text": b"a\tb"}, "does not have 10 fields"),
        ({"text": b"a\nb"}, "does not have 10 fields"),
        ({"text": b"a\rb"}, "does not have 10 fields"),
        ({"text": b"a\0b"}, "does not have 10 fields"),
        ({"text": rb"a\xb"}, "an escape that COPY does not print"),
        ({"text": rb"a\N"}, "an escape that COPY does not print"),
        ({"text": rb"\u"}, "an escape that COPY does not print"),
    ],
)  # fmt: skip
def test_a_value_that_could_not_be_loaded_is_damage(change: dict[str, bytes], what: str) -> None:
    for group in (KEYED, BAG):
        with pytest.raises(RowsInvalidError, match=what):
            check(base(line(id=b"1"), line(**change), group=group))


@pytest.mark.parametrize("text", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", "ä".encode("latin1")])
def test_bytes_that_are_not_in_the_databases_encoding_are_damage(text: bytes) -> None:
    """As PostgreSQL's pg_utf8_islegal: no stray or overlong bytes, no surrogates, nothing beyond U+10FFFF."""
    checks = BaseChecks(replace(FORMS, is_utf8=True))
    good, bad = base(line(text="äöü€😀".encode())), base(line(id=b"5"), line(id=b"6", text=text))
    checks.add(good, xxhash64(from_list(good.column("key").to_pylist())))
    with pytest.raises(RowsInvalidError, match=r"a row of public\.t is not in the database's encoding, UTF8"):
        checks.add(bad, xxhash64(from_list(bad.column("key").to_pylist())))
    # Nothing is known of other encodings.
    check(bad)


def test_lines_and_keys_that_do_not_fit_are_damage() -> None:
    with pytest.raises(RowsInvalidError, match="does not end with a newline"):
        check(base(line()[:-1]))
    with pytest.raises(RowsInvalidError, match="does not end with a newline"):
        check(base(line(), b"", keys=[VALUES[0], b""]))
    with pytest.raises(RowsInvalidError, match="does not have 10 fields"):
        check(
            base(
                line(),
                line().replace(b"\t", b"", 1),
                line(id=b"4").replace(b"\t", b"\t\t", 1),
                keys=[VALUES[0], b"1", b"4"],
            )
        )
    with pytest.raises(RowsInvalidError, match="under a key other than its own"):
        check(base(line(), keys=[b"1"]))
    with pytest.raises(RowsInvalidError, match="has a key, but the table has none"):
        check(base(line(), keys=[b"1"], group=BAG))
    with pytest.raises(RowsInvalidError, match=r"two rows of public\.t with the same key"):
        check(base(line(), line(number=b"2")))
    with pytest.raises(RowsInvalidError, match=r"two rows of public\.t with the same key") as raised:
        check(base(line()), base(line(id=b"5")), base(line(number=b"2")))
    assert raised.value.kind == "duplicate"
    batch = base(line())
    place = pa.array([(batch["partition"][0].as_py() + 1) % 4], pa.int32())
    moved = batch.set_column(1, BASE_SCHEMA.field(1), place)
    with pytest.raises(RowsInvalidError, match="wrong partition") as raised:
        check(moved)
    assert raised.value.kind == "partition"
    with pytest.raises(RowsInvalidError, match="group 9, which no commit defines"):
        check(base(line(), group=structs.replace(KEYED, number=9)))


def change(op: str, key: bytes, row: bytes, group: Group = KEYED, lsn: int = 10, seq: int = 1) -> dict[str, object]:
    place = partition_of(from_list([row if group.is_multiset else key]), group.partitions)[0]
    return {
        "lsn": lsn, "end_lsn": lsn, "seq": seq, "xid": 3, "global_id": None, "op": ord(op), "group": group.number,
        "partition": -1 if op == "T" else place, "key": key, "row": row,
    }  # fmt: skip


COMMITTED = {
    "lsn": 10, "end_lsn": 11, "seq": 0, "xid": 3, "global_id": None, "op": ord("C"), "group": 0, "partition": -1,
    "key": b"", "row": b"",
}  # fmt: skip


def segment(*rows: dict[str, object]) -> None:
    checks = SegmentChecks(FORMS)
    tables = [pa.Table.from_pylist([row], SEGMENT_SCHEMA) for row in rows]
    for table in tables:
        checks.add(table)
    checks.end(lambda: iter(tables))


def test_changes_that_a_drain_writes_are_accepted() -> None:
    segment(
        change("U", VALUES[0], line(), seq=1),
        change("u", b"1", line(id=b"1", text=rb"\u", number=rb"\N"), seq=3),
        change("D", b"1", b"", seq=4),
        change("D", b"2", b"3\n", seq=6),
        change("I", b"", line(), BAG, seq=9),
        change("D", b"", line(), BAG, seq=10),
        # TRUNCATE t, bag
        change("T", b"", b"", seq=12),
        change("T", b"", b"", BAG, seq=12),
        COMMITTED,
        change("U", b"5", line(id=b"5"), lsn=20),
    )
    segment(COMMITTED)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (change("U", b"1", line()), "under a key other than its own"),
        (change("U", VALUES[0], line(text=rb"\u")), "an escape that COPY does not print"),
        (change("u", VALUES[0], line(text=rb"a\u")), "an escape that COPY does not print"),
        (change("u", VALUES[0], line(number=rb"\u")), "column number"),
        (change("u", VALUES[0], line(uuid=rb"\u")), "column uuid"),
        (change("D", b"1\t2", b""), "does not have 1 fields"),
        (change("D", b"x", b""), "column id"),
        (change("D", b"1", b"1\t2\n"), "does not have 1 fields"),
        (change("I", VALUES[0], line()), "change of kind I"),
        (change("U", b"", line(), BAG), "change of kind U"),
        (change("T", b"1", b""), "has a key, a row or a partition"),
        (change("U", VALUES[0], line()) | {"partition": 5}, "wrong partition"),
        (change("U", VALUES[0], line()) | {"group": 9}, "group 9, which neither it nor a commit defines"),
    ],
)
def test_a_change_that_no_drain_writes_is_damage(row: dict[str, object], what: str) -> None:
    with pytest.raises(RowsInvalidError, match=what):
        segment(row, COMMITTED)


def test_a_change_that_is_there_twice_is_damage() -> None:
    with pytest.raises(RowsInvalidError, match="the same change of a transaction twice"):
        segment(change("U", VALUES[0], line()), change("U", VALUES[0], line(number=b"2")), COMMITTED)


def test_rows_of_many_tables_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, and in whichever block they are: the error names the table and the column."""
    pair = Group(9, "public", "pair", "default", 2, (*KEYED.columns[:2], KEYED.columns[8]), partitions=2)
    none = Group(10, "public", "none", "full", 0, ())
    forms = TableForms.of([none, pair, BAG, KEYED])
    rows = [
        (KEYED, b"1", line(id=b"1")), (none, b"", b"\n"), (pair, b"1\t2", b"1\t2\ta\n"), (BAG, b"", line()),
        (none, b"", b"\n"), (pair, b"1\t3", b"1\t3\t\\N\n"), (KEYED, b"2", line(id=b"2")), (BAG, b"", line()),
    ]  # fmt: skip

    def checked(found: list[tuple[Group, bytes, bytes]]) -> None:
        batch = pa.concat_tables(
            [pa.Table.from_batches([base(row, group=group, keys=[key])]) for group, key, row in found]
        ).combine_chunks()
        checks = BaseChecks(forms)
        for one in batch.to_batches():
            checks.add(one, xxhash64(from_list(one.column("key").to_pylist())))
        checks.end(lambda: iter(batch.to_batches()))

    for fields in (1, 12, 1 << 16):
        monkeypatch.setattr("cutline.check.stored_rows.FIELDS_PER_BLOCK", fields)
        checked(rows)
        with pytest.raises(
            RowsInvalidError, match=r"column short of public\.pair .* character varying\(3\) does not accept or print"
        ):
            checked([*rows, (pair, b"1\t4", b"1\t4\tlong\n"), *rows[3:5]])
        with pytest.raises(RowsInvalidError, match=r"column uuid of public\.bag contains a value that type uuid"):
            checked([*rows, (BAG, b"", line(uuid=b"x" * 36)), (none, b"", b"\n")])
        with pytest.raises(RowsInvalidError, match=r"a row of public\.none does not have 0 fields"):
            checked([*rows, (none, b"", b"\t\n"), *rows[1:3]])
        with pytest.raises(RowsInvalidError, match=r"a row of public\.pair is stored under a key other"):
            checked([*rows, (pair, b"1", b"1\t4\ta\n")])
        with pytest.raises(RowsInvalidError, match=r"a row of public\.bag has a key, but the table has none"):
            checked([*rows, (BAG, b"1", line())])
        with pytest.raises(RowsInvalidError, match=r"two rows of public\.pair with the same key"):
            checked([*rows, (pair, b"1\t2", b"1\t2\tb\n")])


# Values at the limits of what is recognised at a glance: those that PostgreSQL prints, and others.
ACCEPTED = {
    "id": ["0", "-1", "99999999", "-99999999", "100000000", "9999999999999999", "-99999999999999999",
           "999999999999999999", "8999999999999999999", "9223372036854775807", "-9223372036854775808"],
    "small": ["9999", "-9999", "29999", "32767", "-32768"],
    "number": ["999999999", "1999999999", "2147483647", "-2147483648", "-1999999999"],
    "oid": ["0", "3999999999", "4294967295"],
    "day": ["2024-02-29", "infinity", "-infinity", "0044-03-15 BC", "5874897-12-31", "4713-01-01 BC"],
    "at": ["294276-12-31 23:59:59.999999+00", "0001-01-01 00:00:00+00", "1937-01-01 12:00:27.87+00",
           "4713-11-24 00:00:00+00 BC"],
    "short": ["", "äöü", "abc", "\\n\\\\x"],
}  # fmt: skip
REFUSED = {
    "id": ["", "-", "+", "1e5", "12345678x", "x2345678", "123456789x", "1234567x9012345678", "12345678 ", "1 2345678",
           "9223372036854775808", "-9223372036854775809", "99999999999999999999", "--1", "1-", "/", ":", "1234567/",
           "1234567:", "12345678901234567890", "007", "00", "-0", "-012345678", "012345678901"],
    "small": ["32768", "-32769", "99999", "1.0"],
    "number": ["2147483648", "-2147483649", "9999999999", "12345678901"],
    "oid": ["-1", "4294967296"],
    "flag": ["", "T", "tt", "1"],
    "uuid": ["", "A0EEBC99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a1/",
             "a0eebc99-9c0b-4ef8-bb6d-6bb9bd38:a11", "a0eebc99:9c0b-4ef8-bb6d-6bb9bd380a11"],
    "day": ["", "2024/02/29", "2024,02,29", "x"],
    "at": ["2024-02-29 12:00:00 UTC", "2024-02-29T12:00:00", "2024-02-29 12:00:00;00+00", "2024-02-29 12:00:00*00+00",
           "2024-02-28 12:00:00.250+00", "2024-02-28 12:00:00+02"],
    "short": ["abcd", "äöüx", "\\n\\\\xy"],
}  # fmt: skip


@pytest.mark.parametrize("block_bytes", [1 << 20, 8])
def test_values_are_judged_alike_however_they_are_read(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """A line that is longer than a block is not copied, so its short values are gathered first."""
    monkeypatch.setattr("cutline.check.stored_rows.BLOCK_BYTES", block_bytes)
    for column, values in ACCEPTED.items():
        lines = [line(**({"id": str(number).encode()} | {column: text.encode()})) for number, text in enumerate(values)]
        check(base(*lines))
    for column, values in REFUSED.items():
        for text in values:
            with pytest.raises(RowsInvalidError, match=f"column {column} of"):
                check(base(line(id=b"1"), line(**({"id": b"2"} | {column: text.encode()})), line(id=b"3")))


def test_keys_of_all_lengths_are_compared() -> None:
    for length in (1, 7, 8, 9, 16, 23, 64, 65, 200):
        key = b"k" * length
        text = structs.replace(KEYED, columns=(Column("k", "text", 25, -1, 1), *KEYED.columns[1:]))
        forms = TableForms.of([text])
        for stored, is_right in ((key, True), (key[:-1] + b"x", False), (b"x" + key[1:], False)):
            batch = base(b"short" + line()[len(VALUES[0]) :], key + line()[len(VALUES[0]) :], keys=[b"short", stored])
            checks = BaseChecks(forms)
            if is_right:
                checks.add(batch, xxhash64(from_list([b"short", stored])))
                continue
            with pytest.raises(RowsInvalidError, match="under a key other than its own"):
                checks.add(batch, xxhash64(from_list([b"short", stored])))


def test_lines_are_checked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.check.stored_rows.FIELDS_PER_BLOCK", 20)
    lines = [line(id=str(number).encode()) for number in range(7)]
    check(base(*lines))
    with pytest.raises(RowsInvalidError, match="column flag"):
        check(base(*lines, line(id=b"8", flag=b"x")))


def test_keys_that_only_share_a_hash_are_none_that_occur_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = base(line(), line(id=b"5"))
    checks = BaseChecks(FORMS)
    # No such keys are known, so their hashes are made equal; partitions are of the first hash.
    one = xxhash64(from_list([VALUES[0]]))
    monkeypatch.setattr("cutline.check.stored_rows._check_places", lambda *_: None)
    checks.add(batch, np.repeat(one, 2))
    checks.end(lambda: iter([batch]))


MOODS = structs.replace(
    KEYED, number=9,
    columns=(*KEYED.columns[:1], Column("mood", "public.mood", 16386, -1, 1, 2), Column("v", "text", 25, -1, 2, 3)),
)  # fmt: skip
LABELS = frozenset({b"ok", rb"a\\b", "übel".encode(), b"resigned", b"indifferent", b""})


def of_moods(*moods: bytes, own: dict[int, OwnType] | None = None) -> None:
    lines = [b"%d\t%s\tx\n" % row for row in enumerate(moods)]
    known: dict[int, OwnType] = {1: EnumType(LABELS)} if own is None else own
    checks = BaseChecks(TableForms.of([MOODS], {9: known}))
    batch = base(*lines, group=MOODS)
    checks.add(batch, xxhash64(from_list(batch.column("key").to_pylist())))


def test_an_enum_has_only_its_labels() -> None:
    of_moods(b"ok", rb"\N", rb"a\\b", "übel".encode(), b"ok", b"resigned", b"indifferent", b"")
    for bad in (b"bad", b"o", b"ok ", b"resigne", b"resignedx", b"indifferens"):
        with pytest.raises(
            RowsInvalidError, match=r"column mood of public\.t contains a value that type public\.mood does"
        ):
            of_moods(b"ok", bad, b"indifferent")
    # The DDL does not tell the labels.
    of_moods(b"bad", own={})


@pytest.mark.parametrize(
    ("domain", "good", "bad"),
    [
        (DomainType(23, -1), [b"1", rb"\N", b"-2147483648"], [b"x", b"", b"2147483648", b"01"]),
        (DomainType(16, -1), [b"t", rb"\N"], [b"true"]),
        (DomainType(1700, (5 << 16 | 2) + 4), [b"1.50", b"NaN"], [b"abc", b"", b"5.555", b"1000.00"]),
        (DomainType(1043, 3 + 4), ["äöü".encode(), b""], [b"abcd"]),
        (DomainType(1114, -1), [b"2026-01-02 03:04:05"], [b"2026-01-02"]),
    ],
)
def test_a_value_of_a_domain_has_the_form_of_its_type(domain: DomainType, good: list[bytes], bad: list[bytes]) -> None:
    of_moods(*good, own={1: domain})
    for value in bad:
        with pytest.raises(RowsInvalidError, match=r"column mood of public\.t contains a value that type public\.mood"):
            of_moods(*good, value, own={1: domain})


def test_a_value_of_a_composite_type_has_parentheses() -> None:
    of_moods(b"(1,one)", rb"\N", b'("a b",)', own={1: CompositeType(frozenset({("text", "text")}))})
    with pytest.raises(
        RowsInvalidError, match=r"column mood of public\.t contains a value that type public\.mood does"
    ):
        of_moods(b"(1,one)", rb"\N", b"(1", b"(2,two)", own={1: CompositeType(frozenset({("text", "text")}))})


TIMESTAMPS = structs.replace(
    KEYED, number=9, columns=(*KEYED.columns[:1], *KEYED.columns[6:8], Column("t", "timestamp", 1114, -1, 3, 4)),
)  # fmt: skip


def of_times(*times: tuple[str, str]) -> None:
    lines = [
        "\t".join([str(row), day, f"{day} {clock}+00", f"{day} {clock}\n"]) for row, (day, clock) in enumerate(times)
    ]
    batch = base(*(line.encode() for line in lines), group=TIMESTAMPS)
    BaseChecks(TableForms.of([TIMESTAMPS])).add(batch, xxhash64(from_list(batch.column("key").to_pylist())))


def test_days_and_times_exist() -> None:
    """Whether they are recognised at a glance, or by their pattern."""
    clocks = ["00:00:00", "23:59:59", "12:34:56.5", "12:34:56.123456"]
    days = ["2026-01-31", "2024-02-29", "0001-01-01", "9999-12-31", "12024-02-29", "1900-02-28", "2000-02-29"]
    of_times(*((day, clock) for day in days for clock in clocks))
    for day in ("2026-00-01", "2026-13-01", "2026-01-00", "2026-01-32", "2026-04-31", "2023-02-29", "1900-02-29",
                "0000-01-01", "2026-1-011", "2026-01:01", "202x-01-01", "12023-02-29"):  # fmt: skip
        with pytest.raises(RowsInvalidError, match="column day"):
            of_times(("2026-01-01", clocks[0]), (day, clocks[0]))
    for clock in ("24:00:00", "23:60:00", "23:59:60", "23:59:5", "23:59:59.", "23:59:59.x", "23:59:59.1234567",
                  "23-59:00", "23:59:59.12x456", "23:5a:59"):  # fmt: skip
        with pytest.raises(RowsInvalidError, match=r"column (at|t) of"):
            of_times(("2026-01-01", clocks[0]), ("2026-01-01", clock))


def test_values_that_are_too_long_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values that are parsed at once are short together, so that the memory for them is bounded."""
    columns = tuple(Column(f"v{place}", "jsonb", 3802, -1, place, place) for place in range(5))
    group = structs.replace(KEYED, number=9, columns=columns, identity="full", key_width=0)
    monkeypatch.setattr("cutline.check.stored_rows.BLOCK_BYTES", 8)
    monkeypatch.setattr("cutline.check.stored_rows.PARSED_BYTES_MAX", 10)
    for last, is_valid in ((b"{}", True), (b"{", False)):
        batch = base(b"\t".join([b"[1,2]", b"[1,2,3,4,5,6", b"[3]", rb"\N", last]) + b"\n", group=group)
        checks = BaseChecks(TableForms.of([group]))
        with nullcontext() if is_valid else pytest.raises(RowsInvalidError, match="column v4"):
            checks.add(batch, xxhash64(from_list([b""])))


def test_labels_are_known_of_columns_that_the_table_still_has() -> None:
    """An enum may have had a label only between two increments, and its column may be gone since."""
    chain = Chain(structs.replace(full_commit(), groups={"a": (MOODS,)}))
    known: dict[int, OwnType] = {16386: EnumType(LABELS)}
    assert own_types(chain, "a", known) == {9: {1: EnumType(LABELS)}}
    assert own_types(chain, "a", {}) == {}
    later = structs.replace(MOODS, number=10, columns=(*MOODS.columns[:1], *MOODS.columns[2:]))
    changes = DefinitionChanges(groups={"a": (later,)}, gone={"a": (9,)}, successions={"a": {10: 9}})
    dropped = replace(chain, increments=(structs.replace(increment_commit(1), definition_changes=changes),))
    assert own_types(dropped, "a", known) == {}


def test_a_batch_has_its_nulls_counted_across_all_blocks() -> None:
    """Two tables, and more lines than a block has; every third line has NULL in one column, every fifth in another."""
    count = 20_000
    lines = [
        line(
            id=str(number).encode(),
            **({"text": rb"\N"} if number % 3 == 0 else {}),
            **({"flag": rb"\N"} if number % 5 == 0 else {}),
        )
        for number in range(count)
    ]
    expected = [(number, place) for number in range(count) for place, n in ((4, 5), (9, 3)) if number % n == 0]
    for group in (KEYED, BAG):
        batch = base(*lines, group=group)
        nulls = BaseChecks(FORMS).add(batch, xxhash64(from_list(batch.column("key").to_pylist())))
        assert list(zip(nulls.line.tolist(), nulls.place.tolist(), strict=True)) == expected


@pytest.mark.parametrize("point", ",/-*+()&' :0")
def test_only_a_point_is_between_seconds_and_their_fraction(point: str) -> None:
    check(base(line(at=b"2024-02-28 12:00:00.25+00")))
    for others in ([], [line(id=b"5", at=b"2024-02-28 12:00:00.25+00"), line(id=b"6", at=b"2024-02-28 12:00:00+00")]):
        with pytest.raises(RowsInvalidError, match="column at"):
            check(base(*others, line(at=f"2024-02-28 12:00:00{point}25+00".encode())))


@pytest.mark.parametrize(("precision", "scale"), [(12, 2), (3, 2), (10, 1), (14, 6), (16, 4), (16, 6)])
def test_numbers_that_are_valid_at_a_glance_are_those_that_numeric_prints(precision: int, scale: int) -> None:
    """Each number is changed at each place, and the result is compared with a pattern and with arithmetic."""
    wholes = [0, 1, 9, 10, 99, 12345, 1234567, 10 ** (precision - scale) - 1, 10 ** (precision - scale)]
    printed = [f"{sign}{whole}.{'1234567'[:scale]}" for whole in wholes for sign in ("", "-")]
    texts = list(printed)
    for text in printed:
        for place in range(len(text)):
            texts += [text[:place] + other + text[place + 1 :] for other in "09.-/:e "]
            texts += [text[:place] + text[place + 1 :], text[:place] + "0" + text[place:]]
    texts += ["", "-", ".", "0", "1", "NaN", "1" * 40]
    data = "\t".join(texts).encode() + b"\n"
    lengths = np.array([len(text) for text in texts])
    starts = np.cumsum(lengths + 1) - lengths - 1
    modifiers = np.full(len(texts), precision << 16 | scale, np.int32)
    usual = _are_usual_numerics(_Words.of(np.frombuffer(data, np.uint8)), starts, lengths, modifiers)
    form = re.compile(rf"-?(?:0|[1-9][0-9]*)\.[0-9]{{{scale}}}")
    for text, is_usual in zip(texts, usual.tolist(), strict=True):
        is_printed = form.fullmatch(text) is not None and abs(Decimal(text)) < 10 ** (precision - scale)
        assert is_usual == (is_printed and len(text.removeprefix("-")) <= 16), text


@pytest.mark.parametrize(
    ("modifiers", "expected"),
    [
        ([-1, -1], [False, False]),
        ([5 << 16, 5 << 16], [False, False]),
        ([2 << 16 | 2] * 2, [False, False]),
        # Columns of two types.
        ([12 << 16 | 2, 12 << 16 | 3], [True, False]),
        ([12 << 16 | 3, 4 << 16 | 2], [False, True]),
    ],
)
def test_each_number_is_looked_at_by_its_own_type(modifiers: list[int], expected: list[bool]) -> None:
    words = _Words.of(np.frombuffer(b"0.12\t0.12\n", np.uint8))
    usual = _are_usual_numerics(words, np.array([0, 5]), np.array([4, 4]), np.array(modifiers, np.int32))
    assert usual.tolist() == expected
