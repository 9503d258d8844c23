"""Operations that others see and stop: real commands, in processes of their own, on real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import pytest

import cutline.snapshots.operations.signs as signs
import cutline.snapshots.operations.under_way as under_way
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.fleet.own_process import own_label, read_label
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect
from cutline.nodes.sessions import in_parallel
from cutline.snapshots.operations.cancelling import CancelResult, cancel_operations
from cutline.snapshots.operations.under_way import read_under_way
from tests.commands.snapshot_runs import Runs, command_line, names_of_snapshots, run_command, runs_on, slots_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 300.0
Found = TypeVar("Found")


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store and a full snapshot `daily`."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("cancel"), spark) as found:
        found.full("daily")
        yield found


@contextmanager
def waiting_create(runs: Runs, name: str) -> Iterator[subprocess.Popen[str]]:
    """A create that waits for an older transaction before it can make its slots."""
    with psycopg.connect(runs.fleet.node("s1").dsn) as older:
        older.execute("SELECT pg_current_xact_id()")
        process = subprocess.Popen(
            [*command_line(runs.fleet, "create", name, "--wait", str(SECONDS_MAX)), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def until(found: Callable[[], Found | None]) -> Found:
    """What is found at last."""
    deadline = time.monotonic() + SECONDS_MAX
    while not (one := found()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return one


def shown(runs: Runs, name: str) -> dict[str, Any] | None:
    """What `status` shows of the create `name`, once a sign of life has the phase in which it waits."""
    code, document = run_command(runs.fleet, "status", "--nodes")
    assert code == 0
    primaries = [one for one in document["nodes"] if one["role"] == "primary"]
    held = {one["node"]: one["holder"] and one["holder"]["snapshot"] for one in primaries}
    for one in document["operations"]:
        if one["snapshot"] == name and one["phase"] == "slots":
            assert {one["lock"] for one in primaries} == {"held"}
            assert held == dict.fromkeys((node.id for node in runs.fleet.primaries), name)
            return dict(one)
    return None


def test_a_create_is_seen_and_stopped_from_another_process(runs: Runs) -> None:
    with waiting_create(runs, "stopped") as process:
        seen = until(lambda: shown(runs, "stopped"))
        owner = read_label(own_label("create", "stopped"))
        assert owner is not None
        assert (seen["kind"], seen["state"], seen["phase"]) == ("create", "running", "slots")
        assert (seen["who"], seen["process"]) == (f"{owner.user}@{owner.host}", process.pid)
        assert seen["total"] == len(runs.fleet.nodes)
        code, document = run_command(runs.fleet, "cancel", seen["operation"])
        assert (code, [one["result"] for one in document["operations"]]) == (0, ["cancelled"])
        output, _ = process.communicate(timeout=SECONDS_MAX)
        error = json.loads(output)
        assert (process.returncode, error["code"], error["error"]) == (8, 8, "cancelled")
        assert error["message"].startswith(f"cancelled by {owner.user}@{owner.host} at ")
    # It has cleaned up: no slot of it is left, nor a sign; and the name is free.
    assert all(len(slots_of(node.dsn)) == 1 for node in runs.fleet.nodes)
    assert run_command(runs.fleet, "status")[1]["operations"] == []
    assert names_of_snapshots(runs.fleet) == ["daily"]
    assert run_command(runs.fleet, "wait", seen["operation"])[0] == 8
    code, document = run_command(runs.fleet, "cancel", seen["operation"])
    assert (code, document["error"], document["details"]["state"]) == (3, "not-under-way", "failed")
    code, document = run_command(runs.fleet, "history", "--name", "stopped")
    assert [(one["state"], one["code"], one["reason"]) for one in document["operations"]] == [
        ("failed", 8, f"cancelled by {owner.user}@{owner.host}")
    ]


def test_a_create_that_was_killed_is_settled(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting_create(runs, "killed") as process:
        seen = until(lambda: shown(runs, "killed"))
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS_MAX)
        # On its own machine that is known at once.
        code, document = run_command(runs.fleet, "wait", seen["operation"], "--wait", "0")
        assert (code, document["error"]) == (3, "operation-dead")
        assert "its process is gone" in document["message"]
        (shown_now,) = run_command(runs.fleet, "status")[1]["operations"]
        assert shown_now["state"] == "dead"
    store = runs.fleet.store.open()
    monkeypatch.setattr(signs, "DEAD_SECONDS", 0.0)
    # The session of the killed process ends within seconds.
    until(lambda: not [one for one in run_command(runs.fleet, "status", "--nodes")[1]["nodes"] if one["holder"]])
    # The next sign of the killed process would be due.
    until(lambda: read_under_way(store)[0].state(datetime.now(UTC)) is under_way.ActivityState.DEAD)
    (found,) = cancel_operations(runs.fleet, read_under_way(store), SECONDS_MAX, Silent())
    assert (found.operation.id, found.result) == (seen["operation"], CancelResult.SETTLED)
    assert all(len(slots_of(node.dsn)) == 1 for node in runs.fleet.nodes)
    assert sorted(store.list_children(f"operations/{seen['operation']}")) == [
        "cancel-1.json", "intent.json", "outcome.json",
    ]  # fmt: skip
    # Nobody knows with which exit code a killed command would have ended.
    assert run_command(runs.fleet, "wait", seen["operation"])[0] == 3


def test_what_has_committed_is_in_history_with_its_volumes(runs: Runs) -> None:
    committed = runs.increment("daily")
    code, document = run_command(runs.fleet, "history", "--name", "daily", "--last", "1")
    (found,) = document["operations"]
    assert code == 0
    assert (found["operation"], found["kind"], found["increment"]) == (committed.operation, "create", 1)
    assert (found["state"], found["code"], found["causes"]) == ("done", 0, [])
    assert found["volumes"]["changes"] == committed.counts["changes"]
    assert found["seconds"] > 0
    assert run_command(runs.fleet, "wait", committed.operation)[0] == 0


def test_a_check_has_a_record_with_its_result(runs: Runs) -> None:
    # Without a standby's copy to compare, or with --metadata-only, a check is inconclusive.
    assert run_command(runs.fleet, "check", "daily", "--metadata-only")[0] == 4
    (found,) = run_command(runs.fleet, "history", "--last", "1")[1]["operations"]
    assert (found["kind"], found["snapshot"], found["state"], found["reason"], found["code"]) == (
        "check", "daily", "done", "inconclusive", 4,
    )  # fmt: skip
    assert run_command(runs.fleet, "wait", found["operation"])[0] == 4


def test_names_that_say_nothing_are_refused(runs: Runs) -> None:
    assert run_command(runs.fleet, "cancel")[0] == 2
    assert run_command(runs.fleet, "cancel", "x", "--all")[0] == 2
    assert run_command(runs.fleet, "cancel", "20261120T000000Z-000000000a")[1]["error"] == "not-under-way"
    assert run_command(runs.fleet, "wait", "20261120T000000Z-000000000a")[1]["error"] == "no-such-operation"
    assert run_command(runs.fleet, "status", "--watch")[0] == 2
    assert run_command(runs.fleet, "cancel", "--all") == (
        0, {"schema": "cutline/cancel/1", "operations": [], "warnings": []},
    )  # fmt: skip


def test_an_interrupt_ends_statements_that_several_nodes_run(runs: Runs) -> None:
    """Whoever called them has said nothing of an interrupt; one of them has no statement to cancel yet."""
    begun = time.monotonic()
    with ExitStack() as stack:
        nodes = runs.fleet.nodes
        sessions = {node.id: stack.enter_context(closing(connect(node))) for node in nodes}

        def work(node: Node) -> None:
            time.sleep(1.5 if node is nodes[0] else 0)
            sessions[node.id].execute(f"SELECT pg_sleep({SECONDS_MAX})")

        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            in_parallel(work, nodes)
    assert time.monotonic() - begun < 20
