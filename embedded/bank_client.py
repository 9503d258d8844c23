"""One client of the bank: it transfers money within a shard, or across two shards by two-phase commit.

Accounts are locked in the order of their ids, and shards are ranges of ids, so clients never deadlock, on one shard or
across shards. A transfer across shards is prepared on both shards and then committed on both. Until the second PREPARE
has been answered it may be rolled back; after that it is always committed. The gid contains the transfer's id, a random
UUID, and is never used again.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from cutline.embedded.bank import GID_PREFIX, accounts_of, read_prepared_gids, shard_of

AMOUNT_MAX = 100
APPLICATION_NAME = "cutline-bank"
CONNECT_SECONDS_MAX = 5
END_SECONDS_MAX = 5

RECORD = """
INSERT INTO transfer (id, from_account, to_account, amount, at)
VALUES (%(id)s, %(from_account)s, %(to_account)s, %(amount)s, %(at)s);
"""
LOCAL = f"""
BEGIN;
UPDATE account SET balance = balance + %(first_change)s WHERE id = %(first)s;
UPDATE account SET balance = balance + %(second_change)s WHERE id = %(second)s;
{RECORD}
COMMIT
"""
PREPARE = f"""
BEGIN;
UPDATE account SET balance = balance + %(change)s WHERE id = %(account)s;
{RECORD}
PREPARE TRANSACTION %(gid)s
"""
COMMIT_PREPARED = "COMMIT PREPARED %(gid)s"
ROLLBACK_PREPARED = "ROLLBACK PREPARED %(gid)s"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer; it may leave an account below zero, as only the sum matters."""

    id: uuid.UUID
    from_account: int
    to_account: int
    amount: int
    at: datetime

    @property
    def crosses(self) -> bool:
        """Whether it crosses shards."""
        return shard_of(self.from_account) != shard_of(self.to_account)

    @property
    def changes(self) -> list[tuple[int, int]]:
        """The accounts with the changes to their balances, in locking order."""
        return sorted([(self.from_account, -self.amount), (self.to_account, self.amount)])


def choose_transfer(chance: random.Random, shards: int, cross_shard_ratio: float) -> Transfer:
    """A transfer between two different accounts; `chance` determines all of it except id and time."""
    first = second = chance.randrange(shards)
    if shards > 1 and chance.random() < cross_shard_ratio:
        second = (first + chance.randrange(1, shards)) % shards
    from_account = to_account = chance.choice(accounts_of(first))
    while to_account == from_account:
        to_account = chance.choice(accounts_of(second))
    amount = chance.randint(1, AMOUNT_MAX)
    return Transfer(uuid.uuid4(), from_account, to_account, amount, datetime.now(UTC))


class BankClient:
    """A client with one session on every shard. Only `cancel` may be called from other threads."""

    def __init__(self, dsns: Sequence[str]) -> None:
        self._dsns = dsns
        with ExitStack() as opened:
            self._sessions = [opened.enter_context(closing(open_session(dsn))) for dsn in dsns]
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End all sessions."""
        self._opened.close()

    def cancel(self) -> None:
        """Cancel the client's running statements, on servers that still answer."""
        for session in self._sessions:
            try:
                session.cancel_safe(timeout=CONNECT_SECONDS_MAX)
            except psycopg.Error:
                # A server that is gone has no statement to cancel.
                continue

    def move(self, transfer: Transfer, *, second_first: bool = False) -> None:
        """Make the transfer completely, or not at all and raise psycopg.Error.

        With `second_first`, a transfer across shards is committed on its second shard first. If a shard that has
        prepared it is gone, the next `settle_leftovers` finishes it there.
        """
        if transfer.crosses:
            self._move_across(transfer, second_first=second_first)
            return
        (first, first_change), (second, second_change) = transfer.changes
        accounts = {
            "first": first,
            "first_change": first_change,
            "second": second,
            "second_change": second_change,
        }
        self._sessions[shard_of(first)].execute(LOCAL, asdict(transfer) | accounts)

    def _move_across(self, transfer: Transfer, *, second_first: bool) -> None:
        shards = [shard_of(account) for account, _ in transfer.changes]
        gid = {"gid": GID_PREFIX + str(transfer.id)}
        statement = ROLLBACK_PREPARED
        try:
            for shard, (account, change) in zip(shards, transfer.changes, strict=True):
                half = {"account": account, "change": change}
                self._sessions[shard].execute(PREPARE, asdict(transfer) | half | gid)
            statement = COMMIT_PREPARED
            for shard in reversed(shards) if second_first else shards:
                self._sessions[shard].execute(statement, gid)
        except psycopg.Error:
            for shard in shards:
                self._settle(shard, statement, gid)
            raise

    def _settle(self, shard: int, statement: str, gid: dict[str, str]) -> None:
        try:
            # The transfer's own session may be broken, or in a failed transaction.
            with closing(open_session(self._dsns[shard])) as session:
                session.execute(statement, gid)
        except (psycopg.errors.UndefinedObject, psycopg.OperationalError):
            # It is not prepared there, or the shard is gone; the caller raises the first error.
            return


def open_session(dsn: str) -> psycopg.Connection[Any]:
    """An autocommit session that can send several statements in one message."""
    return psycopg.connect(
        dsn,
        autocommit=True,
        application_name=APPLICATION_NAME,
        connect_timeout=CONNECT_SECONDS_MAX,
        cursor_factory=psycopg.ClientCursor,
    )


def settle_leftovers(sessions: Sequence[psycopg.Connection[Any]]) -> int:
    """Finish the prepared transactions of clients that died; return how many transfers those were.

    A transfer is committed if another shard already has it, else rolled back: it was not committed anywhere. No other
    workload may be running: its sessions are ended.
    """
    for session in sessions:
        # A server does not notice that a client died while its statement waits for a row lock, and would prepare its
        # transfer as soon as that lock is released below.
        session.execute(
            "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity"
            " WHERE application_name = %s AND datname = current_database() AND pid <> pg_backend_pid()",
            [END_SECONDS_MAX * 1000, APPLICATION_NAME],
        )
    prepared = {gid for session in sessions for gid in read_prepared_gids(session)}
    for gid in prepared:
        transfer = [gid.removeprefix(GID_PREFIX)]
        counts = [session.execute("SELECT FROM transfer WHERE id = %s", transfer).rowcount for session in sessions]
        statement = COMMIT_PREPARED if any(counts) else ROLLBACK_PREPARED
        for session in sessions:
            if gid in read_prepared_gids(session):
                session.execute(statement, {"gid": gid})
    return len(prepared)
