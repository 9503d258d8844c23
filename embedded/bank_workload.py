"""The bank's workload: client threads that make transfers until they are stopped.

It keeps the fleet busy with transactions within and across shards. However it is stopped, it leaves no transaction
prepared on any shard that can be reached.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import psycopg

from cutline.embedded.bank import check_bank
from cutline.embedded.bank_client import BankClient, choose_transfer, open_session, settle_leftovers
from cutline.embedded.bank_latency import LatencyLog
from cutline.storage.errors import BusyError, UnreachableError

STOP_SECONDS_MAX = 60
ABANDON_SECONDS_MAX = 2
CANCEL_SECONDS_MAX = 15
LOCK_SECONDS_MAX = 5

# An advisory lock on the first shard while a workload runs: two workloads would settle each other's transactions, and
# could not check the bank's invariants at the end.
LOCK_KEY = 0x62616E6B


class BankBusyError(BusyError):
    """Another workload is running on this fleet."""


class BankStoppedError(UnreachableError):
    """A transaction failed on a shard, and the workload ended."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The numbers of transactions committed, within one shard (`local`) and across two (`cross`)."""

    local: int = 0
    cross: int = 0

    @property
    def total(self) -> int:
        """The number of all transactions."""
        return self.local + self.cross


@dataclass(slots=True)
class BankWorkload:
    """`clients` threads that make transfers on the shards `dsns` (their primaries, in order) until `stop`.

    `cross_shard_ratio` is the share of transfers across shards. `seed` determines accounts and amounts. Every client
    waits `pause_seconds` between its transactions. As a context manager it starts and stops itself. The first error
    ends all clients, and `stop` raises it.
    """

    dsns: Sequence[str]
    clients: int = 4
    cross_shard_ratio: float = 0.5
    seed: int = 0
    pause_seconds: float = 0.0
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
            # The caller must see the error of the block, not those that it caused in the clients.
            self.stop(abandon=error is not None)
        except (KeyboardInterrupt, SystemExit):
            # A second Ctrl-C must not leave a transaction prepared either.
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
        """Settle the transfers that a killed workload left prepared (`settled`), and start the clients.

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
                    client = BankClient(self.dsns)
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
        """Begin no new transactions, and wait for the running ones."""
        self._going.clear()
        for thread in self._threads:
            with thread.turn:
                pass

    def resume(self) -> None:
        """Continue after `pause`."""
        self._going.set()

    def stop(self, *, abandon: bool = False) -> None:
        """Let every client finish its transaction and end; may be called again.

        Raises BankStoppedError for the first error of a client, or TimeoutError if the clients do not end. With
        `abandon` it raises nothing and returns soon: a transaction that can't finish in time, because a shard is gone,
        is cancelled, and rolled back or committed on the remaining shards.
        """
        self._stopping.set()
        self._going.set()
        if not self._join(ABANDON_SECONDS_MAX if abandon else STOP_SECONDS_MAX):
            for thread in self._threads:
                thread.client.cancel()
            if not self._join(CANCEL_SECONDS_MAX) or not abandon:
                self._errors.append(TimeoutError("a client of the bank did not end in time"))
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
    """The loop of one client. It holds `turn` during a transaction; `local` and `cross` count commits."""

    def __init__(self, workload: BankWorkload, client: BankClient, number: int) -> None:
        super().__init__(name=f"bank client {number + 1}", daemon=True)
        self.client = client
        self.turn = threading.Lock()
        self.local = 0
        self.cross = 0
        self._workload = workload
        self._chance = random.Random(f"{workload.seed} {number}")

    def run(self) -> None:
        """Make transfers until the workload stops; `BankWorkload.stop` raises an error."""
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
    # The server may not have noticed yet that a workload was killed.
    deadline = time.monotonic() + LOCK_SECONDS_MAX
    while session.execute("SELECT pg_try_advisory_lock(%s)", [LOCK_KEY]).fetchone() != (True,):
        if time.monotonic() > deadline:
            raise BankBusyError("another bank workload is running on this fleet", hint="wait until it has ended")
        time.sleep(0.1)


def _stopped_error(error: psycopg.Error) -> BankStoppedError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return BankStoppedError(
        f"the bank stopped: {lines[0] if lines else type(error).__name__}",
        hint="make sure that all servers are running: snapshot demo up DIR",
    )
