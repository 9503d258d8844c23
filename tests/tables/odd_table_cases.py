"""Tables without a key, inherited ones, attempts, and what lies beside the tables; the form is schema_cases'."""

from __future__ import annotations

from tests.tables.schema_cases import ROWS, Case

ODD_TABLE_CASES: dict[str, Case] = {
    "multisets": Case(
        "CREATE TABLE t (v text, n int);\nALTER TABLE t REPLICA IDENTITY FULL;\n"
        "INSERT INTO t SELECT 'v' || i % 3, i % 2 FROM generate_series(1, 24) i;\n"
        "CREATE TABLE nothing ();\nALTER TABLE nothing REPLICA IDENTITY FULL;\n"
        "INSERT INTO nothing DEFAULT VALUES;\nINSERT INTO nothing DEFAULT VALUES",
        (
            """
DELETE FROM t WHERE ctid = '(0,1)';
INSERT INTO t VALUES ('v0', 0);
ALTER TABLE t ADD c text DEFAULT 'old';
DELETE FROM t WHERE ctid IN ('(0,2)', '(0,3)');
UPDATE t SET c = 'new' WHERE ctid = '(0,4)';
INSERT INTO t VALUES ('v1', 1, 'old'), ('v1', 1, 'c');
ALTER TABLE nothing ADD c int DEFAULT 5;
DELETE FROM nothing WHERE ctid = '(0,1)';
INSERT INTO nothing VALUES (5), (6);
""",
            """
DELETE FROM t WHERE ctid = '(0,5)';
ALTER TABLE t DROP n;
DELETE FROM t WHERE ctid IN ('(0,6)', '(0,7)');
UPDATE t SET v = 'moved' WHERE ctid = '(0,8)';
INSERT INTO nothing VALUES (7);
ALTER TABLE nothing DROP c;
INSERT INTO nothing DEFAULT VALUES;
""",
            """
ALTER TABLE t RENAME v TO w;
DELETE FROM t WHERE ctid IN ('(0,9)', '(0,10)');
INSERT INTO t VALUES ('w', 'w'), ('w', 'w');
""",
        ),
    ),
    # The child's own column comes last: pg_dump puts inherited ones first, and rows are compared in the tables' order.
    "inherited": Case(
        "CREATE TABLE parent (id int PRIMARY KEY, v text, n int);\n"
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);\n"
        f"INSERT INTO parent {ROWS};\nINSERT INTO child SELECT i + 10, v, n FROM ({ROWS}) r (i, v, n)",
        (
            """
ALTER TABLE parent ADD c text DEFAULT 'c';
ALTER TABLE child ADD own bool DEFAULT true;
UPDATE parent SET v = 'x' WHERE id IN (1, 11);
UPDATE child SET own = false WHERE id = 12;
""",
            "ALTER TABLE child NO INHERIT parent;\nALTER TABLE parent DROP n;\nUPDATE child SET n = 0 WHERE id = 12",
            "UPDATE parent SET c = 'y' WHERE id = 2;\nALTER TABLE child DROP own;\nDELETE FROM child WHERE id = 13",
        ),
    ),
    "attempts": Case(
        ";\n".join(
            f"CREATE TABLE {table} (id int PRIMARY KEY, v text, n int);\nINSERT INTO {table} {ROWS}"
            for table in ("same", "back", "further", "gone", "later")
        ),
        (
            "",
            "",
            f"""
ALTER TABLE same ADD c int DEFAULT 1;
UPDATE same SET c = 2 WHERE id = 1;
ALTER TABLE back ADD c text DEFAULT 'c';
UPDATE back SET c = 'd', v = 'with c' WHERE id = 1;
ALTER TABLE further ADD c text DEFAULT 'c';
UPDATE further SET c = 'd' WHERE id = 1;
UPDATE gone SET v = 'in vain' WHERE id = 1;
DROP TABLE gone;
UPDATE later SET v = 'before' WHERE id = 1;
CREATE TABLE fresh (id int PRIMARY KEY, v text, n int);
INSERT INTO fresh {ROWS};
CREATE TABLE brief (id int PRIMARY KEY, v text, n int);
INSERT INTO brief {ROWS};
""",
        ),
        ("", "", "back further gone fresh"),
        """
UPDATE same SET c = 3 WHERE id = 2;
ALTER TABLE back DROP c;
UPDATE back SET v = 'without c' WHERE id = 2;
ALTER TABLE further ADD d text DEFAULT 'd';
UPDATE further SET d = 'e' WHERE id = 2;
CREATE TABLE gone (id int PRIMARY KEY, v text);
INSERT INTO gone VALUES (1, 'another');
ALTER TABLE later ADD c int DEFAULT 7;
UPDATE later SET v = 'after' WHERE id = 2;
UPDATE fresh SET v = 'later' WHERE id = 3;
UPDATE brief SET v = 'later' WHERE id = 3;
DROP TABLE brief;
""",
    ),
    "beside_tables": Case(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int CHECK (n < 1000));\n"
        f"INSERT INTO t {ROWS};\n"
        "CREATE SEQUENCE s;\n"
        "CREATE VIEW w AS SELECT id FROM t",
        (
            """
CREATE INDEX by_n ON t (n);
CREATE FUNCTION f(int) RETURNS int LANGUAGE sql AS 'SELECT $1 + 1';
ALTER TABLE t ALTER v SET NOT NULL, ALTER n SET DEFAULT 7, DROP CONSTRAINT t_n_check;
UPDATE t SET n = 5000 WHERE id = 1;
COMMENT ON TABLE t IS 'of the first increment';
""",
            """
DROP INDEX by_n;
DROP VIEW w;
CREATE MATERIALIZED VIEW w AS SELECT count(*) FROM t;
ALTER TABLE t ADD CONSTRAINT even CHECK (n % 2 = 0) NOT VALID;
CREATE SEQUENCE s2 INCREMENT 5;
SELECT nextval('s'), nextval('s2'), nextval('s2');
INSERT INTO t VALUES (9, 'nine', 90);
""",
            """
CREATE OR REPLACE FUNCTION f(int) RETURNS int LANGUAGE sql AS 'SELECT $1 + 2';
ALTER TABLE t ADD r int REFERENCES t, ALTER v SET STORAGE EXTERNAL, SET (fillfactor = 70);
UPDATE t SET r = 1 WHERE id = 2;
DROP SEQUENCE s;
GRANT SELECT ON t TO PUBLIC;
""",
        ),
    ),
}
