"""While a slot waits, the command says what for; it gives up in time, and leaves nothing behind."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.fleet.wait_notes as wait_notes
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node, load_fleet
from cutline.fleet.progress import Progress, Silent
from cutline.nodes.connections import with_database
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.create.absent_copies import find_spare
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.open_transactions import SlotSnapshotError, SlotWaitError, too_large_error
from cutline.wal.drain.slots import create_exported_slot, drop_slot
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, names_of_snapshots, slots_of
from tests.integration.refusing import execute
from tests.servers.dealt import standbys_decode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLOT = "cutline_waits"
GID = "it's a gid"
WAIT_SECONDS_MAX = 30
# The shortest wait that a slot is given.
GIVEN_UP_SECONDS = 2.0


class Notes(Silent):
    """Keeps the notes that a user would see, and their times."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.times: list[float] = []

    def note(self, text: str) -> None:
        self.texts.append(text)
        self.times.append(time.monotonic())


@pytest.fixture(autouse=True)
def early_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notes, "NOTE_SECONDS", 0.3)


@pytest.fixture(scope="module")
def fleet(shared_fleet: EmbeddedFleet) -> Fleet:
    return load_fleet(shared_fleet.fleet_toml)


@contextmanager
def open_transaction(node: Node, database: str, options: str = "") -> Iterator[int]:
    """Keep a transaction open that has changed something in a database of the node; yield its server process."""
    dsn = with_database(node, database).dsn
    with psycopg.connect(dsn, application_name="payroll", options=options) as connection:
        connection.execute("CREATE TEMP TABLE changed (id int)")
        yield connection.info.backend_pid
        connection.rollback()


@contextmanager
def prepared(node: Node, gid: str) -> Iterator[None]:
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("UPDATE account SET balance = balance WHERE id = 1")
        connection.execute(psycopg.sql.SQL("PREPARE TRANSACTION {}").format(gid))
        try:
            yield
        finally:
            if gid in gids(node):
                connection.execute(psycopg.sql.SQL("ROLLBACK PREPARED {}").format(gid))


def gids(node: Node) -> list[str]:
    with psycopg.connect(node.dsn) as connection:
        return [row[0] for row in connection.execute("SELECT gid FROM pg_prepared_xacts")]


def slots_and_sessions_left(node: Node) -> list[tuple[Any, ...]]:
    """Return the slots and sessions of Cutline that a node still has after a while."""
    query = """
        SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'
        UNION ALL SELECT backend_type FROM pg_stat_activity WHERE application_name LIKE 'cutline%'
        """
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        with psycopg.connect(node.dsn) as connection:
            found = connection.execute(query).fetchall()
        # A session ends on its server a moment after its client.
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def create_in_background(node: Node, primary: Node, seconds_max: float, notes: Progress) -> Any:
    threads = ThreadPoolExecutor(max_workers=1)
    future = threads.submit(create_exported_slot, node, primary, SLOT, seconds_max, notes)
    threads.shutdown(wait=False)
    return future


@pytest.mark.parametrize("where", ["s1", *(["s1-b1"] if standbys_decode() else [])])
def test_a_slot_that_is_given_up_names_everything_it_waits_for(fleet: Fleet, where: str) -> None:
    """Transactions of another database count too, and those of the primary for a standby's slot."""
    primary, notes = fleet.node("s1"), Notes()
    with open_transaction(primary, "postgres") as process, prepared(primary, GID):
        began = time.monotonic()
        with pytest.raises(SlotWaitError) as raised:
            create_exported_slot(fleet.node(where), primary, SLOT, GIVEN_UP_SECONDS, notes)
        waited = time.monotonic() - began
    error = raised.value
    assert GIVEN_UP_SECONDS <= waited < 15
    assert (error.exit_code, error.slug, error.details["node"]) == (3, "slot-wait", where)

    transactions: Any = error.details["transactions"]
    by_kind = {one["kind"]: one for one in transactions}
    assert set(by_kind) == {"process", "prepared"}
    running = by_kind["process"]
    assert (running["pid"], running["application"], running["database"], running["state"], running["node"]) == (
        process, "payroll", "postgres", "idle in transaction", "s1",
    )  # fmt: skip
    assert (by_kind["prepared"]["gid"], by_kind["prepared"]["database"]) == (GID, "bank")
    assert all(GIVEN_UP_SECONDS - 1 <= one["age_seconds"] < waited + 5 and one["user"] for one in transactions)

    # The note came as soon as the wait was long, and only once, because nothing changed. So early, a standby may be
    # behind, too, which is a note of its own.
    (note,) = [one for one in notes.texts if " waits for node s1: " in one]
    assert notes.times[0] - began < GIVEN_UP_SECONDS
    for text in (note, error.message):
        assert f"process {process} (idle in transaction, application payroll)" in text
        assert "prepared transaction 'it''s a gid'" in text
    for node in (fleet.node(where), primary):
        assert slots_and_sessions_left(node) == []


def test_a_transaction_whose_age_the_server_does_not_show_is_named_without_it(fleet: Fleet) -> None:
    primary, notes = fleet.node("s1"), Notes()
    with open_transaction(primary, "postgres", "-c track_activities=off") as process:
        waiting = create_in_background(primary, primary, GIVEN_UP_SECONDS, notes)
        with pytest.raises(SlotWaitError) as raised:
            waiting.result(WAIT_SECONDS_MAX)
    text = f"process {process} (disabled, application payroll), of unknown age, of postgres in database postgres"
    assert text in raised.value.message
    assert any(text in note for note in notes.texts)
    transactions: Any = raised.value.details["transactions"]
    (transaction,) = transactions
    assert (transaction["pid"], transaction["age_seconds"]) == (process, None)
    assert slots_and_sessions_left(primary) == []


def test_a_wait_for_a_slot_ends_if_it_can_not_be_reported(fleet: Fleet) -> None:
    class Unheard(Silent):
        def note(self, text: str) -> None:
            raise BrokenPipeError("nobody reads the notes")

    primary = fleet.node("s1")
    with open_transaction(primary, "bank"):
        waiting = create_in_background(primary, primary, 600, Unheard())
        with pytest.raises(BrokenPipeError):
            waiting.result(WAIT_SECONDS_MAX)
    assert slots_and_sessions_left(primary) == []


def test_the_note_is_repeated_when_the_awaited_transactions_change(fleet: Fleet) -> None:
    primary, notes = fleet.node("s1"), Notes()
    with prepared(primary, GID):
        with open_transaction(primary, "bank") as process:
            future = create_in_background(primary, primary, 30, notes)
            await_notes(notes, 1)
        await_notes(notes, 2)
    future.result(timeout=WAIT_SECONDS_MAX).connection.close()
    assert drop_slot(primary, SLOT)
    assert f"process {process}" in notes.texts[0]
    assert f"process {process}" not in notes.texts[1]
    assert all("it''s a gid" in text for text in notes.texts[:2])


def test_a_transaction_that_began_during_the_wait_is_noted_once_it_is_awaited(fleet: Fleet) -> None:
    primary, notes = fleet.node("s1"), Notes()
    with open_transaction(primary, "bank") as first:
        future = create_in_background(primary, primary, 30, notes)
        await_notes(notes, 1)
        later = open_transaction(primary, "postgres")
        second = later.__enter__()
    await_notes(notes, 2)
    later.__exit__(None, None, None)
    future.result(timeout=WAIT_SECONDS_MAX).connection.close()
    assert drop_slot(primary, SLOT)
    assert f"process {first}" in notes.texts[0]
    assert f"process {second}" not in notes.texts[0]
    assert f"process {second}" in notes.texts[-1]


# More than a snapshot can name on any server of the tests.
ROLLED_BACK = """
DO $$ BEGIN
    FOR number IN 1..2000 LOOP
        BEGIN
            INSERT INTO changed VALUES (number);
            RAISE EXCEPTION 'rolled back';
        EXCEPTION WHEN raise_exception THEN
        END;
    END LOOP;
END $$
"""


@contextmanager
def crowded(primary: Node, create: Callable[[], Any]) -> Iterator[tuple[Any, int]]:
    """Call `create` in a thread and let the server find its snapshot too large.

    Yield the call's future and the process whose transaction has the savepoints.
    """
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        first = stack.enter_context(ExitStack())
        awaited = first.enter_context(open_transaction(primary, "bank"))
        future = threads.submit(create)
        await_blocked(primary, awaited)
        # The server waits in two rounds, and takes the snapshot with whatever runs after them.
        second = stack.enter_context(ExitStack())
        awaited = second.enter_context(open_transaction(primary, "bank"))
        first.close()
        await_blocked(primary, awaited)
        with psycopg.connect(primary.dsn) as connection:
            connection.execute("CREATE TEMP TABLE changed (number int)")
            connection.execute(ROLLED_BACK)
            execute(primary.dsn, "CREATE TEMP TABLE changed (number int)")
            second.close()
            yield future, connection.info.backend_pid
            connection.rollback()


def await_blocked(primary: Node, process: int) -> None:
    """Wait until a session that creates a slot waits for the transaction of this process."""
    query = """
        SELECT FROM pg_locks waits JOIN pg_locks holds USING (locktype, transactionid)
         WHERE locktype = 'transactionid' AND holds.granted AND holds.pid = %s AND NOT waits.granted
        """
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    with psycopg.connect(primary.dsn, autocommit=True) as connection:
        while not connection.execute(query, (process,)).fetchall():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_slot_is_made_once_the_savepoints_that_its_snapshot_can_not_name_are_over(fleet: Fleet) -> None:
    primary, notes = fleet.node("s1"), Notes()
    with crowded(primary, lambda: create_exported_slot(primary, primary, SLOT, 60, notes)) as (future, _):
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not future.done() and not any("trying again" in text for text in notes.texts):
            assert time.monotonic() < deadline, notes.texts
            time.sleep(0.05)
    future.result(timeout=WAIT_SECONDS_MAX).connection.close()
    assert drop_slot(primary, SLOT)
    assert slots_and_sessions_left(primary) == []


def test_a_slot_whose_snapshot_stays_too_large_is_given_up_and_says_why(fleet: Fleet) -> None:
    primary, notes = fleet.node("s1"), Notes()
    with crowded(primary, lambda: create_exported_slot(primary, primary, SLOT, 8, notes)) as found:
        future, process = found
        with pytest.raises(SlotSnapshotError) as raised:
            future.result(timeout=WAIT_SECONDS_MAX)
    error = raised.value
    assert (error.exit_code, error.slug, error.details["node"]) == (3, "slot-snapshot", "s1")
    assert "too many savepoints and transactions for a slot's snapshot" in error.message
    assert f"process {process}" in error.message
    assert "max_prepared_transactions of node s1" in error.hint
    assert f"SELECT pg_terminate_backend({process});" in error.hint
    assert slots_and_sessions_left(primary) == []


def test_an_increment_can_do_without_a_standby_whose_snapshot_stays_too_large(fleet: Fleet) -> None:
    with open_sessions(fleet, fleet.nodes, spares_standbys=True) as sessions:
        spares = {
            node: find_spare(sessions, too_large_error(f"slot on node {node}", 60, [], node))
            for node in ("s1", "s1-b1")
        }
    # A standby that can't decode has no copy that could be left out.
    assert spares == {"s1": None, "s1-b1": fleet.node("s1-b1") if standbys_decode() else None}


def await_notes(notes: Notes, count: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while len(notes.texts) < count:
        assert time.monotonic() < deadline, notes.texts
        time.sleep(0.05)


def test_a_slot_that_another_thread_abandoned_is_given_up_at_once(fleet: Fleet) -> None:
    primary, abandoned = fleet.node("s1"), threading.Event()
    with open_transaction(primary, "bank"):
        threading.Timer(0.5, abandoned.set).start()
        began = time.monotonic()
        with pytest.raises(SlotWaitError):
            create_exported_slot(primary, primary, SLOT, 60, Silent(), abandoned)
        assert time.monotonic() - began < 20
    assert slots_and_sessions_left(primary) == []


def test_a_slot_that_need_not_wait_is_made_however_short_the_limit(fleet: Fleet) -> None:
    primary = fleet.node("s1")
    create_exported_slot(primary, primary, SLOT, 0, Silent()).connection.close()
    assert drop_slot(primary, SLOT)


def test_the_first_cut_says_what_it_waits_for(fleet: Fleet) -> None:
    notes = Notes()
    with (
        prepared(fleet.node("s2"), GID),
        open_sessions(fleet, fleet.primaries) as sessions,
        pytest.raises(SlotWaitError) as raised,
    ):
        await_prepared(sessions, 1, notes)
    (transaction,) = raised.value.details["transactions"]  # type: ignore[misc]  # it is a list
    assert (transaction["node"], transaction["gid"], transaction["kind"]) == ("s2", GID, "prepared")
    (note,) = notes.texts
    assert "node s2: prepared transaction 'it''s a gid'" in note
    assert "ROLLBACK PREPARED 'it''s a gid'" in raised.value.hint
    with open_sessions(fleet, fleet.primaries) as sessions:
        await_prepared(sessions, 1, notes)


def test_a_create_succeeds_once_its_hint_was_followed(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(fleet, Ready(spark))
    runs.init()
    databases = {}
    with dropping_slots(fleet), closing(psycopg.connect(with_database(fleet.node("s1"), "postgres").dsn)) as running:
        running.execute("CREATE TEMP TABLE changed (id int)")
        with prepared(fleet.node("s1"), GID):
            with pytest.raises(SnapshotError) as raised:
                create_full(fleet, CreateRequest("hinted", wait_seconds=2), Ready(spark), Silent())
            assert raised.value.exit_code == 3
            for node in fleet.nodes:
                assert slots_of(node.dsn) == []
                assert slots_and_sessions_left(node) == []
            # No other node has committed the prepared one.
            statements = re.findall(
                r"(?m)^-- on node ([^\s,:]+)(?: in database ([^\s,:]+))?[,:].*\n(?:.*;\n-- otherwise:\n)?(.*;)$",
                raised.value.hint,
            )
            assert len(statements) == 2
            for node, database, statement in statements:
                databases[statement] = database
                execute(with_database(fleet.node(node), database or "postgres").dsn, statement)
            assert gids(fleet.node("s1")) == []
            create_full(fleet, CreateRequest("hinted", wait_seconds=2), Ready(spark), Silent())
    assert databases["ROLLBACK PREPARED 'it''s a gid';"] == "bank"
    assert names_of_snapshots(fleet) == ["hinted"]
