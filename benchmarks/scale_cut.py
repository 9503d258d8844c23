"""How the cost of a cut grows with the fleet: resolving it, and its wave of markers, for 1 to 10,000 nodes.

Resolving is measured on real columns, in a separate process for every size. The wave is the product's own code, over
psycopg sessions to nodes that one other process simulates: real servers would do their work on their own machines.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.machine import raise_open_files, resident_bytes, resident_bytes_max
from benchmarks.scale_cut_fleet import chain_windows, in_flight_windows
from benchmarks.scale_cut_servers import simulated_nodes
from cutline.wal.cut.cut_events import NodeWindow
from cutline.wal.cut.markers import Marker, write_markers
from cutline.wal.cut.resolve import resolve

SIZES = (1, 10, 100, 1_000, 10_000)
REPEATS = 3
# A process needs some open files for itself.
FILES_KEPT = 200
RESOLVE, CHAIN, WAVE = "resolve", "resolve a chain", "marker wave"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement: the least of REPEATS. `peak_bytes` is the memory in addition to the input.

    `cpu_seconds` is processor time, which other work on the machine affects less. `note` is the result, as evidence
    that the work was done.
    """

    task: str
    nodes: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    note: str


def measure(nodes_max: int, transactions: int, links: int, say: Callable[[str], None]) -> list[Figure]:
    """Measure all sizes up to `nodes_max`; the wave only up to the limit of open files."""
    figures: list[Figure] = []
    sizes = [size for size in SIZES if size <= nodes_max]
    for size in sizes:
        say(f"resolving a cut of {size} nodes")
        figures.append(measure_alone(partial(resolve_in_flight, size, transactions)))
    for size in sizes[1:]:
        say(f"resolving a chain over {size} nodes")
        figures.append(measure_alone(partial(resolve_chain, size, links)))
    sessions_max = raise_open_files() - FILES_KEPT
    with simulated_nodes() as port:
        for size in sizes:
            say(f"writing markers on {size} simulated nodes")
            wanted = min(size, sessions_max)
            figures.append(measure_alone(partial(write_wave, wanted, port)))
            if wanted < size:
                say(f"only {wanted} sessions: the limit of open files is {sessions_max + FILES_KEPT}")
    return figures


def measure_alone(task: Callable[[], Figure]) -> Figure:
    """Measure a task in a fresh process, so that its memory is separate."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task).result()


def resolve_in_flight(nodes: int, transactions: int) -> Figure:
    """Resolve with this many global transactions in flight in total."""
    seconds, cpu, peak, cut = measure_least(partial(resolve, in_flight_windows(nodes, transactions)))
    raised = sum(part.position > part.start for part in cut.nodes)
    note = f"{cut.in_flight:,} in flight, {cut.included_early:,} included early, {raised:,} nodes raised"
    return Figure(RESOLVE, nodes, seconds, cpu, peak, note)


def resolve_chain(nodes: int, links: int) -> Figure:
    """Resolve a fleet in which every raised position raises one other."""
    windows: dict[str, NodeWindow] = chain_windows(nodes, links)
    seconds, cpu, peak, cut = measure_least(partial(resolve, windows))
    return Figure(
        CHAIN, nodes, seconds, cpu, peak, f"{cut.global_transactions:,} links, {cpu / links * 1e6:.0f} µs each"
    )


def write_wave(nodes: int, port: int) -> Figure:
    """Write one marker on every node."""
    raise_open_files()
    with sessions(nodes, port) as connections:
        seconds, cpu, peak, written = measure_least(
            partial(write_markers, connections, Marker("chain", "cut", "start"))
        )
    positions = [one.position for one in written.values()]
    apart = (max(positions) - min(positions)) / 1e9
    return Figure(WAVE, nodes, seconds, cpu, peak, f"{len(positions):,} answers, markers {apart * 1000:.1f} ms apart")


@contextmanager
def sessions(nodes: int, port: int) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Sessions to this many simulated nodes."""
    dsn = f"host=127.0.0.1 port={port} user=u dbname=d sslmode=disable gssencmode=disable"
    connections: dict[str, psycopg.Connection[Any]] = {}
    try:
        for number in range(nodes):
            connections[f"node-{number}"] = psycopg.connect(dsn, autocommit=True)
        yield connections
    finally:
        for connection in connections.values():
            connection.close()


def measure_least(task: Callable[[], Any]) -> tuple[float, float, int, Any]:
    """The least wall-clock and processor seconds of several runs, the most memory, and the last result."""
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    peaks: list[int] = []
    for _ in range(REPEATS):
        before = resident_bytes()
        began, cpu_began = time.perf_counter(), time.process_time()
        found = task()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
        peaks.append(resident_bytes_max() - before)
    return min(seconds), min(cpu_seconds), max(peaks), found


def growth(figures: list[Figure], task: str) -> float | None:
    """The processor time for the largest fleet divided by that for a tenth of it; None if one was not measured."""
    seconds = {figure.nodes: figure.cpu_seconds for figure in figures if figure.task == task}
    largest = max(seconds, default=0)
    smaller = seconds.get(largest // 10)
    return seconds[largest] / smaller if smaller else None


def show(console: Console, figures: list[Figure]) -> None:
    """Print the figures and their growth."""
    table = Table("task", "nodes", "seconds", "CPU seconds", "peak MB", "result")
    for one in figures:
        table.add_row(
            one.task,
            f"{one.nodes:,}",
            f"{one.seconds:.4f}",
            f"{one.cpu_seconds:.4f}",
            f"{one.peak_bytes / 1e6:.0f}",
            one.note,
        )
    console.print(table)
    for task in dict.fromkeys(one.task for one in figures):
        ratio = growth(figures, task)
        console.print(
            f"{task}: ten times the nodes take {ratio:.1f} times the processor time" if ratio else f"{task}: one size"
        )
    console.print("[dim]The nodes of the marker wave are simulated: one process answers for all of them.[/dim]")


def document(figures: list[Figure]) -> dict[str, object]:
    """All figures, for a file."""
    tasks = dict.fromkeys(one.task for one in figures)
    return {
        "figures": [asdict(one) for one in figures],
        "growth": {task: growth(figures, task) for task in tasks},
    }
