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
            "--forget-nodes", help="The fleet was made smaller: count the majority among the remaining primaries."
        ),
    ] = False,
) -> None:
    """Check and prepare every node and the store. Safe to repeat."""
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
    """The output for people."""
    lines = [
        f"fleet {report.store.name} ({report.store.fleet_id}): {len(report.nodes)} nodes are ready for snapshots",
        "the store passed its probe" + (", and now belongs to this fleet" if report.store_created else ""),
    ]
    if report.deleting_refused:
        lines.append(
            f"snapshots can be taken, but the store refused to delete the probe's objects: {report.deleting_refused}"
        )
    for node, tables in report.groups.items():
        new = report.published[node]
        lines.append(f"{node}: {len(tables)} tables are published" + (f", new: {', '.join(new)}" if new else ""))
        if report.append_only[node]:
            lines.append(
                f"{node}: append-only, inserts and truncates are followed: {', '.join(report.append_only[node])}"
            )
    if report.forgotten:
        lines.append(f"no longer counted for the majority: {', '.join(report.forgotten)}")
    return [*lines, "next: snapshot create NAME"]
