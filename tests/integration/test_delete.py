"""Deleting and pruning on a real fleet: nothing stays on the nodes, other chains go on, restores are not disturbed."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from check.verify import CheckRequest, check_snapshots
from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet, load_fleet
from fleet.progress import Silent
from restore.plan import plan_restore
from restore.request import RestoreRequest
from restore.restore import restore_fleet
from snapshots.listing.listing import list_store
from snapshots.records.commits import read_chain
from snapshots.records.tombstones import is_deleted
from snapshots.removal.deletion import delete_snapshot
from snapshots.removal.pruning import preview_prune
from tests.cli_runs import run_here
from tests.integration.refusing import create, go_on, refused
from tests.s3_server import S3Server
from tests.snapshot_runs import (
    Ready,
    Runs,
    chains_dropped,
    command_line,
    described,
    names_of_snapshots,
    run_command,
    runs_on,
    slots_of,
    sorted_copies,
)
from tests.stored_documents import documents_known
from wal.slots.slots import slot_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 60
COPIED = "copied"


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a chain that nobody deletes."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("delete"), spark) as made:
        made.full("staying")
        yield made


def slots(fleet: Fleet) -> set[tuple[str, str]]:
    return {(slot, node.id) for node in fleet.nodes for slot in slots_of(node.dsn)}


def publications(fleet: Fleet) -> set[str]:
    found: set[str] = set()
    for node in fleet.primaries:
        with psycopg.connect(node.dsn) as connection:
            found |= {row[0] for row in connection.execute("SELECT pubname FROM pg_publication")}
    return found


def keys(fleet: Fleet, prefix: str) -> list[str]:
    return fleet.store.open().list(prefix)


def done(fleet: Fleet, *words: str) -> dict[str, object]:
    code, document = run_here(fleet, *words)
    assert code == 0, document
    return document


def test_a_deleted_snapshot_leaves_nothing_and_the_others_go_on(runs: Runs) -> None:
    fleet = runs.fleet
    chain = runs.full("going").operation
    points = [runs.increment("going").created_at]
    before, slot = slots(fleet), slot_name(chain)
    assert {(slot, node.id) for node in fleet.nodes} < before
    objects = len(keys(fleet, "snapshots/going"))

    plan = done(fleet, "delete", "going", "--dry-run")
    assert (plan["state"], plan["objects"], plan["slots"]) == ("planned", objects, [slot])
    assert [one["increment"] for one in plan["restore_points"]] == [0, 1]  # type: ignore[attr-defined]
    assert plan["restore_points"][1]["created_at"] == points[0]  # type: ignore[index]
    assert slots(fleet) == before
    assert names_of_snapshots(fleet) == ["going", "staying"]

    document = done(fleet, "delete", "going")
    assert (document["state"], document["objects"]) == ("deleted", objects)
    assert slots(fleet) == {one for one in before if one[0] != slot}
    assert publications(fleet)
    assert keys(fleet, "snapshots/going") == []
    assert names_of_snapshots(fleet) == ["staying"]
    assert done(fleet, "delete", "going")["state"] == "already-deleted"
    with refused(fleet, "snapshot-deleted"):
        create(fleet, "going")

    assert runs.increment("staying").increment > 0
    assert runs.check_one("staying").result == "valid"
    code, document = run_here(fleet, "delete", "staying")
    assert (code, document["error"]) == (3, "last-snapshot")


@pytest.fixture
def target(runs: Runs, shared_fleet: EmbeddedFleet) -> Iterator[Fleet]:
    """The same servers, with other databases to restore into."""
    path = runs.fleet.path.with_name("target.toml")
    path.write_text(re.sub(r"(?m)^(dsn = .*)/bank", rf"\1/{COPIED}", runs.fleet.path.read_text()))
    try:
        yield load_fleet(path)
    finally:
        for node in shared_fleet.primaries:
            with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {COPIED} WITH (FORCE)".encode())


@dataclass
class Standing(Silent):
    """A Progress of a restore that stands still as soon as it begins to change something, until it may go on."""

    reached: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        if name == "create databases":
            self.reached.set()
            assert self.goes_on.wait(SECONDS_MAX)


def test_what_is_restored_is_not_deleted_until_that_is_done(runs: Runs, target: Fleet) -> None:
    fleet, standing = runs.fleet, Standing()
    runs.full("read")
    known = set(keys(fleet, "operations"))
    plan = plan_restore(fleet, target, RestoreRequest("read"))
    with ThreadPoolExecutor(1) as threads:
        restoring = threads.submit(restore_fleet, plan, runs.spark, standing)
        try:
            assert standing.reached.wait(SECONDS_MAX)
            new = set(keys(fleet, "operations")) - known
            code, document = run_here(fleet, "delete", "read", "--force")
            assert (code, document["error"]) == (7, "snapshot-in-use")
            assert document["details"]["process"] == os.getpid()
            assert any(document["details"]["operation"] in key for key in new)
        finally:
            standing.goes_on.set()
        assert restoring.result().snapshot == "read"
    for source, copy in zip(fleet.primaries, target.primaries, strict=True):
        assert sorted_copies(copy.dsn) == sorted_copies(source.dsn)
    _delete_with_a_node_away(runs, "read")


def _delete_with_a_node_away(runs: Runs, name: str) -> None:
    fleet = runs.fleet
    slot = slot_name(read_chain(fleet.store.open(), name).full.chain)
    away = fleet.path.with_name("away.toml")
    # One standby does not answer, another one is not named any more.
    head, *nodes = fleet.path.read_text().split("[[node]]")
    kept = [re.sub(r":\d+/", ":1/", one) if '"s1-b1"' in one else one for one in nodes if '"s2-b1"' not in one]
    away.write_text("[[node]]".join([head, *kept]))
    code, document = run_command(load_fleet(away), "delete", name)
    assert (code, document["state"]) == (6, "unfinished"), document
    assert document["slots_left"] == [f"{slot} on s1-b1"]
    assert document["slots_unknown"] == [f"{slot} on s2-b1"]
    assert keys(fleet, f"snapshots/{name}") == []
    assert done(fleet, "delete", name)["state"] == "deleted"
    assert slot not in {one for one, _ in slots(fleet)}


def test_a_deletion_that_is_killed_is_finished_by_a_repeat(runs: Runs) -> None:
    fleet = runs.fleet
    slot = slot_name(runs.full("killed").operation)
    store = fleet.store.open()
    with subprocess.Popen(
        [*command_line(fleet, "delete", "killed"), "--json"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_deleted(store, "killed"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
    assert names_of_snapshots(fleet) == ["staying"]
    document = done(fleet, "delete", "killed")
    assert document["state"] in ("deleted", "already-deleted")
    assert store.list("snapshots/killed") == []
    assert slot not in {one for one, _ in slots(fleet)}
    assert list_store(fleet).open_operations == ()


def test_pruning_and_the_end_of_the_last_snapshot_on_s3(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, s3: S3Server
) -> None:
    more = "[retention]\nkeep_full = 2\nkeep_increments = 1"
    fleet = described(shared_fleet, tmp_path / "fleet.toml", s3.bucket("delete"), s3.options, more)
    runs = Runs(fleet, Ready(spark))
    with chains_dropped(fleet):
        before, elsewhere = publications(fleet), slots(fleet)
        runs.init()
        own = publications(fleet) - before
        for name in ("one", "two", "three"):
            runs.full(name, only_primary=name != "three")
        runs.increment("two")
        runs.increment("three")
        others = slots(fleet)

        plan = done(fleet, "prune")
        fates = {one["name"]: one["fate"] for one in plan["snapshots"]}  # type: ignore[attr-defined]
        assert fates == {"three": "keep", "two": "only-full", "one": "delete"}
        assert (plan["acted"], slots(fleet)) == (False, others)
        acted = done(fleet, "prune", "--yes")
        ends = [(one["snapshot"], one["state"], one["bytes"]) for one in acted["done"]]  # type: ignore[attr-defined]
        freed = {one["snapshot"]: one["bytes"] for one in plan["steps"]}  # type: ignore[attr-defined]
        assert ends == [("one", "done", freed["one"]), ("two", "done", freed["two"])]
        assert sorted(node for _, node in slots(fleet) - elsewhere) == sorted(node.id for node in fleet.nodes)
        assert keys(fleet, "snapshots/one") == keys(fleet, "snapshots/two/increments") == []
        assert {one.name: one.state for one in list_store(fleet).entries} == {"two": "only-full", "three": "complete"}
        with refused(fleet, "snapshot-missing") as errors:
            go_on(fleet, "two")
        assert "increments of snapshot two were pruned" in errors[0].message
        report = check_snapshots(fleet, CheckRequest(metadata_only=True), runs.spark, Silent())
        assert [(one.name, one.conflicts) for one in report.snapshots] == [("three", []), ("two", [])]
        assert preview_prune(fleet, fleet.retention, force=False).steps == ()

        for name in ("two", "three"):
            deletion = delete_snapshot(fleet, name, Silent(), lambda _plan: None, force=True)
            assert deletion.removed is not None
        assert len(deletion.removed.publications) == len(own) * len(fleet.primaries)
        # Nothing stays but what is of another store.
        assert publications(fleet) == before
        assert slots(fleet) == elsewhere
        with refused(fleet, "publication-changed") as errors:
            create(fleet, "four")
        assert "snapshot init" in errors[0].hint
        runs.init()
        assert publications(fleet) == before | own
        assert documents_known(fleet.store.open())["Mark"] == 3
