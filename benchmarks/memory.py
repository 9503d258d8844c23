"""A command's resources: the peak memory of its processes by kind, and processor time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cutline.spark.settings import DAEMON_MODULE

PROCESSES = Path("/proc")
SAMPLE_SECONDS = 0.5
# Spark's own (pyspark.daemon), and ours, by which it is replaced on this machine; workers are forked from it.
DAEMONS = frozenset({b"pyspark.daemon", DAEMON_MODULE.encode()})
DRIVER, DRIVER_JVM, EXECUTOR_JVM, WORKER, TOOL = "driver", "driver's JVM", "executor's JVM", "Python worker", "pg_dump"
KINDS = (DRIVER, DRIVER_JVM, EXECUTOR_JVM, WORKER, TOOL)


@contextmanager
def watched_memory(pid: int) -> Iterator[Mapping[str, int]]:
    """While the block runs, record the peak resident bytes by kind of process, of `pid` and its descendants.

    The system keeps each process's peak; only growth in the last moment before its end is missed.
    """
    peaks: dict[str, int] = {}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            for one in family(pid):
                kind, size = _kind(one, pid), peak_bytes(one)
                if kind and size > peaks.get(kind, 0):
                    peaks[kind] = size

    thread = threading.Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def family(pid: int) -> set[int]:
    """The process and its descendants."""
    parents: dict[int, list[int]] = {}
    for folder in PROCESSES.iterdir():
        if folder.name.isdecimal() and (parent := _parent(int(folder.name))) is not None:
            parents.setdefault(parent, []).append(int(folder.name))
    found, waiting = {pid}, [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += children
    return found


def peak_bytes(pid: int) -> int:
    """The peak resident bytes of the process, 0 if it has ended."""
    try:
        lines = (PROCESSES / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def cpu_seconds(pid: int) -> float:
    """The processor time of the process, its descendants, and its children that have ended."""
    ticks = 0
    for one in family(pid):
        if fields := _stat(one):
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """The fields after the program's name, which is in parentheses and may contain anything; [] if it has ended."""
    try:
        return (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _kind(pid: int, driver: int) -> str | None:
    try:
        words = (PROCESSES / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    program = Path(words[0].decode(errors="replace")).name
    if pid == driver:
        return DRIVER
    if program == "java":
        is_executor = any(word.endswith(b"CoarseGrainedExecutorBackend") for word in words)
        return EXECUTOR_JVM if is_executor else DRIVER_JVM
    if not DAEMONS.isdisjoint(words):
        return WORKER
    return TOOL if program in ("pg_dump", "pg_restore") else None
