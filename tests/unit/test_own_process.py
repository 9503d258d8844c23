"""A process that is gone is known to be, on its own machine alone, and whatever its number is used for since."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs

import cutline.fleet.own_process
from cutline.fleet.own_process import is_gone, own_process
from cutline.snapshots.operations.operation import begin, new_operation
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.operations.under_way import ActivityState, read_under_way
from cutline.snapshots.records.operation_records import Intent
from tests.unit.document_kinds import SIGN
from tests.unit.made_commits import memory

pytestmark = pytest.mark.skipif(not own_process(), reason="this system does not tell when a process began")
TELL = "from cutline.fleet.own_process import own_process; print(own_process(), flush=True); input()"


def other_process() -> tuple[subprocess.Popen[str], str]:
    """A process that waits for its input to end, and what it says that it is."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_process_is_gone_once_it_was_killed_even_before_anybody_has_asked_for_its_result() -> None:
    process, about = other_process()
    assert about.split(" ")[1] == str(process.pid)
    assert not is_gone(about)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(about)
    process.communicate()
    assert is_gone(about)


def test_a_number_that_another_process_has_now_is_not_the_one_that_is_gone() -> None:
    place, number, start = own_process().split(" ")
    assert not is_gone(f"{place} {number} {start}")
    assert is_gone(f"{place} {number} {int(start) - 1}")


def test_nothing_is_known_of_other_machines_and_containers_and_of_what_no_process_has_written() -> None:
    place, _, start = own_process().split(" ")
    boot, namespace, clock = place.split("/")
    for elsewhere in (f"{boot}/{int(namespace) + 1}/{clock}", f"x{place}"):
        assert not is_gone(f"{elsewhere} 999999999 {start}")
    for invented in ("", " -1 1", " 0 1", f" {'9' * 40} 1", " ² 1", " 1"):
        assert not is_gone(f"{place}{invented}")
    assert not is_gone("")


def test_another_users_process_that_is_hidden_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        raise PermissionError

    process, about = other_process()
    monkeypatch.setattr(os, "kill", kill)
    start_of = cutline.fleet.own_process._start
    monkeypatch.setattr(
        "cutline.fleet.own_process._start", lambda number: None if number == process.pid else start_of(number)
    )
    assert not is_gone(about)
    process.communicate()


@pytest.mark.parametrize("has_sign", [False, True])
def test_status_says_at_once_that_an_operation_of_this_machine_is_dead(*, has_sign: bool) -> None:
    process, about = other_process()
    store, now = memory(), datetime.now(UTC)
    intent = structs.replace(new_operation("create", "daily", 3, ("a",)), process=about)
    assert isinstance(intent, Intent)
    begin(store, intent)
    if has_sign:
        store_sign(store, structs.replace(SIGN, operation=intent.id, seen_at=intent.began_at, process=about), 1)
    (found,) = read_under_way(store)
    assert found.state(now) is ActivityState.RUNNING
    process.kill()
    process.communicate()
    assert found.state(now) is ActivityState.DEAD
    assert found.dead_text == "has ended without an outcome: its process is gone"
    assert found.settled_by(now).endswith(f"to settle it now: snapshot cancel {intent.id}")
