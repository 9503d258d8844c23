"""Deleting and pruning on a real fleet: nothing stays on the nodes, other chains continue, restores are protected."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Retention, load_fleet
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.listing.listing import list_store
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.tombstones import is_deleted
from cutline.snapshots.removal.deletion import delete_snapshot
from cutline.snapshots.removal.pruning import preview_prune
from cutline.wal.drain.slots import slot_name
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import (
    Ready,
    Runs,
    command_line,
    configure_fleet,
    dropping_slots,
    names_of_snapshots,
    run_command,
    runs_on,
    slots_of,
    sorted_copies,
)
from tests.integration.refusing import create, refused, take_increment
from tests.s3.server import S3Server
from tests.stores.damage import flip_byte
from tests.stores.documents import check_documents
from tests.stores.listed import objects_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 60
# A delete that is killed once the tombstone is stored, before it removes anything.
DYING = """
import os, signal
import cutline.snapshots.removal.removing as removing
put_mark = removing.put_mark
def put_and_die(*arguments, **options):
    put_mark(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
removing.put_mark = put_and_die
"""
COPIED = "copied"
# A command that reads a deleted snapshot needs no new name.
GONE_HINT = "it can't be read any more; to see which snapshots there are: snapshot "


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with one chain that no test deletes."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("delete"), spark) as found:
        found.full("staying")
        yield found


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


def run_ok(fleet: Fleet, *words: str) -> dict[str, object]:
    code, document = run_here(fleet, *words)
    assert code == 0, document
    return document


def test_a_deleted_snapshot_leaves_nothing_and_other_chains_continue(runs: Runs) -> None:
    fleet = runs.fleet
    chain = runs.full("going").operation
    points = [runs.increment("going").created_at]
    before, slot = slots(fleet), slot_name(chain)
    assert {(slot, node.id) for node in fleet.nodes} < before
    objects = len(keys(fleet, "snapshots/going"))

    plan = run_ok(fleet, "delete", "going", "--dry-run")
    assert (plan["state"], plan["objects"], plan["slots"]) == ("planned", objects, [slot])
    assert [one["increment"] for one in plan["restore_points"]] == [0, 1]  # type: ignore[attr-defined]
    assert plan["restore_points"][1]["created_at"] == points[0]  # type: ignore[index]
    assert slots(fleet) == before
    assert names_of_snapshots(fleet) == ["going", "staying"]

    document = run_ok(fleet, "delete", "going", "--yes")
    assert (document["state"], document["objects"]) == ("deleted", objects)
    assert slots(fleet) == {one for one in before if one[0] != slot}
    assert publications(fleet)
    assert keys(fleet, "snapshots/going") == []
    assert names_of_snapshots(fleet) == ["staying"]
    assert run_ok(fleet, "delete", "going", "--yes")["state"] == "already-deleted"
    with refused(fleet, "snapshot-deleted") as errors:
        create(fleet, "going")
    assert errors[0].hint.startswith("choose a new name")
    code, found = run_here(fleet, "create", "going", "--incremental")
    assert (code, found["error"]) == (3, "snapshot-deleted")
    assert str(found["hint"]).startswith("choose a new name")
    for words in ("check",), ("merge", "--yes"), ("restore", "--yes"), ("show",), ("keep",), ("drill",), ("report",):
        code, found = run_here(fleet, words[0], "going", *words[1:])
        assert (code, found["error"]) == (3, "snapshot-deleted"), words
        assert str(found["hint"]).startswith(GONE_HINT), words

    assert runs.increment("staying").increment > 0
    assert runs.check_one("staying").result == "valid"
    code, document = run_here(fleet, "delete", "staying", "--yes")
    assert (code, document["error"]) == (3, "last-snapshot")


@pytest.fixture
def target(runs: Runs, shared_fleet: EmbeddedFleet) -> Iterator[Fleet]:
    """The same servers, with another database on each to restore into."""
    path = runs.fleet.path.with_name("target.toml")
    path.write_text(re.sub(r"(?m)^(dsn = .*)/bank", rf"\1/{COPIED}", runs.fleet.path.read_text()))
    try:
        yield load_fleet(path)
    finally:
        for node in shared_fleet.primaries:
            with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {COPIED} WITH (FORCE)".encode())


@dataclass
class Pausing(Silent):
    """The Progress of a restore that pauses right before its first change, until `may_continue` is set."""

    paused: threading.Event = field(default_factory=threading.Event)
    may_continue: threading.Event = field(default_factory=threading.Event)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        if name == "create databases":
            self.paused.set()
            assert self.may_continue.wait(SECONDS_MAX)


def test_a_snapshot_is_not_deleted_while_a_restore_reads_it(runs: Runs, target: Fleet) -> None:
    fleet, pausing = runs.fleet, Pausing()
    runs.full("read")
    known = set(keys(fleet, "operations"))
    plan = plan_restore(fleet, target, RestoreRequest("read"))
    with ThreadPoolExecutor(1) as threads:
        restore = threads.submit(restore_fleet, plan, runs.spark, pausing)
        try:
            assert pausing.paused.wait(SECONDS_MAX)
            new = set(keys(fleet, "operations")) - known
            code, document = run_here(fleet, "delete", "read", "--force", "--yes")
            assert (code, document["error"]) == (7, "snapshot-in-use")
            assert document["details"]["process"] == os.getpid()
            assert any(document["details"]["operation"] in key for key in new)
        finally:
            pausing.may_continue.set()
        assert restore.result().snapshot == "read"
    for source, copy in zip(fleet.primaries, target.primaries, strict=True):
        assert sorted_copies(copy.dsn) == sorted_copies(source.dsn)
    _assert_a_delete_names_slots_on_missing_nodes(runs, "read")


def _assert_a_delete_names_slots_on_missing_nodes(runs: Runs, name: str) -> None:
    fleet = runs.fleet
    slot = slot_name(read_chain(fleet.store.open(), name).full.chain)
    away = fleet.path.with_name("away.toml")
    # One standby does not answer, the other one is no longer in fleet.toml.
    head, *nodes = fleet.path.read_text().split("[[node]]")
    unreachable = 'dsn = "postgresql://postgres@127.0.0.1:1/bank"'
    kept = [re.sub("dsn = .*", unreachable, one) if '"s1-b1"' in one else one for one in nodes if '"s2-b1"' not in one]
    away.write_text("[[node]]".join([head, *kept]))
    code, document = run_command(load_fleet(away), "delete", name, "--yes")
    assert (code, document["state"]) == (6, "unfinished"), document
    assert document["slots_left"] == [f"{slot} on s1-b1"]
    assert document["slots_unknown"] == [f"{slot} on s2-b1"]
    assert keys(fleet, f"snapshots/{name}") == []
    assert run_ok(fleet, "delete", name, "--yes")["state"] == "deleted"
    assert slot not in {one for one, _ in slots(fleet)}


def test_a_killed_delete_is_completed_by_the_next(runs: Runs) -> None:
    fleet = runs.fleet
    slot = slot_name(runs.full("killed").operation)
    store = fleet.store.open()
    program, *words = command_line(fleet, "delete", "killed", "--yes")[2:]
    ended = subprocess.run(
        [sys.executable, "-c", DYING + program, *words], capture_output=True, timeout=SECONDS_MAX, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert is_deleted(store, "killed")
    assert store.list("snapshots/killed") != []
    assert slot in {one for one, _ in slots(fleet)}
    assert names_of_snapshots(fleet) == ["staying"]
    document = run_ok(fleet, "delete", "killed", "--yes")
    assert document["state"] == "deleted"
    assert store.list("snapshots/killed") == []
    assert slot not in {one for one, _ in slots(fleet)}
    assert list_store(fleet).open_operations == ()


@pytest.mark.rest
def test_pruning_and_deleting_the_last_snapshot_on_s3(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, s3: S3Server
) -> None:
    more = "[retention]\nlast = 1\nonly_full = 2"
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", s3.bucket("delete"), s3.options, more)
    runs = Runs(fleet, Ready(spark))
    with dropping_slots(fleet):
        before, elsewhere = publications(fleet), slots(fleet)
        runs.init()
        own = publications(fleet) - before
        for name in ("one", "two", "three"):
            runs.full(name, only_primary=name != "three")
        runs.increment("two")
        runs.increment("three")
        others = slots(fleet)

        plan = run_ok(fleet, "prune", "--dry-run")
        fates = {one["name"]: one["fate"] for one in plan["snapshots"]}  # type: ignore[attr-defined]
        assert fates == {"three": "keep", "two": "only-full", "one": "delete"}
        assert (plan["dry_run"], slots(fleet)) == (True, others)
        acted = run_ok(fleet, "prune", "--yes")
        ends = [(one["snapshot"], one["state"], one["bytes"]) for one in acted["done"]]  # type: ignore[attr-defined]
        freed = {one["snapshot"]: one["bytes"] for one in plan["steps"]}  # type: ignore[attr-defined]
        assert ends == [("one", "done", freed["one"]), ("two", "done", freed["two"])]
        assert sorted(node for _, node in slots(fleet) - elsewhere) == sorted(node.id for node in fleet.nodes)
        assert keys(fleet, "snapshots/one") == keys(fleet, "snapshots/two/increments") == []
        assert {one.name: one.state for one in list_store(fleet).entries} == {"two": "only-full", "three": "complete"}
        with refused(fleet, "snapshot-missing") as errors:
            take_increment(fleet, "two")
        assert "increments of snapshot two were pruned" in errors[0].message
        report = check_snapshots(fleet, CheckRequest(metadata_only=True), runs.spark, Silent())
        assert [(one.name, one.conflicts) for one in report.snapshots] == [("three", []), ("two", [])]
        assert preview_prune(fleet, fleet.retention, force=False).steps == ()

        for name in ("two", "three"):
            deletion = delete_snapshot(fleet, name, Silent(), lambda _plan: None, force=True)
            assert deletion.removed is not None
        assert len(deletion.removed.publications) == len(own) * len(fleet.primaries)
        # Only slots and publications of another store remain.
        assert publications(fleet) == before
        assert slots(fleet) == elsewhere
        with refused(fleet, "publication-changed") as errors:
            create(fleet, "four")
        assert re.fullmatch(r"node s\d: publication cutline_\w{8} does not exist", errors[0].message)
        assert errors[0].hint == "create it, then repeat the command: snapshot init"
        runs.init()
        assert publications(fleet) == before | own
        assert check_documents(fleet.store.open())["Mark"] == 3


def test_a_prune_keeps_the_older_snapshot_while_a_check_of_the_newest_has_found_conflicts(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with runs_on(shared_fleet, tmp_path, spark) as runs:
        fleet = runs.fleet
        for name in ("good", "bad"):
            runs.full(name)
        whole = read_chain(fleet.store.open(), "bad").full
        damaged = tmp_path / "store" / next(one.key for one in objects_of(whole) if one.kind == "base")
        flip_byte(damaged)
        code, document = run_here(fleet, "check", "bad", spark=spark)
        assert (code, document["result"]) == (1, "conflicts")

        document = run_ok(fleet, "prune", "--keep-last", "1", "--yes")
        assert document["steps"] == document["done"] == []
        verdicts = {one["name"]: one for one in document["snapshots"]}  # type: ignore[attr-defined]
        assert {name: one["fate"] for name, one in verdicts.items()} == {"bad": "keep", "good": "keep"}
        assert verdicts["good"]["why"] == [
            "last 1: it is the newest without conflicts",
            "it is the newest snapshot without conflicts",
        ]
        assert (verdicts["bad"]["checked"]["result"], verdicts["good"]["checked"]) == ("conflicts", None)
        assert "conflicts in bad, so these are kept instead: good;" in document["warnings"][0]  # type: ignore[index]
        assert "see snapshot check bad" in run_as_text(fleet, "prune", "--keep-last", "1", "--dry-run")

        # What a check of less finds does not clear it; once the object is put back, a full check does.
        flip_byte(damaged)
        assert run_here(fleet, "check", "bad", "--metadata-only", spark=spark)[0] == 4
        assert preview_prune(fleet, Retention(last=1), force=False).steps == ()
        assert run_here(fleet, "check", "bad", spark=spark)[0] == 0
        document = run_ok(fleet, "prune", "--keep-last", "1", "--yes")
        assert [one["snapshot"] for one in document["done"]] == ["good"]  # type: ignore[attr-defined]
        assert names_of_snapshots(fleet) == ["bad"]
