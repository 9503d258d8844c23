"""Statements of every kind, each case in its own schema: the first tables, and their changes before two increments.

A `;` at the end of a line ends a statement; a statement outside BEGIN is a separate transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE = "(SELECT string_agg(md5((g + {0})::text), '') FROM generate_series(1, 150) g)"


@dataclass(frozen=True, slots=True)
class Case:
    """A schema's first statements, and the transactions before the first and the second increment."""

    first: str
    increments: tuple[str, str]


STATEMENT_CASES: dict[str, Case] = {
    "truncates": Case(
        """
CREATE TABLE one (id serial PRIMARY KEY, v text);
CREATE TABLE two (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, one int REFERENCES one);
CREATE TABLE three (id int PRIMARY KEY, two int REFERENCES two);
CREATE TABLE bag (v text);
ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TABLE root (id int, part int, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
CREATE TABLE leaf_1 PARTITION OF root FOR VALUES IN (1);
CREATE TABLE leaf_2 PARTITION OF root FOR VALUES IN (2);
CREATE TABLE kept (id int PRIMARY KEY);
INSERT INTO one (v) SELECT 'o' || i FROM generate_series(1, 9) i;
INSERT INTO two (one) SELECT i FROM generate_series(1, 9) i;
INSERT INTO three SELECT i, i FROM generate_series(1, 9) i;
INSERT INTO bag SELECT 'b' || i % 2 FROM generate_series(1, 9) i;
INSERT INTO root SELECT i, i % 2 + 1 FROM generate_series(1, 9) i;
INSERT INTO kept SELECT generate_series(1, 9);
""",
        (
            """
BEGIN;
INSERT INTO bag VALUES ('before');
TRUNCATE bag, one, leaf_1 RESTART IDENTITY CASCADE;
INSERT INTO one (v) VALUES ('again'), ('and again');
INSERT INTO two (one) VALUES (1);
INSERT INTO bag VALUES ('after'), ('after');
INSERT INTO root VALUES (50, 1);
COMMIT;
BEGIN;
TRUNCATE kept;
INSERT INTO kept VALUES (100);
ROLLBACK;
""",
            """
BEGIN;
TRUNCATE root;
INSERT INTO root VALUES (7, 1), (7, 2);
SAVEPOINT s;
TRUNCATE one CASCADE;
ROLLBACK TO s;
UPDATE one SET v = v || '!';
PREPARE TRANSACTION 'truncates';
COMMIT PREPARED 'truncates';
TRUNCATE bag;
TRUNCATE bag;
""",
        ),
    ),
    "transactions": Case(
        """
CREATE TABLE t (id int PRIMARY KEY, n int, v text);
CREATE TABLE bag (n int);
ALTER TABLE bag REPLICA IDENTITY FULL;
INSERT INTO t SELECT i, 0, 'first' FROM generate_series(1, 20) i;
INSERT INTO bag SELECT i % 3 FROM generate_series(1, 9) i;
""",
        (
            """
BEGIN;
COMMIT;
BEGIN;
SELECT txid_current();
COMMIT;
BEGIN;
UPDATE t SET n = n + 1 WHERE id = 1;
UPDATE t SET n = n + 1 WHERE id = 1;
UPDATE t SET id = 101 WHERE id = 1;
UPDATE t SET n = n + 1 WHERE id = 101;
UPDATE t SET id = 1 WHERE id = 101;
UPDATE t SET n = n + 1 WHERE id = 1;
DELETE FROM t WHERE id = 2;
INSERT INTO t VALUES (2, 7, 'new');
DELETE FROM t WHERE id = 2;
INSERT INTO t VALUES (2, 8, 'newer');
INSERT INTO t VALUES (200, 1, 'gone at once');
DELETE FROM t WHERE id = 200;
UPDATE bag SET n = n + 1;
UPDATE bag SET n = n - 1;
UPDATE bag SET n = n + 1 WHERE n = 0;
COMMIT;
BEGIN;
SAVEPOINT a;
UPDATE t SET v = 'never' WHERE id = 3;
SAVEPOINT b;
INSERT INTO t VALUES (300, 0, 'never');
ROLLBACK TO a;
UPDATE t SET v = 'in a' WHERE id = 3;
SAVEPOINT c;
DELETE FROM t WHERE id = 4;
RELEASE c;
SAVEPOINT d;
DELETE FROM t;
ROLLBACK TO d;
RELEASE a;
COMMIT;
BEGIN;
DELETE FROM t;
ROLLBACK;
BEGIN;
UPDATE t SET id = id + 1000 WHERE id > 15;
DELETE FROM bag WHERE n = 2;
SAVEPOINT s;
DELETE FROM t;
ROLLBACK TO s;
PREPARE TRANSACTION 'kept';
BEGIN;
DELETE FROM t WHERE id < 10;
PREPARE TRANSACTION 'given up';
""",
            """
COMMIT PREPARED 'kept';
ROLLBACK PREPARED 'given up';
BEGIN;
UPDATE t SET id = -id;
UPDATE t SET id = -id;
UPDATE t SET id = -id WHERE id > 1000;
COMMIT;
DO $$ BEGIN FOR i IN 1 .. 200 LOOP UPDATE t SET n = n + 1 WHERE id = 5 ; END LOOP ; END $$;
""",
        ),
    ),
    "merges": Case(
        """
CREATE TABLE t (id int PRIMARY KEY, code text UNIQUE, n int DEFAULT 0);
CREATE TABLE bag (id int, n int);
ALTER TABLE bag REPLICA IDENTITY FULL;
INSERT INTO t SELECT i, 'c' || i FROM generate_series(1, 20) i;
INSERT INTO bag SELECT i % 5, i % 2 FROM generate_series(1, 20) i;
""",
        (
            """
MERGE INTO t USING (SELECT g AS id FROM generate_series(15, 25) g) s ON t.id = s.id
  WHEN MATCHED AND s.id % 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET n = s.id, id = t.id + 100
  WHEN NOT MATCHED THEN INSERT VALUES (s.id, 'm' || s.id, 1);
MERGE INTO bag USING (VALUES (1), (2), (9)) s (id) ON bag.id = s.id
  WHEN MATCHED AND bag.n = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET n = 50
  WHEN NOT MATCHED THEN INSERT VALUES (s.id, 9);
INSERT INTO t VALUES (1, 'c1', 5), (2, 'x', 5) ON CONFLICT (id) DO UPDATE SET n = excluded.n, code = t.code || '+';
INSERT INTO t VALUES (500, 'c5', 5) ON CONFLICT (code) DO UPDATE SET id = excluded.id;
INSERT INTO t VALUES (6, 'whatever', 5), (600, 'c7', 5) ON CONFLICT DO NOTHING;
""",
            """
BEGIN;
INSERT INTO t VALUES (3, 'c3', 9) ON CONFLICT (id) DO UPDATE SET id = t.id + 1000, code = NULL;
MERGE INTO t USING t s ON t.id = s.id + 1 WHEN MATCHED THEN UPDATE SET n = t.n + s.id;
PREPARE TRANSACTION 'merged';
COMMIT PREPARED 'merged';
INSERT INTO bag SELECT * FROM bag;
""",
        ),
    ),
    "written_elsewhere": Case(
        f"""
CREATE TABLE t (id int PRIMARY KEY, v text, big text);
CREATE TABLE u (id int PRIMARY KEY, t int, v text);
ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
INSERT INTO t SELECT i, 't' || i, {LARGE.format("i")} FROM generate_series(1, 10) i;
INSERT INTO u SELECT i, i % 5, 'u' || i FROM generate_series(1, 10) i;
""",
        (
            """
INSERT INTO t SELECT id + 100, v, big FROM t;
UPDATE t SET v = u.v FROM u WHERE u.t = t.id;
DELETE FROM t USING u WHERE t.id = u.id + 100 AND u.t = 1;
WITH gone AS (DELETE FROM t WHERE id IN (2, 3) RETURNING *), moved AS (
  INSERT INTO u SELECT id + 1000, id, v FROM gone RETURNING id)
  UPDATE t SET v = 'counted ' || (SELECT count(*) FROM moved) WHERE id = 5;
BEGIN;
DECLARE c CURSOR FOR SELECT * FROM t WHERE id > 5 ORDER BY id FOR UPDATE;
MOVE 2 FROM c;
FETCH 1 FROM c;
UPDATE t SET v = 'current' WHERE CURRENT OF c;
FETCH 1 FROM c;
DELETE FROM t WHERE CURRENT OF c;
COMMIT;
SELECT * INTO TEMP TABLE private FROM t;
""",
            """
BEGIN;
UPDATE t SET id = t.id + 1000 FROM u WHERE u.id = t.id;
WITH x AS (UPDATE u SET id = id + 10 WHERE id > 1000 RETURNING id) INSERT INTO t SELECT id + 5000, 'x', NULL FROM x;
PREPARE TRANSACTION 'elsewhere';
COMMIT PREPARED 'elsewhere';
""",
        ),
    ),
}
