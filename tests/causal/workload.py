"""The causal workload: threads that write chains and make transfers in the bank, and the journal of all clients."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Self

import psycopg

from cutline.embedded.bank import shard_of
from cutline.embedded.bank_workload import BankClient, choose_transfer, open_session
from tests.causal.chain import COMMIT, HALF, HOLD, HOLD_THEN_ROLL_BACK, Calendar, ChainClient
from tests.causal.journal import Transaction

CHAINS = 10
BANK_CLIENTS = 3
CROSS_SHARD_RATIO = 0.6
PAUSE_SECONDS_MAX = 0.06
STOP_SECONDS_MAX = 60
# The first fates in chains 0, 1, 2, … once they may hold transactions, so that these fates occur in every run.
FIRST_FATES = ([HOLD_THEN_ROLL_BACK], [HALF, COMMIT, HALF], [HOLD], [HALF], [HOLD_THEN_ROLL_BACK, HOLD])


@dataclass(slots=True)
class CausalWorkload:
    """Writes to the primaries `dsns`, in order of their shards, until `stop`; `seed` determines the writes.

    The first error ends the whole workload, and `stop` raises it. No other workload may run.
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
                self._add_thread(self._client_loop(chain.step, chance, chain.decide_all))
            for number in range(BANK_CLIENTS):
                client = opened.enter_context(closing(BankClient(self.dsns)))
                chance = random.Random(f"{self.seed} bank {number}")
                self._transfers.append([])
                self._add_thread(self._client_loop(self._transfer_step(client, chance, self._transfers[-1]), chance))
            self._opened = opened.pop_all()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.stop()
        except (psycopg.Error, TimeoutError):
            # The error of the block matters more.
            if error[0] is None:
                raise

    @property
    def journal(self) -> list[Transaction]:
        """The transactions of all clients; read it only after `stop`."""
        return [one for part in (*(chain.journal for chain in self._chains), *self._transfers) for one in part]

    def wait(self, seconds: float) -> None:
        """Let the clients run for some seconds; raise the error of any client that failed."""
        if self._stopping.wait(seconds):
            self.stop()

    def stop(self) -> None:
        """Let every client end its transaction and decide its held transactions; raise the first error of a client."""
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

    def _add_thread(self, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run, daemon=True))

    def _client_loop(
        self, step: Callable[[], None], chance: random.Random, finish: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        def run() -> None:
            try:
                while not self._stopping.wait(chance.uniform(0, PAUSE_SECONDS_MAX)):
                    step()
                finish()
            except BaseException as error:  # noqa: BLE001 - the thread that calls stop() raises it
                self._errors.append(error)
                self._stopping.set()

        return run

    def _transfer_step(
        self, client: BankClient, chance: random.Random, journal: list[Transaction]
    ) -> Callable[[], None]:
        def move() -> None:
            transfer = choose_transfer(chance, len(self.dsns), CROSS_SHARD_RATIO)
            shards = tuple({shard_of(transfer.from_account), shard_of(transfer.to_account)})
            one = Transaction(f"bank-{transfer.id}", tuple(("transfer", s, str(transfer.id)) for s in shards))
            journal.append(one)
            one.decided = one.sent = time.monotonic()
            client.move(transfer, second_first=chance.random() < 0.5)
            one.acknowledged = one.last_sent = time.monotonic()

        return move
