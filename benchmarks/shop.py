"""A shop's database: the realistic rows of the benchmark, their changes, and a hash of their state.

Customers and orders have jsonb, uuid, numeric and timestamps, about 300 bytes in a row that compress five to one. All
values are computed from the row's number, so every run has the same rows.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks.shard import Shard

ORDERS_PER_CUSTOMER = 10
# Each transaction changes this many orders.
ORDERS_PER_TRANSACTION = 1000
# Of the orders, an increment updates this share, inserts a seventh of it, and deletes a seventeenth.
UPDATED = 10
SCHEMA = """
CREATE TABLE customers (
    id bigint NOT NULL, token uuid NOT NULL, email text NOT NULL, name text NOT NULL, profile jsonb NOT NULL,
    credit numeric(12,2) NOT NULL, created_at timestamptz NOT NULL
);
CREATE TABLE orders (
    id bigint NOT NULL, customer bigint NOT NULL, status text NOT NULL, total numeric(12,2) NOT NULL,
    lines jsonb NOT NULL, reference uuid NOT NULL, placed_at timestamptz NOT NULL, shipped_at timestamptz
);
"""
KEYS = """
ALTER TABLE customers ADD PRIMARY KEY (id);
ALTER TABLE customers ADD UNIQUE (email);
ALTER TABLE orders ADD PRIMARY KEY (id);
CREATE INDEX orders_customer ON orders (customer);
CREATE INDEX orders_placed_at ON orders (placed_at);
ALTER TABLE orders ADD FOREIGN KEY (customer) REFERENCES customers;
ANALYZE;
"""
CUSTOMERS_QUERY = """
INSERT INTO customers
SELECT i, md5('token' || i)::uuid, 'customer.' || i || '@' || substr(md5('host' || i % 997), 1, 8) || '.example',
       initcap(substr(md5('first' || i), 1, 7)) || ' ' || initcap(substr(md5('last' || i % 8191), 1, 9)),
       jsonb_build_object('city', 'city ' || i % 4099, 'street', md5('street' || i), 'newsletter', i % 3 = 0,
                          'tags', jsonb_build_array('t' || i % 7, 't' || i % 11)),
       (i * 7919 % 10000000) / 100.0, timestamptz '2019-01-01 00:00:00+00' + i * interval '61.7 seconds'
  FROM generate_series({first}::bigint, {last}) AS i
"""
ORDERS_QUERY = """
INSERT INTO orders
SELECT i, 1 + i * 48271 % {customers}, (ARRAY['new', 'paid', 'packed', 'shipped', 'returned'])[(1 + i % 5)::int],
       (i * 104729 % 99999900) / 100.0,
       jsonb_build_array(
           jsonb_build_object('sku', substr(md5('sku' || i % 30011), 1, 10), 'quantity', 1 + i % 4, 'price', i % 9973),
           jsonb_build_object('sku', substr(md5('sku' || i % 20011), 1, 10), 'quantity', 1 + i % 3,
                              'note', md5(i::text))),
       md5('reference' || i)::uuid, timestamptz '2021-01-01 00:00:00+00' + i * interval '29.3 seconds',
       CASE WHEN i % 5 > 2 THEN timestamptz '2021-01-03 00:00:00+00' + i * interval '31.1 seconds' END
  FROM generate_series({first}::bigint, {last}) AS i
"""
UPDATE_QUERY = """
UPDATE orders SET status = 'round {round}', shipped_at = placed_at + interval '{round} days'
 WHERE id BETWEEN {first} AND {last} AND id % {updated} = {round}
"""
DELETE_QUERY = "DELETE FROM orders WHERE id BETWEEN {first} AND {last} AND id % 170 = {round}"
STATE_QUERY = """
SELECT (SELECT sum(hashtextextended(t::text, 0)) FROM customers t),
       (SELECT sum(hashtextextended(t::text, 0)) FROM orders t), (SELECT count(*) FROM orders)
"""


class Shop:
    """The shop in a shard's database, with about `rows` rows."""

    def __init__(self, shard: Shard, rows: int) -> None:
        self.shard = shard
        self.customers = max(rows // (ORDERS_PER_CUSTOMER + 1), 1)
        self.orders = self.customers * ORDERS_PER_CUSTOMER
        self.round = 0

    def fill(self) -> None:
        """Create the tables and their rows."""
        with self._connect() as connection:
            connection.execute(SCHEMA)
            connection.execute(CUSTOMERS_QUERY.format(first=1, last=self.customers).encode())
            connection.execute(ORDERS_QUERY.format(customers=self.customers, first=1, last=self.orders).encode())
            connection.execute(KEYS)
        self.shard.checkpoint()

    def change(self) -> int:
        """Update, insert and delete orders, in transactions of up to ORDERS_PER_TRANSACTION; return how many."""
        self.round += 1
        changed, through = 0, self.orders
        step = ORDERS_PER_TRANSACTION * UPDATED
        with self._connect() as connection:
            for first in range(1, through + 1, step):
                places = {"first": first, "last": min(first + step - 1, through), "round": self.round}
                for query in (UPDATE_QUERY, DELETE_QUERY):
                    changed += connection.execute(query.format(**places, updated=UPDATED).encode()).rowcount
            inserted = through // UPDATED // 7
            for first in range(through + 1, through + inserted + 1, ORDERS_PER_TRANSACTION):
                last = min(first + ORDERS_PER_TRANSACTION - 1, through + inserted)
                query = ORDERS_QUERY.format(customers=self.customers, first=first, last=last)
                changed += connection.execute(query.encode()).rowcount
            self.orders += inserted
        self.shard.checkpoint()
        return changed

    def state(self, database: str | None = None) -> tuple[Any, ...]:
        """Return a value that identifies the state of all rows."""
        return self.shard.ask(STATE_QUERY, database)

    def _connect(self) -> psycopg.Connection:
        # Neither the fill nor the changes are measured, so their commits don't wait for the disk.
        dsn = make_conninfo(self.shard.dsn, options="-c synchronous_commit=off")
        return psycopg.connect(dsn, autocommit=True)
