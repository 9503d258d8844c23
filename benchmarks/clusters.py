"""The same commands with one core of this machine, and with executors in processes of their own.

The work of a command is all of its steps but the start of Spark and its executors, which take the same time for any
number of rows. Two workers with one core each share the machine with the server and the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.parts import CUTLINE_DATABASE
from benchmarks.results import Results
from benchmarks.users import expect, measure_command, running_shop

MASTERS = {
    "one core": "local[1]",
    "one worker": "local-cluster[1,1,2048]",
    "two workers": "local-cluster[2,1,2048]",
}
START = ("start Spark", "check executors")
COMPARED = ("create", "check", "restore")
ROUNDS = 2


def cluster_part(results: Results, rows: int, programs: Path | None, folder: Path, say: Callable[[str], None]) -> None:
    """Measure create, increment, check and restore of realistic rows with each master, in turns."""
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    # As `make install` leaves it. Otherwise the first command would write it, which takes longer than its job.
    archive = [sys.executable, "-m", "cutline.spark.record_archive"]
    subprocess.run(archive, env=os.environ | {"XDG_CACHE_HOME": str(cache)}, check=True)
    with running_shop(folder / "clusters", rows, programs, say) as shop:
        shard, given = shop.shard, shop.shard.fleet.fleet_toml.read_text()
        target = folder / "clusters-target.toml"

        def command(what: str, name: str, *words: str) -> None:
            task = f"cluster: {what} on {name}"
            say(task)
            ran = measure_command(results, task, shard.fleet.fleet_toml, cache, words)
            if ran is not None and what in COMPARED:
                work = sum(seconds for step, seconds in ran.steps.items() if step not in START)
                results.add(f"cluster: work of {what} on {name}", work)

        for turn in range(ROUNDS):
            for number, (name, master) in enumerate(MASTERS.items()):
                text = f'{given}\n[spark]\nmaster = "{master}"\n'
                shard.fleet.fleet_toml.write_text(text)
                target.write_text(text.replace(shard.dsn, shard.primary.dsn(CUTLINE_DATABASE)))
                snapshot = f"cluster-{turn}-{number}"
                command("init", name, "init")
                command("create", name, "create", snapshot)
                results.attempt("changes", shop.change)
                command("increment", name, "create", snapshot, "--incremental")
                command("check", name, "check", snapshot)
                state = shop.state()
                shard.drop_database(CUTLINE_DATABASE)
                shard.checkpoint()
                command("restore", name, "restore", snapshot, "--to", str(target), "--yes")
                restored = f"cluster: restore on {name}"
                results.attempt(restored, lambda wanted=state: expect(shop.state(CUTLINE_DATABASE), wanted))
                shard.drop_database(CUTLINE_DATABASE)
                command("delete", name, "delete", snapshot, "--force", "--yes")
