"""A schema with every kind of dependency between objects, each between tables of every relation of sizes.

A restore creates some objects by the sizes of their tables, so what depends on what must not follow from a size.
"""

from __future__ import annotations

# Rows of the table that depends, and of the one that it depends on. 2,000 rows have more pages than 20 by any order.
SIZES = {"larger": (2_000, 20), "smaller": (20, 2_000), "same": (500, 500)}

# `{n}` is the schema of one relation of sizes, `{own}` and `{other}` are the rows of both sides.
OF_EACH_SIZE = """
CREATE SCHEMA {n};
SET search_path = {n};
CREATE FUNCTION clean(t text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT lower(t)';
-- It names the other one without a schema: sessions of the database find it, one with an empty search_path does not.
CREATE FUNCTION norm(t text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT replace(clean(t), ''x'', ''y'')';
CREATE FUNCTION slow(t text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN clean(t); END';
CREATE TYPE mood AS ENUM ('bad', 'good');
CREATE DOMAIN short AS text CHECK (length(norm(VALUE)) < 100);
CREATE TYPE pair AS (a int, b text);
CREATE TYPE spread AS RANGE (subtype = float8, subtype_diff = float8mi);
CREATE COLLATION plain (provider = libc, locale = 'C');
CREATE SEQUENCE shared START 1000000;

CREATE TABLE customer (id uuid PRIMARY KEY, email text UNIQUE, code int NOT NULL, CONSTRAINT by_code UNIQUE (code, id));
CREATE UNIQUE INDEX customer_lower ON customer (lower(email));
INSERT INTO customer SELECT md5(i::text)::uuid, 'U' || i || '@x', i FROM generate_series(1, {other}) AS i;
CREATE TABLE orders (
    id bigint PRIMARY KEY DEFAULT nextval('shared'),
    customer uuid REFERENCES customer,
    email text REFERENCES customer (email) ON UPDATE CASCADE DEFERRABLE INITIALLY DEFERRED,
    code int, FOREIGN KEY (code, customer) REFERENCES customer (code, id) MATCH FULL,
    label short COLLATE plain, m mood DEFAULT 'good', p pair, s spread,
    n text GENERATED ALWAYS AS (norm(label)) STORED,
    CHECK (slow(label) <> 'never'), EXCLUDE USING gist (s WITH &&)
);
INSERT INTO orders (id, customer, email, code, label, p, s)
SELECT i, md5(k::text)::uuid, 'U' || k || '@x', k, 'L' || i, (i, 'b')::pair, spread(i, i + 0.5)
  FROM generate_series(1, {own}) AS i, LATERAL (SELECT 1 + i % {other}) AS of (k);
CREATE INDEX orders_customer ON orders (customer) INCLUDE (id);
ALTER TABLE orders CLUSTER ON orders_customer;
ALTER TABLE orders ADD CONSTRAINT late CHECK (norm(label) IS NOT NULL) NOT VALID;

-- References to itself, in a circle, and through keys that are no constraints' own.
CREATE TABLE person (id int PRIMARY KEY, boss int REFERENCES person, team int);
CREATE TABLE team (id int PRIMARY KEY, lead int REFERENCES person);
INSERT INTO person SELECT i, nullif(i / 2, 0), NULL FROM generate_series(1, {own}) AS i;
INSERT INTO team SELECT i, 1 + i % {own} FROM generate_series(1, {other}) AS i;
UPDATE person SET team = 1 + id % {other};
ALTER TABLE person ADD FOREIGN KEY (team) REFERENCES team;
CREATE TABLE login (email text REFERENCES customer (email), n int, PRIMARY KEY (email, n));
INSERT INTO login SELECT email, n FROM customer, generate_series(1, 2) AS n WHERE code <= {own};

-- Partitions that refer, and are referred to.
CREATE TABLE event (id int, at int, customer uuid REFERENCES customer, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
CREATE TABLE event_low PARTITION OF event FOR VALUES FROM (0) TO (10);
CREATE TABLE event_high PARTITION OF event FOR VALUES FROM (10) TO (20) PARTITION BY HASH (id);
CREATE TABLE event_high_0 PARTITION OF event_high FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE event_high_1 PARTITION OF event_high FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE TABLE of_event (event int, at int, low int, FOREIGN KEY (event, at) REFERENCES event);
INSERT INTO event SELECT i, i % 20, md5((1 + i % {other})::text)::uuid FROM generate_series(1, {other}) AS i;
INSERT INTO of_event SELECT 1 + i % {other}, (1 + i % {other}) % 20, i FROM generate_series(1, {own}) AS i;
CREATE INDEX ON event (customer);
CREATE INDEX ON of_event (low);
CREATE INDEX event_low_only ON event_low (at);

-- Inheritance, views on views, materialized ones with indexes, rules and policies.
CREATE TABLE base (id int PRIMARY KEY, t text DEFAULT clean('D') CHECK (t <> ''));
CREATE TABLE heir (more int REFERENCES customer_number, PRIMARY KEY (id)) INHERITS (base);
CREATE VIEW open_orders AS SELECT id, norm(label) AS label, customer FROM orders WHERE m = 'good';
CREATE VIEW by_customer AS SELECT c.*, o.label FROM customer c JOIN open_orders o ON o.customer = c.id;
CREATE VIEW good_orders AS SELECT id, customer FROM orders WHERE m = 'good';
CREATE MATERIALIZED VIEW counted AS SELECT customer, count(*) AS n FROM good_orders GROUP BY customer;
CREATE UNIQUE INDEX counted_customer ON counted (customer);
CREATE MATERIALIZED VIEW counted_again AS SELECT n, count(*) AS times FROM counted GROUP BY n;
CREATE INDEX ON counted_again (times);
CREATE RULE keep AS ON DELETE TO person WHERE old.boss IS NULL DO INSTEAD NOTHING;
ALTER TABLE login ENABLE ROW LEVEL SECURITY;
CREATE POLICY own ON login USING (email = clean(current_user) AND EXISTS (SELECT FROM customer));

-- What functions, operators, aggregates and text search are made of.
CREATE FUNCTION first_of(a anyelement, b anyelement) RETURNS anyelement LANGUAGE sql IMMUTABLE
    AS 'SELECT coalesce(a, b)';
CREATE AGGREGATE first (anyelement) (SFUNC = first_of, STYPE = anyelement);
CREATE OPERATOR === (LEFTARG = text, RIGHTARG = text, FUNCTION = texteq, COMMUTATOR = ===);
CREATE OPERATOR CLASS by_length FOR TYPE text USING btree AS
    OPERATOR 1 <, OPERATOR 2 <=, OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 bttextcmp (text, text);
CREATE INDEX orders_by_length ON orders (label by_length);
CREATE TEXT SEARCH DICTIONARY simple_one (TEMPLATE = simple, STOPWORDS = english);
CREATE TEXT SEARCH CONFIGURATION simple_one (COPY = simple);
ALTER TEXT SEARCH CONFIGURATION simple_one ALTER MAPPING FOR asciiword WITH simple_one;
CREATE INDEX orders_words ON orders USING gin (to_tsvector('{n}.simple_one', label::text));
CREATE VIEW firsts AS SELECT customer, first(label::text ORDER BY id) AS label FROM orders GROUP BY customer;
CREATE FUNCTION touched() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM clean(''x''); RETURN new; END';
CREATE TRIGGER touched BEFORE UPDATE ON orders FOR EACH ROW WHEN (new.label::text === 'x') EXECUTE FUNCTION touched();
CREATE CONSTRAINT TRIGGER checked AFTER INSERT ON person DEFERRABLE FOR EACH ROW EXECUTE FUNCTION touched();
CREATE TABLE typed OF pair (PRIMARY KEY (a));
INSERT INTO typed SELECT i, 'b' FROM generate_series(1, {own}) AS i;
CREATE TABLE of_rows (id int PRIMARY KEY, o orders, e event[]);
INSERT INTO of_rows SELECT 1, o, NULL FROM orders o LIMIT 1;
CREATE TABLE numbered (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, t text);
INSERT INTO numbered (t) SELECT 'n' FROM generate_series(1, {own});
CREATE TABLE index_identity (a int NOT NULL, b text);
CREATE UNIQUE INDEX index_identity_a ON index_identity (a);
ALTER TABLE index_identity REPLICA IDENTITY USING INDEX index_identity_a;
INSERT INTO index_identity SELECT i, 'b' FROM generate_series(1, {own}) AS i;
ALTER TABLE of_event REPLICA IDENTITY FULL;
-- Its body depends on the primary key, and so does the default on that.
CREATE TABLE ranked (id int PRIMARY KEY, v text);
INSERT INTO ranked SELECT i, 'v' || i FROM generate_series(1, {own}) AS i;
CREATE FUNCTION best(i int) RETURNS text LANGUAGE sql STABLE
  BEGIN ATOMIC SELECT v FROM ranked WHERE id = i GROUP BY id; END;
CREATE TABLE of_best (id int PRIMARY KEY, v text DEFAULT best(1));
INSERT INTO of_best (id) SELECT i FROM generate_series(1, {own}) AS i;
-- pg_dump leaves the table before the domain, or after it, depending on names.
CREATE TABLE ranked_twice (id int PRIMARY KEY, v text);
CREATE FUNCTION second_best(i int) RETURNS text LANGUAGE sql STABLE
  BEGIN ATOMIC SELECT v FROM ranked_twice WHERE id = i GROUP BY id; END;
CREATE DOMAIN best_value AS text DEFAULT second_best(1);
CREATE TABLE of_domain (id int PRIMARY KEY, v best_value);
INSERT INTO ranked_twice SELECT i, 'v' || i FROM generate_series(1, {own}) AS i;
INSERT INTO of_domain (id) SELECT i FROM generate_series(1, {own}) AS i;
-- Last: from 17 on no materialized view can be made of a table with it.
CREATE STATISTICS orders_norm ON id, (norm(label)) FROM orders;
"""
# Numbers of customers, as a key that a child of an inherited table refers to.
NUMBERS = """CREATE TABLE customer_number (id int PRIMARY KEY);
INSERT INTO customer_number SELECT code FROM customer;
"""
ONCE = """
CREATE FUNCTION public.note() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN PERFORM 1; END';
CREATE EVENT TRIGGER note ON ddl_command_end EXECUTE FUNCTION public.note();
"""
# From 17 on an index on such functions can't be made, but one that an older server had is kept by an upgrade.
UNTIL_16 = """
CREATE INDEX orders_label_norm ON {n}.orders ({n}.norm(label));
CREATE INDEX orders_slow ON {n}.orders ({n}.slow(label)) WHERE m = 'good';
CREATE MATERIALIZED VIEW {n}.normed AS SELECT {n}.norm(label) AS label FROM {n}.orders;
"""


def script_of(version: int) -> str:
    """The script that makes the schema, with rows, on a server of this version (server_version)."""
    scripts = []
    for name, (own, other) in SIZES.items():
        script = OF_EACH_SIZE.replace("CREATE TABLE orders (", NUMBERS + "CREATE TABLE orders (", 1)
        scripts.append(script.format(n=name, own=own, other=other))
        if version < 170000:
            scripts.append(UNTIL_16.format(n=name))
    return "\n".join([*scripts, ONCE])
