"""`snapshot init`."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.output.context import command_context
from cli.output.results import emit, progress
from fleet.record import to_builtins
from snapshots.create.initialise import InitReport, initialise

SCHEMA = "cutline/init/1"


def init(
    context: typer.Context,
    *,
    forget_nodes: Annotated[
        bool,
        typer.Option(
            "--forget-nodes", help="The fleet was made smaller: count its majority by the primaries that are left."
        ),
    ] = False,
) -> None:
    """Check every node and the store, and prepare both. Safe to repeat."""
    fleet = command_context(context).load_fleet()
    with progress(context) as shown:
        report = initialise(fleet, shown, forgets_nodes=forget_nodes)
    document = {
        "schema": SCHEMA,
        "fleet": report.store.fleet_id,
        "name": report.store.name,
        "store_created": report.store_created,
        "nodes": to_builtins(report.nodes),
        "groups": report.groups,
        "append_only": report.append_only,
        "published": report.published,
        "forgotten": report.forgotten,
        "deleting_refused": report.deleting_refused,
    }
    emit(context, document, lines_of(report))


def lines_of(report: InitReport) -> list[str]:
    """What a person is told."""
    lines = [
        f"fleet {report.store.name} ({report.store.fleet_id}): {len(report.nodes)} nodes are fit for snapshots",
        "the store keeps its promises" + (", and is now this fleet's" if report.store_created else ""),
    ]
    if report.deleting_refused:
        lines.append(
            f"snapshots can be taken, but nothing deleted now, nor what the probe stored: {report.deleting_refused}"
        )
    for node, tables in report.groups.items():
        new = report.published[node]
        lines.append(f"{node}: {len(tables)} tables are followed" + (f", new: {', '.join(new)}" if new else ""))
        if report.append_only[node]:
            lines.append(f"{node}: inserts and truncates only: {', '.join(report.append_only[node])}")
    if report.forgotten:
        lines.append(f"forgotten: {', '.join(report.forgotten)}")
    return [*lines, "next: snapshot create NAME"]
