"""The bank at work: client threads that move money until they are told to stop.

While it runs the fleet is as busy as it can be with transactions within and across shards. When it has been
stopped, by whatever way, no transaction of its own is left prepared on any shard that can be reached.
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

from embedded.bank import check_bank
from embedded.bank_client import BankClient, choose_transfer, open_session, settle_leftovers
from embedded.bank_latency import LatencyLog
from storage.errors import BusyError, UnreachableError

STOP_SECONDS_MAX = 60
ABANDON_SECONDS_MAX = 2
CANCEL_SECONDS_MAX = 15

# Held on the first shard while a workload runs: two would settle each other's transactions, and neither
# could say at its end that the bank's invariants hold.
LOCK_KEY = 0x62616E6B


class BankBusyError(BusyError):
    """Another workload moves money on this fleet."""


class BankStoppedError(UnreachableError):
    """A shard did not take a transaction of the bank, and the workload ended."""


@dataclass(frozen=True, slots=True)
class Committed:
    """How many transactions were committed: within one shard, and across two."""

    local: int = 0
    cross: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.local + self.cross


@dataclass(slots=True)
class BankWorkload:
    """`clients` threads moving money between the shards `dsns` (their primaries, in order), until `stop`.

    A share of `cross_shard_ratio` crosses shards. `seed` decides who pays whom how much. Every client waits
    `pause_seconds` between its transactions. As a context manager it starts and stops itself. The first
    error ends all clients and is raised by `stop`.
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
            # An error of the block is what the caller must see, not what it did to the clients.
            self.stop(abandon=error is not None)
        except (KeyboardInterrupt, SystemExit):
            # An impatient end must not leave a transaction prepared either.
            self.stop(abandon=True)
            raise

    @property
    def committed(self) -> Committed:
        """What was committed so far."""
        return Committed(
            local=sum(thread.local for thread in self._threads),
            cross=sum(thread.cross for thread in self._threads),
        )

    def start(self) -> None:
        """Settle what a killed workload left prepared (`settled` transfers), and let the clients begin.

        May be called once. Raises NoBankError, BankBusyError, or BankStoppedError for an unreachable shard.
        """
        if self._threads or self._stopping.is_set():
            raise RuntimeError("a workload is started once")
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
        """Wait that long, or until an error ends the workload; return whether it still runs."""
        return not self._stopping.wait(seconds)

    def pause(self) -> None:
        """Let no new transaction begin, and wait until those under way have ended."""
        self._going.clear()
        for thread in self._threads:
            with thread.turn:
                pass

    def resume(self) -> None:
        """Go on after `pause`."""
        self._going.set()

    def stop(self, *, abandon: bool = False) -> None:
        """Let every client finish its transaction and end; does nothing more if that was done before.

        Raises BankStoppedError for the first error of a client, or if they do not end. With `abandon` it
        raises nothing and does not take long: a transaction that can't be finished soon, because a shard is
        gone, is cancelled, and rolled back or committed on the shards that remain.
        """
        self._stopping.set()
        self._going.set()
        if not self._ended(ABANDON_SECONDS_MAX if abandon else STOP_SECONDS_MAX):
            for thread in self._threads:
                thread.client.cancel()
            if not self._ended(CANCEL_SECONDS_MAX) or not abandon:
                self._errors.append(TimeoutError("a client of the bank did not end in time"))
        self._opened.close()
        errors, self._errors = self._errors, []
        if errors and not abandon:
            raise _stopped_error(errors[0]) if isinstance(errors[0], psycopg.Error) else errors[0]

    def _ended(self, seconds_max: float) -> bool:
        deadline = time.monotonic() + seconds_max
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class _ClientThread(threading.Thread):
    """One client's loop. `turn` is held during a transaction; `local` and `cross` count those committed."""

    def __init__(self, workload: BankWorkload, client: BankClient, number: int) -> None:
        super().__init__(name=f"bank client {number + 1}", daemon=True)
        self.client = client
        self.turn = threading.Lock()
        self.local = 0
        self.cross = 0
        self._workload = workload
        self._chance = random.Random(f"{workload.seed} {number}")

    def run(self) -> None:
        """Move money until told to stop; leave an error to `BankWorkload.stop`."""
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
    if session.execute("SELECT pg_try_advisory_lock(%s)", [LOCK_KEY]).fetchone() != (True,):
        raise BankBusyError("another workload moves money on this fleet", hint="wait until it has ended")


def _stopped_error(error: psycopg.Error) -> BankStoppedError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return BankStoppedError(
        f"the bank stopped: {lines[0] if lines else type(error).__name__}",
        hint="see that all servers run: snapshot demo up DIR",
    )
