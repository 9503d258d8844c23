"""`snapshot demo up|load|down`: an embedded fleet to try the commands on, and money moving through it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fleet.embedded import EmbeddedFleet, is_fleet, open_fleet, start_fleet, stop_fleet

demo_app = typer.Typer(help="An embedded fleet of PostgreSQL servers to try the commands on.")

NEW_FLEET_SHARDS = 3
NEW_FLEET_BACKUPS = 1

FleetFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the embedded fleet.")]
Shards = Annotated[
    int | None, typer.Option(min=1, max=32, help=f"Shards of a new fleet [default: {NEW_FLEET_SHARDS}]")
]
Backups = Annotated[
    int | None,
    typer.Option(min=0, max=8, help=f"Standbys of every shard of a new fleet [default: {NEW_FLEET_BACKUPS}]"),
]
Delete = Annotated[bool, typer.Option("--delete", help="Delete the servers' data too; the store stays.")]


@demo_app.command()
def up(
    context: typer.Context, directory: FleetFolder, shards: Shards = None, backups: Backups = None
) -> None:
    """Start real primaries and standbys in DIR, or start again those that are there."""
    began = time.monotonic()
    existing = open_fleet(directory) if is_fleet(directory) else None
    was_running = len(existing.running()) if existing else 0
    shards, backups = _shape(existing, shards, backups)
    with Console(stderr=True).status("starting PostgreSQL"):
        fleet = start_fleet(directory, shards=shards, backups=backups)
    seconds = time.monotonic() - began
    started = len(fleet.nodes) - was_running
    nodes = [{"id": node.id, "backup_of": node.backup_of, "port": node.port} for node in fleet.nodes]
    document = {
        "schema": "cutline/demo-up/1",
        "fleet": str(fleet.fleet_toml),
        "store": str(fleet.store),
        "started": started,
        "seconds": round(seconds, 3),
        "nodes": nodes,
    }
    lines = [f"{node.id:8} {node.dsn()}" for node in fleet.nodes]
    if started:
        lines.append(f"{started} servers started in {seconds:.1f} s")
    else:
        lines.append("the fleet was up already; nothing was changed")
    _show(context, document, [*lines, f"next: snapshot --fleet {fleet.fleet_toml} init"])


@demo_app.command()
def down(context: typer.Context, directory: FleetFolder, *, delete: Delete = False) -> None:
    """Stop the servers that `demo up DIR` started, and keep their data."""
    fleet = open_fleet(directory)
    with Console(stderr=True).status("stopping PostgreSQL"):
        stopped = stop_fleet(directory, delete=delete)
    document = {"schema": "cutline/demo-down/1", "stopped": stopped, "deleted": delete}
    lines = [f"{stopped} servers stopped" if stopped else "no server was running"]
    if delete:
        lines.append("their data is deleted")
        if fleet.store.exists():
            lines.append(f"the snapshots stay in {fleet.store}")
    _show(context, document, lines)


def _shape(existing: EmbeddedFleet | None, shards: int | None, backups: int | None) -> tuple[int, int]:
    """What was asked for; where nothing was, what is there."""
    there_shards, there_backups = NEW_FLEET_SHARDS, NEW_FLEET_BACKUPS
    if existing:
        there_shards = len(existing.primaries)
        there_backups = len(existing.nodes) // there_shards - 1
    return (
        there_shards if shards is None else shards,
        there_backups if backups is None else backups,
    )


def _show(context: typer.Context, document: dict[str, object], lines: list[str]) -> None:
    """The one place where this module writes to stdout."""
    if getattr(context.find_root().obj, "json", False):
        typer.echo(json.dumps(document))
    else:
        typer.echo("\n".join(lines))
