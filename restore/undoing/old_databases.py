"""Drop the databases that restores have put aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cutline.fleet.config import Fleet
from cutline.fleet.hints import SAME_TARGET, restore_command
from cutline.fleet.nodes.beside import OldDatabase, read_old
from cutline.fleet.nodes.sessions import in_parallel
from cutline.fleet.nodes.watch import Watch, watch_nodes
from cutline.fleet.progress import Progress
from cutline.restore.plan import provisional_targets
from cutline.restore.remains import find_remains
from cutline.restore.targets.databases import drop_database
from cutline.restore.targets.target import Connections, Target, ending_on_silence, lock_targets
from cutline.restore.unfinished import UnfinishedRestoreError
from cutline.restore.unfinished_checks import check_no_unfinished
from cutline.storage.errors import StoppedError


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
    with _old_databases(source, target, name, progress, nodes) as aside:
        listed = aside.listed
        confirm(listed)
        progress.step("drop databases")

        def drop(one: Target) -> None:
            for old in aside.found[one]:
                drop_database(one, aside.connections[one.shard], old.database)

        try:
            in_parallel(drop, list(aside.found), aside.watch.end_all)
        except KeyboardInterrupt as error:
            again = f"to drop what is left of them: {restore_command(name, nodes)} --discard-old"
            raise StoppedError("some of the old databases may be dropped", hint=[again, SAME_TARGET]) from error
    return listed


def find_old(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...] = ()
) -> list[OldDatabase]:
    """The databases that `discard_old` would drop; raises what that raises."""
    with _old_databases(source, target, name, progress, nodes) as aside:
        return aside.listed


@dataclass(frozen=True, slots=True)
class _OldDatabases:
    """The databases that were put aside, by target; the sessions that hold the targets, and what ends these."""

    found: Mapping[Target, list[OldDatabase]]
    connections: Connections
    watch: Watch

    @property
    def listed(self) -> list[OldDatabase]:
        return [old for databases in self.found.values() for old in databases]


@contextmanager
def _old_databases(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...]
) -> Iterator[_OldDatabases]:
    progress.step("find databases put aside")
    targets = provisional_targets(target, nodes)
    with (
        watch_nodes(one.maintenance for one in targets) as watch,
        lock_targets(targets) as connections,
        ending_on_silence(watch, connections.values()),
    ):
        check_no_unfinished(source.store.open(), name, targets, connections, progress)
        aside = _OldDatabases({one: read_old(one.node, connections[one.shard]) for one in targets}, connections, watch)
        remains = find_remains(targets, connections)
        for old in aside.listed:
            if (left := remains.get(old.database.rsplit("_", 1)[-1])) is not None:
                raise UnfinishedRestoreError(
                    f"{old.node}: database {old.database} was put aside by a restore that ended unfinished: it left"
                    f" {left}",
                    hint="let the role that began it end it",
                    details={"node": old.node, "database": old.database},
                )
        yield aside
