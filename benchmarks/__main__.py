"""`python -m benchmarks`: compare Cutline with PostgreSQL's own tools and print the ratios.

`python -m benchmarks writers` measures what cuts and increments cost the fleet's writers, `… scale` measures time and
memory at unusual sizes.

Exits with 1 if a step failed, else with 0: a missed aim is a result, not a failure.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import scale
from benchmarks import scale_cut as scale_cut_figures
from benchmarks.cutline import warm_session
from benchmarks.encryption import encryption_part
from benchmarks.machine import environment
from benchmarks.parts import (
    PARTS,
    REPEATS,
    SPLIT,
    Bench,
    check_part,
    cold_part,
    create_part,
    increment_part,
    restore_part,
    sizes_part,
)
from benchmarks.peers import Peers
from benchmarks.report import document, show, show_facts
from benchmarks.results import Results
from benchmarks.scale import Sizes
from benchmarks.scale_report import show_runs
from benchmarks.shard import Shard, running_shard
from benchmarks.writers.measure import SHARDS, WriterFigures, measure_cuts, measure_increments, running_fleet
from benchmarks.writers.report import document as writers_document
from benchmarks.writers.report import show as show_writers

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    *,
    rows: Annotated[int, typer.Option(min=100_000, help="Rows of pgbench_accounts, in steps of 100000.")] = 5_000_000,
    transactions: Annotated[int, typer.Option(min=SPLIT, help="Transactions of one increment.")] = 200_000,
    backups: Annotated[int, typer.Option(min=0, max=2, help="Standbys; the peers back up one node.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help=f"Parts to run: {', '.join(PARTS)}; repeatable.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure one shard; everything created for it is removed afterwards."""
    if context.invoked_subcommand:
        return
    parts = set(only or PARTS)
    if unknown := parts - set(PARTS):
        raise typer.BadParameter(f"no such part: {', '.join(sorted(unknown))}", param_hint="--only")
    console, progress = Console(), Console(stderr=True)
    options = {"rows": rows, "transactions": transactions, "backups": backups, "parts": sorted(parts)}
    facts = environment()
    results = Results()
    # On SIGTERM, stop the servers and show the results so far, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="cutline-bench-") as folder:
        progress.print(f"[dim]starting a server with {rows} rows[/dim]")
        with running_shard(Path(folder), rows=rows, backups=backups) as shard:
            try:
                measure(shard, results, transactions, parts, lambda text: progress.print(f"[dim]{text}[/dim]"))
            finally:
                show(console, results, facts, options)
                if json_file:
                    figures = json.dumps(document(results, facts, options), indent=2)
                    json_file.write_text(f"{figures}\n")
    raise typer.Exit(1 if results.failures else 0)


@app.command()
def writers(
    *,
    cuts: Annotated[int, typer.Option(min=1, help="Number of cuts.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds with cuts, and as many without.")] = 20,
    increments: Annotated[int, typer.Option(min=0, help="Number of whole increments.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure how long the bank's transactions take with and without cuts; everything is removed afterwards."""
    console, progress = Console(), Console(stderr=True)
    options = {"cuts": cuts, "seconds": seconds, "increments": increments}
    facts = environment()
    figures = WriterFigures()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="cutline-bench-") as folder:
        progress.print(f"[dim]starting a fleet of {SHARDS} shards[/dim]")
        with running_fleet(Path(folder)) as fleet:
            progress.print(f"[dim]{cuts} cuts[/dim]")
            measure_cuts(fleet, figures, cuts=cuts, seconds=seconds)
            if increments:
                measure_increments(fleet, figures, increments, lambda text: progress.print(f"[dim]{text}[/dim]"))
    show_facts(console, facts, options)
    show_writers(console, figures)
    if json_file:
        json_file.write_text(f"{json.dumps(writers_document(figures, facts, options), indent=2)}\n")


@app.command()
def scale_cut(
    *,
    nodes: Annotated[int, typer.Option(min=1, help="The largest fleet: 1, 10, … 10000.")] = 10_000,
    transactions: Annotated[int, typer.Option(min=1, help="Global transactions in flight, in total.")] = 1_000_000,
    links: Annotated[int, typer.Option(min=1, help="Length of a chain of raised positions.")] = 100_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure how resolving a cut and its wave of markers grow with the fleet; needs no server."""
    console, progress = Console(), Console(stderr=True)
    options = {"nodes": nodes, "transactions": transactions, "links": links}
    facts = environment()
    figures = scale_cut_figures.measure(nodes, transactions, links, lambda text: progress.print(f"[dim]{text}[/dim]"))
    show_facts(console, facts, options)
    scale_cut_figures.show(console, figures)
    if json_file:
        found = {"environment": facts, "options": options, **scale_cut_figures.document(figures)}
        json_file.write_text(f"{json.dumps(found, indent=2)}\n")


@app.command("scale")
def scale_sizes(
    *,
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(scale.PARTS)}; repeatable.")] = None,
    tables: Annotated[int, typer.Option(min=1, help="Number of tables.")] = Sizes().tables,
    changes: Annotated[int, typer.Option(min=1, help="Changes of one transaction.")] = Sizes().changes,
    gigabytes: Annotated[float, typer.Option(min=0.001, help="Size of one transaction.")] = Sizes().bytes / 2**30,
    rows: Annotated[int, typer.Option(min=100, help="Rows of one table.")] = Sizes().rows,
    backups: Annotated[int, typer.Option(min=0, max=2, help="Standbys.")] = Sizes().backups,
    master: Annotated[str, typer.Option(help="Spark's master; driver and executors have 1 GiB each.")] = Sizes().master,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure time and memory at unusual sizes; everything is removed afterwards."""
    parts = tuple(part or scale.PARTS)
    if unknown := set(parts) - set(scale.PARTS):
        raise typer.BadParameter(f"no such part: {', '.join(sorted(unknown))}", param_hint="--part")
    console, progress = Console(), Console(stderr=True)
    sizes = Sizes(tables, changes, int(gigabytes * 2**30), rows, backups, master)
    facts = environment()
    runs: list[scale.Run] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="cutline-bench-") as folder:
        try:
            scale.measure(
                parts, sizes, Path(folder), runs, lambda text: progress.print(text, style="dim", markup=False)
            )
        finally:
            show_facts(console, facts, asdict(sizes))
            show_runs(console, runs)
            if json_file:
                found = {"environment": facts, "options": asdict(sizes), "runs": [run.to_json() for run in runs]}
                json_file.write_text(f"{json.dumps(found, indent=2)}\n")


def measure(shard: Shard, results: Results, transactions: int, parts: set[str], say: Callable[[str], None]) -> None:
    """Run the requested parts, and those steps of the others that they need."""
    peers = Peers(shard, shard.work / "peers")
    peers.folder.mkdir()
    bench = Bench(shard, peers, results, transactions, say)
    with warm_session(shard.fleet.fleet_toml) as cutline:
        create_part(bench, cutline, repeats=REPEATS if "create" in parts else 2)
        if "check" in parts:
            check_part(bench, cutline)
        if parts & {"increment", "restore"}:
            increment_part(bench, cutline, repeats=REPEATS if "increment" in parts else 1)
        if "restore" in parts:
            restore_part(bench, cutline)
        if "encryption" in parts:
            encryption_part(bench, cutline)
    if "sizes" in parts:
        sizes_part(bench)
    if "cold" in parts:
        cold_part(bench)


if __name__ == "__main__":
    app()
