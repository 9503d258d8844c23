"""Measure the cost of encryption: the same commands on the same shard, with an encrypted and a plain store.

The cost depends on the stored bytes. pgbench's rows are blank and compress to almost nothing, so a table of random text
is added.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import cutline as cutline_side
from benchmarks.cutline import Cutline
from benchmarks.parts import CUTLINE_DATABASE, Bench, take_turns
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent

ROUNDS = 5
TEXT_ROWS_SHARE = 5
TEXT = "md5(random()::text) || md5(random()::text) || md5(random()::text) || md5(random()::text)"


def encryption_part(bench: Bench, cutline: Cutline) -> None:
    """Create, check and restore full snapshots in each store in turn; both stores are folders on the same disk."""
    (rows,) = bench.shard.ask("SELECT count(*) FROM pgbench_accounts")
    numbers = f"generate_series(1, {rows // TEXT_ROWS_SHARE})"
    bench.shard.ask(f"CREATE TABLE random_text AS SELECT n AS id, {TEXT} AS text FROM {numbers} n")
    bench.shard.ask("ALTER TABLE random_text ADD PRIMARY KEY (id)")
    sides = {name: _with_store(bench, cutline, name) for name in ("plain", "encrypted")}
    target = bench.shard.work / "target-of-both.toml"
    description = bench.shard.fleet.fleet_toml.read_text()
    target.write_text(description.replace(bench.shard.dsn, bench.shard.primary.dsn(CUTLINE_DATABASE)))
    bench.shard.checkpoint()
    take_turns(ROUNDS, [_round(bench, name, side, target) for name, side in sides.items()])


def _round(bench: Bench, kind: str, cutline: Cutline, target: Path) -> Callable[[int], None]:
    results = bench.results

    def run(repeat: int) -> None:
        bench.say(f"{kind} store, round {repeat + 1}")
        name = f"round-{repeat}"
        commit = results.measure(f"{kind} create", lambda: cutline.create(name), cutline_side.size_bytes)
        if commit is None:
            return
        cutline.forget(commit)
        results.measure(f"{kind} check", lambda: cutline.check(name, 0))
        bench.shard.drop_database(CUTLINE_DATABASE)
        bench.shard.checkpoint()
        results.measure(f"{kind} restore", lambda: cutline.restore(name, 0, target))
        bench.shard.drop_database(CUTLINE_DATABASE)

    return run


def _with_store(bench: Bench, cutline: Cutline, kind: str) -> Cutline:
    from cutline.snapshots.create.initialise import initialise

    work, given = bench.shard.work, cutline.fleet.path.read_text()
    plain = "\n".join(line for line in given.splitlines() if not line.startswith("store ="))
    text = f'store = "file://{work}/{kind}"\n{plain}\n'
    if kind == "encrypted":
        key = work / "key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        text += f'[encryption]\nkey_file = "{key}"\n'
    path = work / f"{kind}.toml"
    path.write_text(text)
    fleet = load_fleet(path)
    initialise(fleet, Silent())
    return replace(cutline, fleet=fleet)
