"""`snapshot gc` as a process, on a store in a folder; no node is reachable."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutline.cli.commands.gc import lines_of
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.records.documents import Kind
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.snapshots.removal import gc
from cutline.snapshots.removal.garbage_rules import GarbageReason, GarbageVerdict
from cutline.snapshots.removal.gc import Garbage, GcReport, RefusedRemoval, collect_garbage
from cutline.snapshots.removal.survey import SizeTotal
from cutline.storage.local import LocalStore
from cutline.storage.store import StoreUnreachableError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import command_line, run_command
from tests.unit.made_garbage import StoreBuilder, needed_by
from tests.unit.test_leases import begin_restore

SECONDS_MAX = 60
MANY = 6000


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'name = "shop"\nstore = "file://{tmp_path}/store"\n[retention]\ngc_grace = "7d"\n'
        '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
    )
    return load_fleet(path)


@pytest.fixture
def builder(fleet: Fleet, tmp_path: Path) -> StoreBuilder:
    store = LocalStore(tmp_path / "store")
    ensure_identity(store, fleet)
    return StoreBuilder(store)


def count_files(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def run_gc(fleet: Fleet, *words: str) -> dict[str, Any]:
    code, document = run_command(fleet, "gc", "--yes", *words)
    assert code == 0, document
    assert document["schema"] == "cutline/gc/1"
    return document


def test_an_expired_lease_ends_a_restore_only_if_a_node_has_told_the_time(
    fleet: Fleet, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of this machine may be weeks ahead, and the restore still running on another one."""
    store = builder.store
    restore = begin_restore(store, datetime.now(UTC) - timedelta(days=8))
    report = collect_garbage(fleet, 0, Silent())
    assert [one.operation for one in open_leases(store)] == [restore], report
    monkeypatch.setattr(gc, "open_sessions", lambda *_: nullcontext(SimpleNamespace(clocks={})))
    monkeypatch.setattr(gc, "note_clocks", lambda *_: None)
    collect_garbage(fleet, 0, Silent())
    assert open_leases(store) == []


def test_a_dry_run_shows_what_the_command_then_removes(fleet: Fleet, builder: StoreBuilder) -> None:
    chain = builder.take_full("daily")
    failed = builder.begin_create("other")
    left = builder.store_base(failed)
    record_outcome(builder.store, failed, "failed")
    before = builder.store.list("")
    preview = run_gc(fleet, "--grace", "0", "--dry-run")
    assert builder.store.list("") == before
    assert {one["object"]: one["bytes"] for one in preview["garbage"]} == {key: len(key) for key in left}
    assert {(one["snapshot"], one["kind"]): one["objects"] for one in preview["by_kind"]} == {
        ("other", "base"): 4,
        ("other", "schema"): 1,
    }
    assert {one["operation"] for one in preview["garbage"]} == {failed.id}
    done = run_gc(fleet, "--grace", "0")
    totals = {"objects": len(left), "bytes": sum(map(len, left))}
    for document in (preview, done):
        assert {name: document[name] for name in totals} == totals
        assert (document["refused"], document["unknown"], document["open_operations"]) == ([], [], [])
    (own,) = set(builder.store.list("")) - set(before)
    assert own.endswith("/outcome.json")
    assert builder.store.list("") == sorted({*before, own} - set(left))
    assert run_gc(fleet, "--grace", "0")["objects"] == 0
    assert needed_by(chain) < set(before)


def test_the_grace_period_is_that_of_the_fleet_file_unless_one_is_given(fleet: Fleet, builder: StoreBuilder) -> None:
    failed = builder.begin_create("other")
    left = builder.store_base(failed)
    record_outcome(builder.store, failed, "failed")
    document = run_gc(fleet)
    assert (document["grace_seconds"], document["objects"]) == (7 * 86400, 0)
    assert sum(one["objects"] for one in document["kept"] if one["why"] == "young") == len(left)
    code, wrong = run_command(fleet, "gc", "--yes", "--grace", "a while")
    assert (code, wrong["error"]) == (2, "usage")


def test_open_operations_stay_unsettled_and_are_named_if_no_node_is_reachable(
    fleet: Fleet, builder: StoreBuilder
) -> None:
    running = builder.begin_create("other")
    builder.store_base(running)
    before = builder.store.list("")
    # A dry run contacts no node.
    assert run_gc(fleet, "--grace", "0", "--dry-run")["unsettled"] is None
    document = run_gc(fleet, "--grace", "0")
    assert (document["objects"], document["settled"]) == (0, False)
    assert "node a" in document["unsettled"]
    assert [one["operation"] for one in document["open_operations"]] == [running.id]
    (own,) = set(builder.store.list("")) - set(before)
    assert (set(before) - set(builder.store.list("")), own.endswith("/outcome.json")) == (set(), True)
    done = subprocess.run(
        command_line(fleet, "gc", "--yes", "--grace", "0"),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0
    assert "removed 0 objects, 0 B" in done.stdout
    assert "5 objects" in done.stdout
    assert f"operation {running.id} (create other" in done.stdout
    assert "earlier operations were not settled: node a" in done.stdout


def test_a_grace_period_of_zero_is_not_to_be_shortened() -> None:
    report = GcReport(0.0)
    report.keep("", GarbageVerdict(GarbageReason.YOUNG), 5)
    reason = "too young (grace period, or an hour for probes and ended chains)"
    assert lines_of(report)[1:] == [f"kept: 1 object, 5 B {reason}"]
    report.grace_seconds = 60.0
    assert lines_of(report)[2:] == ["the grace period is 1 min 00 s; to shorten it: --grace TIME"]


def test_garbage_in_a_full_store_is_removed_although_nothing_can_be_recorded(
    fleet: Fleet, builder: StoreBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = builder.begin_create("other")
    left = builder.store_base(failed)
    record_outcome(builder.store, failed, "failed")
    dead = begin_restore(builder.store, datetime.now(UTC) - timedelta(days=8))
    monkeypatch.setattr(gc, "open_sessions", lambda *_: nullcontext(SimpleNamespace(clocks={})))
    monkeypatch.setattr(gc, "note_clocks", lambda *_: None)
    full = StoreUnreachableError(url="file:///store", reason="no space left on device")

    def refuse(*_: object) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", refuse)
        code, document = run_here(fleet, "gc", "--yes", "--grace", "0")
    assert (code, document["unsettled"], document["objects"]) == (0, full.message, len(left))
    assert document["warnings"] == [
        f"the result of this gc could not be recorded, so history and metrics do not know it: {full.message}"
    ]
    assert [one.operation for one in open_leases(builder.store)] == [dead]
    assert run_here(fleet, "gc", "--yes", "--grace", "0")[1]["settled"]


def test_an_interrupted_gc_ends_soon_and_a_repeat_finishes(fleet: Fleet, builder: StoreBuilder) -> None:
    chain = builder.take_full("daily")
    failed = builder.begin_create("other")
    record_outcome(builder.store, failed, "failed")
    folder = builder.store.root / f"snapshots/other/base/a/{failed.id}"
    folder.mkdir(parents=True)
    for number in range(MANY):
        (folder / f"part-{number:06d}-000-ab.parquet").write_bytes(b"x")
    with subprocess.Popen(
        command_line(fleet, "gc", "--yes", "--grace", "0", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + SECONDS_MAX
        while count_files(folder) == MANY:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 130
    assert json.loads(out)["error"] == "interrupted"
    left = count_files(folder)
    assert 0 < left < MANY
    assert run_gc(fleet, "--grace", "0")["objects"] == left
    assert not folder.exists()
    assert all(builder.store.exists(key) for key in needed_by(chain))


@pytest.mark.usefixtures("builder")
def test_refused_removals_are_listed_and_set_the_exit_code(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cutline.cli.commands.gc
    import cutline.cli.main

    report = GcReport(0.0, garbage=[Garbage(Kind.BASE, GarbageReason.FAILED, (), "other")], removed=SizeTotal(2, 20))
    report.refused = [RefusedRemoval("snapshots/other/x", "locked until tomorrow")]
    report.keep("daily", GarbageVerdict(GarbageReason.UNCLEAR, "its commit is gone"), 7)
    monkeypatch.setattr(cutline.cli.commands.gc, "collect_garbage", lambda *_, **__: report)
    assert cutline.cli.main.run(["--fleet", str(fleet.path), "--quiet", "gc", "--yes"]) == 3
    text = capsys.readouterr().out
    assert "removed 2 objects, 20 B" in text
    assert "locked until tomorrow" in text
    assert "warning: snapshot daily: its commit is gone" in text
    assert cutline.cli.main.run(["--fleet", str(fleet.path), "--quiet", "gc", "--yes", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["refused"] == [{"object": "snapshots/other/x", "reason": "locked until tomorrow"}]
    assert document["objects"] == 2
