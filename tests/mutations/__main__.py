"""Try every mutation, or COUNT of them, on a fleet of its own: `python -m tests.mutations [COUNT]`. Print the table."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cli.spark.start import start_spark_at
from embedded.fleet import start_fleet, stop_fleet
from tests.commands.snapshot_runs import Ready
from tests.mutations.table import Trial
from tests.mutations.world import made_world
from tests.run.quick_spark import SETTINGS
from tests.run.soak import SEED


def main() -> int:
    """Run the trial; return 1 if a case ended in a traceback or a hang, or showed a changed value as true."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        servers = start_fleet(Path(folder) / "fleet", shards=2, backups=1, settings={"fsync": "off"})
        (Path(folder) / "world").mkdir()
        try:
            with (
                start_spark_at("local[2]", SETTINGS, "mutations") as start,
                made_world(servers, Path(folder) / "world", Ready(start.session())) as world,
            ):
                trial = Trial.of(world, SEED)
                trial.run(trial.cases()[:count])
        finally:
            stop_fleet(Path(folder) / "fleet", delete=True)
    lines = [f"CUTLINE_SEED={SEED}", *trial.lines(), *trial.failed]
    sys.stdout.write("\n".join([*lines, ""]))
    return 1 if trial.failed else 0


if __name__ == "__main__":
    sys.exit(main())
