"""Prepared transactions that PostgreSQL can't decode once they are rolled back do not end a chain."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import connect, connect_replication
from cutline.nodes.encodings import RAW
from cutline.wal.drain import drain, peek
from cutline.wal.drain.message_stream import stream_messages
from cutline.wal.drain.prepare_record import XIDS, find_undecodable, is_rolled_back
from tests.integration.refusing import execute
from tests.integration.test_decoding import confirmed_on_its_node
from tests.integration.test_global_ids import NAME, pair
from tests.integration.wal_follower import Follower
from tests.integration.wal_place import Place, create_one_table, groups_of, place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["place"]  # the fixture

TABLES = 40
ROUNDS_MAX = 40


def run_and_roll_back(place: Place, gid: str, *statements: str) -> None:
    """Run the statements within a savepoint of a transaction that is prepared and rolled back."""
    for statement in rollback_statements(gid, *statements):
        place.connection.execute(statement.encode())


def rollback_statements(gid: str, *statements: str) -> list[str]:
    return [
        "BEGIN", "SAVEPOINT s", *statements, "RELEASE s", f"PREPARE TRANSACTION '{gid}'", f"ROLLBACK PREPARED '{gid}'"
    ]  # fmt: skip


def read_error(follower: Follower, finish: int) -> str:
    """Read the slot up to `finish`, and return the server's error; "" if there is none."""
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
    """Read every row of pg_class, so that PostgreSQL sets the hint bits of transactions that were rolled back."""
    execute(dsn, "SELECT count(*) FROM (SELECT * FROM pg_class OFFSET 0) AS every")


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_a_table_rewritten_and_filled_in_a_savepoint_does_not_end_the_chain(place: Place, where: str) -> None:
    groups = create_one_table(
        place, "CREATE TABLE other (id integer PRIMARY KEY)", "INSERT INTO t VALUES (0, 'before')"
    )
    follower = place.follow(groups, standby=where == "standby")
    refill = ["TRUNCATE t", "INSERT INTO t VALUES (7, 'never')", "INSERT INTO other VALUES (7)"]
    # One is the first transaction of the slot, two are adjacent, one is the last.
    run_and_roll_back(place, "first ü", *refill)
    place.connection.execute("INSERT INTO t VALUES (1, 'one')")
    place.connection.execute("BEGIN; INSERT INTO t VALUES (2, 'two'); PREPARE TRANSACTION 'kept'")
    run_and_roll_back(place, "second", "TRUNCATE other", "INSERT INTO other VALUES (7)")
    run_and_roll_back(place, "third", "ALTER TABLE other ALTER id TYPE bigint", "INSERT INTO other VALUES (7)")
    place.connection.execute("COMMIT PREPARED 'kept'")
    place.connection.execute("SELECT pg_logical_emit_message(false, 'others', 'x')")
    run_and_roll_back(place, "last", "TRUNCATE other", "INSERT INTO other VALUES (7)")
    finish = place.write_finish()
    read_error(follower, finish)
    read_catalog(follower.task.node.dsn)
    assert "could not map filenumber" in read_error(follower, finish)

    report = follower.drain_fully(finish)
    assert confirmed_on_its_node(follower) == report.segments[-1].segment.through
    assert follower.state() == place.lines(groups)
    events = [(chr(event["op"]), event["global_id"]) for event in follower.events() if chr(event["op"]) in "PKR"]
    names = ["first ü", "second", "third", "last"]
    expected = [(op, name) for name in names for op in "PR"]
    assert sorted(events) == sorted([*expected, ("P", "kept"), ("K", "kept")])
    ends = {event["global_id"]: event["end_lsn"] for event in follower.events() if chr(event["op"]) == "P"}
    assert {event["lsn"] for event in follower.events() if chr(event["op"]) == "R"} == {ends[name] for name in names}
    # Later transactions are decoded as usual.
    place.connection.execute("INSERT INTO t VALUES (3, 'three')")
    follower.drain_fully(place.write_finish())
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
        run_and_roll_back(place, f"gid {number}", f"TRUNCATE t{number % TABLES}")
        for _ in range(chance.randrange(5, 20)):
            place.connection.execute(f"TRUNCATE t{chance.randrange(TABLES)}".encode())
        with connect(place.primary) as other:
            other.execute("SELECT count(*) FROM public.t1")
        if "could not open relation" in read_error(follower, finish := place.write_finish()):
            break
    else:
        pytest.fail("reading the slot never ended")
    place.connection.execute("INSERT INTO t0 VALUES (2)")
    follower.drain_fully(finish)
    follower.drain_fully(place.write_finish())
    assert follower.state() == place.lines(groups)


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_a_table_whose_identity_was_changed_in_a_savepoint_does_not_end_the_chain(place: Place, where: str) -> None:
    """PostgreSQL describes the table as before the savepoint, and sends its rows as they were written within it."""
    create_one_table(place, "ALTER TABLE t REPLICA IDENTITY FULL", "INSERT INTO t VALUES (1, 'one'), (2, 'two')")
    groups = groups_of(place)
    follower = place.follow(groups, standby=where == "standby")
    place.connection.execute("INSERT INTO t VALUES (3, 'three')")
    run_and_roll_back(place, "forgotten", "ALTER TABLE t REPLICA IDENTITY DEFAULT", "UPDATE t SET v = 'never'")
    read_catalog(follower.task.node.dsn)
    place.connection.execute("UPDATE t SET v = 'more', id = id + 100")
    finish = place.write_finish()
    assert read_error(follower, finish) == ""
    follower.drain_fully(finish)
    assert follower.state() == place.lines(groups)
    events = [chr(event["op"]) for event in follower.events() if event["global_id"] == "forgotten"]
    assert sorted(events) == ["P", "R"]


@pytest.mark.parametrize("rows", [1, 300], ids=["in single rows", "in large transactions"])
def test_what_was_archived_before_a_transaction_that_is_skipped_is_archived_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Segments of the same chunk have been stored when the transaction is met, and the slot has not followed yet."""
    monkeypatch.setattr(drain, "SEGMENT_BYTES_MAX", 20_000)
    monkeypatch.setattr(peek, "BATCH_BYTES", 4_000)
    create_one_table(place, "ALTER TABLE t REPLICA IDENTITY FULL")
    groups = groups_of(place)
    follower = place.follow(groups)
    for first in range(0, 900, rows):
        place.connection.execute(
            f"INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series({first}, {first + rows - 1}) AS n".encode()
        )
    run_and_roll_back(place, "forgotten", "ALTER TABLE t REPLICA IDENTITY DEFAULT", "UPDATE t SET v = 'never'")
    place.connection.execute("INSERT INTO t VALUES (1000, 'last')")
    finish = place.write_finish()
    assert read_error(follower, finish) == ""
    assert len(follower.drain_fully(finish).segments) > 3
    assert follower.state() == place.lines(groups)


def test_copies_are_equal_if_only_one_node_can_decode_a_transaction(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    refill = ["TRUNCATE part", "INSERT INTO part VALUES (7, 'never')"]
    with pair(shared_fleet, spark, tmp_path, "exact", backups=True) as two:
        two.runs.full(NAME)
        two.run_part(1, 1, None)
        execute(two.shards[1], *rollback_statements("gone", *refill))
        read_catalog(two.shards[1])
        two.run_part(2, 1, None)
        two.runs.increment(NAME)
        report = two.runs.check_one(NAME)
        assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_only_a_transaction_known_to_be_rolled_back_may_be_skipped(place: Place, where: str) -> None:
    create_one_table(place)
    xids = {}
    for end in ("COMMIT", "ROLLBACK", "PREPARE TRANSACTION 'open'"):
        place.connection.execute(f"BEGIN; INSERT INTO t VALUES ({len(xids)})".encode())
        (xid,) = place.connection.execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
        xids[end] = int(xid) % XIDS
        place.connection.execute(end.encode())
    node = place.standby if where == "standby" else place.primary
    with connect(node) as connection:
        wait_for_replay(connection, where == "standby", place.write_finish())
    assert [is_rolled_back(node, xid) for xid in xids.values()] == [False, True, False]
    assert not is_rolled_back(node, max(xids.values()) + 100), "that xid has not been assigned yet"


def test_a_readable_slot_has_no_transaction_to_skip(place: Place) -> None:
    follower = place.follow(create_one_table(place))
    task = follower.task
    run_and_roll_back(place, "gone", "INSERT INTO t VALUES (7, 'never')")
    middle = place.write_finish()
    place.connection.execute("INSERT INTO t VALUES (1, 'one')")
    for finish in (middle, place.write_finish()):
        assert find_undecodable(task.node, task.slot, task.publications, Lsn(finish)) is None
    assert confirmed_on_its_node(follower) == task.base


def test_a_slot_is_read_for_longer_than_the_server_waits_for_a_sign_of_life(place: Place) -> None:
    groups = create_one_table(place)
    follower = place.follow(groups)
    rows = 60_000
    place.connection.execute(f"INSERT INTO t SELECT n, 'v' FROM generate_series(1, {rows}) AS n".encode())
    finish, task = place.write_finish(), follower.task
    with closing(connect_replication(task.node, client_encoding=RAW)) as connection:
        connection.execute("SET wal_sender_timeout = '400ms'")
        began, inserts = time.monotonic(), 0
        for message in stream_messages(connection.pgconn, task.slot, task.publications, finish):
            inserts += message[:1] == b"I"
            if inserts % 100 == 0:
                time.sleep(0.002)
        assert time.monotonic() - began > 2 * 0.4
    assert inserts == rows
