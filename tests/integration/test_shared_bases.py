"""Base copies of primaries that are read on standbys (`[copies] base = "prefer-standby"`), on every version.

Expected rows come from the live servers (COPY), and what was read of a table from the servers' own statistics.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psycopg
import pytest
from msgspec import structs

from cutline.check.merge_proof import prove_merge
from cutline.check.report import Findings, SnapshotReport
from cutline.check.spanning import check_spanning
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.merge.running import plan_merge, run_merge
from cutline.snapshots.records.commit import BASE, Commit, FullSnapshot, Increment, SharedBase
from cutline.snapshots.records.commit_rules import check_commit
from cutline.snapshots.records.operation_records import INCONCLUSIVE, ONE_COPY, VALID
from cutline.snapshots.records.proven_chains import read_chain
from cutline.spark.driver_session import DriverSession
from cutline.wal.drain.slots import slot_name
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.changing_fleet import ChangingFleet, changing_fleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Runs, configure_fleet, slots_of, sorted_copies
from tests.held.spanning_transactions import SpanningTransactions
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
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(-3000, 50) n",
    # Without a key, a change that counted twice or not at all would show.
    "CREATE TABLE bag (text text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT 'b' || n % 7 FROM generate_series(1, 300) n",
    "CREATE TABLE journal (gid text PRIMARY KEY)",
)
BLOCKS_QUERY = """
SELECT coalesce(sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0)), 0)::bigint
  FROM pg_statio_user_tables
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


@pytest.fixture
def session(request: pytest.FixtureRequest) -> SparkSession:
    """A session that runs tasks in this process, as small commands do, until one of them needs Spark."""
    return cast("SparkSession", DriverSession(lambda: request.getfixturevalue("spark"), 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    with fleet_of(tmp_path_factory.mktemp("shared-target") / "target", [None] * len(MAJORS)) as servers:
        yield servers


@pytest.fixture(scope="module")
def every_version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """A shard of each version with a standby; that of the oldest can't decode."""
    programs = [SERVERS.get(major) if major != max(MAJORS) else None for major in sorted(MAJORS)]
    folder = tmp_path_factory.mktemp("shared") / "fleet"
    with fleet_of(folder, programs, backups=1, settings={"autovacuum": "off"}) as servers:
        yield servers


@pytest.fixture(scope="module")
def with_two_standbys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    """A fleet of a shard with two standbys, and an empty one to restore into."""
    folder = tmp_path_factory.mktemp("shared-two")
    try:
        servers = start_fleet(folder / "fleet", shards=1, backups=2)
        with fleet_of(folder / "target", [None]) as target:
            yield servers, target
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture
def two(
    with_two_standbys: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, session: SparkSession
) -> Iterator[ChangingFleet]:
    """A shard with two standbys: s1-b1 is read for the primary, and s1-b2 for itself."""
    with changing_fleet(*with_two_standbys, tmp_path, session, tables=TABLES, more=PREFERRED) as place:
        try:
            yield place
        finally:
            place.start("s1-b1")


@pytest.fixture
def mixed(
    every_version: EmbeddedFleet, target: EmbeddedFleet, tmp_path: Path, session: SparkSession
) -> Iterator[ChangingFleet]:
    with changing_fleet(every_version, target, tmp_path, session, tables=TABLES, more=PREFERRED) as place:
        yield place


def blocks_read(fleet: Fleet) -> dict[str, int]:
    """How many blocks of the tables each node has read since it started, from its cache or from files."""
    time.sleep(STATISTICS_SECONDS)
    found = {}
    for node in fleet.nodes:
        with psycopg.connect(node.dsn) as connection:
            (found[node.id],) = connection.execute(BLOCKS_QUERY).fetchone() or (0,)
    return found


def read_once(report: SnapshotReport) -> set[str]:
    """The shards whose base rows a check did not compare."""
    beginning = "base rows of shard "
    return {part.what.removeprefix(beginning) for part in report.skipped if part.what.startswith(beginning)}


def merge(place: ChangingFleet) -> None:
    run_merge(place.fleet, plan_merge(place.fleet, "chain", None, Silent()), place.runs.spark, Silent(), prove_merge)


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
        f"no standby of {old} takes part: tables are read on the primary"
    ]
    assert isinstance(full, FullSnapshot)
    assert {shard: shared.standby for shard, shared in full.shared_bases.items()} == plan["readers"]
    assert {entry.node for entry in full.copied if entry.kind == BASE} == {node.id for node in fleet.primaries}
    mixed.states[0] = mixed.live_state()
    assert full.counts["rows"] == sum(rows.count(b"\n") for state in mixed.states[0] for rows in state.values())

    # A check says what it could not compare; what it allows is allowed.
    report = mixed.check()
    assert read_once(report) == set(full.shared_bases)
    assert (report.result, report.conflicts) == (INCONCLUSIVE, [])
    # Each object was read once, and the rows of each primary counted once.
    rows_once = sum(sum(entry.rows.values()) for entry in full.copied if entry.kind == BASE and entry.node != old)
    assert report.compared.rows_read_once == rows_once
    assert report.compared.rows + rows_once == full.counts["rows"]
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
    # In a merge each copy has objects of its own, but their rows still come from one reading.
    merge(mixed)
    mixed.write()
    mixed.increment()
    assert read_once(mixed.check()) == set(full.shared_bases)
    mixed.check_restores(0, 1, 2)


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

    def transact(
        self, sessions: list[psycopg.Connection[tuple[object, ...]]], generator: random.Random, number: int
    ) -> None:
        is_local = generator.random() < 0.3
        gid = f"{LOCAL if is_local else ''}{uuid.uuid4()}"
        chosen = [generator.choice(sessions)] if is_local else sessions
        for session in chosen:
            session.execute("BEGIN")
            session.execute("INSERT INTO journal VALUES (%s)", (gid,))
            session.execute("INSERT INTO bag VALUES (%s)", (f"b{number}",))
            row = -(number * 300 + generator.randrange(1, 300))
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


def base_objects(place: ChangingFleet, node: str) -> list[Path]:
    return sorted((place.folder / "store/snapshots/chain/base" / node).rglob("*.parquet"))


def test_damage_is_that_of_both_copies_and_is_repaired_from_another_standby(two: ChangingFleet) -> None:
    two.runs.full("chain")
    two.write()
    two.increment()
    assert not base_objects(two, "s1-b1")
    report = two.check()
    # The second standby has a base copy of its own to compare with.
    assert (report.result, report.skipped) == (VALID, [])
    spark = two.runs.spark.running
    (damaged, *_), (other, *_) = base_objects(two, "s1"), base_objects(two, "s1-b2")
    for path, lost in ((damaged, {"s1", "s1-b1"}), (other, {"s1-b2"})):
        flip_byte(path)
        report = two.check()
        assert {conflict.object for conflict in report.conflicts} == {str(path.relative_to(two.folder / "store"))}
        if "s1" in lost:
            with pytest.raises(ObjectDamagedError):
                two.runs.restore("chain", two.target, 1)
            wal = two.folder / "store/snapshots/chain/wal/s1-b2"
            two.check_restores(1)
            # Without the WAL of the second standby, only copies that begin with the damaged object are left.
            wal.rename(wal.with_suffix(".away"))
            with pytest.raises(ObjectDamagedError):
                two.runs.restore("chain", two.target, 1, use_backup_copies=True)
            wal.with_suffix(".away").rename(wal)
        code, repaired = run_here(two.fleet, "repair", "chain", "--yes", spark=spark)
        assert (code, repaired["unrepaired"]) == (0, [])
        assert [one["from_copy"] for one in repaired["replaced"]] == ["s1-b2" if "s1" in lost else "s1"]
        assert two.check().result == VALID
        two.check_restores(1)


def test_a_reader_that_is_away_is_continued_after_a_merge(two: ChangingFleet) -> None:
    two.runs.full("chain")
    two.write()
    two.increment()
    two.stop("s1-b1")
    two.write()
    assert two.increment().absent.keys() == {"s1-b1"}
    two.check_restores_without("s1-b2", 2)
    merge(two)
    assert base_objects(two, "s1-b1")
    two.write()
    assert two.increment().absent.keys() == {"s1-b1"}
    two.start("s1-b1")
    two.write()
    assert not two.increment().absent
    assert two.check().result == VALID
    two.check_restores(1, 2, 3, 4)
    two.check_restores_without("s1", 4)


def test_a_standby_that_is_copied_again_has_a_base_of_its_own(two: ChangingFleet) -> None:
    fleet = replace(two.fleet, nodes=two.fleet.nodes[:2])
    two.runs = Runs(fleet, two.runs.spark)
    two.runs.full("chain")
    two.write()
    two.increment()
    assert read_once(two.check()) == {"s1"}
    (slot,) = slots_of(fleet.node("s1-b1").dsn)
    two.execute("s1-b1", f"SELECT pg_drop_replication_slot('{slot}')")
    two.write()
    commit = two.increment()
    assert isinstance(commit, Increment)
    assert commit.renewed.keys() == {"s1-b1"}
    assert two.check().result == VALID
    assert read_once(two.check(1)) == {"s1"}
    two.check_restores(1, 2)


def test_without_a_standby_the_primary_is_read(two: ChangingFleet) -> None:
    for standby in ("s1-b1", "s1-b2"):
        two.execute(standby, "SELECT pg_wal_replay_pause()")
    try:
        full = two.runs.full("chain")
    finally:
        for standby in ("s1-b1", "s1-b2"):
            two.execute(standby, "SELECT pg_wal_replay_resume()")
            two.await_replay(standby)
    assert isinstance(full, FullSnapshot)
    assert not full.shared_bases
    assert full.counts["rows"] == sum(rows.count(b"\n") for rows in two.live_state()[0].values())


REWRITE = "ALTER TABLE seen ALTER COLUMN text TYPE varchar(90) USING text || ''"


def copied_once(report: SnapshotReport) -> set[tuple[str, str]]:
    """The tables, with their shards, whose copies a check could not compare because an increment read them once."""
    found = (re.fullmatch(r"base rows of (.+) in shard (\S+)", part.what) for part in report.skipped)
    return {(table, match[2]) for match in found if match for table in match[1].split(", ")}


def readers_of(commit: Commit) -> dict[str, str]:
    return commit.definition_changes.readers if commit.definition_changes else {}


def test_tables_that_an_increment_copies_are_read_on_standbys(mixed: ChangingFleet) -> None:
    fleet, old = mixed.fleet, mixed.fleet.primaries[0].id
    readers = {node.id: f"{node.id}-b1" for node in fleet.primaries[1:]}
    mixed.runs.full("chain")
    for node in fleet.primaries:
        # Nothing is written after the switch: standbys replay up to the end of a segment, and there is no record after.
        mixed.execute(node.id, REWRITE, "SELECT pg_switch_wal()")
    before = blocks_read(fleet)
    commit = create_increment(fleet, CreateRequest("chain"), mixed.runs.spark, Silent())
    after = blocks_read(fleet)
    assert {node for node in after if after[node] > before[node]} == {old, *readers.values()}
    assert readers_of(commit) == readers
    mixed.states[1] = mixed.live_state()
    shown = run_here(fleet, "show", "chain")[1]["schema_changes"][1]
    assert {one["node"]: one["read_on"] for one in shown} == {old: old, **readers}
    changed = {("public.seen", shard) for shard in readers}
    assert copied_once(mixed.check()) == changed
    mixed.write()
    mixed.increment()
    mixed.check_restores(1, 2)
    # A merge folds both copies from what was read once.
    merge(mixed)
    mixed.write()
    mixed.increment()
    assert copied_once(mixed.check()) == changed
    mixed.check_restores(3)
    mixed.check_restores_without("s2", 3)
    # From now on, s2-b1 has rows that were read for it alone.
    (slot,) = slots_of(fleet.node("s2-b1").dsn)
    mixed.execute("s2-b1", f"SELECT pg_drop_replication_slot('{slot}')")
    assert mixed.increment().absent == {}
    assert copied_once(mixed.check()) == changed - {("public.seen", "s2")}
    mixed.check_restores_without("s2", 4)


def test_a_primary_that_begins_again_is_copied_from_its_standby(mixed: ChangingFleet) -> None:
    fleet = mixed.fleet
    mixed.runs.full("chain")
    mixed.write()
    mixed.increment()
    (slot,) = slots_of(fleet.node("s2").dsn)
    mixed.execute("s2", f"SELECT pg_drop_replication_slot('{slot}')")
    mixed.write()
    before = blocks_read(fleet)
    commit = create_increment(fleet, CreateRequest("chain"), mixed.runs.spark, Silent())
    after = blocks_read(fleet)
    assert {node for node in after if after[node] > before[node]} == {"s2-b1"}
    assert isinstance(commit, Increment)
    assert (commit.renewed.keys(), readers_of(commit)) == ({"s2"}, {"s2": "s2-b1"})
    mixed.states[2] = mixed.live_state()
    mixed.write()
    mixed.increment()
    assert {shard for _, shard in copied_once(mixed.check())} == {"s2"}
    mixed.check_restores(1, 2, 3)
    # Each copy has objects of its own.
    mixed.check_restores_without("s2", 2, 3)


def test_prepared_transactions_that_copies_of_tables_lack_count(mixed: ChangingFleet) -> None:
    """Tables are copied in increments while transactions are prepared all the time: on primaries and late standbys."""
    fleet, old = mixed.fleet, mixed.fleet.primaries[0].id
    standbys = [node.id for node in fleet.nodes if node.backup_of is not None]
    for standby in standbys:
        mixed.execute(standby, "ALTER SYSTEM SET recovery_min_apply_delay = '400ms'", "SELECT pg_reload_conf()")
    try:
        mixed.runs.full("chain")
        pending: set[str] = set()
        for number in range(3):
            with Traffic(fleet, number):
                time.sleep(0.5)
                for node in fleet.primaries:
                    mixed.execute(node.id, REWRITE)
                commit = mixed.runs.increment("chain")
                changes = commit.definition_changes
                assert changes is not None
                assert changes.readers
                pending |= {node for node, positions in changes.pending.items() if positions}
                time.sleep(0.5)
                mixed.runs.increment("chain")
            last = mixed.increment()
            mixed.check_restores(last.increment)
            # The increment has each transaction on all shards or on none.
            mixed.runs.restore("chain", mixed.target, commit.increment)
            journals = [set(sorted_copies(node.dsn)["public.journal"].split()) for node in mixed.target.primaries]
            assert len({frozenset(gid for gid in gids if not gid.startswith(LOCAL.encode())) for gids in journals}) == 1
            assert not mixed.check().conflicts
            if number == 1:
                merge(mixed)
        # They are what this test is about: on a primary that was read itself, on others, and on standbys.
        assert {old} < pending & {node.id for node in fleet.primaries}
        assert pending & set(standbys)
        assert not mixed.check(commit.increment).conflicts
    finally:
        for standby in standbys:
            mixed.execute(standby, "ALTER SYSTEM RESET recovery_min_apply_delay", "SELECT pg_reload_conf()")


def test_a_transaction_that_spans_the_copy_of_a_table_and_two_cuts_and_a_merge(mixed: ChangingFleet) -> None:
    node = mixed.fleet.primaries[0]
    mixed.runs.full("chain")
    mixed.execute(node.id, REWRITE)
    spanning = SpanningTransactions(
        node.dsn,
        {
            "kept": ("UPDATE seen SET text = 'kept' WHERE id = -1", "DELETE FROM seen WHERE id = -2"),
            "undone": ("UPDATE seen SET text = 'undone' WHERE id = -4", "INSERT INTO seen VALUES (99999, 'undone')"),
        },
    )
    commit = mixed.increment()
    spanning.thread.join()
    assert commit.definition_changes is not None
    pending = commit.definition_changes.pending[node.id]
    assert len(pending) == 2
    store = mixed.fleet.store.open()
    chain = read_chain(store, "chain")
    for listed in (pending, pending[1:], (), (Lsn(1), *pending)):
        changes = structs.replace(commit.definition_changes, pending={node.id: listed})
        forged = structs.replace(chain.increments[0], definition_changes=changes)
        findings = Findings(SnapshotReport("chain", 1))
        check_spanning(structs.replace(chain, increments=(forged,)), store, findings)
        assert [one.node for one in findings.report.conflicts] == ([] if listed == pending else [node.id])
    mixed.write()
    mixed.increment()
    merge(mixed)
    mixed.increment()
    mixed.execute(node.id, "COMMIT PREPARED 'kept'", "ROLLBACK PREPARED 'undone'")
    assert not mixed.check().conflicts
    mixed.increment()
    report = mixed.check(since_last=True)
    assert not report.conflicts
    mixed.write()
    mixed.increment()
    assert b"kept" in mixed.states[4][0]["public.seen"]
    mixed.check_restores(1, 2, 3, 4, 5)
    assert not mixed.check().conflicts
    merge(mixed)
    mixed.check_restores(1, 4, 5)


@dataclass
class StoppingReader(Notes):
    """Stops a standby as soon as the slot for its copy of tables exists."""

    place: ChangingFleet | None = None

    def reached(self, point: CrashPoint, *, node: str = "") -> None:
        if self.place is not None and (point, node) == (CrashPoint.SLOT_MADE, "s1-b1"):
            place, self.place = self.place, None
            place.stop("s1-b1")


def test_a_reader_that_fails_is_left_out_and_another_one_read(two: ChangingFleet) -> None:
    two.runs.full("chain")
    two.execute("s1", REWRITE)
    notes = StoppingReader(place=two)
    commit = create_increment(two.fleet, CreateRequest("chain"), two.runs.spark, notes)
    two.states[1] = two.live_state()
    assert (commit.absent.keys(), readers_of(commit)) == ({"s1-b1"}, {"s1": "s1-b2"})
    two.check_restores(1)
    two.start("s1-b1")
    two.write()
    commit = two.increment()
    assert isinstance(commit, Increment)
    assert commit.renewed.keys() == {"s1-b1"}
    # The copy of s1-b1 was read on its own server.
    assert two.check().result == VALID
    two.check_restores(1, 2)
    two.check_restores_without("s1", 2)


@dataclass
class StoppingAt(Notes):
    """Stops a standby once, at this step or crash point, and executes `ddl` on its primary.

    With `writes`, rows change between the base copy and the cut.
    """

    place: ChangingFleet | None = None
    at: str = ""
    writes: bool = False
    ddl: tuple[str, ...] = ()

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        if self.place is not None and self.writes and name == CrashPoint.PREPARED_OVER:
            self.place.write()
        if self.place is not None and name == self.at:
            place, self.place = self.place, None
            place.execute("s1", *self.ddl)
            place.stop("s1-b1")

    def reached(self, point: CrashPoint, *, node: str = "") -> None:
        self.step(point)


READ_ON_PRIMARY = "the tables of s1 are read on the primary, because s1-b1 is left out"
COPIED_AGAIN = "the tables of s1 are copied again: they were read on a standby that is left out"


@pytest.mark.parametrize(
    ("at", "note"),
    [
        (CrashPoint.SLOT_MADE, ""),
        ("copy", READ_ON_PRIMARY),
        (CrashPoint.BASE_COPIED, COPIED_AGAIN),
        ("archive WAL", COPIED_AGAIN),
    ],
)
def test_a_full_snapshot_goes_on_if_the_standby_that_it_reads_fails(two: ChangingFleet, at: str, note: str) -> None:
    notes = StoppingAt(place=two, at=at)
    commit = create_full(two.fleet, CreateRequest("chain", retries=0), two.runs.spark, notes)
    assert notes.place is None
    two.states[0] = two.live_state()
    assert isinstance(commit, FullSnapshot)
    assert commit.parts.keys() == {"s1", "s1-b2"}
    found = [line for line in notes.lines if line in (READ_ON_PRIMARY, COPIED_AGAIN)]
    assert found == ([note] if note else []), notes.lines
    # Only if nothing was copied yet, another standby is read in the place of the primary.
    assert set(commit.shared_bases) == (set() if note else {"s1"})
    assert not [line for line in notes.lines if "it is new" in line]
    if note == COPIED_AGAIN:
        assert readers_of(commit) == {"s1": "s1-b2"}
    two.write()
    two.increment()
    two.start("s1-b1")
    two.write()
    commit = two.increment()
    assert isinstance(commit, Increment)
    assert commit.renewed.keys() == {"s1-b1"}
    assert not two.check().conflicts
    two.check_restores(0, 1, 2)
    two.check_restores_without("s1", 2)


def test_a_full_snapshot_reads_the_primary_if_the_data_of_the_standby_is_damaged(two: ChangingFleet) -> None:
    two.damage("s1-b1", "seen")
    notes = Notes()
    commit = create_full(two.fleet, CreateRequest("chain", retries=0), two.runs.spark, notes)
    two.states[0] = two.live_state()
    assert isinstance(commit, FullSnapshot)
    assert commit.parts.keys() == {"s1", "s1-b2"}
    assert not commit.shared_bases
    assert READ_ON_PRIMARY in notes.lines
    (note,) = [line for line in notes.lines if "s1-b1 is left out: its data is damaged: table public.seen" in line]
    assert "counted from page 0; its key can't be read" in note
    assert two.check().result == VALID
    two.check_restores(0)
    two.check_restores_without("s1", 0)
    two.execute("s1", "DROP TABLE seen")


def test_wal_that_was_archived_before_the_standby_failed_is_defined(two: ChangingFleet) -> None:
    """An attempt that DDL invalidated has archived changes to the tables whose rows were read on the standby."""
    ddl = ("DROP TABLE IF EXISTS fresh", "CREATE TABLE fresh (id int PRIMARY KEY)")
    notes = StoppingAt(place=two, at=CrashPoint.ARCHIVED, writes=True, ddl=ddl)
    commit = create_full(two.fleet, CreateRequest("chain", retries=1), two.runs.spark, notes)
    two.states[0] = two.live_state()
    assert isinstance(commit, FullSnapshot)
    assert commit.parts.keys() == {"s1", "s1-b2"}
    assert COPIED_AGAIN in notes.lines
    changes = commit.definition_changes
    assert changes is not None
    assert set(changes.gone["s1"]) == {group.number for group in commit.groups["s1"]}
    two.write()
    two.increment()
    assert not two.check().conflicts
    two.check_restores(0, 1)
    two.check_restores_without("s1", 0, 1)


def test_a_full_snapshot_reads_the_primary_if_its_only_standby_fails(two: ChangingFleet) -> None:
    nodes = tuple(node for node in two.fleet.nodes if node.id != "s1-b2")
    two.runs = Runs(replace(two.fleet, nodes=nodes), two.runs.spark)
    for number, at in enumerate((CrashPoint.SLOT_MADE, "copy", CrashPoint.BASE_COPIED)):
        name = f"chain{number}"
        commit = create_full(two.fleet, CreateRequest(name, retries=0), two.runs.spark, StoppingAt(place=two, at=at))
        assert commit.parts.keys() == {"s1"}  # type: ignore[attr-defined]
        two.runs.restore(name, two.target)
        assert [sorted_copies(node.dsn) for node in two.target.primaries] == two.live_state()
        two.start("s1-b1")


DYING = """
import os, signal, sys
from pathlib import Path
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.spark.driver_session import DriverSession

class Dying(Silent):
    def reached(self, point, *, node=""):
        if [str(point), node] == sys.argv[2:]:
            os.kill(os.getpid(), signal.SIGKILL)

class Here:
    is_small = True
    def begin(self, *_):
        pass
    def session(self):
        return DriverSession(lambda: None, 2)

create_full(load_fleet(Path(sys.argv[1])), CreateRequest("chain"), Here(), Dying())
"""


def test_a_create_that_dies_leaves_nothing_that_the_next_one_does_not_clean_up(two: ChangingFleet) -> None:
    points = [
        (CrashPoint.SLOT_MADE, "s1"), (CrashPoint.SLOT_MADE, "s1-b1"), (CrashPoint.BASE_COPIED, ""),
        (CrashPoint.PREPARED_OVER, ""), (CrashPoint.SEQUENCES_READ, ""),
    ]  # fmt: skip
    dead: set[str] = set()
    for point, node in points:
        words = [sys.executable, "-c", DYING, str(two.fleet.path), str(point), node]
        assert subprocess.run(words, check=False, timeout=120).returncode == -signal.SIGKILL
        dead |= {slot for one in two.fleet.nodes for slot in slots_of(one.dsn)}
    assert dead
    full = two.runs.full("chain")
    for one in two.fleet.nodes:
        assert slots_of(one.dsn) == [slot_name(full.operation)]
    two.states[0] = two.live_state()
    two.write()
    two.increment()
    assert two.check().result == VALID
    two.check_restores(0, 1)


def test_a_commit_that_contradicts_itself_about_a_shared_base_is_refused(two: ChangingFleet) -> None:
    full = two.runs.full("chain")
    assert isinstance(full, FullSnapshot)
    check_commit(full)
    position = full.base["s1-b1"]
    of_standby = next(entry for entry in full.copied if (entry.kind, entry.node) == (BASE, "s1-b2"))
    changes: list[tuple[str, dict[str, object]]] = [
        ("is not a standby of s1", {"shared_bases": {"s1": SharedBase("s1")}}),
        ("is not a standby of s1-b1", {"shared_bases": {"s1-b1": SharedBase("s1")}}),
        (f"object {of_standby.key} is a base copy", {"shared_bases": {"s1": SharedBase("s1-b2")}}),
        ("pending is not ascending", {"shared_bases": {"s1": SharedBase("s1-b1", (position,))}}),
        ("pending is not ascending", {"shared_bases": {"s1": SharedBase("s1-b1", (Lsn(2), Lsn(1)))}}),
        ("is not between", {"base": full.base | {"s1-b1": Lsn(full.base["s1"] - 1)}}),
        ("is not between", {"base": full.base | {"s1-b1": Lsn(full.cut.of("s1").start + 1)}}),
    ]
    for message, values in changes:
        with pytest.raises(ValueError, match=re.escape(message)):
            check_commit(structs.replace(full, **values))
