"""The program `snapshot`: the table of commands, their shared options, and exit codes.

A command's module is imported only when the command runs, so that `--help` and mistyped options are answered at once.
`run` catches and reports every error, and returns its exit code (cli/output/failure.py).
"""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from importlib import import_module
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer
import typer.core
import typer.main
from msgspec.structs import replace

from cutline.cli.output.arguments import (
    PROGRESS_SCHEMA,
    CommandContext,
)
from cutline.cli.output.failure import (
    CANCELLED,
    DONE,
    INTERRUPTED,
    MEANINGS,
    STOPPED_HINTS,
    UNWRITTEN,
    USAGE,
    failure_of,
    naming_fleet,
    report,
)
from cutline.cli.output.fleet_option import (
    FLEET_FILE_DEFAULT,
    FLEET_OPTION,
    FLEET_VARIABLE,
    default_fleet_path,
    given_fleet,
)
from cutline.cli.output.help import WIDTH_MAX, help_text
from cutline.cli.output.results import write_document
from cutline.cli.output.tables import printable
from cutline.cli.process.detaching import find_starter
from cutline.cli.process.ended_watch import is_watch, report_end
from cutline.cli.process.stopping import (
    NUDGE,
    begin_stopping,
    cancel_request,
    is_terminated,
    nudge_until_handled,
    owner_text,
)
from cutline.cli.process.streams import secure_streams, unwritten
from cutline.cli.process.unfinished_reports import name_stop
from cutline.columns.allocator import choose_allocator
from cutline.spark.session_folder import begin_session, end_session
from cutline.storage.errors import SnapshotError, UsageError
from cutline.storage.process_limits import limit_thread_starts, raise_limit
from cutline.storage.waits import listening

PROGRAM = "snapshot"
# Signals other than Ctrl-C that ended the command.
_signals: list[int] = []
# A nudge raises a lost interrupt again.
INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, NUDGE)
# timeout(1) sends its signal both to the command and to the command's process group, so a signal that follows another
# within this time counts as a repetition. However often Ctrl-C is pressed, it interrupts at most once a second.
SAME_SECONDS = 1.0
_signalled_at = -math.inf
SHARED_FLAGS = ("--json", "--quiet", "--verbose")
SHARED_NOTE = f"Every command also takes {FLEET_OPTION} FILE, {', '.join(SHARED_FLAGS)}: see {PROGRAM} --help"


class CommandEntry(NamedTuple):
    """The module and attribute of a command, and its line in `--help`, which is shown without importing the module."""

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, CommandEntry] = {
    "init": CommandEntry("cutline.cli.commands.init", "init", "Check and prepare every node and the store."),
    "create": CommandEntry(
        "cutline.cli.commands.create", "create", "Take a full snapshot, or the next increment of one."
    ),
    "restore": CommandEntry(
        "cutline.cli.commands.restore", "restore", "Restore the databases to the state of a snapshot or increment."
    ),
    "restore-resume": CommandEntry("cutline.cli.commands.restore", "restore_resume", "Finish an interrupted restore."),
    "restore-abandon": CommandEntry(
        "cutline.cli.commands.restore_ends", "restore_abandon", "Undo an interrupted restore."
    ),
    "restore-discard": CommandEntry(
        "cutline.cli.commands.restore_ends", "restore_discard", "Drop the databases that `restore --replace` set aside."
    ),
    "drill": CommandEntry(
        "cutline.cli.commands.drill", "drill", "Prove that a snapshot can be restored, on temporary servers."
    ),
    "check": CommandEntry(
        "cutline.cli.commands.check", "check", "Read snapshots back and verify that they are complete and consistent."
    ),
    "repair": CommandEntry(
        "cutline.cli.commands.repair", "repair", "Replace damaged objects, from another copy or from another store."
    ),
    "merge": CommandEntry(
        "cutline.cli.commands.merge", "merge", "Let a chain begin at an increment, from the store alone."
    ),
    "copy": CommandEntry("cutline.cli.commands.copy", "copy", "Copy snapshots into a second store."),
    "resume": CommandEntry("cutline.cli.commands.resume", "resume", "Accept writes again after a terminal snapshot."),
    "list": CommandEntry("cutline.cli.commands.list", "list_snapshots", "List the snapshots in the store."),
    "show": CommandEntry("cutline.cli.commands.show", "show", "Show all details of one snapshot."),
    "watch": CommandEntry(
        "cutline.cli.commands.watch", "watch", "Run increments, full snapshots, checks and pruning on a schedule."
    ),
    "status": CommandEntry("cutline.cli.commands.status", "status", "Show running and dead operations."),
    "cancel": CommandEntry("cutline.cli.commands.cancel", "cancel", "Stop running operations, on any machine."),
    "wait": CommandEntry(
        "cutline.cli.commands.wait", "wait", "Wait for an operation to end, and return its exit code."
    ),
    "history": CommandEntry("cutline.cli.commands.history", "history", "List ended operations."),
    "report": CommandEntry(
        "cutline.cli.commands.report", "report", "Write a report: sizes, durations, checks and gaps over time."
    ),
    "end": CommandEntry(
        "cutline.cli.commands.end", "end", "End a chain, and keep its restore points: nodes retain no more WAL for it."
    ),
    "delete": CommandEntry("cutline.cli.commands.delete", "delete", "Delete a snapshot permanently."),
    "prune": CommandEntry(
        "cutline.cli.commands.prune", "prune", "Delete the snapshots and increments that no retention rule keeps."
    ),
    "keep": CommandEntry("cutline.cli.commands.keep", "keep", "Pin a restore point, so that prune and delete keep it."),
    "gc": CommandEntry("cutline.cli.commands.gc", "gc", "Remove objects from the store that are no longer needed."),
    "key": CommandEntry("cutline.cli.commands.key", "key_app", "Create, list, add and remove encryption keys."),
    "cluster": CommandEntry(
        "cutline.cli.commands.cluster", "cluster_app", "Pack Cutline for the executors of a Spark cluster."
    ),
    "demo": CommandEntry(
        "cutline.cli.demo.command",
        "demo_app",
        "Try Cutline on an embedded fleet: run a demonstration, or start servers of your own.",
    ),
}


# The sections in the `--help` output.
SECTIONS = {
    "Set up": ("init", "key", "cluster", "demo"),
    "Take snapshots": ("create", "watch", "merge", "resume"),
    "Restore": ("restore", "restore-resume", "restore-abandon", "restore-discard", "drill"),
    "Verify and repair": ("check", "repair", "copy"),
    "Inspect": ("list", "show", "status", "history", "report"),
    "Running operations": ("wait", "cancel"),
    "Keep and remove": ("keep", "end", "prune", "delete", "gc"),
}


class CommandInterruptedError(Exception):
    """Carries a KeyboardInterrupt, with its context, past typer; `command` is the name of the command."""

    def __init__(self, command: str) -> None:
        super().__init__(command)
        self.command = command


def _in_session(callback: Callable[..., Any], command: str) -> Callable[..., Any]:
    """Start the session only when the command runs: help and usage errors need no temporary folder."""

    @wraps(callback)
    def run_command(*arguments: Any, **options: Any) -> Any:
        begin_session()
        try:
            return callback(*arguments, **options)
        except KeyboardInterrupt as interrupt:
            # typer would turn it into an exit code.
            raise CommandInterruptedError(command) from interrupt

    return run_command


def _with_shared_options(complete: Callable[[Any, str], list[Any]]) -> Callable[[Any, str], list[Any]]:
    """Let shells also complete the shared options, which may follow the command."""

    def complete_all(context: Any, incomplete: str) -> list[Any]:
        root = context.find_root()
        shared = root.command.shell_complete(root, incomplete) if incomplete.startswith("-") else []
        own = complete(context, incomplete)
        return [*own, *(one for one in shared if one.value in (*SHARED_FLAGS, FLEET_OPTION))]

    return complete_all


def _write_help(command: Any, context: Any, formatter: Any) -> None:
    commands = getattr(command, "commands", {})
    rows = [(name, one.get_short_help_str(WIDTH_MAX)) for name, one in commands.items()]
    formatter.write(help_text(command, context.command_path, [("Commands", rows)], note=SHARED_NOTE))


class LazyCommand(typer.core.TyperCommand):
    """An entry in COMMANDS; it imports the command only when the command runs."""

    def __init__(self, name: str, entry: CommandEntry) -> None:
        super().__init__(name, callback=None, help=entry.help)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and let it parse `args`."""
        imported = getattr(import_module(self._entry.module), self._entry.attribute)
        if isinstance(imported, typer.Typer):
            command: Any = typer.main.get_group(imported)
        else:
            wrapper = typer.Typer(add_completion=False)
            wrapper.command(self.name)(imported)
            command = typer.main.get_command(wrapper)
        command.name = self.name
        commands = getattr(command, "commands", {"": command}).values()
        for each in commands:
            each.callback = _in_session(each.callback, self.name or "")
        for each in {command, *commands}:
            each.shell_complete = _with_shared_options(each.shell_complete)
            each.format_help = partial(_write_help, each)
        return command.make_context(info_name, args, parent=parent, **extra)


class SnapshotGroup(typer.core.TyperGroup):
    """The top-level command: contains the commands in COMMANDS, and lists the exit codes in its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: LazyCommand(name, entry) for name, entry in COMMANDS.items()})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the commands grouped by purpose, the shared options and the meanings of the exit codes."""
        rows = {name: (name, entry.help) for name, entry in COMMANDS.items()}
        sections = [(title, [rows[name] for name in names]) for title, names in SECTIONS.items()]
        codes = [(f"{code:>3}", meaning) for code, meaning in MEANINGS.items()]
        note = f"To see the options of a command: {PROGRAM} COMMAND --help"
        formatter.write(help_text(self, ctx.command_path, sections, [("Exit codes", codes)], note=note))


def _show_version(context: typer.Context, wanted: bool) -> None:  # noqa: FBT001  # typer calls it by position
    if not wanted or context.resilient_parsing:
        return
    from importlib.metadata import version

    # This eager option runs before --json reaches the context.
    if "--json" in _before_dashes(sys.argv):
        write_document({"schema": "cutline/version/1", "version": version("cutline")})
    else:
        typer.echo(f"{PROGRAM} {version('cutline')}")
    raise typer.Exit


app = typer.Typer(name=PROGRAM, cls=SnapshotGroup, pretty_exceptions_enable=False)


@app.callback()
def snapshot(
    context: typer.Context,
    *,
    fleet: Annotated[
        Path | None,
        typer.Option(
            FLEET_OPTION,
            metavar="FILE",
            help=f"The fleet file. Default: ${FLEET_VARIABLE}, then ./{FLEET_FILE_DEFAULT}.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            help="Print nothing on success, except a list or the plan of a dry run; warnings and errors go to stderr.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print more details, and the traceback of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001  # its callback does the work
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Take, restore and verify consistent snapshots of a fleet of PostgreSQL shards, without locks."""
    context.obj = CommandContext(fleet or default_fleet_path(), json, quiet, verbose, str(fleet) if fleet else None)


def hoist_shared_options(arguments: Sequence[str]) -> list[str]:
    """Move the shared options to the front, so that they are accepted both before and after the command.

    Words after `--` are not moved. Raises UsageError if `--fleet` is the last word, so its file is missing.
    """
    shared: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word in SHARED_FLAGS or word.startswith(f"{FLEET_OPTION}="):
            shared.append(word)
        elif word == FLEET_OPTION:
            file = next(words, None)
            if file is None:
                raise UsageError(f"option {FLEET_OPTION} needs a file", hint=f"see: {PROGRAM} --help")
            shared += [word, file]
        else:
            rest.append(word)
    return shared + rest


def run(arguments: Sequence[str]) -> int:
    """Run one command line, report any error, delete its temporary files, and return the exit code."""
    try:
        return _run(arguments)
    finally:
        # The result is already written: an interrupt can no longer change it.
        with _no_interrupts():
            end_session()


def _run(arguments: Sequence[str]) -> int:
    shared = _before_dashes(arguments)
    json, verbose = "--json" in shared, "--verbose" in shared
    try:
        words = hoist_shared_options(arguments) or ["--help"]
        with listening(partial(_note, json=json, quiet="--quiet" in shared)):
            code = typer.main.get_command(app)(words, prog_name=PROGRAM, standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # every error becomes an exit code here
        if _is_ended_watch(arguments, error):
            return DONE
        failure = failure_of(error)
        if isinstance(error, CommandInterruptedError) and not failure.hint:
            failure = replace(failure, hint=STOPPED_HINTS.get(error.command, ""))
        failure = naming_fleet(failure, given_fleet(shared))
        if failure.code in (CANCELLED, INTERRUPTED):
            name_stop(arguments, failure.message, failure.slug)
        return report(failure, error, json=json, verbose=verbose)
    if code == INTERRUPTED:  # typer converts KeyboardInterrupt to this
        interrupt = KeyboardInterrupt(*_signals)
        if _is_ended_watch(arguments, interrupt):
            return DONE
        failure = failure_of(interrupt)
        name_stop(arguments, failure.message, failure.slug)
        return report(failure, interrupt, json=json, verbose=verbose)
    if not arguments:
        return USAGE
    return code if isinstance(code, int) else DONE


def _is_ended_watch(arguments: Sequence[str], error: BaseException) -> bool:
    """Whether SIGTERM has ended a watch that could not say so itself, because it was starting; this says it."""
    if not (is_watch(arguments) and is_terminated(error)):
        return False
    report_end(arguments)
    return True


def _note(text: str, *, json: bool, quiet: bool) -> None:
    """Show a note while no progress display is active."""
    if not quiet:
        line = dumps({"schema": PROGRESS_SCHEMA, "note": text}) if json else printable(text)
        sys.stderr.write(f"{line}\n")


def main() -> None:
    """Run `snapshot` and exit. SIGTERM and SIGHUP unwind the stack, like Ctrl-C, so that cleanup runs."""
    secure_streams()
    raise_limit()
    choose_allocator()
    limit_thread_starts()
    find_starter()
    arguments = sys.argv[1:]
    try:
        nudge_until_handled()
        _handle_signals()
        code = run(arguments)
    except (
        KeyboardInterrupt,
        RuntimeError,
        SnapshotError,
    ) as error:  # while another error was reported, or if no thread could be started
        shared = _before_dashes(arguments)
        is_json, is_verbose = "--json" in shared, "--verbose" in shared
        is_ended = _is_ended_watch(arguments, error)
        code = DONE if is_ended else report(failure_of(error), error, json=is_json, verbose=is_verbose)
    if why := unwritten():
        sys.stderr.write(f"error: the command has ended, but its result could not be written to stdout: {why}\n")
        code = code or UNWRITTEN
    # The result is written: nothing may change the exit code from here on.
    for number in INTERRUPTING:
        signal.signal(number, signal.SIG_IGN)
    # Python's last collection visits all objects of all modules, which takes more than a tenth of a second.
    gc.freeze()
    sys.exit(code)


def _handle_signals() -> None:
    signal.signal(signal.SIGTERM, _unwind)
    # If the parent process ignores it, the exit codes of programs would be lost, and count as 0.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, handler in {signal.SIGINT: _interrupt, signal.SIGHUP: _unwind}.items():
        # Respect a signal that the parent process ignores, as nohup does.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def _no_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted, and only it may set handlers
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_repeated() -> bool:
    """Whether this signal repeats the last one that interrupted the command."""
    global _signalled_at
    now = time.monotonic()
    if now - _signalled_at < SAME_SECONDS:
        return True
    _signalled_at = now
    return False


def _before_dashes(arguments: Sequence[str]) -> Sequence[str]:
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _interrupt(number: int, frame: FrameType | None) -> None:
    if begin_stopping() or not _is_repeated():
        signal.default_int_handler(number, frame)


def _unwind(number: int, _frame: object) -> None:
    is_requested = begin_stopping()
    if not is_requested and _is_repeated():
        return
    # Only KeyboardInterrupt aborts a call into the JVM. SystemExit would wait until the job ends.
    _signals.append(number)
    request = cancel_request() if is_requested else None
    raise KeyboardInterrupt(number, *([owner_text(request.by)] if request else []))
