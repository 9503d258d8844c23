"""The only table of exit codes and their meanings, printed by `--help` and enforced by the tests.

A SnapshotError carries its code as `exit_code`. No command may exit with a code that is not in this table.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import typer
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.cli.output.results import write_document
from cutline.cli.output.tables import name_fleet, printable
from cutline.cli.process.stopping import cancel_request, owner_text
from cutline.cli.process.streams import unwritten
from cutline.fleet.own_process import FolderGoneError, check_working_directory
from cutline.spark.session_folder import lasting_folder
from cutline.storage.errors import SnapshotError, StoppedError, find_behind, redact
from cutline.storage.process_limits import OPEN_FILES_HINT, NoSpaceError, find_used_up, is_used_up, space_hint

DONE = 0
CONFLICTS = 1
USAGE = 2
REFUSED = 3
INCONCLUSIVE = 4
INDETERMINATE = 5
UNREACHABLE = 6
BUSY = 7
CANCELLED = 8
INCONSISTENT_CUT = 9
DDL_REFUSED = 10
UNWRITTEN = 11
BUG = 70
INTERRUPTED = 130

MEANINGS: dict[int, str] = {
    DONE: "done; for check: everything compared, no conflicts",
    CONFLICTS: "check found conflicts, repair left damaged objects, copy found damaged objects or a"
    " second store that can't be continued, a merge could not be"
    " proven, or an assertion failed in a drill",
    USAGE: "usage error, in the arguments or in fleet.toml; also if a command needs confirmation, --yes is missing, and"
    " there is no terminal to ask at",
    REFUSED: "refused: a precondition does not hold, or the question at the terminal was not answered with yes, and"
    " nothing was changed; or the store refused to delete objects; for prune: also if what stays exceeds the quota",
    INCONCLUSIVE: "check or drill was inconclusive: something was skipped, or there was nothing to compare or assert",
    INDETERMINATE: "indeterminate: it is not known whether the commit was stored; the next create, delete, prune or gc"
    " settles it, and for a repair or merge its repetition or gc",
    UNREACHABLE: "a node or the store can't be reached, or a node can't do its work now (for example, its disk is full)"
    ", or the command or an executor ran out of memory, threads, open files or space for temporary"
    " files",
    BUSY: "another operation is running; for prune: also if it left out a snapshot that another operation is reading",
    CANCELLED: "cancelled by `snapshot cancel`, SIGTERM or SIGHUP",
    INCONSISTENT_CUT: "the cut stayed inconsistent after all retries",
    DDL_REFUSED: "restored, but the target refused some DDL statements; the databases get their real names only"
    " with --allow-refused-ddl",
    UNWRITTEN: "done, but the result could not be written",
    BUG: "a bug: the traceback is in a file whose name is printed",
    INTERRUPTED: "stopped by Ctrl-C",
}

# What remains if a command was stopped, and how to go on, unless the command itself says so (StoppedError).
STOPPED_HINTS: dict[str, str] = {
    "init": "what it has prepared stays; to prepare the rest, repeat the command",
    "create": "to see whether it committed anything: snapshot list",
    "check": "a check changes nothing; to start again, repeat the command",
    "repair": "nothing was repaired; to start again, repeat the command",
    "copy": "what was copied stays; to continue, repeat the command",
    "delete": "if the deletion had begun, the snapshot is no longer listed; to finish it, repeat the command",
    "prune": "what was deleted is gone; to finish, repeat the command",
    "gc": "only garbage was removed; to remove the rest, repeat the command",
}
ERROR_SCHEMA = "cutline/error/1"

# How typer's parser describes a value that it refuses, and what its requirements are called here.
INVALID_VALUE = re.compile(r"Invalid value for '([^']+)'[^:]*: Input should be (.+)")
REQUIREMENTS = {
    "greater than or equal to ": "at least ",
    "less than or equal to ": "at most ",
    "a valid integer": "a whole number",
    "a valid number": "a number",
}

# typer does not export the base class of its parser's errors and has moved it before; BadParameter is public.
_USAGE_MISTAKE: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class CommandFailure(Struct, frozen=True):
    """The reported form of an error; `slug` is its stable name for scripts."""

    code: int
    slug: str
    message: str
    hint: str = ""
    details: dict[str, object] = field(default_factory=dict)


def failure_of(error: BaseException) -> CommandFailure:
    """Classify `error`; write the traceback of a bug to a file."""
    return classify(error) or _bug(error)


def classify(error: BaseException) -> CommandFailure | None:
    """Return what `failure_of` reports, or None if the error is a bug."""
    if (interrupt := find_behind(error, KeyboardInterrupt)) is not None:
        return _interrupted(interrupt, find_behind(error, StoppedError))
    if (found := find_used_up(error)) is not None:
        return _failure(found)
    if isinstance(error, SnapshotError):
        failure = _failure(error)
        hints = [failure.hint, OPEN_FILES_HINT] if is_used_up(error) else [failure.hint]
        return replace(failure, hint="; ".join(filter(None, hints)))
    if isinstance(error, FileNotFoundError):
        try:
            check_working_directory()
        except FolderGoneError as gone:
            return _failure(gone)
    if isinstance(error, _USAGE_MISTAKE):
        return _usage_mistake(error)
    if isinstance(error, typer.Abort):
        return _interrupted(KeyboardInterrupt(), None)
    return None


def unexpected(error: BaseException) -> CommandFailure:
    """Return the failure for a bug, without the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return CommandFailure(BUG, "bug", f"a bug: {type(error).__name__}{where}")


def _failure(error: SnapshotError) -> CommandFailure:
    hint = space_hint(lasting_folder()) if isinstance(error, NoSpaceError) else error.hint
    return CommandFailure(error.exit_code, error.slug, error.message, hint, error.details)


def _interrupted(interrupt: KeyboardInterrupt, stopped: StoppedError | None) -> CommandFailure:
    failure = CommandFailure(INTERRUPTED, "interrupted", "stopped by Ctrl-C")
    if interrupt.args and (request := cancel_request()) is not None:
        failure = CommandFailure(CANCELLED, "cancelled", f"cancelled by {owner_text(request.by)} at {request.asked_at}")
    elif interrupt.args:
        failure = CommandFailure(CANCELLED, "terminated", f"stopped by {signal.Signals(interrupt.args[0]).name}")
    if stopped is None:
        return failure
    message = f"{failure.message}: {stopped.message}"
    return replace(failure, message=message, hint=stopped.hint, details=stopped.details)


def naming_fleet(failure: CommandFailure, fleet_file: str | None) -> CommandFailure:
    """Add the given fleet file to the commands in the failure's hint."""
    return replace(failure, hint=name_fleet(failure.hint, fleet_file, is_hint=True))


def report(failure: CommandFailure, error: BaseException, *, json: bool, verbose: bool) -> int:
    """Write `failure` as a JSON document on stdout or as lines on stderr; return its exit code.

    If the document can't be written to stdout, the lines are written, too.
    """
    if json:
        write_document(
            {
                "schema": ERROR_SCHEMA,
                "code": failure.code,
                "error": failure.slug,
                "message": failure.message,
                "hint": failure.hint,
                "details": failure.details,
            }
        )
        if not unwritten():
            return failure.code
    if verbose:
        sys.stderr.write(printable(redact("".join(traceback.format_exception(error))), keep="\n"))
    sys.stderr.write(f"{_error_label()} {printable(failure.message)}\n")
    if failure.hint:
        # Some hints list statements, one per line, so that they can be run as printed. SnapshotError escapes line
        # breaks in names.
        begin = "hint:\n" if "\n" in failure.hint else "hint: "
        sys.stderr.write(f"{begin}{printable(failure.hint, keep=chr(10))}\n")
    return failure.code


def _error_label() -> str:
    """Return `error:`, in red on a terminal that supports colours (no-color.org)."""
    is_plain = not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    return "error:" if is_plain else "\x1b[1;31merror:\x1b[0m"


def _usage_mistake(error: Any) -> CommandFailure:
    """Reword a usage error that typer found: lowercase, no full stop, and a hint."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "snapshot"
    message = " ".join(str(error.format_message()).split()).removesuffix(".")
    if match := INVALID_VALUE.fullmatch(message):
        message = f"{match[1]} must be {_requirement(match[2])}"
        return CommandFailure(USAGE, "usage", message, f"see: {path} --help")
    return CommandFailure(USAGE, "usage", message[:1].lower() + message[1:], f"see: {path} --help")


def _requirement(text: str) -> str:
    """Reword what the parser requires of a value."""
    for before, after in REQUIREMENTS.items():
        if text.startswith(before):
            # After a comma it says how its own conversion failed.
            return (after + text.removeprefix(before)).partition(",")[0]
    return text


def _bug(error: BaseException) -> CommandFailure:
    message = unexpected(error).message
    try:
        file = _keep_traceback(error)
    except OSError as reason:
        hint = f"no file could be written ({reason}): repeat the command with --verbose, and report its output"
        return CommandFailure(BUG, "bug", message, hint)
    return CommandFailure(BUG, "bug", message, f"the traceback is in {file}; please report it", {"traceback": file})


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback to a file that only its owner can read; return its path."""
    handle, file = tempfile.mkstemp(prefix="snapshot-bug-", suffix=".txt", dir=lasting_folder())
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as out:
        out.write(redact("".join(traceback.format_exception(error))))
    return file
