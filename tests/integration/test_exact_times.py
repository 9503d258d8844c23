"""Restores to an exact time between two cuts: the bank and the causal chains at random times, and what is refused.

Most of the states are folded here from the stored objects, row by row, with only positions and excluded transactions
from Cutline. PostgreSQL says when each transfer was committed (track_commit_timestamp).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from cutline.check.exact_state import compare_exact
from cutline.check.report import Findings, SnapshotReport
from cutline.embedded.bank import ACCOUNTS_PER_SHARD, INITIAL_BALANCE, half_present, read_invariants, shard_of
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.nodes.groups import Group
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.listing.exact_point import ExactPoint, check_same_definitions, find_exact_point
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, listed_objects
from cutline.snapshots.records.proven_chains import cut_time, read_chain
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import read_listed
from cutline.wal.segments.segments import DELETE, read_changes
from tests.causal.journal import TakenIncrement, find_disagreements
from tests.causal.state import ChainState, Child, Parent, Twin, create_chains, find_faults, read_state
from tests.causal.workload import CausalWorkload
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.run.soak import SEED, SOAK_SECONDS
from tests.simulation.mutants import no_raising

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.integration.conftest import FleetFactory

NAME, BACK = "timed", "timed_back"
INCREMENTS, BACKUPS = (12, 1) if SOAK_SECONDS else (2, 0)
# How many times are folded, and how many of these are also restored.
FOLDED, RESTORED = (200, 5) if SOAK_SECONDS else (6, 1)
TEARS_TRIED = 200
PAUSE_SECONDS = 1.0
ASSERTION = """
[[drill.assertion]]
node = "s1"
sql = "SELECT id FROM note ORDER BY id"
expected = [1, 2, 3]
"""
# Lines of a shard's tables, by the table and the key.
Lines = dict[str, dict[bytes, bytes]]


@dataclass(slots=True)
class StoredShard:
    """One primary's stored rows: those of its base copy, and all changes in the order of their positions."""

    groups: Mapping[int, Group]
    base: Lines
    changes: list[tuple[int, int, str, int, bytes, bytes]] = field(default_factory=list)

    @classmethod
    def read(cls, store: ObjectStore, chain: Chain, node: str) -> StoredShard:
        """Read everything that the chain has of the node."""
        groups = {group.number: group for group in chain.groups(node)}
        shard = cls(groups, {group.name: {} for group in groups.values()})
        for entry in chain.full.entries:
            if entry.kind == BASE and entry.node == node:
                for stored in listed_objects(entry):
                    body = read_listed(store, node, stored.key, (stored.size, stored.digest))
                    rows = pq.read_table(pa.BufferReader(body)).to_pydict()
                    for number, key, row in zip(rows["group"], rows["key"], rows["row"], strict=True):
                        shard.base[groups[number].name][key] = row
        for segment in chain.segments(node):
            for table in read_changes(store, segment, ["lsn", "seq", "op", "group", "key", "row"]):
                columns = table.to_pydict()
                columns["group"] = [groups[number].name for number in columns["group"]]
                columns["op"] = list(columns["op"])
                shard.changes += zip(*(columns[n] for n in ("lsn", "seq", "group", "op", "key", "row")), strict=True)
        shard.changes.sort(key=lambda change: change[:2])
        return shard

    def at(self, position: int, excluded: frozenset[Any]) -> Lines:
        """Return the rows in the state that ends at the position."""
        lines = {name: dict(rows) for name, rows in self.base.items()}
        for lsn, _, name, op, key, row in self.changes:
            if lsn < position and lsn not in excluded:
                if op == DELETE:
                    lines[name].pop(key, None)
                else:
                    lines[name][key] = row
        return lines


def fields(lines: Mapping[bytes, bytes]) -> Iterator[list[str]]:
    for line in lines.values():
        yield line.decode().rstrip("\n").split("\t")


def number_or_none(text: str) -> int | None:
    return None if text == r"\N" else int(text)


def chains_of(shards: list[Lines]) -> ChainState:
    parents, children, twins, transfers = [], [], [], []
    for shard, lines in enumerate(shards):
        for id_, chain, link, child, twin in fields(lines["public.parent"]):
            parents.append(Parent(shard, int(id_), int(chain), int(link), number_or_none(child), number_or_none(twin)))
        children += [Child(shard, *map(int, row)) for row in fields(lines["public.child"])]
        twins += [Twin(shard, *map(int, row)) for row in fields(lines["public.twin"])]
        transfers += [(shard, row[0]) for row in fields(lines["public.transfer"])]
    return ChainState(tuple(parents), tuple(children), tuple(twins), tuple(transfers))


def bank_faults(shards: list[Lines]) -> list[str]:
    """Describe what is wrong with the bank's books."""
    total = sum(int(row[1]) for lines in shards for row in fields(lines["public.account"]))
    expected = len(shards) * ACCOUNTS_PER_SHARD * INITIAL_BALANCE
    foreign = [
        {
            (row[0], int(row[1]), int(row[2]), row[3], row[4])
            for row in fields(lines["public.transfer"])
            if {shard_of(int(row[1])), shard_of(int(row[2]))} != {shard}
        }
        for shard, lines in enumerate(shards)
    ]
    found = [f"the sum of all balances is {total}, not {expected}"] if total != expected else []
    return found + [f"torn: transfer {one}" for one in half_present(foreign)]


def commit_times(dsn: str) -> dict[str, datetime]:
    """When each transfer was committed on a shard, according to PostgreSQL."""
    with psycopg.connect(dsn) as connection:
        return dict(connection.execute("SELECT id::text, pg_xact_commit_timestamp(xmin) FROM transfer").fetchall())


def time_faults(point: ExactPoint, shards: list[Lines], times: list[dict[str, datetime]]) -> list[str]:
    """Describe transfers on the wrong side of the time, except as many as the point itself reports."""
    found = []
    for node, lines, committed in zip(point.nodes, shards, times, strict=True):
        present = {row[0] for row in fields(lines["public.transfer"])}
        early = {one for one in present if committed[one] > point.moment}
        late = {one for one, at in committed.items() if at <= point.moment} - present
        if len(early) > node.early or len(late) > node.late:
            found.append(f"{node.node}: {len(early)} early, {len(late)} late, but the point says {node}")
    return found


def draw_moments(chain: Chain, chance: random.Random, count: int) -> list[datetime]:
    first, last = cut_time(chain.full), datetime.fromisoformat(chain.last.cut.safe_at)
    return sorted(first + chance.random() * (last - first) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Folding:
    """A chain and all its stored rows, from which states are folded here."""

    store: ObjectStore
    chain: Chain
    stored: Mapping[str, StoredShard]

    def point(self, moment: datetime) -> ExactPoint:
        found = find_exact_point(self.store, self.chain, moment)
        check_same_definitions(found, found.chain.full.primaries)
        for cut, before, after in zip(found.cut.nodes, found.before.cut.nodes, found.after.cut.nodes, strict=True):
            assert before.position <= cut.start <= cut.position <= after.position
        return found

    def fold(self, point: ExactPoint) -> list[Lines]:
        return [self._fold(point, node) for node in point.chain.full.primaries]

    def check_standbys(self, point: ExactPoint, shards: list[Lines]) -> None:
        """Assert that the standbys' copies have the same rows as their primaries'."""
        expected = dict(zip(point.chain.full.primaries, shards, strict=True))
        standbys = {node: primary for node, primary in point.chain.full.parts.items() if primary}
        assert len(standbys) == BACKUPS * len(shards)
        for node, primary in standbys.items():
            assert self._fold(point, node) == expected[primary], node

    def _fold(self, point: ExactPoint, node: str) -> Lines:
        return self.stored[node].at(point.chain.position(node), point.chain.excluded(node))


@pytest.mark.timeout(3600 if SOAK_SECONDS else 600)
def test_states_at_random_times_tear_nothing_and_have_what_was_committed_by_then(
    fleet_factory: FleetFactory, tmp_path: Path, spark: SparkSession
) -> None:
    embedded = fleet_factory(shards=2, backups=BACKUPS, settings={"track_commit_timestamp": "on"})
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs, dsns, chance = Runs(fleet, Ready(spark)), embedded.dsns(), random.Random(SEED)
    for dsn in dsns:
        create_chains(dsn)
    runs.init()
    offset = time.time() - time.monotonic()
    with CausalWorkload(dsns, SEED) as workload:
        workload.wait(0.5)
        runs.full(NAME)
        workload.calendar.may_hold = True
        for _ in range(INCREMENTS):
            workload.wait(PAUSE_SECONDS)
            runs.increment(NAME)
            workload.calendar.cuts += 1
    store = fleet.store.open()
    chain = read_chain_lists(store, read_chain(store, NAME))
    folding = Folding(store, chain, {node: StoredShard.read(store, chain, node) for node in chain.full.parts})
    times = [commit_times(dsn) for dsn in dsns]

    def steady(moment: datetime) -> float:
        return moment.timestamp() - offset

    faults, taken, early = list[str](), list[TakenIncrement](), 0
    restored = set(chance.sample(range(FOLDED), RESTORED))
    for number, moment in enumerate(draw_moments(chain, chance, FOLDED)):
        point = folding.point(moment)
        shards = folding.fold(point)
        folding.check_standbys(point, shards)
        state = chains_of(shards)
        found = [*find_faults(state), *bank_faults(shards), *time_faults(point, shards, times)]
        faults += [f"CUTLINE_SEED={SEED}: {moment.isoformat()}: {fault}" for fault in found]
        # The commit times of the state are in milliseconds.
        latest = datetime.fromisoformat(point.cut.made_at) + timedelta(milliseconds=2)
        taken.append(TakenIncrement(number, steady(moment) - 0.001, steady(latest), state.rows))
        early += sum(node.early for node in point.nodes)
        if number in restored:
            assert_restored(runs, embedded, moment, shards, state)
    assert faults == []
    assert find_disagreements(workload.journal, taken) == []
    assert early, "no transaction was included early, so raising positions proved nothing"
    assert_torn_without_raising(folding, chance)


def assert_restored(
    runs: Runs, embedded: EmbeddedFleet, moment: datetime, shards: list[Lines], state: ChainState
) -> None:
    """Assert that a restore to the time yields the rows that were folded here."""
    target = replace(runs.fleet, nodes=tuple(with_database(node, BACK) for node in runs.fleet.primaries))
    report = runs.restore(NAME, target, at=moment, exact=True)
    assert report.exact is not None
    assert report.exact.moment == moment
    dsns = [node.dsn for node in target.primaries]
    assert read_invariants(dsns).hold
    assert read_state(dsns).rows == state.rows
    for dsn, lines in zip(dsns, shards, strict=True):
        copies = sorted_copies(dsn)
        for table, rows in lines.items():
            assert sorted(copies[table].splitlines(keepends=True)) == sorted(
                line if line.endswith(b"\n") else line + b"\n" for line in rows.values()
            ), table
    for dsn in embedded.dsns():
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {BACK} WITH (FORCE)")


def assert_torn_without_raising(folding: Folding, chance: random.Random) -> None:
    """Assert that the nodes' positions at the same time, taken alone, tear transactions."""
    with no_raising():
        for moment in draw_moments(folding.chain, chance, TEARS_TRIED):
            shards = folding.fold(folding.point(moment))
            if any("torn" in fault for fault in [*find_faults(chains_of(shards)), *bank_faults(shards)]):
                return
    pytest.fail(f"CUTLINE_SEED={SEED}: {TEARS_TRIED} times, and nothing was torn")


def clock(session: psycopg.Connection[Any]) -> datetime:
    (now,) = session.execute("SELECT clock_timestamp() FROM pg_sleep(0.01)").fetchone() or (datetime.min,)
    session.execute("SELECT pg_sleep(0.01)")
    return now.astimezone(UTC)


def ids_of(node_dsn: str) -> list[int]:
    with psycopg.connect(node_dsn) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM note ORDER BY id")]


@pytest.mark.timeout(600)
def test_what_is_restored_and_refused_at_exact_times(
    fleet_factory: FleetFactory, tmp_path: Path, spark: SparkSession
) -> None:
    embedded = fleet_factory(shards=2, backups=1)
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(fleet, Ready(spark))
    target = replace(fleet, nodes=tuple(with_database(node, BACK) for node in fleet.primaries))
    with psycopg.connect(embedded.dsns()[0], autocommit=True) as busy, psycopg.connect(embedded.dsns()[1]) as idle:
        for session in (busy, idle):
            session.execute("CREATE TABLE note (id int PRIMARY KEY)")
        idle.commit()
        runs.init()
        before_full = clock(busy)
        runs.full(NAME)
        alone = run_here(fleet, "show", NAME, "--at", clock(busy).isoformat())
        assert (alone[0], alone[1]["error"]) == (3, "exact-time")
        at = [clock(busy)]
        for number in range(1, 5):
            busy.execute("INSERT INTO note VALUES (%s)", [number])
            at.append(clock(busy))
            if number == 2:
                runs.increment(NAME)
        runs.increment(NAME)
        busy.execute("ALTER TABLE note ADD COLUMN text text")
        changed_at = clock(busy)
        runs.increment(NAME)
        after_all = clock(busy)
    for number, moment in ((0, at[0]), (3, at[3])):
        report = runs.restore(NAME, target, at=moment, exact=True)
        assert ids_of(target.primaries[0].dsn) == list(range(1, number + 1)), report
        assert ids_of(target.primaries[1].dsn) == []

    def then(reached: Reached) -> None:
        if reached.point == RestoreCrashPoint.ROWS_LOADED:
            raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    request = RestoreRequest(NAME, replace=True, at=at[1], exact=True)
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(fleet, target, request), runs.spark, Watching(then))
    resumed = resume_restore(fleet, target, RestoreRequest(NAME), runs.spark, Silent())
    assert ids_of(target.primaries[0].dsn) == [1]
    assert resumed.exact is not None
    assert resumed.exact.moment == at[1]
    (ended,) = run_here(fleet, "history", "--last", "1")[1]["operations"]
    assert (ended["kind"], ended["exact_at"]) == ("restore", Time.exactly(at[1]))

    code, shown = run_here(fleet, "show", NAME, "--at", at[1].isoformat())
    assert code == 0
    assert (shown["exact"]["before"], shown["exact"]["after"]) == (0, 1)
    assert [node["early"] for node in shown["exact"]["nodes"]] == [0, 0]
    assert shown["exact"]["nodes"][0]["last_commit_at"] < at[1].isoformat() < shown["cuts"][1]["made_at"]

    asserting = tmp_path / "asserting.toml"
    asserting.write_text(f"{fleet.path.read_text()}\n{ASSERTION}")
    code, drilled = run_here(load_fleet(asserting), "drill", NAME, "--at", at[3].isoformat(), "--exact", spark=spark)
    assert code == 0, drilled
    assert (drilled["result"], drilled["exact"]["before"], drilled["exact"]["after"]) == ("holds", 1, 2)
    assert_copies_are_compared(runs, at[3])
    for command in (["check", NAME], ["restore", NAME, "--replace", "--dry-run"]):
        code, refused = run_here(fleet, *command, "--at", changed_at.isoformat(), "--exact")
        assert (code, refused["error"]) == (3, "exact-definitions"), refused
    assert f" restore {NAME} --replace --increment 2" in refused["hint"]
    assert refused["details"]["changed"] == {"s1": ["public.note"]}
    assert (refused["details"]["before"], refused["details"]["after"]) == (2, 3)
    runs.restore(NAME, target, at=changed_at, exact=True, scope=RestoreScope(nodes=("s2",)))

    for moment, more in ((before_full, "earliest"), (after_all + timedelta(hours=1), "newest")):
        code, refused = run_here(fleet, "restore", NAME, "--at", moment.isoformat(), "--exact", "--dry-run")
        assert (code, refused["error"]) == (3, "exact-time"), refused
        assert run_here(fleet, "show", NAME, "--at", str(refused["details"][more]))[0] == 0
    assert run_here(fleet, "restore", NAME, "--exact", "--dry-run")[0] == 2


def assert_copies_are_compared(runs: Runs, moment: datetime) -> None:
    """Assert that a check compares the copies at the time, and finds a row that one of them lacks only there."""
    spark = runs.spark.session()
    cut, at_time = (
        run_here(runs.fleet, "check", NAME, *options, spark=spark)[1]["snapshots"][0]
        for options in (["--increment", "2"], ["--at", moment.isoformat(), "--exact"])
    )
    assert (cut["result"], at_time["result"]) == ("valid", "valid")
    assert (at_time["increment"], at_time["exact_at"], cut["exact_at"]) == (2, Time.exactly(moment), None)
    # Three rows on s1, and the accounts of the bank.
    assert at_time["compared"]["partitions"] > cut["compared"]["partitions"]
    assert (
        run_here(runs.fleet, "check", NAME, "--at", moment.isoformat(), spark=spark)[1]["snapshots"][0]["increment"]
        == 1
    )

    store = runs.fleet.store.open()
    point = find_exact_point(store, read_chain_lists(store, read_chain(store, NAME, 2)), moment)
    last, (standby,) = point.chain.last, [node for node, of in point.chain.parts.items() if of == "s1"]
    lacking = structs.replace(last, segments={**last.segments, standby: ()})
    point = structs.replace(
        point, chain=structs.replace(point.chain, increments=(*point.chain.increments[:-1], lacking))
    )
    report = SnapshotReport(NAME, 2)
    compare_exact(spark, point, runs.fleet.store, Findings(report), Silent())
    assert [(one.kind, one.other_node, one.group) for one in report.conflicts] == [
        ("row-count", standby, "public.note")
    ]
    # So that the output doesn't advise --rows.
    assert report.conflicts[0].rows_unnamed
