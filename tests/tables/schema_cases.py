"""Changes of columns, each case in its own schema: the first tables, three increments, and what each copies again.

A `;` at the end of a line ends a statement; a statement outside BEGIN is a separate transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = "SELECT i, 'v' || i, i * 10 FROM generate_series(1, 8) i"
LARGE = "(SELECT string_agg(md5((g + {0})::text), '') FROM generate_series(1, 100) g)"


@dataclass(frozen=True, slots=True)
class Case:
    """A schema's first statements, those before each increment, and the tables that each increment copies again.

    The last increment takes two attempts: the first fails once all WAL is archived; `aftermath` runs between the two.
    """

    first: str
    increments: tuple[str, str, str]
    copied_again: tuple[str, str, str] = ("", "", "")
    aftermath: str = ""


COLUMN_CASES: dict[str, Case] = {
    "columns_added": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nINSERT INTO t {ROWS}",
        (
            r"""
UPDATE t SET v = 'before' WHERE id = 1;
ALTER TABLE t ADD c text NOT NULL DEFAULT E'a\tb\\c\nd\u00e9', ADD d numeric DEFAULT 7.50;
ALTER TABLE t ADD a int[] DEFAULT '{1,NULL,3}', ADD q text[] DEFAULT '{{"x y","a,b"},{NULL,""}}';
ALTER TABLE t ADD f float8 DEFAULT 0.1, ADD j jsonb DEFAULT '{"a": "\"x\""}', ADD e text DEFAULT '';
ALTER TABLE t ADD b bytea DEFAULT '\x00ff';
UPDATE t SET v = 'after' WHERE id = 2;
INSERT INTO t VALUES (9, 'new', 9);
DELETE FROM t WHERE id = 3;
""",
            """
UPDATE t SET c = 'own' WHERE id = 4;
ALTER TABLE t ADD late text, ADD at timestamptz DEFAULT now(), ADD y interval DEFAULT '1 day 2 hours';
INSERT INTO t VALUES (10, 'newer', 9);
UPDATE t SET late = 'x' WHERE id = 5;
""",
            """
ALTER TABLE t ALTER c SET DEFAULT 'other', ALTER d DROP DEFAULT;
INSERT INTO t (id, v) VALUES (11, 'newest');
UPDATE t SET v = 'last' WHERE id = 6;
""",
        ),
    ),
    "default_of_each_row": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nINSERT INTO t {ROWS}",
        (
            """
UPDATE t SET v = 'before' WHERE id = 1;
ALTER TABLE t ADD c uuid DEFAULT gen_random_uuid(), ADD s serial;
UPDATE t SET v = 'after' WHERE id = 2;
""",
            "INSERT INTO t (id) VALUES (20), (21);\nUPDATE t SET c = NULL WHERE id = 3",
            "ALTER TABLE t DROP c;\nUPDATE t SET s = -1 WHERE id = 4",
        ),
        ("t", "", ""),
    ),
    "columns_dropped": Case(
        f"CREATE TABLE t (a int, id int PRIMARY KEY, v text, n int);\nINSERT INTO t SELECT -i, * FROM ({ROWS}) r (i)",
        (
            "UPDATE t SET v = 'before' WHERE id = 1;\nALTER TABLE t DROP v;\nUPDATE t SET n = 1 WHERE id = 2",
            "UPDATE t SET n = 2 WHERE id = 3;\nALTER TABLE t DROP a;\nINSERT INTO t VALUES (9, 9)",
            "ALTER TABLE t DROP n;\nINSERT INTO t VALUES (10);\nDELETE FROM t WHERE id = 4",
        ),
    ),
    "columns_renamed": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nINSERT INTO t {ROWS}",
        (
            """
UPDATE t SET v = 'before' WHERE id = 1;
ALTER TABLE t RENAME v TO w;
UPDATE t SET w = 'after' WHERE id = 2;
""",
            """
ALTER TABLE t RENAME id TO ident;
UPDATE t SET ident = 33 WHERE ident = 3;
DELETE FROM t WHERE ident = 4;
""",
            """
ALTER TABLE t RENAME w TO x;
ALTER TABLE t RENAME n TO w;
ALTER TABLE t RENAME x TO n;
UPDATE t SET w = 5 WHERE n = 'v5';
""",
        ),
    ),
    "types_without_rewrite": Case(
        "CREATE TABLE t (id varchar(5) PRIMARY KEY, v varchar(10), w numeric(5,1));\n"
        "INSERT INTO t SELECT i, 'v' || i, i / 2.0 FROM generate_series(1, 8) i",
        (
            """
UPDATE t SET v = 'before' WHERE id = '1';
ALTER TABLE t ALTER v TYPE text;
UPDATE t SET v = 'after it there is more room' WHERE id = '2';
""",
            """
ALTER TABLE t ALTER v TYPE varchar, ALTER w TYPE numeric(9,1);
UPDATE t SET w = 12345678.5 WHERE id = '3';
""",
            """
ALTER TABLE t ALTER id TYPE text;
UPDATE t SET id = 'a longer key' WHERE id = '4';
UPDATE t SET v = 'x' WHERE id = '5';
""",
        ),
    ),
    "types_with_rewrite": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nCREATE TABLE k (id int PRIMARY KEY, v text);\n"
        f"INSERT INTO t {ROWS};\nINSERT INTO k SELECT i, v FROM ({ROWS}) r (i, v)",
        (
            """
UPDATE t SET v = 'before' WHERE id = 1;
ALTER TABLE t ALTER n TYPE bigint;
UPDATE t SET n = 1 << 40 WHERE id = 2;
UPDATE t SET v = 'after' WHERE id = 2;
""",
            """
UPDATE t SET v = 'between' WHERE id = 3;
ALTER TABLE t ALTER v TYPE text USING 'rewritten ' || v;
UPDATE t SET v = 'since' WHERE id = 4;
ALTER TABLE k ALTER id TYPE text USING 'key ' || id;
DELETE FROM k WHERE id = 'key 3';
""",
            "UPDATE t SET n = -1 WHERE id = 5;\nUPDATE k SET v = 'x' WHERE id = 'key 1'",
        ),
        ("t", "t k", ""),
    ),
    "enums": Case(
        "CREATE TYPE mood AS ENUM ('a', 'b');\nCREATE TABLE t (id int PRIMARY KEY, m mood);\n"
        "INSERT INTO t SELECT i, 'a' FROM generate_series(1, 8) i",
        (
            "UPDATE t SET m = 'b' WHERE id = 1;\nALTER TYPE mood ADD VALUE 'c';\nUPDATE t SET m = 'c' WHERE id = 2",
            """
UPDATE t SET m = 'c' WHERE id = 3;
ALTER TYPE mood RENAME VALUE 'a' TO 'z';
UPDATE t SET m = 'z' WHERE id = 1;
""",
            """
ALTER TYPE mood ADD VALUE 'y' BEFORE 'b';
UPDATE t SET m = 'y' WHERE id = 4;
INSERT INTO t VALUES (9, 'z');
""",
        ),
        ("", "t", ""),
    ),
    "composites": Case(
        "CREATE TYPE pair AS (x int, y text);\nCREATE TABLE t (id int PRIMARY KEY, p pair);\n"
        "INSERT INTO t SELECT i, (i, 'y' || i)::pair FROM generate_series(1, 8) i",
        (
            """
UPDATE t SET p = (0, 'before') WHERE id = 1;
ALTER TYPE pair ADD ATTRIBUTE z int;
UPDATE t SET p = (0, 'after', 7) WHERE id = 2;
""",
            "ALTER TYPE pair DROP ATTRIBUTE y;\nUPDATE t SET p = (1, 1) WHERE id = 3",
            "UPDATE t SET p = (2, 2) WHERE id = 4",
        ),
        ("t", "t", ""),
    ),
    "there_and_back": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nINSERT INTO t {ROWS};\n"
        f"CREATE TABLE u (id int PRIMARY KEY, v text, n int);\nINSERT INTO u {ROWS};\n"
        f"CREATE TABLE w (id int PRIMARY KEY, v text, n int);\nINSERT INTO w {ROWS};\n"
        f"CREATE TABLE twice (id int PRIMARY KEY, v text, n int);\nINSERT INTO twice {ROWS}",
        (
            """
ALTER TABLE t RENAME v TO x;
UPDATE t SET x = 'under another name' WHERE id = 1;
ALTER TABLE t RENAME x TO v;
ALTER TABLE u ADD c int;
UPDATE u SET c = 7, v = 'with c' WHERE id = 1;
ALTER TABLE u DROP c;
UPDATE u SET v = 'without' WHERE id = 2;
ALTER TABLE w DROP v;
ALTER TABLE w ADD v text DEFAULT 'another v';
UPDATE w SET n = 7 WHERE id = 1;
ALTER TABLE twice ADD c int DEFAULT 1;
UPDATE twice SET c = 7 WHERE id = 1;
ALTER TABLE twice ADD d int DEFAULT 2;
UPDATE twice SET d = 7 WHERE id = 2;
""",
            """
ALTER TABLE t RENAME TO t2;
UPDATE t2 SET v = 'as another table' WHERE id = 2;
ALTER TABLE t2 RENAME TO t;
ALTER TABLE u RENAME v TO x;
ALTER TABLE u RENAME x TO v;
UPDATE u SET v = 'nobody saw that' WHERE id = 3;
""",
            """
BEGIN;
SAVEPOINT s;
ALTER TABLE t ADD c int DEFAULT 3;
UPDATE t SET c = 4 WHERE id = 3;
ROLLBACK TO s;
UPDATE t SET v = 'the same table' WHERE id = 3;
COMMIT;
UPDATE w SET v = 'z' WHERE id = 2;
""",
        ),
        ("t u w twice", "t", ""),
    ),
    # Definitions that look like the previous one, or the one at the cut, but are neither: the column is another one.
    "look_alikes": Case(
        "".join(
            f"CREATE TABLE {table} (id int PRIMARY KEY, a text);\n"
            f"INSERT INTO {table} SELECT i, v FROM ({ROWS}) r (i, v);\n"
            for table in ("after", "before")
        ),
        (
            """
ALTER TABLE after ALTER a TYPE varchar;
ALTER TABLE after RENAME a TO b;
UPDATE after SET b = 'of a column that goes' WHERE id = 1;
ALTER TABLE after DROP b;
ALTER TABLE after ADD b varchar DEFAULT 'new';
UPDATE after SET b = 'of the new one' WHERE id = 2;
ALTER TABLE before ADD c varchar DEFAULT 'new';
ALTER TABLE before DROP a;
ALTER TABLE before RENAME c TO a;
ALTER TABLE before ALTER a TYPE text;
UPDATE before SET a = 'of the new one' WHERE id = 1;
ALTER TABLE before ALTER a TYPE varchar;
""",
            "UPDATE after SET b = 'x' WHERE id = 3;\nUPDATE before SET a = 'x' WHERE id = 3",
            "ALTER TABLE before RENAME a TO z",
        ),
        ("after before", "", ""),
    ),
    "values_left_out": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, big text, n int);\nALTER TABLE t ALTER big SET STORAGE EXTERNAL;\n"
        f"INSERT INTO t SELECT i, {LARGE.format('i * 1000')}, i FROM generate_series(1, 8) i",
        (
            """
UPDATE t SET n = -1 WHERE id IN (1, 2);
ALTER TABLE t ADD c text DEFAULT 'c';
UPDATE t SET n = -2 WHERE id IN (2, 3);
UPDATE t SET id = 40, c = 'moved' WHERE id = 4;
""",
            """
UPDATE t SET c = 'without n' WHERE id IN (1, 40, 5);
ALTER TABLE t DROP n;
UPDATE t SET c = 'after' WHERE id IN (1, 6);
UPDATE t SET id = 50 WHERE id = 5;
""",
            f"""
ALTER TABLE t RENAME big TO huge;
ALTER TABLE t ADD d int DEFAULT 3;
UPDATE t SET c = 'last' WHERE id IN (2, 3, 40, 50);
UPDATE t SET huge = {LARGE.format("7")} WHERE id = 7;
UPDATE t SET d = 4 WHERE id IN (1, 7);
""",
        ),
    ),
    "generated": Case(
        "CREATE TABLE t (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED);\n"
        "INSERT INTO t SELECT i, i FROM generate_series(1, 8) i;\n"
        "CREATE TABLE u (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED);\n"
        "INSERT INTO u SELECT i, i FROM generate_series(1, 8) i",
        (
            """
UPDATE t SET a = 0 WHERE id = 1;
ALTER TABLE t ALTER g DROP EXPRESSION;
UPDATE t SET g = -1 WHERE id = 2;
""",
            "UPDATE u SET a = 0 WHERE id = 1;\nALTER TABLE u DROP g;\nUPDATE u SET a = 1 WHERE id = 2",
            "ALTER TABLE u ADD h int GENERATED ALWAYS AS (a + 1) STORED;\nUPDATE u SET a = 2 WHERE id = 3",
        ),
        ("t", "", "u"),
    ),
}
