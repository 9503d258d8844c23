"""`snapshot list`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutline.cli.output.arguments import command_context
from cutline.cli.output.flat_list import conflicts_at, csv_rows, flat_rows, flat_table
from cutline.cli.output.left_out import warnings_of_several
from cutline.cli.output.results import answer, emit_csv, emit_items
from cutline.cli.output.tables import (
    Cell,
    FittingTable,
    Shorter,
    age_text,
    count_text,
    minute_text,
    moment_text,
    size_text,
    sparkline,
    stdout_levels,
    time_text,
)
from cutline.fleet.record import to_builtins
from cutline.nodes.left_out import select_warnings
from cutline.snapshots.listing.listing import Entry, Listing, list_store
from cutline.snapshots.operations.ended_operations import EndedCheck, NewestChecks
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.commit import CommitSummary
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.operation_records import VALID
from cutline.snapshots.records.proven_chains import cut_time, safe_time
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA, FLAT_SCHEMA = "cutline/list/1", "cutline/list-flat/1"
Flat = Annotated[bool, typer.Option("--flat", help="One row per restore point, with all columns.")]
Csv = Annotated[bool, typer.Option("--csv", help="The same as CSV, for spreadsheets and scripts.")]
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
    "comment",
)

NUMBERS = {"increment", "changes", "transactions", "size"}
IMPORTANT = ("snapshot", "increment", "cut made", "state", "size", "changes", "checked")
# `show` and --flat have them.
SPARED = {"transactions", "sizes"}


def list_snapshots(context: typer.Context, *, flat: Flat = False, csv: Csv = False) -> None:
    """List the snapshots in the store with their increments.

    checked: how long ago the last full check ended, and its result unless it was valid; before it, conflicts that
    another one has found. sizes: of the newest increments.
    """
    options = command_context(context)
    if csv and options.json:
        raise UsageError("--csv and --json exclude each other", hint="leave one of the two out")
    fleet = options.load_fleet()
    if flat or csv:
        rows = flat_rows(list_store(fleet, all_checks=True))
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
            entry_document(entry)
            | {"retained_wal": {one.node: one.size_bytes for one in entry.retained}}
            | checks_document(listing.checks, entry)
            for entry in listing.entries
        ],
        "warnings": listing.warnings,
        "not_asked": [{"node": node, "why": why} for node, why in listing.answers.not_asked.items()],
        "open_operations": [one.to_json() for one in listing.open_operations],
        "put_aside": [asdict(one) for one in listing.answers.old],
    }
    lines = [] if options.json else lines_of(listing, utc_now())
    answer(context, document, lines)


def entry_document(entry: Entry) -> dict[str, Any]:
    """One snapshot's JSON. `base` is the operation that took the full snapshot."""
    chain = entry.chain
    if chain is None:
        return {"name": entry.name, "state": entry.state, "problem": entry.problem, "increments": []}
    return {
        "name": entry.name,
        "created_at": chain.full.created_at,
        "cut_at": time_text(cut_time(chain.full)),
        "safe_at": safe_time(chain.full),
        "state": entry.state,
        "problem": entry.problem,
        "lost": entry.lost.details() if entry.lost else None,
        "base": chain.full.chain,
        "nodes": [identity.node for identity in chain.nodes if identity.backup_of is None],
        "baseline_nodes": [identity.node for identity in chain.nodes],
        "groups": sorted({group.name for found in chain.all_groups.values() for group in found}),
        "append_only": chain.append_only,
        "warned": to_builtins(select_warnings(chain.left_out)),
        "type": "only-cut" if chain.full.only_cut else "full",
        "bytes": chain_bytes(chain, entry.summaries),
        "comment": chain.full.comment,
        "terminal": chain.full.terminal,
        "increments": [increment_document(one) for one in entry.summaries],
    }


def increment_document(summary: CommitSummary) -> dict[str, Any]:
    """One increment's JSON."""
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
    """The newest check of a snapshot, the newest full one, and the newest full one that found it valid, or null.

    And the newest one with conflicts that no newer one has shown to be gone.
    """
    found = {
        "last_check": checks.last.get(entry.name),
        "last_full_check": checks.full.get(entry.name),
        "last_valid_check": checks.valid.get(entry.name),
        "standing_conflicts": checks.standing_conflicts(entry.name, 1 + len(entry.summaries)),
    }
    return {field: check.to_json() if check else None for field, check in found.items()}


def chain_bytes(chain: Chain, increments: Iterable[CommitSummary]) -> int:
    """The size of all objects of the chain with these increments, in bytes."""
    return chain.full.counts["bytes"] + sum(one.bytes for one in increments)


def lines_of(listing: Listing, now: datetime) -> list[str | RenderableType]:
    """The output for people."""
    lines: list[str | RenderableType] = [f"warning: {text}" for text in listing.warnings]
    lines += warnings_of_several({entry.name: entry.chain.left_out for entry in listing.entries if entry.chain})
    lines += [f"node {node}: retained WAL is not known: {why}" for node, why in listing.answers.not_asked.items()]
    lines += [one.text for one in listing.open_operations]
    # Any snapshot's name will do.
    name = next((entry.name for entry in reversed(listing.entries) if entry.chain), "NAME")
    lines += [
        f"node {one.node}: database {one.database}, put aside by a restore"
        + (f", takes {size_text(one.bytes)}" if one.bytes is not None else "")
        + f"; to drop it: snapshot restore {name} --discard-old"
        for one in listing.answers.old
    ]
    if not listing.entries:
        return ["the store has no snapshot; take one: snapshot create NAME", *lines]
    remarks = [f"snapshot {one.name}: {one.remark}" for one in listing.entries if one.chain and one.remark]
    return [_table(listing, now), *remarks, *lines]


def _table(listing: Listing, now: datetime) -> FittingTable:
    rows, levels = list[tuple[Cell, ...]](), stdout_levels()
    for entry in listing.entries:
        if entry.chain is None:
            state = Shorter(f"{entry.state}: {entry.problem}", entry.state, entry.problem or "")
            rows.append((entry.name, "", "", state, *[""] * (len(COLUMNS) - 4)))
            continue
        for one in (summary_of(entry.chain.full), *entry.summaries):
            made_at = cut_time(one)
            rows.append(
                (
                    entry.name if one.increment == 0 else "",
                    str(one.increment) if one.increment else "only cut" if entry.chain.full.only_cut else "full",
                    Shorter(f"{moment_text(made_at)} ({age_text(made_at, now=now)})", minute_text(made_at)),
                    _state(entry, one),
                    count_text(one.changes),
                    count_text(one.transactions),
                    size_text(one.bytes),
                    "" if one.increment else sparkline([increment.bytes for increment in entry.summaries], levels),
                    "" if one.increment else _checked(listing.checks, entry, now),
                    shortened(one.comment),
                )
            )
    return FittingTable(COLUMNS, rows, NUMBERS, IMPORTANT, SPARED)


def _checked(checks: NewestChecks, entry: Entry, now: datetime) -> str:
    """How long ago the last full check ended, and its result unless it was valid; before it, conflicts of another."""
    check, other = checks.full.get(entry.name), checks.standing_conflicts(entry.name, 1 + len(entry.summaries))
    if other is None or other is check:
        return _result(check, now, is_alone=True)
    conflicts = f"{conflicts_at(other.point.increment)} {age_text(other.moment, now=now)}"
    return ", ".join(filter(None, (conflicts, _result(check, now, is_alone=False))))


def _result(check: EndedCheck | None, now: datetime, *, is_alone: bool) -> str:
    if check is None:
        return ""
    age = age_text(check.moment, now=now)
    return age if is_alone and check.point.result == VALID else f"{check.point.result} {age}"


def _state(entry: Entry, summary: CommitSummary) -> str:
    return ", ".join([entry.state] * (summary.increment == 0) + ["terminal"] * summary.terminal)
