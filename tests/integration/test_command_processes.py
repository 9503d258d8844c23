"""Commands that run tasks in processes: what they store, and what happens to the processes when something ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from tests.commands.in_processes import COMMAND, IN_PROCESSES, ROOT
from tests.commands.snapshot_runs import run_command, slots_of, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute
from tests.s3.server import S3Server
from tests.tables.large_object_states import read_large_objects

DATABASE, TWO_CORES = "forked", '[spark]\nmaster = "local[2]"\n'
SEEN_SECONDS_MAX, END_SECONDS_MAX = 60.0, 20.0
# Stops itself before the first task. Sent any earlier, the signal that continues it would be lost.
STOPPED = ("SIGSTOP", CrashPoint.SPARK_READY, "1", "--")
STOPPED_COMMAND = "from tests.faults.signalled_command import main\nmain()\n"


@pytest.fixture(params=["folder", "s3", "encrypted"])
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A database of its own with a table of many tasks, and its initialised store.

    With the encrypted store, reading is limited, and the database has large objects.
    """
    with own_database(shared_fleet, tmp_path, DATABASE, TWO_CORES) as fleet:
        if request.param == "s3":
            s3: S3Server = request.getfixturevalue("s3")
            options = "".join(f"{name} = {json.dumps(value)}\n" for name, value in s3.options.items())
            text = re.sub(
                r"(?m)^store = .*$", f'store = "{s3.bucket(f"test-{uuid.uuid4().hex}")}"', fleet.path.read_text()
            )
            fleet.path.write_text(f"{text}\n[store_options]\n{options}")
        if request.param == "encrypted":
            key = tmp_path / "key"
            key.write_text("0f" * 32)
            key.chmod(0o600)
            more = f'[limits]\nread = "40MB/s"\n[groups]\nlarge_objects = true\n[encryption]\nkey_file = "{key}"\n'
            fleet.path.write_text(f"{fleet.path.read_text()}\n{more}")
            execute(
                fleet.nodes[0].dsn,
                "SELECT lo_from_bytea(n, convert_to(md5(n::text), 'UTF8')) FROM generate_series(1, 9) n",
            )
        execute(
            fleet.nodes[0].dsn,
            "CREATE TABLE item (id bigint PRIMARY KEY, text text)",
            "INSERT INTO item SELECT n, md5(n::text) FROM generate_series(1, 20000) n",
        )
        code, document = run_command(fleet, "init")
        assert code == 0, document
        yield fleet


in_a_folder = pytest.mark.parametrize("fleet", ["folder"], indirect=True)


def works_of_processes(fleet: Fleet, *words: str, code: int = 0) -> set[str]:
    """The functions that processes ran for the command, which must end with the exit code."""
    program = [sys.executable, "-c", IN_PROCESSES + COMMAND, "--fleet", str(fleet.path), "--json", *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    return set(re.findall(r"a process ran (\w+)", done.stderr))


def assert_restored(fleet: Fleet, name: str) -> None:
    (node,), (back,) = fleet.nodes, restore_target(fleet).nodes
    target = fleet.path.with_name("target.toml")
    target.write_text(fleet.path.read_text().replace(node.dsn, back.dsn))
    code, document = run_command(fleet, "restore", name, "--to", str(target), "--yes")
    assert code == 0, document
    assert sorted_copies(back.dsn) == sorted_copies(node.dsn)
    assert read_large_objects(back.dsn) == read_large_objects(node.dsn)


def test_a_create_and_a_check_leave_tasks_to_processes(fleet: Fleet) -> None:
    # The template is resolved with the store, whose threads prevent a fork.
    large = {"copy_large_objects"} if "large_objects" in fleet.path.read_text() else set[str]()
    assert works_of_processes(fleet, "create", "daily-{date}") == {"copy_ranges"} | large
    execute(fleet.nodes[0].dsn, "UPDATE item SET text = 'new' WHERE id % 7 = 0")
    assert works_of_processes(fleet, "create", "daily-{date}", "--incremental") == set()
    # There is no second copy to compare.
    assert "hash_base" in works_of_processes(fleet, "check", "daily-{date}", code=4)
    assert works_of_processes(fleet, "check", "--newest", "--metadata-only", code=4) == set()
    _, listed = run_command(fleet, "list")
    assert_restored(fleet, listed["snapshots"][0]["name"])


@contextmanager
def copying(fleet: Fleet, name: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A create whose tasks wait for a lock as long as the block runs, and its processes."""
    words = ["--fleet", str(fleet.path), "--json", "create", name]
    program = [sys.executable, "-c", IN_PROCESSES + STOPPED_COMMAND, *STOPPED, *words]
    with (
        subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command,
        psycopg.connect(fleet.nodes[0].dsn) as connection,
    ):
        os.waitid(os.P_PID, command.pid, os.WSTOPPED | os.WNOWAIT)
        connection.execute("LOCK TABLE item IN ACCESS EXCLUSIVE MODE")
        command.send_signal(signal.SIGCONT)
        await_sessions(fleet.nodes[0].dsn, 2)
        listed = [file.read_text().split() for file in Path(f"/proc/{command.pid}/task").glob("*/children")]
        # pg_dump is among them. Forked processes have the command's own line.
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for some in listed for pid in some}
        yield command, [pid for pid, line in lines.items() if IN_PROCESSES.encode() in line]


def await_sessions(dsn: str, count: int) -> None:
    """Wait until so many sessions wait for the table's lock."""
    query = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE query LIKE 'LOCK TABLE ONLY%item%' AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
    )
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(query).fetchone() != (count,):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@in_a_folder
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_command(fleet: Fleet, number: signal.Signals) -> None:
    dsn = fleet.nodes[0].dsn
    with copying(fleet, "ended") as (command, forked):
        assert len(forked) == 1
        began = time.monotonic()
        command.send_signal(number)
        output, _ = command.communicate(timeout=SEEN_SECONDS_MAX)
        assert time.monotonic() - began < END_SECONDS_MAX
        # What its parent did not wait for, another process does.
        while Path(f"/proc/{forked[0]}").exists() and number is signal.SIGKILL:
            assert time.monotonic() - began < END_SECONDS_MAX
            time.sleep(0.05)
        assert not Path(f"/proc/{forked[0]}").exists()
    if number is not signal.SIGKILL:
        assert command.returncode == (130 if number is signal.SIGINT else 8), output
        assert slots_of(dsn) == []
    code, document = run_command(fleet, "create", "next")
    assert code == 0, document
    assert_restored(fleet, "next")


@in_a_folder
def test_a_copy_goes_on_without_a_process_that_was_killed(fleet: Fleet) -> None:
    with copying(fleet, "without") as (command, forked):
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
        # Its task waits for the lock once more, in the command.
        await_sessions(fleet.nodes[0].dsn, 2)
    assert command.returncode == 0
    assert_restored(fleet, "without")
