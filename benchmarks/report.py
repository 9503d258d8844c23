"""Show the figures as tables in a terminal, and as one JSON document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import SCHEMA, BenchmarkVerdict, Comparison, Results

MEBIBYTE = 2**20
# Shorter times than this, such as those of transactions, are shown with more digits.
SHORT_SECONDS = 0.1


def document(results: Results, environment: Mapping[str, object], options: Mapping[str, object]) -> dict[str, Any]:
    """Return the JSON document `cutline/bench/1` with every run: durations in seconds, sizes in bytes."""
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "options": dict(options),
        "measurements": {
            task: {
                "seconds": [round(seconds, 4) for seconds in measurements.seconds],
                "seconds_median": measurements.median("seconds"),
                "cpu_seconds": [round(seconds, 2) for seconds in measurements.cpu_seconds],
                "peak_bytes": measurements.peak_bytes,
                "bytes": measurements.sizes_bytes,
                "bytes_median": measurements.median("bytes"),
            }
            for task, measurements in results.measurements.items()
        },
        "comparisons": [
            asdict(verdict.comparison) | {"value": verdict.value, "holds": verdict.holds}
            for verdict in results.verdicts()
        ],
        "failures": [asdict(failure) for failure in results.failures],
    }


def show(console: Console, results: Results, environment: Mapping[str, object], options: Mapping[str, object]) -> None:
    """Print the environment, the measurements, the comparisons with their aims, and the failures."""
    console.print(_one_line(environment), style="dim")
    console.print(_one_line(options), style="dim")
    console.print(_measurements(results))
    console.print(_comparisons(results))
    for failure, times in Counter(results.failures).items():
        console.print(f"failed {times} times: {failure.task}: {failure.problem}", style="red", markup=False)


def _one_line(facts: Mapping[str, object]) -> str:
    flat = dict(facts)
    packages = flat.pop("packages", None)
    if isinstance(packages, Mapping):
        flat |= packages
    if isinstance(memory := flat.pop("memory_bytes", None), int):
        flat["memory"] = f"{memory / 2**30:.0f} GiB"
    return " · ".join(f"{name} {value}" for name, value in flat.items())


def _measurements(results: Results) -> Table:
    table = Table("task", "median s", "all runs s", "CPU s", "stored MiB", "peak memory MiB", title="measured")
    for task, measurements in results.measurements.items():
        size, cpu = measurements.median("bytes"), measurements.median("cpu")
        runs = " ".join(map(_seconds, measurements.seconds))
        peaks = " ".join(f"{kind} {peak / MEBIBYTE:.0f}" for kind, peak in sorted(measurements.peak_bytes.items()))
        median = _seconds(measurements.median("seconds") or 0)
        stored = f"{size / MEBIBYTE:.1f}" if size else ""
        table.add_row(task, median, runs, f"{cpu:.1f}" if cpu is not None else "", stored, peaks)
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= SHORT_SECONDS else f"{seconds:.4f}"


def _comparisons(results: Results) -> Table:
    table = Table("compared", "in", "value", "aim", "", title="compared")
    begun = results.measurements.keys() | {failure.task for failure in results.failures}
    for verdict in results.verdicts():
        what = verdict.comparison
        if not begun & {what.task, what.peer}:
            # It belongs to a part that was not requested.
            continue
        beside = f"{what.task} / {what.peer}" if what.peer else what.task
        table.add_row(beside, what.unit, _value(verdict), _aim(what), _mark(verdict))
    return table


def _value(verdict: BenchmarkVerdict) -> str:
    if verdict.value is None:
        return "not measured"
    return f"{verdict.value:.2f} s" if verdict.comparison.peer is None else f"{verdict.value:.4g} times"


def _aim(comparison: Comparison) -> str:
    if comparison.aim is None:
        return ""
    return f"≤ {comparison.aim:g} {'s' if comparison.peer is None else 'times'}"


def _mark(verdict: BenchmarkVerdict) -> str:
    return {None: "", True: "[green]met[/green]", False: "[red]missed[/red]"}[verdict.holds]
