"""`snapshot copy`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import RecordedCommand, recorded_activity
from cutline.cli.output.arguments import DryRun, command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.failure import CONFLICTS, DONE
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.results import WARNING, answer, emit, progress
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.config import Fleet
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.snapshots.copying.chains import GIVEN_UP, CopyProblem, SnapshotCopy, StoreCopy, copy_snapshots
from cutline.snapshots.copying.second_store import CopyPlace, locate_copy
from cutline.snapshots.records.operation_records import CopiedPoint
from cutline.snapshots.records.proven_chains import check_name, point_label
from cutline.storage.errors import SnapshotError, UsageError, find_behind

SCHEMA = "cutline/copy/1"
SHOWN_MAX = 20


@or_in_background
def copy(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", autocompletion=complete_snapshots, help="The full name of the snapshot.", show_default=False
        ),
    ] = None,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL",
            help="The second store, such as s3://bucket/folder, or the fleet file that names it. Default: every"
            " [[copy]] in fleet.toml.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Copy all snapshots, the newest first.")] = False,
    dry_run: DryRun = False,
    metrics: MetricsFile = None,
) -> None:
    """Copy snapshots with all their increments into a second store.

    Only what is missing there is copied, and every object is verified as it is read. An empty store is initialised.
    Nothing is overwritten, and nothing is deleted: retention in the second store is its own. Needs no node.

    Exit codes: 0 if the second store has everything, 1 if it does not: objects are damaged, and increments that need
    them are not copied, or restore points that it lacks were given up, and those after them are not copied.
    """
    fleet = command_context(context).load_fleet()
    places = _check(fleet, name, to, everything=everything)
    began = time.monotonic()
    with (
        leaving_metrics(context, fleet, "copy", metrics, is_dry=dry_run),
        with_hooks(context, fleet, "copy", name, is_dry=dry_run),
    ):
        if dry_run:
            with progress(context) as shown:
                reports = _copy(fleet, places, name, shown, [], is_dry=True)
            document = document_of(reports, name, "", time.monotonic() - began)
            answer(context, document, [*lines_of(reports), "nothing was changed"])
            raise typer.Exit(_code(reports))
        with recorded_activity(context, fleet, "copy", name or "") as recorded:
            reports = _run(fleet, places, name, recorded)
            recorded.code = _code(reports)
        document = document_of(reports, name, recorded.operation, time.monotonic() - began)
        document["warnings"] = recorded.warnings
        emit(context, document, lines_of(reports), code=recorded.code)
        raise typer.Exit(recorded.code)


def _check(fleet: Fleet, name: str | None, to: str | None, *, everything: bool) -> list[CopyPlace]:
    """Return the second stores; raise UsageError if the arguments name none, or name no snapshot or both."""
    if (name is None) != everything:
        words = "--all" if to is None else f"--all --to {shlex.quote(to)}"
        raise UsageError(
            "name a snapshot, or copy all snapshots with --all, but not both",
            hint=f"to copy all snapshots: snapshot copy {words}",
        )
    if name is not None:
        check_name(name)
    named = [to] if to is not None else list(fleet.copies)
    if not named:
        raise UsageError(
            f"no second store is named: neither with --to nor under [[copy]] in {fleet.path}",
            hint="name one: --to s3://bucket/folder, or --to FILE for the fleet file that names it; see"
            " docs/second-store.md",
        )
    return [locate_copy(fleet, each) for each in named]


def _run(fleet: Fleet, places: list[CopyPlace], name: str | None, recorded: RecordedCommand) -> list[StoreCopy]:
    reports: list[StoreCopy] = []
    try:
        _copy(fleet, places, name, recorded.activity, reports, is_dry=False)
    finally:
        # What has been copied stays copied, however the command ends.
        recorded.copied = tuple(_copied_points(reports))
        recorded.volumes = {
            "objects": _sum(reports, lambda one: one.copied.objects),
            "bytes": _sum(reports, lambda one: one.copied.size_bytes),
        }
    return reports


def _copy(
    fleet: Fleet,
    places: Iterable[CopyPlace],
    name: str | None,
    shown: Progress,
    reports: list[StoreCopy],
    *,
    is_dry: bool,
) -> list[StoreCopy]:
    """Add the report of each store to `reports`, and return them.

    Raises the first error after the other stores: each is to be kept up to date. The error then has the reports in its
    details, and what they found is shown as warnings: nobody would see the damage otherwise.
    """
    first: SnapshotError | None = None
    for place in places:
        reports.append(StoreCopy(place.url, is_dry))
        try:
            copy_snapshots(fleet, place, name, shown, reports[-1])
        except SnapshotError as error:
            if find_behind(error, KeyboardInterrupt) is not None:
                raise
            if first is not None:
                shown.note(f"copy to {place.url}: {error.message}")
            first = first or error
    if first is None:
        return reports
    for report in reports:
        for text in _found_texts(report):
            shown.note(text)
    first.details["stores"] = _stores_document(reports)
    raise first


def _found_texts(report: StoreCopy) -> Iterator[str]:
    """Describe the damage that a copy found before it, or the copy to another store, ended with an error."""
    if report.damaged_record:
        yield report.damaged_record
    for one in report.snapshots:
        for line in _problem_lines(one):
            yield line.removeprefix(WARNING)


def _copied_points(reports: Iterable[StoreCopy]) -> Iterator[CopiedPoint]:
    for report in reports:
        for one in report.snapshots:
            if one.through is not None and one.cut_at is not None:
                yield CopiedPoint(report.url, one.name, one.through, one.cut_at, one.behind)


def _code(reports: Iterable[StoreCopy]) -> int:
    return CONFLICTS if any(report.problems for report in reports) else DONE


def _sum(reports: Iterable[StoreCopy], count: Callable[[SnapshotCopy], int]) -> int:
    return sum(report.total(count) for report in reports)


def document_of(reports: list[StoreCopy], name: str | None, operation: str, seconds: float) -> dict[str, Any]:
    """Return the command's JSON output. `skipped` counts what the second store already had of the same commits."""
    return {
        "schema": SCHEMA,
        "dry_run": not operation,
        "operation": operation or None,
        "snapshot": name,
        "increments": _sum(reports, lambda one: len(one.increments)),
        "behind": _sum(reports, lambda one: one.behind),
        "objects": _sum(reports, lambda one: one.copied.objects),
        "bytes": _sum(reports, lambda one: one.copied.size_bytes),
        "skipped": _sum(reports, lambda one: one.present.objects),
        "stores": _stores_document(reports),
        "seconds": round(seconds, 3),
    }


def _stores_document(reports: Iterable[StoreCopy]) -> list[dict[str, Any]]:
    return [
        {
            "to": report.url,
            "snapshots": [_snapshot_document(one) for one in report.snapshots],
            "seconds": round(report.seconds, 3),
        }
        for report in reports
    ]


def _snapshot_document(one: SnapshotCopy) -> dict[str, Any]:
    return {
        "snapshot": one.name,
        "increments": one.increments,
        "merges": one.merges,
        "newest": one.newest,
        "through": one.through,
        "cut_at": one.cut_at,
        "behind": one.behind,
        "objects": one.copied.objects,
        "bytes": one.copied.size_bytes,
        "skipped": one.present.objects,
        "left_out": one.left_out or None,
        "problems": [
            {
                "object": problem.key,
                "kind": problem.kind,
                "node": problem.node or None,
                "increment": problem.increment,
                "detail": problem.detail,
                "hint": problem.hint or None,
            }
            for problem in one.problems
        ],
    }


def lines_of(reports: Iterable[StoreCopy]) -> list[str]:
    """Return the human-readable output."""
    return [line for report in reports for line in _store_lines(report)]


def _store_lines(report: StoreCopy) -> Iterator[str]:
    done = "would copy" if report.is_dry else "copied"
    for one in report.snapshots:
        if one.left_out:
            yield f"not copied: {one.name}: {one.left_out}"
        elif one.increments:
            points = f"{point_label(one.increments[0])}"
            if len(one.increments) > 1:
                points = f"{points} to {point_label(one.increments[-1])}"
            volume = f"{quantity_text(one.copied.objects, 'objects')}, {size_text(one.copied.size_bytes)}"
            yield f"{done} {one.name}, {points}: {volume}"
        elif one.merges:
            merges = list_some([point_label(number) for number in one.merges], SHOWN_MAX)
            volume = f"{quantity_text(one.copied.objects, 'objects')}, {size_text(one.copied.size_bytes)}"
            yield f"{done} {one.name}, its merges at {merges}: {volume}"
        elif not one.problems:
            yield f"{one.name} is complete up to {point_label(one.through or 0)}"
        yield from _problem_lines(one)
    if not report.snapshots:
        yield "there are no snapshots to copy"
    yield f"{'to' if report.is_dry else 'in'} {report.url}, {seconds_text(report.seconds)}"


def _problem_lines(one: SnapshotCopy) -> Iterator[str]:
    for problem in one.problems[:SHOWN_MAX]:
        yield f"{WARNING}{_problem_text(problem)}"
    if len(one.problems) > SHOWN_MAX:
        yield f"… {len(one.problems) - SHOWN_MAX:,} more problems; --json lists all of them"
    if one.problems:
        first = point_label(one.problems[0].increment)
        hint = one.problems[0].hint or f"to repair it: snapshot repair {one.name}, then copy it again"
        yield f"{one.name} was not copied from {first} on; {hint}"


def _problem_text(problem: CopyProblem) -> str:
    if problem.kind == GIVEN_UP:
        return problem.detail
    node = f" of {problem.node}" if problem.node else ""
    return f"object {problem.key}{node}: {problem.detail}"
