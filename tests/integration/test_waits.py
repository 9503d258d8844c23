"""What a slot waits for is told while it waits; it is given up in time, and nothing is left behind."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import wal.slots.waiting as waiting
from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet, Node, load_fleet
from fleet.nodes.connections import with_database
from fleet.nodes.sessions import open_sessions
from fleet.progress import Silent
from snapshots.create.full import create_full
from snapshots.create.prepared_transactions import await_prepared
from snapshots.create.request import CreateRequest
from storage.errors import SnapshotError
from tests.integration.refusing import execute
from tests.snapshot_runs import Ready, Runs, chains_dropped, described, names_of_snapshots, slots_of
from wal.slots.slots import create_exported_slot, drop_slot
from wal.slots.waiting import SlotWaitError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLOT = "cutline_waits"
GID = "it's a gid"
WAIT_SECONDS_MAX = 30
# The shortest that a slot is given.
GIVEN_UP_SECONDS = 2.0


class Notes(Silent):
    """Keeps what a person would have been told, and when."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.times: list[float] = []

    def note(self, text: str) -> None:
        self.texts.append(text)
        self.times.append(time.monotonic())


@pytest.fixture(autouse=True)
def told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "NOTE_SECONDS", 0.3)


@pytest.fixture(scope="module")
def fleet(shared_fleet: EmbeddedFleet) -> Fleet:
    return load_fleet(shared_fleet.fleet_toml)


@contextmanager
def changing(node: Node, database: str) -> Iterator[int]:
    """A transaction that has changed something in a database of the node and stays open; its server process."""
    dsn = with_database(node, database).dsn
    with psycopg.connect(dsn, application_name="payroll") as connection:
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


def left(node: Node) -> list[tuple[Any, ...]]:
    """Slots and sessions of Cutline that a node has now."""
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


def in_background(node: Node, primary: Node, seconds_max: float, notes: Notes) -> Any:
    threads = ThreadPoolExecutor(max_workers=1)
    made = threads.submit(create_exported_slot, node, primary, SLOT, seconds_max, notes)
    threads.shutdown(wait=False)
    return made


@pytest.mark.parametrize("where", ["s1", "s1-b1"])
def test_a_slot_that_is_given_up_names_everything_it_waits_for(fleet: Fleet, where: str) -> None:
    """Transactions of another database too, and for a standby's slot those of its primary."""
    primary, notes = fleet.node("s1"), Notes()
    with changing(primary, "postgres") as process, prepared(primary, GID):
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

    # It was told as soon as it took long, and once: nothing changed.
    (note,) = notes.texts
    assert notes.times[0] - began < GIVEN_UP_SECONDS
    for text in (note, error.message):
        assert f"process {process} (idle in transaction, application payroll)" in text
        assert "prepared transaction 'it''s a gid'" in text
    for node in (fleet.node(where), primary):
        assert left(node) == []


def test_a_note_comes_again_when_what_is_waited_for_changes(fleet: Fleet) -> None:
    primary, notes = fleet.node("s1"), Notes()
    with prepared(primary, GID):
        with changing(primary, "bank") as process:
            made = in_background(primary, primary, 30, notes)
            await_notes(notes, 1)
        await_notes(notes, 2)
    made.result(timeout=WAIT_SECONDS_MAX).connection.close()
    assert drop_slot(primary, SLOT)
    assert f"process {process}" in notes.texts[0]
    assert f"process {process}" not in notes.texts[1]
    assert all("it''s a gid" in text for text in notes.texts[:2])


def test_a_transaction_that_began_while_it_waited_is_told_of_when_its_turn_has_come(fleet: Fleet) -> None:
    primary, notes = fleet.node("s1"), Notes()
    with changing(primary, "bank") as first:
        made = in_background(primary, primary, 30, notes)
        await_notes(notes, 1)
        later = changing(primary, "postgres")
        second = later.__enter__()
    await_notes(notes, 2)
    later.__exit__(None, None, None)
    made.result(timeout=WAIT_SECONDS_MAX).connection.close()
    assert drop_slot(primary, SLOT)
    assert f"process {first}" in notes.texts[0]
    assert f"process {second}" not in notes.texts[0]
    assert f"process {second}" in notes.texts[-1]


def await_notes(notes: Notes, count: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while len(notes.texts) < count:
        assert time.monotonic() < deadline, notes.texts
        time.sleep(0.05)


def test_a_slot_that_others_gave_up_is_given_up_at_once(fleet: Fleet) -> None:
    primary, abandoned = fleet.node("s1"), threading.Event()
    with changing(primary, "bank"):
        threading.Timer(0.5, abandoned.set).start()
        began = time.monotonic()
        with pytest.raises(SlotWaitError):
            create_exported_slot(primary, primary, SLOT, 60, Silent(), abandoned)
        assert time.monotonic() - began < 20
    assert left(primary) == []


def test_a_slot_that_waits_for_nothing_is_made_however_short_the_wait(fleet: Fleet) -> None:
    primary = fleet.node("s1")
    create_exported_slot(primary, primary, SLOT, 0, Silent()).connection.close()
    assert drop_slot(primary, SLOT)


def test_the_first_cut_tells_what_it_waits_for(fleet: Fleet) -> None:
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


def test_who_follows_the_hint_can_create(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> None:
    fleet = described(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(fleet, Ready(spark))
    runs.init()
    databases = {}
    with chains_dropped(fleet), closing(psycopg.connect(with_database(fleet.node("s1"), "postgres").dsn)) as running:
        running.execute("CREATE TEMP TABLE changed (id int)")
        with prepared(fleet.node("s1"), GID):
            with pytest.raises(SnapshotError) as raised:
                create_full(fleet, CreateRequest("hinted", wait_seconds=2), Ready(spark), Silent())
            assert raised.value.exit_code == 3
            for node in fleet.nodes:
                assert slots_of(node.dsn) == []
                assert left(node) == []
            remedies = re.findall(r"(?m)^on node (\S+)(?: in database (\S+))?: (.*;)$", raised.value.hint)
            assert len(remedies) == 2
            for node, database, statement in remedies:
                databases[statement] = database
                execute(with_database(fleet.node(node), database or "postgres").dsn, statement)
            assert gids(fleet.node("s1")) == []
            create_full(fleet, CreateRequest("hinted", wait_seconds=2), Ready(spark), Silent())
    assert databases["ROLLBACK PREPARED 'it''s a gid';"] == "bank"
    assert names_of_snapshots(fleet) == ["hinted"]
