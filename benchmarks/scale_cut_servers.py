"""Simulated nodes: a process that answers markers as PostgreSQL does, for thousands of sessions at once.

No machine runs ten thousand servers. This implements the part of PostgreSQL's wire protocol (manual, "Message
Formats") that libpq and a marker need, on the loopback. Nothing else is simulated: the sessions are psycopg's and the
wave is the product's. The position in each answer is the process's clock in nanoseconds, which shows how far apart the
markers of a wave arrived.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.machine import raise_open_files

STARTUP_PROTOCOL = 196608
START_SECONDS_MAX = 60
PARAMETERS = {"server_version": "18.0", "client_encoding": "UTF8", "standard_conforming_strings": "on"}


def message(kind: bytes, body: bytes) -> bytes:
    """A message of the protocol."""
    return kind + struct.pack(">I", len(body) + 4) + body


READY = message(b"Z", b"I")
WELCOME = b"".join(
    [
        message(b"R", struct.pack(">I", 0)),
        *(message(b"S", f"{name}\0{value}\0".encode()) for name, value in PARAMETERS.items()),
        message(b"K", struct.pack(">II", 1, 1)),
        READY,
    ]
)
# A column of type numeric and one of type pg_lsn, as text.
PARSED = message(b"1", b"") + message(b"2", b"")
COLUMNS = [
    name + struct.pack(">IHIhih", 0, 0, kind, size, -1, 0)
    for name, kind, size in ((b"clock\0", 1700, -1), (b"lsn\0", 3220, 8))
]
PARSED += message(b"T", struct.pack(">H", len(COLUMNS)) + b"".join(COLUMNS))
DONE = message(b"C", b"SELECT 1\0") + READY


class Session(asyncio.Protocol):
    """One session; it answers every Sync with a row that holds its clock."""

    def __init__(self) -> None:
        self.received = b""
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport for answers."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every whole message."""
        self.received += data
        while True:
            head = 1 if self.is_open else 0
            if len(self.received) < head + 4:
                return
            (size,) = struct.unpack_from(">I", self.received, head)
            if len(self.received) < head + size:
                return
            kind, body = self.received[:head], self.received[head + 4 : head + size]
            self.received = self.received[head + size :]
            self.answer(kind, body)

    def answer(self, kind: bytes, body: bytes) -> None:
        """Answer one message; messages other than startup, Sync and Terminate are answered at the next Sync."""
        if not self.is_open:
            self.is_open = struct.unpack_from(">I", body)[0] == STARTUP_PROTOCOL
            self.transport.write(WELCOME if self.is_open else b"N")
        elif kind == b"S":
            now = time.monotonic_ns()
            position = f"{now >> 32:X}/{now & 0xFFFFFFFF:X}".encode()
            clock = f"{time.time():.6f}".encode()
            columns = b"".join(struct.pack(">I", len(value)) + value for value in (clock, position))
            row = message(b"D", struct.pack(">H", 2) + columns)
            self.transport.write(PARSED + row + DONE)
        elif kind == b"X":
            self.transport.close()


def serve(port_pipe: Connection) -> None:
    """Answer sessions until the process is terminated; send the port to `port_pipe`."""
    raise_open_files()

    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(Session, "127.0.0.1", 0, backlog=4096)
        port_pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(forever())


@contextmanager
def simulated_nodes() -> Iterator[int]:
    """Run the process for the life of the context, and yield its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(START_SECONDS_MAX):
            raise TimeoutError(f"the simulated nodes did not start within {START_SECONDS_MAX} s")
        yield ours.recv()
    finally:
        process.terminate()
        process.join()
