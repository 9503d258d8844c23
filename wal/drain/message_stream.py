"""Read a slot's messages one by one, and overlap reading, decoding and storing in threads.

The server decodes WAL in one stream, so a node's drain is one task. Its other work adds almost no time, because
libpq, Arrow's encoder and the store's client release Python's global lock while they work.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Self, TypeAlias

import psycopg
import pyarrow as pa
from psycopg.pq import DiagnosticField, ExecStatus

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.storage.process_limits import TooLittleMemoryError

# A walsender sends a keepalive at least this often: every half wal_sender_timeout, which is a minute by default.
# If there is no answer, the server ends the session after the timeout.
SILENCE_SECONDS_MAX = 60.0
STREAM_SECONDS_MAX = 900.0
# The answer, without a position, so that the slot is not advanced.
STATUS = b"r" + bytes(33)


def stream_messages(
    pgconn: Any,
    slot: str,
    publications: tuple[str, ...],
    finish: Lsn,
    *,
    binary: bool = False,
    refused: Callable[[str, str], object] | None = None,
) -> Iterator[bytes]:
    """Yield the slot's messages (pgoutput, protocol 3) up to `finish`, or until reading ends for any reason.

    Does not advance the slot. Values are text or, with `binary`, in binary form if their types have one. If the
    server ends the stream with an error, `refused` is called with its SQLSTATE and text.
    """
    names = ",".join(f'"{name}"' for name in publications)
    options = f"proto_version '3', publication_names '{names}', messages 'true', binary '{str(binary).lower()}'"
    command = f'START_REPLICATION SLOT "{slot}" LOGICAL {ORIGIN} ({options})'
    if pgconn.exec_(command.encode()).status != ExecStatus.COPY_BOTH:
        return
    deadline = time.monotonic() + STREAM_SECONDS_MAX
    while time.monotonic() < deadline:
        try:
            count, data = pgconn.get_copy_data(1)
        except psycopg.Error:
            return
        if count < 0:
            if refused:
                ended = pgconn.get_result()
                state, text = (
                    (ended.error_field(field) or b"").decode(errors="replace")
                    for field in (DiagnosticField.SQLSTATE, DiagnosticField.MESSAGE_PRIMARY)
                )
                refused(state, text)
            return
        if count == 0:
            if not await_input(pgconn, SILENCE_SECONDS_MAX):
                return
            try:
                pgconn.consume_input()
            except psycopg.Error:
                return
            continue
        message = bytes(data)
        # 'w': start, end and time, then the plugin's message. 'k' (keepalive): the server's position and time, and
        # whether it asks for an answer.
        if int.from_bytes(message[1:9], "big") >= finish:
            return
        if message[:1] == b"w":
            yield message[25:]
        elif message[:1] == b"k" and message[17]:
            pgconn.put_copy_data(STATUS)
            pgconn.flush()


def await_input(pgconn: Any, seconds_max: float) -> bool:
    """Wait until the server has sent something; return whether it did so within this time."""
    # select() refuses descriptors above 1,023.
    with selectors.DefaultSelector() as selector:
        selector.register(pgconn.socket, selectors.EVENT_READ)
        return bool(selector.select(seconds_max))


Batches: TypeAlias = "Generator[pa.Array[Any], None, None]"
# Reading pauses once the total size of the unreleased batches reaches this limit, which the last batch may exceed.
AHEAD_BYTES = 16 << 20
LOOK_SECONDS = 1.0


class _Ahead:
    """Batches that a thread reads ahead, up to a total size; each counts toward the total until the next is requested.

    The two threads share only queues, which no interrupt can leave locked.
    """

    def __init__(self, read: Callable[[], Batches]) -> None:
        self._read = read
        # For each batch, its size and then the batch; None at the end.
        self._ready: SimpleQueue[Any] = SimpleQueue()
        # The sizes of the batches that were consumed; None to stop.
        self._released: SimpleQueue[int | None] = SimpleQueue()
        self._error: BaseException | None = None
        # What ends the consumer's connections also ends those of this thread.
        self._thread = Thread(target=copy_context().run, args=(self._run,), name="read ahead", daemon=True)

    def _run(self) -> None:
        held_bytes = 0
        try:
            with closing(self._read()) as batches:
                for batch in batches:
                    held_bytes += batch.nbytes
                    self._ready.put(batch.nbytes)
                    self._ready.put(batch)
                    # A batch may be 100 MB.
                    del batch
                    while held_bytes >= AHEAD_BYTES or not self._released.empty():
                        released_bytes = self._released.get()
                        if released_bytes is None:
                            return
                        held_bytes -= released_bytes
        except BaseException as error:  # noqa: BLE001  # raised where the batches are consumed
            self._error = error
        finally:
            self._ready.put(None)

    def batches(self) -> Iterator[pa.Array[Any]]:
        """Yield the batches; raise the reading thread's error."""
        self._thread.start()
        while (size_bytes := self._next()) is not None:
            # Don't keep a reference to a batch, which may be 100 MB.
            yield self._next()
            self._released.put(size_bytes)
        if self._error is not None:
            raise self._error

    def _next(self) -> Any:
        while True:
            try:
                return self._ready.get(timeout=LOOK_SECONDS)
            except Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    raise self._error or TooLittleMemoryError("the thread that reads ahead has ended") from None

    def stop(self) -> None:
        """Stop reading after the current batch, and wait for the thread.

        If an interrupt came while the thread was starting, the thread can't be joined; it ends after its first batch.
        """
        self._released.put(None)
        if self._thread.is_alive():
            self._thread.join()


@contextmanager
def read_ahead(read: Callable[[], Batches]) -> Iterator[Iterator[pa.Array[Any]]]:
    """Yield an iterator over the batches of `read`, which a thread reads in advance.

    The thread ends before the block does.
    """
    ahead = _Ahead(read)
    try:
        yield ahead.batches()
    finally:
        ahead.stop()


class BackgroundCalls:
    """Runs calls in a thread, in order, while the caller prepares the next one.

    Use it in a `with` block, which waits for the last call. An error in a call is raised by the next `run` or `wait`,
    or at the end of the block if the block raises no other error.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1)
        self._running: Future[None] | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Wait for the previous call, then start `call` in this thread's context, so its requests can be stopped."""
        self.wait()
        self._running = self._threads.submit(copy_context().run, call)

    def wait(self) -> None:
        """Wait for the last call to finish."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(wait=True)
        if kind is None:
            self.wait()
