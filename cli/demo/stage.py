"""The demo's resources: a folder, two embedded fleets, the bank workload.

However the story ends, all of them are removed: no process or file is left behind. The first Ctrl-C, SIGTERM or SIGHUP
starts the cleanup, and later signals do not interrupt it. Each step of the cleanup has a time limit.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet, programs_of, start_fleet, stop_fleet
from cutline.embedded.folder import read_state

SHARDS = 3
BACKUPS = 1
CLIENTS = 8
# Clients pause like people at a till, to leave processor time for the snapshots.
CLIENT_PAUSE_SECONDS = 0.01
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stage:
    """The two fleets and the bank; leaving the block stops and deletes everything."""

    def __init__(self, programs: Path | None = None) -> None:
        self._programs = programs_of(SHARDS, programs)
        self._opened = ExitStack()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="second fleet")
        self._interrupts = Interrupts()
        self._folder = Path()
        self._target: Future[EmbeddedFleet] | None = None

    def __enter__(self) -> Self:
        self._opened.enter_context(self._interrupts)
        try:
            self._folder = self._opened.enter_context(_folder())
            self._opened.callback(self._threads.shutdown)
        except BaseException:
            self._interrupts.hold()
            self._opened.close()
            raise
        return self

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.hold()
        self._opened.__exit__(error, value, trace)
        interrupt = self._interrupts.raised
        if interrupt is not None and value is not interrupt:
            # The interrupt may have caused a different error, such as a session that was ended. Raise the interrupt
            # instead.
            raise interrupt from value

    def start_source(self) -> EmbeddedFleet:
        """Start the source fleet."""
        return start_fleet(self._folder / "fleet", shards=SHARDS, backups=BACKUPS, programs=self._programs)

    def begin_target(self) -> None:
        """Start the fleet to restore into, in the background: equally many shards, no standbys, no databases."""
        folder, programs = self._folder / "restored", self._programs
        self._target = self._threads.submit(
            start_fleet, folder, shards=SHARDS, backups=0, schema=False, programs=programs
        )

    def target(self) -> EmbeddedFleet:
        """Wait until the fleet to restore into is running, and return it."""
        if self._target is None:
            raise RuntimeError("begin_target was not called")
        return self._target.result()

    def open_bank(self, fleet: EmbeddedFleet) -> BankWorkload:
        """Start the bank's clients; they run until `stop` or the end of the block."""
        return self._opened.enter_context(
            BankWorkload(
                fleet.dsns(),
                clients=CLIENTS,
                pause_seconds=CLIENT_PAUSE_SECONDS,
                names=[primary.id for primary in fleet.primaries],
            )
        )


class Interrupts:
    """Within the block, passes the first SIGINT, SIGTERM or SIGHUP to its previous handler, and ignores later signals.

    `raised` is the exception that the first signal raised.
    """

    def __init__(self) -> None:
        self._held = False
        self.raised: BaseException | None = None
        self._before = {number: signal.getsignal(number) for number in SIGNALS}

    def hold(self) -> None:
        """Ignore all further signals."""
        self._held = True

    def __enter__(self) -> Self:
        for number in self._before:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before[signal.Signals(number)]
        if self._held or before is signal.SIG_IGN:
            return
        self._held = True
        try:
            if callable(before):
                before(number, frame)
            else:
                raise KeyboardInterrupt
        except BaseException as error:
            self.raised = error
            raise


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a temporary folder; on exit, stop its fleets and delete everything.

    If root starts the servers, they run under a different account, which can't enter this folder, so their data is
    elsewhere (embedded/folder.py). If the demo is killed, the next command will delete everything
    (spark/session_folder.py).
    """
    folder = Path(tempfile.mkdtemp(prefix="cutline-demo-"))
    try:
        yield folder
    finally:
        for fleet in folder.iterdir():
            if read_state(fleet) is not None:
                stop_fleet(fleet, delete=True)
        shutil.rmtree(folder)
