"""The same commands with one core of this machine, and with executors in processes of their own.

The work of a command is all of its steps but the start of Spark and its executors, which take the same time for any
number of rows. Two workers with one core each share the machine with the server and the driver.

A new executor spends several seconds of processor time on its first job, because its JVM has to load and compile
classes. For a large database, this is a small part of the time. So the commands are also measured in sessions whose
executors have run them before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cutline import warm_session
from benchmarks.parts import CUTLINE_DATABASE, take_turns
from benchmarks.results import Result, Results
from benchmarks.shop import Shop
from benchmarks.users import expect, measure_command, running_shop

MASTERS = {
    "one core": "local[1]",
    "one worker": "local-cluster[1,1,2048]",
    "two workers": "local-cluster[2,1,2048]",
}
START = ("start Spark", "check executors")
COMPARED = ("create", "check", "restore")
ROUNDS = 2
# The masters whose executors are compared when they are warm.
WORKERS = ("one worker", "two workers")


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


def workers_part(results: Results, rows: int, programs: Path | None, folder: Path, say: Callable[[str], None]) -> None:
    """Measure create, check and restore of realistic rows on executors that have run them, of one and two workers."""
    with running_shop(folder / "workers", rows, programs, say) as shop:
        target = folder / "workers-target.toml"
        take_turns(ROUNDS, [partial(_measure_warm, results, shop, name, target, say) for name in WORKERS])


def _measure_warm(results: Results, shop: Shop, name: str, target: Path, say: Callable[[str], None], turn: int) -> None:
    """Run each command twice in one session; the second runs are those that are compared."""
    shard, state = shop.shard, shop.state()
    fleet_toml = shard.fleet.fleet_toml
    given = fleet_toml.read_text()
    text = f'{given}\n[spark]\nmaster = "{MASTERS[name]}"\n'
    fleet_toml.write_text(text)
    target.write_text(text.replace(shard.dsn, shard.primary.dsn(CUTLINE_DATABASE)))

    def measure(what: str, run: int, work: Callable[[], Result]) -> Result | None:
        task = f"workers: {what} on {name}" if run else f"workers: first {what} on {name}"
        say(task)
        return results.measure(task, work)

    try:
        with warm_session(fleet_toml) as cutline:
            for run in range(2):
                snapshot = f"{name.replace(' ', '-')}-{turn}-{run}"
                if commit := measure("create", run, partial(cutline.create, snapshot)):
                    cutline.forget(commit)
                measure("check", run, partial(cutline.check, snapshot, 0))
                shard.checkpoint()
                measure("restore", run, partial(cutline.restore, snapshot, 0, target))
                results.attempt(f"workers: restore on {name}", lambda: expect(shop.state(CUTLINE_DATABASE), state))
                shard.drop_database(CUTLINE_DATABASE)
    finally:
        fleet_toml.write_text(given)
