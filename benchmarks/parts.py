"""The parts of a run. Every part records its figures and failures in Results and continues.

Cheap steps are repeated. The tools take turns running first, so that no tool always has warm caches or a busy disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import cutline as cutline_side
from benchmarks import peers as peer_side
from benchmarks.cutline import Cutline
from benchmarks.peers import Peers
from benchmarks.results import Results
from benchmarks.shard import Shard
from cutline.embedded.fleet import start_fleet, stop_fleet

if TYPE_CHECKING:
    from cutline.snapshots.records.commit import Commit

# These need the server with pgbench's accounts; all but the last run in one process with one session.
WARM = {"create", "check", "increment", "restore", "encryption", "cold"}
PARTS = ("users", "small", "tables", "changes", "writers", "cluster", "workers", *sorted(WARM))
COLD_SHARDS, COLD_REPEATS = 3, 5
REPEATS = 3
SPLIT = 50
ONE, MANY, SPARE = "one", "many", "spare"
CUTLINE_DATABASE, PEER_DATABASE = "restored_by_cutline", "restored_by_peer"


@dataclass(slots=True)
class Bench:
    """One run. `say` reports the current step."""

    shard: Shard
    peers: Peers
    results: Results
    transactions: int
    say: Callable[[str], None]
    chains: dict[str, Commit] = field(default_factory=dict)
    state: tuple[Any, ...] = ()
    dump: Path | None = None


def take_turns(repeats: int, tools: Iterable[Callable[[int], object]]) -> None:
    """Run every tool once per repeat, each time starting with the next tool."""
    ordered = list(tools)
    for repeat in range(repeats):
        for tool in ordered[repeat % len(ordered) :] + ordered[: repeat % len(ordered)]:
            tool(repeat)


def create_part(bench: Bench, cutline: Cutline, *, repeats: int) -> None:
    """Measure full snapshots and dumps. The other parts use the chains that begin with the first snapshots."""
    names = [ONE, MANY, SPARE]

    def create(repeat: int) -> None:
        name = names[repeat]
        bench.say(f"create {name}")
        commit = bench.results.measure("warm create", lambda: cutline.create(name), cutline_side.size_bytes)
        if commit is not None:
            bench.chains[name] = commit

    def dump(repeat: int) -> None:
        bench.say(f"pg_dump, run {repeat + 1}")
        bench.results.measure("warm pg_dump", lambda: bench.peers.dump("dump"), peer_side.size_bytes)

    bench.shard.checkpoint()
    take_turns(repeats, [create, dump])
    if SPARE in bench.chains:
        cutline.forget(bench.chains[SPARE])


def check_part(bench: Bench, cutline: Cutline) -> None:
    """Measure how long it takes to check a full snapshot, for comparison with creating it."""
    for repeat in range(REPEATS):
        bench.say(f"check, run {repeat + 1}")
        bench.results.measure("warm check", lambda: cutline.check(ONE, 0))


def increment_part(bench: Bench, cutline: Cutline, *, repeats: int) -> None:
    """Measure increments, and compare them with draining the same WAL and with physical increments.

    In the first repeat, the transactions run in fifty pieces, each followed by an increment of the chain "many". Both
    chains therefore end in the same state, so their restores can be compared.
    """
    results = bench.results
    results.attempt("follow", bench.peers.follow)

    def increment(_repeat: int) -> None:
        bench.say("create --incremental")
        results.measure("warm increment", lambda: cutline.create_incremental(ONE), cutline_side.size_bytes)

    def drain(_repeat: int) -> None:
        bench.say("pg_recvlogical")
        results.measure("pg_recvlogical", bench.peers.drain, lambda path: path.stat().st_size)

    def backup(_repeat: int) -> None:
        bench.say("pg_basebackup --incremental")
        task = "pg_basebackup --incremental"
        results.measure(task, bench.peers.incremental_backup, peer_side.size_bytes)

    tools = [increment, drain, backup]
    for repeat in range(repeats):
        if repeat == 0:
            _run_in_pieces(bench, cutline)
        else:
            bench.say(f"{bench.transactions} transactions")
            results.attempt("transactions", lambda: bench.shard.run_transactions(bench.transactions))
        take_turns(1, tools[repeat % 3 :] + tools[: repeat % 3])
        if repeat == 0:
            bench.state = results.attempt("state", bench.shard.state) or ()
            bench.dump = results.attempt("final dump", lambda: bench.peers.dump("final"))
            if MANY in bench.chains:
                cutline.forget(bench.chains[MANY])


def _run_in_pieces(bench: Bench, cutline: Cutline) -> None:
    piece = bench.transactions // SPLIT
    for number in range(1, SPLIT + 1):
        bench.say(f"{piece} transactions and increment {number} of {SPLIT}")
        bench.results.attempt("transactions", lambda: bench.shard.run_transactions(piece))
        bench.results.measure("small increment", lambda: cutline.create_incremental(MANY), cutline_side.size_bytes)


def restore_part(bench: Bench, cutline: Cutline) -> None:
    """Measure restores of the same state from one increment, from fifty, and from a dump (pg_restore)."""
    target = bench.shard.work / "target.toml"
    description = bench.shard.fleet.fleet_toml.read_text()
    target.write_text(description.replace(bench.shard.dsn, bench.shard.primary.dsn(CUTLINE_DATABASE)))

    def restore(task: str, name: str, increment: int) -> None:
        bench.say(task)
        bench.shard.drop_database(CUTLINE_DATABASE)
        bench.shard.checkpoint()
        done = bench.results.measure(task, lambda: cutline.restore(name, increment, target))
        if done is not None:
            bench.results.attempt(task, lambda: _expect_state(bench, CUTLINE_DATABASE))
        bench.shard.drop_database(CUTLINE_DATABASE)

    def peer(_repeat: int) -> None:
        bench.say("pg_restore")
        bench.shard.drop_database(PEER_DATABASE)
        bench.shard.checkpoint()
        if bench.dump is None:
            raise RuntimeError("the final state was not dumped")
        dump = bench.dump
        if bench.results.measure("warm pg_restore", lambda: bench.peers.restore(dump, PEER_DATABASE)):
            bench.results.attempt("warm pg_restore", lambda: _expect_state(bench, PEER_DATABASE))
        bench.shard.drop_database(PEER_DATABASE)

    tools: list[Callable[[int], object]] = [
        lambda _repeat: restore("warm restore", ONE, 1),
        lambda _repeat: restore("warm restore of 50 increments", MANY, SPLIT),
        lambda repeat: bench.results.attempt("warm pg_restore", lambda: peer(repeat)),
    ]
    take_turns(REPEATS, tools)


def _expect_state(bench: Bench, database: str) -> bool:
    """Raise unless the restored accounts equal the final state: a fast but wrong restore does not count."""
    restored = bench.shard.state(database)
    if restored != bench.state:
        raise RuntimeError(f"restored {restored}, expected {bench.state}")
    return True


def cold_part(bench: Bench) -> None:
    """Measure increments of an idle fleet of three shards, each in a separate process, as under cron."""
    folder, cache = bench.shard.work / "idle", bench.shard.work / "cache"
    cache.mkdir(exist_ok=True)
    fleet = start_fleet(folder, shards=COLD_SHARDS, backups=0)
    try:
        for words in (["init"], ["create", ONE]):
            bench.say(f"cold {words[0]}")
            bench.results.attempt("cold increment", lambda words=words: cutline_side.run_cold(fleet, words, cache))
        for repeat in range(COLD_REPEATS):
            bench.say(f"cold increment, run {repeat + 1}")
            words = ["create", ONE, "--incremental"]
            bench.results.measure("cold increment", lambda words=words: cutline_side.run_cold(fleet, words, cache))
    finally:
        stop_fleet(folder, delete=True)
