"""Decoding, compared with PostgreSQL: base and decoded changes fold to what PostgreSQL's own COPY prints at the end."""

from __future__ import annotations

import random
import threading
import time

import pytest
from msgspec import structs
from msgspec.structs import replace

import cutline.wal.drain.drain
from cutline.nodes.connections import connect
from cutline.wal.cut.markers import Marker, marker_from_bytes
from cutline.wal.drain.slots import drop_slot
from cutline.wal.segments.archive import Definition
from tests.integration.wal_follower import Follower
from tests.integration.wal_place import Place, create_one_table, groups_of, place, shrink_chunks
from tests.run.soak import SEED, SOAK_SECONDS
from tests.tables.random_tables import Traffic, create_tables
from tests.wal.markers import write_marker

__all__ = ["place"]  # the fixture


# A round takes some ten seconds.
@pytest.mark.parametrize("round_", range(1 + SOAK_SECONDS // 10))
def test_base_and_changes_fold_to_postgresqls_own_copy(place: Place, round_: int) -> None:
    seed = SEED + round_
    print(f"CUTLINE_SEED={seed}")  # noqa: T201  # shown when the test fails
    source = random.Random(seed)
    traffic = Traffic(place.connection, create_tables(place.connection, source), source)
    traffic.run(80)
    traffic.finish()
    groups = groups_of(place)
    assert set(groups) > {"public.types", 'od d."Ta""ble"', "public.low", "public.no_columns"}
    followers = [place.follow(groups), place.follow(groups, standby=True)]
    before = traffic.done
    traffic.done = type(before)()
    traffic.run(150)
    # Drain once in the middle, while transactions are prepared.
    for follower in followers:
        follower.drain_fully(place.write_finish())
    traffic.run(150)
    traffic.finish()
    finish = place.write_finish()
    now = place.lines(groups)
    assert sum(map(len, now.values())) > 20
    for follower in followers:
        follower.drain_fully(finish)
        state = follower.state()
        for name in groups:
            assert state[name] == now[name], name
    assert {chr(row["op"]) for row in followers[0].changes()} == set("IUuDT")
    assert_events_match(followers[0], traffic)
    late = max(follower.task.base for follower in followers)
    rolled_back = {row["lsn"] for row in followers[0].events() if chr(row["op"]) == "R"}
    left_out = {row["lsn"] for row in followers[0].events() if row["end_lsn"] in rolled_back}
    of_both = [[row for row in one.changes() if row["lsn"] >= late and row["lsn"] not in left_out] for one in followers]
    assert of_both[0] == of_both[1]


def assert_events_match(follower: Follower, traffic: Traffic) -> None:
    """Every commit, PREPARE, COMMIT PREPARED and ROLLBACK PREPARED is archived once, where it was executed."""
    events = follower.events()
    prepare_ends = {row["end_lsn"]: row["global_id"] for row in events if chr(row["op"]) == "P"}
    done = traffic.done
    for op, expected in (
        ("C", done.commits), ("P", done.prepares), ("K", done.commits_prepared), ("R", done.rollbacks_prepared),
    ):  # fmt: skip
        found = [row for row in events if chr(row["op"]) == op]
        names = [row["xid"] if op == "C" else row["global_id"] for row in found]
        if op == "C":
            assert sorted(names) == sorted(expected)
        else:
            # PostgreSQL sends nothing for a prepared transaction that changed nothing at all.
            assert done.changed & set(expected) <= set(names) <= set(expected), op
            assert sorted(names) == sorted(set(expected) & set(prepare_ends.values())), op
        for name, row in zip(names, found, strict=True):
            low, high = expected[name]
            assert low < row["end_lsn"] <= high
            if op == "R":
                assert prepare_ends[row["lsn"]] == name
            else:
                assert low <= row["lsn"] < row["end_lsn"]


def test_every_copy_line_is_escaped_as_postgresql_escapes_it(place: Place) -> None:
    groups = create_one_table(place)
    follower = place.follow(groups)
    texts = [chr(code) for code in range(1, 128)] + [f"a{chr(code)}b\\{chr(code)}" for code in range(1, 128)]
    with place.connection.cursor() as cursor:
        cursor.executemany("INSERT INTO t VALUES (%s, %s)", list(enumerate([*texts, "", "\\N", "\\u", "ü€𝄞"])))
    follower.drain_fully(place.write_finish())
    assert sorted(change["row"] for change in follower.changes()) == place.lines(groups)["public.t"]


def test_markers_are_decoded_at_the_position_where_they_were_written(place: Place) -> None:
    follower = place.follow(create_one_table(place))
    markers = [Marker("chain ü", str(number), "start") for number in range(3)]
    written = {}
    for marker in markers:
        place.connection.execute("INSERT INTO t VALUES (%s)", [len(written)])
        written[marker] = write_marker(place.connection, marker)
    place.connection.execute("SELECT pg_logical_emit_message(true, 'cutline', 'no json')")
    follower.drain_fully(place.write_finish())
    found = [row for row in follower.events() if chr(row["op"]) == "M"]
    assert len(found) == 5
    assert {marker_from_bytes(row["row"]): row["lsn"] for row in found[:3]} == written
    commits = [row["end_lsn"] for row in follower.events() if chr(row["op"]) == "C"]
    for end, position in zip(commits, written.values(), strict=False):
        assert end < position


def test_append_only_tables_may_still_be_updated(place: Place) -> None:
    place.connection.execute("CREATE TABLE append_only (v integer)")
    groups = groups_of(place)
    follower = place.follow(groups)
    place.connection.execute("INSERT INTO append_only VALUES (1), (2)")
    place.connection.execute("UPDATE append_only SET v = 3 WHERE v = 2")
    place.connection.execute("DELETE FROM append_only WHERE v = 3")
    follower.drain_fully(place.write_finish())
    assert follower.state() == {"public.append_only": [b"1\n", b"2\n"]}


def test_a_transaction_prepared_during_slot_creation_is_decoded_at_its_commit(place: Place) -> None:
    """PostgreSQL decodes a PREPARE before the slot's position only at its COMMIT PREPARED."""
    groups = create_one_table(place)
    with connect(place.primary) as first, connect(place.primary) as second:
        first.execute("BEGIN; SELECT pg_current_xact_id()")
        followers: list[Follower] = []
        thread = threading.Thread(target=lambda: followers.append(place.follow(groups)))
        thread.start()
        wait_for_lock(place, 1)
        second.execute("BEGIN; SELECT pg_current_xact_id()")
        first.execute("COMMIT")
        wait_for_lock(place, 1)
        place.connection.execute("BEGIN; INSERT INTO t VALUES (1, 'one'); PREPARE TRANSACTION 'between'")
        second.execute("COMMIT")
        thread.join(60)
    (follower,) = followers
    place.connection.execute("INSERT INTO t VALUES (2, 'two')")
    place.connection.execute("COMMIT PREPARED 'between'")
    follower.drain_fully(place.write_finish())
    assert follower.changes()[0]["lsn"] < follower.task.base, "its PREPARE is not before the slot's position"
    assert follower.state() == place.lines(groups)


def wait_for_lock(place: Place, waiting: int) -> None:
    query = "SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted"
    deadline = time.monotonic() + 20
    while (place.connection.execute(query).fetchone() or (0,))[0] != waiting:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)


def test_a_changed_table_is_named(place: Place) -> None:
    follower = place.follow(create_one_table(place))
    place.connection.execute("INSERT INTO t VALUES (1)")
    place.connection.execute("ALTER TABLE t ADD COLUMN late integer")
    before = follower.drain_fully(place.write_finish())
    place.connection.execute("INSERT INTO t VALUES (2)")
    report = follower.drain(place.write_finish())
    assert report.problem is not None
    assert report.problem["slug"] == "schema-moved"
    assert report.problem["details"]["group"] == "public.t"
    # No change under the new definition was stored, and the slot stays at the archive's end.
    assert len(follower.rows()) == sum(one.segment.changes + one.segment.events for one in before.segments)
    assert confirmed_on_primary(place, follower) == before.segments[-1].segment.through


def test_every_change_is_decoded_under_the_definition_that_it_was_made_under(place: Place) -> None:
    (old,) = create_one_table(place).values()
    follower = place.follow({"public.t": old})
    (oid,) = place.connection.execute("SELECT 't'::regclass::oid::bigint").fetchone() or (0,)
    place.connection.execute("INSERT INTO t VALUES (1)")
    place.connection.execute("BEGIN; INSERT INTO t VALUES (2); ALTER TABLE t ADD late integer; TRUNCATE t;"
                             "INSERT INTO t VALUES (3, 'x', 4); COMMIT")  # fmt: skip
    place.connection.execute("BEGIN; SAVEPOINT s; ALTER TABLE t DROP v; INSERT INTO t VALUES (5, 6); ROLLBACK TO s;"
                             "INSERT INTO t VALUES (7, 'y', 8); COMMIT")  # fmt: skip
    place.connection.execute("ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (9)")
    place.connection.execute("ALTER TABLE u RENAME TO t; INSERT INTO t VALUES (10)")
    (new,) = groups_of(place).values()
    new = structs.replace(new, number=2)
    follower.task = replace(follower.task, definitions=(Definition(oid, old), Definition(oid, new)))
    report = follower.drain(place.write_finish())
    assert report.problem is not None
    moved = {"node": follower.task.node.id, "group": "public.t", "oid": oid}
    assert report.problem["details"] == {**moved, "moved": [moved]}
    follower.task = replace(
        follower.task,
        definitions=(*follower.task.definitions, Definition(oid, structs.replace(new, table="u", number=3))),
    )
    follower.drain_fully(place.write_finish())
    found = [(chr(row["op"]), row["group"], row["row"]) for row in follower.changes()]
    assert found == [
        ("U", 1, b"1\t\\N\n"), ("U", 1, b"2\t\\N\n"), ("T", 2, b""), ("U", 2, b"3\tx\t4\n"),
        ("U", 2, b"7\ty\t8\n"), ("U", 3, b"9\t\\N\t\\N\n"), ("U", 2, b"10\t\\N\t\\N\n"),
    ]  # fmt: skip


def confirmed_on_primary(place: Place, follower: Follower) -> int:
    state = cutline.wal.drain.drain.slot_state(place.connection, follower.task.slot)
    assert state is not None
    return state.confirmed


def test_a_slot_that_another_client_has_advanced_is_refused(place: Place) -> None:
    groups = create_one_table(place)
    follower = place.follow(groups)
    place.connection.execute("INSERT INTO t VALUES (1)")
    query = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())"
    place.connection.execute(query, [follower.task.slot])
    report = follower.drain(place.write_finish())
    assert report.problem is not None
    assert report.problem["slug"] == "slot-lost"
    assert follower.rows() == []


def test_a_dropped_slot_is_reported_as_lost(place: Place) -> None:
    groups = create_one_table(place)
    follower = place.follow(groups)
    place.connection.execute("INSERT INTO t VALUES (1)")
    assert drop_slot(place.primary, follower.task.slot)
    report = follower.drain(place.write_finish())
    assert report.problem is not None
    assert report.problem["slug"] == "slot-lost"


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_a_drain_advances_over_wal_that_has_only_other_programs_messages(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    shrink_chunks(monkeypatch, 10)
    follower = place.follow(create_one_table(place), standby=where == "standby")
    place.connection.execute("SELECT pg_logical_emit_message(n % 2 = 0, 'others', 'x') FROM generate_series(1, 65) n")
    report = follower.drain_fully(place.write_finish())
    assert len(report.segments) >= 4
    assert follower.changes() == []
    assert confirmed_on_its_node(follower) == report.segments[-1].segment.through
    # Such segments have all the metadata that the next drain needs.
    place.connection.execute("INSERT INTO t VALUES (1)")
    assert len(follower.drain_fully(place.write_finish()).segments) > len(report.segments)


def confirmed_on_its_node(follower: Follower) -> int:
    with connect(follower.task.node) as connection:
        state = cutline.wal.drain.drain.slot_state(connection, follower.task.slot)
        assert state is not None
        return state.confirmed
