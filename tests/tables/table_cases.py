"""Changes of whole tables, their keys and partitions, and of several at once; the form is schema_cases'."""

from __future__ import annotations

from tests.tables.schema_cases import ROWS, Case

TABLE_CASES: dict[str, Case] = {
    "tables_come_and_go": Case(
        f"CREATE TABLE goes (id int PRIMARY KEY, v text, n int);\nINSERT INTO goes {ROWS};\n"
        f"CREATE TABLE again (id int PRIMARY KEY, v text, n int);\nINSERT INTO again {ROWS}",
        (
            f"""
CREATE TABLE t (id int PRIMARY KEY, v text, n int);
INSERT INTO t {ROWS};
UPDATE t SET v = 'early' WHERE id = 1;
UPDATE goes SET v = 'in vain' WHERE id = 1;
UPDATE again SET v = 'in vain' WHERE id = 1;
DROP TABLE goes;
DROP TABLE again;
CREATE TABLE again (id int PRIMARY KEY, v text, n int);
INSERT INTO again VALUES (1, 'another table', 1);
""",
            """
CREATE TABLE goes (v text);
ALTER TABLE goes REPLICA IDENTITY FULL;
INSERT INTO goes VALUES ('a'), ('a'), ('b');
DELETE FROM goes WHERE v = 'b';
UPDATE t SET v = 'later' WHERE id = 2;
INSERT INTO again VALUES (2, 'since', 2);
CREATE TABLE shortlived (id int PRIMARY KEY);
INSERT INTO shortlived VALUES (1);
DROP TABLE shortlived;
""",
            """
ALTER TABLE t ADD c int DEFAULT 5;
DELETE FROM t WHERE id = 3;
UPDATE goes SET v = 'b' WHERE ctid = '(0,1)';
DROP TABLE again;
""",
        ),
        ("t again", "goes", ""),
    ),
    "tables_renamed": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nINSERT INTO t {ROWS};\n"
        f"CREATE TABLE moves (id int PRIMARY KEY, v text, n int);\nINSERT INTO moves {ROWS}",
        (
            """
UPDATE t SET v = 'before' WHERE id = 1;
ALTER TABLE t RENAME TO s;
UPDATE s SET v = 'after' WHERE id = 2;
UPDATE moves SET v = 'before' WHERE id = 1;
ALTER TABLE moves SET SCHEMA beside_tables;
UPDATE beside_tables.moves SET v = 'after' WHERE id = 2;
""",
            """
CREATE TABLE t (id int PRIMARY KEY, v text, n int);
INSERT INTO t VALUES (1, 'another', 1);
UPDATE s SET v = 'with another t' WHERE id = 3;
ALTER TABLE beside_tables.moves SET SCHEMA tables_renamed;
ALTER TABLE moves RENAME TO moved;
DELETE FROM moved WHERE id = 3;
""",
            """
ALTER TABLE t RENAME TO x;
ALTER TABLE s RENAME TO t;
ALTER TABLE x RENAME TO s;
UPDATE s SET v = 'was t' WHERE id = 1;
UPDATE t SET v = 'was s' WHERE id = 1;
""",
        ),
        ("", "t", ""),
    ),
    "keys": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL UNIQUE, n int);\nINSERT INTO t {ROWS};\n"
        f"CREATE TABLE same (id int PRIMARY KEY, v text, n int);\nINSERT INTO same {ROWS};\n"
        f"CREATE TABLE wider (id int PRIMARY KEY, v text NOT NULL, n int);\nINSERT INTO wider {ROWS}",
        (
            """
UPDATE t SET n = 1 WHERE id = 1;
UPDATE same SET n = 1 WHERE id = 1;
ALTER TABLE t DROP CONSTRAINT t_pkey;
ALTER TABLE t ADD PRIMARY KEY (v);
UPDATE t SET v = 'moved' WHERE id = 2;
ALTER TABLE same DROP CONSTRAINT same_pkey;
ALTER TABLE same ADD CONSTRAINT another_name PRIMARY KEY (id);
UPDATE same SET n = 2 WHERE id = 2;
""",
            """
UPDATE t SET n = 3 WHERE id = 3;
ALTER TABLE t REPLICA IDENTITY FULL;
UPDATE t SET n = 4 WHERE id = 4;
ALTER TABLE wider DROP CONSTRAINT wider_pkey, ADD PRIMARY KEY (id, v);
UPDATE wider SET v = 'moved' WHERE id = 1;
""",
            """
DELETE FROM t WHERE id = 5;
CREATE UNIQUE INDEX chosen ON t (v);
ALTER TABLE t REPLICA IDENTITY USING INDEX chosen;
UPDATE t SET v = 'moved again' WHERE id = 2;
DELETE FROM wider WHERE id = 2;
""",
        ),
        ("t", "t wider", "t"),
    ),
    "partitions": Case(
        "CREATE TABLE p (id int, part int, v text, PRIMARY KEY (id, part)) PARTITION BY LIST (part);\n"
        "CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1);\nCREATE TABLE p2 PARTITION OF p FOR VALUES IN (2);\n"
        "CREATE TABLE loose (id int, part int, v text, PRIMARY KEY (id, part));\n"
        """
INSERT INTO p SELECT i, i % 2 + 1, 'v' || i FROM generate_series(1, 8) i;
INSERT INTO loose VALUES (90, 9, 'l');
""",
        (
            """
UPDATE p SET v = 'before' WHERE id = 1;
CREATE TABLE p3 PARTITION OF p FOR VALUES IN (3);
UPDATE p SET part = 3 WHERE id = 2;
INSERT INTO p VALUES (30, 3, 'new');
ALTER TABLE p DETACH PARTITION p2;
UPDATE p2 SET v = 'alone' WHERE id = 3;
""",
            """
ALTER TABLE p ATTACH PARTITION loose FOR VALUES IN (9);
UPDATE p SET part = 9 WHERE id = 30;
ALTER TABLE p ATTACH PARTITION p2 FOR VALUES IN (2);
ALTER TABLE p ADD c int DEFAULT 4;
UPDATE p SET v = 'all' WHERE id IN (1, 5, 90);
""",
            """
DROP TABLE p3;
UPDATE p SET v = 'part ' || part;
""",
        ),
        ("p3", "", ""),
    ),
    "in_one_transaction": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nINSERT INTO t {ROWS}",
        (
            """
BEGIN;
UPDATE t SET v = 'before' WHERE id = 1;
ALTER TABLE t ADD c text DEFAULT 'of older rows';
UPDATE t SET c = 'after' WHERE id = 2;
DELETE FROM t WHERE id = 3;
INSERT INTO t VALUES (9, 'v', 9, 'c');
COMMIT;
""",
            """
BEGIN;
UPDATE t SET c = 'before' WHERE id = 1;
ALTER TABLE t DROP n;
UPDATE t SET v = 'between' WHERE id = 1;
SAVEPOINT s;
ALTER TABLE t RENAME v TO w;
UPDATE t SET w = 'never' WHERE id = 2;
ROLLBACK TO s;
UPDATE t SET v = 'after' WHERE id = 4;
COMMIT;
""",
            "UPDATE t SET c = 'last' WHERE id = 5",
        ),
    ),
    "emptied_and_rewritten": Case(
        f"CREATE TABLE t (id int PRIMARY KEY, v text, n int);\nINSERT INTO t {ROWS};\n"
        f"CREATE TABLE u (id int PRIMARY KEY, v text, n int);\nINSERT INTO u {ROWS};\n"
        f"CREATE TABLE cut (id int PRIMARY KEY, v text, n int);\nINSERT INTO cut {ROWS}",
        (
            """
UPDATE t SET v = 'in vain' WHERE id = 1;
TRUNCATE t;
ALTER TABLE t ADD c int DEFAULT 3;
INSERT INTO t VALUES (1, 'after', 1);
UPDATE u SET v = 'before' WHERE id = 1;
ALTER TABLE u ADD c text DEFAULT 'c';
UPDATE u SET v = 'after' WHERE id = 2;
TRUNCATE cut;
INSERT INTO cut VALUES (1, 'under the first', 1);
""",
            """
UPDATE u SET c = 'own' WHERE id = 3;
VACUUM FULL u;
ALTER TABLE cut ADD c int DEFAULT 8;
INSERT INTO cut VALUES (2, 'under the second', 1, 1);
INSERT INTO t VALUES (2, 'more', 2);
""",
            """
VACUUM FULL u;
ALTER TABLE u ADD d text DEFAULT 'd';
UPDATE u SET c = 'x' WHERE id = 4;
TRUNCATE cut;
ALTER TABLE t ADD d int DEFAULT 4;
TRUNCATE t;
INSERT INTO t VALUES (3, 'the rest', 3);
""",
        ),
        # The first VACUUM FULL writes the column into every row, and PostgreSQL alters its pg_attribute row.
        ("t", "u", "t u"),
    ),
}
