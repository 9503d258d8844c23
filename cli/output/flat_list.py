"""`list --flat`: one row per restore point, as JSON, as CSV or as a table.

Rows are created one at a time from the listing, so that even with 10,000 increments, only the summaries are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

from cutline.cli.output.tables import (
    Cell,
    FittingTable,
    Shorter,
    age_text,
    count_text,
    minute_text,
    moment_text,
    printable,
    size_text,
    time_text,
    took_text,
)
from cutline.fleet.messages import list_some
from cutline.snapshots.listing.listing import Entry, Listing
from cutline.snapshots.operations.ended_operations import EndedCheck, newest_covering
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.commit import Commit, FullSnapshot
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.operation_records import CONFLICTS, VALID
from cutline.snapshots.records.proven_chains import cut_time, safe_time

FULL, INCREMENTAL, ONLY_CUT = "full", "incremental", "only-cut"
COLUMNS = (
    "snapshot",
    "increment",
    "type",
    "base_snapshot",
    "state",
    "cut_at",
    "safe_at",
    "created_at",
    "seconds",
    "bytes",
    "changes",
    "transactions",
    "nodes",
    "baseline_nodes",
    "groups",
    "cut",
    "operation",
    "terminal",
    "checked_at",
    "check_result",
    "valid_at",
    "problem",
    "comment",
    "checked_increment",
    "rests_on_records",
    "oldest_read_at",
    "ran_seconds",
    "lost_shards",
)
SHARDS_NAMED_MAX = 3
# Spreadsheets interpret text that begins with one of these characters as a formula.
FORMULA_SIGNS = ("=", "+", "-", "@")
TITLES = (
    "snapshot",
    "increment",
    "type",
    "cut made",
    "began",
    "took",
    "size",
    "changes",
    "transactions",
    "nodes",
    "groups",
    "state",
    "checked",
    "comment",
)
NUMBERS = {"increment", "took", "size", "changes", "transactions", "nodes", "groups"}
IMPORTANT = ("snapshot", "increment", "type", "cut made", "state", "size", "changes", "transactions", "took", "checked")


def flat_rows(listing: Listing) -> Iterator[dict[str, Any]]:
    """Yield a row with COLUMNS per restore point, by snapshot and increment; an unreadable snapshot has one row.

    Unknown values are None; a snapshot's problem is repeated in each of its rows.
    """
    for entry in listing.entries:
        if entry.chain is None:
            yield dict.fromkeys(COLUMNS) | {"snapshot": entry.name, "state": entry.state, "problem": entry.problem}
        else:
            yield from _rows_of(entry, entry.chain, listing.checks.by_snapshot.get(entry.name, []))


def _rows_of(entry: Entry, of: Chain, checks: Sequence[EndedCheck]) -> Iterator[dict[str, Any]]:
    nodes, shards = [identity.node for identity in of.nodes], list(of.full.primaries)
    commits = {commit.increment: commit for commit in of.commits}
    groups, names = dict[tuple[str, int], str](), list[str]()
    summaries = [summary_of(of.full), *entry.summaries]
    newest = newest_covering(checks, len(summaries))
    passed = newest_covering([check for check in checks if check.point.has_passed], len(summaries))
    newest_valid = [check if check and check.point.has_passed else None for check in passed]
    for one, check, valid in zip(summaries, newest, newest_valid, strict=True):
        # Commits that were not read did not change any definitions.
        if (commit := commits.get(one.increment)) and _redefine(groups, commit):
            shards = _shards_at(shards, commit)
            names = sorted({name for (shard, _), name in groups.items() if shard in shards})
        yield {
            "snapshot": entry.name,
            "increment": one.increment,
            "type": INCREMENTAL if one.increment else ONLY_CUT if of.full.only_cut else FULL,
            "base_snapshot": entry.name if one.increment else None,
            "state": entry.state,
            "cut_at": time_text(cut_time(one)),
            "safe_at": safe_time(one),
            "created_at": one.created_at,
            "seconds": round(one.seconds, 3),
            "bytes": one.bytes,
            "changes": one.changes,
            "transactions": one.transactions,
            "nodes": shards,
            "baseline_nodes": nodes,
            "groups": names,
            "cut": one.cut,
            "operation": one.operation,
            "terminal": one.terminal,
            "checked_at": check.ended_at if check else None,
            "check_result": check.point.result if check else None,
            "valid_at": valid.ended_at if valid else None,
            "problem": entry.problem,
            "comment": one.comment,
            "checked_increment": check.point.increment if check else None,
            "rests_on_records": check.point.rests_on_records if check else None,
            "oldest_read_at": check.point.oldest_read_at if check else None,
            "ran_seconds": None if one.increment else of.full.ran_seconds,
            "lost_shards": sorted({gap.node for gap in of.gaps if gap.may_hold_lost(one.increment)}),
        }


def _shards_at(shards: list[str], commit: Commit) -> list[str]:
    """Return the shards at a commit that continues these, in order."""
    if isinstance(commit, FullSnapshot):
        return shards
    joined = [node for node, one in commit.renewed.items() if one.identity.backup_of is None and node not in shards]
    return [shard for shard in (*shards, *joined) if shard not in commit.retired]


def _redefine(groups: dict[tuple[str, int], str], commit: Commit) -> bool:
    """Update the names of groups, by shard and number, to those at the commit; return whether any may have changed."""
    begun = commit.groups if isinstance(commit, FullSnapshot) else {}
    changes = commit.definition_changes
    for shard, found in chain(begun.items(), changes.groups.items() if changes else ()):
        groups.update(((shard, group.number), group.name) for group in found)
    for shard, gone in changes.gone.items() if changes else ():
        for number in gone:
            groups.pop((shard, number), None)
    return bool(begun or changes is not None)


def csv_rows(rows: Iterable[dict[str, Any]]) -> Iterator[list[object]]:
    """Yield COLUMNS, then the values of each row as cells."""
    yield list(COLUMNS)
    for row in rows:
        yield [_cell(row[name]) for name in COLUMNS]


def _cell(value: object) -> object:
    """Return the value as a cell without control characters.

    A leading apostrophe keeps spreadsheets from reading it as a formula.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    text = ", ".join(value) if isinstance(value, list) else value
    if not isinstance(text, str):
        return text
    return f"'{printable(text)}" if text.startswith(FORMULA_SIGNS) else printable(text)


def flat_table(rows: Iterable[dict[str, Any]], now: datetime) -> FittingTable:
    """Return the rows as a table."""
    return FittingTable(TITLES, [_cells(row, now) for row in rows], NUMBERS, IMPORTANT)


def _cells(row: dict[str, Any], now: datetime) -> tuple[Cell, ...]:
    if row["type"] is None:
        return (row["snapshot"], *[""] * 10, row["state"], "", shortened(row["problem"]))
    state = row["state"] + ", terminal" * row["terminal"]
    state += f", may hold what was lost on {list_some(row['lost_shards'], SHARDS_NAMED_MAX)}" * bool(row["lost_shards"])
    up_to = row["checked_increment"]
    by_records = bool(row["rests_on_records"])
    is_of_earlier = up_to is not None and up_to < row["increment"]
    result = conflicts_at(up_to) if is_of_earlier else f"{row['check_result']}{' by records' * by_records}"
    checks = [(result, row["checked_at"])]
    # The check that found the restore point valid may be the newest.
    checks += [(VALID, row["valid_at"])] if row["valid_at"] != row["checked_at"] else []
    checked = ", ".join(f"{result} {_age(at, now)}" for result, at in checks if at)
    return (
        row["snapshot"],
        str(row["increment"]),
        row["type"],
        _moment(row["cut_at"]),
        _moment(row["created_at"]),
        took_text(row["seconds"], row["ran_seconds"]),
        size_text(row["bytes"]),
        count_text(row["changes"]),
        count_text(row["transactions"]),
        str(len(row["nodes"])),
        str(len(row["groups"])),
        state,
        checked,
        shortened(row["comment"]),
    )


def conflicts_at(increment: int) -> str:
    """Describe the conflicts that a check up to `increment` found, for display at a different increment."""
    return f"{CONFLICTS} at increment {increment}," if increment else f"{CONFLICTS} at the full snapshot,"


def _moment(time: str) -> Shorter:
    moment = datetime.fromisoformat(time)
    return Shorter(moment_text(moment), minute_text(moment))


def _age(time: str, now: datetime) -> str:
    return age_text(datetime.fromisoformat(time), now=now)
