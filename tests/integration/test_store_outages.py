"""Commands while S3 fails for a while, as it does for minutes when it splits a prefix: they wait, tell it, and go on.

The short form has outages of seconds, of a kind that the seed draws; the long form (CUTLINE_SOAK=SECONDS) minutes, of
every kind, on every server.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from cutline.storage.s3 import S3Store
from cutline.storage.s3_retries import Pace
from tests.commands.in_process import run_with_stderr
from tests.commands.snapshot_runs import (
    Ready,
    Runs,
    command_line,
    configure_fleet,
    dropping_slots,
    names_of_snapshots,
    run_command,
)
from tests.faults.contest import commits_in
from tests.run.soak import SOAK_SECONDS, first
from tests.s3.kinds import PROXIED_KINDS, S3Place
from tests.s3.proxy import Fault, S3Proxy, s3_proxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OUTAGE_SECONDS = 150.0 if SOAK_SECONDS else 4.0
# A command that is stopped ends in seconds; a Spark session, too.
END_SECONDS_MAX = 20.0
SECONDS_MAX = 300.0
SLOW_DOWN = Fault(arrives=False, status=503, code="SlowDown")
# Whoever refuses may stand before the store: what it refuses may have taken effect.
KINDS = {
    "slow-down": SLOW_DOWN,
    "slow-down-after": Fault(arrives=True, status=503, code="SlowDown"),
    "broken-after": Fault(arrives=True, status=500, code="InternalError"),
    "too-many": Fault(arrives=False, status=429, code="TooManyRequests"),
    "half-bodies": Fault(arrives=True, ends_early=True),
    "clock-skew": Fault(arrives=False, status=403, code="RequestTimeTooSkewed", minutes_ahead=20),
}


@dataclass(slots=True)
class Place:
    """A fleet whose store is S3 behind a proxy."""

    runs: Runs
    proxy: S3Proxy

    def run(self, *words: str, has_answered: bool = False) -> tuple[int, dict[str, Any], list[str]]:
        """Run a command in this process; return its exit code, its document and its notes.

        `has_answered`: the store has answered it before.
        """
        store = self.runs.fleet.store.open()
        assert isinstance(store, S3Store)
        store.client.pace = Pace(f"store {store.url}", has_answered=has_answered)
        err = io.StringIO()
        code, out = run_with_stderr(err, self.runs.fleet, *words, "--json", spark=self.runs.spark.running)
        lines = [json.loads(line) for line in err.getvalue().splitlines()]
        return code, json.loads(out), [line["note"] for line in lines if "note" in line]

    def fail(self, fault: Fault, seconds: float) -> None:
        """Begin an outage of so many seconds."""
        self.proxy.outage = fault
        threading.Timer(seconds, self.recover).start()

    def recover(self) -> None:
        """End the outage."""
        self.proxy.outage = None

    def fail_at(self, fault: Fault, key: str, seconds: float = OUTAGE_SECONDS) -> None:
        """Begin an outage with the first put of such a key, of requests that concern keys that the fault names."""
        begin = partial(self.fail, fault, seconds)
        self.proxy.faults.append(replace(fault, of="PutObject", key=key, ends_early=False, then=begin))


@pytest.fixture(scope="module", params=PROXIED_KINDS)
def place(
    request: pytest.FixtureRequest,
    shared_fleet: EmbeddedFleet,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    server: S3Place = request.getfixturevalue(request.param)
    if not server.endpoint_url:
        pytest.skip("AWS answers only under its own host names, so no proxy can stand in front of it")
    folder = tmp_path_factory.mktemp("outages")
    with s3_proxy(server.endpoint_url) as proxy:
        options = server.options | {"endpoint_url": proxy.endpoint_url}
        fleet = configure_fleet(shared_fleet, folder / "fleet.toml", server.bucket("outages"), options)
        with dropping_slots(fleet):
            found = Place(Runs(fleet, Ready(spark)), proxy)
            found.runs.init()
            yield found


@pytest.fixture(autouse=True)
def recovered(place: Place) -> Iterator[None]:
    yield
    place.recover()
    place.proxy.reset()


def assert_told(notes: list[str], fault: Fault) -> None:
    store = [note for note in notes if note.startswith("store s3://outages")]
    assert any("the request will be retried for up to 10 min" in note for note in store), notes
    # In minutes a sign of life may be waiting, too, and say so once more before it is repeated.
    assert any("answers again" in note for note in store), notes
    assert not any("credentials" in note for note in store)
    if fault.code == "RequestTimeTooSkewed":
        assert any(re.search(r"\b(19|20) min behind", note) for note in store), notes
    elif fault.code:
        assert any(f"{fault.status} {fault.code}" in note for note in store), notes


@pytest.mark.parametrize("kind", first(KINDS))
@pytest.mark.timeout(600 + 10 * OUTAGE_SECONDS)
def test_commands_wait_for_the_store_and_store_nothing_twice(place: Place, kind: str) -> None:
    fault, name = KINDS[kind], kind
    # In the midst of the full snapshot only tasks meet it.
    place.fail_at(replace(fault, key="/base/"), "/base/")
    code, document, notes = place.run("create", name)
    assert (code, document["increment"]) == (0, 0), document
    assert place.proxy.outage is None
    if not fault.ends_early:  # a create reads no base objects
        assert any("the request will be retried" in note for note in notes), notes
    # The commit's own put.
    place.fail_at(fault, "/increments/")
    code, document, notes = place.run("create", name, "--incremental")
    assert (code, document["increment"]) == (0, 1), document
    if not fault.ends_early:
        assert_told(notes, fault)
    assert {key: len(found) for key, found in commits_in(place.runs.fleet.store.open()).items() if key[0] == name} == {
        (name, 0): 1,
        (name, 1): 1,
    }
    for words in (["list"], ["restore", name, "--replace", "--dry-run"], ["check", name], ["gc", "--dry-run"]):
        place.fail(fault, OUTAGE_SECONDS)
        began = time.monotonic()
        # As a first answer, other clocks are more likely a mistake, and waited for in seconds.
        code, document, notes = place.run(*words, has_answered=bool(fault.minutes_ahead))
        assert code == 0, document
        assert time.monotonic() - began >= OUTAGE_SECONDS - 1
        assert_told(notes, fault)
        place.recover()
    # Nothing was stored beside what counts.
    assert document["objects"] == 0, document


def test_a_store_that_stays_away_is_given_up_after_the_time_that_the_file_says(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(place.runs.fleet.path.read_text().replace("[store_options]", '[store_options]\nretry_for = "3s"'))
    impatient = Place(replace(place.runs, fleet=load_fleet(path)), place.proxy)
    place.proxy.outage = SLOW_DOWN
    for words in (["list"], ["create", "never"], ["restore", "never", "--replace", "--dry-run"]):
        began = time.monotonic()
        code, document, _ = impatient.run(*words)
        assert (code, document["error"]) == (6, "store-unreachable"), document
        assert "503 SlowDown, which asks for fewer requests" in document["message"]
        assert "retry_for" in document["hint"]
        assert "credentials" not in document["hint"]
        assert time.monotonic() - began < 3 + END_SECONDS_MAX
    place.recover()
    assert impatient.run("list")[0] == 0


@contextmanager
def waiting(place: Place, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own that has said that it waits for the store."""
    process = subprocess.Popen(
        [*command_line(place.runs.fleet, *words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        assert process.stderr is not None
        lines = []
        while lines[-1:] == [] or "the request will be retried" not in lines[-1]:
            line = process.stderr.readline()
            assert line, lines
            lines.append(line)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_waits_ends_in_seconds_once_it_is_stopped(place: Place, number: signal.Signals) -> None:
    place.proxy.outage = SLOW_DOWN
    code = {signal.SIGINT: 130, signal.SIGTERM: 8}[number]
    with waiting(place, "list") as process:
        process.send_signal(number)
        assert process.wait(END_SECONDS_MAX) == code


def test_a_create_whose_tasks_wait_is_cancelled_in_seconds(place: Place) -> None:
    place.proxy.outage = replace(SLOW_DOWN, key="/base/")
    with waiting(place, "create", "cancelled") as process:
        code, document = run_command(place.runs.fleet, "cancel", "--name", "cancelled")
        assert (code, [one["result"] for one in document["operations"]]) == (0, ["cancelled"])
        assert process.wait(END_SECONDS_MAX) == 8
    place.recover()
    assert "cancelled" not in names_of_snapshots(place.runs.fleet)


def test_a_watch_says_that_the_store_does_not_answer_while_it_waits_for_it(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f'{place.runs.fleet.path.read_text()}\n[watch]\nevery = "10s"\n')
    watched = Place(replace(place.runs, fleet=load_fleet(path)), place.proxy)
    place.proxy.outage = SLOW_DOWN
    with waiting(watched, "watch") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS_MAX) == 0
