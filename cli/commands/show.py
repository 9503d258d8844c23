"""`snapshot show`."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import typer
from msgspec.structs import asdict

from cutline.cli.commands.list import entry_document
from cutline.cli.commands.report import figures_document
from cutline.cli.output.arguments import (
    ExactAt,
    Increment,
    RecoveryPlan,
    SnapshotName,
    Statements,
    Timeline,
    Transactions,
    Verifiers,
    command_context,
    parse_at,
)
from cutline.cli.output.exact_point import exact_document, exact_lines
from cutline.cli.output.left_out import left_out_lines
from cutline.cli.output.pinned import pin_document
from cutline.cli.output.recovery import plan_lines, transaction_lines
from cutline.cli.output.renewed import copying_document, renamed_nodes, renewed_document, renewed_lines, retired_shards
from cutline.cli.output.results import answer
from cutline.cli.output.shared_bases import shared_base_lines
from cutline.cli.output.tables import (
    FittingTable,
    Shorter,
    causes_lines,
    count_text,
    minute_text,
    moment_text,
    printable,
    quantity_text,
    size_text,
    took_text,
)
from cutline.cli.report.terminal import timeline_levels, timeline_of
from cutline.fleet.config import Fleet
from cutline.fleet.messages import NODES_NAMED_MAX
from cutline.fleet.record import to_builtins
from cutline.fleet.table_names import table_name
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.encodings import UTF8
from cutline.restore.ddl.database_ddl import database_statements
from cutline.restore.ddl.entries import set_statement
from cutline.restore.ddl.server_roles import server_statements
from cutline.restore.targets.databases import without_record
from cutline.snapshots.ddl.extension_tables import ConfigurationRows, read_extension_rows
from cutline.snapshots.ddl.server_globals_object import read_stored_globals
from cutline.snapshots.listing.figures import read_figures_of
from cutline.snapshots.listing.listing import Entry, read_at, show_snapshot
from cutline.snapshots.listing.name_templates import newest_name
from cutline.snapshots.listing.recovery_plan import in_doubt_transactions, plan_recovery
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, FullSnapshot
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.merge_records import Merge
from cutline.snapshots.records.pins import PinState, StoredPin, pinned_text
from cutline.snapshots.records.proven_chains import cut_time, lost_text, read_lost_since
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError
from cutline.storage.store import ObjectStore

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cutline.snapshots.listing.exact_point import ExactPoint

SCHEMA = "cutline/show/1"
# Matches a quoted name or constant. Its quantifiers are possessive: a constant may be many megabytes long, and a
# group that can backtrack stores all of its repetitions.
QUOTED = re.compile(r"""E'(?:[^'\\]++|\\.|'')*+'|'(?:[^']++|'')*+'|"(?:[^"]++|"")*+\"""", re.DOTALL)
# If a database turned this setting off, a backslash could make a constant end early, and psql would run the rest.
CONFORMING = "SET standard_conforming_strings = on;"
CUT_TITLES = (
    "increment",
    "cut made",
    "took",
    "cut",
    "changes",
    "transactions",
    "global",
    "in flight",
    "size",
    "positions",
)
CUT_NUMBERS = {"took", "cut", "changes", "transactions", "global", "in flight", "size"}
IMPORTANT_OF_CUT = ("increment", "cut made", "size", "changes", "cut", "in flight", "transactions", "took")


def show(
    context: typer.Context,
    name: SnapshotName,
    *,
    increment: Increment = None,
    at: ExactAt = None,
    transactions: Transactions = False,
    recovery_plan: RecoveryPlan = False,
    statements: Statements = False,
    verifiers: Verifiers = False,
    timeline: Timeline = False,
) -> None:
    """Show all details of one snapshot: nodes, tables, increments and their cuts.

    Nodes: "base" is the WAL position at which the node's archive begins. Tables: "identity" is the replica identity,
    "partitions" is the number of parts in which a check compares the rows, and "base rows" are those of the base copy.
    Increments: "took" is the duration of the command, and "cut" is that of the cut; if a full snapshot was interrupted
    and resumed, "ran" is how long its commands ran, without the time in between; "changes" and "transactions" come
    from the WAL; "global" counts the transactions with a global id, and "in flight" those that were in flight at the
    cut; "positions" are the WAL positions of the cut.

    With --at: the state that `restore --at TIME --exact` restores. "position" is the WAL position of the state, "last
    commit" the time of the last commit before it. "early" counts transactions that are included although the node
    committed them later: other nodes had committed them, or they precede such a transaction. "late" counts transactions
    that are not included although the node's clock showed TIME or less, because they follow one with a later time.
    "undecided" counts prepared transactions that are not included.
    """
    options = command_context(context)
    moment = parse_at(at, increment)
    if moment and (statements or timeline):
        raise UsageError(
            "--at shows a state between two cuts, which has no statements and no timeline of its own",
            hint="use --at without --statements and --timeline, or --increment N with them",
        )
    fleet = options.load_fleet()
    details, now = show_snapshot(fleet, newest_name(fleet, name), increment), utc_now()
    entry, chain, open_operations = details.entry, details.chain, details.open_operations
    document = document_of(entry, chain) | {
        "merges": [_merge_document(merge) for merge in details.merges],
        "open_operations": [open_operation.to_json() for open_operation in open_operations],
        "pins": [pin_document(pin) | {"state": pin.state(now).value} for pin in details.pins],
    }
    lines: list[str | RenderableType] = []
    exact = _find_exact(fleet, chain, moment) if moment else None
    shown = exact.chain if exact else chain
    later = read_lost_since(fleet.store.open(), shown) if exact or increment is not None else ()
    document["later_gaps"] = [asdict(gap) for gap in later]
    if exact:
        document["exact"] = exact_document(exact)
    if transactions:
        listed = in_doubt_transactions(shown.last)
        document["transactions"] = [transaction.to_json() for transaction in listed]
        lines += transaction_lines(shown.last, listed, exact)
    if recovery_plan:
        nodes = plan_recovery(shown)
        document["recovery_plan"] = [node.to_json() for node in nodes]
        lines += plan_lines(shown.last, nodes, exact)
    if exact and not lines:
        lines = [*exact_lines(exact), *map(lost_text, later)]
    if verifiers and not statements:
        raise UsageError("--verifiers needs --statements", hint=f"snapshot show {name} --statements --verifiers")
    if statements:
        found = statements_of(fleet, chain, verifiers=verifiers)
        document["statements"] = found
        lines += statement_lines(found)
    if timeline:
        figures = read_figures_of(fleet, details, now)
        document["timeline"] = figures_document(figures)
        lines += [] if options.json else timeline_of(figures, timeline_levels())
    if not lines and not options.json:
        lines = [
            *lines_of(entry, chain),
            *map(_merge_text, details.merges),
            *map(lost_text, later),
            *(open_operation.text for open_operation in open_operations),
        ]
        lines += [_pin_text(chain.name, pin, now) for pin in details.pins]
    answer(context, document, lines)


def _find_exact(fleet: Fleet, chain: Chain, moment: datetime) -> ExactPoint:
    # Imported here: showing commits alone needs no Arrow.
    from cutline.snapshots.listing.exact_point import find_exact_point

    store = fleet.store.open()
    return find_exact_point(store, read_at(store, chain.name, moment), moment)


def _merge_document(merge: Merge) -> dict[str, Any]:
    return {"increment": merge.increment, "operation": merge.operation, "made_at": merge.made_at, **merge.counts}


def _merge_text(merge: Merge) -> str:
    carried = merge.counts["carried_bytes"]
    return (
        f"merged at increment {merge.increment} on {moment_text(datetime.fromisoformat(merge.made_at))}:"
        f" {quantity_text(merge.counts['objects'], 'objects')}, {size_text(merge.counts['bytes'])}"
        + (f", of which {size_text(carried)} were carried from earlier base copies" if carried else "")
    )


def _pin_text(name: str, pin: StoredPin, now: datetime) -> str:
    state = pin.state(now)
    return pinned_text(name, pin) if state is PinState.IN_FORCE else f"{state}: {pinned_text(name, pin, is_over=True)}"


def statements_of(fleet: Fleet, chain: Chain, *, verifiers: bool) -> list[dict[str, Any]]:
    """Return the statements for every shard's server, database and extension rows at the restore point.

    Statements for roles include passwords only with `verifiers`. Raises ObjectDamagedError.
    """
    store, found = fleet.store.open(), list[dict[str, Any]]()
    for identity in chain.baseline.values():
        if identity.backup_of is not None:
            continue
        of_server = read_stored_globals(store, chain, identity.node)
        of_database = chain.database_properties(identity.node)
        kept, left_out = without_record(of_database) if of_database else (None, [])
        statements = database_statements(identity.database, kept) if kept else []
        found.append(
            {
                "node": identity.node,
                "database": identity.database,
                "globals": [*server_statements(of_server, verifiers=verifiers)] if of_server else [],
                "with_passwords": of_server.with_verifiers if of_server else False,
                "statements": [*statements, *(f"-- left out: {line}" for line in left_out)],
                "extension_rows": _extension_statements(store, chain, identity),
            }
        )
    return found


def statement_lines(found: list[dict[str, Any]]) -> list[str]:
    """Return a script for psql; a comment precedes the statements of each server and each database."""
    lines: list[str] = []
    for one in found:
        node = shortened(one["node"])
        stored = "passwords are stored; to print them: --verifiers" if one["with_passwords"] else "without passwords"
        if one["globals"]:
            lines += [f"-- {node}: roles and tablespaces of the server ({stored})", *map(script_line, one["globals"])]
        what = f"-- {node}: database {shortened(one['database'])}"
        lines += [what, *map(script_line, one["statements"])] if one["statements"] else []
        if one["extension_rows"]:
            what = f"-- {node}: rows of extension tables in database {shortened(one['database'])}"
            # Line breaks within constants are escaped; those between rows stay.
            lines += [
                what,
                CONFORMING,
                *(line for rows in one["extension_rows"] for line in script_line(rows).split("\n")),
            ]
    return lines or ["-- the snapshot contains no statements for servers and databases"]


def _extension_statements(store: ObjectStore, chain: Chain, identity: NodeIdentity) -> list[str]:
    extension_rows = read_extension_rows(store, chain.last, identity.node)
    marked = {(sequence.schema, sequence.name) for sequence in extension_rows.sequences}
    sequences = [sequence for sequence in chain.sequences(identity.node) if (sequence.schema, sequence.name) in marked]
    rows = [_rows_statement(table, identity.encoding) for table in extension_rows.tables]
    return rows + [set_statement(sequence).rstrip() for sequence in sequences]


def _rows_statement(rows: ConfigurationRows, encoding: str) -> str:
    """Return the statements for a table as text, or a comment if they are not in UTF-8."""
    name = table_name(rows.table.schema, rows.table.name)
    if encoding == UTF8 or rows.statements.isascii():
        return rows.statements.decode(errors="backslashreplace").rstrip()
    # The comment must be one line.
    return (
        f"-- left out: {printable(name)}: its rows are in {encoding}; a restore writes them to its file of refused"
        " statements"
    )


def script_line(statement: str) -> str:
    """Return the statement on one line, with unprintable characters written as PostgreSQL's escape sequences.

    Only quoted parts can contain such characters.
    """
    return QUOTED.sub(_escape_quoted, statement)


def _escape_quoted(quoted: re.Match[str]) -> str:
    text, is_name = quoted[0], quoted[0].startswith('"')
    hidden = {ord(one) for one in text if printable(one) != one}
    if not hidden:
        return text
    body = text[text.index(text[-1]) :]
    # A backslash is already an escape only in constants that begin with E.
    body = body if text.startswith("E") else body.replace("\\", "\\\\")
    begin, escape = ("U&", "\\+{:06x}") if is_name else ("E", "\\U{:08x}")
    return begin + body.translate({one: escape.format(one) for one in hidden})


def document_of(entry: Entry, chain: Chain) -> dict[str, Any]:
    """Return the command's JSON output: the entry as in `list`, and the other contents of the commits."""
    return {
        "schema": SCHEMA,
        **entry_document(entry),
        "fleet": chain.full.fleet_id,
        "baseline": to_builtins(tuple(chain.baseline.values())),
        "group_definitions": to_builtins(chain.all_groups),
        "base_positions": {node: str(position) for node, position in chain.bases.items()},
        "shared_bases": to_builtins(chain.full.shared_bases),
        "cuts": [to_builtins(commit.cut) for commit in chain.commits],
        "schema_changes": [_changes_document(commit) for commit in chain.commits],
        "absent": [to_builtins(commit.absent) for commit in chain.commits],
        "timelines": [dict(commit.timelines) for commit in chain.commits],
        "left_out": to_builtins(chain.left_out),
        "renewed": [renewed_document(commit) for commit in chain.commits],
        "copying": copying_document(chain.last),
        "retired": [retired_shards(commit) for commit in chain.commits],
        "renamed": [renamed_nodes(commit) for commit in chain.commits],
        "counts": [dict(commit.counts) for commit in chain.commits],
        "repairs": to_builtins(chain.applied.repairs),
    }


def lines_of(entry: Entry, chain: Chain) -> list[str | RenderableType]:
    """Return the human-readable output."""
    full = chain.stored_full
    first = "restore point, without rows, " if full.only_cut else "full snapshot "
    if entry.first:
        # The full snapshot can't be restored any more.
        first = f"begins with the merge at increment {entry.first} "
    lines: list[str | RenderableType] = [
        f"{chain.name}: {first}of {moment_text(cut_time(chain.commits[0] if entry.first else full))},"
        f" {quantity_text(len(chain.increments), 'increments')}, {size_text(entry.bytes)}"
        + (f" — {shortened(full.comment)}" if full.comment else ""),
        *([entry.remark] if entry.remark else []),
        "",
    ]
    return [
        *lines,
        _nodes(chain),
        "",
        _groups(chain),
        "",
        _cuts(entry, chain),
        *_comments(chain),
        *_timelines(chain),
        *_renamed(chain),
        *_absent_copies(chain),
        *_causes(chain),
        *_changes(chain),
        *shared_base_lines(chain.full),
        *_renewals(chain),
        *_repairs(chain),
        *(["", *left_out] if (left_out := left_out_lines(chain.left_out)) else []),
    ]


def _nodes(chain: Chain) -> FittingTable:
    rows = [
        (
            identity.node,
            identity.backup_of or "",
            f"{identity.server_version // 10000}.{identity.server_version % 10000}",
            identity.system_identifier,
            str(identity.timeline),
            identity.database,
            str(chain.bases[identity.node]),
        )
        for identity in chain.baseline.values()
    ]
    titles = ("node", "backup of", "PostgreSQL", "system", "timeline", "database", "base")
    return FittingTable(titles, rows, important=("node", "backup of", "database", "PostgreSQL", "system"))


def _groups(chain: Chain) -> FittingTable:
    rows: list[tuple[str, ...]] = []
    for shard, found in chain.all_groups.items():
        counts, numbers = Counter[int](), chain.numbers_at_cut(shard)
        for number, count in chain.base_rows(shard).items():
            if number in numbers:
                counts[numbers[number]] += count
        for group in found:
            key = ", ".join(column.name for column in group.columns[: group.key_width])
            base_rows = count_text(counts[group.number])
            rows.append((shard, group.name, group.identity, key or "none", str(group.partitions), base_rows))
    titles = ("shard", "group", "identity", "key", "partitions", "base rows")
    return FittingTable(titles, rows, {"partitions", "base rows"}, ("shard", "group", "base rows", "identity", "key"))


def _comments(chain: Chain) -> list[str | RenderableType]:
    """Return the increments' comments; the full snapshot's comment is in the first line of the output."""
    return [
        f"increment {increment.increment} — {shortened(increment.comment)}"
        for increment in chain.increments
        if increment.comment
    ]


def _timelines(chain: Chain) -> list[str | RenderableType]:
    """Return a line for every shard whose timeline has changed since the commit before, by whichever node was first.

    The old primary follows when it returns as a standby, and so does every other standby: this is no other promotion.
    """
    lines: list[str | RenderableType] = []
    known = {identity.node: identity.timeline for identity in chain.full.baseline} | dict(chain.full.timelines)
    told: set[tuple[str, int]] = set()
    for commit in chain.increments:
        known |= {node: renewal.identity.timeline for node, renewal in commit.renewed.items()}
        for node, timeline in commit.timelines.items():
            shard = chain.shard_of(node)
            if known[node] != timeline and (shard, timeline) not in told:
                told.add((shard, timeline))
                lines.append(
                    f"increment {commit.increment}: shard {shard} is on timeline {timeline}, before on {known[node]}: a"
                    " standby was promoted"
                )
            known[node] = timeline
    return lines


def _renamed(chain: Chain) -> list[str | RenderableType]:
    """Return a line for every node that has another id in fleet.toml than at the commit before."""
    lines: list[str | RenderableType] = []
    for before, commit in pairwise(chain.commits):
        for node in sorted({*before.renamed, *commit.renamed}):
            was, now = (one.renamed.get(node, node) for one in (before, commit))
            if was != now and node in commit.segments:
                lines.append(f"increment {commit.increment}: node {node} is called {now} in fleet.toml, before {was}")
    return lines


def _absent_copies(chain: Chain) -> list[str | RenderableType]:
    """Return a line for the increments in a row that leave out a standby's copy; the reason is the last one."""
    lines: list[str | RenderableType] = []
    for commit, after in zip(chain.commits, (*chain.increments, None), strict=True):
        for node, copy in commit.absent.items():
            if after is not None and node in after.absent and after.absent[node].since == copy.since:
                continue
            first, last = copy.since, commit.increment
            increments = f"increment {last}" if first == last else f"increments {first} to {last}"
            ended = "; its copy has ended" if copy.has_ended and node not in commit.copying else ""
            lines.append(f"{increments}: without the copy of {node}: {copy.reason}{ended}")
    return lines


def _causes(chain: Chain) -> list[str | RenderableType]:
    return [
        f"{f'increment {commit.increment}' if commit.increment else 'full'}: {line}"
        for commit in chain.commits
        for line in causes_lines(commit.cut.causes)
    ]


def _changes_document(commit: Commit) -> list[dict[str, Any]]:
    """Return the definitions that the commit introduced, each with the number of the definition that it continues.

    `read_on` is the node on which the table was read for the primary's copy, if the commit has a new copy of it.
    """
    part = commit.definition_changes
    return [
        {
            "node": shard,
            "group": group.name,
            "number": group.number,
            "after": (after := part.successions.get(shard, {}).get(group.number)),
            "read_on": part.readers.get(shard, shard) if after is None else None,
        }
        for shard, found in (part.groups if part else {}).items()
        for group in found
        if part
    ]


def _changes(chain: Chain) -> list[str | RenderableType]:
    """Return a line for each definition that begins after the full snapshot, except where a whole shard was copied."""
    return [
        f"{f'increment {commit.increment}' if commit.increment else 'full'}: table {one['group']} on {one['node']} "
        + ("has a new definition" if one["after"] is not None else "has a new base copy")
        + (f", read on {one['read_on']}" if one["read_on"] not in (None, one["node"]) else "")
        for commit in chain.commits
        for one in _changes_document(commit)
        if isinstance(commit, FullSnapshot) or one["node"] not in commit.renewed
    ]


def _renewals(chain: Chain) -> list[str | RenderableType]:
    return [f"increment {commit.increment}: {line}" for commit in chain.commits for line in renewed_lines(commit)]


def _repairs(chain: Chain) -> list[str | RenderableType]:
    return [
        f"repair {repair.number} of {moment_text(datetime.fromisoformat(repair.made_at))} replaced "
        + quantity_text(sum(len(one.replaced) for one in repair.replacements), "objects")
        for repair in chain.applied.repairs
    ]


def _cuts(entry: Entry, chain: Chain) -> FittingTable:
    def stored(commit: Commit) -> int:
        # Where the chain begins after a merge, the base has replaced what the increment stored.
        if entry.base_bytes is not None and commit.increment == entry.first:
            return entry.base_bytes
        return commit.counts["bytes"]

    rows = [
        (
            (str(commit.increment) if commit.increment else "full") + (", terminal" if commit.terminal else ""),
            Shorter(moment_text(cut_time(commit)), minute_text(cut_time(commit))),
            took_text(commit.seconds, commit.ran_seconds if isinstance(commit, FullSnapshot) else None),
            f"{commit.cut.seconds * 1000:.1f} ms",
            count_text(commit.counts["changes"]),
            count_text(commit.counts["transactions"]),
            count_text(commit.cut.global_transactions),
            str(commit.cut.in_flight),
            size_text(stored(commit)),
            " ".join(f"{cut.node} {cut.position}" for cut in commit.cut.nodes[:NODES_NAMED_MAX])
            + (f" and {more} more" if (more := len(commit.cut.nodes) - NODES_NAMED_MAX) > 0 else ""),
        )
        for commit in chain.commits
    ]
    return FittingTable(CUT_TITLES, rows, CUT_NUMBERS, IMPORTANT_OF_CUT)
