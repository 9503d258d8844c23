"""How many tasks run at once, as far as fleet.toml determines it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def cores_of(master: str) -> int | None:
    """Return how many tasks run at once in the driver; None if executors run the tasks."""
    if master == "local":
        return 1
    if threads := re.fullmatch(r"local\[\s*(\d+|\*)\s*(?:,\s*\d+\s*)?\]", master):
        return _cores_of_this_machine() if threads.group(1) == "*" else int(threads.group(1))
    return None


def tasks_max(master: str, settings: Mapping[str, str]) -> int | None:
    """Return the most tasks that may ever run at once; None if `settings` (full names) don't limit the executors."""
    if cores := cores_of(master):
        return cores
    if cluster := re.match(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,", master):
        return int(cluster[1]) * int(cluster[2])
    if limit := settings.get("spark.cores.max"):
        return int(limit)
    is_dynamic = settings.get("spark.dynamicAllocation.enabled", "false") == "true"
    instances = settings.get("spark.dynamicAllocation.maxExecutors" if is_dynamic else "spark.executor.instances")
    return int(instances) * int(settings.get("spark.executor.cores", "1")) if instances else None


def _cores_of_this_machine() -> int:
    """Return the number of processors that this process may use, as the JVM counts them for `local[*]`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or its content is "max 100000"
        quota, period = map(int, CGROUP_CPU_LIMIT.read_text().split())
        cores = min(cores, -(-quota // period))
    return cores
