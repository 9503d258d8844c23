"""`snapshot check`."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import UNSET, Struct
from msgspec.structs import asdict, replace

from cutline.check.named_rows import ROWS_DIFFER
from cutline.check.report import (
    CheckReport,
    Conflict,
    DifferentRow,
    RestsOn,
    Skipped,
    SnapshotReport,
    UncomparedPoints,
)
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import recorded_activity
from cutline.cli.output.arguments import SECONDS_MAX, At, Increment, command_context, parse_at
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.failure import DONE, UNWRITTEN
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.junit import junit_of, reporting_errors, write_report
from cutline.cli.output.left_out import warning_lines
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.renewed import gap_texts
from cutline.cli.output.results import CONFLICTS_SHOWN_MAX, WARNING, emit
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.config import Fleet
from cutline.fleet.messages import NODES_NAMED_MAX, group_by_value, list_some
from cutline.fleet.units import Size
from cutline.snapshots.listing.name_templates import newest_name
from cutline.snapshots.records.chain import RenewalGap
from cutline.snapshots.records.operation_records import INCONCLUSIVE, ONE_COPY, CheckedPoint, CheckResult
from cutline.snapshots.records.proven_chains import point_label
from cutline.spark.on_demand import SparkOnDemand, forked_processes
from cutline.spark.task_processes import TaskProcess
from cutline.storage.errors import UsageError

if TYPE_CHECKING:
    from cutline.restore.drill.restorable import RestorableReport

ROWS_MAX = 1000
WITH_LIVE = (
    "--live NAME compares the newest cut; the options that go with it: --rows, --max-rate, --indexes, --repair-script,"
    " --junit"
)
SUBSET = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)
# The kinds of conflicts about objects that a repair may replace, and about copies that differ.
DAMAGED = ("missing", "size", "digest", "unreadable")
# A damaged or missing commit may be in a copy of the store.
REPAIRABLE = (*DAMAGED, "commit")
COPIES_DIFFER = (*ROWS_DIFFER, "changes", "events")
# The new snapshot needs a name of its own.
TAKE_NEW = (
    "to get a snapshot without conflicts, fix their cause, then take a new full snapshot under another name: snapshot"
    " create NAME"
)

STANDBY_BACK = (
    "when the standby is back, the next increment continues its copy, or copies it again if it has ended:"
    " docs/fleet-file.md"
)
ALLOW_ONE_COPY = (
    "if shards are meant to have no standby, or no base copy of their own ([copies] base), let a check pass whose only"
    ' gap that is: [check] allow = ["one-copy"] in fleet.toml'
)
CheckedName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        autocompletion=complete_snapshots,
        help="The snapshot, or a template. Default: all snapshots.",
    ),
]
NewestOnly = Annotated[
    bool, typer.Option("--newest", help="Check only the newest snapshot: the snapshot with the latest first cut.")
]
MetadataOnly = Annotated[
    bool,
    typer.Option(
        "--metadata-only",
        help="Check only commits and object sizes. The result is at best inconclusive (exit code 4).",
    ),
]
RowsNamed = Annotated[
    int,
    typer.Option(
        min=0,
        max=ROWS_MAX,
        metavar="K",
        help="For each partition (with --live: each table) that differs between copies, name up to K rows, and show"
        " what each copy has.",
    ),
]
Restorable = Annotated[
    bool,
    typer.Option(
        "--restorable",
        help="Also build the rows that a restore of NAME, or of the newest snapshot (--newest), would load, evaluate"
        " constraints and foreign keys over them, and throw them away. If this machine has PostgreSQL's programs, run"
        " the DDL in empty databases on temporary servers.",
    ),
]
SinceLast = Annotated[
    bool,
    typer.Option(
        "--since-last",
        help="Read the objects that are new since the last check that left a record, and reread some of the others."
        " The result rests on that record.",
    ),
]
Subset = Annotated[
    str | None,
    typer.Option(
        metavar="N/T",
        help="Like --since-last, but reread the Nth of T parts of the other objects, not those that are due.",
    ),
]
SecondsMax = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=SECONDS_MAX,
        metavar="S",
        help="Like --since-last, but end at the first boundary after S seconds; the output lists the parts that"
        " were not read.",
    ),
]
Live = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Compare the running primaries with their standbys and, if a NAME is given, with its newest cut.",
    ),
]
RateMax = Annotated[
    str | None,
    typer.Option(
        "--max-rate",
        metavar="SIZE",
        help="With --live, read at most SIZE per second from each node, such as 20MB. Default: the limit in the"
        " fleet file, if any.",
        show_default=False,
    ),
]
Indexes = Annotated[
    bool,
    typer.Option("--indexes", help="With --live, also check B-tree indexes with the extension amcheck."),
]
RepairScript = Annotated[
    Path | None,
    typer.Option(
        "--repair-script",
        metavar="FILE",
        help="With --live, write SQL to FILE, for an operator to repair rows and indexes. The check changes nothing.",
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Also write a JUnit report to FILE; it contains an <error> if the check itself fails."
    ),
]
ExactCheck = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="With --at: check up to the first cut after that time, and also compare the copies at the time itself.",
    ),
]


@or_in_background
def check(
    context: typer.Context,
    name: CheckedName = None,
    *,
    increment: Increment = None,
    at: At = None,
    exact: ExactCheck = False,
    newest: NewestOnly = False,
    metadata_only: MetadataOnly = False,
    rows: RowsNamed = 0,
    restorable: Restorable = False,
    since_last: SinceLast = False,
    subset: Subset = None,
    max_seconds: SecondsMax = None,
    live: Live = False,
    max_rate: RateMax = None,
    indexes: Indexes = False,
    repair_script: RepairScript = None,
    junit: Junit = None,
    metrics: MetricsFile = None,
) -> None:
    """Read snapshots back from the store and verify that they are complete and consistent.

    With --live, compare the running databases instead; nothing is stopped or changed.

    Exit codes: 0 if everything was compared and agrees, 1 on conflicts, 4 if something was not compared. The rows of
    shards without a standby need not be compared if the check table of the fleet file allows one-copy. With
    --since-last, objects that an earlier check has compared count as compared if they were last read within the time
    that the check table sets (reread). With --live, 6 if nodes could not be reached; the others were compared.
    """
    with reporting_errors(junit):
        options = LiveOptions(live, max_rate, indexes, repair_script)
        request = CheckRequest(
            name,
            increment,
            metadata_only,
            rows,
            since_last,
            parse_subset(subset),
            max_seconds,
            newest,
            parse_at(at, increment, exact=exact),
            exact,
        )
        options.refuse_misuse(request, restorable=restorable, metrics=metrics)
        if live:
            # Imported here: other checks need nothing of it.
            from cutline.cli.commands.check_live import run_live

            bytes_per_second = options.bytes_per_second
            run_live(
                context,
                name,
                rows,
                bytes_per_second=bytes_per_second,
                indexes=indexes,
                script=repair_script,
                junit=junit,
            )
            return
        check_request(request, restorable=restorable)
        fleet = command_context(context).load_fleet()
        with (
            forked_processes(fleet, are_wanted=not metadata_only, store=False) as processes,
            leaving_metrics(context, fleet, "check", metrics),
        ):
            request = replace(request, name=newest_name(fleet, name) if name is not None else None)
            with with_hooks(context, fleet, "check", request.name):
                ran = run_check(context, fleet, request, processes, restorable=restorable)
                report, built = ran.report, ran.built
                problems = write_report(junit, junit_of(report))
                lines = [*lines_of(report, built), *(f"{WARNING}{problem}" for problem in problems)]
                code = report.exit_code or (UNWRITTEN if problems else DONE)
                document = report.to_json() | {"restorable": built.to_json() if built else None}
                document["warnings"] = [*ran.warnings, *problems]
                emit(context, document, lines, code=code)
                raise typer.Exit(code)


class LiveOptions(Struct, frozen=True):
    """The options that belong to --live."""

    live: bool
    max_rate: str | None
    indexes: bool
    repair_script: Path | None

    def refuse_misuse(self, request: CheckRequest, *, restorable: bool, metrics: Path | None) -> None:
        """Raise UsageError if options don't go together."""
        others = {
            "--max-rate": self.max_rate is not None,
            "--indexes": self.indexes,
            "--repair-script": self.repair_script is not None,
        }
        if not self.live and (used := [option for option, is_used in others.items() if is_used]):
            raise UsageError(f"{used[0]} needs --live", hint=f"snapshot check --live {used[0]} …")
        of_snapshots = {
            "--increment": request.increment is not None,
            "--at": request.at is not None,
            "--metadata-only": request.metadata_only,
            "--restorable": restorable,
            "--since-last": request.since_last,
            "--subset": request.subset is not None,
            "--max-seconds": request.seconds_max is not None,
            "--newest": request.newest,
            "--metrics": metrics is not None,
        }
        if self.live and (used := [option for option, is_used in of_snapshots.items() if is_used]):
            raise UsageError(f"--live and {used[0]} are mutually exclusive", hint=WITH_LIVE)

    @property
    def bytes_per_second(self) -> int | None:
        """The limit on the rate; raises UsageError if it is not a size."""
        if self.max_rate is None:
            return None
        try:
            return int(Size.from_document(self.max_rate))
        except ValueError:
            raise UsageError(
                f"--max-rate must be a size above 0 with its unit, not {self.max_rate[:100]!r}",
                hint="for example: --max-rate 20MB",
            ) from None


def parse_subset(text: str | None) -> tuple[int, int] | None:
    """Parse the value of --subset; raise UsageError unless it is N/T with N from 1 to T."""
    if text is None:
        return None
    if (match := SUBSET.fullmatch(text)) and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise UsageError(f"--subset {text[:100]!r} is not a part such as 1/7", hint="snapshot check NAME --subset 1/7")


def check_request(request: CheckRequest, *, restorable: bool) -> None:
    """Raise UsageError if the request is contradictory."""
    if request.increment is not None and request.name is None:
        raise UsageError("--increment needs a NAME", hint="snapshot check NAME --increment N")
    if request.at is not None and request.name is None:
        raise UsageError("--at needs a NAME", hint="snapshot check NAME --at TIME")
    if request.at is not None and restorable:
        raise UsageError(
            "--restorable and --at are mutually exclusive",
            hint="a drill builds and tests the rows at any time: snapshot drill NAME --at TIME --exact",
        )
    if request.exact and request.metadata_only:
        raise UsageError("--exact and --metadata-only are mutually exclusive", hint="use only one of them")
    if request.newest and request.name is not None:
        raise UsageError("--newest and NAME are mutually exclusive", hint="use only one of them")
    if restorable and request.name is None and not request.newest:
        raise UsageError(
            "--restorable builds the rows of one snapshot",
            hint=[
                "name it: snapshot check NAME --restorable",
                "or take the newest: snapshot check --newest --restorable",
            ],
        )
    if request.metadata_only and (restorable or request.rows):
        other = "--restorable" if restorable else "--rows"
        raise UsageError(f"{other} and --metadata-only are mutually exclusive", hint="use only one of them")
    reads_all = {
        "--increment": request.increment is not None,
        "--at": request.at is not None,
        "--metadata-only": request.metadata_only,
        "--rows": request.rows > 0,
        "--restorable": restorable,
    }
    if request.uses_records and any(reads_all.values()):
        option = next(option for option, is_given in reads_all.items() if is_given)
        raise UsageError(
            f"{option} can't be combined with --since-last, --subset or --max-seconds",
            hint="those check the newest increment, and read only a part of the snapshot; leave out either those or"
            f" {option}",
        )


class CheckRun(Struct, frozen=True):
    """A check that ended: its report, that on the rows that a restore would load, and warnings, which stderr has."""

    report: CheckReport
    built: RestorableReport | None
    warnings: list[str]


def run_check(
    context: typer.Context,
    fleet: Fleet,
    request: CheckRequest,
    processes: Sequence[TaskProcess],
    *,
    restorable: bool,
) -> CheckRun:
    """Run the check, and record its result; if `restorable`, also build the rows that a restore would load."""
    built, began = None, time.monotonic()
    with (
        SparkOnDemand(fleet, f"check {request.name or 'all'}", processes=processes) as spark,
        recorded_activity(context, fleet, "check", request.name or "") as recorded,
    ):
        report = check_snapshots(fleet, request, spark, recorded.activity)
        if restorable and report.snapshots:
            # Imported here: most checks need nothing of restore.
            from cutline.restore.drill.restorable import check_restorable
            from cutline.snapshots.records.proven_chains import OnlyCutError

            try:
                # With --newest, the snapshots after the first are those that can't be read.
                name = report.snapshots[0].name
                built = check_restorable(fleet, name, request.increment, spark, recorded.activity)
            except OnlyCutError:
                # Conflicts that were found are more important than the refusal.
                if not report.snapshots[0].conflicts:
                    raise
            else:
                add_problems(report.snapshots[0], built)
                report = replace(report, seconds=time.monotonic() - began)
        recorded.code, recorded.reason, recorded.volumes = report.exit_code, reason_of(report), volumes_of(report)
        recorded.checked = checked_points(report, request, built)
    return CheckRun(report, built, recorded.warnings)


def add_problems(snapshot: SnapshotReport, built: RestorableReport) -> None:
    """Add the problems that a restore would have to the check's report."""
    snapshot.conflicts += [
        Conflict("restore", one.detail, node=one.node or None, group=one.group) for one in built.problems
    ]
    if built.problems:
        snapshot.read = None
    if built.ddl == "refused":
        snapshot.skipped.append(Skipped("running the DDL", built.ddl_detail))


def reason_of(report: CheckReport) -> str:
    """Return the result as `history` shows it."""
    return f"{report.result}, with records of earlier checks" if report.rests_on_records else report.result


def volumes_of(report: CheckReport) -> dict[str, int]:
    """Return the amounts compared, read back and reread, summed over all snapshots."""
    volumes = sum((Counter(asdict(snapshot.compared)) for snapshot in report.snapshots), Counter[str]())
    for rests_on in (snapshot.rests_on for snapshot in report.snapshots):
        if rests_on:
            volumes.update(objects=rests_on.reread_objects, bytes=rests_on.reread_bytes)
    volumes["rows"] += volumes.pop("rows_read_once", 0)
    return dict(volumes)


def checked_points(
    report: CheckReport, request: CheckRequest, built: RestorableReport | None = None
) -> tuple[CheckedPoint, ...]:
    """Return the result for each restore point, in the format used in the operation's outcome.

    `built` is the report on the rows that a restore of the first snapshot would load, if any.
    """
    is_full = request.increment is None and request.at is None and not request.metadata_only
    return tuple(
        _checked_point(snapshot, None if number else built, is_full=is_full and snapshot.reads_all)
        for number, snapshot in enumerate(report.snapshots)
    )


def _checked_point(snapshot: SnapshotReport, built: RestorableReport | None, *, is_full: bool) -> CheckedPoint:
    return CheckedPoint(
        snapshot.name,
        snapshot.increment,
        snapshot.result,
        is_full,
        snapshot.figures,
        snapshot.rests_on.operation if snapshot.rests_on else UNSET,
        snapshot.read or UNSET,
        snapshot.uncompared_spans or UNSET,
        not built.problems if built else UNSET,
    )


def lines_of(report: CheckReport, built: RestorableReport | None = None) -> list[str]:
    """Return the human-readable output; `built` is the report on the rows that a restore would load, if any."""
    lines = [line for snapshot in report.snapshots for line in _snapshot_lines(snapshot)]
    lines += restorable_lines(built) if built else []
    if not report.snapshots:
        lines.append("the store contains no snapshots: nothing was compared")
    lines += _hints(report)
    # Those that begin with WARNING go to stderr even with --quiet.
    lines += [line for snapshot in report.snapshots for line in (*_gap_lines(snapshot), *_doubt_lines(snapshot))]
    lines += [open_operation.text for open_operation in report.open_operations]
    result = result_text(report.result, rests_on_records=report.rests_on_records)
    return [*lines, f"{result}, {seconds_text(report.seconds)}"]


def _hints(report: CheckReport) -> Iterator[str]:
    """Yield hints about the conflicts; a hint about a single snapshot has its name."""
    names: dict[Callable[[str], str], list[str]] = {
        _rows_hint: [],
        _repair_hint: [],
        _compare_hint: [],
        _earlier_hint: [],
    }
    for snapshot in report.snapshots:
        damaged = {conflict.node for conflict in snapshot.conflicts if conflict.kind in DAMAGED}
        if any(_may_name_rows(snapshot, conflict) for conflict in snapshot.conflicts):
            names[_rows_hint].append(snapshot.name)
        if any(conflict.kind in REPAIRABLE for conflict in snapshot.conflicts):
            names[_repair_hint].append(snapshot.name)
        if any(
            conflict.kind in COPIES_DIFFER and damaged.isdisjoint((conflict.node, conflict.other_node))
            for conflict in snapshot.conflicts
        ):
            names[_compare_hint].append(snapshot.name)
        if snapshot.uncompared_points:
            names[_earlier_hint].append(snapshot.name)
    yield from (hint(of[0] if len(of) == 1 else "NAME") for hint, of in names.items() if of)
    conflicts = [conflict for snapshot in report.snapshots for conflict in snapshot.conflicts]
    if any(conflict.kind not in REPAIRABLE for conflict in conflicts):
        yield TAKE_NEW
    skipped = [part for snapshot in report.snapshots for part in snapshot.skipped]
    lacking = [part for one in report.snapshots if not one.allows_one_copy for part in one.skipped]
    if report.result == INCONCLUSIVE and any(part.is_absent for part in skipped):
        yield STANDBY_BACK
    elif report.result == INCONCLUSIVE and any(part.is_one_copy for part in lacking):
        yield ALLOW_ONE_COPY


def _rows_hint(name: str) -> str:
    return f"to see rows that differ, and what each copy has of them: snapshot check {name} --rows 20"


def _repair_hint(name: str) -> str:
    return (
        "a restore refuses damaged or missing objects, and names the increments that it can restore instead; to replace"
        f" them: snapshot repair {name}"
    )


def _compare_hint(name: str) -> str:
    return (
        "copies differ although their objects are intact, so a repair replaces nothing, and a restore takes the rows of"
        " the primary's copy; to compare the running primaries with their standbys and with the newest cut: snapshot"
        f" check --live {name}"
    )


def _earlier_hint(name: str) -> str:
    return (
        "parts of earlier restore points that were not compared do not change the result; a check of such a point"
        " (--increment N) is inconclusive, or one-copy if that is allowed; these points are named until they are given"
        f" up, by [retention] or by: snapshot merge {name} --drop-earlier"
    )


def restorable_lines(built: RestorableReport) -> list[str]:
    """Describe the rows that a restore would load."""
    rows = quantity_text(sum(built.rows.values()), "rows")
    ddl = {"run": "the DDL runs in empty databases", "refused": "the DDL could not be run on temporary servers"}
    why = f" ({built.ddl_detail})" if built.ddl_detail else ""
    if built.ddl == "refused":
        why = ""
    lines = [f"  built, as a restore would load it: {rows}; {ddl.get(built.ddl, 'the DDL was read, but not run')}{why}"]
    if built.constraints or built.other_constraints:
        others = f"; {built.other_constraints:,} can only be evaluated by a server" if built.other_constraints else ""
        lines.append(f"  evaluated over these rows: {quantity_text(built.constraints, 'constraints')}{others}")
    return lines


def _may_name_rows(snapshot: SnapshotReport, conflict: Conflict) -> bool:
    """Whether a check of everything may name rows that differ; if only changes were compared, their rows may differ."""
    if snapshot.rests_on and conflict.kind == "changes":
        return True
    return conflict.kind in ROWS_DIFFER and not conflict.rows and not conflict.rows_unnamed


def result_text(result: CheckResult, *, rests_on_records: bool) -> str:
    """Describe the result of a check."""
    texts = [f"{result}: each copy is consistent with itself" if result == ONE_COPY else result]
    return ", ".join([*texts, *(["with records of earlier checks"] if rests_on_records else [])])


def _snapshot_lines(one: SnapshotReport) -> list[str]:
    verb = "read" if one.is_partial else "compared"
    lines = [
        f"{one.name} at increment {one.increment}: {result_text(one.result, rests_on_records=bool(one.rests_on))}",
        f"  {verb} {_amounts_text(one)}",
    ]
    if one.exact_at:
        lines.append(f"  the rows were also compared at {one.exact_at}, between two cuts")
    if one.rests_on:
        lines += [f"  {line}" for line in _lines_of_records(one.rests_on)]
    if one.unused_records:
        lines.append(f"  no record of an earlier check was used: {one.unused_records}")
    if one.compared.rows_read_once:
        read_back = quantity_text(one.compared.rows_read_once, "base rows")
        lines.append(f"  read back, but not compared, because all copies share one base copy: {read_back}")
    if one.large_objects:
        read_back = quantity_text(one.large_objects, "large objects")
        lines.append(f"  read back, no second copy to compare with: {read_back}")
    lines += _participant_lines(one)
    for conflict in one.conflicts[:CONFLICTS_SHOWN_MAX]:
        lines.append(f"  conflict: {conflict_text(conflict)}")
        lines += [f"    {line}" for row in conflict.rows for line in _row_lines(row)]
        lines += [f"    rows are not named: {conflict.rows_unnamed}"] if conflict.rows_unnamed else []
    if len(one.conflicts) > CONFLICTS_SHOWN_MAX:
        lines.append(f"  … {len(one.conflicts) - CONFLICTS_SHOWN_MAX:,} more; --json lists all of them")
    lines += [f"  {line}" for line in warning_lines(one.warned)]
    lines += [f"  {line}" for line in _earlier_lines(one.uncompared_points)]
    skipped = group_by_value({skipped.what: skipped.why for skipped in one.skipped_by_cause})
    if len(one.skipped) > NODES_NAMED_MAX:
        # A fleet may have a thousand shards without a standby.
        return lines + [f"  skipped: {list_some(some, NODES_NAMED_MAX)} ({why})" for why, some in skipped.items()]
    return lines + [f"  skipped: {skipped.what} ({skipped.why})" for skipped in one.skipped_by_cause]


def _earlier_lines(points: Iterable[UncomparedPoints]) -> Iterator[str]:
    """Name what was not compared at earlier restore points."""
    grouped: dict[UncomparedPoints, list[str]] = {}
    for one in points:
        grouped.setdefault(replace(one, what=""), []).append(one.what)
    for of, parts in grouped.items():
        yield f"not compared at {points_text(of.first, of.last)}: {list_some(parts, NODES_NAMED_MAX)} ({of.why})"


def points_text(first: int, last: int) -> str:
    """Return the name that messages use for the restore points from increment `first` to `last`."""
    if first == last:
        return point_label(first)
    return f"increments {first} to {last}" if first else f"the full snapshot to {point_label(last)}"


def _amounts_text(one: SnapshotReport) -> str:
    """Return the amounts that were read and compared; only the number of objects if none was read."""
    compared = one.compared
    objects = quantity_text(compared.objects, "objects")
    amounts_read = (compared.bytes, compared.rows, compared.changes, compared.partitions, compared.transactions)
    if not any((*amounts_read, compared.rows_read_once)):
        return f"{objects}, by name and size" if compared.objects else objects
    amounts = (f"{objects} ({size_text(compared.bytes)})", _rows_text(one))
    partitions = quantity_text(compared.partitions, "partitions")
    return ", ".join((*amounts, partitions, quantity_text(compared.transactions, "global transactions")))


def _rows_text(one: SnapshotReport) -> str:
    """Return the numbers of rows and changes, and of the copies in which they were counted if there are several."""
    rows, changes = quantity_text(one.compared.rows, "base rows"), quantity_text(one.compared.changes, "changes")
    if not one.copies or one.copies == (1,):
        return f"{rows}, {changes}"
    return f"{rows} and {changes} in " + (f"{one.copies[0]} copies" if len(one.copies) == 1 else "all copies")


def _participant_lines(one: SnapshotReport) -> Iterator[str]:
    """Report the global transactions whose participants are not known, and names that belong to no shard."""
    if one.unknown_participants:
        count = quantity_text(one.unknown_participants, "global transactions")
        yield f"  participants not known: {count} (a check can't tell if a shard lacks one of them; see docs/check.md)"
    if one.foreign_participants:
        names = ", ".join(one.foreign_participants)
        yield f"  participants that are not shards of this snapshot: {names} (see known_as in docs/fleet-file.md)"


def _lines_of_records(rests_on: RestsOn) -> Iterator[str]:
    """Describe the record on which the result rests, its oldest reading, and the objects that were reread."""
    amount = f"{quantity_text(rests_on.objects, 'objects')} ({size_text(rests_on.bytes)})"
    if rests_on.objects:
        yield f"by records: {amount}, all of them read since {rests_on.oldest_read_at}"
    yield f"record: check {rests_on.operation}; everything was compared by check {rests_on.compared_by}"
    yield f"reread: {quantity_text(rests_on.reread_objects, 'objects')} ({size_text(rests_on.reread_bytes)})"
    if rests_on.left_objects:
        left = f"{quantity_text(rests_on.left_objects, 'objects')} ({size_text(rests_on.left_bytes)})"
        yield f"no time was left to reread {left}"


def _gap_lines(one: SnapshotReport) -> Iterator[str]:
    """Name the times that can't be restored, the newest first; warn of those that no earlier check has named."""
    new = [gap for gap in one.gaps if gap.increment > one.gaps_named_to]
    known = [gap for gap in one.gaps if gap.increment <= one.gaps_named_to]
    yield from _shown_gaps(new, f"{WARNING}{one.name}")
    yield from _shown_gaps(known, one.name)


def _shown_gaps(gaps: Iterable[RenewalGap], prefix: str) -> Iterator[str]:
    texts = gap_texts(gaps)
    for text in reversed(texts[-CONFLICTS_SHOWN_MAX:]):
        yield f"{prefix}: {text}"
    if len(texts) > CONFLICTS_SHOWN_MAX:
        yield f"{prefix}: {quantity_text(len(texts) - CONFLICTS_SHOWN_MAX, 'earlier gaps')}; --json lists all of them"


def _doubt_lines(one: SnapshotReport) -> Iterator[str]:
    """Describe the findings that damage would explain, and something else as well."""
    for doubt in one.doubts[:CONFLICTS_SHOWN_MAX]:
        place = ", ".join(name for name in (doubt.node, doubt.group) if name) or doubt.object
        yield f"{WARNING}{one.name}: {doubt.kind}{f' ({place})' if place else ''}: {doubt.detail}"
    if len(one.doubts) > CONFLICTS_SHOWN_MAX:
        yield f"{WARNING}{one.name}: {len(one.doubts) - CONFLICTS_SHOWN_MAX:,} more doubts; --json lists all of them"


def _row_lines(row: DifferentRow) -> Iterator[str]:
    """Describe the row in each copy, and name the copies that most others contradict."""
    yield f"row {row.key}:" if row.key else "a row without a key:"
    for stored in row.copies:
        wrong = "; most copies contradict it" if stored.node in row.outvoted else ""
        if stored.line is None:
            yield f"  {stored.node}: no such row{wrong}"
            continue
        times = f"{stored.count:,} times, " * (stored.count > 1)
        where = "the base copy" if stored.position is None else f"{stored.position}, xid {stored.xid}"
        writer = f"{times}written at {where}, in increment {stored.increment}"
        if stored.position is None:
            writer = f"{times}in {where} of increment {stored.increment}" if stored.increment else f"{times}in {where}"
        if stored.global_id:
            writer += f", transaction {stored.global_id}"
        yield f"  {stored.node}: {stored.line} ({writer}){wrong}"


def conflict_text(conflict: Conflict) -> str:
    """Describe a conflict on one line: kind, location and detail."""
    nodes = " and ".join(node for node in (conflict.node, conflict.other_node) if node)
    place = conflict.group or ""
    if conflict.partition is not None:
        place += f" partition {conflict.partition}"
    names = [name for name in (nodes, place, conflict.global_id or "") if name]
    return f"{conflict.kind}" + (f" ({', '.join(names)})" if names else "") + f": {conflict.detail}"
