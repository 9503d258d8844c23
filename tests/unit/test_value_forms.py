"""The forms in which PostgreSQL prints values, from its manual, and values that it can't have printed."""

from __future__ import annotations

import numpy as np
import pytest

from cutline.check.value_forms import NAMES, find_misprinted, find_other_composite
from cutline.columns.bytes_column import from_list
from cutline.columns.lines import escape

OIDS = {name: oid for oid, name in NAMES.items()}
DEEP = "[" * 200 + "]" * 200
# Raw texts, as the types' output functions return them.
PRINTED = {
    "numeric": ["0", "-1.50", "0.000", "NaN", "Infinity", "-Infinity", "9" * 1000 + "." + "1" * 1000],
    "real": ["0.1", "1e-45", "3.4028235e+38", "-0", "NaN", "-Infinity", "0.00012345679", "3e+38", "3.4e+38"],
    "double precision": ["5e-324", "1.7976931348623157e+308", "123456789012345.67", "0.30000000000000004", "1e+308"],
    "date": ["2024-02-29", "2000-02-29", "4713-11-24 BC", "5874897-12-31", "0005-02-29 BC", "infinity", "-infinity"],
    "timestamp without time zone": ["294276-12-31 23:59:59.999999", "4713-11-24 00:00:00 BC", "2024-02-29 00:00:00.5"],
    "timestamp with time zone": ["2026-01-02 03:04:05+00", "1883-11-18 12:03:58.5+00", "-infinity",
                                 "0044-03-15 00:00:00+00 BC"],
    "time without time zone": ["24:00:00", "00:00:00", "23:59:59.999999"],
    "time with time zone": ["24:00:00+15:59", "12:34:56.789+05:30:15", "00:00:00-15:59"],
    "interval": ["00:00:00", "-1 years +2 mons -3 days +04:05:06.789", "1 mon", "-178000000 years", "infinity",
                 "1 day -00:00:01", "-2562047788:00:54.775807", "1 year 00:00:01"],
    "json": ['{"a" :  1, "a": "\\u00e9\\n"}', "\n[1,\t2]\n", '"\\u0000"', "1e400", '"\\ud800 \\\\ud800"', DEEP,
             "9" * 5000, "[" * 5000 + "]" * 5000, "-0", '"\\\\\\""', "-0.0E-0", "0e5", '"\\/"'],
    "jsonb": ['{"a": "\\t\\"\\\\", "b": ["ü", null, true, -1.50]}', '"\\\\u"', '""', DEEP, "{}"],
    "bytea": ["\\x", "\\x00ff5c"],
    "integer[]": ["{}", "{1,NULL,-3}", "{{1,2},{3,4}}", "[-1:0][2:3]={{1,2},{3,4}}", "{{{{{{NULL}}}}}}", "[0:0]={5}"],
    "text[]": ['{"","NULL",NULL,"a\\\\b","c,d","e\\"f"}', '{"{}"," ","\t\n"}', '{{a,b},{c,"d e"}}', "{ü}"],
    "numeric[]": ["{1.50,NaN,-Infinity}"],
    "date[]": ['{2024-02-29,"0044-03-15 BC",infinity}', "{{2026-01-01,NULL},{infinity,2026-01-02}}"],
    "timestamp with time zone[]": ['{"2024-03-31 00:30:00+00",NULL,infinity}'],
    "boolean[]": ["{t,f,NULL}"],
    "inet": ["10.0.0.1", "10.0.0.1/8", "::1", "fe80::/10", "::ffff:1.2.3.4", "2001:db8:1:2:3:4:5:6/64", "::", "1::"],
    "cidr": ["10.0.0.0/8", "::/0", "::1/128"],
    "macaddr": ["08:00:2b:01:02:03"],
    "int4range": ["empty", "[1,10)", "(,)", "[-2147483648,5)", "[9,10)", "(,5)", "[2147483646,)"],
    "tstzrange": ['["2024-01-01 00:00:00+00",infinity)', "(,)",
                  '["2024-01-01 00:00:00+00","2024-01-01 00:00:00.5+00")',
                  '["9999-01-01 00:00:00+00","10000-01-01 00:00:00+00")',
                  '["0044-01-01 00:00:00+00 BC","0001-01-01 00:00:00+00")', '(-infinity,"2024-01-01 00:00:00+00")'],
    "numrange": ["[1.4,1.5]", "(NaN,)", "[10,9999999999999999999999)", "(-Infinity,5]", "[-5,-4)", "[1.50,1.5]"],
    "tsrange": ['["2024-01-01 00:00:00.1","2024-01-01 00:00:00.12")'],
    "daterange": ["[2024-01-01,2024-01-02)", "[2024-01-01,infinity)"],
    "datemultirange": ["{}", "{[2024-01-01,2024-02-01),[2025-01-01,)}"],
    "bit varying": ["", "0101"],
    "pg_lsn": ["0/0", "FFFFFFFF/16B3748"],
    "tid": ["(4294967295,65535)"],
}  # fmt: skip
NEVER_PRINTED = {
    "numeric": ["", "12x", "1.", ".5", "007", "1.2.3", "--1", "1e5", "nan", "+1", "-0", "-0.00"],
    "real": ["1.5.2", "", "1e5", "inf", "3.5028235e+38", "1e+39", "1e-46", "1e+308", "1.50", "1.23456789012"],
    "double precision": ["1.5.2", "1e", "0x1p3", "1e+400", "1.8e+308", "2e+308", "1e+309", "1e-325", "1.50", "1.0",
                         "1.50e+20", "0.1234567890123456789"],
    "date": ["2026-13-45", "2026-02-29", "1900-02-29", "2026-04-31", "2026-00-10", "2026-01-00", "0000-01-01",
             "26-01-01", "2026-1-1", "2026/01/01", "", "2026-01-01 AD", "5874898-01-01", "4715-01-01 BC", "999-01-01"],
    "timestamp without time zone": ["2026-01-02 25:00:00", "2026-01-02 03:60:00", "2026-01-02 03:04:60", "2026-01-02",
                                    "2026-01-02 03:04:05+00", "2026-01-02 03:04:05.", "294277-01-01 00:00:00"],
    "timestamp with time zone": ["someday", "2026-01-02 03:04:05", "2026-01-02 03:04:05+16",
                                 "299999-01-01 00:00:00+00", "2026-01-02 03:04:05+02", "2026-01-02 03:04:05.500+00"],
    "time without time zone": ["24:00:01", "25:00:00", "1:00:00"],
    "time with time zone": ["12:00:00", "12:00:00+16"],
    "interval": ["2 fortnits", "", "1 day 1 year", "25", "1:00:00", "00:60:00"],
    "json": ['{"a": ', "", "1,2", "nul", "01", '"\n"', "[1,]", '{"a" 1}', "{1: 2}",
             '"\\x"', "NaN", "'a'", '"a\\"', '"\\\\\\"'],
    "jsonb": ['{"a": ', "{}}", "[1", "true false", '"\\u0000"', '{"\\\\\\u0000": 1}', '"\\ud800"'],
    "bytea": ["\\x010", "\\x0g", "x00", "", "\\x01\\x02", "\\000"],
    "integer[]": ["{1,3", "1,3}", "{1,,3}", "{1,x}", "{1}{2}", "{{1},{2}", "{{1},{x}}", "[0:1={1,2}", "",
                  "{2147483648}", "{{1},{2,3}}", "{{{1}},{{2},{3}}}"],
    "text[]": ['{"a}', "{a b}", '{a"b}', "{a}}", "{,}", "{{a},{b,c}}", '{{"{,}"},{b,c}}',
               '{"a"}', '{b,"c d","e"}'],
    "boolean[]": ["{true}", '{"t"}'],
    "date[]": ["{2026-02-30}", "{{2026-01-01},2026-01-01}"],
    "inet": ["10.0.0.300", "10.0.0", "10.0.0.1/33", "::g", "1:2:3", "::1/129", "", "::1/128",
             "10.0.0.1/32"],
    "cidr": ["10.0.0.0"],
    "macaddr": ["08:00:2b:01:02:0", "08-00-2b-01-02-03"],
    "int4range": ["[1,10", "[1;10)", "[a,b)", "nothing", "[25,20)", "[200,3000000000)", "[1,-1)"],
    "numrange": ["[1.5,1.4]", "(0.1,-0.1)"],
    "tstzrange": ['["2024-01-02 00:00:00+00","2024-01-01 00:00:00+00")'],
    "daterange": ["[2024-02-01,2024-01-31)", '["2024-01-01",2024-01-02)'],
    "tsrange": ['["2024-01-01 00:00:00.2","2024-01-01 00:00:00.1"]', "[2024-01-01 00:00:00,2024-01-02 00:00:00)"],
    "bit varying": ["012"],
}  # fmt: skip


def found(oid: int, *texts: str, modifiers: list[int] | None = None) -> int | None:
    fields = escape(from_list([text.encode() for text in texts]))
    lines = [bytes(field.as_py()) + b"\t\n"[row % 2 : row % 2 + 1] for row, field in enumerate(fields.to_large_arrow())]
    return find_misprinted(from_list(lines), oid, None if modifiers is None else np.array(modifiers, np.int32))


@pytest.mark.parametrize("name", PRINTED)
def test_what_servers_print_is_accepted(name: str) -> None:
    modifiers = [-1] * len(PRINTED[name]) if name == "numeric" else None
    assert found(OIDS[name], *PRINTED[name], modifiers=modifiers) is None
    assert found(OIDS[name], modifiers=[] if name == "numeric" else None) is None


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NEVER_PRINTED.items() for text in texts])
def test_what_no_server_prints_is_found(name: str, text: str) -> None:
    good = PRINTED[name][0]
    assert found(OIDS[name], good, good, text, good, modifiers=[-1] * 4 if name == "numeric" else None) == 2


def modifier(precision: int, scale: int) -> int:
    return precision << 16 | scale & 0x7FF


@pytest.mark.parametrize(
    ("precision", "scale", "good", "bad"),
    [
        (6, 2, ["1.50", "0.00", "-9999.99", "NaN", "1.5", "1"], ["123456.00", "10000.00", "1.500", "Infinity"]),
        (3, 0, ["999", "0", "-1"], ["1000", "1.0"]),
        (2, 2, ["0.99", "-0.01"], ["1.00"]),
        (2, -3, ["99000", "0", "-1000"], ["100000", "1500"]),
        (3, 5, ["0.00999", "-0.00001", "0.00000", "0.0", "0"], ["0.01000", "1.00000"]),
        (1000, 0, ["9" * 1000], ["1" * 1001]),
        (1000, 1000, ["0." + "1" * 1000], ["1." + "1" * 1000]),
    ],
)
def test_a_numeric_has_the_digits_that_its_column_declares(
    precision: int, scale: int, good: list[str], bad: list[str]
) -> None:
    given = modifier(precision, scale)
    assert found(OIDS["numeric"], *good, modifiers=[given] * len(good)) is None
    for text in bad:
        assert found(OIDS["numeric"], good[0], text, modifiers=[given] * 2) == 1
        # Columns with other modifiers, or without, in between.
        assert found(OIDS["numeric"], "12345678.5", text, "7", modifiers=[-1, given, modifier(1, 0)]) == 1


def test_a_modifier_that_no_server_has_tells_nothing() -> None:
    assert found(OIDS["numeric"], "12345.678", modifiers=[(1 << 31) - 1]) is None


PAIR = frozenset({("integer", "text")})
OF_TEXTS = frozenset(("text",) * count for count in (1, 2, 3))


def test_a_composite_value_has_fields_in_parentheses() -> None:
    good = [b"(1,one)\t", b'(1,"a\\\\\\\\b\\t""c")\t', b"(,)\n", b'("(1,a)","{""(2,b)"",NULL}",1.00)\n', b"()\t"]
    assert find_other_composite(from_list(good), OF_TEXTS) is None
    for bad in (b"(2\t", b"2,one)\t", b"(1,a b)\t", b'(1,"a)\t', b"\t", b"(1)(2)\t"):
        assert find_other_composite(from_list([good[0], bad]), OF_TEXTS) == 1


@pytest.mark.parametrize("count", [2, 100, 150, 500])
def test_a_composite_value_has_as_many_fields_as_its_type(count: int) -> None:
    def value(fields: int) -> bytes:
        return b"(%s)\t" % b",".join([b'"a ""(1,2)"" b"'] * fields)

    versions = frozenset({("text",) * count})
    found = [
        find_other_composite(from_list([value(count), value(other)]), versions)
        for other in (count - 1, count, count + 1)
    ]
    # The pattern of many fields would be too long, so they are not counted.
    assert found == ([1, None, 1] if count <= 150 else [None] * 3)


def test_a_composite_value_without_fields_looks_like_a_null_field() -> None:
    assert find_other_composite(from_list([b"()\t", b"(1)\t"]), frozenset({()})) is None
    assert find_other_composite(from_list([b"()\t", b"(1,)\t"]), frozenset({()})) == 1


@pytest.mark.parametrize(
    ("type_", "good", "bad"),
    [
        ("integer", ["1", "-2147483648", "2147483647", ""], ["x", "2147483648", "1.0"]),
        ("numeric(6,2)", ["1.50", "NaN"], ["abc"]),
        ("timestamp(3) without time zone", ['"2026-01-02 03:04:05.678"'], ['"2026-01-02 25:00:00"', "2026-01-02"]),
        ("integer[]", ["{300}", '"{300,NULL}"', "{}"], ["{x}", '"{1,x}"']),
        ("boolean", ["t", "f"], ["true"]),
        (
            "tstzrange",
            ['"[""2024-01-01 00:00:00+00"",infinity)"', '"(,""2024-01-01 00:00:00+00""]"', "empty", ""],
            ['"["2024-01-01 00:00:00+00",)"', '"[""2024-01-01 00:00:00+00,)"', '"[""2024-13-01 00:00:00+00"",)"'],
        ),
        ("tsmultirange", ['"{[""2024-01-01 00:00:00"",)}"', "{}"], ['"{[""2024-01-01 00:00:00"",}"']),
        ("public.other", ["anything", '"a b"'], ["a b"]),
    ],
)
def test_a_field_of_a_composite_value_has_the_form_of_its_type(type_: str, good: list[str], bad: list[str]) -> None:
    versions = frozenset({("text", type_)})
    lines = [f"(a,{text})\t".encode() for text in good]
    assert find_other_composite(from_list(lines), versions) is None
    for text in bad:
        assert find_other_composite(from_list([lines[0], f"(a,{text})\t".encode()]), versions) == 1, text


def test_values_of_a_composite_type_may_be_of_any_of_its_definitions() -> None:
    versions = PAIR | {("integer", "text", "boolean")}
    assert find_other_composite(from_list([b"(1,a)\t", b"(1,a,t)\t"]), versions) is None
    assert find_other_composite(from_list([b"(1,a)\t", b"(1,a,x)\t"]), versions) == 1
