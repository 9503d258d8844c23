"""A drain can die anywhere: the next one continues, and the archive has no hole and holds every change exactly once."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from psycopg.conninfo import make_conninfo
from psycopg.pq import ExecStatus

import cutline.wal.drain.drain
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import connect_replication
from cutline.nodes.groups import Group
from cutline.nodes.pinned_settings import PINNED_SETTINGS
from cutline.storage.location import StoreLocation
from cutline.storage.open import open_store
from cutline.storage.store import ObjectStore
from cutline.wal.drain.drain import advance_slot
from tests.integration.wal_follower import Follower
from tests.integration.wal_place import Place, create_one_table, place, shrink_chunks

__all__ = ["place"]  # the fixture

ROWS = """
INSERT INTO t SELECT n, repeat(md5(n::text), 3) FROM generate_series({low}, {high}) n
"""


class CrashError(BaseException):
    """A simulated death of the process."""


class CrashingStore:
    """A store that calls `die` before and after every create."""

    def __init__(self, store: ObjectStore, die: Callable[[str], None]) -> None:
        self._store, self._die = store, die

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, body: bytes) -> None:
        self._die("before a segment")
        self._store.create(key, body)
        self._die("after a segment")


@pytest.fixture(autouse=True, params=["psycopg", "adbc"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read any amount of WAL with psycopg, or with ADBC."""
    monkeypatch.setattr(cutline.wal.drain.drain, "reads_with_psycopg", lambda *_: request.param == "psycopg")


@pytest.fixture
def die_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Make the drain die at the n-th point around its writes; with None, never."""
    left: list[int | None] = [None]

    def die(point: str) -> None:
        if left[0] is not None:
            left[0] -= 1
            if left[0] == 0:
                raise CrashError(point)

    def advance(connection: Any, name: str, through: int) -> None:
        die("before an advance")
        advance_slot(connection, name, Lsn(through))
        die("after an advance")

    def set_point(number: int | None) -> None:
        left[0] = number

    def open_crashing(location: StoreLocation) -> Any:
        return CrashingStore(open_store(location.url, location.options), die)

    monkeypatch.setattr(StoreLocation, "open", open_crashing)
    monkeypatch.setattr(cutline.wal.drain.drain, "advance_slot", advance)
    return set_point


def assert_same_archive(follower: Follower, undisturbed: Follower) -> None:
    """Both archives hold the same changes and events, and each change once."""
    assert lasting_events(follower) == lasting_events(undisturbed)
    assert lasting_changes(follower) == lasting_changes(undisturbed)
    places = [(row["lsn"], row["seq"], row["group"]) for row in follower.changes()]
    assert len(places) == len(set(places))


def lasting_events(follower: Follower) -> list[dict[str, Any]]:
    """All events, without the numbers of changes that were rolled back."""
    rolled_back = {row["lsn"] for row in follower.events() if chr(row["op"]) == "R"}
    return [row | ({"changes": None} if row["end_lsn"] in rolled_back else {}) for row in follower.events()]


def lasting_changes(follower: Follower) -> list[dict[str, Any]]:
    """All changes except those that were rolled back: PostgreSQL can decode only some of these.

    It looks up tables as the transaction saw them, which fails once the transaction is known to be aborted.
    """
    rolled_back = {row["lsn"] for row in follower.events() if chr(row["op"]) == "R"}
    left_out = {row["lsn"] for row in follower.events() if row["end_lsn"] in rolled_back}
    return [row for row in follower.changes() if row["lsn"] not in left_out]


def write_traffic(place: Place) -> None:
    for number in range(6):
        place.connection.execute(ROWS.format(low=number * 10, high=number * 10 + 7).encode())
        place.connection.execute("BEGIN")
        place.connection.execute("UPDATE t SET v = 'x' WHERE id = %s", [number * 10])
        place.connection.execute(f"PREPARE TRANSACTION 'g{number}'".encode())
        if number % 3:
            place.connection.execute(f"COMMIT PREPARED 'g{number}'".encode())
    place.connection.execute("ROLLBACK PREPARED 'g0'")
    place.connection.execute("COMMIT PREPARED 'g3'")


def test_a_chunk_smaller_than_the_transactions_gives_several_segments(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_chunks(monkeypatch, 10)
    groups = create_one_table(place)
    follower = place.follow(groups)
    write_traffic(place)
    report = follower.drain_fully(place.write_finish())
    assert len(report.segments) > 4
    throughs = [one.segment.through for one in report.segments]
    assert throughs == sorted(set(throughs))
    monkeypatch.undo()
    assert [one.segment.number for one in report.segments] == list(range(1, len(throughs) + 1))


def test_a_drain_that_dies_at_any_write_is_continued(
    place: Place, die_at: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = create_one_table(place)
    undisturbed = place.follow(groups)
    once, always = place.follow(groups), place.follow(groups)
    write_traffic(place)
    finish = place.write_finish()
    die_at(None)
    undisturbed.drain_fully(finish)
    shrink_chunks(monkeypatch, 10)
    # It dies at every point that it reaches, one point later each time.
    crashes = die_until_done(always, finish, die_at, range(1, 100))
    assert crashes > 5
    assert_same_archive(always, undisturbed)
    # A drain that dies at its first points again and again does no harm, either.
    die_until_done(once, finish, die_at, [1, 1, 2, 2, 4, 1, 3, 100])
    assert_same_archive(once, undisturbed)


def die_until_done(follower: Follower, finish: int, die_at: Callable[[int | None], None], points: Any) -> int:
    crashes = 0
    for point in points:
        die_at(point)
        try:
            follower.drain_fully(finish)
            break
        except CrashError:
            crashes += 1
    die_at(None)
    follower.drain_fully(finish)
    return crashes


def test_a_drain_that_dies_within_a_large_transaction_is_continued_there(
    place: Place, die_at: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = create_one_table(place, "CREATE TABLE other (v text)", "ALTER TABLE other REPLICA IDENTITY FULL")
    undisturbed, follower = place.follow(groups), place.follow(groups)
    place.connection.execute("INSERT INTO t VALUES (-1, 'before')")
    place.connection.execute("BEGIN")
    for low, high in ((1, 25), (26, 50)):
        # Small on the server, large when decoded: several batches of about 4 MB.
        rows = f"INSERT INTO t SELECT n, repeat(md5(n::text), 30000) FROM generate_series({low}, {high}) n"
        place.connection.execute(rows.encode())
        place.connection.execute("INSERT INTO other VALUES ('between')")
        place.connection.execute("UPDATE t SET id = -id * 100 WHERE id % 7 = 0")
    place.connection.execute("PREPARE TRANSACTION 'giant'")
    place.connection.execute("INSERT INTO t VALUES (-2, 'after')")
    finish = place.write_finish()
    die_at(None)
    monkeypatch.setattr(cutline.wal.drain.drain, "SEGMENT_BYTES_MAX", 1 << 30)
    assert len(undisturbed.drain_fully(finish).segments) == 1
    monkeypatch.setattr(cutline.wal.drain.drain, "SEGMENT_BYTES_MAX", 1 << 20)
    # It dies after its first and after its second segment, both in the middle of the transaction.
    die_at(2)
    with pytest.raises(CrashError):
        follower.drain(finish)
    assert len(follower.changes()) < len(undisturbed.changes())
    die_at(5)
    with pytest.raises(CrashError):
        follower.drain(finish)
    die_at(None)
    report = follower.drain_fully(finish)
    opened = [one.segment.open for one in report.segments]
    assert len([one for one in opened if one]) >= 2
    assert opened[-1] is None
    assert_same_archive(follower, undisturbed)
    place.connection.execute("COMMIT PREPARED 'giant'")
    finish = place.write_finish()
    follower.drain_fully(finish)
    assert follower.state() == place.lines(groups)


def test_a_slot_that_another_client_advances_before_the_drain_does_is_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = place.follow(create_one_table(place))
    place.connection.execute("INSERT INTO t VALUES (1)")
    finish = place.write_finish()
    place.connection.execute("INSERT INTO t VALUES (2)")

    def advance_after_another(connection: Any, name: str, through: int) -> None:
        connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [name])
        advance_slot(connection, name, Lsn(through))

    monkeypatch.setattr(cutline.wal.drain.drain, "advance_slot", advance_after_another)
    report = follower.drain(finish)
    assert report.problem is not None
    assert report.problem["slug"] == "slot-lost"


def test_a_slot_that_another_session_reads_is_named_and_drained_later(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = place.follow(create_one_table(place))
    place.connection.execute("INSERT INTO t VALUES (1)")
    finish = place.write_finish()
    monkeypatch.setattr(cutline.wal.drain.drain, "SLOT_IN_USE_SECONDS_MAX", 0.5)
    with closing(connect_replication(follower.task.node)) as reader:
        names = ",".join(f'"{name}"' for name in follower.task.publications)
        options = f"proto_version '3', publication_names '{names}'"
        command = f'START_REPLICATION SLOT "{follower.task.slot}" LOGICAL 0/0 ({options})'
        assert reader.pgconn.exec_(command.encode()).status == ExecStatus.COPY_BOTH
        report = follower.drain(finish)
    assert report.problem is not None
    assert (report.problem["slug"], report.problem["exit_code"]) == ("slot-in-use", 7)
    assert follower.task.slot in report.problem["message"]
    monkeypatch.undo()
    follower.drain_fully(finish)
    assert len(follower.changes()) == 1


def limit_temporary_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the messages of a transaction above a megabyte exceed the limit of the database's sessions."""
    place.connection.execute(f"ALTER DATABASE {place.connection.info.dbname} SET temp_file_limit = '1MB'".encode())
    monkeypatch.setitem(PINNED_SETTINGS, "work_mem", "64kB")


def write_above_limit(place: Place, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Group], Follower]:
    """Write a transaction that the server can decode only with a temporary file above its limit."""
    groups = create_one_table(place)
    follower = place.follow(groups)
    limit_temporary_files(place, monkeypatch)
    place.connection.execute(ROWS.format(low=1, high=20_000).encode())
    return groups, follower


def test_a_transaction_above_the_limit_on_temporary_files_is_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, follower = write_above_limit(place, monkeypatch)
    follower.drain_fully(place.write_finish())
    assert follower.state() == place.lines(groups)


def test_a_role_that_may_not_lift_the_limit_on_temporary_files_is_told_how(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, follower = write_above_limit(place, monkeypatch)
    finish, role = place.write_finish(), place.connection.info.dbname
    place.connection.execute(f"CREATE ROLE {role} LOGIN REPLICATION".encode())
    try:
        dsn = make_conninfo(follower.task.node.dsn, user=role)
        follower.task = structs.replace(follower.task, node=replace(follower.task.node, dsn=dsn))
        report = follower.drain(finish)
        assert report.problem is not None
        assert "temp_file_limit" in report.problem["message"]
        (grant,) = re.findall("GRANT SET ON PARAMETER temp_file_limit TO [^;]+", report.problem["hint"])
        place.connection.execute(grant.encode())
        follower.drain_fully(finish)
        assert follower.state() == place.lines(groups)
    finally:
        place.connection.execute(f"DROP OWNED BY {role}".encode())
        place.connection.execute(f"DROP ROLE {role}".encode())


def test_a_drain_that_another_one_overtakes_continues_where_that_one_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_chunks(monkeypatch, 10)
    groups = create_one_table(place)
    undisturbed, follower = place.follow(groups), place.follow(groups)
    place.connection.execute(ROWS.format(low=1000, high=1020).encode())
    halfway = place.write_finish()
    write_traffic(place)
    finish = place.write_finish()
    undisturbed.drain_fully(finish)
    rival = Follower(follower.task, follower.groups, follower.base)
    points: list[str] = []

    def overtake(point: str) -> None:
        points.append(point)
        if len(points) == 1:
            rival.drain_fully(halfway)
        elif points.count("after a segment") == 2:
            # The drain is about to advance the slot, but its rival has already advanced it further.
            points.append("overtaken")
            rival.drain_fully(finish)

    stores = iter([lambda store: CrashingStore(store, overtake)])

    def open_crashing(location: StoreLocation) -> Any:
        return next(stores, lambda store: store)(open_store(location.url, location.options))

    monkeypatch.setattr(StoreLocation, "open", open_crashing)
    report = follower.drain_fully(finish)
    assert points.count("overtaken") == 1
    assert report.segments == rival.reports[-1].segments
    assert_same_archive(follower, undisturbed)
