"""The database of the matrix: ordinary tables of every size relation, their indexes and keys, and how they change.

A referencing table has more pages than the one that it references, or less: which of two is larger decides what a
restore begins with.
"""

from __future__ import annotations

SCHEMA = (
    "CREATE EXTENSION pg_trgm",
    "CREATE EXTENSION btree_gist",
    "CREATE TYPE progress AS ENUM ('open', 'paid')",
    "CREATE DOMAIN money_amount AS numeric(12, 2) CHECK (value >= 0)",
    "CREATE FUNCTION weight(n int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT n * 2'",
    "CREATE TABLE customer (id uuid PRIMARY KEY, email text UNIQUE, note text COMPRESSION lz4, born date)",
    """CREATE TABLE orders (
           id bigint PRIMARY KEY, customer uuid REFERENCES customer, total money_amount, state progress DEFAULT 'open',
           doubled numeric GENERATED ALWAYS AS (total * 2) STORED, weighed int CHECK (weight(weighed) >= 0))""",
    "CREATE INDEX ON orders (customer)",
    "CREATE INDEX ON orders (weight(weighed)) WHERE state = 'open'",
    """CREATE TABLE line (
           orders bigint REFERENCES orders ON DELETE CASCADE, number int, article text NOT NULL, price numeric,
           PRIMARY KEY (orders, number))""",
    "CREATE INDEX ON line USING gin (article gin_trgm_ops)",
    # Smaller than what it references, and two that reference each other.
    "CREATE TABLE favourite (orders bigint PRIMARY KEY REFERENCES orders, line int, FOREIGN KEY (orders, line) "
    "REFERENCES line)",
    "CREATE TABLE employee (id int PRIMARY KEY, boss int REFERENCES employee, team int)",
    "CREATE TABLE team (id int PRIMARY KEY, head int REFERENCES employee DEFERRABLE INITIALLY DEFERRED)",
    "ALTER TABLE employee ADD FOREIGN KEY (team) REFERENCES team",
    """CREATE TABLE visit (id int, at date, customer uuid REFERENCES customer, PRIMARY KEY (id, at))
           PARTITION BY RANGE (at)""",
    "CREATE TABLE visit_1 PARTITION OF visit FOR VALUES FROM ('2026-01-01') TO ('2026-02-01')",
    "CREATE TABLE visit_2 PARTITION OF visit FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')",
    "CREATE INDEX ON visit (customer)",
    "CREATE TABLE booking (room int, during daterange, EXCLUDE USING gist (room WITH =, during WITH &&))",
    "ALTER TABLE booking REPLICA IDENTITY FULL",
    "CREATE TABLE journal (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, what text, paper xml, at timestamptz)",
    """CREATE FUNCTION journalize() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           INSERT INTO public.journal (what) VALUES (TG_OP || NEW.id); RETURN NEW; END $$""",
    "CREATE VIEW paid AS SELECT customer.email, sum(total) FROM orders JOIN customer ON customer.id = customer "
    "WHERE state = 'paid' GROUP BY 1",
    "CREATE MATERIALIZED VIEW totals AS SELECT customer, sum(total) AS total FROM orders GROUP BY 1",
    "CREATE UNIQUE INDEX ON totals (customer)",
    "CREATE STATISTICS of_orders (dependencies, ndistinct) ON customer, state FROM orders",
    "ALTER TABLE customer ENABLE ROW LEVEL SECURITY",
    "CREATE POLICY everybody ON customer USING (born IS NOT NULL)",
    "CREATE SEQUENCE numbers INCREMENT 5",
    "COMMENT ON COLUMN orders.total IS 'with tax'",
    """INSERT INTO customer SELECT md5(n::text)::uuid, 'c' || n || '@example.org', repeat('note ' || n, 400),
           date '2000-01-01' + n FROM generate_series(1, 100) AS n""",
    """INSERT INTO orders (id, customer, total, state, weighed)
           SELECT n, md5((n % 100 + 1)::text)::uuid, n, CASE WHEN n % 3 = 0 THEN 'paid' ELSE 'open' END::progress, n % 7
           FROM generate_series(1, 2000) AS n""",
    "INSERT INTO line SELECT n, number, 'article ' || n * number, n FROM generate_series(1, 2000) n, "
    "generate_series(1, 3) number",
    "INSERT INTO favourite SELECT n, 1 FROM generate_series(10, 2000, 10) AS n",
    "INSERT INTO employee SELECT n, nullif(n / 2, 0) FROM generate_series(1, 300) AS n",
    "INSERT INTO team SELECT n, n * 10 FROM generate_series(1, 20) AS n",
    "UPDATE employee SET team = id % 20 + 1",
    """INSERT INTO visit SELECT n, date '2026-01-01' + n % 59, md5((n % 100 + 1)::text)::uuid
           FROM generate_series(1, 1000) AS n""",
    "INSERT INTO booking SELECT n % 5, daterange(date '2026-01-01' + n, date '2026-01-02' + n) "
    "FROM generate_series(1, 100) AS n",
    "INSERT INTO journal (what, paper, at) SELECT 'n' || n, xmlelement(name n, n), '2026-03-29 01:30+00' "
    "FROM generate_series(1, 50) AS n",
    "CREATE TRIGGER journalized AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION journalize()",
    "REFRESH MATERIALIZED VIEW totals",
    "SELECT nextval('numbers') FROM generate_series(1, 7)",
)
# Before each increment: rows, and definitions that continue, that are copied again, and that are new.
CHANGES = (
    (
        "ALTER TABLE customer ADD tier int DEFAULT 3",
        "UPDATE customer SET tier = tier + 1 WHERE born > '2000-03-01'",
        "UPDATE orders SET state = 'paid' WHERE id % 5 = 0",
        "DELETE FROM favourite WHERE orders % 40 = 0",
        "DELETE FROM orders WHERE id % 40 = 0",
        "CREATE TABLE coupon (code text PRIMARY KEY, customer uuid REFERENCES customer, value int)",
        "INSERT INTO coupon SELECT 'code' || n, md5((n % 100 + 1)::text)::uuid, n FROM generate_series(1, 3000) AS n",
        "ALTER TABLE line ALTER price TYPE double precision",
        "CREATE INDEX ON line (price)",
        "REFRESH MATERIALIZED VIEW totals",
        "SELECT nextval('numbers')",
    ),
    (
        "ALTER TYPE progress ADD VALUE 'sent'",
        "UPDATE orders SET state = 'sent' WHERE id % 7 = 0",
        "ALTER TABLE line RENAME article TO sku",
        "UPDATE line SET sku = sku || '!' WHERE number = 2",
        "CREATE TABLE visit_3 PARTITION OF visit FOR VALUES FROM ('2026-03-01') TO ('2026-04-01')",
        "INSERT INTO visit SELECT n, '2026-03-05', md5('7')::uuid FROM generate_series(2001, 2900) AS n",
        "TRUNCATE journal",
        "ALTER TABLE journal DROP paper",
        "DROP TABLE booking",
        "UPDATE coupon SET value = value + 1 WHERE value % 2 = 0",
        "ALTER TABLE team DROP CONSTRAINT team_head_fkey",
        "BEGIN; INSERT INTO coupon VALUES ('prepared', NULL, 1); PREPARE TRANSACTION 'of the shop'",
        "COMMIT PREPARED 'of the shop'",
    ),
)
# Before the increment of a chain that began after these.
LATER = (
    "ALTER TABLE coupon ADD CONSTRAINT positive CHECK (value > 0)",
    "ALTER TABLE coupon ADD until date DEFAULT '2027-01-01'",
    "UPDATE coupon SET until = NULL WHERE value % 3 = 0",
    "CREATE TABLE refund (orders bigint PRIMARY KEY REFERENCES orders, amount money_amount)",
    "INSERT INTO refund SELECT id, total FROM orders WHERE id % 2 = 1",
    "DELETE FROM visit WHERE at < '2026-01-15'",
)
