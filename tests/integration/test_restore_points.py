"""Restore points (`create --only-cut`): commits with a cut and no rows, that leave nothing on the nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.cli.commands.list import entry_document
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Retention
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.publications import PublicationChangedError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.create.restore_point import create_restore_point, preview_restore_point
from cutline.snapshots.listing.listing import list_store
from cutline.snapshots.listing.recovery_plan import plan_recovery
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.proven_chains import OnlyCutError
from cutline.snapshots.removal.pruning import preview_prune
from cutline.wal.drain.open_transactions import SlotWaitError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import configure_fleet, dropping_slots, removing_new_transfers, run_command, slots_of
from tests.integration.refusing import execute, take_increment
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
KILL_SECONDS_MAX = 600
ROW = "INSERT INTO transfer VALUES (gen_random_uuid(), 1, 10001, 0, '2026-01-01')"


class NoSpark:
    """Restore points need no Spark."""

    @property
    def is_small(self) -> bool:
        return False

    def begin(self, *_: object) -> None:
        raise AssertionError

    def session(self) -> SparkSession:
        raise AssertionError


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    """The shared servers with a store of their own."""
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    with dropping_slots(fleet), removing_new_transfers(shared_fleet.dsns()):
        initialise(fleet, Silent())
        yield fleet


def take(fleet: Fleet, name: str, wait_seconds: float = 60.0) -> FullSnapshot:
    return create_restore_point(fleet, CreateRequest(name, wait_seconds=wait_seconds), Silent())


def slots_on(fleet: Fleet) -> list[str]:
    return [slot for node in fleet.nodes for slot in slots_of(node.dsn)]


def check(fleet: Fleet, name: str) -> tuple[str, list[str]]:
    report = check_snapshots(fleet, CheckRequest(name), NoSpark(), Silent())
    (one,) = report.snapshots
    return one.result, [conflict.kind for conflict in one.conflicts]


def test_a_restore_point_has_a_cut_and_no_rows(fleet: Fleet) -> None:
    for node in fleet.primaries:
        execute(node.dsn, ROW)
    code, made = run_command(fleet, "create", "point", "--only-cut")
    assert (code, made["rows"], made["changes"]) == (0, 0, 0)
    assert [one["node"] for one in made["cut"]["nodes"]] == [node.id for node in fleet.primaries]
    assert slots_on(fleet) == []
    (entry,) = list_store(fleet).entries
    assert (entry_document(entry)["type"], entry.state) == ("only-cut", "complete")
    assert entry.chain is not None
    for one, cut in zip(plan_recovery(entry.chain), made["cut"]["nodes"], strict=True):
        assert one.settings == {
            "recovery_target_lsn": cut["position"],
            "recovery_target_inclusive": "off",
            "recovery_target_timeline": "1",
            "recovery_target_action": "promote",
        }
        assert one.statements == []
    code, report = run_command(fleet, "report", "point")
    assert (code, {one["kind"] for one in report["phases"]}) == (0, {"only-cut"})


def test_a_restore_point_is_checked_and_does_not_pass_on_damage(fleet: Fleet, tmp_path: Path) -> None:
    for node in fleet.primaries:
        execute(node.dsn, ROW)
    take(fleet, "point")
    assert check(fleet, "point") == ("valid", [])
    (segment, *_) = sorted((tmp_path / "store" / "snapshots" / "point" / "wal").rglob("*.parquet"))
    body = segment.read_bytes()
    segment.write_bytes(body[:-20] + b"x" + body[-19:])
    assert check(fleet, "point") == ("conflicts", ["digest"])
    segment.unlink()
    assert check(fleet, "point") == ("conflicts", ["missing"])


def test_it_is_not_restored_and_not_continued(fleet: Fleet) -> None:
    take(fleet, "point")
    with pytest.raises(OnlyCutError) as raised:
        plan_restore(fleet, fleet, RestoreRequest("point"))
    assert (raised.value.exit_code, "snapshot show point --recovery-plan" in str(raised.value.hint)) == (3, True)
    # It has no rows to build, which is no conflict.
    code, refused = run_here(fleet, "check", "point", "--restorable")
    assert (code, refused["error"]) == (3, "only-cut"), refused
    with pytest.raises(OnlyCutError, match="has a cut but no rows"):
        take_increment(fleet, "point")


def test_it_is_neither_a_backup_for_retention_nor_garbage(fleet: Fleet) -> None:
    for name in ("point", "newer"):
        take(fleet, name)
    for rules in (Retention(last=1), Retention(within_seconds=86400)):
        plan = preview_prune(fleet, rules, force=False)
        assert {one.name: one.fate.value for one in plan.verdicts} == {"point": "keep", "newer": "keep"}
    code, garbage = run_command(fleet, "gc", "--dry-run", "--grace", "0s")
    assert (code, garbage["garbage"]) == (0, []), garbage
    code, deleted = run_command(fleet, "delete", "point", "--yes")
    assert code == 0, deleted
    assert [one.name for one in list_store(fleet).entries] == ["newer"]


def test_it_waits_for_older_prepared_transactions_and_names_them(fleet: Fleet) -> None:
    node, _ = fleet.primaries
    execute(node.dsn, f"BEGIN; {ROW}", "PREPARE TRANSACTION 'older'")
    try:
        with pytest.raises(SlotWaitError, match="'older'"):
            take(fleet, "point", wait_seconds=1)
    finally:
        execute(node.dsn, "ROLLBACK PREPARED 'older'")
    assert slots_on(fleet) == []
    take(fleet, "point")


@pytest.mark.parametrize("point", first([CrashPoint.SLOT_MADE, CrashPoint.RESOLVED, CrashPoint.COPY_SLOTS_DROPPED]))
def test_one_that_is_killed_leaves_nothing_after_the_next(fleet: Fleet, point: CrashPoint) -> None:
    words = ["--fleet", str(fleet.path), "create", "point", "--only-cut"]
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", str(point), "1", "--", *words]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=KILL_SECONDS_MAX, cwd=ROOT, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    assert done.returncode == -9, (done.stdout, done.stderr)
    assert list_store(fleet).entries == ()
    take(fleet, "point")
    assert slots_on(fleet) == []
    assert check(fleet, "point") == ("valid", [])


def test_its_dry_run_changes_nothing(fleet: Fleet) -> None:
    plan = preview_restore_point(fleet, CreateRequest("point"), Silent())
    assert plan.nodes == tuple(node.id for node in fleet.primaries)
    assert (slots_on(fleet), list_store(fleet).entries) == ([], ())
    with psycopg.connect(fleet.primaries[0].dsn, autocommit=True) as connection:
        for (name,) in connection.execute(
            "SELECT pubname FROM pg_publication WHERE pubname LIKE 'cutline%'"
        ).fetchall():
            connection.execute(f'DROP PUBLICATION "{name}"'.encode())
    with pytest.raises(PublicationChangedError, match="does not exist"):
        preview_restore_point(fleet, CreateRequest("point"), Silent())


def test_what_copies_rows_is_refused_with_it(fleet: Fleet) -> None:
    code, error = run_command(fleet, "create", "point", "--only-cut", "--incremental")
    assert (code, error["error"]) == (2, "usage"), error
