"""The bank's clients in a separate process, so that they never wait for the measuring process.

Times are on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from cutline.embedded.bank_workload import BankWorkload

START_SECONDS_MAX = 60
END_SECONDS_MAX = 120
POLL_SECONDS = 0.1

Seconds = npt.NDArray[np.float64]


@dataclass(slots=True)
class Clients:
    """The running clients; their measurements are available once they have ended."""

    starts: Seconds = field(default_factory=lambda: np.empty(0))
    seconds: Seconds = field(default_factory=lambda: np.empty(0))


@contextmanager
def clients_at_work(dsns: Sequence[str], *, clients: int, pause_seconds: float) -> Iterator[Clients]:
    """Run the bank's clients on the shards `dsns` while the block runs; raise RuntimeError if they ended early."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run_clients, args=(list(dsns), clients, pause_seconds, there), daemon=True)
    process.start()
    there.close()
    found = Clients()
    try:
        _receive(here, START_SECONDS_MAX)
        yield found
        here.send("end")
        found.starts, found.seconds = _receive(here, END_SECONDS_MAX)
        process.join(END_SECONDS_MAX)
    finally:
        if process.is_alive():
            process.terminate()
            process.join()


def _receive(pipe: Connection, seconds_max: float) -> tuple[Seconds, Seconds]:
    try:
        answer = pipe.recv() if pipe.poll(seconds_max) else "the clients did not answer"
    except EOFError:
        answer = "the clients' process ended"
    if isinstance(answer, str):
        raise RuntimeError(answer)
    starts, seconds = answer
    return starts, seconds


def _run_clients(dsns: list[str], clients: int, pause_seconds: float, pipe: Connection) -> None:
    try:
        with BankWorkload(dsns, clients=clients, pause_seconds=pause_seconds) as bank:
            pipe.send((np.empty(0), np.empty(0)))
            while not pipe.poll():
                if not bank.wait(POLL_SECONDS):
                    break
        entries = np.array(bank.latencies.entries()).reshape(-1, 2)
        pipe.send((entries[:, 0], entries[:, 1]))
    except Exception as error:  # noqa: BLE001  # the parent process raises it
        pipe.send(f"{type(error).__name__}: {error}")
