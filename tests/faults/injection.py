"""The faults of the fleet and the store: each is a function that causes the fault and returns how to repair it.

Signals to the command itself are in tests/faults/signalled_command.py.
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

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode, stop_server
from tests.faults.awaited import await_none
from tests.faults.pg_proxy import Mode, PgProxy
from tests.s3.proxy import Fault, S3Proxy
from tests.servers.disasters import kill_server

PAUSE_SECONDS = 1.5
SLOW_SECONDS = 0.1
DISK_BYTES = 400 << 20
FILLER_MESSAGES = 80
UNAVAILABLE = Fault(arrives=False, status=503, code="ServiceUnavailable")

Repair = Callable[[], None]


@dataclass(frozen=True, slots=True)
class FaultTargets:
    """What can fail: the servers, the network to each of them and to the store, and a node with a small disk."""

    servers: EmbeddedFleet
    proxies: Mapping[str, PgProxy]
    store: S3Proxy
    small_disk: EmbeddedNode | None
    generator: random.Random


def primary_down(targets: FaultTargets) -> Repair:
    """Kill a primary; it stays down until the command has ended."""
    node = targets.generator.choice(targets.servers.primaries)
    kill_server(node)
    return lambda: targets.servers.start_node(node)


def primary_restarted(targets: FaultTargets) -> Repair:
    """Kill a primary and restart it at once."""
    node = targets.generator.choice(targets.servers.primaries)
    kill_server(node)
    targets.servers.start_node(node)
    return lambda: None


def standby_down(targets: FaultTargets) -> Repair:
    """Kill a standby; it stays down until the command has ended."""
    node = targets.generator.choice([node for node in targets.servers.nodes if node.backup_of])
    kill_server(node)
    return lambda: targets.servers.start_node(node)


def network_refused(targets: FaultTargets) -> Repair:
    """Reset a node's connections and refuse new ones."""
    return _network(targets, Mode.REFUSE)


def network_reset(targets: FaultTargets) -> Repair:
    """Reset a node's connections once; new ones are accepted."""
    proxy = targets.proxies[targets.generator.choice(sorted(targets.proxies))]
    proxy.set(Mode.RESET)
    proxy.set(Mode.PASS)
    return lambda: None


def network_paused(targets: FaultTargets) -> Repair:
    """Delay everything from a node for a while, then deliver it."""
    proxy = targets.proxies[targets.generator.choice(sorted(targets.proxies))]
    proxy.set(Mode.STALL)
    timer = threading.Timer(PAUSE_SECONDS, proxy.set, (Mode.PASS,))
    timer.start()
    return timer.join


def network_stalled(targets: FaultTargets) -> Repair:
    """Stall a node's network until the command has ended, which must not need a repair."""
    return _network(targets, Mode.STALL)


def store_failing(targets: FaultTargets) -> Repair:
    """Answer every request to the store with 503."""
    targets.store.outage = UNAVAILABLE

    def repair() -> None:
        targets.store.outage = None

    return repair


def store_slow(targets: FaultTargets) -> Repair:
    """Slow down every request to the store."""
    targets.store.delay_seconds = SLOW_SECONDS

    def repair() -> None:
        targets.store.delay_seconds = 0

    return repair


def store_silent(targets: FaultTargets) -> Repair:
    """Let the store accept requests and never answer."""
    targets.store.answering.clear()
    return targets.store.answering.set


def disk_full(targets: FaultTargets) -> Repair:
    """Fill a primary's disk up to the last byte, and let the server write WAL."""
    node = targets.small_disk
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
            connection.execute(
                "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000)), pg_current_xact_id()"
            )

    def repair() -> None:
        ballast.unlink()
        # Its recovery may still be about to fail, because the disk was full when it began.
        await_none(lambda: not accepts_sessions())

    def accepts_sessions() -> bool:
        targets.servers.start_node(node)
        try:
            psycopg.connect(node.dsn()).close()
        except psycopg.OperationalError:
            return False
        return True

    return repair


def _network(targets: FaultTargets, mode: Mode) -> Repair:
    proxy = targets.proxies[targets.generator.choice(sorted(targets.proxies))]
    proxy.set(mode)
    return lambda: proxy.set(Mode.PASS)


STORE_FAULTS = (store_failing, store_slow, store_silent)
NETWORK_FAULTS = (network_refused, network_reset, network_paused, network_stalled)
FLEET_FAULTS = (primary_down, primary_restarted, standby_down, *NETWORK_FAULTS)
# The faults in spite of which a command must succeed.
HARMLESS = (store_slow, network_paused)


@contextlib.contextmanager
def on_small_disk(servers: EmbeddedFleet, node: EmbeddedNode) -> Iterator[None]:
    """Keep a node's data on a tmpfs of DISK_BYTES during the block. Needs root and the right to mount."""
    data, kept = node.data_directory, node.folder / "kept"
    stop_server(node)
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
        stop_server(node, immediate=True)
        # Lazily, because a child process of the server may not have ended yet.
        subprocess.run(["umount", "--lazy", str(data)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    if os.geteuid() != 0:
        return False
    mount_point = folder / "mount"
    mount_point.mkdir()
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mount_point)], check=False, capture_output=True)
    if tried.returncode == 0:
        subprocess.run(["umount", str(mount_point)], check=True)
    mount_point.rmdir()
    return tried.returncode == 0


@contextlib.contextmanager
def repaired_after(repairs: list[Repair], seconds: float) -> Iterator[threading.Event]:
    """Repair after the block, or after `seconds`, so that a block that hangs can end; then the event is set."""
    hung = threading.Event()
    lock = threading.Lock()

    def repair() -> None:
        with lock:
            while repairs_left:
                repairs_left.pop()()

    def give_up() -> None:
        hung.set()
        repairs_left.extend(repairs)
        repair()

    repairs_left: list[Repair] = []
    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield hung
    finally:
        timer.cancel()
        if not hung.is_set():
            repairs_left.extend(repairs)
        repair()
