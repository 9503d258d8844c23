"""Run `snapshot` so that a process gets a signal while a base copy runs: `python -m … PERCENT SIGNAL PROCESS WORDS…`.

PROCESS is the id of a server's process, or 0 for the command itself. The signal comes once this share of the tasks has
recorded what it copied, and the plan is stored. Tasks are small, so that small tables take several.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from cutline.cli.main import main
from cutline.snapshots.base_copy import copy_ranges, copy_tables
from cutline.snapshots.records.operation_records import operation_key
from cutline.snapshots.records.unfinished_records import CopiedRanges, base_name, store_copied
from cutline.storage.store import ObjectStore

TASK_PAGES = 16
# How long a task goes on after the signal.
PAUSE_SECONDS = 0.5


def run(percent: int, signal_number: int, process: int) -> None:
    recorded, enough, lock = 0, 0, threading.Lock()
    plan_copy = copy_tables.plan_copy

    def plan(*arguments: Any) -> list[copy_tables.CopyTask]:
        nonlocal enough
        tasks = plan_copy(*arguments)
        enough = -(-len(tasks) * percent // 100)
        return tasks

    def record(store: ObjectStore, copied: CopiedRanges) -> None:
        nonlocal recorded
        while not store.exists(operation_key(copied.operation, base_name(copied.attempt))):
            time.sleep(0.05)
        store_copied(store, copied)
        with lock:
            recorded += 1
            number = recorded
        if number == enough:
            os.kill(process or os.getpid(), signal_number)
        if number >= enough:
            time.sleep(PAUSE_SECONDS)

    copy_ranges.store_copied = record
    copy_tables.plan_copy = plan
    copy_tables.TASK_PAGES = TASK_PAGES
    main()


if __name__ == "__main__":
    percent, sent, process = map(int, sys.argv[1:4])
    sys.argv[1:4] = []
    run(percent, sent, process)
