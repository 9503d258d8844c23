"""The bank: tables whose truth is known, so that what a restore brings back can be judged.

Every shard holds ACCOUNTS_PER_SHARD accounts of INITIAL_BALANCE each, and the transfers that touched them.
A transfer across shards stands under one id on both. What must hold in every consistent state:

- the sum of all balances is what it was at first;
- a transfer across shards is on both of its shards, and the same there, or on neither;
- on each shard alone, an account's balance is what it began with and what that shard's transfers moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from storage.errors import RefusedError

ACCOUNTS_PER_SHARD = 10_000
INITIAL_BALANCE = 1000
GID_PREFIX = "bank-"

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

TOTALS_QUERY = "SELECT (SELECT coalesce(sum(balance), 0)::bigint FROM account), (SELECT count(*) FROM transfer)"

# Transfers that should be on another shard than this one, or on another one too.
FOREIGN_TRANSFERS_QUERY = """
SELECT id::text, from_account, to_account, amount, extract(epoch FROM at)::text
  FROM transfer
 WHERE (from_account - 1) / %(accounts)s <> %(shard)s OR (to_account - 1) / %(accounts)s <> %(shard)s
"""

# Accounts that are missing, that belong to another shard, or whose balance its transfers do not explain.
UNEXPLAINED_ACCOUNTS_QUERY = """
WITH flow AS (
    SELECT id, sum(amount) AS net
      FROM (SELECT to_account AS id, amount FROM transfer
            UNION ALL
            SELECT from_account, -amount FROM transfer) AS moved
     GROUP BY id
)
SELECT coalesce(account.id, expected.id)
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS expected (id)
  FULL JOIN account ON account.id = expected.id
  LEFT JOIN flow ON flow.id = account.id
 WHERE expected.id IS NULL
    OR account.balance IS DISTINCT FROM %(initial)s + coalesce(flow.net, 0)
 ORDER BY 1
"""


class NoBankError(RefusedError):
    """A shard does not hold the bank's tables and the accounts of its number."""


@dataclass(frozen=True, slots=True)
class BankInvariants:
    """What the bank's tables say of themselves: `transfers` by shard, ids and accounts that are wrong."""

    total_balance: int
    expected_total: int
    transfers: tuple[int, ...]
    half_present: tuple[str, ...]
    unexplained_accounts: tuple[int, ...]

    @property
    def hold(self) -> bool:
        """Whether this is a consistent state of all shards together."""
        return self.total_balance == self.expected_total and not self.half_present and not self.unexplained_accounts


def shard_of(account: int) -> int:
    """The number of the shard, from 0, that holds `account`."""
    return (account - 1) // ACCOUNTS_PER_SHARD


def accounts_of(shard: int) -> range:
    """The ids of the accounts on shard number `shard`, from 0; no two shards share one."""
    return range(shard * ACCOUNTS_PER_SHARD + 1, (shard + 1) * ACCOUNTS_PER_SHARD + 1)


def create_bank(dsn: str, *, shard: int) -> None:
    """Create the tables and the accounts of shard number `shard` in the database of `dsn`, all or nothing."""
    accounts = accounts_of(shard)
    with psycopg.connect(dsn) as connection:
        connection.execute(SCHEMA)
        connection.execute(
            "INSERT INTO account SELECT id, %s FROM generate_series(%s::bigint, %s::bigint) AS id",
            [INITIAL_BALANCE, accounts[0], accounts[-1]],
        )
        connection.execute("ANALYZE account")


def check_bank(connection: psycopg.Connection[Any], *, shard: int) -> None:
    """Raise NoBankError unless this session's database is the bank of shard number `shard`."""
    accounts = accounts_of(shard)
    try:
        row = connection.execute("SELECT min(id), max(id), count(*) FROM account").fetchone()
        connection.execute("SELECT FROM transfer LIMIT 1")
    except psycopg.errors.UndefinedTable:
        row = None
    if row != (accounts[0], accounts[-1], len(accounts)):
        raise NoBankError(
            f"shard {shard + 1} does not hold the bank's accounts {accounts[0]} to {accounts[-1]}",
            hint="run the bank on a fleet from: snapshot demo up DIR",
        )


def read_invariants(dsns: Sequence[str]) -> BankInvariants:
    """Compare what the shards hold; `dsns` are the primaries (or standbys) of shards 0, 1, … in order.

    Each shard is read at one moment, but not all at the same: while money moves across shards, only
    `unexplained_accounts` means something. Raises psycopg.Error.
    """
    total = 0
    transfers: list[int] = []
    foreign: list[set[tuple[Any, ...]]] = []
    unexplained: list[int] = []
    for shard, dsn in enumerate(dsns):
        accounts = accounts_of(shard)
        parameters = {
            "shard": shard,
            "accounts": ACCOUNTS_PER_SHARD,
            "first": accounts[0],
            "last": accounts[-1],
            "initial": INITIAL_BALANCE,
        }
        with psycopg.connect(dsn) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            for balance, count in connection.execute(TOTALS_QUERY):
                total += balance
                transfers.append(count)
            foreign.append(set(connection.execute(FOREIGN_TRANSFERS_QUERY, parameters)))
            unexplained += [row[0] for row in connection.execute(UNEXPLAINED_ACCOUNTS_QUERY, parameters)]
    return BankInvariants(
        total_balance=total,
        expected_total=len(dsns) * ACCOUNTS_PER_SHARD * INITIAL_BALANCE,
        transfers=tuple(transfers),
        half_present=half_present(foreign),
        unexplained_accounts=tuple(unexplained),
    )


def half_present(foreign: Sequence[set[tuple[Any, ...]]]) -> tuple[str, ...]:
    """The ids of transfers across shards that are not on exactly their two shards, the same on both.

    `foreign[shard]` holds the rows (id, from account, to account, …) of that shard.
    """
    found: Mapping[tuple[Any, ...], set[int]] = defaultdict(set)
    for shard, rows in enumerate(foreign):
        for row in rows:
            found[row].add(shard)
    torn = {row[0] for row, shards in found.items() if shards != {shard_of(row[1]), shard_of(row[2])}}
    return tuple(sorted(torn))


def prepared_gids(dsn: str) -> list[str]:
    """The gids of the bank's transactions that are prepared and undecided in this database."""
    with psycopg.connect(dsn) as connection:
        return read_prepared_gids(connection)


def read_prepared_gids(connection: psycopg.Connection[Any]) -> list[str]:
    """The same, of a session's database."""
    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
    return [row[0] for row in connection.execute(query, [GID_PREFIX])]
