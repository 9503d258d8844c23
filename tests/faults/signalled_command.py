"""Run `snapshot …` as a process that sends itself a signal at a point.

    python -m tests.faults.signalled_command SIGNAL POINT COUNT -- WORDS

With BY_SPARK in its environment, Spark archives the WAL. Before the signal, it prints the ids of its child processes,
as those must end, too. In addition to the crash points of a create there is ABOUT_TO_COMMIT: after all checks, right
before the put of the commit.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

import cutline.cli.commands.create
import cutline.cli.commands.restore
import cutline.cli.main
import cutline.cli.output.activity
import cutline.snapshots.operations.committing
from tests.commands.watching import Reached, Watching
from tests.run.by_spark import work_by_spark
from tests.run.folding import FOLDING, fold_as

BY_SPARK = "CUTLINE_ARCHIVE_BY_SPARK"
ABOUT_TO_COMMIT = "about to put the commit"


def children() -> list[str]:
    """The ids of the child processes of this one."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended meanwhile
            found += (task / "children").read_text().split()
    return found


def main() -> None:
    """Run the command, and send it the signal when the point is reached for the COUNTth time."""
    signal_name, point, count, _, *words = sys.argv[1:]

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (point, int(count)):
            sys.stdout.write(" ".join(children()) + "\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.Signals[signal_name])

    watching, check = Watching(then), cutline.snapshots.operations.committing.check_predecessor

    def check_predecessor(*arguments: Any) -> None:
        check(*arguments)
        watching.reached(ABOUT_TO_COMMIT)

    cutline.snapshots.operations.committing.check_predecessor = check_predecessor
    for module in (cutline.cli.commands.create, cutline.cli.commands.restore, cutline.cli.output.activity):
        module.progress = lambda _context: nullcontext(watching)
    if BY_SPARK in os.environ:
        work_by_spark()
    if FOLDING in os.environ:
        fold_as(int(os.environ[FOLDING]), pytest.MonkeyPatch())
    sys.argv = ["snapshot", *words]
    cutline.cli.main.main()


if __name__ == "__main__":
    main()
