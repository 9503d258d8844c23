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
    """Return the most tasks that may ever run at once; None if `settings` (full names) don't limit the executors.

    Raises ValueError, which names the setting, if a limit is not a positive number.
    """
    if cores := cores_of(master):
        return cores
    if cluster := re.match(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,", master):
        return int(cluster[1]) * int(cluster[2]) or None
    if "spark.cores.max" in settings:
        return _limit_of(settings, "spark.cores.max")
    is_dynamic = settings.get("spark.dynamicAllocation.enabled", "").strip().lower() == "true"
    instances = "spark.dynamicAllocation.maxExecutors" if is_dynamic else "spark.executor.instances"
    if instances not in settings:
        return None
    cores = _limit_of(settings, "spark.executor.cores") if "spark.executor.cores" in settings else 1
    return _limit_of(settings, instances) * cores


def _limit_of(settings: Mapping[str, str], name: str) -> int:
    text = settings[name].strip()
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise ValueError(f"`{name}` is {settings[name]!r}, but must be a positive number")
    return int(text)


def _cores_of_this_machine() -> int:
    """Return the number of processors that this process may use, as the JVM counts them for `local[*]`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or its content is "max 100000"
        quota, period = map(int, CGROUP_CPU_LIMIT.read_text().split())
        cores = min(cores, -(-quota // period))
    return cores
