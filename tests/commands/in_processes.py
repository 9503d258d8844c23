"""A command that runs tasks in processes, however little it has to do."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
# The begin of the line that the command writes to stderr when it leaves tasks to a process.
BEGUN = "a process begins"
# The begin of a program: there are many tasks, and the command says which functions a process has run.
IN_PROCESSES = f"""
import sys
import cutline.snapshots.base_copy.copy_tables as copy_tables
import cutline.spark.on_demand as on_demand
from cutline.spark.task_processes import TaskProcess

on_demand.ROWS_PER_PROCESS = on_demand.PAGE_BYTES_PER_PROCESS = 1
copy_tables.TASK_PAGES = 8
run_lane = TaskProcess.run


def run(self, job, lane, read=None):
    sys.stderr.write(f"{BEGUN} {{lane.work.__name__}}\\n")
    reports = run_lane(self, job, lane, read)
    sys.stderr.write(f"a process ran {{lane.work.__name__}}\\n")
    return reports


TaskProcess.run = run
"""
# The end of the program.
COMMAND = "from cutline.cli.main import main\nmain()\n"
