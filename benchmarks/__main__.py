"""`python -m benchmarks`: compare Cutline with PostgreSQL's own tools and print the ratios.

Exits with 1 if a step failed or an aim is missed, otherwise with 0.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.changes import changes_part
from benchmarks.clusters import cluster_part, workers_part
from benchmarks.cutline import warm_session
from benchmarks.encryption import encryption_part
from benchmarks.machine import environment
from benchmarks.parts import (
    PARTS,
    REPEATS,
    SPLIT,
    WARM,
    Bench,
    check_part,
    cold_part,
    create_part,
    increment_part,
    restore_part,
)
from benchmarks.peers import Peers
from benchmarks.report import document, show
from benchmarks.results import Results
from benchmarks.shard import Shard, running_shard
from benchmarks.tables import tables_part
from benchmarks.users import small_part, users_part
from benchmarks.writers import writers_part


def main(
    *,
    rows: Annotated[int, typer.Option(min=10_000, help="Number of realistic rows.")] = 3_850_000,
    programs: Annotated[
        Path | None, typer.Option(help="Folder of another PostgreSQL's programs, for the server with realistic rows.")
    ] = None,
    tables: Annotated[int, typer.Option(min=100, help="Number of tables in the database with many tables.")] = 10_000,
    accounts: Annotated[
        int, typer.Option(min=100_000, help="Number of rows in pgbench_accounts, in steps of 100000.")
    ] = 5_000_000,
    transactions: Annotated[int, typer.Option(min=SPLIT, help="Number of transactions in each increment.")] = 200_000,
    backups: Annotated[
        int, typer.Option(min=0, max=2, help="Number of standbys. The peer tools back up a single node.")
    ] = 0,
    only: Annotated[list[str] | None, typer.Option(help=f"Parts to run: {', '.join(PARTS)}. Can be repeated.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure one shard at a time; everything created for it is removed afterwards."""
    parts = set(only or PARTS)
    if unknown := parts - set(PARTS):
        raise typer.BadParameter(f"no such part: {', '.join(sorted(unknown))}", param_hint="--only")
    console, progress = Console(), Console(stderr=True)
    options = {
        "rows": rows, "tables": tables, "accounts": accounts, "transactions": transactions, "backups": backups,
        "parts": sorted(parts),
    }  # fmt: skip
    facts = environment(programs)
    results = Results()
    # On SIGTERM, stop the servers and show the results so far, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="cutline-bench-") as name:
        folder = Path(name)
        # If the servers' account can't reach this folder, their data is elsewhere, perhaps on another disk.
        folder.chmod(0o711)

        def say(text: str) -> None:
            progress.print(f"[dim]{text}[/dim]")

        try:
            if "users" in parts:
                users_part(results, rows, programs, folder, say)
            if "small" in parts:
                small_part(results, folder, say)
            if "tables" in parts:
                tables_part(results, tables, folder, say)
            if "changes" in parts:
                changes_part(results, folder, say)
            if "writers" in parts:
                writers_part(results, folder, say)
            if "cluster" in parts:
                cluster_part(results, rows, programs, folder, say)
            if "workers" in parts:
                workers_part(results, rows, programs, folder, say)
            if parts & WARM:
                say(f"starting a server with {accounts} accounts")
                with running_shard(folder, rows=accounts, backups=backups) as shard:
                    measure(shard, results, transactions, parts, say)
        finally:
            show(console, results, facts, options)
            if json_file:
                figures = json.dumps(document(results, facts, options), indent=2)
                json_file.write_text(f"{figures}\n")
    is_missed = any(verdict.holds is False for verdict in results.verdicts())
    raise typer.Exit(1 if results.failures or is_missed else 0)


def measure(shard: Shard, results: Results, transactions: int, parts: set[str], say: Callable[[str], None]) -> None:
    """Run the requested parts on the server with accounts, plus the steps of other parts that they depend on."""
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
    if "cold" in parts:
        cold_part(bench)


if __name__ == "__main__":
    typer.run(main)
