"""The open sessions of this process, and how other threads end them or cancel their statements."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from cutline.fleet.config import Node
from cutline.fleet.timers import calling_after

# The folder that lists this process's open descriptors, on Linux and other systems.
DESCRIPTORS = Path("/dev/fd")
CANCEL_SECONDS_MAX = 5.0

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
# The servers of this process's open connections, and the addresses at which each server was reached.
_open: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()
_addresses: dict[str, set[Any]] = {}
_open_lock = threading.Lock()


class _Opened:
    """The connections that a block opens (`stoppable_sessions`)."""

    def __init__(self) -> None:
        self._connections: WeakSet[psycopg.Connection[Any]] = WeakSet()
        self._lock = threading.Lock()
        self._is_stopped = False

    def add(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            self._connections.add(connection)
            is_late = self._is_stopped
        if is_late:
            shut_down(connection)

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            connections = list(self._connections)
        for connection in connections:
            shut_down(connection)


_opened: ContextVar[_Opened | None] = ContextVar("opened", default=None)


@contextmanager
def stoppable_sessions() -> Iterator[Callable[[], None]]:
    """Yield a function with which another thread can end the connections that this thread opens in the block.

    Connections that are opened later are ended at once.
    """
    opened = _Opened()
    before = _opened.set(opened)
    try:
        yield opened.stop
    finally:
        _opened.reset(before)


def remember_open(connection: psycopg.Connection[Any], node: Node) -> None:
    """Register the connection and the server's address for shut_down_sessions and stoppable_sessions."""
    server = _server_of(node)
    if opened := _opened.get():
        opened.add(connection)
    with _open_lock, suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as handle:
        _open[connection] = server
        _addresses.setdefault(server, set()).add(handle.getpeername())


def shut_down(connection: AnyConnection) -> None:
    """End the connection. May be called from any thread: a thread waiting on the connection gets OperationalError."""
    try:
        handle = socket.socket(fileno=os.dup(connection.fileno()))
    except (OSError, psycopg.Error):
        return
    with handle, suppress(OSError):
        # While the connection is open, its descriptor can't belong to another file.
        if not connection.closed:
            handle.shutdown(socket.SHUT_RDWR)


def cancel_statements() -> None:
    """Cancel the running statements of this process's sessions. May be called from any thread.

    A request that arrives before the statement starts has no effect.
    """
    with _open_lock:
        running = [session for session in _open if session.pgconn.transaction_status == TransactionStatus.ACTIVE]
    for connection in running:
        with suppress(psycopg.Error):
            connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)


def shut_down_sessions(nodes: Iterable[Node], kept: Iterable[psycopg.Connection[Any]] = ()) -> None:
    """End all connections from this process to the nodes' servers, even those from drivers that hide their sockets.

    The connections in `kept` stay open; no other thread may close them.
    """
    servers, spared = set(map(_server_of, nodes)), set(kept)
    with _open_lock:
        connections = [session for session, server in _open.items() if server in servers and session not in spared]
        addresses = frozenset(address for server in servers for address in _addresses.get(server, ()))
    sockets = frozenset(os.fstat(session.fileno()).st_ino for session in spared if not session.closed)
    for connection in connections:
        shut_down(connection)
    with suppress(OSError):
        for descriptor in DESCRIPTORS.iterdir():
            _shut_down_to(addresses, int(descriptor.name), sockets)


def _shut_down_to(addresses: frozenset[Any], descriptor: int, spared: Set[int]) -> None:
    """Shut the descriptor down if it is a socket connected to one of these addresses, unless its inode is `spared`."""
    with suppress(OSError):
        # Use a duplicate: the number may soon be reused for a different file, but the duplicate still refers to the
        # same one.
        copy = os.dup(descriptor)
        try:
            handle = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return
        with handle:
            if handle.getpeername() in addresses and os.fstat(copy).st_ino not in spared:
                handle.shutdown(socket.SHUT_RDWR)


@contextmanager
def shut_down_after(connection: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Shut the connection down if the block is still running after `seconds`."""
    with calling_after(seconds, partial(shut_down, connection)):
        yield


def _server_of(node: Node) -> str:
    """Return the node's dsn without database and settings: a server that stops answering does so in every session."""
    given = conninfo_to_dict(node.dsn)
    return make_conninfo("", **{key: value for key, value in given.items() if key not in ("dbname", "options")})
