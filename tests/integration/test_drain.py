"""Draining that dies anywhere goes on without a hole, and holds every change exactly once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import wal.drain.drain
from columns.bytes_column import from_list
from fleet.config import Node
from fleet.lsn import Lsn
from storage.location import StoreLocation
from storage.open import open_store
from storage.store import ObjectStore
from tests import pgoutput_messages as made
from tests.integration.wal_follower import Follower
from tests.integration.wal_place import Place, one_table, place, small_chunks
from wal.drain.drain import advance_slot

__all__ = ["place"]  # the fixture

ROWS = """
INSERT INTO t SELECT n, repeat(md5(n::text), 3) FROM generate_series({low}, {high}) n
"""


class CrashError(BaseException):
    """The process dies here."""


class CrashingStore:
    """A store whose n-th create dies: before it, or after it."""

    def __init__(self, store: ObjectStore, die: Callable[[str], None]) -> None:
        self._store, self._die = store, die

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, body: bytes) -> None:
        self._die("before a segment")
        self._store.create(key, body)
        self._die("after a segment")


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Let the drain die at the n-th point around its writes; never, without a number."""
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

    def opened(location: StoreLocation) -> Any:
        return CrashingStore(open_store(location.url, location.options), die)

    monkeypatch.setattr(StoreLocation, "open", opened)
    monkeypatch.setattr(wal.drain.drain, "advance_slot", advance)
    return set_point


def same_archive(follower: Follower, undisturbed: Follower) -> None:
    """Both hold the same changes and events, each once; the one has no hole."""
    assert follower.events() == undisturbed.events()
    assert lasting(follower) == lasting(undisturbed)
    places = [(row["lsn"], row["seq"], row["group"]) for row in follower.changes()]
    assert len(places) == len(set(places))


def lasting(follower: Follower) -> list[dict[str, Any]]:
    """The changes but those that were rolled back: of these PostgreSQL sends only what it still can.

    It looks tables up as the transaction saw them, which fails once that is known to be aborted.
    """
    undone = {row["lsn"] for row in follower.events() if chr(row["op"]) == "R"}
    left_out = {row["lsn"] for row in follower.events() if row["end_lsn"] in undone}
    return [row for row in follower.changes() if row["lsn"] not in left_out]


def some_traffic(place: Place) -> None:
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
    small_chunks(monkeypatch, 10)
    groups = one_table(place)
    follower = place.follow(groups)
    some_traffic(place)
    report = follower.drained(place.finish())
    assert len(report.segments) > 4
    throughs = [one.segment.through for one in report.segments]
    assert throughs == sorted(set(throughs))
    monkeypatch.undo()
    assert [one.segment.number for one in report.segments] == list(range(1, len(throughs) + 1))


def test_a_drain_that_dies_at_any_write_is_continued(
    place: Place, dying: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = one_table(place)
    undisturbed = place.follow(groups)
    once, always = place.follow(groups), place.follow(groups)
    some_traffic(place)
    finish = place.finish()
    dying(None)
    undisturbed.drained(finish)
    small_chunks(monkeypatch, 10)
    # It dies at every point that it gets to, each time one further on.
    crashes = die_until_done(always, finish, dying, range(1, 100))
    assert crashes > 5
    same_archive(always, undisturbed)
    # And a drain that dies at its first point over and over still never does harm.
    die_until_done(once, finish, dying, [1, 1, 2, 2, 4, 1, 3, 100])
    same_archive(once, undisturbed)


def die_until_done(follower: Follower, finish: int, dying: Callable[[int | None], None], points: Any) -> int:
    crashes = 0
    for point in points:
        dying(point)
        try:
            follower.drained(finish)
            break
        except CrashError:
            crashes += 1
    dying(None)
    follower.drained(finish)
    return crashes


def test_a_transaction_larger_than_a_segment_is_continued_within(
    place: Place, dying: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = one_table(place, "CREATE TABLE other (v text)", "ALTER TABLE other REPLICA IDENTITY FULL")
    undisturbed, follower = place.follow(groups), place.follow(groups)
    place.connection.execute("INSERT INTO t VALUES (-1, 'before')")
    place.connection.execute("BEGIN")
    for low, high in ((1, 25), (26, 50)):
        # Small on the server, wide when decoded: several batches of some 16 MB.
        rows = f"INSERT INTO t SELECT n, repeat(md5(n::text), 30000) FROM generate_series({low}, {high}) n"
        place.connection.execute(rows.encode())
        place.connection.execute("INSERT INTO other VALUES ('between')")
        place.connection.execute("UPDATE t SET id = -id * 100 WHERE id % 7 = 0")
    place.connection.execute("PREPARE TRANSACTION 'giant'")
    place.connection.execute("INSERT INTO t VALUES (-2, 'after')")
    finish = place.finish()
    dying(None)
    assert len(undisturbed.drained(finish).segments) == 1
    monkeypatch.setattr(wal.drain.drain, "SEGMENT_BYTES_MAX", 1 << 20)
    # After its first segment and after its second, in the middle of the transaction.
    dying(2)
    with pytest.raises(CrashError):
        follower.drain(finish)
    assert len(follower.changes()) < len(undisturbed.changes())
    dying(5)
    with pytest.raises(CrashError):
        follower.drain(finish)
    dying(None)
    report = follower.drained(finish)
    opened = [one.segment.open for one in report.segments]
    assert len([one for one in opened if one]) >= 2
    assert opened[-1] is None
    same_archive(follower, undisturbed)
    place.connection.execute("COMMIT PREPARED 'giant'")
    finish = place.finish()
    follower.drained(finish)
    assert follower.state() == place.lines(groups)


def test_a_slot_moved_between_segment_and_advance_is_lost(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = place.follow(one_table(place))
    place.connection.execute("INSERT INTO t VALUES (1)")
    finish = place.finish()
    place.connection.execute("INSERT INTO t VALUES (2)")

    def overtaken(connection: Any, name: str, through: int) -> None:
        connection.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [name])
        advance_slot(connection, name, Lsn(through))

    monkeypatch.setattr(wal.drain.drain, "advance_slot", overtaken)
    report = follower.drain(finish)
    assert report.problem is not None
    assert report.problem["slug"] == "slot-lost"


def test_a_drain_that_another_has_overtaken_goes_on_where_that_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, 10)
    groups = one_table(place)
    undisturbed, follower = place.follow(groups), place.follow(groups)
    place.connection.execute(ROWS.format(low=1000, high=1020).encode())
    halfway = place.finish()
    some_traffic(place)
    finish = place.finish()
    undisturbed.drained(finish)
    rival = Follower(follower.task, follower.groups, follower.base)
    points: list[str] = []

    def overtake(point: str) -> None:
        points.append(point)
        if len(points) == 1:
            rival.drained(halfway)
        elif points.count("after a segment") == 2:
            # It would advance the slot now, and the other has done so already, and further.
            points.append("overtaken")
            rival.drained(finish)

    stores = iter([lambda store: CrashingStore(store, overtake)])

    def opened(location: StoreLocation) -> Any:
        return next(stores, lambda store: store)(open_store(location.url, location.options))

    monkeypatch.setattr(StoreLocation, "open", opened)
    report = follower.drained(finish)
    assert points.count("overtaken") == 1
    assert report.segments == rival.reports[-1].segments
    same_archive(follower, undisturbed)


def test_a_segment_of_other_definitions_than_those_planned_is_anothers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal.drain.drain, "SLOT_IN_USE_SECONDS_MAX", 0.2)
    follower = place.follow(one_table(place))
    (unlisted,) = follower.task.definitions
    rival = Follower(
        replace(follower.task, unlisted_numbers=frozenset({unlisted.group.number})), follower.groups, follower.base
    )
    place.connection.execute("INSERT INTO t VALUES (1)")
    (archived,) = rival.drained(place.finish()).segments
    assert archived.definitions == (unlisted,)
    assert list(archived.first_changes) == [unlisted.group.number]
    place.connection.execute("INSERT INTO t VALUES (2)")
    report = follower.drain(place.finish())
    assert report.problem is not None
    assert report.problem["slug"] == "drain-busy"
    # Who has read it first knows what it was begun with.
    follower.task = replace(follower.task, planned=archived.segment.number)
    assert len(follower.drained(place.finish()).segments) == 2
    assert follower.state() == place.lines(follower.groups)


def without_end(messages: list[bytes], _: int) -> list[bytes]:
    return messages[: max(place for place, message in enumerate(messages) if message[:1] == b"C")]


def past_what_was_asked(messages: list[bytes], finish: int) -> list[bytes]:
    return [*messages, made.message(finish + 8, "others", b"")]


def mixed(messages: list[bytes], _: int) -> list[bytes]:
    """The second row has the end of the first."""
    first, second = [place for place, message in enumerate(messages) if message[:1] == b"I"]
    return [*messages[:second], messages[second][:-4] + messages[first][-9:], *messages[second + 1 :]]


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (without_end, r"end within the transaction at \w+/\w+"),
        (past_what_was_asked, r"up to \w+/\w+, but was read only up to"),
        (mixed, r"message 4 of its slot \(\d+ bytes, in the transaction at \w+/\w+\) is invalid: a row"),
    ],
)
def test_of_what_is_not_decoded_as_it_should_be_nothing_is_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch, alter: Callable[[list[bytes], int], list[bytes]], said: str
) -> None:
    follower = place.follow(one_table(place))
    place.connection.execute("INSERT INTO t VALUES (1, 'one'), (2, 'another')")
    finish = place.finish()
    peek = wal.drain.drain.peek

    def altered(node: Node, slot: str, publications: tuple[str, ...], finish: int, messages_max: int) -> Iterator[Any]:
        messages = [
            one for part in peek(node, slot, publications, Lsn(finish), messages_max) for one in part.to_pylist()
        ]
        yield from_list(alter(messages, finish)).to_arrow()

    monkeypatch.setattr(wal.drain.drain, "peek", altered)
    report = follower.drain(finish)
    assert report.problem is not None
    assert report.problem["slug"] == "decoding"
    assert report.problem["message"].startswith(f"node {follower.task.node.id}: ")
    assert re.search(said, report.problem["message"])
    assert follower.rows() == []
    monkeypatch.undo()
    follower.drained(finish)
    assert follower.state() == place.lines(follower.groups)
