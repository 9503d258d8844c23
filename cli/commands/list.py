"""`snapshot list`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from cutline.cli.output.arguments import command_context
from cutline.cli.output.flat_list import conflicts_at, csv_rows, flat_rows, flat_table
from cutline.cli.output.left_out import warnings_of_several
from cutline.cli.output.pinned import pin_document
from cutline.cli.output.renewed import copying_document, gap_texts
from cutline.cli.output.results import answer, emit_csv, emit_items
from cutline.cli.output.tables import (
    Cell,
    FittingTable,
    Shorter,
    age_text,
    count_text,
    minute_text,
    moment_text,
    quantity_text,
    size_text,
    sparkline,
    stdout_levels,
    time_text,
)
from cutline.fleet.messages import NODES_NAMED_MAX, group_by_value, list_some, name_nodes
from cutline.fleet.record import to_builtins
from cutline.nodes.left_out import select_warnings
from cutline.snapshots.listing.listing import Entry, Listing, list_store
from cutline.snapshots.listing.name_templates import newest_name
from cutline.snapshots.operations.ended_operations import EndedCheck, NewestChecks
from cutline.snapshots.operations.second_stores import SecondStoreState
from cutline.snapshots.records.chain import RenewalGap, summary_of
from cutline.snapshots.records.commit import CommitSummary
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.pins import pinned_text
from cutline.snapshots.records.proven_chains import SnapshotMissingError, cut_time, safe_time
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cutline.nodes.other_databases import OldDatabase


SCHEMA, FLAT_SCHEMA = "cutline/list/1", "cutline/list-flat/1"
# The number of increments to list per snapshot: when all snapshots are listed, when one is named, and the maximum.
LAST, LAST_OF_ONE, LAST_MAX = 3, 20, 1_000_000
Flat = Annotated[bool, typer.Option("--flat", help="Print one row per restore point, with all columns.")]
Csv = Annotated[bool, typer.Option("--csv", help="Like --flat, but as CSV, for spreadsheets and scripts.")]
COLUMNS = (
    "snapshot",
    "increment",
    "cut made",
    "state",
    "changes",
    "transactions",
    "size",
    "sizes",
    "checked",
    "reread",
    "comment",
)

PINS_SHOWN_MAX = 20
SNAPSHOTS_NAMED_MAX = 5
GAPS_SHOWN_MAX = 3
NUMBERS = {"increment", "changes", "transactions", "size"}
IMPORTANT = ("snapshot", "increment", "cut made", "state", "size", "changes", "checked")
# Columns to leave out first, because `show` and --flat also print them.
SPARED = {"transactions", "sizes"}


def list_snapshots(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Only this snapshot, or the newest that matches a template. Default: all snapshots."
        ),
    ] = None,
    *,
    last: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LAST_MAX,
            metavar="N",
            help=f"Only the newest N increments of each snapshot. Default: {LAST}, or {LAST_OF_ONE} with NAME.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List all increments, as --json, --flat and --csv do.")] = False,
    flat: Flat = False,
    csv: Csv = False,
) -> None:
    """List the snapshots in the store and their newest increments, newest first.

    The column "checked" shows the result and the age of the last check of the whole snapshot, which may rest on records
    for a part of it (--since-last). Conflicts that another check found come first. The column "reread" shows the age of
    the oldest reading: all objects have been read since then. The column "sizes" is a chart of the sizes of the newest
    increments.
    """
    options = command_context(context)
    if csv and options.json:
        raise UsageError("--csv and --json are mutually exclusive", hint="use only one of them")
    if every and last is not None:
        raise UsageError("--all and --last are mutually exclusive", hint="use only one of them")
    fleet = options.load_fleet()
    wanted = None if name is None else newest_name(fleet, name)
    if flat or csv:
        listing = list_store(fleet, all_checks=True)
        chosen = {entry.name: entry for entry in _chosen(listing, wanted)}
        rows = (
            row
            for row in flat_rows(listing)
            if row["snapshot"] in chosen and _is_shown(chosen[row["snapshot"]], row["increment"], last)
        )
        if csv:
            emit_csv(csv_rows(rows))
        elif options.json:
            emit_items(context, {"schema": FLAT_SCHEMA}, "restore_points", rows)
        else:
            answer(context, {}, [flat_table(rows, utc_now())])
        return
    listing = list_store(fleet)
    document = {
        "schema": SCHEMA,
        "snapshots": [
            entry_document(entry, _first_shown(entry, last))
            | {"retained_wal": {retained.node: retained.size_bytes for retained in entry.retained}}
            | {"slot_problems": dict(entry.slot_problems)}
            | checks_document(listing.checks, entry)
            | {"pins": [pin_document(pin) for pin in listing.pins.get(entry.name, ())]}
            for entry in _chosen(listing, wanted)
        ],
        "age_problem": listing.age_problem or None,
        "warnings": listing.warnings,
        "promoted": dict(listing.answers.promoted),
        "not_asked": [{"node": node, "why": why} for node, why in listing.answers.unanswered.items()],
        "open_operations": [open_operation.to_json() for open_operation in listing.open_operations],
        "copies": [state.to_json() for state in listing.copies],
        "put_aside": [asdict(database) for database in listing.answers.old],
    }
    shown = None if every else last or (LAST_OF_ONE if wanted else LAST)
    lines = [] if options.json else lines_of(listing, utc_now(), wanted, shown)
    answer(context, document, lines, wraps=True)


def _chosen(listing: Listing, name: str | None) -> list[Entry]:
    """Return the snapshot with this name, or all snapshots; raise SnapshotMissingError."""
    if name is None:
        return list(listing.entries)
    chosen = [entry for entry in listing.entries if entry.name == name]
    if not chosen:
        raise SnapshotMissingError(f"there is no snapshot {name}", hint="to list the snapshots: snapshot list")
    return chosen


def _first_shown(entry: Entry, last: int | None) -> int:
    """Return the number of the first increment to show: the newest `last` are shown, or all if `last` is None."""
    return max(entry.first, 1) if last is None else max(len(entry.summaries) - last + 1, entry.first, 1)


def _is_shown(entry: Entry, increment: int | None, last: int | None) -> bool:
    """Whether to show the row of a restore point; None is the row of a snapshot that can't be read."""
    if not increment:
        return increment is None or not entry.first
    return increment >= _first_shown(entry, last)


def entry_document(entry: Entry, first: int = 1) -> dict[str, Any]:
    """Return a snapshot as JSON, with its increments from `first` on. `base` is the full snapshot's operation.

    `begins_at` is the increment at which the chain begins for good, after a merge; 0 is the full snapshot.
    """
    chain = entry.chain
    if chain is None:
        return {"name": entry.name, "state": entry.state, "problem": entry.problem, "increments": []}
    full = chain.stored_full
    return {
        "name": entry.name,
        "created_at": full.created_at,
        "seconds": round(full.seconds, 3),
        "ran_seconds": full.ran_seconds,
        "cut_at": time_text(cut_time(full)),
        "safe_at": safe_time(full),
        "state": entry.state,
        "problem": entry.problem,
        "ended": entry.ended.details() if entry.ended else None,
        "base": full.chain,
        "nodes": [identity.node for identity in chain.nodes if identity.backup_of is None],
        "baseline_nodes": [identity.node for identity in chain.nodes],
        "groups": sorted({group.name for found in chain.all_groups.values() for group in found}),
        "append_only": chain.append_only,
        "warned": to_builtins(select_warnings(chain.left_out)),
        "gaps": [asdict(gap) for gap in _gaps(entry)],
        "copying": copying_document(chain.last),
        "type": "only-cut" if full.only_cut else "full",
        "bytes": entry.bytes,
        "begins_at": entry.first,
        "comment": full.comment,
        "terminal": full.terminal,
        "increments_left_out": sum(entry.first <= summary.increment < first for summary in entry.summaries),
        "increments": [
            increment_document(summary) for summary in entry.summaries if summary.increment >= max(first, entry.first)
        ],
    }


def _gaps(entry: Entry) -> list[RenewalGap]:
    """Return the gaps between the restore points of a snapshot."""
    return [gap for gap in entry.chain.gaps if gap.increment > entry.first] if entry.chain else []


def increment_document(summary: CommitSummary) -> dict[str, Any]:
    """Return an increment as JSON."""
    return {
        "number": summary.increment,
        "created_at": summary.created_at,
        "cut_at": time_text(cut_time(summary)),
        "safe_at": safe_time(summary),
        "bytes": summary.bytes,
        "changes": summary.changes,
        "transactions": summary.transactions,
        "seconds": round(summary.seconds, 3),
        "cut": summary.cut,
        "comment": summary.comment,
        "terminal": summary.terminal,
    }


def checks_document(checks: NewestChecks, entry: Entry) -> dict[str, Any]:
    """Return a snapshot's newest check, its newest full check, and its newest full check whose result is valid.

    `last_covering_check` is the newest check that is full or rests on the record of an earlier check for the rest. Of
    those on which later checks may rest, `last_record` has read most increments: its `oldest_read_at` says since when
    everything up to its increment has been reread. `standing_conflicts` is the newest check with conflicts that no
    newer check has shown to be gone. Any may be null.
    """
    ended_checks = {
        "last_check": checks.last.get(entry.name),
        "last_covering_check": checks.covering.get(entry.name),
        "last_record": checks.furthest_record(entry.name, entry.operations),
        "last_full_check": checks.full.get(entry.name),
        "last_valid_check": checks.valid.get(entry.name),
        "standing_conflicts": checks.standing_conflicts(entry.name, 1 + len(entry.summaries)),
    }
    return {field: check.to_json() if check else None for field, check in ended_checks.items()}


def lines_of(
    listing: Listing, now: datetime, wanted: str | None = None, last: int | None = None
) -> list[str | RenderableType]:
    """Return the human-readable output for the snapshot `wanted` and its newest `last` increments; None means all."""
    chosen = sorted(_chosen(listing, wanted), key=_newest_cut, reverse=True)
    pinned = [(entry.name, pin) for entry in chosen for pin in listing.pins.get(entry.name, ())]
    lines: list[str | RenderableType] = [pinned_text(name, pin) for name, pin in pinned[:PINS_SHOWN_MAX]]
    if len(pinned) > PINS_SHOWN_MAX:
        lines.append(f"further pins: {len(pinned) - PINS_SHOWN_MAX:,}; see --json")
    lines += [f"warning: {text}" for text in listing.warnings]
    lines += warnings_of_several({entry.name: entry.chain.left_out for entry in listing.entries if entry.chain})
    lines += listing.notes
    unknown = group_by_value(listing.answers.unanswered)
    lines += [
        f"{name_nodes(nodes)}: retained WAL is unknown: {why}"
        for why, nodes in islice(unknown.items(), NODES_NAMED_MAX)
    ]
    if len(unknown) > NODES_NAMED_MAX:
        lines.append(f"retained WAL is also unknown for other reasons: {len(unknown) - NODES_NAMED_MAX}; see --json")
    lines += [open_operation.text for open_operation in listing.open_operations]
    lines += [_copy_text(state, now) for state in listing.copies]
    if cut := [entry.name for entry in chosen if _first_shown(entry, last) > max(entry.first, 1)]:
        lines.append(f"all increments: snapshot list {cut[0] if len(cut) == 1 else 'NAME'} --all")
    if listing.answers.old:
        lines.append(_set_aside_text(listing.answers.old))
    if not listing.entries:
        # The line of an interrupted full snapshot names the command that resumes it.
        is_begun = any(one.is_resumable for one in listing.open_operations)
        none = "complete snapshots" if is_begun else "snapshots; to take one: snapshot create NAME"
        return [f"the store contains no {none}", *lines]
    remarks = [f"snapshot {entry.name}: {entry.remark}" for entry in chosen if entry.chain and entry.remark]
    for entry in chosen:
        gaps = gap_texts(_gaps(entry))
        remarks += [f"snapshot {entry.name}: {text}" for text in reversed(gaps[-GAPS_SHOWN_MAX:])]
        if len(gaps) > GAPS_SHOWN_MAX:
            earlier = quantity_text(len(gaps) - GAPS_SHOWN_MAX, "earlier gaps")
            remarks.append(f"snapshot {entry.name}: {earlier}; to see all: snapshot show {entry.name}")
    return [_table(chosen, listing.checks, now, last), *remarks, *lines]


def _set_aside_text(databases: Sequence[OldDatabase]) -> str:
    """Return one line about the databases that restores have set aside."""
    what, it = ("database", "it") if len(databases) == 1 else ("databases", "them")
    sizes = [one.bytes for one in databases if one.bytes is not None]
    taken = f" ({size_text(sum(sizes))})" if sizes else ""
    names = list_some((f"{one.database} on {one.node}" for one in databases), NODES_NAMED_MAX)
    return f"{what} set aside by a restore{taken}: {names}; to drop {it}: snapshot restore-discard"


def _copy_text(state: SecondStoreState, now: datetime) -> str:
    """Return the age of the newest cut in a second store, and the snapshots that lack restore points there."""
    lacks = {
        name: f"{name} lacks {quantity_text(count, 'restore points')}" for name, count in state.behind.items() if count
    }
    behind = [text for name, text in lacks.items() if name not in state.stuck]
    behind += [f"it has nothing of {list_some(state.missing, SNAPSHOTS_NAMED_MAX)}"] if state.missing else []
    stuck = [
        f"{lacks[name]} and can't be continued there, because some of them were given up: to copy it from increment"
        f" {first} on, name an empty folder: snapshot copy {name} --to URL"
        for name, first in state.stuck.items()
    ]
    newest = f"copy in {state.url}: the newest cut was made {age_text(state.newest_cut_at, now=now)}"
    hint = ["to bring it up to date: snapshot copy --all"] if behind else []
    return "; ".join([newest, *behind, *hint, *stuck])


def _newest_cut(entry: Entry) -> datetime:
    if entry.chain is None:
        return datetime.min.replace(tzinfo=UTC)
    return cut_time(entry.summaries[-1] if entry.summaries else entry.chain.full)


def _table(chosen: Iterable[Entry], checks: NewestChecks, now: datetime, last: int | None) -> FittingTable:
    rows, levels = list[tuple[Cell, ...]](), stdout_levels()
    for entry in chosen:
        if entry.chain is None:
            state = Shorter(f"{entry.state}: {entry.problem}", entry.state, entry.problem or "")
            rows.append((entry.name, "", "", state, *[""] * (len(COLUMNS) - 4)))
            continue
        first, newest = _first_shown(entry, last), entry.summaries[-1].increment if entry.summaries else 0
        shown = [summary for summary in reversed(entry.summaries) if summary.increment >= first]
        # The row of the base is the last one: that of the full snapshot, or of the increment at which the chain begins.
        base = next((one for one in entry.summaries if entry.first and one.increment == entry.first), None)
        base = base or summary_of(entry.chain.full)
        for summary in (*(one for one in shown if one.increment != base.increment), base):
            made_at, is_newest = cut_time(summary), summary.increment == newest
            # A full snapshot consists of rows; a 0 in these columns would make it look empty.
            has_changes = bool(summary.increment or summary.changes or summary.transactions)
            left = first - base.increment - 1
            if summary is base and left > 0:
                rows.append(("", "…", f"{count_text(left)} more", *[""] * (len(COLUMNS) - 3)))
            rows.append(
                (
                    entry.name if is_newest else "",
                    f"{summary.increment}{' (base)' if summary is base else ''}"
                    if summary.increment
                    else "only cut"
                    if entry.chain.full.only_cut
                    else "full",
                    Shorter(f"{moment_text(made_at)} ({age_text(made_at, now=now)})", minute_text(made_at)),
                    ", ".join([entry.state] * is_newest + ["terminal"] * summary.terminal),
                    count_text(summary.changes) if has_changes else "",
                    count_text(summary.transactions) if has_changes else "",
                    size_text(entry.base_bytes if summary is base and entry.base_bytes is not None else summary.bytes),
                    sparkline([one.bytes for one in entry.summaries if one.increment > entry.first], levels)
                    if is_newest
                    else "",
                    _checked(checks, entry, now) if is_newest else "",
                    _reread(checks, entry, now) if is_newest else "",
                    shortened(summary.comment),
                )
            )
    return FittingTable(COLUMNS, rows, NUMBERS, IMPORTANT, SPARED)


def _checked(checks: NewestChecks, entry: Entry, now: datetime) -> str:
    """Return conflicts that another check found, then the result and the age of the last check of the snapshot."""
    check, other = checks.covering.get(entry.name), checks.standing_conflicts(entry.name, 1 + len(entry.summaries))
    if other is None or other is check:
        return _result(check, entry, now)
    conflicts = f"{conflicts_at(other.point.increment)} {age_text(other.moment, now=now)}"
    return ", ".join(filter(None, (conflicts, _result(check, entry, now))))


def _result(check: EndedCheck | None, entry: Entry, now: datetime) -> str:
    """Return the result and the age of a check, and up to which increment it holds; conflicts hold for later ones."""
    if check is None:
        return ""
    point = check.point
    by_records = " by records" * point.rests_on_records
    up_to = f" up to {point.increment}," if point.has_passed and point.increment < len(entry.summaries) else ""
    return f"{point.result}{by_records}{up_to} {age_text(check.moment, now=now)}"


def _reread(checks: NewestChecks, entry: Entry, now: datetime) -> str:
    """Return the age of the oldest reading, and up to which increment objects have been read."""
    record = checks.furthest_record(entry.name, entry.operations)
    if record is None or (oldest := record.point.oldest_read_at) is None:
        return ""
    age = age_text(datetime.fromisoformat(oldest), now=now)
    is_of_earlier = record.point.increment < len(entry.summaries)
    return f"{age}, up to increment {record.point.increment}" if is_of_earlier else age
