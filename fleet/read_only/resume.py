"""A fleet that a terminal snapshot has made read-only: saying so, undoing it, refusing what would lose the way back.

Nothing here needs Arrow or Spark. What was set before is on the nodes (fleet/read_only/frozen.py), so undoing it
asks no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.config import Fleet, Node
from fleet.label import own_label
from fleet.nodes.connections import connect, raising_unreachable, shut_down_after
from fleet.nodes.lock import lock_key, take_lock
from fleet.nodes.preconditions import NodeUnfitError
from fleet.nodes.sessions import Sessions, in_parallel
from fleet.progress import Progress
from fleet.read_only.freezable import check_freezable
from fleet.read_only.frozen import Thawed, read_frozen, thaw
from storage.errors import RefusedError, SnapshotError, UnreachableError

THAW_SECONDS_MAX = 30.0


class FleetFrozenError(RefusedError):
    """The fleet is read-only already, by an earlier terminal snapshot."""


def check_terminal(sessions: Sessions, fleet_id: str, progress: Progress, *, terminal: bool) -> None:
    """Say what of the fleet is read-only; before a `terminal` snapshot refuse that, and whatever would keep it so.

    Raises FleetFrozenError, NodeUnfitError.
    """
    found = {node: frozen for node, frozen in sessions.ask_primaries(read_frozen).items() if frozen}
    if terminal:
        for node, frozen in found.items():
            raise FleetFrozenError(
                f"node {node} is {frozen.text()} already",
                hint="without --terminal a snapshot has the same state; for another terminal one run first:"
                " snapshot resume",
                details={"node": node, "operation": frozen.operation, "since": frozen.since},
            )
        check_freezable(sessions, fleet_id)
    for text in dict.fromkeys(frozen.text() for frozen in found.values()):
        nodes = ", ".join(node for node, frozen in found.items() if frozen.text() == text)
        progress.note(f"{nodes}: {text}; to end that: snapshot resume")


def undo_freeze(nodes: Iterable[Node], operation: str, progress: Progress) -> bool:
    """Make what the operation has frozen writable again; False if a node is left, which is then named."""

    def undo(node: Node) -> bool:
        try:
            with connect(node) as connection, shut_down_after(connection, THAW_SECONDS_MAX):
                thawed = thaw(node, connection, progress, operation)
        except (psycopg.Error, SnapshotError) as error:
            progress.note(f"node {node.id} may still be read-only ({error}): once it answers run: snapshot resume")
            return False
        if thawed:
            progress.note(f"node {node.id} accepts writes again")
        return True

    return all(in_parallel(undo, [node for node in nodes if node.backup_of is None]))


class ReadOnlyLeftError(UnreachableError):
    """Some nodes could not be asked to accept writes again; those that could do."""


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """What `resume` did: the nodes that were read-only by a terminal snapshot; `asked` are all primaries."""

    thawed: tuple[Thawed, ...]
    asked: tuple[str, ...]


def resume_fleet(fleet: Fleet, progress: Progress) -> ResumeReport:
    """Undo the freeze of a terminal snapshot on every primary that answers, whichever made it. Safe to repeat.

    Needs no store. Raises FleetBusyError, with nothing changed, where another operation runs; ReadOnlyLeftError and
    NodeUnfitError once the other nodes are done.
    """
    progress.step("accept writes", total=len(fleet.primaries), unit="nodes")
    with ExitStack() as stack:
        connections: dict[str, psycopg.Connection[Any]] = {}
        problems: dict[str, SnapshotError] = {}
        for node, found in zip(fleet.primaries, in_parallel(_connect, fleet.primaries), strict=True):
            if isinstance(found, SnapshotError):
                problems[node.id] = found
            else:
                connections[node.id] = stack.enter_context(closing(found))
        reached = sorted((node for node in fleet.primaries if node.id in connections), key=lambda one: one.id)
        # All of them before anything is changed: whoever works on the fleet holds them all.
        for node in reached:
            with raising_unreachable(node):
                take_lock(node, connections[node.id], lock_key(fleet.name), own_label("resume"))

        def undo(node: Node) -> Thawed | None:
            try:
                return _thaw(node, connections[node.id], progress)
            except SnapshotError as error:
                problems[node.id] = error
                return None

        thawed = tuple(one for one in in_parallel(undo, reached) if one)
    if problems:
        raise _left_error(problems, thawed)
    return ResumeReport(thawed, tuple(node.id for node in fleet.primaries))


def _connect(node: Node) -> psycopg.Connection[Any] | SnapshotError:
    try:
        return connect(node)
    except SnapshotError as error:
        return error


def _thaw(node: Node, connection: psycopg.Connection[Any], progress: Progress) -> Thawed | None:
    try:
        with raising_unreachable(node), shut_down_after(connection, THAW_SECONDS_MAX):
            thawed = thaw(node, connection, progress)
    except psycopg.Error as error:
        raise NodeUnfitError(
            f"node {node.id}: {str(error).splitlines()[0]}",
            hint="run it as the role that created the snapshot, or as a superuser, and on the primaries",
            details={"node": node.id},
        ) from error
    if thawed:
        progress.note(f"node {node.id} accepts writes again")
    progress.advance(1)
    return thawed


def _left_error(problems: Mapping[str, SnapshotError], thawed: tuple[Thawed, ...]) -> SnapshotError:
    text = "; ".join(error.message for error in problems.values())
    refused = [error for error in problems.values() if isinstance(error, NodeUnfitError)]
    return (NodeUnfitError if refused else ReadOnlyLeftError)(
        f"of {', '.join(problems)} it is not known whether they accept writes: {text}"
        + (f"; {', '.join(one.node for one in thawed)} do again" if thawed else ""),
        hint=refused[0].hint if refused else "repeat once they answer: snapshot resume",
        details={"nodes": list(problems), "thawed": [one.node for one in thawed]},
    )
