"""The process from which Spark forks its Python workers on this machine: it preloads the modules that tasks use.

Spark's own daemon imports nothing, so every worker would import the same modules again, which takes 0.8 s of processor
time. Spark runs this module with `python -m`, through the spark.python.daemon.module setting.

Workers end with the daemon. Spark's own daemon sends its workers SIGHUP when it ends, but they ignore it for a moment
after their fork. Such a worker would run its task to completion, long after its command was killed.

A process with threads can't be forked safely. The only thread that these modules start is jemalloc's, which handles
forks itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module

# Keep OpenBLAS, which nothing here uses, from starting threads (columns/allocator.py).
os.environ["OPENBLAS_NUM_THREADS"] = "1"

from pyspark.daemon import manager

from cutline.columns.allocator import keep_memory
from cutline.columns.python_workers import freeze_modules
from cutline.storage.process_limits import limit_thread_starts

# The modules that are already imported when a worker is forked. They are imported by name, because they belong to
# higher layers.
PRELOADED = (
    "adbc_driver_postgresql",
    "pandas",
    "pyspark.worker",
    "cutline.check.partitions",
    "cutline.check.segment_hashes",
    "cutline.check.transactions",
    "cutline.restore.rows.large_objects",
    "cutline.restore.rows.jobs",
    "cutline.snapshots.base_copy.copy_tables",
    "cutline.wal.drain.drain_task",
)

PR_SET_PDEATHSIG = 1


def preload() -> None:
    """Import the modules that the workers use, once for all workers."""
    for name in PRELOADED:
        import_module(name)


def end_workers_with_daemon() -> None:
    """On Linux, make the kernel kill every process forked from now on as soon as this process ends."""
    if sys.platform != "linux":
        return
    daemon, prctl = os.getpid(), ctypes.CDLL(None, use_errno=True).prctl

    def end_with_daemon() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != daemon:
            os._exit(1)

    os.register_at_fork(after_in_child=end_with_daemon)


if __name__ == "__main__":
    keep_memory()
    preload()
    limit_thread_starts()
    freeze_modules()
    end_workers_with_daemon()
    manager()
