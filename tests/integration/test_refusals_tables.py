"""Changes of tables, publications and slots between two increments: followed in WAL, copied again, or refused.

A refusal's hint begins a new chain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from cutline.cli.commands.init import lines_of
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, GroupRules
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import News, Noting, Silent
from cutline.nodes.connections import with_database
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment, preview_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.create.renewal import ONE_READER
from cutline.snapshots.records.commit import DefinitionChanges, Increment
from cutline.snapshots.records.proven_chains import point_label
from cutline.snapshots.removal.garbage_rules import GarbageReason
from cutline.snapshots.removal.gc import preview_garbage
from cutline.wal.drain.slots import drop_slots
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of, sorted_copies
from tests.integration.refusing import create, execute, publication_name, refused
from tests.tables.changes_between import CHANGES, LIKE_PERSON, RENAMED, SET_TABLES, TAKEN_OUT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_SECONDS_MAX = 30
VERSION_18 = 180_000
GAP = "; no time between {} and this increment can be restored"
GROUPS = """
[groups]
include = ["kept.*"]
append_only = ["kept.log"]
"""
SCHEMA = (
    "CREATE SCHEMA kept",
    "CREATE TYPE kept.mood AS ENUM ('sad', 'glad')",
    "CREATE DOMAIN kept.amount AS integer CHECK (value >= 0)",
    "CREATE TABLE kept.person (id int PRIMARY KEY, name text NOT NULL, mood kept.mood, age int CHECK (age < 200),"
    " paid kept.amount)",
    "CREATE TABLE kept.total (id int PRIMARY KEY, price int, twice int GENERATED ALWAYS AS (price * 2) STORED)",
    "CREATE TABLE kept.log (said text)",
    "INSERT INTO kept.person (id, name, mood, age, paid) SELECT n, 'one', 'glad', n, n FROM generate_series(1, 50) n",
)


@dataclass(slots=True)
class CurrentChain:
    """A fleet and its current chain, whose name is empty if a failed test has left none."""

    runs: Runs
    names: Iterator[str]
    name: str = ""

    @property
    def fleet(self) -> Fleet:
        return self.runs.fleet

    @property
    def dsn(self) -> str:
        return self.fleet.primaries[0].dsn

    def begin_new(self) -> None:
        """Follow NEW_CHAIN command by command; the test of changes that end no chain adds an increment to the chain."""
        ended = self.slots
        self.runs.init()
        name = next(self.names)
        commit = self.runs.full(name)
        assert not [out for out in commit.left_out if out.kind == LeftOutKind.ABSENT_COPY], commit.left_out
        self.name = name
        # The ended chain no longer needs its slots, and a server has only 20.
        for slot in ended:
            assert drop_slots(self.fleet.nodes, slot) == []

    def take_name(self) -> str:
        """Return the name of the chain, and forget it: the caller is about to end the chain."""
        name, self.name = self.name, ""
        return name

    @property
    def slots(self) -> set[str]:
        return {slot for node in self.fleet.nodes for slot in slots_of(node.dsn)}


@pytest.fixture(scope="module")
def shard(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One primary of the shared fleet and its standby, with new tables and a new store."""
    directory = tmp_path_factory.mktemp("tables")
    fleet = configure_fleet(shared_fleet, directory / "fleet.toml", f"file://{directory}/store", more=GROUPS)
    fleet = replace(fleet, nodes=tuple(node for node in fleet.nodes if node.shard == "s1"))
    with dropping_slots(fleet):
        try:
            execute(fleet.nodes[0].dsn, *SCHEMA)
            yield fleet
        finally:
            execute(fleet.nodes[0].dsn, "DROP SCHEMA IF EXISTS kept CASCADE")


@pytest.fixture(scope="module")
def chain_of_one(shard: Fleet, spark: SparkSession) -> CurrentChain:
    return CurrentChain(Runs(replace(shard, nodes=shard.primaries), Ready(spark)), (f"one-{n}" for n in count(1)))


@pytest.fixture(scope="module")
def chain_of_two(shard: Fleet, spark: SparkSession) -> CurrentChain:
    return CurrentChain(Runs(shard, Ready(spark)), (f"two-{n}" for n in count(1)))


@pytest.fixture
def current(chain_of_one: CurrentChain) -> CurrentChain:
    """A chain of the primary alone that can be continued: the one that the previous test began, if there is one."""
    if not chain_of_one.name:
        execute(chain_of_one.dsn, "DROP SCHEMA IF EXISTS kept CASCADE", *SCHEMA)
        chain_of_one.begin_new()
    return chain_of_one


def next_increment(current: CurrentChain) -> tuple[DefinitionChanges, list[str]]:
    """Create the next increment; return its definition changes and the notes of its progress."""
    noted = Noting(Silent())
    commit = create_increment(current.fleet, CreateRequest(current.name), current.runs.spark, noted)
    assert commit.definition_changes
    return commit.definition_changes, noted.notes


@pytest.mark.timeout(600)
def test_a_table_is_copied_again_only_if_wal_does_not_describe_its_change(current: CurrentChain) -> None:
    ours, target = (
        publication_name(current.fleet),
        replace(current.fleet, nodes=(with_database(current.fleet.primaries[0], "kept_back"),)),
    )
    likes = [table for table in CHANGES if table != "more"]
    execute(current.dsn, *(one.format(t=table) for table in likes for one in LIKE_PERSON))
    try:
        current.runs.increment(current.name)
        for number in range(2):
            steps = {table: steps[number] for table, steps in CHANGES.items()}
            for table, (statements, _) in steps.items():
                execute(current.dsn, *(one.format(ours=ours, t=table) for one in statements))
            changes, notes = next_increment(current)
            copied = {table: reason for table, (_, reason) in steps.items() if reason}
            for table, reason in copied.items():
                note = f"kept.{table} needs a new base copy: {reason}"
                assert any(note in line for line in notes), (table, notes)
            followed = {RENAMED.get(table, table) for table, (_, reason) in steps.items() if reason == ""}
            assert {group.table for group in changes.groups["s1"]} == copied.keys() | followed
            assert len(changes.successions.get("s1", {})) == len(followed)
        assert_restores_equal(current, target)
        # A row filter that was set and removed between two increments.
        every = [f"ONLY kept.{table}" for table in ("person", "total", "more", *likes) if table not in RENAMED]
        filtered = [f"{every[0]} WHERE (id < 10)", *every[1:]]
        execute(current.dsn, *(SET_TABLES.format(ours=ours) + ", ".join(one) for one in (filtered, every)))
        changes, notes = next_increment(current)
        assert any(f"kept.person needs a new base copy: {TAKEN_OUT}" in line for line in notes), notes
        assert [group.table for group in changes.groups["s1"]] == ["person"]
        assert changes.successions == {}
        # Changes that WAL alone describes need no base copy.
        execute(current.dsn, "ALTER TABLE kept.person ADD more int DEFAULT 7", "DROP TABLE kept.more")
        changes, _ = next_increment(current)
        assert [one.kind for one in changes.objects if one.kind == "base"] == []
        assert_restores_equal(current, target)
    finally:
        drop_restored(current)
        # The tables have changed: the next test starts with the ones that every test expects.
        current.take_name()


def assert_restores_equal(current: CurrentChain, target: Fleet) -> None:
    current.runs.restore(current.name, target)
    ours = [
        {name: text for name, text in sorted_copies(node.dsn).items() if name.startswith("kept.")}
        for node in (current.fleet.primaries[0], target.primaries[0])
    ]
    assert ours[0] == ours[1]


WITHOUT_UPDATES = (
    "ALTER PUBLICATION {ours} SET (publish = 'insert')",
    "UPDATE kept.person SET age = age + 1 WHERE id = 1",
)


@pytest.mark.parametrize(("change", "what"), [
    (["DROP PUBLICATION {ours}", "UPDATE kept.person SET age = age + 1 WHERE id = 2"],
     "publication {ours} no longer exists; it published kept.person"),
    (WITHOUT_UPDATES, r"publication {ours} \(kept.person, kept.total\) was altered: it publishes insert"),
    ([*WITHOUT_UPDATES, "ALTER PUBLICATION {ours} SET (publish = 'insert, update, delete, truncate')"],
     r"Cutline's publication of 2 tables \(kept.person, kept.total\) was altered or replaced after the last commit;"
     " changes may be missing"),
    (["DROP PUBLICATION {ours}", "UPDATE kept.person SET age = age + 1 WHERE id = 3",
      "CREATE PUBLICATION {ours} FOR TABLE kept.person, kept.total"],
     r"\(kept.person, kept.total\) was altered or replaced after"),
    (["ALTER PUBLICATION {ours} SET (publish_via_partition_root)"], "partitions as their root"),
    (["ALTER PUBLICATION {ours}_append_only SET (publish = 'truncate')", "INSERT INTO kept.log VALUES ('unseen')"],
     "publishes truncate"),
])  # fmt: skip
@pytest.mark.timeout(300)
def test_a_publication_that_may_miss_changes_costs_a_copy_of_its_shard(
    chain_of_one: CurrentChain, change: list[str], what: str
) -> None:
    current, ours = begin_again(chain_of_one), publication_name(chain_of_one.fleet)
    slots = current.slots
    execute(current.dsn, *(statement.format(ours=ours) for statement in change))
    dry, noted = Noting(Silent()), Noting(Silent())
    preview_increment(current.fleet, CreateRequest(current.name), dry)
    commit = create_increment(current.fleet, CreateRequest(current.name), current.runs.spark, noted)
    assert commit.renewed.keys() == {"s1"}
    assert re.search(what.format(ours=ours), commit.renewed["s1"].reason), commit.renewed["s1"].reason
    for notes, does in ((dry.notes, "will be copied again"), (noted.notes, "is copied again")):
        (note,) = [note for note in notes if f"primary s1 {does}: " in note]
        assert not isinstance(note, News)
        assert note.endswith(GAP.format("increment 1"))
    is_altered_now = "altered or replaced" not in what
    assert [note.partition(": ")[2].partition(": ")[0] for note in noted.notes if "s1: repaired" in note] == (
        ["repaired Cutline's publications"] * is_altered_now
    )
    assert current.slots == slots
    assert_goes_on(current)


@pytest.mark.parametrize("limit", [" WHERE (id < 10)", " (id, name)"])
@pytest.mark.timeout(300)
def test_a_row_filter_or_a_column_list_costs_a_copy_of_its_table(chain_of_one: CurrentChain, limit: str) -> None:
    current, ours = begin_again(chain_of_one), publication_name(chain_of_one.fleet)
    execute(
        current.dsn,
        f"ALTER PUBLICATION {ours} SET TABLE ONLY kept.total, ONLY kept.person{limit}",
        "UPDATE kept.person SET age = age + 1 WHERE id = 20",
    )
    commit = current.runs.increment(current.name)
    assert commit.renewed == {}
    assert commit.definition_changes is not None
    assert [group.table for group in commit.definition_changes.groups["s1"]] == ["person"]
    assert_goes_on(current)


@pytest.mark.timeout(300)
def test_init_names_a_table_that_was_taken_out_of_its_publication(chain_of_one: CurrentChain) -> None:
    current, ours = begin_again(chain_of_one), publication_name(chain_of_one.fleet)
    execute(current.dsn, f"ALTER PUBLICATION {ours} DROP TABLE kept.total")
    report = initialise(current.fleet, Silent())
    assert report.published["s1"] == ["kept.total"]
    (found,) = [one for one in report.to_copy if one.snapshot == current.name]
    assert (found.node, found.tables) == ("s1", ("kept.total",))
    why = "taken out of Cutline's publication and put back"
    assert f"the next increment of {current.name} copies kept.total of s1: {why}" in lines_of(report)
    commit = current.runs.increment(current.name)
    assert commit.definition_changes is not None
    assert [group.table for group in commit.definition_changes.groups["s1"]] == ["total"]
    assert initialise(current.fleet, Silent()).to_copy == ()
    assert_goes_on(current)


@pytest.mark.parametrize("when", [CrashPoint.INTENT_STORED, CrashPoint.FINISHES_WRITTEN])
@pytest.mark.timeout(300)
def test_a_publication_that_is_altered_while_an_increment_runs_costs_a_copy_of_its_shard(
    chain_of_one: CurrentChain, when: CrashPoint
) -> None:
    current, ours = begin_again(chain_of_one), publication_name(chain_of_one.fleet)

    class Altering(Silent):
        is_over = False

        def reached(self, point: str, *, node: str = "") -> None:
            if point == when and not self.is_over:
                self.is_over = True
                execute(current.dsn, *(statement.format(ours=ours) for statement in WITHOUT_UPDATES))

    commit = create_increment(current.fleet, CreateRequest(current.name), current.runs.spark, Altering())
    assert commit.renewed.keys() == {"s1"}
    assert "was altered: it publishes insert" in commit.renewed["s1"].reason
    assert_goes_on(current)


@pytest.mark.timeout(300)
def test_a_dropped_publication_costs_a_copy_of_its_shard_with_its_standby(chain_of_two: CurrentChain) -> None:
    """WAL that was written without the publication can't be decoded through it, on a standby neither."""
    current, ours = begin_again(chain_of_two), publication_name(chain_of_two.fleet)
    execute(
        current.dsn,
        f"DROP PUBLICATION {ours}, {ours}_append_only",
        "UPDATE kept.person SET age = age + 1 WHERE id = 4",
        "INSERT INTO kept.log VALUES ('unseen')",
    )
    found = [one for one in initialise(current.fleet, Silent()).to_copy if one.snapshot == current.name]
    why = f"publication {ours} was altered, dropped or replaced after the last commit"
    assert sorted((one.node, one.reason) for one in found) == [("s1", why), ("s1-b1", why)]
    # A second init repairs nothing, and the chain lacks the changes nevertheless.
    assert [one for one in initialise(current.fleet, Silent()).to_copy if one.snapshot == current.name] == found
    commit = current.runs.increment(current.name)
    assert commit.renewed.keys() == {"s1", "s1-b1"}
    # The segments that the copies replaced are part of no increment to come.
    kept = preview_garbage(current.fleet, 0.0, Silent()).kept
    assert {why for snapshot, why, _ in kept if snapshot == current.name} == {GarbageReason.NEEDED}
    assert_goes_on(current)
    assert initialise(current.fleet, Silent()).to_copy == ()


@pytest.mark.timeout(300)
def test_wal_without_a_publication_of_no_table_costs_a_copy_of_the_nodes(
    shard: Fleet, spark: SparkSession, tmp_path: Path
) -> None:
    """No table of the chain shows that the publication of append-only tables is another."""
    fleet = replace(shard, nodes=shard.primaries, groups=GroupRules(include=("kept.person",)))
    current = CurrentChain(Runs(fleet, Ready(spark)), (f"alone-{n}" for n in count(1)))
    current.begin_new()
    ours = publication_name(fleet)
    execute(
        current.dsn,
        f"DROP PUBLICATION {ours}_append_only",
        "UPDATE kept.person SET age = age + 1 WHERE id = 5",
        f"CREATE PUBLICATION {ours}_append_only WITH (publish = 'insert, truncate')",
    )
    commit = current.runs.increment(current.name)
    with psycopg.connect(current.dsn) as connection:
        # From version 18 on, a server decodes WAL without the publications that did not exist.
        decodes = connection.info.server_version >= VERSION_18
    assert commit.renewed.keys() == (set() if decodes else {"s1"})
    assert current.runs.check_one(current.name).result != "conflicts"


def begin_again(current: CurrentChain) -> CurrentChain:
    """Begin a new chain of the tables that every test expects, with an increment."""
    for slot in current.slots:
        assert drop_slots(current.fleet.nodes, slot) == []
    execute(current.dsn, "DROP SCHEMA IF EXISTS kept CASCADE", *SCHEMA, "INSERT INTO kept.log VALUES ('first')")
    current.begin_new()
    execute(current.dsn, "UPDATE kept.person SET age = age + 1 WHERE id = 50")
    current.runs.increment(current.name)
    return current


def assert_goes_on(current: CurrentChain) -> None:
    """The newest increment restores what the source has, all are valid, and the next one is without a gap."""
    target = replace(current.fleet, nodes=(with_database(current.fleet.primaries[0], "kept_back"),))
    try:
        assert_restores_equal(current, target)
        execute(
            current.dsn, "UPDATE kept.person SET age = age + 1 WHERE id < 10", "DELETE FROM kept.person WHERE id = 9"
        )
        assert current.runs.increment(current.name).renewed == {}
        assert_restores_equal(current, target)
        for increment in range(4):
            assert current.runs.check_one(current.name, increment).conflicts == []
    finally:
        drop_restored(current)
        current.take_name()


def drop_restored(current: CurrentChain) -> None:
    with psycopg.connect(with_database(current.fleet.primaries[0], "postgres").dsn, autocommit=True) as server:
        # Each restore but the first has set the database before it aside.
        made = server.execute("SELECT datname FROM pg_database WHERE datname ^@ 'kept_back'").fetchall()
        for (name,) in made:
            server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_a_change_that_loses_nothing_ends_no_chain(current: CurrentChain) -> None:
    ours = publication_name(current.fleet)
    execute(
        current.dsn,
        "VACUUM (FULL, FREEZE) kept.person",
        "VACUUM (FULL, FREEZE) pg_publication",
        "VACUUM (FULL, FREEZE) pg_publication_rel",
        "VACUUM FULL pg_attribute",
        "ALTER TABLE kept.person ALTER age SET STATISTICS 500, ALTER age SET DEFAULT 7",
        "CLUSTER kept.person USING person_pkey",
        "ANALYZE kept.person",
        "CREATE INDEX by_name ON kept.person (name)",
        "GRANT SELECT ON kept.person TO public",
        "INSERT INTO kept.log VALUES ('said')",
        "TRUNCATE kept.log",
        f"BEGIN; ALTER PUBLICATION {ours} SET (publish = 'insert'); ROLLBACK",
    )
    current.runs.init()
    # The insert and the TRUNCATE; the rest changed no row.
    assert current.runs.increment(current.name).counts["changes"] == 2


@pytest.mark.parametrize(("node", "change", "what", "warnings"), [
    ("s1", "SELECT pg_drop_replication_slot('{slot}')", "slot {slot} does not exist", [GAP]),
    ("s1-b1", "SELECT pg_drop_replication_slot('{slot}')", "slot {slot} does not exist", []),
    ("s1", "SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())",
     "slot {slot} is at .* advanced the slot", [f"{GAP}; {ONE_READER}"]),
    ("s1-b1", "SELECT pg_replication_slot_advance('{slot}', pg_last_wal_replay_lsn())", "slot {slot} is at .*",
     [ONE_READER]),
])  # fmt: skip
def test_a_node_with_a_gap_in_its_wal_is_copied_again(
    chain_of_two: CurrentChain, node: str, change: str, what: str, warnings: list[str]
) -> None:
    """The note is a warning, which --quiet keeps, if times can't be restored or something else reads the slot."""
    current = chain_of_two
    if not current.name:
        current.begin_new()
    (slot,) = slots_of(current.fleet.nodes[-1].dsn)
    dsn, name = current.fleet.node(node).dsn, current.take_name()
    execute(current.dsn, "UPDATE kept.person SET age = 5")
    await_replay(current)
    execute(dsn, change.format(slot=slot))
    dry, noting = Noting(Silent()), Noting(Silent())
    preview_increment(current.fleet, CreateRequest(name), dry)
    commit = create_increment(current.fleet, CreateRequest(name), current.runs.spark, noting)
    assert isinstance(commit, Increment)
    assert commit.renewed.keys() == {node}
    assert re.search(what.format(slot=slot), commit.renewed[node].reason), commit.renewed
    expected = [text.format(point_label(commit.increment - 1)) for text in warnings]
    for notes, does in ((dry.notes, "will be copied again"), (noting.notes, "is copied again")):
        (note,) = [note for note in notes if f" {node} {does}: " in note]
        assert isinstance(note, News) == (not expected)
        assert all(note.endswith(text) for text in expected), note
    current.begin_new()


def await_replay(current: CurrentChain) -> None:
    """Wait until the standby has replayed what the primary has written."""
    with psycopg.connect(current.dsn) as primary, psycopg.connect(current.fleet.nodes[-1].dsn) as standby:
        (lsn,) = primary.execute("SELECT pg_current_wal_lsn()::text").fetchone() or ("",)
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while standby.execute("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", (lsn,)).fetchone() != (False,):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("identity", ["FULL", "USING INDEX total_twice"])
def test_a_table_whose_identity_is_generated_is_refused(current: CurrentChain, identity: str) -> None:
    """PostgreSQL 18 rejects updates of such a table once it is published; WAL of earlier versions lacks the column."""
    execute(
        current.dsn,
        "ALTER TABLE kept.total ALTER twice SET NOT NULL",
        "CREATE UNIQUE INDEX IF NOT EXISTS total_twice ON kept.total (twice)",
        f"ALTER TABLE kept.total REPLICA IDENTITY {identity}",
        "CREATE TABLE kept.published (LIKE kept.total INCLUDING ALL)",
        f"ALTER TABLE kept.published REPLICA IDENTITY {identity.replace('total', 'published')}_idx"
        if "INDEX" in identity
        else "ALTER TABLE kept.published REPLICA IDENTITY FULL",
        "CREATE PUBLICATION somebodys FOR TABLE kept.published",
    )
    try:
        with psycopg.connect(current.dsn) as connection:
            is_rejected = connection.info.server_version >= VERSION_18
        with pytest.raises(psycopg.errors.InvalidColumnReference) if is_rejected else nullcontext():
            execute(current.dsn, "UPDATE kept.published SET price = 1")
        with refused(current.fleet, "table-not-admissible") as errors:
            create(current.fleet, "another")
        assert "kept.published on s1, kept.total on s1" in errors[0].message
    finally:
        execute(
            current.dsn,
            "DROP PUBLICATION somebodys",
            "DROP TABLE kept.published",
            "ALTER TABLE kept.total REPLICA IDENTITY DEFAULT",
        )
    current.begin_new()
