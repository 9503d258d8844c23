"""Drop the databases that restores have put aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fleet.config import Fleet
from fleet.nodes.beside import OldDatabase, read_old
from fleet.nodes.sessions import in_parallel
from fleet.progress import Progress
from restore.plan import provisional_targets
from restore.targets.databases import drop_database
from restore.targets.target import Connections, Target, lock_targets
from restore.unfinished_checks import check_no_unfinished


def discard_old(
    source: Fleet,
    target: Fleet,
    name: str,
    confirm: Callable[[list[OldDatabase]], None],
    progress: Progress,
    nodes: tuple[str, ...] = (),
) -> list[OldDatabase]:
    """Drop the databases that restores have put aside on the target's primaries; return them.

    `confirm` is given them before, and may raise. Raises UnfinishedRestoreError: an unfinished restore may need them.
    """
    with _old_databases(source, target, name, progress, nodes) as (found, connections):
        listed = [old for databases in found.values() for old in databases]
        confirm(listed)
        progress.step("drop databases")

        def drop(one: Target) -> None:
            for old in found[one]:
                drop_database(one, connections[one.shard], old.database)

        in_parallel(drop, list(found))
    return listed


def find_old(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...] = ()
) -> list[OldDatabase]:
    """The databases that `discard_old` would drop; raises what that raises."""
    with _old_databases(source, target, name, progress, nodes) as (found, _):
        return [old for databases in found.values() for old in databases]


@contextmanager
def _old_databases(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...]
) -> Iterator[tuple[Mapping[Target, list[OldDatabase]], Connections]]:
    progress.step("find databases put aside")
    targets = provisional_targets(target, nodes)
    with lock_targets(targets) as connections:
        check_no_unfinished(source.store.open(), name, targets, connections, progress)
        yield {one: read_old(one.node, connections[one.shard]) for one in targets}, connections
