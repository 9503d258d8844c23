"""A fleet that a terminal snapshot made read-only: report it, undo it, and refuse a second terminal snapshot.

Nothing here needs Arrow or Spark. The previous settings are stored on the nodes (fleet/read_only/frozen.py), so undoing
the freeze needs no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import psycopg

from cutline.fleet.config import Fleet, Node
from cutline.fleet.nodes.connections import connect, raising_unreachable, shut_down_after
from cutline.fleet.nodes.lock import take_lock
from cutline.fleet.nodes.problems import NodeUnfitError
from cutline.fleet.nodes.sessions import Sessions, in_parallel, let_end
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Progress
from cutline.fleet.read_only.frozen import FreezeRecordError, Frozen, ThawResult, check_freezable, read_frozen, thaw
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError

THAW_SECONDS_MAX = 30.0


class FleetFrozenError(RefusedError):
    """The fleet is read-only already, by an earlier terminal snapshot."""


def check_terminal(sessions: Sessions, fleet_id: str, progress: Progress, *, terminal: bool) -> None:
    """Note which nodes are read-only. Before a `terminal` snapshot, raise if any is, or if the nodes can't be frozen.

    Raises FleetFrozenError, NodeUnfitError, FreezeRecordError.
    """

    def read(node: Node, connection: psycopg.Connection[Any]) -> Frozen | None:
        try:
            return read_frozen(node, connection)
        except FreezeRecordError as error:
            if terminal:
                raise
            progress.note(f"{error.message}; {error.hint}")
            return None

    frozen_nodes = {node: frozen for node, frozen in sessions.ask_named_primaries(read).items() if frozen}
    if terminal:
        for node, frozen in frozen_nodes.items():
            raise FleetFrozenError(
                f"node {node} is {frozen.text()} already",
                hint="without --terminal, a snapshot has the same state; before another terminal snapshot, run:"
                " snapshot resume",
                details={"node": node, "operation": frozen.operation, "since": frozen.since},
            )
        check_freezable(sessions, fleet_id)
    for text in dict.fromkeys(frozen.text() for frozen in frozen_nodes.values()):
        nodes = ", ".join(node for node, frozen in frozen_nodes.items() if frozen.text() == text)
        progress.note(f"{nodes}: {text}; to accept writes again, run: snapshot resume")


def undo_freeze(nodes: Iterable[Node], operation: str, progress: Progress) -> bool:
    """Undo the operation's freeze on all nodes; False if it may remain on some, which are named in notes."""

    def undo(node: Node) -> bool:
        try:
            with connect(node) as connection, shut_down_after(connection, THAW_SECONDS_MAX):
                thawed = thaw(node, connection, progress, operation)
        except RefusedError as error:
            progress.note(f"node {node.id} may still be read-only ({error.message}); {error.hint}")
            return False
        except (psycopg.Error, SnapshotError) as error:
            progress.note(f"node {node.id} may still be read-only ({error}); once it answers, run: snapshot resume")
            return False
        if thawed:
            progress.note(f"node {node.id} accepts writes again")
        return True

    return all(in_parallel(undo, [node for node in nodes if node.backup_of is None], let_end))


class ReadOnlyLeftError(UnreachableError):
    """Some nodes could not be reached and may still be read-only; the others accept writes again."""


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The results for the nodes that a terminal snapshot had made read-only; `asked` are all primaries."""

    results: tuple[ThawResult, ...]
    asked: tuple[str, ...]


def resume_fleet(fleet: Fleet, progress: Progress) -> ResumeReport:
    """Undo the freeze of any terminal snapshot on every primary that answers. Safe to repeat; needs no store.

    Raises FleetBusyError, with nothing changed, if another operation is running; ReadOnlyLeftError, NodeUnfitError or
    FreezeRecordError after the other nodes are done.
    """
    progress.step("accept writes", total=len(fleet.primaries), unit="nodes")
    with ExitStack() as stack:
        connections: dict[str, psycopg.Connection[Any]] = {}
        problems: dict[str, SnapshotError] = {}
        for node, opened in zip(fleet.primaries, in_parallel(_connect, fleet.primaries), strict=True):
            if isinstance(opened, SnapshotError):
                problems[node.id] = opened
            else:
                connections[node.id] = stack.enter_context(closing(opened))
        reached = sorted((node for node in fleet.primaries if node.id in connections), key=lambda one: one.id)
        # Take all locks before anything is changed: another operation would hold them all.
        for node in reached:
            with raising_unreachable(node):
                take_lock(node, connections[node.id], fleet.name, own_label("resume"))

        def undo(node: Node) -> ThawResult | None:
            try:
                return _thaw(node, connections[node.id], progress)
            except SnapshotError as error:
                problems[node.id] = error
                return None

        results = tuple(one for one in in_parallel(undo, reached, let_end) if one)
    if problems:
        raise _left_error(problems, results)
    return ResumeReport(results, tuple(node.id for node in fleet.primaries))


def _connect(node: Node) -> psycopg.Connection[Any] | SnapshotError:
    try:
        return connect(node)
    except SnapshotError as error:
        return error


def _thaw(node: Node, connection: psycopg.Connection[Any], progress: Progress) -> ThawResult | None:
    try:
        with raising_unreachable(node), shut_down_after(connection, THAW_SECONDS_MAX):
            result = thaw(node, connection, progress)
    except psycopg.Error as error:
        raise NodeUnfitError(
            f"node {node.id}: {str(error).splitlines()[0]}",
            hint="run it as the role that created the terminal snapshot or as a superuser, and only on primaries",
            details={"node": node.id},
        ) from error
    if result:
        progress.note(f"node {node.id} accepts writes again")
    progress.advance(1)
    return result


def _left_error(problems: Mapping[str, SnapshotError], results: tuple[ThawResult, ...]) -> SnapshotError:
    text = "; ".join(error.message for error in problems.values())
    refused = [error for error in problems.values() if isinstance(error, RefusedError)]
    return (type(refused[0]) if refused else ReadOnlyLeftError)(
        f"these nodes may still be read-only: {', '.join(problems)}: {text}"
        + (f"; {', '.join(one.node for one in results)} accept writes again" if results else ""),
        hint=refused[0].hint.split("\n") if refused else "once they answer, repeat: snapshot resume",
        details={"nodes": list(problems), "thawed": [one.node for one in results]},
    )
