"""`snapshot watch` as a service runs it: processes of their own on real servers, ended by signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.wal.drain.slots import drop_slot
from tests.commands.snapshot_runs import configure_fleet, run_command, slots_of
from tests.s3.server import free_port
from tests.servers.dealt import start_fleet
from tests.servers.disasters import kill_server

SECONDS_MAX = 300.0
# Stands by, tries again and gathers after shorter pauses.
PROGRAM = """
import cutline.cli.commands.watch, cutline.cli.watch.schedule, cutline.cli.watch.watch_metrics
cutline.cli.commands.watch.STAND_BY_SECONDS = cutline.cli.watch.schedule.RETRY_SECONDS_FIRST = 1.0
cutline.cli.watch.watch_metrics.GATHER_SECONDS = 2.0
from cutline.cli.main import main
main()
"""


class Watch:
    """A running watch, and what it has logged."""

    def __init__(self, fleet: Fleet, log: Path) -> None:
        self.log = log
        program = [sys.executable, "-c", PROGRAM, "--json", "--fleet", str(fleet.path)]
        with log.open("wb") as errors, log.with_suffix(".out").open("wb") as out:
            self.process = subprocess.Popen([*program, "watch"], stdout=out, stderr=errors)

    def texts(self) -> list[str]:
        """What it has said."""
        return [json.loads(line)["text"] for line in self.log.read_text().splitlines()]

    def await_text(self, part: str, after: str = "") -> str:
        """Wait until it has said it, since it said the text `after` for the last time; return what it said last."""
        found: list[str] = []

        def is_said() -> bool:
            texts = self.texts()
            later = len(texts) - texts[::-1].index(after) if after else 0
            found[:] = [text for text in texts[later:] if part in text]
            return bool(found)

        wait_until(is_said, lambda: f"{part!r} in {self.texts()}")
        return found[-1]

    def stop(self) -> tuple[int, dict[str, Any]]:
        """Ask it to end as a service is; return its exit code and its document."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(SECONDS_MAX)
        return code, json.loads(self.log.with_suffix(".out").read_text() or "{}")


def wait_until(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    directory = tmp_path_factory.mktemp("watch") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=0)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture
def fleet(servers: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    for node in servers.primaries:
        with psycopg.connect(node.dsn(), autocommit=True) as session:
            session.execute("CREATE TABLE IF NOT EXISTS seen (id int PRIMARY KEY)")
    rules = f"""
    [watch]
    every = "10s"
    check = "never"

    [metrics]
    listen = "{free_port()}"

    [notify]
    command = [{json.dumps(sys.executable)}, "-c", {json.dumps(APPEND)}, {json.dumps(str(tmp_path / "notified"))}]
    """
    configured = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=rules)
    try:
        yield configured
    finally:
        for node in configured.nodes:
            for slot in slots_of(node.dsn):
                drop_slot(node, slot)


APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


@pytest.fixture
def watches(fleet: Fleet, tmp_path: Path) -> Iterator[Callable[[], Watch]]:
    started: list[Watch] = []

    def start() -> Watch:
        started.append(Watch(fleet, tmp_path / f"watch-{len(started)}.log"))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def init(fleet: Fleet) -> None:
    code, document = run_command(fleet, "init")
    assert code == 0, document


def listed(fleet: Fleet) -> list[dict[str, Any]]:
    code, document = run_command(fleet, "list")
    assert code == 0
    snapshots: list[dict[str, Any]] = document["snapshots"]
    return snapshots


def metrics_of(fleet: Fleet) -> dict[tuple[str, str], float]:
    """By name and kind what the endpoint serves."""
    address = fleet.metrics.listen
    assert address is not None
    try:
        with urlopen(f"http://{address.host}:{address.port}/metrics") as answer:
            text = answer.read().decode()
    except OSError:
        # Nothing listens, or nothing was gathered yet.
        return {}
    families = text_string_to_metric_families(text)
    return {(one.name, one.labels.get("kind", "")): one.value for family in families for one in family.samples}


def test_it_takes_over_backs_off_and_begins_a_new_chain(
    fleet: Fleet, watches: Callable[[], Watch], tmp_path: Path
) -> None:
    refused = watches()
    assert refused.process.wait(SECONDS_MAX) == 3
    assert json.loads(refused.log.with_suffix(".out").read_text())["error"] == "store-not-initialised"
    init(fleet)
    first = watches()
    first.await_text("full snapshot watch-")
    with psycopg.connect(fleet.primaries[0].dsn, autocommit=True) as session:
        session.execute("INSERT INTO seen VALUES (1)")
    assert "increment " in first.await_text(": 1 change, ")
    first.await_text("increment 2 of watch-")
    (snapshot,) = listed(fleet)
    taken = [time_of(one["cut_at"]) for one in snapshot["increments"]]
    assert all(other - one > 9 for one, other in pairwise(taken))

    code, status = run_command(fleet, "status")
    (one,) = [found for found in status["operations"] if found["kind"] == "watch"]
    assert (code, one["state"]) == (0, "running")
    wait_until(
        lambda: metrics_of(fleet).get(("cutline_watch_active", "")) == 1, lambda: "the metrics say that it works"
    )

    second = watches()
    second.await_text("standing by: node s1: another operation is running: watch by")
    # One that stands by reads the file again, too: to take over, it has to know where the nodes are.
    fleet.path.write_text(fleet.path.read_text() + "\n# changed\n")
    second.await_text("was reloaded")
    first.process.kill()
    first.process.wait()
    # The same chain goes on.
    second.await_text(f"of {snapshot['name']}: ")
    assert len(listed(fleet)) == 1

    # A slot that is gone: the shard is copied again, and the chain goes on.
    (slot,) = slots_of(fleet.nodes[0].dsn)
    wait_until(lambda: drop_if_idle(fleet, slot), lambda: "the slot is in use")
    copied_again = second.await_text(f"primary s1 is copied again: slot {slot} does not exist")
    second.await_text(f"of {snapshot['name']}: ", after=copied_again)
    assert len(listed(fleet)) == 1
    # A publication that was altered for a while: changes may be missing, and the shard is copied again.
    with psycopg.connect(fleet.primaries[0].dsn, autocommit=True) as session:
        (name, *_), *_ = session.execute("SELECT pubname FROM pg_publication ORDER BY pubname").fetchall()
        for publish in ("insert", "insert, update, delete, truncate"):
            session.execute(f"ALTER PUBLICATION {name} SET (publish = '{publish}')".encode())
    second.await_text("publication of 3 tables (public.account, public.seen, public.transfer) was altered or replaced")
    # A chain that an operator ends: another begins.
    wait_until(lambda: run_command(fleet, "end", snapshot["name"], "--yes")[0] == 0, lambda: "the fleet is busy")
    second.await_text("can't continue")
    second.await_text("full snapshot watch-")
    second.await_text("increment 1 of watch-")
    old, new = sorted(listed(fleet), key=lambda found: found["created_at"])
    assert (old["name"], new["state"]) == (snapshot["name"], "complete")
    assert (old["state"], old["ended"]["node"]) == ("ended", "")
    assert all(len(slots_of(node.dsn)) == 1 for node in fleet.nodes)
    wait_until(lambda: len(notified(tmp_path)) > 1, lambda: "the gap and the failure are notified")
    events = [[event[name] for name in ("event", "task", "snapshot")] for event in notified(tmp_path)]
    assert ["failed", "gaps", snapshot["name"]] == events[0]
    assert "can be restored: primary s1 was copied again: slot" in notified(tmp_path)[0]["message"]
    assert len([event for event in events if event[1] == "gaps"]) > 1
    assert next(event for event in events if event[1] != "gaps") == ["failed", "increment", snapshot["name"]]
    code, document = second.stop()
    assert (code, document["schema"]) == (0, "cutline/watch/1")
    assert second.texts()[-1] == "stopped by SIGTERM"
    assert run_command(fleet, "history")[1]["operations"][0]["state"] == "done"


def notified(folder: Path) -> list[dict[str, Any]]:
    """What the command of [notify] was given."""
    file = folder / "notified"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def drop_if_idle(fleet: Fleet, slot: str) -> bool:
    try:
        return drop_slot(fleet.nodes[0], slot)
    except psycopg.Error:
        return False


def time_of(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.rest
def test_a_node_that_is_away_is_said_and_waited_for(
    servers: EmbeddedFleet, fleet: Fleet, watches: Callable[[], Watch], tmp_path: Path
) -> None:
    init(fleet)
    watch = watches()
    watch.await_text("increment 1 of watch-")
    node = servers.node("s2")
    kill_server(node)
    try:
        watch.await_text("increment: node s2")

        def is_said() -> bool:
            _, status = run_command(fleet, "status")
            return any("increment fails: node s2" in one["phase"] for one in status["operations"])

        wait_until(is_said, lambda: "status says what fails")
    finally:
        servers.start_node(node)
    watch.await_text("increment is working again")
    watch.await_text("increment 2 of watch-")
    # One word about the failure, however many attempts there were, and one about its end.
    wait_until(lambda: len(notified(tmp_path)) > 1, lambda: "its end is notified")
    events = notified(tmp_path)
    assert [event["event"] for event in events] == ["failed", "recovered"]
    assert {event["task"] for event in events} == {"increment"}
    assert watch.stop()[0] == 0


@pytest.mark.rest
def test_a_watch_says_at_once_what_a_full_snapshot_waits_for(
    servers: EmbeddedFleet, fleet: Fleet, watches: Callable[[], Watch]
) -> None:
    """A transaction that is prepared, and whose coordinator has died, keeps PostgreSQL from creating the slot."""
    init(fleet)
    with psycopg.connect(servers.node("s1").dsn(), autocommit=True) as session:
        session.execute("BEGIN; INSERT INTO seen VALUES (-1); PREPARE TRANSACTION 'left behind'")
        try:
            watch = watches()
            watch.await_text("prepared transaction 'left behind'")
            assert not any("full snapshot watch-" in text for text in watch.texts())
        finally:
            session.execute("ROLLBACK PREPARED 'left behind'")
    watch.await_text("full snapshot watch-")
    said = [text for text in watch.texts() if "left behind" in text]
    assert len(set(said)) == len(said)
    assert watch.stop()[0] == 0


def test_cancel_ends_a_watch_as_any_operation(fleet: Fleet, watches: Callable[[], Watch]) -> None:
    init(fleet)
    watch = watches()
    watch.await_text("full snapshot watch-")
    code, document = run_command(fleet, "cancel", "--all")
    assert code == 0, document
    assert watch.process.wait(SECONDS_MAX) == 8
    assert json.loads(watch.log.with_suffix(".out").read_text())["error"] == "cancelled"


def test_a_watch_that_ends_sends_the_notices_that_are_left_or_names_them(
    fleet: Fleet, watches: Callable[[], Watch], tmp_path: Path
) -> None:
    """The command fails while the file `away` exists."""
    away, refused, lost = tmp_path / "away", "[notify] command", "a notice was not delivered before the watch ended"
    away.touch()
    fails = f"import os; assert not os.path.exists({str(away)!r}); {APPEND}"
    valid = fleet.path.read_text().replace(json.dumps(APPEND), json.dumps(fails))
    fleet.path.write_text(valid)
    init(fleet)
    first = watches()
    first.await_text("full snapshot watch-")
    fleet.path.write_text(valid + "\n[wat")
    first.await_text(refused)
    assert notified(tmp_path) == []
    away.unlink()
    assert first.stop()[0] == 0
    assert [(event["event"], event["task"]) for event in notified(tmp_path)] == [("failed", "fleet-file")]
    assert not any(lost in text for text in first.texts())

    # The next watch knows that this was told, and that the file is right again.
    away.touch()
    fleet.path.write_text(valid)
    second = watches()
    second.await_text(refused)
    assert second.stop()[0] == 0
    assert f"{lost}: fleet-file recovered at " in second.await_text(lost)
    assert second.texts()[-1] == "stopped by SIGTERM"
    assert len(notified(tmp_path)) == 1
