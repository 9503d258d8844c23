"""The bank: tables with known invariants, against which a restored state can be checked.

Every shard has ACCOUNTS_PER_SHARD accounts with an initial balance of INITIAL_BALANCE, and the transfers that changed
them. A transfer across shards has the same id on both shards. In every consistent state:

- the sum of all balances is the initial sum;
- a transfer across shards is on both of its shards, with equal rows, or on neither;
- each account's balance is the initial balance plus the net amount of its shard's transfers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from msgspec import Struct

from cutline.storage.errors import RefusedError

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

# Transfers that belong only to a different shard, or to two shards.
FOREIGN_TRANSFERS_QUERY = """
SELECT id::text, from_account, to_account, amount, extract(epoch FROM at)::text
  FROM transfer
 WHERE (from_account - 1) / %(accounts)s <> %(shard)s OR (to_account - 1) / %(accounts)s <> %(shard)s
"""

# Accounts that are missing or belong to a different shard, or whose transfers do not add up to their balance.
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
    """A shard lacks the bank's tables, or its own accounts."""


class BankInvariants(Struct, frozen=True):
    """The result of checking the invariants: `transfers` per shard, and the violating transfers and accounts."""

    total_balance: int
    expected_total: int
    transfers: tuple[int, ...]
    half_present: tuple[str, ...]
    unexplained_accounts: tuple[int, ...]

    @property
    def hold(self) -> bool:
        """Whether the state of all shards together is consistent."""
        return self.total_balance == self.expected_total and not self.half_present and not self.unexplained_accounts


def shard_of(account: int) -> int:
    """Return the number (from 0) of the shard that holds `account`."""
    return (account - 1) // ACCOUNTS_PER_SHARD


def accounts_of(shard: int) -> range:
    """Return the ids of the accounts on shard number `shard`, from 0; they are different on every shard."""
    return range(shard * ACCOUNTS_PER_SHARD + 1, (shard + 1) * ACCOUNTS_PER_SHARD + 1)


def create_bank(dsn: str, *, shard: int) -> None:
    """Create the tables and accounts of shard number `shard` in the database that `dsn` names, in one transaction."""
    accounts = accounts_of(shard)
    with psycopg.connect(dsn) as connection:
        connection.execute(SCHEMA)
        connection.execute(
            "INSERT INTO account SELECT id, %s FROM generate_series(%s::bigint, %s::bigint) AS id",
            [INITIAL_BALANCE, accounts[0], accounts[-1]],
        )
        connection.execute("ANALYZE account")


def check_bank(connection: psycopg.Connection[Any], *, shard: int) -> None:
    """Raise NoBankError unless the session's database is the bank of shard number `shard`."""
    accounts = accounts_of(shard)
    try:
        row = connection.execute("SELECT min(id), max(id), count(*) FROM account").fetchone()
        connection.execute("SELECT FROM transfer LIMIT 1")
    except psycopg.errors.UndefinedTable:
        row = None
    if row != (accounts[0], accounts[-1], len(accounts)):
        raise NoBankError(
            f"shard {shard + 1} does not contain the bank's accounts {accounts[0]} to {accounts[-1]}",
            hint="run the bank on a fleet that was created with: snapshot demo up DIR",
        )


def read_invariants(dsns: Sequence[str]) -> BankInvariants:
    """Check the invariants; `dsns` are the primaries (or standbys) of shards 0, 1, … in order.

    Each shard is read in one snapshot, but the shards are read at different times: while transfers across shards are
    running, only `unexplained_accounts` is meaningful. Raises psycopg.Error.
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
    """Return the ids of transfers across shards, except those with equal rows on exactly their two shards.

    `foreign[shard]` contains the rows (id, from account, to account, …) of that shard.
    """
    shards_of: Mapping[tuple[Any, ...], set[int]] = defaultdict(set)
    for shard, rows in enumerate(foreign):
        for row in rows:
            shards_of[row].add(shard)
    torn = {row[0] for row, shards in shards_of.items() if shards != {shard_of(row[1]), shard_of(row[2])}}
    return tuple(sorted(torn))


def read_prepared_gids(connection: psycopg.Connection[Any]) -> list[str]:
    """Read the gids of the bank's prepared transactions in the session's database."""
    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND starts_with(gid, %s)"
    return [row[0] for row in connection.execute(query, [GID_PREFIX])]
