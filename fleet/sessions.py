"""Sessions on all nodes of a fleet at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg

from fleet.baseline import NodeIdentity, check_topology, read_identity
from fleet.config import Fleet, Node
from fleet.connections import connect, unreachable
from fleet.watch import Watch, watched

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sessions:
    """One open session per node, and what each node is."""

    fleet: Fleet
    nodes: tuple[Node, ...]
    connections: Mapping[str, psycopg.Connection[Any]]
    identities: Mapping[str, NodeIdentity]
    watch: Watch

    @property
    def primaries(self) -> dict[str, psycopg.Connection[Any]]:
        """The primaries' sessions."""
        return {node.id: self.connections[node.id] for node in self.nodes if node.backup_of is None}


def in_parallel(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Do `work` on all items at once, a thread each; raise the first error once all have ended."""
    ordered = list(items)
    if not ordered:
        return []
    with ThreadPoolExecutor(max_workers=len(ordered)) as threads:
        return [future.result() for future in [threads.submit(work, item) for item in ordered]]


@contextmanager
def open_sessions(fleet: Fleet, nodes: Iterable[Node]) -> Iterator[Sessions]:
    """Connect to `nodes` all at once, see that they are what fleet.toml says, and watch that they answer.

    Raises NodeUnreachableError, also where a node falls silent or ends a session while the block runs, and
    FleetTopologyError.
    """
    chosen = tuple(nodes)
    with ExitStack() as stack:
        watch = stack.enter_context(watched(chosen))
        threads = stack.enter_context(ThreadPoolExecutor(max_workers=len(chosen)))
        futures = [threads.submit(connect, node) for node in chosen]
        connections: dict[str, psycopg.Connection[Any]] = {}
        problem: BaseException | None = None
        for node, future in zip(chosen, futures, strict=True):
            try:
                connections[node.id] = stack.enter_context(future.result())
            except BaseException as error:  # noqa: BLE001  # raised below, once all are collected
                problem = problem or error
        if problem:
            raise problem
        identities = {node.id: identify(node, connections[node.id]) for node in chosen}
        check_topology(chosen, identities)
        try:
            yield Sessions(fleet, chosen, connections, identities, watch)
        except psycopg.OperationalError as error:
            lost = [node for node in chosen if connections[node.id].closed]
            if not lost:
                raise
            raise unreachable(lost[0], error) from error


def identify(node: Node, connection: psycopg.Connection[Any]) -> NodeIdentity:
    """What the node is; raise NodeUnreachableError if it can't say."""
    try:
        return read_identity(node, connection)
    except psycopg.OperationalError as error:
        raise unreachable(node, error) from error
