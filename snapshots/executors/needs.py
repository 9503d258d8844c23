"""What a command's tasks need of an executor, and the test of it in the executor."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect
from cutline.storage.errors import ErrorReport, RefusedError, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectMissingError
from cutline.storage.storing import create_or_find

WAIT_SECONDS = 60.0


class ExecutorUnfitError(RefusedError):
    """An executor lacks what tasks need, or has it in another version."""


class StoreNotSharedError(RefusedError):
    """An executor has another store than the driver under the same URL: a folder of its own machine."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"its store {url} is not the one of this machine",
            hint="use a store that all machines share: s3://, or a folder of a network file system under one path",
            details={"store": url},
        )


@dataclass(frozen=True, slots=True)
class ExecutorNeeds:
    """The store, whether tasks write to it, and the nodes that they connect to.

    `wait_seconds`: how long to wait for an executor. `key` and `body` are an object that the driver has read or stored,
    and `folder` is where an executor stores an object of its own, "" if it writes nothing.
    """

    store: StoreLocation
    nodes: tuple[Node, ...] = ()
    writes: bool = False
    wait_seconds: float = WAIT_SECONDS
    key: str = ""
    body: bytes = b""
    folder: str = ""


def check_needs(needs: ExecutorNeeds) -> tuple[ErrorReport | None, str]:
    """Try all that is needed; return the first problem, and the key of what was stored."""
    key = ""
    try:
        check_shared(needs)
        if needs.folder:
            name = f"{needs.folder}/{uuid.uuid4().hex}"
            create_or_find(needs.store.open(), name, name.encode())
            key = name
        # Many executors ask at once: each begins with another node.
        first = uuid.uuid4().int % max(len(needs.nodes), 1)
        for node in (*needs.nodes[first:], *needs.nodes[:first]):
            connect(node).close()
    except SnapshotError as error:
        return report_of(error), key
    return None, key


def check_shared(needs: ExecutorNeeds) -> None:
    """Raise StoreNotSharedError unless the store has the driver's object; raise StoreUnreachableError."""
    store = needs.store.open()
    try:
        is_shared = store.read(needs.key) == needs.body
    except ObjectMissingError:
        is_shared = False
    if not is_shared:
        raise StoreNotSharedError(store.url)
