"""What becomes of tables, publications and slots between two increments: carried, copied anew, or refused.

A refusal's hint begins a new chain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from fleet.hints import NEW_CHAIN
from fleet.nodes.connections import with_database
from fleet.progress import Noting, Silent
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.records.commit import DefinitionChanges
from tests.integration.refusing import create, execute, go_on, published_as, refused
from tests.snapshot_runs import Ready, Runs, chains_dropped, described, slots_of, sorted_copies
from tests.tables.changes_between import CHANGES, LIKE_PERSON, NAMED, SET_TABLES, TAKEN_OUT
from wal.slots.slots import drop_slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_SECONDS_MAX = 30
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
class Standing:
    """A fleet, and the chain that goes on for now; empty if a test that failed has left none."""

    runs: Runs
    names: Iterator[str]
    name: str = ""

    @property
    def fleet(self) -> Fleet:
        return self.runs.fleet

    @property
    def dsn(self) -> str:
        return self.fleet.primaries[0].dsn

    def begin_anew(self) -> None:
        """What NEW_CHAIN says, command by command; the test of what ends no chain takes an increment of it."""
        ended = self.slots
        self.runs.init()
        name = next(self.names)
        self.runs.full(name)
        self.name = name
        # Nobody misses the slots of the chain that has ended; the servers have 20.
        for slot in ended:
            assert drop_slots(self.fleet.nodes, slot) == []

    def take_name(self) -> str:
        """The name of the chain, which the caller is about to end."""
        name, self.name = self.name, ""
        return name

    @property
    def slots(self) -> set[str]:
        return {slot for node in self.fleet.nodes for slot in slots_of(node.dsn)}


@pytest.fixture(scope="module")
def shard(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One primary of the shared fleet and its standby, with tables and a store of their own."""
    directory = tmp_path_factory.mktemp("tables")
    fleet = described(shared_fleet, directory / "fleet.toml", f"file://{directory}/store", more=GROUPS)
    fleet = replace(fleet, nodes=tuple(node for node in fleet.nodes if node.shard == "s1"))
    with chains_dropped(fleet):
        try:
            execute(fleet.nodes[0].dsn, *SCHEMA)
            yield fleet
        finally:
            execute(fleet.nodes[0].dsn, "DROP SCHEMA IF EXISTS kept CASCADE")


@pytest.fixture(scope="module")
def chain_of_one(shard: Fleet, spark: SparkSession) -> Standing:
    return Standing(Runs(replace(shard, nodes=shard.primaries), Ready(spark)), (f"one-{n}" for n in count(1)))


@pytest.fixture(scope="module")
def chain_of_two(shard: Fleet, spark: SparkSession) -> Standing:
    return Standing(Runs(shard, Ready(spark)), (f"two-{n}" for n in count(1)))


@pytest.fixture
def standing(chain_of_one: Standing) -> Standing:
    """A chain of the primary alone that can be continued: the one that the test before has begun, where it did."""
    if not chain_of_one.name:
        execute(chain_of_one.dsn, "DROP SCHEMA IF EXISTS kept CASCADE", *SCHEMA)
        chain_of_one.begin_anew()
    return chain_of_one


def noted_increment(standing: Standing) -> tuple[DefinitionChanges, list[str]]:
    """The next increment: what it says of definitions, and what it noted."""
    noted = Noting(Silent())
    commit = create_increment(standing.fleet, CreateRequest(standing.name), standing.runs.spark, noted)
    assert commit.definition_changes
    return commit.definition_changes, noted.notes


@pytest.mark.timeout(600)
def test_what_the_wal_does_not_tell_is_copied_anew_and_what_it_tells_carried(standing: Standing) -> None:
    ours, target = (
        published_as(standing.fleet),
        replace(standing.fleet, nodes=(with_database(standing.fleet.primaries[0], "kept_back"),)),
    )
    likes = [table for table in CHANGES if table != "more"]
    execute(standing.dsn, *(one.format(t=table) for table in likes for one in LIKE_PERSON))
    try:
        standing.runs.increment(standing.name)
        for number in range(2):
            steps = {table: steps[number] for table, steps in CHANGES.items()}
            for table, (statements, _) in steps.items():
                execute(standing.dsn, *(one.format(ours=ours, t=table) for one in statements))
            changes, notes = noted_increment(standing)
            anew = {table: reason for table, (_, reason) in steps.items() if reason}
            for table, reason in anew.items():
                note = f"kept.{table} needs a new base copy: {reason}"
                assert any(note in line for line in notes), (table, notes)
            carried = {NAMED.get(table, table) for table, (_, reason) in steps.items() if reason == ""}
            assert {group.table for group in changes.groups["s1"]} == anew.keys() | carried
            assert len(changes.successions.get("s1", {})) == len(carried)
        same_as_restored(standing, target)
        # A filter that was there for a while.
        every = [f"ONLY kept.{table}" for table in ("person", "total", "more", *likes) if table not in NAMED]
        filtered = [f"{every[0]} WHERE (id < 10)", *every[1:]]
        execute(standing.dsn, *(SET_TABLES.format(ours=ours) + ", ".join(one) for one in (filtered, every)))
        changes, notes = noted_increment(standing)
        assert any(f"kept.person needs a new base copy: {TAKEN_OUT}" in line for line in notes), notes
        assert [group.table for group in changes.groups["s1"]] == ["person"]
        assert changes.successions == {}
        # What the WAL tells alone costs no copy.
        execute(standing.dsn, "ALTER TABLE kept.person ADD more int DEFAULT 7", "DROP TABLE kept.more")
        changes, _ = noted_increment(standing)
        assert [one.kind for one in changes.objects if one.kind == "base"] == []
        same_as_restored(standing, target)
    finally:
        with psycopg.connect(with_database(standing.fleet.primaries[0], "postgres").dsn, autocommit=True) as server:
            server.execute("DROP DATABASE IF EXISTS kept_back WITH (FORCE)")
        # Its tables are others now: whoever comes next begins with those that all expect.
        standing.take_name()


def same_as_restored(standing: Standing, target: Fleet) -> None:
    standing.runs.restore(standing.name, target)
    ours = [
        {name: text for name, text in sorted_copies(node.dsn).items() if name.startswith("kept.")}
        for node in (standing.fleet.primaries[0], target.primaries[0])
    ]
    assert ours[0] == ours[1]


@pytest.mark.parametrize(("change", "slug", "what"), [
    (["DROP PUBLICATION {ours}"], "publication-changed",
     "publication {ours} does not exist any more; it published kept.person"),
    (["ALTER PUBLICATION {ours} SET (publish = 'insert')"], "publication-changed",
     "publication {ours} of kept.person, kept.total was altered: it publishes insert$"),
    (["ALTER PUBLICATION {ours} SET (publish = 'insert')", "UPDATE kept.person SET age = 3",
      "ALTER PUBLICATION {ours} SET (publish = 'insert, update, delete, truncate')"], "publication-changed",
     "kept.person is in a publication .* altered since"),
    (["ALTER PUBLICATION {ours} SET (publish_via_partition_root)"], "publication-changed", "partitions as their root"),
    (["ALTER PUBLICATION {ours}_append_only SET (publish = 'truncate')"], "publication-changed", "publishes truncate$"),
    (["ALTER PUBLICATION {ours} SET TABLE ONLY kept.total, ONLY kept.person WHERE (id < 10)"], "publication-changed",
     "kept.person with a row filter"),
    (["ALTER PUBLICATION {ours} SET TABLE ONLY kept.total, ONLY kept.person (id, name)"], "publication-changed",
     "kept.person with a column list"),
])  # fmt: skip
def test_what_loses_changes_ends_a_chain_and_the_hint_begins_another(
    standing: Standing, change: list[str], slug: str, what: str
) -> None:
    ours = published_as(standing.fleet)
    name = standing.take_name()
    execute(standing.dsn, *(statement.format(ours=ours) for statement in change))
    with refused(standing.fleet, slug) as errors:
        go_on(standing.fleet, name)
    (error,) = errors
    assert error.message.startswith("node s1: ")
    assert re.search(what.format(ours=ours), error.message), error.message
    assert error.hint == NEW_CHAIN
    standing.begin_anew()


def test_what_loses_nothing_ends_no_chain(standing: Standing) -> None:
    ours = published_as(standing.fleet)
    execute(
        standing.dsn,
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
    standing.runs.init()
    # The insert and the TRUNCATE; the rest changed no row.
    assert standing.runs.increment(standing.name).counts["changes"] == 2


@pytest.mark.parametrize(("node", "change", "what"), [
    ("s1", "SELECT pg_drop_replication_slot('{slot}')", "slot {slot} does not exist"),
    ("s1-b1", "SELECT pg_drop_replication_slot('{slot}')", "slot {slot} does not exist"),
    ("s1", "SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())",
     "slot {slot} is at .* advanced the slot"),
    ("s1-b1", "SELECT pg_replication_slot_advance('{slot}', pg_last_wal_replay_lsn())", "slot {slot} is at .*"),
])  # fmt: skip
def test_a_gap_in_the_wal_ends_a_chain_and_the_hint_begins_another(
    chain_of_two: Standing, node: str, change: str, what: str
) -> None:
    standing = chain_of_two
    if not standing.name:
        standing.begin_anew()
    (slot,) = slots_of(standing.fleet.nodes[-1].dsn)
    dsn, name = standing.fleet.node(node).dsn, standing.take_name()
    execute(standing.dsn, "UPDATE kept.person SET age = 5")
    replayed(standing)
    execute(dsn, change.format(slot=slot))
    with refused(standing.fleet, "slot-lost") as errors:
        go_on(standing.fleet, name)
    assert re.search(f"node {node}: {what.format(slot=slot)}", errors[0].message), errors[0].message
    assert errors[0].hint == NEW_CHAIN
    standing.begin_anew()


def replayed(standing: Standing) -> None:
    """Wait until the standby has replayed what the primary has written."""
    with psycopg.connect(standing.dsn) as primary, psycopg.connect(standing.fleet.nodes[-1].dsn) as standby:
        (place,) = primary.execute("SELECT pg_current_wal_lsn()::text").fetchone() or ("",)
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while standby.execute("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", (place,)).fetchone() != (False,):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("identity", ["FULL", "USING INDEX total_twice"])
def test_a_table_whose_identity_is_generated_is_refused(standing: Standing, identity: str) -> None:
    """PostgreSQL 18 rejects the updates of such a table once it is published: that must be found before."""
    execute(
        standing.dsn,
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
        with pytest.raises(psycopg.errors.InvalidColumnReference):
            execute(standing.dsn, "UPDATE kept.published SET price = 1")
        with refused(standing.fleet, "table-not-admissible") as errors:
            create(standing.fleet, "another")
        assert "kept.published on s1, kept.total on s1" in errors[0].message
    finally:
        execute(
            standing.dsn,
            "DROP PUBLICATION somebodys",
            "DROP TABLE kept.published",
            "ALTER TABLE kept.total REPLICA IDENTITY DEFAULT",
        )
    standing.begin_anew()
