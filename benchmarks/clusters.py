"""The same commands with one core of this machine, and with executors in processes of their own.

Two workers with one core each should take about half the time of one core, apart from the start of the executors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.parts import CUTLINE_DATABASE
from benchmarks.results import Results
from benchmarks.users import expect, run_command, running_shop

MASTERS = {
    "one core": "local[1]",
    "one worker": "local-cluster[1,1,2048]",
    "two workers": "local-cluster[2,1,2048]",
}


def cluster_part(results: Results, rows: int, programs: Path | None, folder: Path, say: Callable[[str], None]) -> None:
    """Measure create, increment, check and restore of realistic rows with each master."""
    with running_shop(folder / "clusters", rows, programs, say) as shop:
        shard, given = shop.shard, shop.shard.fleet.fleet_toml.read_text()
        target = folder / "clusters-target.toml"
        for number, (name, master) in enumerate(MASTERS.items()):
            text = f'{given}\n[spark]\nmaster = "{master}"\n'
            shard.fleet.fleet_toml.write_text(text)
            target.write_text(text.replace(shard.dsn, shard.primary.dsn(CUTLINE_DATABASE)))
            snapshot = f"cluster-{number}"

            def command(what: str, *words: str, master_name: str = name) -> None:
                task = f"cluster: {what} on {master_name}"
                say(task)
                run_command(results, task, shard.fleet.fleet_toml, folder / "cache", words)

            command("init", "init")
            command("create", "create", snapshot)
            results.attempt("changes", shop.change)
            command("increment", "create", snapshot, "--incremental")
            command("check", "check", snapshot)
            state = shop.state()
            shard.drop_database(CUTLINE_DATABASE)
            shard.checkpoint()
            command("restore", "restore", snapshot, "--to", str(target), "--yes")
            restored = f"cluster: restore on {name}"
            results.attempt(restored, lambda wanted=state: expect(shop.state(CUTLINE_DATABASE), wanted))
            shard.drop_database(CUTLINE_DATABASE)
