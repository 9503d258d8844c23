"""Full snapshots that are interrupted while they copy tables, and resumed by a repetition of the command.

The command is a process, which kills or interrupts itself once some tasks have ended. Expected rows come from the live
servers (COPY).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.tasks import CommandFailedError, take_full
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import running_pid, stop_server
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.messages import unlisted_text
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import preview_full
from cutline.snapshots.listing.name_templates import new_name, resumable_name
from cutline.snapshots.records.commit import BASE, FullSnapshot
from cutline.snapshots.records.proven_chains import read_full
from cutline.snapshots.records.unfinished_records import (
    UnfinishedCopy,
    is_unfinished_base,
    read_resumption,
    read_unfinished,
    read_unfinished_base,
)
from cutline.wal.segments.archive import archive_prefix
from tests.commands.snapshot_runs import (
    COMMAND_SECONDS_MAX,
    configure_fleet,
    dropping_slots,
    run_command,
    slots_of,
    sorted_copies,
)
from tests.commands.watching import Watching
from tests.faults.awaited import await_none
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.servers.dealt import fleet_and_target
from tests.stores.damage import flip_byte

KEPT = '[copies]\nresume_from = "8 KiB"\nwait = "60s"\n'
SHARDS = ("s1", "s2")
# More WAL than the smallest limit on it; the transaction's commit flushes it.
FILLER = f"SELECT pg_logical_emit_message(false, 'filler', repeat('x', {17 << 20})), pg_current_xact_id()"
# `big` and `wide` take several tasks each, and the others share tasks.
TABLES = {"big": 3000, "wide": 900, "small": 40, "bag": 30, "gone": 20}
# How long an interrupted snapshot waits for its repetition.
IDLE_SECONDS = 3.0
# The share of tasks after which the copy is interrupted, in percent.
PERCENT = 75


@dataclass(frozen=True)
class Place:
    servers: EmbeddedFleet
    fleet: Fleet
    target: Fleet

    def execute(self, shard: str, *statements: str) -> None:
        with psycopg.connect(self.fleet.node(shard).dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def run(self, *words: str) -> dict[str, Any]:
        code, document = run_command(self.fleet, *words)
        assert code == 0, json.dumps(document)
        return document

    def interrupt(self, name: str, number: signal.Signals, process: int = 0) -> subprocess.CompletedProcess[str]:
        """Take a full snapshot; once most of its tasks have ended, it or a server's process gets a signal."""
        words = [str(PERCENT), str(int(number)), str(process), "--fleet", str(self.fleet.path), "create", name]
        return subprocess.run(
            [sys.executable, "-m", "tests.commands.dying_copies", *words],
            capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
        )  # fmt: skip

    def unfinished(self) -> dict[str, UnfinishedCopy]:
        """What interrupted snapshots have copied, by operation."""
        store = self.fleet.store.open()
        names = {one: store.list_children(f"operations/{one}") for one in store.list_children("operations")}
        return {
            one: read_unfinished(store, read_unfinished_base(store, one, names[one]), names[one])
            for one in names
            if is_unfinished_base(names[one])
        }

    def live(self) -> list[dict[str, bytes]]:
        return [sorted_copies(self.fleet.node(shard).dsn) for shard in SHARDS]

    def restored(self, name: str) -> list[dict[str, bytes]]:
        self.run("restore", name, "--to", str(self.target.path), "--replace", "--yes")
        return [sorted_copies(node.dsn) for node in self.target.primaries]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with fleet_and_target(tmp_path_factory.mktemp("resumed"), shards=2) as fleets:
        yield fleets


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path) -> Iterator[Place]:
    running, other = servers
    fleet = configure_fleet(running, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=KEPT)
    target = configure_fleet(other, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    place = Place(running, fleet, target)
    for number, shard in enumerate(SHARDS):
        for table, rows in TABLES.items():
            place.execute(
                shard,
                f"DROP TABLE IF EXISTS {table}, fresh, logged",
                f"CREATE TABLE {table} (id int, text text{'' if table == 'bag' else ', PRIMARY KEY (id)'})",
                f"INSERT INTO {table} SELECT n, repeat('{table}{number}', 20) FROM generate_series(1, {rows}) n",
            )
        place.execute(shard, "ALTER TABLE bag REPLICA IDENTITY FULL")
    with dropping_slots(fleet):
        place.run("init")
        yield place


def change(place: Place) -> None:
    """Change tables that are copied and tables that are not, some of them by DDL and by transactions on both shards."""
    for shard in SHARDS:
        place.execute(
            shard,
            "UPDATE big SET text = 'changed' WHERE id % 7 = 0",
            "DELETE FROM big WHERE id % 11 = 0",
            "ALTER TABLE big ADD COLUMN more int DEFAULT 7",
            "INSERT INTO big VALUES (-1, 'new', 1)",
            "UPDATE wide SET id = -id WHERE id % 5 = 0",
            "DELETE FROM small WHERE id < 10",
            "INSERT INTO bag SELECT 1, 'again' FROM generate_series(1, 3)",
            "DROP TABLE gone",
            "CREATE TABLE fresh (id int PRIMARY KEY, text text)",
            "INSERT INTO fresh SELECT n, 'fresh' FROM generate_series(1, 25) n",
        )
    for shard in SHARDS:
        place.execute(shard, "BEGIN", "UPDATE small SET text = 'pair' WHERE id = 20", "PREPARE TRANSACTION 'pair'")
    for shard in SHARDS:
        place.execute(shard, "COMMIT PREPARED 'pair'")


def committed(place: Place, name: str) -> FullSnapshot:
    return read_full(place.fleet.store.open(), name)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_an_interrupted_full_snapshot_is_resumed(place: Place, number: signal.Signals) -> None:
    """Tables that were copied are not copied again, whatever has changed since; the others join at the first cut."""
    ended = place.interrupt("nightly", number)
    assert ended.returncode == (-number if number == signal.SIGKILL else 130), ended.stderr
    ((operation, copied),) = place.unfinished().items()
    names = {shard: {group.name for group in groups} for shard, groups in copied.groups.items()}
    assert all("public.wide" in found for found in names.values()), names
    assert any("public.big" not in found for found in names.values()), names
    if number == signal.SIGINT:
        assert f"cancel {operation}" in ended.stderr, ended.stderr
    # Another chain, and gc, leave the interrupted snapshot alone.
    place.run("gc", "--yes")
    (way,) = place.run("status")["operations"]
    assert "create nightly" in way["remedy"], way
    assert way["kept"] == copied.share._asdict(), way
    assert way["state"] == "dead", way
    time.sleep(IDLE_SECONDS)
    change(place)

    document = place.run("create", "nightly")

    assert document["operation"] == operation
    commit = committed(place, "nightly")
    assert commit.ran_seconds is not None
    assert 0 < commit.ran_seconds < commit.seconds - IDLE_SECONDS
    (listed,) = place.run("list", "--flat")["restore_points"]
    assert (listed["ran_seconds"], document["ran_seconds"]) == (commit.ran_seconds, commit.ran_seconds)
    kept = {stored.key for stored in copied.entries}
    assert kept <= {stored.key for stored in commit.copied}
    assert {group.name for group in commit.groups["s1"]} == names["s1"]
    assert place.unfinished() == {}
    assert place.restored("nightly") == place.live()
    assert place.run("check", "nightly")["result"] == "valid"
    place.execute("s1", "UPDATE big SET text = 'later' WHERE id = 1", "INSERT INTO wide VALUES (5000, 'later')")
    place.run("create", "nightly", "--incremental")
    assert place.restored("nightly") == place.live()
    assert place.run("check", "nightly")["result"] == "valid"
    # What remains of the interruption is garbage: objects of tables that were not complete.
    place.run("gc", "--yes", "--grace", "0")
    assert place.run("check", "nightly")["result"] == "valid"


# The effects of a resumed snapshot after which it is killed, in order.
POINTS = (
    CrashPoint.RESUMED,
    CrashPoint.SLOT_MADE,
    CrashPoint.BASE_COPIED,
    CrashPoint.COPY_SLOTS_DROPPED,
    CrashPoint.STARTS_WRITTEN,
    CrashPoint.ARCHIVED,
    CrashPoint.SEQUENCES_READ,
    ABOUT_TO_COMMIT,
    CrashPoint.COMMITTED,
)


def test_a_resumed_snapshot_is_killed_at_every_step(place: Place) -> None:
    """Each repetition resumes the same operation, whatever the one before had archived and copied."""
    place.interrupt("nightly", signal.SIGKILL)
    ((operation, copied),) = place.unfinished().items()
    change(place)
    for number, point in enumerate(POINTS):
        for shard in SHARDS:
            place.execute(
                shard,
                f"INSERT INTO wide VALUES ({6000 + number}, 'before {point}')",
                f"ALTER TABLE fresh ADD COLUMN after_{number} int DEFAULT {number}",
                f"CREATE TABLE new_{number} AS SELECT n AS id FROM generate_series(1, 5) n",
                f"ALTER TABLE new_{number} ADD PRIMARY KEY (id)",
            )
        # A slot that is left is found by its operation, so nothing but the operation must be open.
        live = place.live()
        killed = subprocess.run(
            [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", point, "1", "--", "--fleet",
             str(place.fleet.path), "create", "nightly"],
            capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
        )  # fmt: skip
        assert killed.returncode == -signal.SIGKILL, (point, killed.stderr)
        (way,) = place.run("status")["operations"]
        assert (way["operation"], way["state"]) == (operation, "dead")
        resumed = read_resumption(place.fleet.store.open(), operation, number + 1)
        assert way["seen_at"] >= resumed.resumed_at

    place.run("create", "nightly", "--incremental")

    store = place.fleet.store.open()
    assert {stored.key for stored in copied.entries} <= {stored.key for stored in committed(place, "nightly").copied}
    assert len([name for name in store.list_children(f"operations/{operation}") if "resumed" in name]) == len(POINTS)
    # No two processes of the operation write markers of the same cut.
    assert committed(place, "nightly").cut.id == f"{operation}.r{len(POINTS)}.1"
    for increment in ("0", "1"):
        place.run("restore", "nightly", "--increment", increment, "--to", str(place.target.path), "--replace", "--yes")
        assert [sorted_copies(node.dsn) for node in place.target.primaries] == live, increment
    assert place.run("check", "nightly")["result"] == "valid"
    for node in place.fleet.nodes:
        assert len(slots_of(node.dsn)) == 1
    for shard in SHARDS:
        place.execute(shard, *(f"DROP TABLE new_{number}" for number in range(len(POINTS))))


def test_tables_that_were_read_on_standbys_are_not_copied_again(place: Place) -> None:
    """With `base = "prefer-standby"`, a table is complete if the standby that is read has been read."""
    path = place.fleet.path
    path.write_text(path.read_text().replace("[copies]", '[copies]\nbase = "prefer-standby"'))
    place.interrupt("nightly", signal.SIGKILL)
    ((_, copied),) = place.unfinished().items()
    assert copied.base.readers == {"s1": "s1-b1", "s2": "s2-b1"}
    assert all(copied.groups.values()), copied.groups
    change(place)

    place.run("create", "nightly")

    commit = committed(place, "nightly")
    assert {stored.key for stored in copied.entries} <= {stored.key for stored in commit.copied}
    assert commit.shared_bases.keys() == {"s1", "s2"}
    changes = commit.definition_changes
    assert changes is not None
    assert changes.readers
    assert changes.readers.items() <= {"s1": "s1-b1", "s2": "s2-b1"}.items()
    assert changes.readers.keys() == changes.copied.keys() & {"s1", "s2"}
    assert place.restored("nightly") == place.live()
    code, document = run_command(place.fleet, "check", "nightly")
    assert (code, document["snapshots"][0]["conflicts"]) == (4, []), document


@pytest.mark.parametrize("how", ["away", "without its slot", "past the limit", "removed"])
def test_tables_that_were_read_on_a_standby_that_is_lost_are_copied_again(place: Place, how: str) -> None:
    """With `base = "prefer-standby"`: what was copied on other shards is kept."""
    path = place.fleet.path
    path.write_text(path.read_text().replace("[copies]", '[copies]\nbase = "prefer-standby"'))
    place.interrupt("nightly", signal.SIGKILL)
    ((operation, copied),) = place.unfinished().items()
    assert copied.base.readers == {"s1": "s1-b1", "s2": "s2-b1"}
    assert all(copied.groups.values()), copied.groups
    change(place)
    standby = place.servers.node("s1-b1")
    if how == "away":
        stop_server(standby)
    elif how == "without its slot":
        (slot,) = slots_of(place.fleet.node("s1-b1").dsn)
        with psycopg.connect(place.fleet.node("s1-b1").dsn, autocommit=True) as connection:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
    elif how == "past the limit":
        keep_too_much(place, "s1-b1")
        (kept,) = [text for text in place.run("list")["warnings"] if "more than its limit" in text]
        assert "drop its slot on s1-b1, which ends only the copy of this node" in kept
        assert kept.endswith("; the tables that were read there are copied again when the snapshot is resumed")
    else:
        text = path.read_text()
        path.write_text(re.sub(r'(?m)^\[\[node\]\]\nid = "s1-b1"\n(?:[^\[\n].*\n|\n)*', "", text))
    watching = Watching()
    try:
        preview_full(load_fleet(path), CreateRequest("nightly"), watching)
        document = place.run("create", "nightly")
    finally:
        if how == "away":
            place.servers.start_node(standby)

    if how == "past the limit":
        # The preview drops no slot, so it resumes with the standby.
        watching.notes = [*document["warnings"], *document["notes"]]
    assert "the tables of s1 are copied again: they were read on a standby that is left out" in watching.notes
    assert document["operation"] == operation
    commit = committed(place, "nightly")
    assert commit.parts.keys() == {"s1", "s2", "s2-b1"}
    assert commit.shared_bases.keys() == {"s2"}
    assert {one.key for one in copied.entries if one.node == "s2"} <= {one.key for one in commit.copied}
    assert not {one.key for one in copied.entries if one.node == "s1" and one.kind == BASE} & {
        one.key for one in commit.copied
    }
    assert place.restored("nightly") == place.live()
    if how != "removed":
        assert [one["node"] for one in place.run("create", "nightly", "--incremental")["renewed"]] == ["s1-b1"]
    code, checked = run_command(place.fleet, "check", "nightly")
    assert (code, checked["snapshots"][0]["conflicts"]) == (4, []), checked


def test_wal_that_was_archived_before_a_standby_was_lost_is_defined(place: Place) -> None:
    """With `base = "prefer-standby"`: what is archived has changes to the tables that are copied again."""
    path = place.fleet.path
    path.write_text(path.read_text().replace("[copies]", '[copies]\nbase = "prefer-standby"'))
    for point in (CrashPoint.SNAPSHOTS_RELEASED, CrashPoint.ARCHIVED):
        killed = subprocess.run(
            [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", point, "1", "--", "--fleet",
             str(path), "create", "nightly"],
            capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
        )  # fmt: skip
        assert killed.returncode == -signal.SIGKILL, (point, killed.stderr)
        if point == CrashPoint.SNAPSHOTS_RELEASED:
            change(place)
    standby = place.servers.node("s1-b1")
    stop_server(standby)
    try:
        place.run("create", "nightly")
    finally:
        place.servers.start_node(standby)
    commit = committed(place, "nightly")
    assert commit.shared_bases.keys() == {"s2"}
    changes = commit.definition_changes
    assert changes is not None
    assert set(changes.gone["s1"]) == {group.number for group in commit.groups["s1"]}
    assert place.restored("nightly") == place.live()
    code, checked = run_command(place.fleet, "check", "nightly")
    assert (code, checked["snapshots"][0]["conflicts"]) == (4, []), checked


def test_a_snapshot_is_alive_as_soon_as_it_is_resumed(place: Place) -> None:
    """Others see the process that has resumed it at once, although that has stored nothing else, and can stop it."""
    place.interrupt("nightly", signal.SIGKILL)
    (operation,) = place.unfinished()
    # The slots of the tables that are left wait for the transaction, so that the command does not end too soon.
    with psycopg.connect(place.fleet.node("s1").dsn) as connection:
        connection.execute("INSERT INTO small VALUES (7000, 'open')")
        resumed = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.signalled_command", "SIGSTOP", CrashPoint.RESUMED, "1", "--",
             "--fleet", str(place.fleet.path), "create", "nightly"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            _, status = os.waitpid(resumed.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status
            (way,) = place.run("status")["operations"]
            assert (way["operation"], way["state"], way["process"]) == (operation, "running", resumed.pid), way
            code, document = run_command(place.fleet, "create", "nightly")
            assert (code, document["error"]) == (7, "fleet-busy"), document
            cancelled: list[dict[str, Any]] = []
            asking = threading.Thread(target=lambda: cancelled.append(run_command(place.fleet, "cancel", operation)[1]))
            asking.start()
            store = place.fleet.store.open()
            await_none(lambda: not any("cancel-" in name for name in store.list_children(f"operations/{operation}")))
            os.kill(resumed.pid, signal.SIGCONT)
            output, _ = resumed.communicate(timeout=COMMAND_SECONDS_MAX)
            asking.join(COMMAND_SECONDS_MAX)
        finally:
            resumed.kill()
            resumed.wait()
    assert resumed.returncode == 8, output
    assert [one["result"] for found in cancelled for one in found["operations"]] == ["cancelled"], cancelled
    assert place.run("status")["operations"] == []
    # A slot for which a session was still waiting is left to the next create.
    place.run("create", "other")
    assert {len(slots_of(node.dsn)) for node in place.fleet.nodes} == {1}


def test_a_watch_resumes_its_own_snapshot(place: Place) -> None:
    """The name of an interrupted snapshot is chosen again if it has the form of the watch's names."""
    name = new_name(place.fleet, "watch-{date}-{time}")
    place.interrupt(name, signal.SIGKILL)

    assert resumable_name(place.fleet, "watch-{date}-{time}") == name
    assert resumable_name(place.fleet, "nightly-{date}") == ""
    place.run("create", name)
    assert resumable_name(place.fleet, "watch-{date}-{time}") == ""


def test_a_snapshot_goes_on_after_the_crash_of_a_primary(place: Place) -> None:
    """The command fails with what to do; slots and rows are still there when the server is back."""
    server = place.servers.node("s2")
    process = running_pid(server)
    assert process is not None

    ended = place.interrupt("nightly", signal.SIGQUIT, process)

    assert ended.returncode == 6, ended.stderr
    ((operation, copied),) = place.unfinished().items()
    assert f"cancel {operation}" in ended.stderr, ended.stderr
    await_none(lambda: running_pid(server))
    place.servers.start_node(server)
    change(place)
    place.run("create", "nightly")
    assert {stored.key for stored in copied.entries} <= {stored.key for stored in committed(place, "nightly").copied}
    assert place.restored("nightly") == place.live()
    assert place.run("check", "nightly")["result"] == "valid"


def test_a_resumption_that_is_refused_can_be_repeated(place: Place) -> None:
    """A transaction that stays open delays the slots of the remaining tables; the copied tables still count later."""
    place.interrupt("nightly", signal.SIGKILL)
    (operation,) = place.unfinished()
    with psycopg.connect(place.fleet.node("s1").dsn) as connection:
        connection.execute("INSERT INTO small VALUES (7000, 'open')")
        code, document = run_command(place.fleet, "create", "nightly", "--wait", "2")
        assert (code, document["error"]) == (3, "slot-wait"), document
        assert list(place.unfinished()) == [operation]

    assert place.run("create", "nightly")["operation"] == operation
    assert place.restored("nightly") == place.live()


def test_rows_of_an_append_only_table_that_changed_give_up_the_snapshot(place: Place) -> None:
    """Every repetition would find the same counters, so the next one begins again."""
    path = place.fleet.path
    path.write_text(path.read_text() + '\n[groups]\nappend_only = ["public.logged"]\n')
    for shard in SHARDS:
        place.execute(
            shard,
            "DROP TABLE IF EXISTS logged",
            "CREATE TABLE logged (text text)",
            "INSERT INTO logged SELECT 'line' FROM generate_series(1, 20)",
        )
    place.run("init")
    place.interrupt("nightly", signal.SIGKILL)
    ((operation, copied),) = place.unfinished().items()
    assert any(group.name == "public.logged" for group in copied.groups["s1"]), copied.groups
    with psycopg.connect(place.fleet.node("s1").dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO logged VALUES ('appended')")
        connection.execute("UPDATE logged SET text = 'changed' WHERE ctid = '(0,1)'")

    code, document = run_command(place.fleet, "create", "nightly")

    assert (code, document["error"]) == (3, "append-only-changed"), document
    assert place.run("status")["operations"] == []
    assert place.run("create", "nightly")["operation"] != operation
    assert place.restored("nightly") == place.live()


def test_a_small_snapshot_is_undone(place: Place) -> None:
    """Below `resume_from`, an interrupt leaves no slot."""
    path = place.fleet.path
    path.write_text(path.read_text().replace('"8 KiB"', '"10 GB"'))

    ended = place.interrupt("nightly", signal.SIGINT)

    # No task records anything, so nothing sends the signal.
    assert ended.returncode == 0, ended.stderr
    assert place.unfinished() == {}


def test_an_interrupted_snapshot_is_given_up(place: Place) -> None:
    """`cancel` and another full snapshot drop an interrupted one's slots; an increment of another chain does not."""
    place.run("create", "daily")
    place.interrupt("nightly", signal.SIGKILL)
    (operation,) = place.unfinished()
    place.execute("s1", "UPDATE big SET text = 'changed' WHERE id = 1")

    place.run("create", "daily", "--incremental")
    place.run("check", "daily")

    assert list(place.unfinished()) == [operation]
    assert {len(slots_of(node.dsn)) for node in place.fleet.nodes} == {2}
    place.run("cancel", operation)
    assert place.run("status")["operations"] == []
    assert {len(slots_of(node.dsn)) for node in place.fleet.nodes} == {1}

    place.interrupt("nightly", signal.SIGKILL)
    place.run("create", "another")
    assert place.run("status")["operations"] == []
    assert {len(slots_of(node.dsn)) for node in place.fleet.nodes} == {2}


def test_the_limit_on_retained_wal_ends_an_interrupted_snapshot(place: Place) -> None:
    """Past the limit, the next create drops its slots; a repetition begins again."""
    place.interrupt("nightly", signal.SIGKILL)
    path = place.fleet.path
    path.write_text(path.read_text() + '\n[wal]\nmax_retained_wal = "16 MiB"\n')
    place.execute("s1", FILLER)

    document = place.run("create", "point", "--only-cut")

    (note,) = [text for text in document["warnings"] if "more than its limit" in text]
    assert "of WAL for snapshot nightly, which is not finished, more than its limit" in note
    assert [slots_of(node.dsn) for node in place.fleet.nodes] == [[]] * len(place.fleet.nodes)
    again = place.run("create", "nightly")
    assert any("begins again" in text and "does not exist" in text for text in [*again["warnings"], *again["notes"]]), (
        again
    )
    assert place.restored("nightly") == place.live()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_changed_file_refuses_nothing_once_the_slots_are_gone(place: Place, *, is_renamed: bool) -> None:
    """There is nothing left that other tables, or another id of a shard, could give up by mistake."""
    place.interrupt("nightly", signal.SIGKILL)
    (operation,) = place.unfinished()
    path, text = place.fleet.path, place.fleet.path.read_text()
    if is_renamed:
        path.write_text(text.replace('"s1"', '"s9"'))
    else:
        path.write_text(text + '\n[groups]\nexclude = ["public.small"]\n')
    code, document = run_command(place.fleet, "create", "nightly")
    assert (code, document["error"]) == (2, "usage"), document
    assert f"cancel {operation}" in document["hint"]
    (slot,) = slots_of(place.fleet.node("s2").dsn)
    # One slot is enough: without it, nothing can be resumed.
    place.execute("s2", f"SELECT pg_drop_replication_slot('{slot}')")

    document = place.run("create", "nightly")

    assert document["operation"] != operation
    (note,) = [text for text in [*document["warnings"], *document["notes"]] if "begins again" in text]
    assert f"node s2: slot {slot} does not exist" in note
    assert place.run("status")["operations"] == []
    assert place.run("check", "nightly")["result"] == "valid"


@pytest.mark.parametrize("is_last", [False, True])
def test_damaged_wal_of_an_interrupted_snapshot_gives_it_up(place: Place, *, is_last: bool) -> None:
    """What it had archived before it was killed again is damaged in the store: a repetition begins again."""
    place.interrupt("nightly", signal.SIGKILL)
    (operation,) = place.unfinished()
    for _ in range(2):
        for shard in SHARDS:
            place.execute(shard, "UPDATE big SET text = text || 'x'")
        subprocess.run(
            [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", CrashPoint.ARCHIVED, "1", "--",
             "--fleet", str(place.fleet.path), "create", "nightly"],
            capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, env=os.environ, check=False,
        )  # fmt: skip
    store = place.fleet.store.open()
    prefix = archive_prefix("nightly", "s1", operation)
    first, *_, last = sorted(f"{prefix}/{name}" for name in store.list_children(prefix))
    flip_byte(Path(place.fleet.store.url.removeprefix("file://")) / (last if is_last else first))

    code, document = run_command(place.fleet, "create", "nightly")
    if not is_last:
        # Only the first cut reads it.
        assert (code, document["error"]) == (3, "segment-damaged"), document
        assert place.run("status")["operations"] == []
        code, document = run_command(place.fleet, "create", "nightly")

    assert code == 0, document
    assert document["operation"] != operation
    assert place.run("status")["operations"] == []
    assert place.restored("nightly") == place.live()


def test_a_watch_gives_up_its_own_snapshot_if_it_stays_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A watch has a folder of its own for its copy of the file.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = new_name(place.fleet, "watch-{date}-{time}")
    place.interrupt(name, signal.SIGKILL)
    (operation,) = place.unfinished()
    path = place.fleet.path
    path.write_text(path.read_text() + '\n[groups]\nexclude = ["public.small"]\n[watch]\nevery = "5min"\n')
    source = FleetSource.read(path)

    with pytest.raises(CommandFailedError, match="was interrupted") as refused:
        take_full(source, [].append)
    assert f"cancel {operation}" in refused.value.hint
    assert list(place.unfinished()) == [operation]
    noted: list[str] = []
    result = take_full(source, noted.append, gives_up=True)

    (taken,) = place.run("list")["snapshots"]
    assert taken["name"] != name
    assert taken["name"] in result.text
    assert f"snapshot {name} is given up" in noted[0]
    assert place.run("status")["operations"] == []
    assert place.run("check", taken["name"])["result"] == "valid"


def test_a_slot_that_is_another_one_is_not_used(place: Place) -> None:
    """A slot of the same name at a later position has lost what was committed in between: the snapshot begins again."""
    place.interrupt("nightly", signal.SIGKILL)
    (operation,) = place.unfinished()
    (slot,) = slots_of(place.fleet.node("s2").dsn)
    place.execute(
        "s2",
        f"SELECT pg_drop_replication_slot('{slot}')",
        "UPDATE big SET text = 'lost' WHERE id = 3",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)",
    )

    document = place.run("create", "nightly")

    assert document["operation"] != operation
    (note,) = [text for text in [*document["warnings"], *document["notes"]] if "begins again" in text]
    assert "another process advanced the slot" in note
    assert place.run("status")["operations"] == []
    assert place.restored("nightly") == place.live()


def test_a_command_with_other_options_gives_up_nothing(place: Place) -> None:
    """It is refused, and says how to resume or to give up; a restore point does not take the name either."""
    place.interrupt("nightly", signal.SIGKILL)
    (operation,) = place.unfinished()

    snapshot = f"snapshot --fleet {place.fleet.path}"
    repeat = f"repeat the command as it was; to give up what was copied: {snapshot} cancel {operation}"
    hints = {
        ("--exclude-group", "public.small"): repeat,
        ("--large-objects",): repeat,
        ("--only-primary",): repeat,
        ("--only-cut",): f"choose another name; to resume it: {snapshot} create nightly",
    }
    for words, hint in hints.items():
        code, document = run_command(place.fleet, "create", "nightly", *words)
        assert (code, document["hint"]) == (2, hint), (words, document)

    plan = place.run("create", "nightly", "--dry-run")
    assert plan["snapshot"] == "nightly"
    assert list(place.unfinished()) == [operation]
    assert place.run("create", "nightly")["operation"] == operation
    assert place.restored("nightly") == place.live()


@pytest.mark.parametrize("how", ["dropped", "past the limit"])
def test_the_lost_slot_of_a_standby_does_not_give_up_the_others(place: Place, how: str) -> None:
    """The snapshot is resumed without its copy, and the next increment copies it, as if it had been away."""
    place.interrupt("nightly", signal.SIGKILL)
    ((operation, copied),) = place.unfinished().items()
    standby = place.fleet.node("s1-b1").dsn
    (slot,) = slots_of(standby)
    if how == "dropped":
        with psycopg.connect(standby, autocommit=True) as connection:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        watching = Watching()
        plan = preview_full(place.fleet, CreateRequest("nightly"), watching)
        assert f"standby s1-b1 is left out: slot {slot} does not exist" in watching.notes
        assert "s1-b1" not in {node.id for node in plan.nodes}
        assert [out.name for out in plan.left_out if out.kind == LeftOutKind.ABSENT_COPY] == ["s1-b1"]
    else:
        keep_too_much(place, "s1-b1")

    document = place.run("create", "nightly")

    assert document["operation"] == operation, document
    commit = committed(place, "nightly")
    assert "s1-b1" not in commit.parts
    kept = {stored.key for stored in copied.entries if stored.node != "s1-b1"}
    assert kept <= {stored.key for stored in commit.copied}
    assert [out.name for out in commit.left_out if out.kind == LeftOutKind.ABSENT_COPY] == ["s1-b1"]
    assert place.restored("nightly") == place.live()
    increment = place.run("create", "nightly", "--incremental")
    assert [copy["node"] for copy in increment["renewed"]] == ["s1-b1"]
    assert place.run("check", "nightly")["result"] == "valid"


def test_a_standby_that_has_left_the_file_is_named_with_its_slot(place: Place) -> None:
    place.interrupt("nightly", signal.SIGKILL)
    ((operation, _),) = place.unfinished().items()
    standby, path = place.fleet.node("s2-b1"), place.fleet.path
    (slot,) = slots_of(standby.dsn)
    left = re.sub(r'(?m)^\[\[node\]\]\nid = "s2-b1"\n(?:[^\[\n].*\n|\n)*', "", path.read_text())
    assert left != path.read_text()
    path.write_text(left)
    watching = Watching()
    preview_full(load_fleet(path), CreateRequest("nightly"), watching)
    assert unlisted_text(["s2-b1"], "the slot", slot) in watching.notes

    document = place.run("create", "nightly")

    assert document["operation"] == operation
    assert unlisted_text(["s2-b1"], "the slot", slot) in document["warnings"]
    assert slots_of(standby.dsn) == [slot]


def keep_too_much(place: Place, standby: str) -> None:
    """Set a limit on WAL for the standby alone, and exceed it."""
    path, dsn = place.fleet.path, place.fleet.node(standby).dsn
    (slot,) = slots_of(dsn)
    path.write_text(path.read_text().replace(f'id = "{standby}"\n', f'id = "{standby}"\nmax_retained_wal = "16 MiB"\n'))
    shard = place.fleet.node(standby).shard
    place.execute(shard, FILLER, "INSERT INTO small SELECT n, repeat('w', 1000) FROM generate_series(1000, 4000) n")
    await_none(lambda: retained_bytes(dsn, slot) <= 16 << 20)


def retained_bytes(standby: str, slot: str) -> int:
    query = "SELECT pg_wal_lsn_diff(pg_last_wal_replay_lsn(), restart_lsn) FROM pg_replication_slots"
    with psycopg.connect(standby, autocommit=True) as connection:
        ((found,),) = connection.execute(f"{query} WHERE slot_name = %s".encode(), (slot,)).fetchall()
        return int(found)


def test_a_standby_that_is_back_is_copied_if_the_snapshot_begins_again(place: Place) -> None:
    """It would be left out of the interrupted snapshot, which does not have it."""
    standby = place.servers.node("s1-b1")
    stop_server(standby)
    try:
        place.interrupt("nightly", signal.SIGKILL)
    finally:
        place.servers.start_node(standby)
    ((operation, copied),) = place.unfinished().items()
    assert "s1-b1" not in copied.base.nodes
    (slot,) = slots_of(place.fleet.node("s2").dsn)
    place.execute("s2", f"SELECT pg_drop_replication_slot('{slot}')")

    document = place.run("create", "nightly")

    assert document["operation"] != operation
    assert any("begins again" in text for text in [*document["warnings"], *document["notes"]]), document
    assert "s1-b1" in committed(place, "nightly").parts
    assert place.restored("nightly") == place.live()


def test_a_standby_that_is_away_does_not_give_up_the_others(place: Place) -> None:
    """The snapshot is resumed without its copy, and the next increment copies it."""
    place.interrupt("nightly", signal.SIGKILL)
    ((operation, copied),) = place.unfinished().items()
    standby = place.servers.node("s1-b1")
    stop_server(standby)
    try:
        change(place)
        document = place.run("create", "nightly")
    finally:
        place.servers.start_node(standby)

    assert document["operation"] == operation
    commit = committed(place, "nightly")
    assert "s1-b1" not in commit.parts
    assert {stored.node for stored in commit.copied} <= {"s1", "s2", "s2-b1"}
    assert {stored.key for stored in copied.entries if stored.node != "s1-b1"} <= {
        stored.key for stored in commit.copied
    }
    assert place.restored("nightly") == place.live()
    place.run("create", "nightly", "--incremental")
    assert place.run("check", "nightly")["result"] == "valid"
