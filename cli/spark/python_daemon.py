"""The process from which Spark forks its Python workers on this machine: it imports beforehand what tasks use.

Spark's own daemon imports nothing, so every worker would import the same modules again: 0.8 s of processor time each.
Spark runs this module as `python -m`, by the setting spark.python.daemon.module.

A process with threads can't be forked safely. The only thread that these modules start is jemalloc's, which handles
forks itself.
"""

from __future__ import annotations

import os

# Otherwise OpenBLAS, which nothing here uses, would start threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import adbc_driver_postgresql
import pandas
import pyspark.worker
from pyspark.daemon import manager

import check.partitions
import check.streams
import check.transactions
import restore.large_objects
import restore.rows
import snapshots.base_copy.copy_tables
import wal.drain.drain_task
from columns.python_workers import freeze_modules

# What the forked workers find imported.
IMPORTED = (
    adbc_driver_postgresql,
    pandas,
    pyspark.worker,
    check.partitions,
    check.streams,
    check.transactions,
    restore.large_objects,
    restore.rows,
    snapshots.base_copy.copy_tables,
    wal.drain.drain_task,
)

if __name__ == "__main__":
    freeze_modules()
    manager()
