"""The tasks of `watch`: increments in this process, the rest in other commands; and what each result says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import replace

from cutline.cli.output import commit_document
from cutline.cli.output.failure import CONFLICTS, INCONCLUSIVE, REFUSED, UNREACHABLE, CommandFailure
from cutline.cli.output.hooks import HookedRun, between_hooks
from cutline.cli.output.left_out import left_out_lines
from cutline.cli.output.results import WARNING
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.cli.process.stopping import stop_process
from cutline.cli.watch import standby_copies
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.running_command import (
    CommandResult,
    RunningCommand,
    run_command,
    start_command,
    start_program,
)
from cutline.cli.watch.schedule import OF_STORE, Task, TaskKind
from cutline.fleet.config import Fleet
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Noting, Progress, Silent
from cutline.nodes.left_out import LeftOut
from cutline.snapshots.create.archive_ahead import archive_ahead
from cutline.snapshots.create.context import WAIT_SECONDS, CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.listing.name_templates import full_name, new_name
from cutline.snapshots.listing.spans import traced
from cutline.snapshots.operations.activity import Activity, Command
from cutline.snapshots.operations.under_way import ActivityState, read_under_way
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import ONE_COPY
from cutline.snapshots.records.store_identity import open_own_store
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, RefusedError, SnapshotError, UsageError

# The exit codes of checks and drills that found something. Such checks and drills did not fail, and are not repeated
# soon.
VERDICTS = (CONFLICTS, INCONCLUSIVE)
# The option as hints have it: the shell's quotes are around a file whose name contains spaces.
FLEET_WORDS = r" --fleet (?:'[^']*'|\"[^\"]*\"|[^\s'\"])+"
# How many snapshots the message about an unfinished prune names.
NAMES_SHOWN_MAX = 10
# The slugs of the error of a merge if the snapshot has no increment yet, and of a removal or a merge if another
# operation reads the snapshot.
NOTHING_TO_MERGE, SNAPSHOT_IN_USE = "nothing-to-merge", "snapshot-in-use"


class CommandFailedError(SnapshotError):
    """A command that `watch` ran failed; this error takes the exit code, slug and hint of the command's error."""

    _slug: str = "command-failed"

    def __init__(self, failure: CommandFailure) -> None:
        super().__init__(failure.message, hint=failure.hint.split("\n"), details=failure.details)
        self.exit_code = failure.code
        self._slug = failure.slug

    @property
    def slug(self) -> str:
        """The slug of the command's error."""
        return self._slug


class CommandNotStartedError(RefusedError):
    """The machine of the watch can't start another command now."""


class SnapshotReadError(BusyError):
    """A command has to wait until a restore, repair or merge no longer reads a snapshot, which may take hours."""


class TaskResult(Struct, frozen=True):
    """The result of a task that was done, for the log.

    `finding` is a problem that the task found, or None. `done_at` is the time when it was done; None means just now.
    """

    text: str
    notes: tuple[str, ...] = ()
    finding: CommandFailure | None = None
    done_at: datetime | None = None


class ConcurrentTask(Struct, frozen=True):
    """A check, drill, merge, copy or gc that runs while increments are taken; `what` describes it."""

    kind: TaskKind
    what: str
    command: RunningCommand
    begun_at: datetime


class _Logging(Noting):
    """Forwards all calls to `target`, keeps the notes, and hands each to `log` at once."""

    def __init__(self, target: Progress, log: Callable[[str], None]) -> None:
        super().__init__(target)
        self.log = log

    def note(self, text: str) -> None:
        super().note(text)
        self.log(text)


def take_increment(
    fleet: Fleet, name: str, warn: Callable[[str], None], note: Callable[[str], None]
) -> tuple[Commit, TaskResult]:
    """Take the next increment in this process, between its hooks; others can see and stop it like any other create.

    `warn` gets the failure of a hook after it, and that of a request to the monitor; `note` gets the increment's notes
    as soon as there are any, from any thread.
    """
    command = Command("create", name)

    def begun(operation: str) -> None:
        run.operation = operation

    with (
        between_hooks(HookedRun(fleet, "create", name, warn, {"incremental": True}, goes_on=True)) as run,
        SparkOnDemand(fleet, f"create {name}", goes_on=True) as spark,
        traced(fleet, Silent(), command, is_one_of_many=True) as target,
        Activity(target, command, partial(open_own_store, fleet), stop_process, begun) as shown,
    ):
        noting = _Logging(shown, note)
        request = CreateRequest(name, ddl_seconds=WAIT_SECONDS, copies_between=False)
        commit = create_increment(fleet, request, spark, noting)
        run.result = commit_document.document_of(commit) | {
            "warnings": [*fleet.store.warnings, *noting.warnings],
            "notes": noting.news,
        }
    counts = commit.counts
    text = (
        f"increment {commit.increment} of {name}: {quantity_text(counts['changes'], 'changes')},"
        f" {size_text(counts['bytes'])}, {seconds_text(commit.seconds)}"
    )
    return commit, TaskResult(text)


def start_copies(source: FleetSource, name: str, note: Callable[[str], None]) -> RunningCommand:
    """Go on with the copies of large standbys in another process; `note` gets its notes, from another thread."""
    return start_program([*standby_copies.PROGRAM, str(source.copy), name], note)


def take_full(source: FleetSource, note: Callable[[str], None], *, gives_up: bool = False) -> TaskResult:
    """Repair the publications, and take a full snapshot: resume an interrupted one, or begin one under a new name.

    `note` gets the notes of the snapshot as soon as there are any, from another thread. If `gives_up`, an interrupted
    snapshot that fleet.toml does not fit any more is given up.
    """
    _run(source, ["init"])
    name, noted = full_name(source.fleet, source.rules.name), list[str]()

    def note_once(text: str) -> None:
        noted.append(text)
        note(text)

    try:
        document = _run(source, ["create", name], note_once)
    except CommandFailedError as error:
        if not gives_up or not is_refused(error):
            raise
        note(f"snapshot {name} is given up: {error.message}")
        # A snapshot with another name takes its place.
        name = new_name(source.fleet, source.rules.name)
        document = _run(source, ["create", name], note_once)
    text = f"full snapshot {name}: {size_text(document['bytes'])}, {seconds_text(document['seconds'])}"
    left_out = left_out_lines(convert(document["left_out"], list[LeftOut]))
    notes = [warning for warning in document["warnings"] if warning not in noted]
    return TaskResult(text, (*notes, *(line.removeprefix(WARNING) for line in left_out)))


def is_refused(error: BaseException) -> bool:
    """Whether a full snapshot failed because an interrupted one does not fit fleet.toml any more."""
    return (
        isinstance(error, CommandFailedError)
        and error.exit_code == UsageError.exit_code
        and "operation" in error.details
    )


def start_concurrent(source: FleetSource, kind: TaskKind, name: str) -> ConcurrentTask:
    """Start a check or a drill of the snapshot, its merge to the newest increment, or a copy or gc of the store."""
    word, what = {
        TaskKind.COPY: ("--all", "copy of all snapshots"),
        TaskKind.GC: ("--yes", "gc"),
    }.get(kind, (name, f"{kind} of {name}"))
    with _raising_not_started(kind):
        running = start_command(source.copy, [kind, word])
    return ConcurrentTask(kind, what, running, utc_now())


def result_of(task: ConcurrentTask, ended: CommandResult, fleet: Fleet) -> TaskResult:
    """Return the result of a task that ran while increments were taken; raise CommandFailedError."""
    if task.kind is TaskKind.MERGE:
        return _result_of_merge(task, ended)
    if task.kind is TaskKind.COPY:
        return _result_of_copy(task, ended)
    if task.kind is TaskKind.GC:
        return _result_of_gc(ended)
    return verdict_of(task.what, ended, fleet)


def _result_of_merge(task: ConcurrentTask, ended: CommandResult) -> TaskResult:
    if ended.code and ended.document.get("error") == NOTHING_TO_MERGE:
        return TaskResult("")
    document = _document(ended)
    if not document["is_new"]:
        return TaskResult("")
    return TaskResult(
        f"{task.what}: it begins at increment {document['increment']} now, {size_text(document['bytes'])},"
        f" {seconds_text(document['seconds'])}"
    )


def _result_of_copy(task: ConcurrentTask, ended: CommandResult) -> TaskResult:
    try:
        document = _document(ended, (CONFLICTS,))
    except CommandFailedError as error:
        # It may have found damage before, or in another store.
        problems = _problems_of_copy(error.details)
        if not problems:
            raise
        text = f"{error.message}; besides, {quantity_text(len(problems), 'problems')}, the first: {problems[0]}"
        failure = CommandFailure(error.exit_code, error.slug, text, error.hint, error.details)
        raise CommandFailedError(failure) from None
    text = f"{task.what}: {quantity_text(document['increments'], 'restore points')}, {size_text(document['bytes'])}"
    problems = _problems_of_copy(document)
    if not problems:
        return TaskResult(text)
    hint = f"{problems[0]}; to see all: snapshot copy --all --dry-run"
    return finding_of(ended.code, "not-copied", f"{text}; {quantity_text(len(problems), 'problems')}", hint)


def _problems_of_copy(document: dict[str, Any]) -> list[str]:
    """Describe the objects that a copy has not copied."""
    snapshots = [one for store in document.get("stores", ()) for one in store["snapshots"]]
    return [f"object {problem['object']}: {problem['detail']}" for one in snapshots for problem in one["problems"]]


def _result_of_gc(ended: CommandResult) -> TaskResult:
    """Return the result; objects that the store refuses to delete, perhaps because of a lock, are only a note."""
    document = _document(ended, (REFUSED,) if ended.document.get("refused") else ())
    notes = [f"gc did not settle earlier operations: {document['unsettled']}"] if document["unsettled"] else []
    if document["refused"]:
        count = quantity_text(len(document["refused"]), "objects")
        # The reason names the store and the object.
        notes.append(f"gc left {count} that the store refuses to delete; the first: {document['refused'][0]['reason']}")
    removed = f"{quantity_text(document['objects'], 'objects')}, {size_text(document['bytes'])}"
    if document["objects"]:
        return TaskResult(f"gc removed {removed}", tuple(notes))
    return TaskResult("" if notes else "gc removed nothing", tuple(notes))


def check_not_running(source: FleetSource, kind: TaskKind, name: str) -> None:
    """Raise BusyError if a check, drill, merge, copy or gc that this watch did not start is running."""
    now = utc_now()
    for way in read_under_way(source.open_store()):
        is_drill = way.intent is not None and way.intent.is_drill
        is_same = is_drill if kind is TaskKind.DRILL else way.kind == kind.value
        # A check without a name checks all snapshots.
        names = (name,) if kind is TaskKind.DRILL else (name, "")
        if is_same and way.snapshot in names and way.state(now) is not ActivityState.DEAD:
            what = kind if kind in OF_STORE else f"{kind} of {name}"
            raise BusyError(f"operation {way.id}, a {what}, is already running", hint="see: snapshot status")


def archive(fleet: Fleet, name: str, increment: Task) -> tuple[bool, TaskResult]:
    """Archive WAL ahead of the next increment; also return whether WAL must wait for it, in which case it is due."""
    ahead = archive_ahead(fleet, name, Silent())
    # A failing increment has its own pauses.
    if ahead.needs_increment and increment.retry_at is None:
        return True, TaskResult(
            f"tables of {name} have changed, or a node must be copied again: the next increment is taken now; archiving"
            " continues after it"
        )
    return False, TaskResult(f"archived {ahead.bytes:,} bytes of WAL of {name}" if ahead.bytes else "")


def verdict_of(what: str, ended: CommandResult, fleet: Fleet) -> TaskResult:
    """Return the verdict of a check or a drill, without findings that the rules accept; raise CommandFailedError."""
    document = _document(ended, VERDICTS)
    result = str(document.get("result"))
    text = f"{what}: {result}"
    return accepting(finding_of(ended.code, result, text, _found_in(document)), fleet)


def finding_of(code: int, result: str, text: str, hint: str = "", done_at: datetime | None = None) -> TaskResult:
    """Return the result of a check or a drill with this exit code."""
    finding = CommandFailure(code, result, text, hint) if code else None
    return TaskResult(text, finding=finding, done_at=done_at)


def accepting(result: TaskResult, fleet: Fleet) -> TaskResult:
    """Return the result, without findings that the fleet's rules accept."""
    if result.finding is None or result.finding.code != INCONCLUSIVE:
        return result
    accepts = fleet.watch is not None and fleet.watch.accept_inconclusive
    notes = (result.finding.hint,) if result.finding.hint else ()
    return replace(result, finding=None, notes=notes) if accepts else result


def with_finding(task: Task, result: TaskResult, before: Task | None = None) -> Task:
    """Return the task as it is after it was done with this result; its failure count continues from `before`."""
    if result.finding is None:
        return task
    before = before or task
    since, failures = before.failing_since or task.done_at, before.failures + 1
    return replace(task, failing_since=since, problem=result.finding.message, failures=failures)


def _found_in(document: dict[str, Any]) -> str:
    """Return the first finding of a check as a hint; "" for a drill, whose assertions are in its record."""
    parts = [
        (each["name"], conflict) for each in document.get("snapshots", ()) for conflict in each.get("conflicts", ())
    ]
    if parts:
        name, first = parts[0]
        places = [f"{field} {first[field]}" for field in ("node", "object") if first.get(field)]
        said = f"{quantity_text(len(parts), 'conflicts')}; the first: {first['detail']}"
        return "; ".join([said, *places, f"to see all, and what to do: snapshot check {name}"])
    # Of snapshots and of their parts, those that decide the verdict come first.
    snapshots = sorted(document.get("snapshots", ()), key=lambda snapshot: snapshot.get("result") == ONE_COPY)
    skipped = [part for snapshot in snapshots for part in snapshot.get("skipped", ())]
    return f"not compared: {skipped[0]['what']}: {skipped[0]['why']}" if skipped else ""


def prune(source: FleetSource) -> TaskResult:
    """Delete everything that no retention rule keeps. Snapshots that exceed the quota are a finding.

    Raises CommandFailedError, which names the removals that the store or a node has prevented, and SnapshotReadError if
    a snapshot was left out because another operation is reading it.
    """
    with _raising_not_started("prune"):
        ended = run_command(source.copy, ["prune", "--yes"])
    quota, left = ended.document.get("quota") or {}, _unfinished_in(ended.document)
    in_use = [str(one["message"]) for one in ended.document.get("in_use", ())]
    if left and ended.code in (REFUSED, UNREACHABLE):
        names = list_some(list(left), NAMES_SHOWN_MAX)
        text = f"prune could not finish removing {names}; the first problem: {next(iter(left.values()))}"
        hint = "the next prune continues it; to see everything that is left: snapshot prune --dry-run"
        failure = CommandFailure(ended.code, "removal-unfinished", text, hint)
        if ended.code == REFUSED:
            # A lock may last for weeks: the next attempt is that of the next day.
            return TaskResult("", (*ended.document["warnings"], *in_use), failure)
        raise CommandFailedError(failure)
    is_over = bool(quota.get("exceeded_by"))
    verdicts = [code for code, is_told in ((REFUSED, is_over), (BusyError.exit_code, in_use)) if is_told]
    document = _document(ended, verdicts)
    texts = {"delete": "deleted", "prune": "removed the increments of"}
    done = [
        (text, [deleted["snapshot"] for deleted in document["done"] if deleted["kind"] == kind])
        for kind, text in texts.items()
    ]
    parts = [f"{text} {', '.join(names)}" for text, names in done if names]
    parts += [
        f"gave up {quantity_text(len(dropped['increments']), 'restore points')} of {dropped['snapshot']} before"
        f" increment {dropped['begins_at']}"
        for dropped in document.get("given_up", ())
    ]
    if ended.code == BusyError.exit_code:
        raise SnapshotReadError("; ".join([*parts, *in_use]), hint="see: snapshot status")
    finding = None
    if is_over:
        problem = (
            f"the snapshots take {size_text(document['bytes_left'])}, {size_text(quota['exceeded_by'])} more than the"
            f" quota of {size_text(quota['bytes'])}"
        )
        finding = CommandFailure(REFUSED, "quota-exceeded", problem, "see: snapshot prune --dry-run")
    return TaskResult("; ".join(parts), (*document["warnings"], *in_use), finding)


def _unfinished_in(document: dict[str, Any]) -> dict[str, str]:
    """Return the snapshots whose removal a prune has not finished, each with the first reason."""
    left: dict[str, str] = {}
    for one in (*document.get("done", ()), *document.get("given_up", ())):
        reasons = [
            *(f"slot not dropped, because the node can't be reached: {slot}" for slot in one.get("slots_left", ())),
            *(str(each["why"]) for each in one.get("refused", ())),
            *one.get("publications_left", ()),
        ]
        if reasons or one.get("state") == "unfinished":
            left.setdefault(one["snapshot"], next(iter(reasons), "its objects or slots are still there"))
    return left


def _run(source: FleetSource, words: Sequence[str], note: Callable[[str], None] | None = None) -> dict[str, Any]:
    with _raising_not_started(words[0]):
        ended = run_command(source.copy, words, note)
    return _document(ended)


@contextmanager
def _raising_not_started(words: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandNotStartedError(
            f"snapshot {words} can't be started: {error.strerror or error}",
            hint="check this machine's free disk space and memory, and its limits on processes and open files",
        ) from error


def _document(ended: CommandResult, verdicts: Sequence[int] = ()) -> dict[str, Any]:
    """Return a command's JSON output.

    Raises BusyError if another operation was running, SnapshotReadError if it was reading a snapshot that the command
    was to change, and CommandFailedError if the command failed otherwise.
    """
    if ended.code == BusyError.exit_code and ended.code not in verdicts:
        is_read = ended.document.get("error") == SNAPSHOT_IN_USE
        raise (SnapshotReadError if is_read else BusyError)(ended.text, hint=ended.hint)
    if ended.code and ended.code not in verdicts:
        slug = str(ended.document.get("error") or CommandFailedError._slug)
        details = ended.document.get("details", {})
        # The commands in the hint name the copy of the file, which is deleted when the watch ends.
        hint = re.sub(FLEET_WORDS, "", ended.hint)
        raise CommandFailedError(CommandFailure(ended.code, slug, ended.text, hint, details))
    return ended.document
