"""`snapshot watch`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

import typer
from msgspec.structs import replace

from cutline.cli.output.arguments import command_context
from cutline.cli.output.results import emit
from cutline.cli.output.retention_rules import retention_text
from cutline.cli.process.ended_watch import STOPPED
from cutline.cli.process.stopping import is_terminated, stop_process
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.notices import Notices, log, saying_if_slow
from cutline.cli.watch.running_command import stop_commands
from cutline.cli.watch.turn import DeadWatches, SilentWatch, take_turn
from cutline.cli.watch.watch_metrics import metrics_of
from cutline.cli.watch.watcher import Watcher
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Silent
from cutline.snapshots.operations.activity import Activity, Command, Ending, record_without_intent
from cutline.snapshots.operations.operation import code_of, reason_of
from cutline.snapshots.operations.under_way import read_under_way, working_watch
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, SnapshotError, UnreachableError, find_behind
from cutline.storage.ids import new_operation_id
from cutline.storage.waits import listening

SCHEMA = "cutline/watch/1"
STAND_BY_SECONDS, RETRY_SECONDS_MAX = 5.0, 60.0


def watch(context: typer.Context) -> None:
    """Run increments, full snapshots, checks, copies, pruning and more on the schedule in fleet.toml, until SIGTERM.

    Only one watch per fleet is active at a time; others stand by. The watch writes a line to stderr for everything that
    it does.
    """
    options = command_context(context)
    source = FleetSource.read(options.load_fleet().path)
    say = partial(log, json_lines=options.json, fleet_file=options.given_fleet)
    command = Command("watch", "", new_operation_id(utc_now()))
    with (
        listening(partial(say, task="store")),
        Activity(Silent(), command, source.open_store, stop_process) as activity,
    ):
        watcher = Watcher(source, activity, command.operation, say, Notices(source, say))
        try:
            say(f"watching fleet {source.fleet.name}, operation {command.operation}")
            say(retention_text(source.fleet.retention))
            with metrics_of(watcher):
                run_watch(watcher)
        except BaseException as error:
            activity.ending()
            stop_commands()
            _record(watcher, command, activity, error)
            watcher.notices.end()
            if not is_terminated(error):
                raise
    say(STOPPED)
    emit(context, {"schema": SCHEMA, "operation": command.operation, "tasks": watcher.counts}, [])


def run_watch(watcher: Watcher) -> NoReturn:
    """Do the tasks while this process has the turn; stand by while another watch has it."""
    said, seconds, is_start, silent = "", STAND_BY_SECONDS, True, SilentWatch()
    while True:
        # By now, a node may have a new address.
        watcher.read_file()
        try:
            with ExitStack() as stack:
                with saying_if_slow(watcher.log, "asking the primaries for the turn"):
                    turn = stack.enter_context(take_turn(watcher.source.fleet, watcher.log))
                with saying_if_slow(watcher.log, "reading the chain and the last results of the tasks in the store"):
                    watcher.begin()
                watcher.is_active, watcher.had_turn, is_start = True, True, False
                watcher.notices.is_beside = False
                watcher.notices.waits(None)
                if said:
                    watcher.log("this watch is now active")
                said, seconds = "", STAND_BY_SECONDS
                nodes, dead = watcher.source.fleet.nodes, DeadWatches()
                while watcher.source.fleet.nodes == nodes:
                    if not turn.keep():
                        watcher.hand_over()
                        break
                    watcher.step()
                    dead.forget_when_due(watcher.source, watcher.log)
        except SnapshotError as error:
            watcher.is_active = False
            is_busy = isinstance(error, BusyError)
            if is_busy and watcher.had_turn:
                watcher.hand_over()
            # An error at startup will persist until somebody fixes its cause. A later error may go away, so wait, even
            # while another watch is active: nodes may have switched roles, and fleet.toml will be updated.
            is_refused = is_start and not is_busy and not isinstance(error, UnreachableError)
            if find_behind(error, KeyboardInterrupt) is not None or is_refused:
                raise
            is_start = False
            text = f"standing by: {error.message}" if is_busy else f"waiting: {error.message}"
            problem = obstacle_of(watcher, error, silent)
            if problem is None and watcher.had_turn:
                watcher.hand_over()
            if is_busy and problem is not None:
                text = f"standing by: {problem.message}"
            watcher.notices.is_beside = problem is None
            if text != said:
                watcher.log(text, hint=problem.hint if problem else "")
            watcher.notices.waits(problem, "another watch is active")
            watcher.say(text)
            watcher.look_beside()
            said = text
            time.sleep(seconds)
            seconds = STAND_BY_SECONDS if is_busy else min(seconds * 2, RETRY_SECONDS_MAX)


def obstacle_of(watcher: Watcher, error: SnapshotError, silent: SilentWatch) -> SnapshotError | None:
    """Return the error that keeps the watch from running; None if another watch is running and reporting failures."""
    if isinstance(error, BusyError):
        return silent.find(watcher.source, error)
    return None if isinstance(error, UnreachableError) and is_another_at_work(watcher) else error


def is_another_at_work(watcher: Watcher) -> bool:
    """Whether the heartbeats show that another watch has the turn; false if the store does not answer."""
    try:
        under_way = read_under_way(watcher.source.open_store())
    except SnapshotError:
        return False
    return working_watch(under_way, watcher.operation, utc_now()) is not None


def _record(watcher: Watcher, command: Command, activity: Activity, error: BaseException) -> None:
    ending = Ending("done", "", 0, watcher.counts, watch=watcher.state())
    if not is_terminated(error):
        ending = replace(ending, state="failed", reason=reason_of(error), code=code_of(error))
    try:
        store = watcher.source.open_store()
        record_without_intent(store, command, activity.began_at, own_label("watch"), ending)
    except SnapshotError as problem:
        # If the same error ended the watch, it will be printed anyway.
        if str(problem) != str(error):
            watcher.log(problem.message, hint=problem.hint)
