"""Prepared transactions that PostgreSQL can't decode once they are rolled back do not end a chain."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.lsn import Lsn
from fleet.nodes.connections import connect
from tests.integration.refusing import execute
from tests.integration.test_decoding import confirmed_on
from tests.integration.test_global_ids import NAME, pair
from tests.integration.wal_follower import Follower
from tests.integration.wal_place import Place, groups_of, one_table, place
from wal.drain.rolled_back import XIDS, find_undecodable, is_rolled_back

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["place"]  # the fixture

TABLES = 40
ROUNDS_MAX = 40


def undone(place: Place, gid: str, *statements: str) -> None:
    """Do this within a savepoint of a transaction that is prepared and rolled back."""
    for statement in rolled_back(gid, *statements):
        place.connection.execute(statement.encode())


def rolled_back(gid: str, *statements: str) -> list[str]:
    return [
        "BEGIN", "SAVEPOINT s", *statements, "RELEASE s", f"PREPARE TRANSACTION '{gid}'", f"ROLLBACK PREPARED '{gid}'"
    ]  # fmt: skip


def reading_ends(follower: Follower, finish: int) -> str:
    """What the server says when the slot is read up to `finish`; nothing if it can be."""
    task = follower.task
    query = (
        "SELECT count(*) FROM pg_logical_slot_peek_binary_changes(%s, %s, NULL,"
        " 'proto_version', '3', 'publication_names', %s, 'messages', 'true')"
    )
    with connect(task.node) as connection:
        wait_for_replay(connection, task.node.backup_of is not None, finish)
        try:
            connection.execute(query, [task.slot, str(finish), ",".join(task.publications)])
        except psycopg.errors.InternalError as error:
            return str(error)
        return ""


def wait_for_replay(connection: psycopg.Connection[object], is_standby: bool, finish: int) -> None:  # noqa: FBT001
    deadline = time.monotonic() + 30
    query = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
    while is_standby and connection.execute(query, [str(finish)]).fetchone() != (True,):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_catalog(dsn: str) -> None:
    """Have every row of pg_class looked at, by which PostgreSQL notes in them who was rolled back."""
    execute(dsn, "SELECT count(*) FROM (SELECT * FROM pg_class OFFSET 0) AS every")


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_a_table_rewritten_and_filled_in_a_savepoint_does_not_end_the_chain(place: Place, where: str) -> None:
    groups = one_table(place, "CREATE TABLE other (id integer PRIMARY KEY)", "INSERT INTO t VALUES (0, 'before')")
    follower = place.follow(groups, standby=where == "standby")
    refill = ["TRUNCATE t", "INSERT INTO t VALUES (7, 'never')", "INSERT INTO other VALUES (7)"]
    # One is the first that the slot has, two stand behind each other, one is the last.
    undone(place, "first ü", *refill)
    place.connection.execute("INSERT INTO t VALUES (1, 'one')")
    place.connection.execute("BEGIN; INSERT INTO t VALUES (2, 'two'); PREPARE TRANSACTION 'kept'")
    undone(place, "second", "TRUNCATE other", "INSERT INTO other VALUES (7)")
    undone(place, "third", "ALTER TABLE other ALTER id TYPE bigint", "INSERT INTO other VALUES (7)")
    place.connection.execute("COMMIT PREPARED 'kept'")
    place.connection.execute("SELECT pg_logical_emit_message(false, 'others', 'x')")
    undone(place, "last", "TRUNCATE other", "INSERT INTO other VALUES (7)")
    finish = place.finish()
    reading_ends(follower, finish)
    read_catalog(follower.task.node.dsn)
    assert "could not map filenumber" in reading_ends(follower, finish)

    report = follower.drained(finish)
    assert confirmed_on(follower) == report.segments[-1].segment.through
    assert follower.state() == place.lines(groups)
    events = [(chr(event["op"]), event["global_id"]) for event in follower.events() if chr(event["op"]) in "PKR"]
    names = ["first ü", "second", "third", "last"]
    expected = [(op, name) for name in names for op in "PR"]
    assert sorted(events) == sorted([*expected, ("P", "kept"), ("K", "kept")])
    ends = {event["global_id"]: event["end_lsn"] for event in follower.events() if chr(event["op"]) == "P"}
    assert {event["lsn"] for event in follower.events() if chr(event["op"]) == "R"} == {ends[name] for name in names}
    # What comes later is decoded as ever.
    place.connection.execute("INSERT INTO t VALUES (3, 'three')")
    follower.drained(place.finish())
    assert follower.state() == place.lines(groups)


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_a_table_truncated_in_a_savepoint_does_not_end_the_chain(place: Place, where: str) -> None:
    """Whether this can be decoded depends on when PostgreSQL pruned a page of pg_class."""
    chance = random.Random(7)
    for number in range(TABLES):
        place.connection.execute(f"CREATE TABLE t{number} (id integer PRIMARY KEY)".encode())
        place.connection.execute(f"INSERT INTO t{number} VALUES (1)".encode())
    groups = groups_of(place)
    follower = place.follow(groups, standby=where == "standby")
    for number in range(ROUNDS_MAX):
        undone(place, f"gid {number}", f"TRUNCATE t{number % TABLES}")
        for _ in range(chance.randrange(5, 20)):
            place.connection.execute(f"TRUNCATE t{chance.randrange(TABLES)}".encode())
        with connect(place.primary) as other:
            other.execute("SELECT count(*) FROM public.t1")
        if "could not open relation" in reading_ends(follower, finish := place.finish()):
            break
    else:
        pytest.fail("reading the slot never ended")
    place.connection.execute("INSERT INTO t0 VALUES (2)")
    follower.drained(finish)
    follower.drained(place.finish())
    assert follower.state() == place.lines(groups)


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_a_table_whose_identity_was_changed_in_a_savepoint_does_not_end_the_chain(place: Place, where: str) -> None:
    """PostgreSQL describes it as it was before, and sends its rows as they were written there."""
    one_table(place, "ALTER TABLE t REPLICA IDENTITY FULL", "INSERT INTO t VALUES (1, 'one'), (2, 'two')")
    groups = groups_of(place)
    follower = place.follow(groups, standby=where == "standby")
    place.connection.execute("INSERT INTO t VALUES (3, 'three')")
    undone(place, "forgotten", "ALTER TABLE t REPLICA IDENTITY DEFAULT", "UPDATE t SET v = 'never'")
    read_catalog(follower.task.node.dsn)
    place.connection.execute("UPDATE t SET v = 'more', id = id + 100")
    finish = place.finish()
    assert reading_ends(follower, finish) == ""
    follower.drained(finish)
    assert follower.state() == place.lines(groups)
    events = [chr(event["op"]) for event in follower.events() if event["global_id"] == "forgotten"]
    assert sorted(events) == ["P", "R"]


def test_copies_are_the_same_where_one_node_alone_can_decode_it(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    refill = ["TRUNCATE part", "INSERT INTO part VALUES (7, 'never')"]
    with pair(shared_fleet, spark, tmp_path, "exact", backups=True) as two:
        two.runs.full(NAME)
        two.part(1, 1, None)
        execute(two.shards[1], *rolled_back("gone", *refill))
        read_catalog(two.shards[1])
        two.part(2, 1, None)
        two.runs.increment(NAME)
        report = two.runs.check_one(NAME)
        assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_only_what_is_known_to_be_rolled_back_may_be_passed_over(place: Place, where: str) -> None:
    one_table(place)
    xids = {}
    for end in ("COMMIT", "ROLLBACK", "PREPARE TRANSACTION 'open'"):
        place.connection.execute(f"BEGIN; INSERT INTO t VALUES ({len(xids)})".encode())
        (xid,) = place.connection.execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
        xids[end] = int(xid) % XIDS
        place.connection.execute(end.encode())
    node = place.standby if where == "standby" else place.primary
    with connect(node) as connection:
        wait_for_replay(connection, where == "standby", place.finish())
    assert [is_rolled_back(node, xid) for xid in xids.values()] == [False, True, False]
    assert not is_rolled_back(node, max(xids.values()) + 100), "nobody has had that number yet"


def test_a_slot_that_can_be_read_has_nothing_to_pass_over(place: Place) -> None:
    follower = place.follow(one_table(place))
    task = follower.task
    undone(place, "gone", "INSERT INTO t VALUES (7, 'never')")
    middle = place.finish()
    place.connection.execute("INSERT INTO t VALUES (1, 'one')")
    for finish in (middle, place.finish()):
        assert find_undecodable(task.node, task.slot, task.publications, Lsn(finish)) is None
    assert confirmed_on(follower) == task.base
