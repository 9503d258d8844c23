"""`snapshot status`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer
from msgspec import Struct, field

from cutline.cli.output.activity import what_text
from cutline.cli.output.arguments import command_context
from cutline.cli.output.failure import DONE
from cutline.cli.output.node_status import NodeStatus, read_nodes, unknown_texts
from cutline.cli.output.results import answer, drawn_live
from cutline.cli.output.tables import (
    FittingTable,
    age_text,
    count_text,
    moment_text,
    name_fleet,
    quantity_text,
    seconds_text,
)
from cutline.cli.process.stopping import owner_text
from cutline.cli.process.streams import is_stdout_read
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Reading
from cutline.snapshots.operations.under_way import UnderWay, read_under_way
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.store_identity import open_own_store, read_identity
from cutline.storage.clock import utc_now
from cutline.storage.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "cutline/status/1"
TITLES = ("operation", "what", "state", "who", "begun", "phase", "done", "left", "last sign")
# Rows for nodes have values only in the first three of these columns.
IMPORTANT = ("operation", "done", "left", "what", "state", "phase", "last sign", "begun")
WATCH_SECONDS = 2.0
Lines: TypeAlias = "list[str | RenderableType]"
NOTHING = "no operations are under way"
Watch = Annotated[bool, typer.Option("--watch", help="Repeat every 2 seconds, until Ctrl-C.")]
Nodes = Annotated[
    bool,
    typer.Option(
        "--nodes", help="Also ask every node for its progress, and every primary for the holder of the fleet's lock."
    ),
]


def status(context: typer.Context, *, watch: Watch = False, nodes: Nodes = False) -> None:
    """Show running and dead operations: their progress, and whether their processes are alive.

    Only the store is read. Processes send a heartbeat every few seconds; a process whose heartbeat is a minute
    overdue is reported as dead.
    """
    options = command_context(context)
    if watch and options.json:
        raise UsageError("--watch draws on a terminal; --json writes one document", hint="use only one of them")
    fleet, file = options.load_fleet(), options.given_fleet
    if not watch:
        report = read_status(fleet, nodes=nodes)
        answer(context, document_of(report, file), [] if options.json else lines_of(report, file))
        return
    with drawn_live() as draw:
        watch_status(lambda: lines_of(read_status(fleet, nodes=nodes), file), draw)


def watch_status(read: Callable[[], Lines], draw: Callable[[Lines], None]) -> NoReturn:
    """Redraw the current state repeatedly; while the store can't be reached, draw the last state and the reason.

    Ends with exit code 0 if stdout is a pipe whose reader has exited, as `head` does.
    """
    lines: Lines = []
    while True:
        try:
            lines = read()
        except UnreachableError as error:
            why = f"{moment_text(utc_now())}: {error.message}; retrying every {WATCH_SECONDS:.0f} s"
            draw([*lines, why])
        else:
            draw(lines)
        if not is_stdout_read():
            raise typer.Exit(DONE)
        time.sleep(WATCH_SECONDS)


class StatusReport(Struct, frozen=True):
    """The operations at the time `now`, and the nodes' answers.

    `unknown` says what to do about slots and publications on the nodes that are not of this store.
    """

    operations: list[UnderWay]
    nodes: list[NodeStatus]
    now: datetime
    unknown: list[str] = field(default_factory=list)


def read_status(fleet: Fleet, *, nodes: bool) -> StatusReport:
    """Read the operations from the store; with `nodes`, ask the nodes, too."""
    store = open_own_store(fleet)
    under_way = read_under_way(store)
    if not nodes:
        return StatusReport(under_way, [], utc_now())
    found = read_nodes(fleet, store)
    return StatusReport(under_way, found, utc_now(), unknown_texts(found, read_identity(store, fleet).fleet_id))


def document_of(report: StatusReport, fleet_file: str | None = None) -> dict[str, Any]:
    """Return the command's JSON output. `nodes` has each node's progress and, for primaries, the lock's holder.

    `unknown` is as in StatusReport.
    """
    return {
        "schema": SCHEMA,
        "operations": [_operation_of(operation, report.now, fleet_file) for operation in report.operations],
        "nodes": [node.to_json() for node in report.nodes],
        "unknown": report.unknown,
    }


def _operation_of(one: UnderWay, now: datetime, fleet_file: str | None) -> dict[str, Any]:
    document = one.to_json(now)
    return document | {"remedy": name_fleet(document["remedy"], fleet_file) if document["remedy"] else None}


def lines_of(report: StatusReport, fleet_file: str | None = None) -> list[str | RenderableType]:
    """Return the human-readable output."""
    found, now = report.operations, report.now
    lines: list[str | RenderableType] = [_table(found, now), *_remarks(found, now)] if found else [NOTHING]
    lines += [node.text for node in report.nodes]
    lines += report.unknown
    return [name_fleet(line, fleet_file) if isinstance(line, str) else line for line in lines]


def _table(found: list[UnderWay], now: datetime) -> FittingTable:
    rows: list[tuple[str, ...]] = []
    for way in found:
        sign = way.sign
        rows.append(
            (
                way.id,
                what_text(way),
                way.state(now).value,
                owner_text(way.label) if way.label else "",
                age_text(datetime.fromisoformat(way.began_at), now=now) if way.began_at else "",
                shortened(sign.phase) if sign else "",
                _done_text(Reading(sign.done, sign.total, sign.unit)) if sign else "",
                _left_text(way) if not way.has_ended(now) else "",
                f"{seconds_text(_silent_seconds(way, now))} ago" if way.seen_at else "",
            )
        )
        for node in sign.nodes if sign else ():
            left = "" if node.seconds_left is None else seconds_text(node.seconds_left)
            done = _done_text(Reading(node.done, node.total, node.unit))
            rows.append((f"  node {node.node}", "", "", "", "", "", done, left, ""))
        if sign and sign.other_nodes:
            rows.append((f"  {count_text(sign.other_nodes)} nodes that are further along", *[""] * (len(TITLES) - 1)))
    return FittingTable(TITLES, rows, important=IMPORTANT)


def _done_text(reading: Reading) -> str:
    if reading.total is None:
        return quantity_text(reading.done, reading.unit) if reading.done else ""
    part = f" ({reading.done * 100 // reading.total} %)" if reading.total else ""
    done = quantity_text(reading.done, reading.unit if reading.unit == "bytes" else "")
    return f"{done} of {quantity_text(reading.total, reading.unit)}{part}"


def _left_text(one: UnderWay) -> str:
    if one.sign is None or one.sign.seconds_left is None:
        return ""
    return ("roughly " if one.sign.is_rough else "") + seconds_text(one.sign.seconds_left)


def _silent_seconds(one: UnderWay, now: datetime) -> float:
    return max((now - datetime.fromisoformat(one.seen_at)).total_seconds(), 0.0) if one.seen_at else 0.0


def _remarks(found: Iterable[UnderWay], now: datetime) -> list[str]:
    lines = []
    for way in found:
        lines += [f"operation {way.id}: {problem}" for problem in way.problems]
        if remedy := way.settled_by(now):
            kept = way.opened.kept_text if way.opened else ""
            lines.append(f"operation {way.id} {way.dead_text}; {kept}{remedy}")
        if way.request is not None:
            lines.append(f"operation {way.id}: {owner_text(way.request.by)} asked it to stop at {way.request.asked_at}")
    return lines
