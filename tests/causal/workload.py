"""The causal workload: threads that write chains and move the bank's money, and the journal of all of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Self

import psycopg

from embedded.bank import shard_of
from embedded.bank_client import BankClient, choose_transfer, open_session
from tests.causal.chain import COMMIT, HALF, HOLD, HOLD_THEN_ROLL_BACK, Calendar, ChainClient
from tests.causal.journal import Transaction

CHAINS = 10
BANK_CLIENTS = 3
CROSS_SHARD_RATIO = 0.6
PAUSE_SECONDS_MAX = 0.06
STOP_SECONDS_MAX = 60
# What chains 0, 1, 2, … do first once they may hold transactions: so that it happens in every run.
FIRST_FATES = ([HOLD_THEN_ROLL_BACK], [HALF, COMMIT, HALF], [HOLD], [HALF], [HOLD_THEN_ROLL_BACK, HOLD])


@dataclass(slots=True)
class CausalWorkload:
    """Writes to the shards `dsns` (their primaries, in order) until `stop`, by what `seed` decides.

    The first error ends all of it and is raised by `stop`. No other workload may be at work.
    """

    dsns: Sequence[str]
    seed: int
    calendar: Calendar = field(default_factory=Calendar)
    _chains: list[ChainClient] = field(default_factory=list)
    _transfers: list[list[Transaction]] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _opened: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for number in range(CHAINS):
                sessions = [opened.enter_context(closing(open_session(dsn))) for dsn in self.dsns]
                fates = list(FIRST_FATES[number % len(FIRST_FATES)])
                chance = random.Random(f"{self.seed} chain {number}")
                chain = ChainClient(sessions, number, chance, self.calendar, fates)
                self._chains.append(chain)
                self._add(self._client(chain.step, chance, chain.settle))
            for number in range(BANK_CLIENTS):
                client = opened.enter_context(closing(BankClient(self.dsns)))
                chance = random.Random(f"{self.seed} bank {number}")
                self._transfers.append([])
                self._add(self._client(self._transfer(client, chance, self._transfers[-1]), chance))
            self._opened = opened.pop_all()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.stop()
        except (psycopg.Error, TimeoutError):
            # An error of the block is what the caller must see.
            if error[0] is None:
                raise

    @property
    def journal(self) -> list[Transaction]:
        """What all clients were told; to be read when they have stopped."""
        return [one for part in (*(chain.journal for chain in self._chains), *self._transfers) for one in part]

    def wait(self, seconds: float) -> None:
        """Let the clients work that long; raise what one of them ended with."""
        if self._stopping.wait(seconds):
            self.stop()

    def stop(self) -> None:
        """Let every client end its transaction and decide what it holds, and raise the first error of one."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS_MAX
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._errors.append(TimeoutError("a client did not end in time"))
        self._opened.close()
        errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    def _add(self, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run, daemon=True))

    def _client(
        self, step: Callable[[], None], chance: random.Random, settle: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        def run() -> None:
            try:
                while not self._stopping.wait(chance.uniform(0, PAUSE_SECONDS_MAX)):
                    step()
                settle()
            except BaseException as error:  # noqa: BLE001 - the thread that calls stop() raises it
                self._errors.append(error)
                self._stopping.set()

        return run

    def _transfer(self, client: BankClient, chance: random.Random, journal: list[Transaction]) -> Callable[[], None]:
        def move() -> None:
            transfer = choose_transfer(chance, len(self.dsns), CROSS_SHARD_RATIO)
            shards = tuple({shard_of(transfer.from_account), shard_of(transfer.to_account)})
            one = Transaction(f"bank-{transfer.id}", tuple(("transfer", s, str(transfer.id)) for s in shards))
            journal.append(one)
            one.decided = one.sent = time.monotonic()
            client.move(transfer, second_first=chance.random() < 0.5)
            one.told = one.last_sent = time.monotonic()

        return move
