"""Go on with the copies of large standbys beside a watch, in a process of its own.

An increment copies tables after its commit. A watch takes its increments in its own process, so it would take none
meanwhile, for hours if a table is large enough. The process ends when nothing is left to copy; the next increment of
the watch begins another one if there is more.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from cutline.columns.allocator import choose_allocator
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.copy_between import continue_copies
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.errors import SnapshotError

# What a Python that runs this module is told, as detaching.PROGRAM is.
PROGRAM = ("-P", "-c", "from cutline.cli.watch.standby_copies import main; main()")


class _CopyNotes(Silent):
    """Writes notes to stderr, as commands with --json do."""

    def note(self, text: str) -> None:
        print(json.dumps({"note": text}), file=sys.stderr, flush=True)  # noqa: T201  # the watch reads it


def main() -> None:
    """Copy tables for the snapshot whose name follows the path of the fleet file; a signal ends it."""
    choose_allocator()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    file, name = sys.argv[1:]
    notes = _CopyNotes()
    try:
        fleet = load_fleet(Path(file))
        with SparkOnDemand(fleet, f"copy standbys of {name}") as spark:
            continue_copies(fleet, name, spark, notes)
    except SnapshotError as error:
        notes.note(f"copying standbys of {name}: {error.message}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(1)
