"""Sessions on all nodes in a fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import psycopg

from cutline.fleet.config import Fleet, KnownServer, Node
from cutline.nodes.baseline import FoundNode, NodeIdentity, can_decode, check_baseline, check_topology, find_node
from cutline.nodes.clocks import ClockReading, use_clocks
from cutline.nodes.connections import (
    THREADS_MAX,
    WITHOUT_STANDBYS,
    NodeUnreachableError,
    await_futures,
    cancel_statements,
    connect,
    raising_unreachable,
    refuses_database,
    start_daemons,
    unreachable_error,
)
from cutline.nodes.problems import RUN_INIT, NodeProblem, find_connect_problems, raising_unfit, refuse_unfit
from cutline.nodes.watch import Watch, watch_nodes

Item = TypeVar("Item")
Result = TypeVar("Result")
CANCEL_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Sessions:
    """One open session per node, and the nodes' identities. `renew` replaces a lost session.

    `too_old` are standbys that can't decode their WAL: they have no session here and are not copied. `clocks` are the
    primaries' clocks, read when the sessions started.
    """

    fleet: Fleet
    nodes: tuple[Node, ...]
    connections: dict[str, psycopg.Connection[Any]]
    identities: Mapping[str, NodeIdentity]
    watch: Watch
    too_old: tuple[Node, ...] = ()
    clocks: tuple[ClockReading, ...] = ()

    @property
    def primaries(self) -> dict[str, psycopg.Connection[Any]]:
        """The primaries' sessions."""
        return {node.id: self.connections[node.id] for node in self.nodes if node.backup_of is None}

    @property
    def by_node(self) -> dict[Node, psycopg.Connection[Any]]:
        """The sessions by node."""
        return {node: self.connections[node.id] for node in self.nodes}

    def ask_primaries(self, read: Callable[[psycopg.Connection[Any]], Result]) -> dict[str, Result]:
        """Call `read` with every primary's session, in parallel; return its results by node.

        Raises NodeUnreachableError naming the node whose session was lost.
        """
        return self.ask_named_primaries(lambda _, connection: read(connection))

    def ask_named_primaries(self, read: Callable[[Node, psycopg.Connection[Any]], Result]) -> dict[str, Result]:
        """Call ask_primaries with a `read` that takes the node as well."""

        def ask(node: Node) -> Result:
            with raising_unreachable(node):
                return read(node, self.connections[node.id])

        primaries = [node for node in self.nodes if node.backup_of is None]
        return dict(zip((node.id for node in primaries), in_parallel(ask, primaries), strict=True))

    def renew(self, node: Node) -> psycopg.Connection[Any]:
        """Replace the session on `node` with a new session, and check that the node is still the same.

        Raises NodeUnreachableError, BaselineChangedError.
        """
        self.connections[node.id].close()
        # The baseline identifies the server, so `connect` does not have to.
        connection = connect(replace(node, server=None))
        try:
            check_baseline({node.id: self.identities[node.id]}, {node.id: identify(node, connection).identity})
        except BaseException:
            connection.close()
            raise
        self.connections[node.id] = connection
        return connection


def in_parallel(
    work: Callable[[Item], Result], items: Iterable[Item], interrupted: Callable[[], object] | None = None
) -> list[Result]:
    """Call `work` on all items, up to THREADS_MAX at a time; wait for all calls, then raise the first error.

    If this thread is interrupted while it waits, call `interrupted`, which should end the calls in progress.
    Without `interrupted`, the calls' statements are cancelled.
    """
    ordered = list(items)
    if not ordered:
        return []
    with ThreadPoolExecutor(max_workers=min(len(ordered), THREADS_MAX)) as threads:
        futures = [threads.submit(work, item) for item in ordered]
        try:
            # Don't stop waiting at the first error: an interrupt would then arrive while the executor waits for the
            # other calls.
            wait(futures)
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            if interrupted:
                interrupted()
                raise
            while left := [future for future in futures if not future.done()]:
                cancel_statements()
                wait(left, timeout=CANCEL_AGAIN_SECONDS)
            raise
    return [future.result() for future in futures]


def let_end() -> None:
    """Do nothing: passed to `in_parallel` as `interrupted`, it lets the calls in progress finish."""


@contextmanager
def open_sessions(
    fleet: Fleet, nodes: Iterable[Node], *, unfit_hint: str = RUN_INIT, needs_all: bool = False
) -> Iterator[Sessions]:
    """Connect to `nodes` in parallel, check their roles against fleet.toml, and watch whether they answer.

    With `needs_all`, the error does not suggest a snapshot without the standbys that can't be reached. From then on,
    this process uses the time of the primaries' clocks (nodes/clocks.py).

    Raises FleetTopologyError. Raises NodeUnfitError if our role lacks a privilege, and NodeUnreachableError if a node
    can't be reached, stops answering or ends a session; these two may also be raised while the block runs.
    """
    chosen = tuple(nodes)
    with ExitStack() as stack:
        stack.enter_context(raising_unfit(hint=unfit_hint))
        watch = stack.enter_context(watch_nodes(chosen))
        refused: dict[str, list[NodeProblem]] = {}
        futures = _connect_all(chosen, refused)
        connections: dict[str, psycopg.Connection[Any]] = {}
        stack.callback(_close, connections)
        problems: list[Exception] = []
        for node, future in zip(chosen, futures, strict=True):
            try:
                connections[node.id] = future.result()
            except Exception as error:  # noqa: BLE001  # raised below, after all nodes have been tried
                problems.append(error)
        refuse_unfit([problem for node in chosen for problem in refused.get(node.id, ())])
        if problems:
            away = {str(problem.details["node"]) for problem in problems if isinstance(problem, NodeUnreachableError)}
            is_avoidable = not needs_all and all(node.backup_of for node in chosen if node.id in away)
            raise _joined(problems, is_avoidable=is_avoidable)
        found_nodes = {node.id: identify(node, connections[node.id]) for node in chosen}
        check_topology(chosen, found_nodes)
        identities = {name: found_node.identity for name, found_node in found_nodes.items()}
        clocks = tuple(found_nodes[node.id].clock for node in chosen if node.backup_of is None)
        use_clocks(clocks)
        too_old = tuple(node for node in chosen if not can_decode(identities[node.id]))
        for node in too_old:
            connections.pop(node.id).close()
            del identities[node.id]
        known = {
            name: KnownServer(identity.system_identifier, identity.in_recovery) for name, identity in identities.items()
        }
        nodes_found = [replace(node, server=known.get(node.id)) for node in fleet.nodes]
        fleet = replace(fleet, nodes=tuple(nodes_found))
        chosen = tuple(replace(node, server=known[node.id]) for node in chosen if node.id in known)
        try:
            yield Sessions(fleet, chosen, connections, identities, watch, too_old, clocks)
        except psycopg.OperationalError as error:
            lost = [node for node in chosen if connections[node.id].closed]
            if not lost:
                raise
            raise unreachable_error(lost[0], error) from error


def _joined(problems: Sequence[Exception], *, is_avoidable: bool) -> Exception:
    """Return the first problem or, if it is an unreachable node, an error that names all unreachable nodes."""
    errors = [problem for problem in problems if isinstance(problem, NodeUnreachableError)]
    if not isinstance(problems[0], NodeUnreachableError):
        return problems[0]
    hints = dict.fromkeys(error.hint if is_avoidable else error.hint.removesuffix(WITHOUT_STANDBYS) for error in errors)
    nodes = [error.details["node"] for error in errors]
    joined = NodeUnreachableError(
        "; ".join(error.message for error in errors),
        hint="\n".join(hints).split("\n"),
        details={"node": nodes[0], "nodes": nodes},
    )
    joined.__cause__ = errors[0].__cause__
    return joined


def _connect_all(nodes: Sequence[Node], refused: dict[str, list[NodeProblem]]) -> list[Future[psycopg.Connection[Any]]]:
    """Call _connect for each node, up to THREADS_MAX at a time, and wait for all calls.

    An interrupt ends the wait, because a node that doesn't answer would delay the end of the command. Sessions that
    connect later are closed at once.
    """
    futures = [Future[psycopg.Connection[Any]]() for _ in nodes]
    left = deque(zip(nodes, futures, strict=True))

    def connect_one(one: tuple[Node, Future[psycopg.Connection[Any]]]) -> None:
        node, future = one
        try:
            future.set_result(_connect(node, refused))
        except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
            future.set_exception(error)

    try:
        await_futures(futures, start_daemons(connect_one, left, "connect"))
    except KeyboardInterrupt:
        left.clear()
        for future in futures:
            future.add_done_callback(_close_connected)
        raise
    return futures


def _close_connected(future: Future[psycopg.Connection[Any]]) -> None:
    if future.exception() is None:
        future.result().close()


def _connect(node: Node, refused: dict[str, list[NodeProblem]]) -> psycopg.Connection[Any]:
    """Connect to `node`, or raise NodeUnreachableError; if a missing privilege is the cause, add it to `refused`."""
    try:
        return connect(node)
    except NodeUnreachableError as error:
        if refuses_database(node, error.__cause__):
            refused[node.id] = list(find_connect_problems(node))
        raise


def _close(connections: Mapping[str, psycopg.Connection[Any]]) -> None:
    for connection in connections.values():
        connection.close()


def identify(node: Node, connection: psycopg.Connection[Any]) -> FoundNode:
    """Read the identity of `node`; raise NodeUnreachableError if the session is lost."""
    with raising_unreachable(node):
        return find_node(node, connection)
