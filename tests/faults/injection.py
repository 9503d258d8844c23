"""Faults of the fleet and of the store, each by a name; `begin` does one and returns what mends it.

A fault with a command of its own (a signal) is in tests/faults/signalled_command.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg

from embedded.fleet import EmbeddedFleet
from embedded.server import EmbeddedNode
from tests.faults.pg_proxy import Mode, PgProxy
from tests.s3_proxy import Fault, S3Proxy

PAUSE_SECONDS = 1.5
SLOW_SECONDS = 0.1
DISK_BYTES = 400 << 20
FILLER_MESSAGES = 80
UNAVAILABLE = Fault(arrives=False, status=503, code="ServiceUnavailable")

Mend = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Place:
    """What can fail: servers, the network before each, the store's, and a node whose disk is small."""

    servers: EmbeddedFleet
    proxies: Mapping[str, PgProxy]
    store: S3Proxy
    small_disk: EmbeddedNode | None
    choice: random.Random


def primary_down(place: Place) -> Mend:
    """A primary is killed and stays down until the command is over."""
    node = place.choice.choice(place.servers.primaries)
    place.servers.kill_node(node)
    return lambda: place.servers.start_node(node)


def primary_restarted(place: Place) -> Mend:
    """A primary is killed and comes back at once."""
    node = place.choice.choice(place.servers.primaries)
    place.servers.kill_node(node)
    place.servers.start_node(node)
    return lambda: None


def standby_down(place: Place) -> Mend:
    """A standby is killed and stays down until the command is over."""
    node = place.choice.choice([node for node in place.servers.nodes if node.backup_of])
    place.servers.kill_node(node)
    return lambda: place.servers.start_node(node)


def network_refused(place: Place) -> Mend:
    """A node refuses connections, and loses those it had."""
    return _network(place, Mode.REFUSE)


def network_reset(place: Place) -> Mend:
    """A node's connections are reset once; new ones are taken."""
    proxy = place.proxies[place.choice.choice(sorted(place.proxies))]
    proxy.set(Mode.RESET)
    proxy.set(Mode.PASS)
    return lambda: None


def network_paused(place: Place) -> Mend:
    """Nothing comes from a node for a while; then all of it does."""
    proxy = place.proxies[place.choice.choice(sorted(place.proxies))]
    proxy.set(Mode.STALL)
    timer = threading.Timer(PAUSE_SECONDS, proxy.set, (Mode.PASS,))
    timer.start()
    return timer.join


def network_stalled(place: Place) -> Mend:
    """Nothing comes from a node until the command is over, which has to end by itself."""
    return _network(place, Mode.STALL)


def store_failing(place: Place) -> Mend:
    """The store says no to everything."""
    place.store.outage = UNAVAILABLE

    def mend() -> None:
        place.store.outage = None

    return mend


def store_slow(place: Place) -> Mend:
    """The store takes its time."""
    place.store.delay_seconds = SLOW_SECONDS

    def mend() -> None:
        place.store.delay_seconds = 0

    return mend


def store_silent(place: Place) -> Mend:
    """The store takes requests and never answers."""
    place.store.answering.clear()
    return place.store.answering.set


def disk_full(place: Place) -> Mend:
    """A primary's disk has no byte left, and the server needs some."""
    node = place.small_disk
    if node is None:
        raise RuntimeError("there is no node with a small disk")
    ballast = node.data_directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * (1 << 20))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    with contextlib.suppress(psycopg.Error), psycopg.connect(node.dsn(), autocommit=True) as connection:
        for _ in range(FILLER_MESSAGES):
            connection.execute("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000), true)")

    def mend() -> None:
        ballast.unlink()
        place.servers.start_node(node)

    return mend


def _network(place: Place, mode: Mode) -> Mend:
    proxy = place.proxies[place.choice.choice(sorted(place.proxies))]
    proxy.set(mode)
    return lambda: proxy.set(Mode.PASS)


STORE_FAULTS = (store_failing, store_slow, store_silent)
NETWORK_FAULTS = (network_refused, network_reset, network_paused, network_stalled)
FLEET_FAULTS = (primary_down, primary_restarted, standby_down, *NETWORK_FAULTS)
# What a command must get over.
HARMLESS = (store_slow, network_paused)


@contextlib.contextmanager
def on_small_disk(servers: EmbeddedFleet, node: EmbeddedNode) -> Iterator[None]:
    """Move a node's data to a file system of DISK_BYTES in memory for the block. Needs root, and leave to mount."""
    data, kept = node.data_directory, node.folder / "kept"
    servers.stop_node(node)
    data.rename(kept)
    data.mkdir(mode=0o700)
    owner = kept.stat()
    options = f"size={DISK_BYTES},mode=0700,uid={owner.st_uid},gid={owner.st_gid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(data)], check=True)
    try:
        subprocess.run(["cp", "-a", f"{kept}/.", str(data)], check=True)
        shutil.rmtree(kept)
        servers.start_node(node)
        yield
    finally:
        servers.stop_node(node, immediate=True)
        # Detached at once: a child of the server may still end.
        subprocess.run(["umount", "--lazy", str(data)], check=True)


def may_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    if os.geteuid() != 0:
        return False
    place = folder / "mount"
    place.mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=False, capture_output=True)
    if tried.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)
    place.rmdir()
    return tried.returncode == 0


@contextlib.contextmanager
def mended_after(mends: list[Mend], seconds: float) -> Iterator[threading.Event]:
    """Mend at the end of the block, or after `seconds`, so that what hangs ends; the event says that it hung."""
    hung = threading.Event()
    lock = threading.Lock()

    def mend() -> None:
        with lock:
            while mends_left:
                mends_left.pop()()

    def give_up() -> None:
        hung.set()
        mends_left.extend(mends)
        mend()

    mends_left: list[Mend] = []
    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield hung
    finally:
        timer.cancel()
        if not hung.is_set():
            mends_left.extend(mends)
        mend()
