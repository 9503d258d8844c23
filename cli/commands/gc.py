"""`snapshot gc`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import recorded_activity
from cutline.cli.output.arguments import command_context
from cutline.cli.output.confirmation import Yes, require_confirmation
from cutline.cli.output.failure import DONE, REFUSED
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.results import answer, emit, progress
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.messages import list_some
from cutline.fleet.units import Duration
from cutline.snapshots.removal.garbage_rules import GarbageReason
from cutline.snapshots.removal.gc import Garbage, GcReport, collect_garbage, preview_garbage
from cutline.snapshots.removal.survey import SizeTotal
from cutline.storage.errors import UsageError

SCHEMA = "cutline/gc/1"
NAMES_SHOWN_MAX = 10
REASONS = {
    GarbageReason.DELETED: "of a deleted snapshot",
    GarbageReason.PRUNED: "of pruned increments",
    GarbageReason.FAILED: "of failed operations",
    GarbageReason.UNLISTED: "not listed in any commit",
    GarbageReason.ENDED: "after the last increment of a chain that has ended",
    GarbageReason.LEFT_OVER: "left by unfinished writes",
    GarbageReason.OLD_RECORD: "records of old operations",
    GarbageReason.NEEDED: "needed",
    GarbageReason.NEXT: "part of the next increment",
    GarbageReason.OPEN: "of operations without an outcome",
    GarbageReason.IN_USE: "being restored",
    GarbageReason.YOUNG: "too young (grace period, or an hour for probes and ended chains)",
    GarbageReason.UNCLEAR: "undecided, see the warnings",
}


@or_in_background
def gc(
    context: typer.Context,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the garbage, and change nothing. Only the store is read.")
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Remove only objects older than this, such as 30min or 7d. Default: gc_grace in fleet.toml, or 24h.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    metrics: MetricsFile = None,
) -> None:
    """Remove objects that no commit needs and no operation is using.

    Safe while a create is running, and safe to repeat.
    """
    confirmation = require_confirmation(context, "gc", yes=yes or dry_run)
    fleet = command_context(context).load_fleet()
    seconds = fleet.retention.gc_grace_seconds if grace is None else _seconds(grace)
    if not confirmation.is_given:
        with progress(context) as shown:
            found = preview_garbage(fleet, seconds, shown)
        # By the time the user answers, more objects may be garbage, but none that belong to a restorable snapshot.
        if found.garbage:
            confirmation.ask(lines_of(found), "remove this garbage?")
    with (
        leaving_metrics(context, fleet, "gc", metrics, is_dry=dry_run),
        with_hooks(context, fleet, "gc", is_dry=dry_run),
    ):
        if dry_run:
            with progress(context) as shown:
                report = preview_garbage(fleet, seconds, shown)
        else:
            with recorded_activity(context, fleet, "gc") as recorded:
                report = collect_garbage(fleet, seconds, recorded.activity)
                recorded.code = REFUSED if report.refused else DONE
                recorded.volumes = {"objects": report.removed.objects, "bytes": report.removed.size_bytes}
        code = REFUSED if report.refused else DONE
        if dry_run:
            answer(context, document_of(report), lines_of(report))
        else:
            emit(context, document_of(report) | {"warnings": recorded.warnings}, lines_of(report), code=code)
        raise typer.Exit(code)


def _seconds(text: str) -> float:
    try:
        return Duration.parse(text)
    except ValueError as error:
        raise UsageError(f"--grace: {error}", hint="give a number and a unit: s, min, h or d") from error


def document_of(report: GcReport) -> dict[str, Any]:
    """Return the command's JSON output. `objects` and `bytes` count removed objects or, in a dry run, the garbage."""
    size_total = total_of(report.garbage)
    done = size_total if report.is_dry else report.removed
    return {
        "schema": SCHEMA,
        "dry_run": report.is_dry,
        "grace_seconds": report.grace_seconds,
        "settled": not report.unsettled and not report.is_dry,
        "unsettled": report.unsettled or None,
        "open_operations": [open_operation.to_json() for open_operation in report.open_operations],
        "objects": done.objects,
        "bytes": done.size_bytes,
        "garbage": [entry for garbage in report.garbage for entry in _entries(garbage)],
        "by_kind": [
            {"snapshot": snapshot or None, "kind": kind, "objects": total.objects, "bytes": total.size_bytes}
            for (snapshot, kind), total in group_garbage(report.garbage).items()
        ],
        "kept": [
            {
                "snapshot": snapshot or None,
                "why": why,
                "detail": text,
                "objects": total.objects,
                "bytes": total.size_bytes,
            }
            for (snapshot, why, text), total in sorted(report.kept.items())
        ],
        "refused": [{"object": removal.key, "reason": removal.reason} for removal in report.refused],
        "unknown": report.unknown,
    }


def _entries(one: Garbage) -> Iterator[dict[str, Any]]:
    about = {"kind": one.kind, "snapshot": one.snapshot or None, "operation": one.operation or None, "why": one.why}
    for listed in one.objects:
        yield {"object": listed.key, "bytes": listed.size, "created_at": listed.created_at} | about
    if one.leftover:
        name = one.leftover.key or one.leftover.id
        yield {"object": name, "bytes": one.leftover.size_bytes, "created_at": one.leftover.began_at} | about


def total_of(garbage: Iterable[Garbage]) -> SizeTotal:
    """Return the number and total size of the garbage objects."""
    total = SizeTotal()
    for one in garbage:
        for size in one.sizes:
            total.add(size)
    return total


def group_garbage(garbage: Iterable[Garbage]) -> dict[tuple[str, str], SizeTotal]:
    """Return the number and total size of the garbage objects by snapshot and kind."""
    totals: dict[tuple[str, str], SizeTotal] = {}
    for one in garbage:
        for size in one.sizes:
            totals.setdefault((one.snapshot, one.kind), SizeTotal()).add(size)
    return dict(sorted(totals.items()))


def lines_of(report: GcReport) -> list[str]:
    """Return the human-readable output."""
    size_total = total_of(report.garbage)
    lines = [f"would remove {_text(size_total)}" if report.is_dry else f"removed {_text(report.removed)}"]
    reasons: dict[tuple[str, str], set[str]] = {}
    for garbage in report.garbage:
        reasons.setdefault((garbage.snapshot, garbage.kind), set()).add(REASONS[garbage.why])
    for (snapshot, kind), total in group_garbage(report.garbage).items():
        why = "; ".join(sorted(reasons[snapshot, kind]))
        lines.append(f"  {snapshot or 'the store'}: {kind}, {_text(total)}, {why}")
    return [*lines, *_kept_lines(report), *_refused_lines(report)]


def _kept_lines(report: GcReport) -> Iterator[str]:
    kept: dict[GarbageReason, SizeTotal] = {}
    for (_, why, _), total in report.kept.items():
        both = kept.setdefault(why, SizeTotal())
        both.objects, both.size_bytes = both.objects + total.objects, both.size_bytes + total.size_bytes
    yield "kept: " + ("; ".join(f"{_text(total)} {REASONS[why]}" for why, total in kept.items()) or "nothing")
    if GarbageReason.YOUNG in kept and report.grace_seconds:
        yield f"the grace period is {seconds_text(report.grace_seconds)}; to shorten it: --grace TIME"
    for snapshot, _, text in sorted(one for one in report.kept if one[1] is GarbageReason.UNCLEAR):
        yield f"warning: {f'snapshot {snapshot}' if snapshot else 'the store'}: {text}"
    for open_operation in report.open_operations:
        yield open_operation.text
    if report.unsettled:
        yield f"warning: earlier operations were not settled: {report.unsettled}"
    if report.unknown:
        yield f"not written by Cutline, left alone: {list_some(report.unknown, NAMES_SHOWN_MAX)}"


def _refused_lines(report: GcReport) -> Iterator[str]:
    for removal in report.refused[:NAMES_SHOWN_MAX]:
        yield f"error: {removal.reason}"
    if report.refused:
        yield f"the store refused to delete {quantity_text(len(report.refused), 'objects')}; to retry: snapshot gc"


def _text(total: SizeTotal) -> str:
    return f"{quantity_text(total.objects, 'objects')}, {size_text(total.size_bytes)}"
