"""Describe the machine's software and hardware, without names or paths, and measure processes' CPU time."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from cutline.nodes.programs import run_tool

PROCESSES = Path("/proc")
PACKAGES = ("cutline", "pyspark", "pyarrow", "psycopg", "adbc-driver-postgresql")


def environment(programs: Path | None = None) -> dict[str, object]:
    """Return the versions of all programs, CPU, cores, memory, and the current load.

    `programs` is the folder of PostgreSQL's programs, if they are not the wheel's.
    """
    return {
        "postgresql": run_tool("postgres", "--version", folder=programs).stdout.split()[2],
        "python": platform.python_version(),
        "java": java_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def java_version() -> str:
    """Return the version of the Java that Spark uses, or "none" without Java."""
    from cutline.spark.java import find_java
    from cutline.storage.errors import SnapshotError

    try:
        with TemporaryDirectory() as folder:
            home = find_java(Path(folder)).launch_home
            command = [home / "bin" / "java", "-version"]
            completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except (SnapshotError, OSError):
        return "none"
    return completed.stderr.partition('"')[2].partition('"')[0] or "unknown"


def package_version(name: str) -> str:
    """Return the installed version, or "none" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def cpu_model() -> str:
    """Return the processor's model name."""
    lines = Path("/proc/cpuinfo")
    if lines.exists():
        for line in lines.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def family(pid: int) -> set[int]:
    """Return the ids of the process and its descendants."""
    parents: dict[int, list[int]] = {}
    for folder in PROCESSES.iterdir():
        if folder.name.isdecimal() and (parent := _parent(int(folder.name))) is not None:
            parents.setdefault(parent, []).append(int(folder.name))
    processes, waiting = {pid}, [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        processes.update(children)
        waiting += children
    return processes


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of the process and its descendants, including their children that have ended."""
    ticks = 0
    for process in family(pid):
        if fields := _stat(process):
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """Read the fields that follow the program's name (in parentheses); return [] if the process has ended."""
    try:
        return (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
