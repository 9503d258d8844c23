"""Statements that change more than they name: cascades, triggers, rows that move; the form is statement_cases'."""

from __future__ import annotations

from tests.tables.statement_cases import LARGE, Case

CONSEQUENCE_CASES: dict[str, Case] = {
    "cascades": Case(
        """
CREATE TABLE a (id int PRIMARY KEY, v text);
CREATE TABLE gone (id int PRIMARY KEY, a int REFERENCES a ON DELETE CASCADE ON UPDATE CASCADE);
CREATE TABLE below (gone int REFERENCES gone ON DELETE CASCADE ON UPDATE CASCADE, n int, PRIMARY KEY (gone, n));
CREATE TABLE emptied (id int PRIMARY KEY, a int REFERENCES a ON DELETE SET NULL ON UPDATE CASCADE);
CREATE TABLE preset (id int PRIMARY KEY, a int DEFAULT 1 REFERENCES a ON DELETE SET DEFAULT ON UPDATE SET NULL);
CREATE TABLE late (id int PRIMARY KEY, a int REFERENCES a DEFERRABLE INITIALLY DEFERRED);
INSERT INTO a SELECT i, 'a' FROM generate_series(1, 9) i;
INSERT INTO gone SELECT i, i FROM generate_series(1, 9) i;
INSERT INTO below SELECT i, 1 FROM generate_series(1, 9) i;
INSERT INTO emptied SELECT i, i FROM generate_series(1, 9) i;
INSERT INTO preset SELECT i, i FROM generate_series(1, 9) i;
INSERT INTO late VALUES (1, 9);
""",
        (
            """
DELETE FROM a WHERE id IN (2, 3);
UPDATE a SET id = id + 100 WHERE id IN (4, 5);
UPDATE gone SET id = id + 100 WHERE id = 6;
BEGIN;
INSERT INTO late VALUES (2, 50);
INSERT INTO a VALUES (50, 'late');
COMMIT;
""",
            """
BEGIN;
DELETE FROM a WHERE id = 104;
UPDATE a SET id = 1000 WHERE id = 105;
PREPARE TRANSACTION 'cascaded';
COMMIT PREPARED 'cascaded';
""",
        ),
    ),
    "triggers": Case(
        """
CREATE TABLE t (id int PRIMARY KEY, v text, changed int DEFAULT 0);
CREATE TABLE journal (at serial PRIMARY KEY, what text, was text, now text);
CREATE TABLE ruled (id int PRIMARY KEY, v text);
CREATE TABLE shadow (id int PRIMARY KEY, v text);
CREATE VIEW seen AS SELECT id, v FROM t WHERE id < 100 WITH CHECK OPTION;
CREATE VIEW both_tables AS SELECT t.id, t.v, s.v AS shadow FROM t LEFT JOIN shadow s USING (id);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
INSERT INTO triggers.journal (what, was, now) VALUES (tg_op, old.v, new.v) ; RETURN NULL ; END';
CREATE FUNCTION counted() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
new.changed := old.changed + 1 ; RETURN new ; END';
CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
RETURN CASE WHEN old.id = 9 THEN NULL ELSE old END ; END';
CREATE FUNCTION spread() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
INSERT INTO triggers.t (id, v) VALUES (new.id, new.v) ; INSERT INTO triggers.shadow
VALUES (new.id, new.shadow) ; RETURN new ; END';
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION note();
CREATE TRIGGER count BEFORE UPDATE ON t FOR EACH ROW EXECUTE FUNCTION counted();
CREATE TRIGGER skip BEFORE DELETE ON t FOR EACH ROW EXECUTE FUNCTION skip();
CREATE TRIGGER spread INSTEAD OF INSERT ON both_tables FOR EACH ROW EXECUTE FUNCTION spread();
CREATE RULE copied AS ON INSERT TO ruled DO ALSO INSERT INTO shadow VALUES (new.id + 1000, new.v);
CREATE RULE kept AS ON DELETE TO ruled DO INSTEAD UPDATE ruled SET v = 'deleted' WHERE id = old.id;
INSERT INTO t (id, v) SELECT i, 'v' || i FROM generate_series(1, 9) i;
INSERT INTO ruled VALUES (1, 'one'), (2, 'two');
""",
        (
            """
UPDATE t SET v = v || '+' WHERE id < 4;
DELETE FROM t WHERE id > 7;
INSERT INTO ruled VALUES (3, 'three');
DELETE FROM ruled WHERE id = 1;
INSERT INTO seen VALUES (20, 'seen');
UPDATE seen SET v = 'through the view' WHERE id = 20;
DELETE FROM seen WHERE id = 5;
INSERT INTO both_tables VALUES (30, 'a', 'b');
""",
            """
BEGIN;
UPDATE seen SET id = id + 40;
INSERT INTO both_tables VALUES (31, 'c', 'd');
DELETE FROM ruled;
PREPARE TRANSACTION 'triggered';
COMMIT PREPARED 'triggered';
""",
        ),
    ),
    "partitions": Case(
        f"""
CREATE TABLE root (id int, region text, day date, big text, PRIMARY KEY (id, region, day)) PARTITION BY LIST (region);
CREATE TABLE north PARTITION OF root FOR VALUES IN ('n') PARTITION BY RANGE (day);
CREATE TABLE north_1 PARTITION OF north FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
CREATE TABLE north_2 (big text, gone int, day date NOT NULL, region text NOT NULL, id int NOT NULL);
ALTER TABLE north_2 DROP gone, ADD PRIMARY KEY (id, region, day);
ALTER TABLE north ATTACH PARTITION north_2 FOR VALUES FROM ('2026-02-01') TO ('2026-03-01');
CREATE TABLE rest PARTITION OF root DEFAULT;
CREATE TABLE hashed (id int PRIMARY KEY, v text) PARTITION BY HASH (id);
CREATE TABLE hashed_0 PARTITION OF hashed FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE hashed_1 PARTITION OF hashed FOR VALUES WITH (MODULUS 2, REMAINDER 1);
ALTER TABLE root ALTER big SET STORAGE EXTERNAL;
INSERT INTO root SELECT i, CASE i % 3 WHEN 0 THEN 'n' ELSE 's' || i END, '2026-01-28'::date + i % 7, {LARGE.format("i")}
  FROM generate_series(1, 20) i;
INSERT INTO hashed SELECT i, 'h' FROM generate_series(1, 20) i;
""",
        (
            """
UPDATE root SET region = 'n' WHERE id < 4;
UPDATE root SET day = day + 3 WHERE region = 'n' AND day < '2026-02-10';
UPDATE hashed SET id = id + 101;
""",
            """
BEGIN;
UPDATE root SET region = 'far', id = id + 100 WHERE region = 'n';
UPDATE hashed SET id = id + 1000;
DELETE FROM root WHERE id = 8;
PREPARE TRANSACTION 'moved';
COMMIT PREPARED 'moved';
""",
        ),
    ),
    "keys": Case(
        f"""
CREATE TABLE composite (v text, c int, b text, a date, PRIMARY KEY (b, a, c));
CREATE TABLE by_index (id int PRIMARY KEY, a text NOT NULL, b int NOT NULL, v text, n int);
CREATE UNIQUE INDEX by_index_key ON by_index (b, a) INCLUDE (v);
CREATE UNIQUE INDEX by_index_lower ON by_index (lower(a), b);
CREATE INDEX by_index_partial ON by_index (n) WHERE n > 5;
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key;
CREATE TABLE bag (a int, b text, big text);
ALTER TABLE bag REPLICA IDENTITY FULL;
ALTER TABLE bag ALTER big SET STORAGE EXTERNAL;
CREATE TABLE full_with_key (id int PRIMARY KEY, v text);
ALTER TABLE full_with_key REPLICA IDENTITY FULL;
CREATE TABLE late (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, other int NOT NULL UNIQUE, v text);
ALTER TABLE late REPLICA IDENTITY USING INDEX late_other_key;
CREATE TABLE only_keys (a int, b text, PRIMARY KEY (b, a));
CREATE TABLE equal_keys (n numeric PRIMARY KEY, v int);
CREATE TABLE equal_intervals (i interval, f float8, v int, PRIMARY KEY (i, f));
CREATE TABLE long_key (v text, key text PRIMARY KEY, big text);
ALTER TABLE long_key ALTER key SET STORAGE EXTERNAL, ALTER big SET STORAGE EXTERNAL;
CREATE TABLE no_columns ();
ALTER TABLE no_columns REPLICA IDENTITY FULL;
CREATE TABLE no_rows (id int PRIMARY KEY);
INSERT INTO composite SELECT 'v' || i, i, 'b' || i % 3, '2026-01-01'::date + i % 4 FROM generate_series(1, 20) i;
INSERT INTO by_index SELECT i, 'A' || i % 5, i, 'v' || i, i FROM generate_series(1, 20) i;
INSERT INTO bag SELECT i % 3, NULLIF('b' || i % 2, 'b0'), CASE i % 4 WHEN 0 THEN {LARGE.format("i % 8")} END
  FROM generate_series(1, 24) i;
INSERT INTO full_with_key SELECT i, 'v' FROM generate_series(1, 9) i;
INSERT INTO late SELECT i, -i, 'v' FROM generate_series(1, 9) i;
INSERT INTO only_keys SELECT i, 'b' || i % 2 FROM generate_series(1, 9) i;
INSERT INTO equal_keys VALUES (1.0, 1), (0, 2), ('NaN', 3);
INSERT INTO equal_intervals VALUES ('1 mon', 0, 1), ('1 day', '-0', 2);
INSERT INTO long_key SELECT 'v' || i, left({LARGE.format("i")}, 2400) || i, {LARGE.format("-i")}
  FROM generate_series(1, 9) i;
INSERT INTO no_columns SELECT FROM generate_series(1, 5);
""",
        (
            f"""
UPDATE composite SET v = v || '+' WHERE c < 5;
UPDATE composite SET b = 'moved' WHERE c = 5;
UPDATE composite SET a = a + 1, v = 'both' WHERE c = 6;
DELETE FROM composite WHERE c = 7;
INSERT INTO composite SELECT 'again', c, b, a + 100 FROM composite WHERE c > 15;
UPDATE by_index SET id = id + 100 WHERE id = 1;
UPDATE by_index SET v = 'included' WHERE id = 2;
UPDATE by_index SET a = 'moved' WHERE id = 3;
DELETE FROM by_index WHERE id = 4;
UPDATE bag SET a = a + 1 WHERE b IS NULL;
UPDATE bag SET big = {LARGE.format("5")} WHERE a = 2 AND big IS NOT NULL;
DELETE FROM bag WHERE ctid IN (SELECT min(ctid) FROM bag GROUP BY a);
INSERT INTO bag SELECT * FROM bag WHERE a = 1;
UPDATE full_with_key SET id = id + 100, v = 'w' WHERE id < 4;
BEGIN;
UPDATE late SET id = CASE id WHEN 1 THEN 2 ELSE 1 END WHERE id < 3;
COMMIT;
UPDATE late SET other = other - 100 WHERE id = 3;
UPDATE only_keys SET a = a + 10 WHERE b = 'b1';
DELETE FROM only_keys WHERE a = 2;
UPDATE equal_keys SET n = 1.00 WHERE n = 1;
UPDATE equal_keys SET n = 0.000, v = 20 WHERE n = 0;
UPDATE equal_intervals SET i = '30 days' WHERE i = '1 mon';
UPDATE equal_intervals SET f = 0 WHERE f = 0;
UPDATE long_key SET v = v || '+';
UPDATE long_key SET key = 'short' WHERE v = 'v1+';
UPDATE long_key SET big = NULL WHERE v = 'v2+';
DELETE FROM no_columns WHERE ctid IN (SELECT ctid FROM no_columns LIMIT 2);
INSERT INTO no_columns DEFAULT VALUES;
""",
            f"""
BEGIN;
UPDATE composite SET c = c + 1000;
UPDATE by_index SET b = b + 1000;
UPDATE equal_keys SET n = '1.0000' WHERE n = 1;
UPDATE equal_keys SET n = '-0' WHERE n = 0;
UPDATE equal_intervals SET i = '720:00:00', f = '-0' WHERE i = '1 mon';
UPDATE long_key SET key = key || 'x', v = 'moved' WHERE length(key) > 2000;
UPDATE bag SET a = 0;
DELETE FROM no_columns;
INSERT INTO no_columns DEFAULT VALUES;
PREPARE TRANSACTION 'keys';
COMMIT PREPARED 'keys';
INSERT INTO equal_keys VALUES (2.50, 7);
DELETE FROM equal_keys WHERE n = 2.5;
INSERT INTO equal_keys VALUES (2.5, 8);
INSERT INTO long_key VALUES ('new', left({LARGE.format("77")}, 2400), 'x');
DELETE FROM long_key WHERE v = 'new';
""",
        ),
    ),
}
