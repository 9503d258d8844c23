-- What changes no definition: rows, values of sequences.
SET search_path = app, ext;
SELECT current_setting('server_version_num')::int >= 170000 AS has_17 \gset
\if :has_17
ALTER EVENT TRIGGER defs_login DISABLE;
\endif
INSERT INTO "Odd ""X"" Schema"."Parent; -- x" SELECT n, 'p' || n FROM generate_series(1, 5) n;
INSERT INTO plain (v, m, p, w, h, big, sp, pa) SELECT 'v' || n, 'happy,"x"', n, 'W' || n, 'a=>1', repeat('x', n), '[1,2)', (n, 'y')::pair
  FROM generate_series(1, 20) n;
INSERT INTO child (parent) SELECT n FROM generate_series(1, 5) n;
UPDATE child SET self = NULL WHERE id > 2;
INSERT INTO booking SELECT n, n, tsrange('2026-01-01', '2026-01-02') FROM generate_series(1, 40) n;
INSERT INTO bag VALUES (1, 'b'), (1, 'b'), (NULL, 'c');
INSERT INTO no_columns DEFAULT VALUES;
INSERT INTO other_access VALUES (1, 'x');
INSERT INTO of_type VALUES (1);
INSERT INTO measured SELECT n, date '2026-01-15' + 20 * (n % 6), chr(97 + n % 3) FROM generate_series(1, 40) n;
INSERT INTO by_mood SELECT m, n FROM unnest(enum_range(NULL::mood)) m, generate_series(1, 7) n;
INSERT INTO ancestor VALUES (1, 'a');
INSERT INTO uncle VALUES ('w', 'v');
INSERT INTO heir VALUES (2, 'h', 'w', 3);
INSERT INTO secret SELECT n FROM generate_series(1, 9) n;
SELECT nextval('down'), nextval('down'), nextval('top'), nextval('top');
SELECT nextval('round') FROM generate_series(1, 7);
SELECT setval('set_unused', 77, false), setval('"Odd ""X"" Schema"."a ""seq"" % s"', 12);
REFRESH MATERIALIZED VIEW z_first;
REFRESH MATERIALIZED VIEW a_second;
REFRESH MATERIALIZED VIEW "m ""third""";
