"""Shards join a chain and leave it: a restore has the shards that the chain had at its cut, as the servers were."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo

from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.baseline import BaselineChangedError, FleetTopologyError
from cutline.nodes.publications import PublicationChangedError, publication_names
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.snapshots.create.absent_copies import note_retired
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from cutline.snapshots.records.proven_chains import commit_key, cut_time, read_chain
from cutline.storage.errors import ChainEnd
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of, sorted_copies
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.servers.dealt import fleet_and_target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEW, STANDBY = "s3", "s3-b1"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with fleet_and_target(tmp_path_factory.mktemp("shards"), shards=3) as fleets:
        yield fleets


@dataclass
class Place(ChangingFleet):
    """A fleet of three shards, some of which fleet.toml lists, and the rows of these shards at each cut."""

    whole: Fleet | None = None
    # The fleet from whose store restores read, if it is another.
    second: Fleet | None = None
    held: dict[int, dict[str, dict[str, bytes]]] = field(default_factory=dict)

    def list_shards(self, *shards: str, retired: tuple[str, ...] = (), listed: bool = True) -> None:
        """Write a fleet.toml with these shards; those that are retired may be listed as well."""
        assert self.whole is not None
        nodes = self.whole.nodes
        self.runs = Runs(
            replace(
                self.whole,
                nodes=tuple(node for node in nodes if node.shard in shards),
                retired=retired,
                retired_nodes=tuple(node for node in nodes if listed and node.shard in retired),
            ),
            self.runs.spark,
        )

    def rename(self, shard: str, database: str) -> None:
        """Write another name of the shard's database into fleet.toml."""
        assert self.whole is not None
        nodes = (
            replace(node, dsn=make_conninfo(node.dsn, dbname=database)) if node.shard == shard else node
            for node in self.whole.nodes
        )
        self.whole = replace(self.whole, nodes=tuple(nodes))
        self.list_shards(*(node.id for node in self.fleet.primaries))

    def next(self) -> Increment:
        self.write()
        commit = self.increment()
        assert isinstance(commit, Increment)
        self.held[commit.increment] = {node.id: sorted_copies(node.dsn) for node in self.fleet.primaries}
        return commit

    def check_held(self, *increments: int) -> None:
        """Restore each increment, and compare its rows with those of the shards that the chain had then."""
        databases, runs = {node.id: node.dsn for node in self.target.primaries}, self.runs
        if self.second is not None:
            runs = Runs(self.second, runs.spark)
        for number in increments:
            runs.restore("chain", self.target, number, use_backup_copies=True)
            expected = self.held[number]
            assert {shard: sorted_copies(databases[shard]) for shard in expected} == expected


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession) -> Iterator[Place]:
    source, target = servers
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = Place(source, into, Runs(fleet, Ready(spark)), tmp_path, whole=fleet)
    for node in fleet.primaries:
        found.execute(
            node.id,
            "DROP TABLE IF EXISTS seen, own, log",
            "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
            "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
        )
    found.execute(NEW, "CREATE TABLE own (id serial PRIMARY KEY, n int)", "INSERT INTO own (n) VALUES (1), (2)")
    for standby in (node.id for node in fleet.nodes if node.backup_of):
        found.await_replay(standby)
    with dropping_slots(fleet):
        found.runs.init()
        found.list_shards("s1", "s2")
        yield found


def test_a_shard_joins_and_another_leaves(place: Place) -> None:
    full, first = place.runs.full("chain"), place.next()
    place.list_shards("s1", "s2", NEW)
    joined = place.next()
    assert joined.renewed.keys() == {NEW, STANDBY}
    assert all(renewal.is_new for renewal in joined.renewed.values())
    assert place.check(since_last=True).result == VALID
    place.execute(NEW, "ALTER TABLE own ADD COLUMN more int DEFAULT 7", "INSERT INTO own (n) VALUES (3)")
    place.next()
    assert place.check(since_last=True).result == VALID
    place.list_shards("s1", NEW, retired=("s2",))
    left = place.next()
    assert left.retired == ("s2",)
    assert left.segments.keys() == {"s1", "s1-b1", NEW, STANDBY}
    for node in place.servers.nodes:
        assert len(slots_of(node.dsn())) == (0 if node.id.startswith("s2") else 1)
    check_contradictions(place, joined, left)
    noting = Noting(Silent())
    note_retired(place.fleet, read_chain(place.fleet.store.open(), "chain"), left.retired, noting)
    (statement,) = [note.rpartition(": ")[2] for note in noting.notes if "DROP PUBLICATION" in note]
    with psycopg.connect(place.servers.node("s2").dsn(), autocommit=True) as session:
        session.execute(statement.encode())
    place.list_shards("s1", NEW)
    place.next()
    assert place.check(since_last=True).result == VALID
    for increment in (None, 1, 2, 3, 4):
        assert place.check(increment).result == VALID
    place.check_held(1, 2, 3, 5)
    # An exact time before both changes has the shards of that time.
    between = cut_time(full) + (cut_time(first) - cut_time(full)) / 2
    plan = plan_restore(place.fleet, place.target, RestoreRequest("chain", at=between, exact=True))
    assert [target.shard for target in plan.targets] == ["s1", "s2"]
    shown = run_as_text(place.fleet, "show", "chain")
    assert shown.count("was copied: its shard joins the chain") == 2
    assert f"table public.seen on {NEW} has a new base copy" not in shown


def test_a_shard_without_a_standby_that_left_does_not_concern_later_increments(place: Place) -> None:
    assert place.whole is not None
    place.whole = replace(place.whole, nodes=tuple(node for node in place.whole.nodes if node.id != "s2-b1"))
    place.list_shards("s1", "s2", NEW)
    place.runs.full("chain")
    place.next()
    assert [one.what for one in place.check().skipped] == ["rows of shard s2"]
    place.list_shards("s1", NEW, retired=("s2",))
    assert place.next().retired == ("s2",)
    report = place.check()
    assert (report.result, report.skipped) == (VALID, [])
    assert [(one.first, one.last, one.what) for one in report.uncompared_points] == [(0, 1, "rows of shard s2")]
    assert place.check(1).result == INCONCLUSIVE


def check_contradictions(place: Place, joined: Increment, left: Increment) -> None:
    """Commits that contradict themselves about the shards that join or leave are refused."""
    new, changes = joined.renewed[NEW], joined.definition_changes
    assert changes is not None
    values: list[tuple[Increment, str, dict[str, object]]] = [
        (joined, "is_new does not match", {"renewed": joined.renewed | {NEW: structs.replace(new, is_new=False)}}),
        (joined, "cut lists", {"renewed": {STANDBY: joined.renewed[STANDBY]}}),
        (joined, "cut lists", {"renewed": {}}),
        (joined, "does not match the new definitions", {"definition_changes": structs.replace(changes, begun={})}),
        (left, "cut lists", {"retired": ()}),
        (left, "retired names s2, s9", {"retired": ("s2", "s9")}),
        (left, "or all of them", {"retired": ("s2", "s2")}),
        (left, "schema_changes is not", {"definition_changes": None}),
    ]
    store = place.fleet.store.open()
    for commit, message, changed in values:
        path = place.folder / "store" / commit_key("chain", commit.increment)
        before = path.read_bytes()
        path.write_bytes(seal(structs.replace(commit, **changed)))
        with pytest.raises(ManifestError, match=message):
            read_chain(store, "chain", commit.increment)
        path.write_bytes(before)
    read_chain(store, "chain")


def test_a_shard_joins_and_leaves_while_global_transactions_span_it(place: Place) -> None:
    """Each transaction across shards is restored on all of its shards that the chain has, or on none of them."""
    assert place.whole is not None
    databases = [node.dsn for node in place.whole.primaries]
    with BankWorkload(databases, clients=3, cross_shard_ratio=1.0, pause_seconds=0.02):
        place.runs.full("chain")
        for shards, retired in ((("s1", "s2", NEW), ()), (("s1", "s2", NEW), ()), (("s1", "s2"), (NEW,))):
            place.list_shards(*shards, retired=retired)
            commit = place.runs.increment("chain")
            assert commit.cut.global_transactions > 0
    assert place.check().result == VALID
    restored = [node.dsn for node in place.target.primaries]
    for number in (1, 2):
        place.runs.restore("chain", place.target, number)
        invariants = read_invariants(restored)
        assert invariants.hold
        assert all(invariants.transfers)
    place.runs.restore("chain", place.target, 3)
    assert not read_invariants(restored[:2]).unexplained_accounts
    assert not _half_present(restored[:2])


def _half_present(databases: list[str]) -> set[Any]:
    """The transfers between two shards that only one of them has."""
    between = "least(from_account, to_account) <= 10000 AND greatest(from_account, to_account) BETWEEN 10001 AND 20000"
    query = f"SELECT id FROM transfer WHERE {between}".encode()
    found: list[set[Any]] = []
    for database in databases:
        with psycopg.connect(database) as connection:
            found.append({row[0] for row in connection.execute(query)})
    return found[0] ^ found[1]


# In the order in which a create reaches them: each create is settled by the next.
POINTS = (
    (CrashPoint.INTENT_STORED, 1),
    (CrashPoint.SLOT_MADE, 1),
    (CrashPoint.PREPARED_OVER, 1),
    (CrashPoint.COPY_SLOTS_DROPPED, 1),
    (ABOUT_TO_COMMIT, 1),
)


@pytest.mark.timeout(900)
def test_a_create_that_is_killed_leaves_no_slot_of_a_shard_that_joins(place: Place) -> None:
    place.runs.full("chain")
    place.list_shards("s1", "s2", NEW)
    for point, count in POINTS:
        place.write()
        program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", str(point), str(count), "--"]
        words = ["--fleet", str(place.fleet.path), "create", "chain", "--incremental"]
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
    # Without the shard, the next increment settles the last of them, and leaves no slot on it.
    path = place.fleet.path
    whole = path.read_text()
    joined = place.next()
    assert joined.renewed.keys() == {NEW, STANDBY}
    (slot,) = slots_of(place.fleet.node("s1").dsn)
    for node in place.fleet.nodes:
        assert slots_of(node.dsn) == [slot]
    assert not read_open_operations(place.fleet.store.open())
    # A create that has retired a shard dies before it drops the slots; the next one drops them.
    path.write_text(f'retired = ["{NEW}"]\n{whole}')
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", str(CrashPoint.COMMITTED), "1", "--"]
    done = subprocess.run(
        [*program, "--fleet", str(path), "create", "chain", "--incremental"],
        capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    place.list_shards("s1", "s2", retired=(NEW,))
    last = place.next()
    assert last.increment == 3
    for node in place.servers.nodes:
        assert slots_of(node.dsn()) == ([] if node.id in (NEW, STANDBY) else [slot])
    assert place.check().result == VALID
    place.check_held(1, 3)


def test_a_shard_without_publications_is_refused_until_init_has_run(place: Place) -> None:
    full = place.runs.full("chain")
    place.list_shards("s1", "s2", NEW)
    place.execute(NEW, *(f"DROP PUBLICATION {name}" for name in publication_names(full.fleet_id)))
    with pytest.raises(PublicationChangedError, match=r"node s3: publication .* does not exist") as refused:
        place.next()
    assert "snapshot init" in refused.value.hint
    assert "snapshot create" not in refused.value.hint
    assert refused.value.ends_chain is ChainEnd.NO
    place.runs.init()
    assert place.next().renewed.keys() == {NEW, STANDBY}


def test_a_shard_that_is_missing_or_comes_back_is_refused(place: Place) -> None:
    place.list_shards("s1", "s2", NEW)
    place.runs.full("chain")
    place.list_shards("s1", "s2")
    with pytest.raises(BaselineChangedError, match=r"s3: it is a shard of the chain, but not in fleet\.toml") as one:
        place.next()
    assert 'retired = ["s3"]' in one.value.hint
    place.list_shards("s1", "s2", retired=(NEW,), listed=False)
    assert place.next().retired == (NEW,)
    # The chain knows that the shard has left it.
    place.list_shards("s1", "s2")
    place.next()
    place.list_shards("s1", "s2", NEW)
    with pytest.raises(FleetTopologyError, match="s3: the chain had a shard with this id, which was retired with"):
        place.next()


def test_shards_that_came_and_went_are_merged_and_copied(place: Place) -> None:
    spark = place.runs.spark.running
    place.runs.full("chain")
    place.next()
    assert place.whole is not None
    # The new shard has an append-only table that the rules of the full snapshot do not know.
    place.whole = replace(place.whole, groups=structs.replace(place.whole.groups, append_only=("public.log",)))
    place.list_shards("s1", "s2", NEW)
    place.execute(NEW, "CREATE TABLE log (text text)", "INSERT INTO log VALUES ('joined')")
    place.runs.init()
    place.next()
    place.next()
    assert run_here(place.fleet, "merge", "chain", "--to", "3", spark=spark)[0] == 0
    place.list_shards("s1", NEW, retired=("s2",))
    place.next()
    place.next()
    assert place.check().result == VALID
    assert run_here(place.fleet, "merge", "chain", "--to", "5", spark=spark)[0] == 0
    place.next()
    assert place.check().result == VALID
    assert place.check(4).result == VALID
    second = configure_fleet(place.servers, place.folder / "second.toml", f"file://{place.folder}/second")
    code, copied = run_here(place.fleet, "copy", "chain", "--to", str(second.path))
    assert code == 0, copied
    assert [row["nodes"] for row in run_here(second, "list", "--flat")[1]["restore_points"]] == [
        ["s1", "s2"], ["s1", "s2"], ["s1", "s2", NEW], ["s1", "s2", NEW], ["s1", NEW], ["s1", NEW], ["s1", NEW],
    ]  # fmt: skip
    place.check_held(1, 3, 6)
    place.second = second
    place.check_held(4)


def test_a_database_that_was_created_again_is_copied_again_and_a_renamed_one_goes_on(place: Place) -> None:
    place.list_shards("s1", "s2", NEW)
    place.runs.full("chain")
    place.next()
    server = place.servers.node(NEW).dsn("postgres")
    with psycopg.connect(server, autocommit=True) as connection, ExitStack() as back:
        connection.execute("ALTER DATABASE bank RENAME TO vault")
        back.callback(lambda: place.rename(NEW, "bank"))
        back.callback(lambda: connection.execute("ALTER DATABASE vault RENAME TO bank"))
        place.rename(NEW, "vault")
        second = place.next()
        assert not second.renewed
        assert second.databases[NEW].name == "vault"
        assert place.check(since_last=True).result == VALID
        connection.execute("CREATE DATABASE another TEMPLATE vault")
        connection.execute("ALTER DATABASE vault RENAME TO old")
        back.callback(lambda: connection.execute("DROP DATABASE old WITH (FORCE)"))
        connection.execute("ALTER DATABASE another RENAME TO vault")
        place.await_replay(STANDBY)
        third = place.next()
        assert third.renewed.keys() == {NEW, STANDBY}
        assert "was dropped and created again, or a restore replaced it" in third.renewed[NEW].reason
        place.next()
        for increment in (None, 2):
            assert place.check(increment).result == VALID
        place.check_held(2, 3)
    place.await_replay(STANDBY)
