"""The figures of the benchmark of sizes as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from benchmarks.memory import KINDS
from benchmarks.report import MEBIBYTE
from benchmarks.scale import Run


def show_runs(console: Console, runs: Iterable[Run]) -> None:
    """Print every run: seconds, MiB stored, and MiB of the largest process of each kind."""
    table = Table("task", "s", "CPU s", "server's", "MiB stored", *KINDS, "", title="sizes; memory in MiB")
    for run in runs:
        stored = "" if run.size_bytes is None else f"{run.size_bytes / MEBIBYTE:.2f}"
        peaks = [f"{run.peak_bytes[kind] / MEBIBYTE:.0f}" if kind in run.peak_bytes else "" for kind in KINDS]
        times = [f"{value:.1f}" if value else "" for value in (run.seconds, run.cpu_seconds, run.server_seconds)]
        table.add_row(run.task, *times, stored, *peaks, run.remark)
    console.print(table)
