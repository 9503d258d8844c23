"""A faulty network: a proxy before one PostgreSQL server that passes, refuses, resets or stalls connections.

A stall is the worst fault: the connection stays open, packets are acknowledged, and nothing is ever delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import SUPERUSER, EmbeddedNode
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.connections import database_name
from tests.faults.ports import HOST, free_ports

CHUNK_BYTES = 1 << 16
ANSWER_SECONDS_MAX = 10
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# CancelRequest and BackendKeyData (PostgreSQL manual, "Message Formats"): length, code, process id, key; and the id.
CANCEL, CANCEL_BEGINS = struct.Struct("!iiii"), (16, 80877102)
PROCESS, KEY_DATA = struct.Struct("!i"), re.compile(rb"K\0\0\0\x0c(.{4}).{4}Z", re.DOTALL)
# What a pooler adds to process ids.
MADE_UP = 1 << 24


class Mode(StrEnum):
    """What happens to open and new connections."""

    PASS = "pass"
    REFUSE = "refuse"  # open ones are reset, new ones refused
    RESET = "reset"  # open ones are reset, new ones as soon as they are accepted
    STALL = "stall"  # all stay open, and nothing is delivered until the mode is PASS again


@dataclass(slots=True)
class PgProxy:
    """A running proxy; its mode can be set from any thread.

    It stalls by itself once a client has sent data that contains `stall_after`; the server still gets that request. In
    a server's answers it replaces the first text of `replaces` by the second, which is as long. As a pooler may, it has
    the second database of `alias` under the first name, which is as long; then it also makes up process ids.
    """

    target: EmbeddedNode
    port: int
    mode: Mode = Mode.PASS
    stall_after: bytes = b""
    replaces: tuple[bytes, bytes] | None = None
    alias: tuple[str, str] | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def sessions(self) -> int:
        """How many client connections are open."""
        return len(self._open) // 2

    def set(self, mode: Mode) -> None:
        """Set the mode; when this returns, it has taken effect on open connections."""
        asyncio.run_coroutine_threadsafe(self._set(mode), self._loop).result(ANSWER_SECONDS_MAX)

    async def _set(self, mode: Mode) -> None:
        self.mode = mode
        self.stall_after = b""
        if mode in (Mode.REFUSE, Mode.RESET):
            for writer in list(self._open):
                _reset(writer)
        if mode is Mode.REFUSE and self._server is not None:
            self._server.close()
            self._server = None
        elif mode is not Mode.REFUSE and self._server is None:
            self._server = await asyncio.start_server(self._accept, HOST, self.port, reuse_address=True)
        if mode is Mode.STALL:
            self._flowing.clear()
        else:
            self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode is Mode.RESET:
            _reset(writer)
            return
        self._open.add(writer)
        try:
            await self._flowing.wait()
            server_reader, server_writer = await asyncio.open_unix_connection(self.target.socket)
        except OSError:
            self._open.discard(writer)
            _reset(writer)
            return
        self._open.add(server_writer)
        try:
            await asyncio.gather(self._pump(reader, server_writer, is_asking=True), self._pump(server_reader, writer))
        finally:
            for end in (writer, server_writer):
                self._open.discard(end)
                end.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_asking: bool = False
    ) -> None:
        with contextlib.suppress(ConnectionError):
            is_first = self.alias is not None
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                if is_first and self.alias is not None:
                    changed = as_client(data, *self.alias) if is_asking else as_pooler(data)
                    data, is_first = changed, changed == data
                writer.write(data if is_asking or self.replaces is None else data.replace(*self.replaces))
                if is_asking and self.stall_after and self.stall_after in data:
                    await self._set(Mode.STALL)
                await writer.drain()
        await self._flowing.wait()
        # A peer that ends a session has finished with both directions.
        writer.close()

    async def stop(self) -> None:
        """Close every connection."""
        await self._set(Mode.REFUSE)
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def as_client(data: bytes, alias: str, database: str) -> bytes:
    """Return the first message of a session, or a request to cancel a query, as the server has to get it."""
    if len(data) == CANCEL.size and CANCEL.unpack(data)[:2] == CANCEL_BEGINS:
        *begin, process, key = CANCEL.unpack(data)
        return CANCEL.pack(*begin, process - MADE_UP, key)
    # The startup message has its parameters as names and values, each of which ends with a zero byte.
    return data.replace(f"database\0{alias}\0".encode(), f"database\0{database}\0".encode())


def as_pooler(data: bytes) -> bytes:
    """Return a server's first messages with another process id."""
    if not (found := KEY_DATA.search(data)):
        return data
    (process,) = PROCESS.unpack(found[1])
    return data[: found.start(1)] + PROCESS.pack(process + MADE_UP) + data[found.end(1) :]


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()


@contextlib.contextmanager
def pg_proxy(target: EmbeddedNode) -> Iterator[PgProxy]:
    """Run a proxy before the server of `target` during the block."""
    (port,) = free_ports(1)
    proxy = PgProxy(target, port)
    thread = threading.Thread(target=proxy._loop.run_forever, name=f"proxy of {target.id}")
    thread.start()
    try:
        proxy.set(Mode.PASS)
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), proxy._loop).result(ANSWER_SECONDS_MAX)
        proxy._loop.call_soon_threadsafe(proxy._loop.stop)
        thread.join()
        proxy._loop.close()


@contextlib.contextmanager
def pg_proxies(servers: EmbeddedFleet) -> Iterator[Mapping[str, PgProxy]]:
    """Run proxies before all nodes of a fleet; yields them by node."""
    with contextlib.ExitStack() as stack:
        yield {node.id: stack.enter_context(pg_proxy(node)) for node in servers.nodes}


def route_through(proxies: Mapping[str, PgProxy], fleet: Fleet, path: Path) -> Fleet:
    """Write the fleet's configuration to `path`, with every DSN pointing to the node's proxy, and load it.

    A DSN has the proxy's alias of the database.
    """
    text = fleet.path.read_text()
    for node in fleet.nodes:
        if node.id in proxies:
            place = f"{SUPERUSER}@{HOST}:{proxies[node.id].port}"
            alias = proxies[node.id].alias
            name = alias[0] if alias else database_name(node.dsn)
            text = text.replace(f'"{node.dsn}"', f'"postgresql://{place}/{name}"')
    path.write_text(text)
    return load_fleet(path)
