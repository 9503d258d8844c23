"""The bank, a workload whose truth is known: money moves within and across shards, none is made or lost."""

from __future__ import annotations

import psycopg

ACCOUNTS_PER_SHARD = 10_000
INITIAL_BALANCE = 1000

SCHEMA = """
CREATE TABLE account (id bigint PRIMARY KEY, balance bigint NOT NULL);
CREATE TABLE transfer (
    id uuid PRIMARY KEY,
    from_account bigint NOT NULL,
    to_account bigint NOT NULL,
    amount bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""


def create_bank(dsn: str, *, shard: int) -> None:
    """Create the tables on shard number `shard` (from 0) with its accounts; no two shards share an id."""
    first = shard * ACCOUNTS_PER_SHARD + 1
    with psycopg.connect(dsn) as connection:
        connection.execute(SCHEMA)
        connection.execute(
            "INSERT INTO account SELECT id, %s FROM generate_series(%s::bigint, %s::bigint) AS id",
            [INITIAL_BALANCE, first, first + ACCOUNTS_PER_SHARD - 1],
        )
        connection.execute("ANALYZE account")
