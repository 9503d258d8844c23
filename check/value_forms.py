"""The forms in which PostgreSQL prints values of built-in types, as patterns that are matched against whole columns.

Sessions of Cutline have settings of their own (nodes/pinned_settings.py), so each type has one form: ISO dates in UTC,
intervals in the style postgres, bytea in hexadecimal, and the shortest digits that a float is read back from. A pattern
accepts everything that the servers of the supported versions print. It may accept more where the exact form is hard to
tell. Source: PostgreSQL manual, "Data Types", and the output functions (backend/utils/adt).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_flags, to_numpy
from cutline.columns.bytes_column import Bytes, BytesColumn, Flags
from cutline.columns.fields import read_texts
from cutline.columns.lines import BACKSLASH

# The types, by oid (PostgreSQL's pg_type.dat).
BYTEA, JSON, JSONB, NUMERIC = 17, 114, 3802, 1700
# The largest precision and scale of numeric(p, s).
PRECISION_MAX = 1000
# Patterns of at most this many characters are repeated for each dimension of an array.
REPEATED_PATTERN_MAX = 150
# A pattern that counts more fields would be compiled into megabytes.
COUNTED_FIELDS_MAX = 100
# Floats that are printed without an exponent have at most this many digits before the point.
FLOAT_DIGITS_MAX = 17

# Patterns of composite values that are longer than this do not look at the fields.
COMPOSITE_PATTERN_MAX = 20_000
OPEN, COMMA, CLOSE = b"{,}"
NUMRANGE = 3906
Modifiers: TypeAlias = npt.NDArray[np.int32]

_HEX_DIGITS = b"0123456789abcdef"
# A surrogate outside a pair, which the parser refuses and `json` does not, or a backslash that is no escape itself.
_SURROGATE = re.compile(rb"\\\\|\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# An empty bytea in a line, with its separator.
_BYTEA_PREFIX = rb"\\x"
_BYTEA_BYTES_MIN = len(_BYTEA_PREFIX) + 1
_ARRAY_OF_JSON, _ONE_JSON = msgspec.json.Decoder(list[msgspec.Raw]), msgspec.json.Decoder(msgspec.Raw)


def _any(*patterns: str) -> str:
    return f"(?:{'|'.join(patterns)})"


def _list(pattern: str, separator: str = ",") -> str:
    return f"(?:{pattern}(?:{separator}{pattern})*)"


def _up_to(highest: int, digits_min: int = 1) -> str:
    """Return the pattern of the numbers of at least so many digits up to `highest`, without leading zeros."""
    digits = str(highest)
    longer = len(digits) - 1
    patterns = [f"[1-9][0-9]{{{digits_min - 1},{longer - 1}}}"]
    for place, digit in enumerate(digits):
        lowest = 0 if place else 1
        if int(digit) > lowest:
            first = str(lowest) if int(digit) == lowest + 1 else f"[{lowest}-{int(digit) - 1}]"
            patterns.append(f"{digits[:place]}{first}[0-9]{{{longer - place}}}")
    return _any(*patterns, digits)


# The digits after a point, which never end with a zero.
_DECIMALS = "[0-9]*[1-9]"


def _integers(bits: int) -> str:
    """Return the pattern of the integers of so many bits, with a sign."""
    return _any(f"-?{_up_to((1 << bits - 1) - 1)}", "0", str(-(1 << bits - 1)))


def _floats(exponents: str, largest: str, digits: int) -> str:
    """Return the pattern of floats with these exponents and so many digits, and of those with the largest exponent.

    The form without an exponent has few digits: it is printed if the exponent would be below 15, and not below -4.
    """
    decimals = rf"\.[0-9]{{0,{digits - 2}}}[1-9]"
    number = _any(
        rf"(?:0|[1-9][0-9]{{0,{FLOAT_DIGITS_MAX - 1}}})(?:{decimals})?", rf"0\.0{{0,4}}[0-9]{{0,{digits - 1}}}[1-9]"
    )
    mantissa = rf"[1-9](?:{decimals})?"
    return _any(f"-?{number}", f"-?{mantissa}e{exponents}", f"-?{largest}", "NaN", "-?Infinity")


_NATURAL = "(?:0|[1-9][0-9]*)"
_INTEGER = "-?(?:0|[1-9][0-9]{0,18})"
_FLOAT = _any(rf"-?{_NATURAL}(?:\.{_DECIMALS})?(?:e[+-][0-9]{{2,3}})?", "NaN", "-?Infinity")
# PostgreSQL has no negative zero in numeric.
_NUMERIC = _any(rf"{_NATURAL}(?:\.[0-9]+)?", r"-[1-9][0-9]*(?:\.[0-9]+)?", r"-0\.0*[1-9][0-9]*", "NaN", "-?Infinity")
# The largest are 3.4028235e+38 and 1.7976931348623157e+308, and the smallest 1e-45 and 5e-324.
_FLOAT4 = _floats(
    r"(?:\+(?:[0-2][0-9]|3[0-7])|-(?:[0-3][0-9]|4[0-5]))",
    rf"(?:[12](?:\.{_DECIMALS})?|3(?:\.(?:[0-3]{_DECIMALS}|[1-4]|4{_DECIMALS}))?)e\+38",
    9,
)
_FLOAT8 = _floats(
    r"(?:\+(?:[0-9]{2}|[12][0-9]{2}|30[0-7])|-(?:[0-9]{2}|[12][0-9]{2}|3[01][0-9]|32[0-4]))",
    rf"1(?:\.(?:[0-7]{_DECIMALS}|[1-7]))?e\+308",
    17,
)
_HEX_PAIR = "[0-9a-f]{2}"
_UUID = "[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"

# A year without 0000: before the year 1 is 1 BC. The calendar is the Gregorian one for all years. The first day is that
# of Julian date 0, and the last years are those of the manual, "Date/Time Types".
_EARLY_YEAR = _any("0[1-9][0-9]{2}", "00[1-9][0-9]", "000[1-9]")
_YEAR_BC = _any("[1-3][0-9]{3}", "4[0-6][0-9]{2}", "470[0-9]", "471[0-4]", _EARLY_YEAR)
_LEAP_YEAR = _any(
    "[0-9]{2,5}" + _any("0[48]", "[2468][048]", "[13579][26]"),
    "[0-9]{0,3}" + _any("0[48]", "[2468][048]", "[13579][26]") + "00",
    "[1-9][0-9]{0,2}0000",
)
_MONTH_AND_DAY = _any(
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "02-(?:0[1-9]|1[0-9]|2[0-8])",
)
_MINUTES = r"[0-5][0-9]:[0-5][0-9](?:\.[0-9]{0,5}[1-9])?"
_CLOCK = f"(?:[01][0-9]|2[0-3]):{_MINUTES}"
_OFFSET = "[+-](?:0[0-9]|1[0-5])(?::[0-5][0-9]){0,2}"
_TIME = _any(_CLOCK, "24:00:00")


def _dates(clock: str, last_year: int) -> tuple[str, str]:
    """Return the patterns of dates up to a year, each followed by `clock`: after the year 1 BC, and up to it."""
    year = _any(_up_to(last_year, digits_min=4), _EARLY_YEAR)
    after_christ = _any(f"{year}-{_MONTH_AND_DAY}", f"{_LEAP_YEAR}-02-29")
    return f"{after_christ}{clock}", f"{_YEAR_BC}-{_any(_MONTH_AND_DAY, '02-29')}{clock} BC"


_INFINITY = "-?infinity"
_DATES, _BC_DATES = _dates("", 5874897)
_TIMES, _BC_TIMES = _dates(f" {_CLOCK}", 294276)
# Sessions are in UTC.
_TIMES_UTC, _BC_TIMES_UTC = _dates(rf" {_CLOCK}\+00", 294276)
_DATE, _TIMESTAMP = _any(_DATES, _BC_DATES, _INFINITY), _any(_TIMES, _BC_TIMES, _INFINITY)
_TIMESTAMPTZ = _any(_TIMES_UTC, _BC_TIMES_UTC, _INFINITY)
_YEARS, _MONTHS, _DAYS = (rf"[+-]?[0-9]+ {unit}s?" for unit in ("year", "mon", "day"))
_HOURS = f"[+-]?[0-9]{{2,}}:{_MINUTES}"
_INTERVAL = _any(
    f"{_YEARS}(?: {_MONTHS})?(?: {_DAYS})?(?: {_HOURS})?",
    f"{_MONTHS}(?: {_DAYS})?(?: {_HOURS})?",
    f"{_DAYS}(?: {_HOURS})?",
    _HOURS,
    "-?infinity",
)

_V4 = (
    r"(?:(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])(?:\.(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])){3})"
)
_V6_GROUPS = "(?:[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,7})"
_V6 = _any("[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}", f"{_V6_GROUPS}?::{_V6_GROUPS}?", f"(?:[0-9a-f]{{0,4}}:){{2,7}}{_V4}")
_V4_MASK, _V6_MASK = "/(?:[0-9]|[12][0-9]|3[01])", "/(?:[0-9]|[1-9][0-9]|1[01][0-9]|12[0-7])"
# Only cidr has the mask of a single address.
_INET = _any(f"{_V4}(?:{_V4_MASK})?", f"{_V6}(?:{_V6_MASK})?")
_CIDR = _any(f"{_V4}{_any(_V4_MASK, '/32')}", f"{_V6}{_any(_V6_MASK, '/128')}")

# Elements of arrays, fields of composite values and bounds of ranges are quoted if they contain one of these.
_UNQUOTED_ELEMENT = r'[^{}",\\\s\x0b]+'
_IN_QUOTES = r'(?:[^"\\]|\\.)*'
_ANY_QUOTED = f'"{_IN_QUOTES}"'
# Empty text and the word NULL are quoted, too.
_QUOTED_ELEMENT = _any('""', '"(?i:null)"', rf'"{_IN_QUOTES}(?:[{{}},\s\x0b]|\\.){_IN_QUOTES}"')
_QUOTED_FIELD = r'"(?:[^"\\]|""|\\\\)*"'
_FIELD = rf'(?:[^(),"\\\s\x0b]*|{_QUOTED_FIELD})'
_BOUNDS = r"(?:(?:\[-?[0-9]+:-?[0-9]+\]){1,6}=)?"
_DIMENSIONS_MAX = 6


def _range_of(bound: str, quoted: str | None = None) -> str:
    """Return the pattern of ranges, given those of the bounds that are not quoted, and of those that are."""
    bounds = [bound] if quoted is None else [bound, f'"{quoted}"']
    maybe = f"{_any(*bounds)}?"
    return _any("empty", rf"[\[(]{maybe},{maybe}[\])]")


def _arrays_of(
    element: str | None, nested_element: str | None = None, *, may_be_quoted: bool = True
) -> tuple[str, str]:
    """Return the pattern of arrays with one dimension, and that of arrays with two to six; any `element` if None.

    Elements that need no quotes have none.

    Long patterns of elements are not repeated for each dimension: compiling them would take a tenth of a second.
    Instead there is `nested_element`, or any element.
    """
    of_element = _any(_UNQUOTED_ELEMENT, _QUOTED_ELEMENT)
    if element is not None:
        of_element = _any("NULL", element, f'"{element}"') if may_be_quoted else _any("NULL", element)
    if nested_element is not None:
        repeated = _any("NULL", nested_element)
    else:
        is_short = element is not None and len(of_element) <= REPEATED_PATTERN_MAX
        repeated = of_element if is_short else _any(_UNQUOTED_ELEMENT, _ANY_QUOTED)
    nested = [rf"\{{{_list(repeated)}\}}"]
    for _ in range(_DIMENSIONS_MAX - 1):
        nested.append(rf"\{{{_list(nested[-1])}\}}")
    return _BOUNDS + _any(r"\{\}", rf"\{{{_list(of_element)}\}}"), _BOUNDS + _any(*nested[1:])


_RANGES = {
    "int4range": _range_of(_integers(32)), "int8range": _range_of(_integers(64)), "numrange": _range_of(_NUMERIC),
    "daterange": _range_of(_any(_DATES, _INFINITY), _BC_DATES),
    "tsrange": _range_of(_INFINITY, _any(_TIMES, _BC_TIMES)),
    "tstzrange": _range_of(_INFINITY, _any(_TIMES_UTC, _BC_TIMES_UTC)),
}  # fmt: skip
# The name of each type, and the patterns of its values' forms, the most frequent first.
_TYPES: Mapping[int, tuple[str, tuple[str, ...]]] = {
    700: ("real", (_FLOAT4,)), 701: ("double precision", (_FLOAT8,)),
    1082: ("date", (_DATE,)), 1083: ("time without time zone", (_TIME,)),
    1114: ("timestamp without time zone", (_TIMESTAMP,)), 1184: ("timestamp with time zone", (_TIMESTAMPTZ,)),
    1186: ("interval", (_INTERVAL,)), 1266: ("time with time zone", (_TIME + _OFFSET,)),
    869: ("inet", (_INET,)), 650: ("cidr", (_CIDR,)),
    829: ("macaddr", (_list(_HEX_PAIR, ":"),)), 774: ("macaddr8", (_list(_HEX_PAIR, ":"),)),
    1560: ("bit", ("[01]*",)), 1562: ("bit varying", ("[01]*",)),
    28: ("xid", ("[0-9]{1,10}",)), 29: ("cid", ("[0-9]{1,10}",)), 5069: ("xid8", ("[0-9]{1,20}",)),
    27: ("tid", (r"\([0-9]{1,10},[0-9]{1,5}\)",)), 3220: ("pg_lsn", ("[0-9A-F]{1,8}/[0-9A-F]{1,8}",)),
    **{
        oid: (name, (_RANGES[name],))
        for oid, name in {
            3904: "int4range", 3906: "numrange", 3908: "tsrange", 3910: "tstzrange", 3912: "daterange",
            3926: "int8range",
        }.items()
    },
    **{
        oid: (name.replace("range", "multirange"), (rf"\{{{_list(_RANGES[name])}?\}}",))
        for oid, name in {
            4451: "int4range", 4532: "numrange", 4533: "tsrange", 4534: "tstzrange", 4535: "daterange",
            4536: "int8range",
        }.items()
    },
    **{
        oid: (f"{name}[]", _arrays_of(element, nested, may_be_quoted=False))
        for oid, (name, element, nested) in {
            1005: ("smallint", _integers(16), _INTEGER), 1007: ("integer", _integers(32), _INTEGER),
            1016: ("bigint", _integers(64), _INTEGER), 1028: ("oid", _any("0", _up_to((1 << 32) - 1)), _NATURAL),
            1021: ("real", _FLOAT4, _FLOAT), 1022: ("double precision", _FLOAT8, _FLOAT),
        }.items()
    },
    **{
        oid: (f"{name}[]", _arrays_of(element, may_be_quoted=False))
        for oid, (name, element) in {
            1000: ("boolean", "[tf]"), 1231: ("numeric", _NUMERIC), 2951: ("uuid", _UUID),
            1183: ("time without time zone", _TIME), 1041: ("inet", _INET), 651: ("cidr", _CIDR),
        }.items()
    },
    **{
        oid: (f"{name}[]", _arrays_of(element))
        for oid, (name, element) in {
            1182: ("date", _DATE), 1115: ("timestamp without time zone", _TIMESTAMP),
            1185: ("timestamp with time zone", _TIMESTAMPTZ), 1187: ("interval", _INTERVAL),
            1009: ("text", None), 1014: ("character", None), 1015: ("character varying", None), 1003: ("name", None),
            1001: ("bytea", None), 199: ("json", None), 3807: ("jsonb", None),
            1270: ("time with time zone", None), 1040: ("macaddr", None), 775: ("macaddr8", None),
            1561: ("bit", None), 1563: ("bit varying", None), 3905: ("int4range", None), 3907: ("numrange", None),
            3909: ("tsrange", None), 3911: ("tstzrange", None), 3913: ("daterange", None), 3927: ("int8range", None),
        }.items()
    },
}  # fmt: skip
# The names of all types whose forms are known here.
NAMES: Mapping[int, str] = {oid: name for oid, (name, _) in _TYPES.items()} | {
    NUMERIC: "numeric", JSON: "json", JSONB: "jsonb", BYTEA: "bytea"
}  # fmt: skip
_ARRAYS = frozenset(oid for oid, name in NAMES.items() if name.endswith("[]"))
# Arrays of more than one dimension; and the parts of an array other than its braces and commas: bounds, quoted
# elements, other elements.
_NESTED = r"\A(?:[^{]*=)?\{\{"
_CONTENTS = (r"\A[^{]*", r'(?s)"(?:[^"\\]|\\.)*"', r"[^{},]+")
# The bounds of a range that have an order of their own as text, or can be read as numbers.
_AD = r"[0-9]{4}-[^B]*"
_TIME_RANGES = frozenset({3908, 3910, 3912})
_ORDERED: Mapping[int, str] = {
    3904: _INTEGER, 3926: _INTEGER, NUMRANGE: rf"-?{_NATURAL}(?:\.[0-9]+)?", **dict.fromkeys(_TIME_RANGES, _AD)
}  # fmt: skip
_RANGE_BOUNDS = r'(?s)\A[\[(]"?(?P<lower>[^,"]*)"?,"?(?P<upper>[^,")\]]*)"?[)\]]'
# Text without an escape of NUL, which jsonb has no place for.
_WITHOUT_NUL = r"(?:[^\\]|\\(?:[^u]|u(?:[1-9a-fA-F]|0[1-9a-fA-F]|00[1-9a-fA-F]|000[1-9a-fA-F])))*"
# The modifier in the name of a type: numeric(6,2), timestamp(3) without time zone.
_MODIFIER = re.compile(r"\([^)]*\)")
# The types whose values are checked as fields of composite values, by name.
_OF_FIELDS: Mapping[str, str] = {
    "boolean": "[tf]", "smallint": _integers(16), "integer": _integers(32), "bigint": _integers(64), "uuid": _UUID,
    "numeric": _NUMERIC,
    **{
        name: _any(*patterns)
        for oid, (name, patterns) in _TYPES.items()
        if oid not in _ARRAYS or name in ("smallint[]", "integer[]", "bigint[]", "numeric[]", "boolean[]", "uuid[]")
    },
}  # fmt: skip
# The types among them that pg_type.typlen gives a fixed size.
OTHERS_OF_FIXED_SIZE = frozenset(
    oid
    for oid, name in NAMES.items()
    if name in {
        "real", "double precision", "date", "time without time zone", "timestamp without time zone",
        "timestamp with time zone", "interval", "time with time zone", "macaddr", "macaddr8", "xid", "cid", "xid8",
        "tid", "pg_lsn",
    }
)  # fmt: skip


def find_misprinted(
    values: BytesColumn, oid: int, modifiers: Modifiers | None, *, has_escapes: bool = True
) -> int | None:
    """Return the index of a value that a type of NAMES does not print; None if all have its form.

    The values are fields of COPY lines without marks, each with the separator that follows it. `modifiers` are those of
    numeric columns, less their header; negative without one. Without `has_escapes`, no value contains a backslash.
    """
    if oid == BYTEA:
        return _find_other_bytea(values)
    if oid in (JSON, JSONB):
        found = _find_malformed(values, lone_surrogates=oid == JSON, has_escapes=has_escapes)
        # Without a backslash, there are no escapes.
        may_have_nul = oid == JSONB and has_escapes and BACKSLASH in values.data
        return _find_mismatch(values, (_WITHOUT_NUL,)) if found is None and may_have_nul else found
    if modifiers is not None:
        return _find_other_numeric(values, modifiers)
    found = _find_mismatch(values, _TYPES[oid][1])
    if found is None and oid in _ORDERED:
        return _find_disordered(values, oid)
    return _find_ragged(values) if found is None and oid in _ARRAYS else found


def find_other_composite(values: BytesColumn, versions: frozenset[tuple[str, ...]]) -> int | None:
    """Return the index of the first value that no composite type with one of these lists of field types prints.

    The types are as format_type prints them, and the values as for `find_misprinted`.
    """
    return _find_mismatch(values, _composites_of(versions))


@cache
def _composites_of(versions: frozenset[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(_composite_of(types) for types in sorted(versions))


def _composite_of(types: tuple[str, ...]) -> str:
    # A value without fields looks like a value whose only field is NULL.
    fields = ",".join(map(_field_of, types)) or _FIELD
    if len(fields) > COMPOSITE_PATTERN_MAX:
        count = f"{{{len(types) - 1}}}" if len(types) <= COUNTED_FIELDS_MAX else "*"
        fields = f"{_FIELD}(?:,{_FIELD}){count}"
    return rf"\({fields}\)"


def _field_of(type_: str) -> str:
    """Return the pattern of a field of a composite value."""
    pattern = _OF_FIELDS.get(_MODIFIER.sub("", type_))
    if pattern is None:
        return _FIELD
    # In a quoted field, a quote is doubled: ("[""2024-01-01 00:00:00"",)",1).
    doubled = pattern.replace('"', '""')
    return f'(?:{pattern}|"{doubled}")?'


def _find_disordered(values: BytesColumn, oid: int) -> int | None:
    """Return the index of the first range whose lower bound is above its upper bound; None if none is known to be.

    Times of other centuries than those with four digits are not compared.
    """
    bounds = pc.extract_regex(read_texts(values).to_large_arrow(), _RANGE_BOUNDS)
    lower, upper = pc.struct_field(bounds, "lower"), pc.struct_field(bounds, "upper")
    are_known = [pc.match_substring_regex(side, rf"\A(?:{_ORDERED[oid]})\z") for side in (lower, upper)]
    rows = np.flatnonzero(to_flags(pc.fill_null(pc.and_(*are_known), fill_value=False)))
    lower, upper = (side.take(pa.array(rows)).cast(pa.large_string()) for side in (lower, upper))
    if oid not in _TIME_RANGES:
        number = pa.float64() if oid == NUMRANGE else pa.int64()
        lower, upper = lower.cast(number), upper.cast(number)
    is_wrong = to_flags(pc.greater(lower, upper))
    return int(rows[is_wrong.argmax()]) if is_wrong.any() else None


def _find_ragged(values: BytesColumn) -> int | None:
    """Return the index of the first array whose subarrays have different lengths, as no array has."""
    texts = read_texts(values).to_large_arrow()
    rows = np.flatnonzero(to_flags(pc.match_substring_regex(texts, _NESTED)))
    if not len(rows):
        return None
    shapes = texts.take(pa.array(rows))
    for pattern in _CONTENTS:
        shapes = pc.replace_substring_regex(shapes, pattern, "")
    # Most arrays of a column have the same shape.
    encoded = pc.dictionary_encode(shapes)
    is_ragged = np.array([_shape_of(shape) is None for shape in encoded.dictionary.to_pylist()])
    wrong = rows[is_ragged[to_numpy(encoded.indices)]]
    return int(wrong[0]) if len(wrong) else None


def _shape_of(text: bytes) -> tuple[int, ...] | None:
    """Return the lengths of an array in each dimension, by its braces and commas alone; None if they differ.

    {{,},{,}} is a 2 by 2 array.
    """
    shapes: list[list[tuple[int, ...]]] = []
    shape: tuple[int, ...] = ()
    for byte in text:
        if byte == OPEN:
            shapes.append([])
        elif byte == COMMA:
            shapes[-1].append(shape)
            shape = ()
        elif byte == CLOSE:
            parts = [*shapes.pop(), shape]
            if any(part != parts[0] for part in parts):
                return None
            shape = (len(parts), *parts[0])
    return shape


def _matches(values: BytesColumn, pattern: str) -> Flags:
    return to_flags(pc.match_substring_regex(values.to_large_arrow(), rf"(?s)\A(?:{pattern})[\t\n]\z"))


def _find_mismatch(values: BytesColumn, patterns: tuple[str, ...]) -> int | None:
    """Return the index of the first value that matches none of the patterns."""
    texts = read_texts(values)
    rows = np.arange(len(texts))
    for pattern in patterns:
        rows = rows[~_matches(texts if len(rows) == len(texts) else texts.take(rows), pattern)]
        if not len(rows):
            return None
    return int(rows[0])


def _find_other_numeric(values: BytesColumn, modifiers: Modifiers) -> int | None:
    if len(modifiers) and (modifiers == modifiers[0]).all():
        return _find_mismatch(values, (_numeric_form(int(modifiers[0])),))
    wrong: list[int] = []
    for modifier in np.unique(modifiers).tolist():
        rows = np.flatnonzero(modifiers == modifier)
        if (found := _find_mismatch(values.take(rows), (_numeric_form(modifier),))) is not None:
            wrong.append(int(rows[found]))
    return min(wrong, default=None)


def precision_of(modifier: int) -> tuple[int, int] | None:
    """Return the precision and scale of a modifier of numeric, less its header; None if it has none."""
    # The scale has 11 bits and a sign (backend/utils/adt/numeric.c, make_numeric_typmod).
    precision, scale = modifier >> 16, ((modifier & 0x7FF) ^ 0x400) - 0x400
    return (precision, scale) if 1 <= precision <= PRECISION_MAX and abs(scale) <= PRECISION_MAX else None


@cache
def _numeric_form(modifier: int) -> str:
    """Return the pattern of the numbers that a numeric with this modifier can hold without rounding.

    Fewer decimal places than its scale are no damage: users have changed pg_attribute to avoid a rewrite.
    """
    if (known := precision_of(modifier)) is None:
        return _NUMERIC
    precision, scale = known
    whole = precision - scale
    if whole <= 0:
        zeros = -whole
        decimals = f"0{{{zeros}}}[0-9]{{1,{precision}}}"
        number = rf"0(?:\.{_any(decimals, f'0{{1,{zeros}}}') if zeros else decimals})?"
    elif scale > 0:
        number = rf"(?:0|[1-9][0-9]{{0,{whole - 1}}})(?:\.[0-9]{{1,{scale}}})?"
    else:
        number = f"(?:0|[1-9][0-9]{{0,{precision - 1}}}0{{{-scale}}})"
    return _any(f"-?{number}", "NaN")


def _find_other_bytea(values: BytesColumn) -> int | None:
    r"""Return the index of the first value that is not an escaped \\x and pairs of hexadecimal digits."""
    # Without the digits, the prefix is left, if it is at the beginning, and the separator.
    others = values.data.tobytes().translate(None, _HEX_DIGITS)
    lengths, starts = values.lengths, values.offsets[:-1]
    is_fitting: Flags = (lengths % 2 == 0) & (lengths >= _BYTEA_BYTES_MIN)
    if is_fitting.all() and len(others) == _BYTEA_BYTES_MIN * len(values):
        for place, byte in enumerate(_BYTEA_PREFIX):
            is_fitting &= values.data[starts + place] == byte
        if is_fitting.all():
            return None
    return _find_mismatch(values, (rf"\\x(?:{_HEX_PAIR})*",))


def _find_malformed(values: BytesColumn, *, lone_surrogates: bool, has_escapes: bool) -> int | None:
    """Return the index of the first value that is not JSON. Deeper nesting than the parser follows is accepted.

    With `lone_surrogates`, escapes of surrogates outside of pairs are accepted: `json` keeps them, `jsonb` can't.
    """
    array = _as_array(values)
    if (not has_escapes or _hide_escapes(array)) and _are_json(array, len(values)):
        return None
    # A value is malformed, or has a form that the parser does not accept, or line breaks.
    texts = read_texts(values)
    if _are_json(_as_array(texts), len(texts)):
        return None
    data, offsets = texts.data.tobytes(), texts.offsets.tolist()
    for row, (start, end) in enumerate(pairwise(offsets)):
        if not _is_json(data[start:end], lone_surrogates=lone_surrogates):
            return row
    return None


def _as_array(values: BytesColumn) -> Bytes:
    """Return a JSON array of the values, by putting commas in the place of their separators."""
    text = np.empty(len(values.data) + 1, np.uint8)
    text[1:] = values.data
    text[values.offsets[1:]] = ord(",")
    text[0], text[-1] = ord("["), ord("]")
    return text


def _hide_escapes(text: Bytes) -> bool:
    """Undo escapes of COPY that are pairs of backslashes, without moving bytes; return whether there are no others.

    Of each run of backslashes, the first half becomes letters: part of a string, as a backslash must be, too.
    """
    slashes = np.flatnonzero(text == BACKSLASH)
    if not len(slashes):
        return True
    begins = np.flatnonzero(np.concatenate([[True], np.diff(slashes) > 1]))
    counts = np.diff(np.append(begins, len(slashes)))
    text[slashes[np.arange(len(slashes)) - np.repeat(begins, counts) < np.repeat(counts // 2, counts)]] = ord("x")
    return not (counts % 2).any()


def _are_json(array: Bytes, count: int) -> bool:
    try:
        return len(_ARRAY_OF_JSON.decode(array.data)) == count
    except (msgspec.DecodeError, RecursionError):
        return False


def _is_json(text: bytes, *, lone_surrogates: bool) -> bool:
    for form in (text, _SURROGATE.sub(b"x", text)) if lone_surrogates else (text,):
        try:
            _ONE_JSON.decode(form)
        except msgspec.DecodeError:
            continue
        except RecursionError:
            pass
        return True
    return False
