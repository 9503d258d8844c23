"""A copy that the server ends is told as what it is, at once; a row that can't be printed is named by table and key."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace

import psycopg
import pytest
from msgspec import structs

from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.programs import ProgramFailedError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.storage.errors import SnapshotError
from tests.chains.tried_chain import Interrupt, Tried, tried
from tests.commands.snapshot_runs import slots_of
from tests.run.soak import SOAK_SECONDS

__all__ = ["tried"]  # the fixture

# Few pages, and 300 MB as COPY prints them.
LARGE = (
    "CREATE TABLE tried.came (id int PRIMARY KEY, t text)",
    "INSERT INTO tried.came SELECT n, repeat('x', 20000000) FROM generate_series(1, 15) AS n",
)
ENDED_SECONDS_MAX = 60
COPIES = "FROM pg_stat_activity WHERE query LIKE 'COPY%came%' AND state = 'active'"
# A dump that waits for a lock while the table is copied.
DUMPS = (
    "FROM pg_stat_activity WHERE application_name LIKE 'cutline pg_dump%' AND wait_event_type = 'Lock'"
    f" AND EXISTS (SELECT {COPIES})"
)


def end_copy(dsn: str, function: str, sessions: str = COPIES) -> threading.Thread:
    """In a thread, call the function for the first of the sessions, by default that which copies the new table."""

    def end() -> None:
        deadline = time.monotonic() + ENDED_SECONDS_MAX
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not connection.execute(f"SELECT {function}(pid) {sessions}".encode()).fetchall():
                assert time.monotonic() < deadline, "nothing was copied"
                time.sleep(0.02)

    thread = threading.Thread(target=end)
    thread.start()
    return thread


def fail(tried: Tried, name: str, *, full: bool = False) -> SnapshotError:
    """Run a create that must fail; return its error. It leaves no slot of its own, and takes nothing for DDL."""
    before = [slots_of(node.dsn) for node in tried.fleet.nodes]
    noting = Noting(Silent())
    with pytest.raises(SnapshotError) as raised:
        (create_full if full else create_increment)(tried.fleet, CreateRequest(name), tried.runs.spark, noting)
    assert [slots_of(node.dsn) for node in tried.fleet.nodes] == before
    assert not any("invalidated by DDL" in note for note in noting.notes), noting.notes
    return raised.value


@pytest.mark.timeout(600)
def test_a_copy_that_an_operator_ends_is_no_ddl(tried: Tried) -> None:
    tried.runs.full(tried.name)
    tried.run(*LARGE)
    dsn = tried.fleet.primaries[0].dsn
    for function, reason in (
        ("pg_cancel_backend", "canceling statement due to user request"),
        # Most often it is ended while it sends, and can't say why.
        ("pg_terminate_backend", "terminating connection due to administrator command|server closed the connection"),
    ):
        ending = end_copy(dsn, function)
        error = fail(tried, tried.name)
        ending.join()
        assert (error.slug, error.exit_code) == ("copy", 6)
        assert re.search(f"copying table tried.came stopped: .*({reason})", error.message), error.message
    tried.increment()
    tried.compare()


@pytest.mark.timeout(600)
def test_a_dump_that_fails_ends_the_copy_at_once(tried: Tried) -> None:
    """With this limit, copying takes five minutes. pg_dump locks a table that the snapshot does not contain, too."""
    tried.run(
        "CREATE TABLE tried.came (id int PRIMARY KEY, t text)",
        "INSERT INTO tried.came SELECT n, repeat('x', 1000000) FROM generate_series(1, 300) AS n",
        "CREATE TABLE tried.held (id int)",
    )
    (node,) = tried.fleet.primaries
    fleet = replace(
        tried.fleet,
        nodes=(replace(node, read_bytes_per_second=1_000_000),),
        groups=structs.replace(tried.fleet.groups, exclude=("tried.held",)),
    )
    before = slots_of(node.dsn)
    with psycopg.connect(node.dsn) as holder:

        def hold() -> None:
            # Creating the slot would wait for the transaction.
            holder.execute("LOCK TABLE tried.held IN ACCESS EXCLUSIVE MODE")

        ending = end_copy(node.dsn, "pg_terminate_backend", DUMPS)
        began = time.monotonic()
        with pytest.raises(ProgramFailedError, match=r"pg_dump exited with code 1: .*terminating connection"):
            create_full(fleet, CreateRequest(tried.name), tried.runs.spark, Interrupt(CrashPoint.SLOT_MADE, hold))
        assert time.monotonic() - began < ENDED_SECONDS_MAX
        ending.join()
    assert slots_of(node.dsn) == before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_full", [True, False])
def test_a_damaged_row_is_named(tried: Tried, *, is_full: bool) -> None:
    if not is_full:
        tried.runs.full(tried.name)
    tried.run(
        "CREATE TYPE tried.mood AS ENUM ('good', 'gone')",
        'CREATE TABLE tried.came (a int, "b c" text, m tried.mood, PRIMARY KEY ("b c", a))',
        r"INSERT INTO tried.came SELECT n, E'x\ty', 'good' FROM generate_series(1, 300) AS n",
        "UPDATE tried.came SET m = 'gone' WHERE a = 251",
        "VACUUM FULL tried.came",
        "SET allow_system_table_mods = on; DELETE FROM pg_enum WHERE enumlabel = 'gone'",
    )
    error = fail(tried, tried.name, full=is_full)
    assert (error.slug, error.exit_code) == ("row-unreadable", 3)
    assert error.message.startswith("node s1")
    assert "table tried.came: PostgreSQL can't print a row for COPY: invalid internal value for enum" in error.message
    assert error.message.endswith(r"(a = 251, b c = x\ty)")
    assert "the row is damaged" in error.hint
    tried.run("DROP TABLE tried.came")
    if not is_full:
        tried.increment()
        tried.compare()


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1; the server needs 2 GB")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_full", [True, False])
def test_a_value_that_copy_cannot_print_is_named(tried: Tried, *, is_full: bool) -> None:
    if not is_full:
        tried.runs.full(tried.name)
    tried.run(
        "CREATE TABLE tried.came (id int PRIMARY KEY, b bytea)",
        "INSERT INTO tried.came VALUES (1, 'small'), (7, convert_to(repeat('x', 550 << 20), 'SQL_ASCII'))",
    )
    error = fail(tried, tried.name, full=is_full)
    assert (error.slug, error.exit_code) == ("row-unreadable", 3)
    assert "invalid memory alloc request size" in error.message
    assert error.message.endswith("(id = 7)")
