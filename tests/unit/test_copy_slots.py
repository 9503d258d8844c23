"""An interrupt while slots are made ends the command as an interrupt, at once, whatever the threads end with."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

import cutline.snapshots.base_copy.copy_slots as module
from cutline.fleet.config import Fleet, Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress, Silent
from cutline.snapshots.base_copy.copy_slots import export_snapshots
from cutline.wal.drain.open_transactions import SlotWaitError, wait_error
from cutline.wal.drain.slots import ExportedSlot

SECONDS_MAX = 20.0
NODES = tuple(Node(name, f"host={name}") for name in ("a", "b", "c"))


class FleetOfPrimaries:
    """A fleet without standbys."""

    def node(self, name: str) -> Node:
        return next(node for node in NODES if node.id == name)


class Connection:
    """A session, or whether it is closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def make_slots() -> None:
    with export_snapshots(cast("Fleet", FleetOfPrimaries()), NODES, "slot", SECONDS_MAX, Silent()):
        pass


def wait_for_transactions(
    node: Node,
    _primary: Node,
    _name: str,
    seconds_max: float,
    _progress: Progress,
    abandoned: threading.Event,
    **_options: bool,
) -> ExportedSlot:
    """Make no slot: a transaction does not end."""
    abandoned.wait(seconds_max)
    raise wait_error(f"slot on node {node.id}", seconds_max, [], node.id)


def test_an_interrupt_while_threads_begin_ends_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            begun = super().submit(*arguments, **options)
            if arguments[1] == NODES[1]:
                raise KeyboardInterrupt
            return begun

    monkeypatch.setattr(module, "create_exported_slot", wait_for_transactions)
    monkeypatch.setattr(module, "ThreadPoolExecutor", Interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make_slots()
    assert time.monotonic() - began < SECONDS_MAX / 2


def test_an_interrupt_that_is_handled_after_a_thread_has_failed_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just before the main thread begins to wait is handled when that wait ends."""

    def wait_and_signal(node: Node, *arguments: Any, **_options: bool) -> ExportedSlot:
        if node == NODES[0]:
            # The main thread waits by now; as that signal, this does not end its wait.
            time.sleep(0.3)
            _thread.interrupt_main(signal.SIGINT)
            arguments[-1].set()
        return wait_for_transactions(node, *arguments)

    monkeypatch.setattr(module, "create_exported_slot", wait_and_signal)
    with pytest.raises(KeyboardInterrupt):
        make_slots()


def test_slots_are_closed_also_where_another_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = {node.id: Connection() for node in NODES}

    def make_but_one(node: Node, *arguments: Any, **_options: bool) -> ExportedSlot:
        if node == NODES[1]:
            return wait_for_transactions(node, *arguments)
        if node == NODES[2]:
            arguments[-1].set()
        return ExportedSlot(Lsn(1), "snapshot", cast("Any", connections[node.id]))

    monkeypatch.setattr(module, "create_exported_slot", make_but_one)
    with pytest.raises(SlotWaitError, match="slot on node b"):
        make_slots()
    assert {name: one.closed for name, one in connections.items()} == {"a": True, "b": False, "c": True}
