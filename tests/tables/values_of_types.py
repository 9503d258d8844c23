"""Values of every type that a column can have: extremes, and everything that a text form could lose.

The keys are type names as format_type prints them, the values texts for the type's input function. `create_typed` asks
the server which types it has, so that none is forgotten.
"""

from __future__ import annotations

ASCII = "".join(map(chr, range(1, 128)))
# Every code point that UTF-8 has, plane by plane.
EVERY_CHARACTER = "".join(chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000)
ONE_OF_EVERY_PLANE = "".join(chr((plane << 16) + 0x1F4A) for plane in range(17)) + "\ufeff\uffff\U0010ffff\u200f"
DIGITS = "123456789" * 111 + "1"

TEXTS = (
    "", "\\N", "\\u", "\\.", "\\", "\\\\N", "\\\\", "\t", "\n", "\r\n", "a\tb\nc\rd\be\ff\vg", ASCII, "NULL", '"', "'",
    "{}", " ", "  padded  ", "\x7f\x1f", "a,b;c|d", "ü€𝄞", "é" * 30, "e\u0301", ONE_OF_EVERY_PLANE, EVERY_CHARACTER,
    "\n\\.\n", "\\.\n\\N\t\\N", "--", "$$", "%s {} {0}",
)  # fmt: skip

BUILT_IN: dict[str, tuple[str, ...]] = {
    "boolean": ("t", "f"),
    "smallint": ("-32768", "32767", "0"),
    "integer": ("-2147483648", "2147483647", "7"),
    "bigint": ("-9223372036854775808", "9223372036854775807", "0"),
    "numeric": (
        "NaN",
        "Infinity",
        "-Infinity",
        "0",
        "0.000",
        "-0",
        "1",
        "1.0",
        "1.00",
        "-1e-200",
        "1e200",
        "1e-16383",
        "3.14159265358979323846264338",
        DIGITS,
        f"-{DIGITS}.{DIGITS}",
        f"0.{DIGITS}",
        "9e131071",
    ),
    "real": ("NaN", "Infinity", "-Infinity", "0", "-0", "1e-45", "1.17549435e-38", "3.4028235e38", "0.1", "16777217"),
    "double precision": (
        "NaN",
        "Infinity",
        "-Infinity",
        "0",
        "-0",
        "5e-324",
        "2.2250738585072014e-308",
        "1.7976931348623157e308",
        "0.1",
        "0.30000000000000004",
        "9007199254740993",
        "2e-16",
        "123456789012345.67",
    ),
    "money": ("-92233720368547758.08", "92233720368547758.07", "0.01", "-0.01", "1234567.89"),
    "text": TEXTS,
    "character varying": TEXTS[:-5],
    "character": ("", "a", " ", "é", "\\", "\t"),
    '"char"': ("a", "", "\\", "\t", "\\377", "\\001"),
    "name": ("", "a\\b\tc", "x" * 63, "é" * 31, 'Q"uote', "\\N"),
    "bytea": ("\\x", "\\x00", "\\x5c5c0a09ff00", "\\x" + bytes(range(256)).hex(), "\\x5c4e", "\\x5c2e"),
    "date": ("infinity", "-infinity", "4713-01-01 BC", "0001-12-31 BC", "0001-01-01", "5874897-12-31", "2024-02-29"),
    "time without time zone": ("00:00", "24:00:00", "12:34:56.789012", "23:59:59.999999"),
    "time with time zone": ("00:00:00-15:59", "12:34:56.789+05:30:15", "24:00:00+15:59", "12:00+00", "13:00+01"),
    "timestamp without time zone": (
        "infinity",
        "-infinity",
        "4713-01-01 00:00 BC",
        "294276-12-31 23:59:59.999999",
        "2000-01-01 00:00:00.000001",
        "1999-12-31 23:59:59.999999",
        "2026-02-29 00:00:00 BC".replace("2026", "0005"),
    ),
    "timestamp with time zone": (
        "infinity",
        "-infinity",
        "4713-01-01 00:00+00 BC",
        "294276-12-31 23:59:59.999999+00",
        "2024-03-31 02:30:00+02",
        "2024-10-27 02:30:00+01",
        "2024-10-27 02:30:00+02",
        "0044-03-15 12:00:00+00 BC",
        "1883-11-18 12:03:58-05",
    ),
    "interval": (
        "infinity",
        "-infinity",
        "-1 year 2 mons -3 days 04:05:06.789",
        "0",
        "-00:00:00.000001",
        "1 mon",
        "30 days",
        "720:00:00",
        "-1 day 24:00:00",
        "178000000 years",
        "-178000000 years",
        "1 day -00:00:01",
        "-2562047788:00:54.775807",
    ),
    "uuid": (
        "00000000-0000-0000-0000-000000000000",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
    ),
    "json": ('{"a" :  1, "a": "\\u00e9\\n"}', "null", '"\\\\"', "\n[1,\t2]\n", '"\\u0000"', "1e400", '{"": ""}'),
    "jsonb": (
        '{"a": 1e400, "b": ["\\t", null, "\\\\u"]}',
        "[]",
        '"ü"',
        "1.00",
        "1.0",
        "null",
        "{}",
        '{"b":1,"a":2}',
        '"\\\\N"',
        '""',
    ),
    "jsonpath": ('$."a b"[*] ? (@ > 1)', "strict $", '$.** ? (@ like_regex "a\\\\tb" flag "i")'),
    "xml": ('<a b="1">&lt;\t</a>', "text", "", "<a/>\n<b/>", "<!-- \\N -->"),
    "inet": ("::1/128", "10.0.0.1/8", "10.0.0.1", "fe80::/10", "::ffff:1.2.3.4", "0.0.0.0/0"),
    "cidr": ("10.0.0.0/8", "::/0", "::1/128", "10.0.0.1/32"),
    "macaddr": ("08:00:2b:01:02:03", "ff:ff:ff:ff:ff:ff"),
    "macaddr8": ("08:00:2b:01:02:03:04:05", "00:00:00:00:00:00:00:00"),
    "bit": ("1", "0"),
    "bit varying": ("", "1", "10101010101010101010", "0", "00"),
    "tsvector": ("'a\\\\b':1A 'fat''s':2B", "", "'\t' '\n'", "'a b':3 c:16383"),
    "tsquery": ("'fat' & ( 'rat' | !'cat':AB )", "", "'a''b' <2> 'c':*", "'\\\\'"),
    "point": ("(1e-300,-0)", "(NaN,Infinity)", "(0.1,0.30000000000000004)"),
    "line": ("{1,-1,0.1}", "{0,-1,5e-324}"),
    "lseg": ("[(0,0),(1e10,0.1)]", "[(-0,0),(0,-0)]"),
    "box": ("(2,2),(0,0)", "(Infinity,1),(-Infinity,0)"),
    "path": ("[(0,0),(1,1)]", "((0,0),(1,1),(2,0))"),
    "polygon": ("((0,0),(1,1),(2,0))", "((0.1,-0.1))"),
    "circle": ("<(0,0),0.1>", "<(1,2),Infinity>"),
    "oid": ("4294967295", "0", "16384"),
    "xid": ("4294967295", "0", "3"),
    "xid8": ("18446744073709551615", "0"),
    "cid": ("7", "4294967295"),
    "tid": ("(4294967295,65535)", "(0,1)"),
    "pg_lsn": ("FFFFFFFF/FFFFFFFF", "0/0"),
    "pg_snapshot": ("10:20:10,14,15", "1:1:"),
    "txid_snapshot": ("10:20:10,14,15", "1:1:"),
    "int2vector": ("1 2 -3", ""),
    "oidvector": ("1 2 3", ""),
    "refcursor": ("", "a\tb", "\\N"),
    "regclass": ("pg_class", 'own."T ""1"', "0", "4294967295"),
    "regtype": ("integer", "own.mood", "0"),
    "regnamespace": ("pg_catalog", "own", "0"),
    "regproc": ("pg_catalog.now", "own.only_one", "0"),
    "regprocedure": ("abs(integer)", "own.twice(integer)", "own.twice(text)", "0"),
    "regoper": ("||/", "0"),
    "regoperator": ("+(integer,integer)", "-(none,integer)", "0"),
    "regcollation": ('"C"', '"POSIX"', "0"),
    "regconfig": ("simple", "english", "0"),
    "regdictionary": ("simple", "0"),
    "regrole": ("postgres", "0"),
    "aclitem": ("postgres=arwdDxt/postgres", "=r/postgres", "postgres=r*w*/postgres"),
    "int4range": ("empty", "[1,10)", "(,)", "[-2147483648,5)"),
    "int8range": ("empty", "[1,10)", "(,5)"),
    "numrange": ("[0.1,)", "(-Infinity,NaN]", "empty", "(1.0,1.00]"),
    "tsrange": ('["2024-01-01 00:00",infinity)', "(,)", '["0044-03-15 12:00:00 BC",]'),
    "tstzrange": ('["2024-01-01 00:00+00",infinity)', "[-infinity,)", '["2024-10-27 02:30+01","2024-10-27 02:30+01"]'),
    "daterange": ("[2024-01-01,infinity)", "empty", "[-infinity,)", '["0044-03-15 BC",2024-01-01)'),
    "int4multirange": ("{}", "{[1,3),[5,9)}", "{(,)}"),
    "int8multirange": ("{}", "{[1,3),[5,9)}"),
    "nummultirange": ("{}", "{[0.1,1],(2,)}"),
    "tsmultirange": ("{}", '{["2024-01-01 00:00",infinity)}'),
    "tstzmultirange": ("{}", '{["2024-01-01 00:00+00","2024-01-02 00:00+00"],["2025-01-01 00:00+00",)}'),
    "datemultirange": ("{}", "{[2024-01-01,2024-02-01),[2025-01-01,)}"),
    "information_schema.cardinal_number": ("0", "2147483647"),
    "information_schema.character_data": ("", "a\tb", "\\N"),
    "information_schema.sql_identifier": ("", "a\tb"),
    "information_schema.time_stamp": ("2024-03-31 02:30:00.12+02", "infinity"),
    "information_schema.yes_or_no": ("YES", "NO"),
}

# Declared with a modifier, or user-defined (OWN_TYPES).
DECLARED: dict[str, tuple[str, ...]] = {
    "numeric(12,4)": ("12345678.1234", "-0.0001", "0"),
    "numeric(1000,0)": (DIGITS, f"-{DIGITS}"),
    "numeric(3,-2)": ("12300", "-99900"),
    "character(10)": ("", "a\\", "ü", " a ", "1234567890"),
    "character varying(5)": ("", "\\N", "ü" * 5, "\t", " "),
    "bit(5)": ("10101", "00000"),
    "bit varying(5)": ("", "10101"),
    "time(0) without time zone": ("24:00:00", "12:34:56"),
    "timestamp(3) with time zone": ("infinity", "2024-03-31 02:30:00.123+02"),
    "interval(2)": ("1 day 00:00:00.12",),
    "interval year to month": ("-1 year -2 mons", "10 mons"),
    "own.mood": ("ok", 'so "so"', "tab\there", "", "it's", "\\N"),
    "own.positive": ("1", "99999"),
    "own.very_positive": ("11", "99999"),
    "own.few": ("{}", "{1,2}", "{NULL}"),
    "own.pair": ('(1,"a\\\\b\t""c")', "(,)", '(-5,"")', '(1,"multi\nline")', '(,"NULL")'),
    "own.nested": ('("(1,a)","{""(2,\\\\""b c\\\\"")"",NULL}",1.00)', "(,,)", '("(,)",{},NaN)'),
    "own.row": ('(1,x)', "(,)"),
    "own.spans": ("[a,b)", "empty", '("a\tb",)'),
    "own.spans_of": ("{}", '{[a,b),["c d",)}'),
    "integer[]": ("{}", "{1,NULL,3}", "{{1,2},{3,4}}", "[0:1]={5,6}", "[-1:0][2:3]={{1,2},{3,4}}", "{{{NULL}}}"),
    "text[]": ('{"","NULL",NULL,"a\\\\b","c,d","e\\"f"}', "{\\\\\\\\N}", '{"\t","\n","{}"}', "{}"),
    "bytea[]": ('{"\\\\x5c","\\\\x"}',),
    "timestamp with time zone[]": ('{infinity,"2024-03-31 02:30:00+02",NULL}',),
    "double precision[]": ("{NaN,-Infinity,-0,0.1}",),
    "money[]": ('{"-12.34"}',),
    "own.pair[]": ('{"(1,\\"a\\tb\\")",NULL}', "{}"),
    "own.mood[]": ("{ok,ok,NULL}", '{"so \\"so\\"","tab\there"}'),
    "own.few[]": ('{"{1,2}",NULL}',),
    "int4range[]": ('{"[1,5)",empty,NULL}',),
}  # fmt: skip

OWN_TYPES = r"""
CREATE SCHEMA own;
CREATE TYPE own.mood AS ENUM ('ok', 'so "so"', E'tab\there', '', 'it''s', '\N');
CREATE DOMAIN own.positive AS integer CHECK (VALUE > 0);
CREATE DOMAIN own.very_positive AS own.positive CHECK (VALUE > 10);
CREATE DOMAIN own.few AS integer[] CHECK (cardinality(VALUE) < 5) DEFAULT '{}';
CREATE TYPE own.pair AS (number integer, word text);
CREATE TYPE own.nested AS (one own.pair, many own.pair[], n numeric);
CREATE TABLE own.row (a integer PRIMARY KEY, b text);
CREATE TABLE own."T ""1" (id integer PRIMARY KEY);
CREATE TYPE own.spans AS RANGE (subtype = text, collation = "C", multirange_type_name = own.spans_of);
CREATE FUNCTION own.only_one() RETURNS integer LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION own.twice(integer) RETURNS integer LANGUAGE sql AS 'SELECT 2 * $1';
CREATE FUNCTION own.twice(text) RETURNS text LANGUAGE sql AS 'SELECT $1 || $1';
"""

# Renames of objects whose values are printed by name.
RENAMES = (
    'ALTER TABLE own."T ""1" RENAME TO "T 2"',
    "ALTER FUNCTION own.only_one() RENAME TO still_one",
    "ALTER FUNCTION own.twice(text) SET SCHEMA public",
    "ALTER TYPE own.mood RENAME VALUE 'ok' TO 'fine'",
)

# Types of extensions that a server may lack; those that it has are tested.
EXTENSIONS: dict[str, tuple[str, ...]] = {
    "citext": ("", "Abc", "aBC", "Ü\t\\N", "é" * 50),
    "hstore": ('"a"=>"1", "b"=>NULL', "", '"a\\"\\\\b"=>"c\td"', '"NULL"=>"NULL", ""=>""'),
    "ltree": ("", "Top.Science.Astronomy", "a_b-c.1"),
    "lquery": ("Top.*{1,2}.!a|b@%*",),
    "ltxtquery": ("Europe & Russia*@ & !Transportation",),
    "cube": ("(1, 2),(3, 4.5)", "(0)", "(1e-300)", "(Infinity)"),
    "earth": ("(6378168, 0, 0)",),
    "seg": ("1.50", "~5.0 .. 7.00", "<1", "> 2.5e-3", "1 .. "),
    "isbn": ("0-11-000533-3", "9780393040029"),
    "isbn13": ("978-0-11-000533-1",),
    "issn": ("1436-4522",),
    "issn13": ("977-1436-452-00-8",),
    "ismn": ("M-2306-7118-7",),
    "ismn13": ("979-0-2306-7118-7",),
    "ean13": ("220-500896543-8", "978-0-393-04002-9"),
    "upc": ("220500896549",),
    "query_int": ("1&(2|3)", "!7"),
    "lo": ("4294967295", "0"),
    "vector": ("[1,2.5,-0]", "[1e-38]"),
    "halfvec": ("[1,2.5]", "[6e-8]"),
    "sparsevec": ("{1:0.5,3:-2}/5", "{}/3"),
}  # fmt: skip
