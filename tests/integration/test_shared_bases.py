"""Base copies of primaries that are read on standbys (`[copies] base = "prefer-standby"`), on every version.

Expected rows come from the live servers (COPY), and what was read of a table from the servers' own statistics.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from msgspec import structs

from cutline.check.merge_proof import prove_merge
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.merge.running import plan_merge, run_merge
from cutline.snapshots.records.commit import BASE, FullSnapshot
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import INCONCLUSIVE, ONE_COPY, VALID
from cutline.snapshots.records.proven_chains import check_commit, commit_key, read_as_committed, read_chain
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import (
    Ready,
    Runs,
    configure_fleet,
    dropping_slots,
    run_command,
    slots_of,
    sorted_copies,
)
from tests.servers.dealt import start_fleet
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, SERVERS
from tests.stores.damage import flip_byte

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PREFERRED = '[copies]\nbase = "prefer-standby"\n'
ALLOWED = f'{PREFERRED}\n[check]\nallow = ["one-copy"]\n'
TABLES = (
    "DROP TABLE IF EXISTS seen, bag, journal CASCADE",
    "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 3000) n",
    # Without a key, a change that counted twice or not at all would show.
    "CREATE TABLE bag (text text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT 'b' || n % 7 FROM generate_series(1, 300) n",
    "CREATE TABLE journal (gid text PRIMARY KEY)",
)
BLOCKS_QUERY = """
SELECT coalesce(sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0)), 0)::bigint
  FROM pg_statio_user_tables WHERE relname IN ('seen', 'bag', 'journal')
"""
# The gids of transactions on one shard begin with this.
LOCAL = "local-"
# Statistics of a session are shown once it has ended.
STATISTICS_SECONDS = 1.5


@dataclass
class Notes(Silent):
    lines: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.lines.append(text)


@contextmanager
def placed(servers: EmbeddedFleet, target: Fleet, spark: SparkSession, folder: Path, more: str) -> Iterator[ChangingFleet]:
    fleet = configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store", more=more)
    place = ChangingFleet(servers, target, Runs(fleet, Ready(spark)), folder)
    for node in fleet.primaries:
        place.execute(node.id, *TABLES)
    for node in fleet.nodes:
        if node.backup_of is not None:
            place.await_replay(node.id)
    with dropping_slots(fleet):
        place.runs.init()
        yield place


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("shared-target")
    with fleet_of(folder / "target", [None] * len(MAJORS)) as servers:
        yield configure_fleet(servers, folder / "target.toml", f"file://{folder}/other-store")


@pytest.fixture(scope="module")
def every_version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """A shard of each version with a standby; that of the oldest can't decode."""
    programs = [SERVERS.get(major) if major != max(MAJORS) else None for major in sorted(MAJORS)]
    folder = tmp_path_factory.mktemp("shared") / "fleet"
    with fleet_of(folder, programs, backups=1, settings={"autovacuum": "off"}) as servers:
        yield servers


@pytest.fixture
def mixed(every_version: EmbeddedFleet, target: Fleet, tmp_path: Path, spark: SparkSession) -> Iterator[ChangingFleet]:
    with placed(every_version, target, spark, tmp_path, PREFERRED) as place:
        yield place


def blocks_read(fleet: Fleet) -> dict[str, int]:
    """How many blocks of the tables each node has read since it started, from its cache or from files."""
    time.sleep(STATISTICS_SECONDS)
    found = {}
    for node in fleet.nodes:
        with psycopg.connect(node.dsn) as connection:
            (found[node.id],) = connection.execute(BLOCKS_QUERY).fetchone() or (0,)
    return found


def test_tables_are_read_on_standbys_and_not_on_their_primaries(mixed: ChangingFleet) -> None:
    fleet, old = mixed.fleet, mixed.fleet.primaries[0].id
    code, plan = run_here(fleet, "create", "chain", "--dry-run")
    assert (code, plan["readers"]) == (0, {node.id: f"{node.id}-b1" for node in fleet.primaries[1:]})
    before, notes = blocks_read(fleet), Notes()
    full = create_full(fleet, CreateRequest("chain"), mixed.runs.spark, notes)
    after = blocks_read(fleet)
    read = {node for node in after if after[node] > before[node]}
    # The standby of the oldest version can't decode: its primary is read, and the command says so.
    assert read == {old, *(f"{node.id}-b1" for node in fleet.primaries[1:])}
    assert [line for line in notes.lines if "read on the primary" in line] == [
        f"no standby takes part of {old}: tables are read on the primary"
    ]
    assert isinstance(full, FullSnapshot)
    assert {shard: shared.standby for shard, shared in full.shared_bases.items()} == plan["readers"]
    assert {entry.node for entry in full.copied if entry.kind == BASE} == {node.id for node in fleet.primaries}
    mixed.states[0] = mixed.live_state()
    assert full.counts["rows"] == 3300 * len(fleet.primaries)

    # A check says what it could not compare; what it allows is allowed.
    report = mixed.check()
    shared = [skipped.what for skipped in report.skipped if skipped.what.startswith("base rows")]
    assert shared == [f"base rows of shard {shard}" for shard in full.shared_bases]
    assert (report.result, report.conflicts) == (INCONCLUSIVE, [])
    # Each object was read once, and the rows of each primary counted once.
    assert report.compared.rows == full.counts["rows"]
    mixed.write()
    mixed.increment()
    allowing = configure_fleet(mixed.servers, mixed.folder / "allowing.toml", fleet.store.url, more=ALLOWED)
    assert Runs(allowing, mixed.runs.spark).check_one("chain").result == ONE_COPY
    assert run_here(allowing, "check", "chain", "--since-last", spark=mixed.runs.spark.running)[0] == 0
    mixed.check_restores(0, 1)
    # The standbys' copies begin with the same objects, and continue with their own WAL.
    wal = mixed.folder / "store/snapshots/chain/wal/s2"
    wal.rename(wal.with_suffix(".away"))
    mixed.check_restores(1)
    wal.with_suffix(".away").rename(wal)
    shown = run_here(fleet, "show", "chain")[1]
    assert {shard: one["standby"] for shard, one in shown["shared_bases"].items()} == plan["readers"]


class Traffic:
    """Two-phase transactions on all shards that stay prepared for a while, and slow local ones, in threads."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.is_over, self.seed = fleet, threading.Event(), seed
        self.threads = [threading.Thread(target=self.run, args=(number,)) for number in range(8)]
        self.errors: list[BaseException] = []

    def __enter__(self) -> Traffic:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()
        assert not self.errors

    def run(self, number: int) -> None:
        generator = random.Random(self.seed * 100 + number)
        try:
            sessions = [psycopg.connect(node.dsn, autocommit=True) for node in self.fleet.primaries]
            while not self.is_over.is_set():
                self.transact(sessions, generator, number)
            for session in sessions:
                session.close()
        except BaseException as error:  # noqa: BLE001  # it is looked at when the threads have ended
            self.errors.append(error)

    def transact(self, sessions: list[psycopg.Connection[tuple[object, ...]]], generator: random.Random, number: int) -> None:
        is_local = generator.random() < 0.3
        gid = f"{LOCAL if is_local else ''}{uuid.uuid4()}"
        chosen = [generator.choice(sessions)] if is_local else sessions
        for session in chosen:
            session.execute("BEGIN")
            session.execute("INSERT INTO journal VALUES (%s)", (gid,))
            session.execute("INSERT INTO bag VALUES (%s)", (f"b{number}",))
            row = number * 300 + generator.randrange(1, 300)
            session.execute("UPDATE seen SET text = %s WHERE id = %s", (gid, row))
            session.execute(
                "DELETE FROM bag WHERE ctid = (SELECT ctid FROM bag WHERE text = %s LIMIT 1)", (f"b{number}",)
            )
        self.is_over.wait(generator.random() * 0.3)
        if is_local:
            chosen[0].execute("COMMIT")
            return
        for session in chosen:
            session.execute(f"PREPARE TRANSACTION '{gid}'")
        self.is_over.wait(generator.random() * 0.6)
        end = "ROLLBACK" if generator.random() < 0.2 else "COMMIT"
        for session in chosen:
            session.execute(f"{end} PREPARED '{gid}'")


def test_no_transaction_is_lost_or_counted_twice_while_standbys_lag(mixed: ChangingFleet) -> None:
    fleet = mixed.fleet
    standbys = [node.id for node in fleet.nodes if node.backup_of is not None]
    for standby in standbys:
        mixed.execute(standby, "ALTER SYSTEM SET recovery_min_apply_delay = '400ms'", "SELECT pg_reload_conf()")
    try:
        pending = 0
        for number, name in enumerate(("first", "second", "third")):
            with Traffic(fleet, number):
                time.sleep(0.5)
                full = mixed.runs.full(name)
                time.sleep(0.5)
                mixed.runs.increment(name)
            assert isinstance(full, FullSnapshot)
            pending += sum(len(shared.pending) for shared in full.shared_bases.values())
            mixed.increment(name)
            mixed.runs.restore(name, mixed.target, 2)
            assert [sorted_copies(node.dsn) for node in mixed.target.primaries] == mixed.states[2]
            # The full snapshot has each transaction on all shards or on none.
            mixed.runs.restore(name, mixed.target, 0)
            journals = [set(sorted_copies(node.dsn)["public.journal"].split()) for node in mixed.target.primaries]
            assert len({frozenset(gid for gid in gids if not gid.startswith(LOCAL.encode())) for gids in journals}) == 1
            report = mixed.runs.check_one(name)
            assert not report.conflicts
        # Transactions that were prepared before a base copy and committed after it are what this test is about.
        assert pending
    finally:
        for standby in standbys:
            mixed.execute(standby, "ALTER SYSTEM RESET recovery_min_apply_delay", "SELECT pg_reload_conf()")
