"""Undo a restore that ended unfinished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec import structs

from cutline.fleet.config import Fleet
from cutline.fleet.hints import SAME_TARGET, restore_command
from cutline.fleet.nodes.sessions import in_parallel
from cutline.fleet.progress import Progress
from cutline.restore.crash_points import RestoreCrashPoint
from cutline.restore.data_only.filling import Filling
from cutline.restore.publishing import open_databases, put_back
from cutline.restore.targets.database_records import Phase, list_databases, record_text, write_record
from cutline.restore.targets.databases import drop_database, find_closed, find_slots
from cutline.restore.targets.target import Target, suffix_of
from cutline.restore.undoing.undoable import Undoable, find_entered, hold_undoable
from cutline.restore.unfinished import (
    UnfinishedRestore,
    UnfinishedRestoreError,
    find_recorded,
    settle_recorded,
)
from cutline.restore.unfinished_checks import NothingUnfinishedError
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.operations.recorded import is_open
from cutline.snapshots.operations.restore_decisions import ABANDON, PUBLISH, decide_restore
from cutline.snapshots.operations.slot_guard import mark_ended
from cutline.snapshots.records.operation_records import read_intent
from cutline.storage.errors import IndeterminateError, StoppedError, UnreachableError
from cutline.storage.store import ObjectStore

# Before the suffix of an id of which no more is known.
CUT = "…"


@dataclass(slots=True)
class AbandonReport:
    """What was undone: operations, databases that were dropped and that were put back, as `node: name`.

    `done`: operations that had ended well, and of which nobody had recorded it. `emptied`: tables, as `node: table`.
    `opened`: databases to which nobody could connect until it was undone, as text. `slots_dropped`: slots of chains
    that had begun in databases that were dropped, as `node: slot`.
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

    With `nodes` only these are contacted. `confirm` is given the databases that users may have entered and that are
    dropped, and the slots that are dropped with them, a line each, before anything is changed; it may raise. Raises
    UnfinishedRestoreError if there is none, or if one is of another snapshot than `name` or can't be undone any more;
    and OldDatabaseMissingError if a database can't be put back.
    """
    report = AbandonReport()
    with _saying_unfinished(name, nodes), hold_undoable(source, target, name, progress, nodes) as undoable:
        store = undoable.store
        confirm([line for one in undoable.found for line in _lines_to_confirm(undoable, one)])
        closed = find_closed(undoable.targets, undoable.connections)
        if undoable.found:
            progress.step("undo")
        # The newest first: it may have replaced what an older one published.
        for one in reversed(undoable.found):
            if one.is_filling:
                _empty_filled(undoable, one, progress, report)
            else:
                _abandon(undoable, one, progress, report)
        _open_left(undoable, progress)
        report.done, made_nothing = settle_recorded(store, undoable.targets, undoable.connections)
        # Of one without a record only the suffix was known.
        report.operations = [one for one in report.operations if not _is_named(one, made_nothing)] + made_nothing
        left = find_closed(undoable.targets, undoable.connections)
        report.opened = [one for one in closed if one not in left]
    return _checked(report, source.store.open(), name, left)


@contextmanager
def _saying_unfinished(name: str, nodes: tuple[str, ...]) -> Iterator[None]:
    """Raise StoppedError in place of an interrupt: what is undone is known to the nodes alone."""
    try:
        yield
    except KeyboardInterrupt as error:
        again = f"to undo what is not undone yet: {restore_command(name, nodes)} --abandon"
        raise StoppedError("the restore may be undone in part", hint=[again, SAME_TARGET]) from error


def preview_abandon(
    source: Fleet, target: Fleet, name: str, progress: Progress, nodes: tuple[str, ...] = ()
) -> tuple[AbandonReport, list[str]]:
    """What `abandon_restore` would undo, and what would have to be confirmed; change nothing.

    Raises what that raises, except for what only the undo itself meets: tables that others have changed or lock.
    """
    report, to_confirm = AbandonReport(), list[str]()
    with hold_undoable(source, target, name, progress, nodes) as undoable:
        closed = find_closed(undoable.targets, undoable.connections)
        report.opened = list(closed)
        for one in reversed(undoable.found):
            own = undoable.own[one.suffix]
            to_confirm += _lines_to_confirm(undoable, one)
            report.operations.append(_label_of(one))
            report.slots_dropped += [f"{node}: {slot}" for node, slot in _find_slots(undoable, one)]
            for place in own:
                if one.is_filling:
                    filling = Filling(place.node.id, undoable.inside[place.shard], one.suffix)
                    report.emptied += [f"{place.node.id}: {table}" for table in filling.names()]
                    continue
                # A published one gets its former name before it is dropped.
                if place.shard in one.databases:
                    report.dropped.append(f"{place.node.id}: {place.loading}")
                if place.aside in list_databases(undoable.connections[place.shard]):
                    report.put_back.append(f"{place.node.id}: {place.database}")
        for intent, is_done in find_recorded(undoable.store, undoable.targets, undoable.connections, undoable.own):
            report.operations = [one for one in report.operations if not _is_named(one, [intent.operation])]
            if intent.operation not in report.operations:
                (report.done if is_done else report.operations).append(intent.operation)
    return _checked(report, source.store.open(), name, closed), to_confirm


def _lines_to_confirm(undoable: Undoable, found: UnfinishedRestore) -> list[str]:
    return find_entered(found, undoable.own[found.suffix]) + [
        f"{node}: slot {slot} is dropped with its database, so its chain gets no more increments"
        for node, slot in _find_slots(undoable, found)
    ]


def _find_slots(undoable: Undoable, found: UnfinishedRestore) -> list[tuple[str, str]]:
    """Node and name of each slot of Cutline in the restored databases; PostgreSQL drops them with their database."""
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
    """Whether the label is that of a restore without a record, and one of these operations is that restore."""
    return label.startswith(CUT) and any(label == f"{CUT}{suffix_of(one)}" for one in operations)


def _empty_filled(undoable: Undoable, found: UnfinishedRestore, progress: Progress, report: AbandonReport) -> None:
    """Undo a restore of rows alone."""
    store, targets, inside = undoable.store, undoable.own[found.suffix], undoable.inside
    record, intent = found.last_record, None
    if record.in_store:
        intent = read_intent(store, record.operation)
        if decide_restore(store, intent, ABANDON) == PUBLISH and found.may_be_decided:
            raise UnfinishedRestoreError(
                f"{found.label()} has decided that its rows stay, and can't be undone",
                hint=f"to end it: {record.command} --resume",
            )

    def mark(target: Target) -> None:
        one = structs.replace(found.records[target.shard], phase=Phase.ABANDONED)
        Filling(target.node.id, inside[target.shard], found.suffix).write(record_text(one))
        progress.reached(RestoreCrashPoint.ABANDONED, node=target.node.id)

    def empty(target: Target) -> None:
        tables = Filling(target.node.id, inside[target.shard], found.suffix).undo()
        report.emptied.extend(f"{target.node.id}: {table}" for table in tables)

    # From the first mark on nobody can resume it.
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
        # A process that was only suspended ends by this, unless it has decided to publish: then that is undone.
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
            # It was put aside here, and what was restored is gone.
            return
        drop_database(target, connections[target.shard], target.loading)
        report.dropped.append(f"{target.node.id}: {target.loading}")

    def end() -> None:
        if intent is not None and is_open(store, operation):
            record_outcome(store, intent, "failed", "abandoned")

    # From the first mark on nobody can resume it, and it is dropped only when all old databases are back.
    in_parallel(mark, targets, undoable.watch.end_all)
    with _opening(undoable, targets, progress):
        in_parallel(undo, targets, undoable.watch.end_all)
    if was_publishing:
        # Once nothing is left, its decision would say that it was published.
        end()
    # Looked up again: to undo a newer restore can have renamed the database that this one published.
    slots = [(one.node.id, slot) for one in targets for slot in find_slots(connections[one.shard], one.loading)]
    try:
        mark_ended(store, {slot: node for node, slot in slots}, operation)
    except (UnreachableError, IndeterminateError) as error:
        progress.note(f"the end of the chains of the databases that are dropped could not be stored: {error.message}")
    in_parallel(drop, targets, undoable.watch.end_all)
    report.slots_dropped += [f"{node}: {slot}" for node, slot in slots]
    end()
    report.operations.append(_label_of(found))


@contextmanager
def _opening(undoable: Undoable, targets: list[Target], progress: Progress) -> Iterator[None]:
    """If the block fails, let everybody into the databases that it may have closed."""
    try:
        yield
    except BaseException:
        for line in open_databases(targets, undoable.connections):
            progress.note(line)
        raise


def _open_left(undoable: Undoable, progress: Progress) -> None:
    """Let everybody into databases that a restore had closed on nodes where nothing else of it is left."""
    for one in undoable.found:
        left = [target for target in undoable.targets if target.shard in one.shards - one.databases.keys()]
        if left and not one.is_filling and one.was_closing:
            for line in open_databases(left, undoable.connections):
                progress.note(line)
