"""Try every mutation, or a part, on a fleet of its own, and print the table: `python -m tests.mutations [PART/PARTS]`.

Ctrl-C ends the trial and prints the table of what was tried until then. With one CUTLINE_SEED, several processes try
different parts: 1/2 and 2/2.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.spark.start import start_spark_at
from tests.commands.snapshot_runs import Ready
from tests.mutations.table import Trial
from tests.mutations.values import Mutation
from tests.mutations.world import made_world
from tests.run.quick_spark import SETTINGS
from tests.run.soak import SEED

SHOWN_EVERY = 100


def shown(cases: list[Mutation], failed: list[str], interrupts: list[int]) -> Iterable[Mutation]:
    """Yield the cases until there is an interrupt, and say how far the trial is and what failed."""
    told = 0
    for number, case in enumerate(cases):
        sys.stderr.writelines(f"{line}\n" for line in failed[told:])
        told = len(failed)
        if number % SHOWN_EVERY == 0:
            sys.stderr.write(f"{number} of {len(cases)} cases\n")
        if interrupts:
            sys.stderr.write(f"interrupted after {number} cases\n")
            return
        yield case


def main() -> int:
    """Run the trial; return 1 if a case ended in a traceback or a hang, or showed a changed value as true."""
    part, parts = map(int, sys.argv[1].split("/")) if len(sys.argv) > 1 else (1, 1)
    # In the middle of a case it would be taken for what a command does.
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    with tempfile.TemporaryDirectory() as folder:
        servers = start_fleet(Path(folder) / "fleet", shards=2, backups=1, settings={"fsync": "off"})
        (Path(folder) / "world").mkdir()
        try:
            with (
                start_spark_at("local[2]", SETTINGS, "mutations") as start,
                made_world(servers, Path(folder) / "world", Ready(start.session())) as world,
            ):
                trial = Trial.of(world, SEED)
                cases = trial.cases()[part - 1 :: parts]
                trial.run(shown(cases, trial.failed, interrupts))
        finally:
            stop_fleet(Path(folder) / "fleet", delete=True)
    lines = [f"CUTLINE_SEED={SEED}", *trial.lines(), *trial.failed]
    sys.stdout.write("\n".join([*lines, ""]))
    return 1 if trial.failed else 0


if __name__ == "__main__":
    sys.exit(main())
