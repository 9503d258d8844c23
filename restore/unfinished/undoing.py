"""Undo a restore that did not finish, and drop the databases that restores set aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from msgspec import Struct, field, structs

from cutline.fleet.config import Fleet
from cutline.fleet.messages import SAME_TARGET, abandon_command, discard_command, resume_command
from cutline.fleet.progress import Progress
from cutline.nodes.other_databases import OldDatabase, read_old
from cutline.nodes.problems import quote
from cutline.nodes.sessions import in_parallel
from cutline.nodes.watch import Watch, watch_nodes
from cutline.restore.rows.filling import Filling
from cutline.restore.targets.chain_ids import in_ids_of
from cutline.restore.targets.databases import (
    Phase,
    RestoreCrashPoint,
    drop_database,
    find_closed,
    find_slots,
    list_databases,
    lock_target_fleet,
    record_text,
    write_record,
)
from cutline.restore.targets.swap import check_nothing_prepared, is_restored, open_databases, put_back
from cutline.restore.targets.target import (
    Connections,
    Target,
    TargetUnfitError,
    ending_on_silence,
    lock_targets,
    provisional_targets,
    suffix_of,
)
from cutline.restore.targets.waits import bounding_waits
from cutline.restore.unfinished.unfinished import (
    NothingUnfinishedError,
    UnfinishedRestore,
    UnfinishedRestoreError,
    check_no_unfinished,
    check_readable,
    check_recorded,
    check_same_servers,
    check_whole,
    find_recorded,
    find_remains,
    find_taken_for_old,
    find_unfinished,
    settle_recorded,
)
from cutline.snapshots.operations.open_operations import is_open
from cutline.snapshots.operations.operation import ABANDON, PUBLISH, decide_restore, record_outcome
from cutline.snapshots.operations.slot_guard import mark_set_aside
from cutline.snapshots.records.operation_records import read_intent
from cutline.storage.errors import IndeterminateError, RefusedError, StoppedError, UnreachableError
from cutline.storage.store import ObjectStore


class OldDatabaseMissingError(RefusedError):
    """A database that a restore set aside is missing or invalid, so it can't be put back."""


class Undoable(Struct, frozen=True):
    """The unfinished restores of the targets' databases, and the sessions that hold the targets' locks.

    `own` are each restore's targets, keyed by suffix. `inside` are sessions in the databases, for emptying tables.
    `watch` ends all sessions if a node stops answering.
    """

    store: ObjectStore
    targets: tuple[Target, ...]
    connections: Connections
    watch: Watch
    inside: Connections
    found: list[UnfinishedRestore]
    own: Mapping[str, list[Target]]


@contextmanager
def hold_undoable(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...]
) -> Iterator[Undoable]:
    """Lock the targets and find the restores that can be undone there; raise any error of abandon_restore."""
    progress.step("find unfinished restores")
    store = source.store.open()
    target, nodes = in_ids_of(store, name, target, nodes)
    targets = provisional_targets(target, nodes)
    with (
        watch_nodes(one.maintenance for one in targets) as watch,
        lock_targets(targets) as connections,
        bounding_waits(watch, targets, connections, progress),
        lock_target_fleet(target, targets, connections) as inside,
        ending_on_silence(watch, (*connections.values(), *inside.values())),
    ):
        unfinished = find_unfinished(store, targets, connections, progress)
        check_same_servers(store, name, unfinished, targets, connections)
        own = {
            restore.suffix: [
                place
                for place in (place.named(restore.suffix) for place in targets)
                if place.shard in restore.databases or place.aside in list_databases(connections[place.shard])
            ]
            for restore in unfinished
        }
        for restore in unfinished:
            check_readable(restore, targets)
            check_recorded(restore, store)
            _check_undoable(store, restore, name)
            check_whole(restore, targets, connections, store, undoes=True)
            for line in find_taken_for_old(restore, targets, connections):
                progress.note(line)
            _check_old_are_there(restore, own[restore.suffix], connections)
        yield Undoable(store, targets, connections, watch, inside, unfinished, own)


def find_entered(found: UnfinishedRestore, targets: Iterable[Target]) -> list[str]:
    """List the restored databases that already have their real names, or those with tables to empty, one per line."""
    if found.is_filling:
        return [
            f"{target.node.id}: the tables of database {target.database} that the restore found empty will be emptied,"
            " including any rows that others wrote"
            for target in targets
        ]
    return [
        f"{target.node.id}: database {target.database}, which the restore published, will be dropped"
        for target in targets
        if found.databases.get(target.shard) == target.database
    ]


def _check_undoable(store: ObjectStore, found: UnfinishedRestore, name: str) -> None:
    if found.record is not None and found.record.snapshot != name:
        raise UnfinishedRestoreError(
            f"{found.label()} does not belong to snapshot {name}",
            hint=f"run: {found.record.abandon_command}",
        )
    if not found.may_be_undone(store):
        what = "has decided to keep its rows" if found.is_filling else "has published all databases"
        raise UnfinishedRestoreError(
            f"{found.label()} {what}, so it can't be undone",
            hint=f"to end it: {resume_command(name, found.scope.nodes)}",
        )


def _check_old_are_there(found: UnfinishedRestore, targets: list[Target], connections: Connections) -> None:
    """Before anything is marked as undone, raise an error if an old database can't get its name back."""
    for target in targets:
        connection, record = connections[target.shard], found.records.get(target.shard)
        databases = list_databases(connection)
        if not record or not is_restored(databases, target, record.operation):
            continue
        check_nothing_prepared(target, connection)
        if not record.aside or (target.aside in databases and databases[target.aside].is_valid):
            continue
        is_gone = target.aside not in databases
        finish = f"to finish the restore instead: {record.resume_command}"
        if found.is_abandoned:
            # An abandoned restore can't be finished.
            finish = f"if it is permanently lost, create an empty one: CREATE DATABASE {quote(target.aside)};"
        why = "is missing" if is_gone else "is invalid, as after an interrupted DROP DATABASE"
        drop = [] if is_gone else [f"DROP DATABASE {quote(target.aside)};"]
        raise OldDatabaseMissingError(
            f"node {target.node.id}: database {target.aside}, which the restore set aside, {why}, so the old"
            " databases can't be put back on all nodes",
            hint=[*drop, finish],
            details={"node": target.node.id, "database": target.aside},
        )


# Shown in front of an id's suffix if the rest of the id is unknown.
CUT = "…"


class AbandonReport(Struct):
    """The results of the undo: the operations, and the databases that were dropped or put back, as `node: name`.

    `done`: operations that had succeeded, but whose outcome had not been recorded. `emptied`: tables, as `node: table`.
    `opened`: databases that accepted no connections before the undo. `slots_dropped`: slots of chains that were started
    in the dropped databases, as `node: slot`.
    """

    operations: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    slots_dropped: list[str] = field(default_factory=list)


def abandon_restore(
    source: Fleet,
    target: Fleet,
    name: str,
    confirm: Callable[[list[str]], None],
    progress: Progress,
    nodes: tuple[str, ...] = (),
) -> AbandonReport:
    """Undo every unfinished restore into the target's databases: old databases get their names back.

    If `nodes` are given, only these are contacted. Before any change, `confirm` gets one line for each database that
    will be dropped although users may have used it, and for each slot that will be dropped with its database; `confirm`
    may raise. Raises UnfinishedRestoreError if no restore is unfinished, or if one doesn't belong to snapshot `name` or
    can no longer be undone; and OldDatabaseMissingError if a database can't be put back.
    """
    report = AbandonReport()
    with _saying_unfinished(name, nodes), hold_undoable(source, target, name, progress, nodes) as undoable:
        store = undoable.store
        confirm([line for restore in undoable.found for line in _lines_to_confirm(undoable, restore)])
        closed = find_closed(undoable.targets, undoable.connections)
        if undoable.found:
            progress.step("undo")
        # Undo the newest restore first, because it may have replaced an older restore's database.
        for restore in reversed(undoable.found):
            if restore.is_filling:
                _empty_filled(undoable, restore, progress, report)
            else:
                _abandon(undoable, restore, progress, report)
        _open_left(undoable, progress)
        report.done, made_nothing = settle_recorded(store, undoable.targets, undoable.connections)
        # Replace the labels of restores without a record, for which only the suffix was known.
        report.operations = [
            operation for operation in report.operations if not _is_named(operation, made_nothing)
        ] + made_nothing
        left = find_closed(undoable.targets, undoable.connections)
        report.opened = [one for one in closed if one not in left]
    return _checked(report, source.store.open(), name, left)


@contextmanager
def _saying_unfinished(name: str, nodes: tuple[str, ...]) -> Iterator[None]:
    """Replace an interrupt with a StoppedError that says how to continue the undo."""
    try:
        yield
    except KeyboardInterrupt as error:
        again = f"to undo the rest: {abandon_command(name, nodes)}"
        raise StoppedError("the restore may be partly undone", hint=[again, SAME_TARGET]) from error


def preview_abandon(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...] = ()
) -> tuple[AbandonReport, list[str]]:
    """Return what `abandon_restore` would undo, and the lines that it would confirm; change nothing.

    Raises the same errors, except those about tables that other sessions have changed or locked.
    """
    report = AbandonReport()
    with hold_undoable(source, target, name, progress, nodes) as undoable:
        closed = find_closed(undoable.targets, undoable.connections)
        report.opened = list(closed)
        # Keep the order of abandon_restore, which confirms the same lines.
        to_confirm = [line for restore in undoable.found for line in _lines_to_confirm(undoable, restore)]
        for restore in reversed(undoable.found):
            own = undoable.own[restore.suffix]
            report.operations.append(_label_of(restore))
            report.slots_dropped += [f"{node}: {slot}" for node, slot in _find_slots(undoable, restore)]
            for place in own:
                if restore.is_filling:
                    filling = Filling(place.node.id, undoable.inside[place.shard], restore.suffix)
                    report.emptied += [f"{place.node.id}: {table}" for table in filling.names()]
                    continue
                # A published database gets its former name back before it is dropped.
                if place.shard in restore.databases:
                    report.dropped.append(f"{place.node.id}: {place.loading}")
                if place.aside in list_databases(undoable.connections[place.shard]):
                    report.put_back.append(f"{place.node.id}: {place.database}")
        for intent, is_done in find_recorded(undoable.store, undoable.targets, undoable.connections, undoable.own):
            report.operations = [
                operation for operation in report.operations if not _is_named(operation, [intent.operation])
            ]
            if intent.operation not in report.operations:
                (report.done if is_done else report.operations).append(intent.operation)
    return _checked(report, source.store.open(), name, closed), to_confirm


def _lines_to_confirm(undoable: Undoable, found: UnfinishedRestore) -> list[str]:
    return find_entered(found, undoable.own[found.suffix]) + [
        f"{node}: slot {slot} will be dropped with its database, so its chain will get no more increments"
        for node, slot in _find_slots(undoable, found)
    ]


def _find_slots(undoable: Undoable, found: UnfinishedRestore) -> list[tuple[str, str]]:
    """Find Cutline's slots (node, name) in the restored databases; PostgreSQL drops a slot with its database."""
    if found.is_filling:
        return []
    return [
        (place.node.id, slot)
        for place in undoable.own[found.suffix]
        if place.shard in found.databases
        for slot in find_slots(undoable.connections[place.shard], found.databases[place.shard])
    ]


def _checked(report: AbandonReport, store: ObjectStore, name: str, closed: Mapping[str, str]) -> AbandonReport:
    if not report.operations and not report.done:
        raise NothingUnfinishedError(store, name, closed)
    return report


def _label_of(found: UnfinishedRestore) -> str:
    return found.record.operation if found.record else f"{CUT}{found.suffix}"


def _is_named(label: str, operations: Iterable[str]) -> bool:
    """Whether this label of a restore without a record refers to one of these operations."""
    return label.startswith(CUT) and any(label == f"{CUT}{suffix_of(operation)}" for operation in operations)


def _empty_filled(undoable: Undoable, found: UnfinishedRestore, progress: Progress, report: AbandonReport) -> None:
    store, targets, inside = undoable.store, undoable.own[found.suffix], undoable.inside
    record, intent = found.last_record, None
    if record.in_store:
        intent = read_intent(store, record.operation)
        if decide_restore(store, intent, ABANDON) == PUBLISH and found.may_be_decided:
            raise UnfinishedRestoreError(
                f"{found.label()} has decided to keep its rows, so it can't be undone",
                hint=f"to end it: {record.resume_command}",
            )

    def mark(target: Target) -> None:
        record = structs.replace(found.records[target.shard], phase=Phase.ABANDONED)
        Filling(target.node.id, inside[target.shard], found.suffix).write(record_text(record))
        progress.reached(RestoreCrashPoint.ABANDONED, node=target.node.id)

    def empty(target: Target) -> None:
        tables = Filling(target.node.id, inside[target.shard], found.suffix).undo()
        report.emptied.extend(f"{target.node.id}: {table}" for table in tables)

    # After the first mark the restore can't be resumed.
    for work in (mark, empty):
        in_parallel(work, targets, undoable.watch.end_all)
    if intent is not None and is_open(store, record.operation):
        record_outcome(store, intent, "failed", "abandoned")
    report.operations.append(record.operation)


def _abandon(undoable: Undoable, found: UnfinishedRestore, progress: Progress, report: AbandonReport) -> None:
    store, targets, connections = undoable.store, undoable.own[found.suffix], undoable.connections
    operation = found.record.operation if found.record else ""
    intent, was_publishing = None, False
    if found.record is not None and found.record.in_store:
        intent = read_intent(store, operation)
        # This decision stops a process that was only suspended. If that process has already decided to publish, undo
        # that.
        was_publishing = decide_restore(store, intent, ABANDON) == PUBLISH

    def mark(target: Target) -> None:
        if record := found.records.get(target.shard):
            write_record(connections[target.shard], found.databases[target.shard], record, phase=Phase.ABANDONED)
        progress.reached(RestoreCrashPoint.ABANDONED, node=target.node.id)

    def undo(target: Target) -> None:
        connection = connections[target.shard]
        was_aside = target.aside in list_databases(connection)
        put_back(target, connection, operation)
        if was_aside and target.aside not in list_databases(connection):
            report.put_back.append(f"{target.node.id}: {target.database}")

    def drop(target: Target) -> None:
        if target.shard not in found.databases:
            # The old database was set aside here, and the restored database is missing.
            return
        drop_database(target, connections[target.shard], target.loading)
        report.dropped.append(f"{target.node.id}: {target.loading}")

    def end() -> None:
        if intent is not None and is_open(store, operation):
            record_outcome(store, intent, "failed", "abandoned")

    # After the first mark the restore can't be resumed. Drop its databases only after all old databases are back.
    in_parallel(mark, targets, undoable.watch.end_all)
    with _opening(undoable, targets, progress):
        in_parallel(undo, targets, undoable.watch.end_all)
    if was_publishing:
        # Record the outcome before dropping: once nothing remains, the decision would mean that the restore was
        # published.
        end()
    # Look up the slots again, because undoing a newer restore may have renamed this restore's database.
    slots = [(one.node.id, slot) for one in targets for slot in find_slots(connections[one.shard], one.loading)]
    try:
        mark_set_aside(store, ((slot, node) for node, slot in slots), operation)
    except (UnreachableError, IndeterminateError) as error:
        progress.note(f"the end of the dropped databases' chains could not be recorded: {error.message}")
    in_parallel(drop, targets, undoable.watch.end_all)
    report.slots_dropped += [f"{node}: {slot}" for node, slot in slots]
    end()
    report.operations.append(_label_of(found))


@contextmanager
def _opening(undoable: Undoable, targets: list[Target], progress: Progress) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for line in open_databases(targets, undoable.connections):
            progress.note(line)
        raise


def _open_left(undoable: Undoable, progress: Progress) -> None:
    """Reopen databases that a restore closed, on nodes where nothing else remains of the restore."""
    for restore in undoable.found:
        left = [target for target in undoable.targets if target.shard in restore.shards - restore.databases.keys()]
        if left and not restore.is_filling and restore.was_closing:
            for line in open_databases(left, undoable.connections):
                progress.note(line)


def discard_old(
    source: Fleet,
    target: Fleet,
    confirm: Callable[[list[OldDatabase]], None],
    progress: Progress,
    nodes: tuple[str, ...] = (),
) -> list[OldDatabase]:
    """Drop the databases that restores set aside on the target's primaries; return the databases.

    First calls `confirm` with these databases; `confirm` may raise. Raises UnfinishedRestoreError if an unfinished
    restore may need one of them.
    """
    with _old_databases(source, target, progress, nodes) as aside:
        listed = aside.listed
        confirm(listed)
        progress.step("drop databases")

        def drop(one: Target) -> None:
            for old in aside.found[one]:
                drop_database(one, aside.connections[one.shard], old.database)

        try:
            in_parallel(drop, list(aside.found), aside.watch.end_all)
        except KeyboardInterrupt as error:
            again = f"to drop the rest: {discard_command(nodes)}"
            raise StoppedError("some of the old databases may have been dropped", hint=[again, SAME_TARGET]) from error
    return listed


def find_old(source: Fleet, target: Fleet, progress: Progress, nodes: tuple[str, ...] = ()) -> list[OldDatabase]:
    """Return the databases that `discard_old` would drop; raise the same errors."""
    with _old_databases(source, target, progress, nodes) as aside:
        return aside.listed


def _end_of(subscription: str) -> str:
    return f"DROP SUBSCRIPTION {quote(subscription)};"


class _OldDatabases(Struct, frozen=True):
    """The databases that were set aside, keyed by target, and the sessions that hold the targets' locks."""

    found: Mapping[Target, list[OldDatabase]]
    connections: Connections
    watch: Watch

    @property
    def listed(self) -> list[OldDatabase]:
        return [old for databases in self.found.values() for old in databases]


@contextmanager
def _old_databases(source: Fleet, target: Fleet, progress: Progress, nodes: tuple[str, ...]) -> Iterator[_OldDatabases]:
    progress.step("find databases set aside")
    targets = provisional_targets(target, nodes)
    with (
        watch_nodes(one.maintenance for one in targets) as watch,
        lock_targets(targets) as connections,
        bounding_waits(watch, targets, connections, progress),
        ending_on_silence(watch, connections.values()),
    ):
        check_no_unfinished(source.store.open(), "NAME", targets, connections, progress)
        aside = _OldDatabases({one: read_old(one.node, connections[one.shard]) for one in targets}, connections, watch)
        remains = find_remains(targets, connections)
        for old in aside.listed:
            if old.subscriptions:
                raise TargetUnfitError(
                    f"{old.node}: database {old.database} has subscriptions, with which PostgreSQL does not drop it:"
                    f" {', '.join(old.subscriptions)}",
                    hint=[
                        f"in {old.database}: {_end_of(name)}   this drops its slot on the publisher, too"
                        for name in old.subscriptions
                    ],
                    details={"node": old.node, "database": old.database},
                )
            if (left := remains.get(old.database.rsplit("_", 1)[-1])) is not None:
                raise UnfinishedRestoreError(
                    f"{old.node}: database {old.database} was set aside by a restore that never finished and left"
                    f" behind {left}",
                    hint="resume or undo that restore as the role that began it",
                    details={"node": old.node, "database": old.database},
                )
        yield aside
