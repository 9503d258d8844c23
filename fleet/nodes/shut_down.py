"""Shut connections down: end them from any thread, also where their server has stopped answering."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from cutline.fleet.config import Node

# The numbers of this process's open files, on Linux and elsewhere.
DESCRIPTORS = Path("/dev/fd")

CANCEL_SECONDS_MAX = 5.0

AnyConnection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]
# The open connections of this process, and their servers; and the addresses at which servers were reached.
_open: WeakKeyDictionary[psycopg.Connection[Any], str] = WeakKeyDictionary()
_addresses: dict[str, set[Any]] = {}
_open_lock = threading.Lock()


def remember_open(connection: psycopg.Connection[Any], node: Node) -> None:
    """Let shut_down_sessions find the connection, and the server's address."""
    server = _server_of(node)
    with _open_lock, suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as handle:
        _open[connection] = server
        _addresses.setdefault(server, set()).add(handle.getpeername())


def shut_down(connection: AnyConnection) -> None:
    """End the connection, from any thread: a thread that waits for its answer gets an OperationalError at once."""
    try:
        handle = socket.socket(fileno=os.dup(connection.fileno()))
    except (OSError, psycopg.Error):
        return
    with handle, suppress(OSError):
        # While the connection is open, its descriptor can't belong to another file.
        if not connection.closed:
            handle.shutdown(socket.SHUT_RDWR)


def cancel_statements() -> None:
    """Cancel what the sessions of this process run now, from any thread; a request before its statement is lost."""
    with _open_lock:
        running = [one for one in _open if one.pgconn.transaction_status == TransactionStatus.ACTIVE]
    for connection in running:
        with suppress(psycopg.Error):
            connection.cancel_safe(timeout=CANCEL_SECONDS_MAX)


def shut_down_sessions(node: Node, kept: Iterable[psycopg.Connection[Any]] = ()) -> None:
    """End all connections of this process to the server of `node`, also those of drivers that don't show theirs.

    Those `kept` stay; only the thread that calls this may close them.
    """
    server, spared = _server_of(node), set(kept)
    with _open_lock:
        connections = [one for one, other in _open.items() if other == server and one not in spared]
        addresses = frozenset(_addresses.get(server, ()))
    sockets = frozenset(os.fstat(one.fileno()).st_ino for one in spared if not one.closed)
    for connection in connections:
        shut_down(connection)
    with suppress(OSError):
        for descriptor in DESCRIPTORS.iterdir():
            _shut_down_to(addresses, int(descriptor.name), sockets)


def _shut_down_to(addresses: frozenset[Any], descriptor: int, spared: Set[int]) -> None:
    """Shut the descriptor down if it is a socket that is connected to one of these addresses, and not `spared`."""
    with suppress(OSError):
        # A copy: the number may belong to another file by now, the copy does not change.
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
    """Limit the time of the block: shut the connection down if the block still runs after `seconds`."""
    timer = threading.Timer(seconds, shut_down, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _server_of(node: Node) -> str:
    """The node's dsn without database and settings: if a server stops answering, it does so for all its sessions."""
    given = conninfo_to_dict(node.dsn)
    return make_conninfo("", **{key: value for key, value in given.items() if key not in ("dbname", "options")})
