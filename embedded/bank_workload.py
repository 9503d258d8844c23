"""The bank's workload: clients that transfer money within a shard or across two shards, and the latencies.

However the workload is stopped, no transaction stays prepared on a shard that can be reached.

Accounts are locked in the order of their ids, and shards are ranges of ids, so clients never deadlock, even across
shards. A transfer across shards is prepared on both shards and then committed on both. It may be rolled back until the
second PREPARE has been answered; after that it is always committed. The gid contains the transfer's id, a random UUID,
and is never reused. Each half names both shards as participants, so that a check finds a transfer of which one half is
missing.
"""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import psycopg
from msgspec import Struct
from msgspec.structs import asdict

from cutline.embedded.bank import GID_PREFIX, accounts_of, check_bank, read_prepared_gids, shard_of
from cutline.storage.errors import BusyError, UnreachableError

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
SELECT pg_logical_emit_message(true, 'snapshot.participants', %(participants)s);
PREPARE TRANSACTION %(gid)s
"""
COMMIT_PREPARED = "COMMIT PREPARED %(gid)s"
ROLLBACK_PREPARED = "ROLLBACK PREPARED %(gid)s"


class Transfer(Struct, frozen=True):
    """One transfer. A transfer may overdraw an account, because only the sum matters."""

    id: uuid.UUID
    from_account: int
    to_account: int
    amount: int
    at: datetime

    @property
    def crosses(self) -> bool:
        """Whether the transfer crosses shards."""
        return shard_of(self.from_account) != shard_of(self.to_account)

    @property
    def changes(self) -> list[tuple[int, int]]:
        """The accounts and the changes to their balances, in locking order."""
        return sorted([(self.from_account, -self.amount), (self.to_account, self.amount)])


def choose_transfer(chance: random.Random, shards: int, cross_shard_ratio: float) -> Transfer:
    """Choose a transfer between two different accounts; `chance` determines everything except id and time."""
    first = second = chance.randrange(shards)
    if shards > 1 and chance.random() < cross_shard_ratio:
        second = (first + chance.randrange(1, shards)) % shards
    from_account = to_account = chance.choice(accounts_of(first))
    while to_account == from_account:
        to_account = chance.choice(accounts_of(second))
    amount = chance.randint(1, AMOUNT_MAX)
    return Transfer(uuid.uuid4(), from_account, to_account, amount, datetime.now(UTC))


class BankClient:
    """A client with one session on every shard. Only `cancel` may be called from other threads.

    `names` are the shards' ids in fleet.toml, in the same order; without them, transfers name no participants.
    """

    def __init__(self, dsns: Sequence[str], names: Sequence[str] = ()) -> None:
        self._dsns, self._names = dsns, names
        with ExitStack() as opened:
            self._sessions = [opened.enter_context(closing(open_session(dsn))) for dsn in dsns]
            self._opened = opened.pop_all()

    def close(self) -> None:
        """End all sessions."""
        self._opened.close()

    def cancel(self) -> None:
        """Cancel the client's running statements on servers that still answer."""
        for session in self._sessions:
            try:
                session.cancel_safe(timeout=CONNECT_SECONDS_MAX)
            except psycopg.Error:
                # A server that is down has no statement to cancel.
                continue

    def move(self, transfer: Transfer, *, second_first: bool = False) -> None:
        """Make the transfer completely, or raise psycopg.Error and don't make it at all.

        With `second_first`, a transfer across shards is committed on its second shard first. If a shard goes down after
        it has prepared the transfer, the next `settle_leftovers` finishes it there.
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
        participants = {"participants": ",".join(self._names[shard] for shard in shards) if self._names else ""}
        statement = ROLLBACK_PREPARED
        try:
            for shard, (account, change) in zip(shards, transfer.changes, strict=True):
                half = {"account": account, "change": change} | participants
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
            # The transfer's session may be broken or in a failed transaction.
            with closing(open_session(self._dsns[shard])) as session:
                session.execute(statement, gid)
        except (psycopg.errors.UndefinedObject, psycopg.OperationalError):
            # The transaction is not prepared there, or the shard is down; the caller raises the first error.
            return


def open_session(dsn: str) -> psycopg.Connection[Any]:
    """Open an autocommit session that can send several statements in one message."""
    return psycopg.connect(
        dsn,
        autocommit=True,
        application_name=APPLICATION_NAME,
        connect_timeout=CONNECT_SECONDS_MAX,
        cursor_factory=psycopg.ClientCursor,
    )


def settle_leftovers(sessions: Sequence[psycopg.Connection[Any]]) -> int:
    """Finish the prepared transactions of clients that died; return the number of their transfers.

    A transfer is committed if the other shard already has it; otherwise it was not committed anywhere, and is rolled
    back. No other workload may be running: this call would end its sessions.
    """
    for session in sessions:
        # A server does not notice that a client died while its statement was waiting for a row lock, and would prepare
        # the transfer as soon as that lock is released below.
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


Window = tuple[float, float]


@dataclass(slots=True)
class LatencyLog:
    """The start and duration of every committed transaction, in seconds of time.monotonic(). Thread-safe.

    A transaction is added when it ends: query a window only after all its transactions have ended, that is, after
    `BankWorkload.pause` or `stop`.
    """

    _starts: array[float] = field(default_factory=lambda: array("d"))
    _seconds: array[float] = field(default_factory=lambda: array("d"))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, start: float, seconds: float) -> None:
        """Add a transaction that started at `start` and took `seconds`."""
        with self._lock:
            self._starts.append(start)
            self._seconds.append(seconds)

    def __len__(self) -> int:
        return len(self._seconds)

    def entries(self) -> list[tuple[float, float]]:
        """Return (start, seconds) of all transactions so far, in the order in which they ended."""
        with self._lock:
            return list(zip(self._starts, self._seconds, strict=True))

    def p99_seconds(self, excluding: Sequence[Window] = ()) -> float | None:
        """Return the 99th percentile of the durations, ignoring transactions that overlap one of the windows (t0, t1).

        Returns None if no transactions remain.
        """
        durations = sorted(
            seconds
            for start, seconds in self.entries()
            if not any(_overlaps(start, seconds, t0, t1) for t0, t1 in excluding)
        )
        return durations[math.ceil(len(durations) * 0.99) - 1] if durations else None

    def longest_between(self, t0: float = -math.inf, t1: float = math.inf) -> float | None:
        """Return the longest duration of the transactions that overlap t0 to t1; None if there are none."""
        seconds = [seconds for start, seconds in self.entries() if _overlaps(start, seconds, t0, t1)]
        return max(seconds, default=None)


def _overlaps(start: float, seconds: float, t0: float, t1: float) -> bool:
    return start <= t1 and start + seconds >= t0


STOP_SECONDS_MAX = 60
ABANDON_SECONDS_MAX = 2
CANCEL_SECONDS_MAX = 15
LOCK_SECONDS_MAX = 5

# A workload holds this advisory lock on the first shard: two workloads would settle each other's transactions, and
# could not check the bank's invariants at the end.
LOCK_KEY = 0x62616E6B


class BankBusyError(BusyError):
    """Another workload is running on this fleet."""


class BankStoppedError(UnreachableError):
    """A transaction failed on a shard, and the workload ended."""


class Committed(Struct, frozen=True):
    """The numbers of transactions committed, within one shard (`local`) and across two (`cross`)."""

    local: int = 0
    cross: int = 0

    @property
    def total(self) -> int:
        """The number of all transactions."""
        return self.local + self.cross


@dataclass(slots=True)
class BankWorkload:
    """Runs `clients` threads that make transfers until `stop`; `dsns` are the shards' primaries, in order.

    `cross_shard_ratio` is the share of transfers across shards. `seed` determines accounts and amounts. Every client
    waits `pause_seconds` between its transactions. `names` are the shards' ids, as in BankClient. When used as a
    context manager, the workload starts and stops with the block. The first error ends all clients, and `stop` raises
    it.
    """

    dsns: Sequence[str]
    clients: int = 4
    cross_shard_ratio: float = 0.5
    seed: int = 0
    pause_seconds: float = 0.0
    names: Sequence[str] = ()
    latencies: LatencyLog = field(default_factory=LatencyLog, init=False)
    settled: int = field(default=0, init=False)
    _threads: list[_ClientThread] = field(default_factory=list, init=False)
    _errors: list[BaseException] = field(default_factory=list, init=False)
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)
    _going: threading.Event = field(default_factory=threading.Event, init=False)
    _opened: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # The caller must see the block's error, not the errors that it caused in the clients.
            self.stop(abandon=error is not None)
        except (KeyboardInterrupt, SystemExit):
            # Even a second Ctrl-C must not leave a transaction prepared.
            self.stop(abandon=True)
            raise

    @property
    def committed(self) -> Committed:
        """The transactions committed so far."""
        return Committed(
            local=sum(thread.local for thread in self._threads),
            cross=sum(thread.cross for thread in self._threads),
        )

    def start(self) -> None:
        """Settle the transfers that a killed workload left prepared (`settled` counts them), and start the clients.

        May be called only once. Raises NoBankError, BankBusyError, or BankStoppedError if a shard can't be reached.
        """
        if self._threads or self._stopping.is_set():
            raise RuntimeError("a workload can be started only once")
        try:
            with ExitStack() as opened:
                sessions = [opened.enter_context(closing(open_session(dsn))) for dsn in self.dsns]
                for shard, session in enumerate(sessions):
                    check_bank(session, shard=shard)
                _lock(sessions[0])
                self.settled = settle_leftovers(sessions)
                for number in range(self.clients):
                    client = BankClient(self.dsns, self.names)
                    opened.callback(client.close)
                    self._threads.append(_ClientThread(self, client, number))
                self._opened = opened.pop_all()
        except psycopg.Error as error:
            raise _stopped_error(error) from error
        self._going.set()
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop(abandon=True)
            raise

    def wait(self, seconds: float) -> bool:
        """Wait `seconds`, or until an error ends the workload; return whether it is still running."""
        return not self._stopping.wait(seconds)

    def pause(self) -> None:
        """Start no new transactions, and wait until the running ones have ended."""
        self._going.clear()
        for thread in self._threads:
            with thread.turn:
                pass

    def resume(self) -> None:
        """Continue after `pause`."""
        self._going.set()

    def stop(self, *, abandon: bool = False) -> None:
        """Let every client finish its transaction and end; may be called repeatedly.

        Raises BankStoppedError for the first error of a client, or TimeoutError if the clients do not end. With
        `abandon` it raises nothing and returns soon: if a transaction can't finish in time because a shard is down, it
        is cancelled, and then rolled back or committed on the remaining shards.
        """
        self._stopping.set()
        self._going.set()
        if not self._join(ABANDON_SECONDS_MAX if abandon else STOP_SECONDS_MAX):
            for thread in self._threads:
                thread.client.cancel()
            if not self._join(CANCEL_SECONDS_MAX) or not abandon:
                self._errors.append(TimeoutError("a bank client did not stop in time"))
        self._opened.close()
        errors, self._errors = self._errors, []
        if errors and not abandon:
            raise _stopped_error(errors[0]) if isinstance(errors[0], psycopg.Error) else errors[0]

    def _join(self, seconds_max: float) -> bool:
        deadline = time.monotonic() + seconds_max
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class _ClientThread(threading.Thread):
    """A client's loop, which holds `turn` during a transaction; `local` and `cross` count commits."""

    def __init__(self, workload: BankWorkload, client: BankClient, number: int) -> None:
        super().__init__(name=f"bank client {number + 1}", daemon=True)
        self.client = client
        self.turn = threading.Lock()
        self.local = 0
        self.cross = 0
        self._workload = workload
        self._chance = random.Random(f"{workload.seed} {number}")

    def run(self) -> None:
        """Make transfers until the workload stops."""
        workload = self._workload
        try:
            while not workload._stopping.is_set():
                workload._going.wait()
                with self.turn:
                    if workload._going.is_set() and not workload._stopping.is_set():
                        self._move()
                if workload.pause_seconds:
                    workload._stopping.wait(workload.pause_seconds)
        except BaseException as error:  # noqa: BLE001 - the thread that calls stop() raises it
            workload._errors.append(error)
            workload._stopping.set()
            workload._going.set()

    def _move(self) -> None:
        workload = self._workload
        transfer = choose_transfer(self._chance, len(workload.dsns), workload.cross_shard_ratio)
        start = time.monotonic()
        self.client.move(transfer, second_first=self._chance.random() < 0.5)
        workload.latencies.add(start, time.monotonic() - start)
        if transfer.crosses:
            self.cross += 1
        else:
            self.local += 1


def _lock(session: psycopg.Connection[Any]) -> None:
    # The server may not have noticed yet that an earlier workload was killed.
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    while session.execute("SELECT pg_try_advisory_lock(%s)", [LOCK_KEY]).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise BankBusyError("another bank workload is running on this fleet", hint="wait until it has finished")
        time.sleep(0.1)


def _stopped_error(error: psycopg.Error) -> BankStoppedError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return BankStoppedError(
        f"the bank workload stopped: {lines[0] if lines else type(error).__name__}",
        hint="make sure that all servers are running: snapshot demo up DIR",
    )
