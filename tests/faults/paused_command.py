"""Run `snapshot …` as a process that waits at its crash points.

    python -m tests.faults.paused_command WORDS

At each point it prints the point's text as a line, and goes on when it reads a line. So a test can change the fleet
while a create is at a point, and then kill the create there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import cutline.cli.commands.create
import cutline.cli.main
import cutline.cli.output.activity
from cutline.fleet.config import Fleet
from tests.commands.watching import Reached, Watching

ROOT = Path(__file__).parents[2]
GO_ON = "go on"


def run_paused(fleet: Fleet, words: list[str], at_point: Callable[[str, int], bool]) -> int:
    """Run the command; call `at_point` at each point with its text and how often it was reached by then.

    Kill the command there if that returns True. Returns the exit code.
    """
    program = [sys.executable, "-m", "tests.faults.paused_command", "--fleet", str(fleet.path), *words]
    counts: dict[str, int] = {}
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        try:
            for line in process.stdout:
                point = line.strip()
                counts[point] = counts.get(point, 0) + 1
                if at_point(point, counts[point]):
                    process.kill()
                    break
                process.stdin.write(f"{GO_ON}\n")
                process.stdin.flush()
            return process.wait()
        finally:
            process.kill()


def main() -> None:
    """Run the command, and wait at every point."""

    def then(reached: Reached) -> None:
        sys.stdout.write(f"{reached.point}\n")
        sys.stdout.flush()
        sys.stdin.readline()

    watching = Watching(then)
    for module in (cutline.cli.commands.create, cutline.cli.output.activity):
        module.progress = lambda _context: nullcontext(watching)
    sys.argv = ["snapshot", *sys.argv[1:]]
    cutline.cli.main.main()


if __name__ == "__main__":
    main()
