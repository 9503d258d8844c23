"""The writers' latencies as tables for a terminal and as one JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.writers.measure import (
    DURING_CUTS,
    DURING_NONE,
    WITH_CUTS,
    WITH_INCREMENTS,
    WITHOUT_CUTS,
    WITHOUT_INCREMENTS,
    WriterFigures,
)

SCHEMA = "cutline/bench-writers/1"
PAIRS = ((WITH_CUTS, WITHOUT_CUTS), (DURING_CUTS, DURING_NONE), (WITH_INCREMENTS, WITHOUT_INCREMENTS))
RATIOS = ("p50_seconds", "p99_seconds", "p999_seconds", "longest_seconds", "longest_median_seconds")
NAMES = {
    "p50_seconds": "p50",
    "p99_seconds": "p99",
    "p999_seconds": "p99.9",
    "longest_seconds": "longest",
    "longest_median_seconds": "longest of each, median",
}


def document(
    figures: WriterFigures, environment: Mapping[str, object], options: Mapping[str, object]
) -> dict[str, Any]:
    """The JSON document: durations in seconds, latencies by kind of window."""
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "options": dict(options),
        "latencies": {kind: asdict(found) for kind, found in figures.latencies.items()},
        "cut_seconds": [round(seconds, 6) for seconds in figures.cut_seconds],
        "increment_seconds": [round(seconds, 4) for seconds in figures.increment_seconds],
        "comparisons": [
            {"task": task, "peer": peer, "unit": figure, "value": figures.ratio(task, peer, figure)}
            for task, peer in PAIRS
            for figure in RATIOS
        ],
    }


def show(console: Console, figures: WriterFigures) -> None:
    """Print the latencies, the ratios, and the durations of cuts and increments."""
    latencies = Table("bank", "count", *(f"{NAMES[name]} ms" for name in RATIOS), title="latency")
    for kind, found in figures.latencies.items():
        latencies.add_row(kind, str(found.transactions), *(f"{getattr(found, name) * 1000:.2f}" for name in RATIOS))
    console.print(latencies)
    ratios = Table("compared", *(NAMES[name] for name in RATIOS), title="ratios")
    for task, peer in PAIRS:
        values = [figures.ratio(task, peer, name) for name in RATIOS]
        if values[0] is not None:
            ratios.add_row(f"{task} / {peer}", *(f"{value:.2f}" for value in values))
    console.print(ratios)
    for what, seconds in (("cuts", figures.cut_seconds), ("increments", figures.increment_seconds)):
        if seconds:
            middle, longest = statistics.median(seconds), max(seconds)
            console.print(f"{len(seconds)} {what}: median {middle * 1000:.1f} ms, longest {longest * 1000:.1f} ms")
