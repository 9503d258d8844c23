"""gc on real fleets: after creates that died, during running creates, and on S3."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.records.proven_chains import increment_numbers, read_chain
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.snapshots.removal.garbage_rules import GarbageReason
from cutline.snapshots.removal.gc import GcReport, collect_garbage, preview_garbage
from cutline.storage.errors import BusyError, IndeterminateError
from cutline.wal.drain.slots import slot_name
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Runs, configure_fleet, removing_new_transfers, runs_on, slots_of, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.s3.server import S3Server
from tests.stores.documents import check_documents
from tests.unit.made_garbage import StoreBuilder, needed_by, run_gc

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESTORED = "restored"
# At each point more is in the store than at the one before.
FULL_DEATHS = (CrashPoint.BASE_COPIED, CrashPoint.SEQUENCES_READ)
INCREMENT_DEATHS = (CrashPoint.ARCHIVED, CrashPoint.RESOLVED)
INCREMENTS = 2
# Between two runs of gc, which otherwise would take the processor from the creates.
PAUSE_SECONDS = 0.05
TRIES = 200
BUCKET = "garbage"


class DiedError(IndeterminateError):
    """Ends a create as a kill does: nothing on the nodes is undone, and no outcome is stored."""


def die_at(point: CrashPoint) -> Watching:
    def then(reached: Reached) -> None:
        if reached.point == point:
            raise DiedError(f"died at {point}")

    return Watching(then)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession) -> Iterator[Runs]:
    with removing_new_transfers(shared_fleet.dsns()), runs_on(shared_fleet, tmp_path, spark) as found:
        yield found


def write(fleet: Fleet, rows: int = 20) -> None:
    for node in fleet.primaries:
        with psycopg.connect(node.dsn) as connection:
            connection.execute(
                "INSERT INTO transfer SELECT gen_random_uuid(), 1, 2, n FROM generate_series(1, %s) AS n", (rows,)
            )


def gc(runs: Runs) -> GcReport:
    return collect_garbage(runs.fleet, 0.0, Silent())


def assert_whole(runs: Runs, *names: str) -> None:
    """The snapshots lack no object, and the first one's newest state equals the shards' current rows."""
    report = check_snapshots(runs.fleet, CheckRequest(metadata_only=True), runs.spark, Silent())
    assert [(one.name, one.conflicts) for one in report.snapshots] == [(name, []) for name in sorted(names)]
    assert check_documents(runs.fleet.store.open())["Void"] > 0
    nodes = tuple(with_database(node, RESTORED) for node in runs.fleet.primaries)
    target = replace(runs.fleet, nodes=nodes)
    try:
        runs.restore(names[0], target)
        for source, copy in zip(runs.fleet.primaries, nodes, strict=True):
            assert sorted_copies(copy.dsn) == sorted_copies(source.dsn)
    finally:
        for node in runs.fleet.primaries:
            with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)".encode())


def test_objects_of_dead_creates_are_removed_and_the_chain_continues(runs: Runs) -> None:
    runs.full("daily")
    write(runs.fleet)
    store = runs.fleet.store.open()
    for point in FULL_DEATHS:
        with pytest.raises(DiedError):
            create_full(runs.fleet, CreateRequest("other"), runs.spark, die_at(point))
    for point in INCREMENT_DEATHS:
        write(runs.fleet)
        with pytest.raises(DiedError):
            create_increment(runs.fleet, CreateRequest("daily"), runs.spark, die_at(point))
    chain = read_chain(store, "daily")
    data = {key for key in store.list("snapshots") if not key.endswith(".json")}
    next_segments = {key for key in data if key.startswith("snapshots/daily/wal/")} - needed_by(chain)
    failed = data - needed_by(chain) - next_segments
    assert next_segments
    assert {key.split("/")[2] for key in failed} == {"base", "schema", "wal"}
    # Only the last dead create is not settled yet. It is an increment, so none of its objects is garbage.
    code, preview = run_here(runs.fleet, "gc", "--dry-run", "--grace", "0")
    assert (code, len(preview["open_operations"])) == (0, 1)
    assert {one["object"] for one in preview["garbage"]} == failed
    code, done = run_here(runs.fleet, "gc", "--yes", "--grace", "0")
    assert (code, done["objects"], done["settled"], done["open_operations"]) == (0, len(failed), True, [])
    assert done["bytes"] == preview["bytes"] > 0
    left = {key for key in store.list("snapshots") if not key.endswith(".json")}
    assert left == needed_by(chain) | next_segments
    ours = tuple(slot_name(operation) for operation in store.list_children("operations"))
    for node in runs.fleet.nodes:
        slots = [slot for slot in slots_of(node.dsn) if slot.startswith(ours)]
        assert slots == [slot_name(chain.full.operation)]
    assert gc(runs).removed.objects == 0
    write(runs.fleet)
    runs.increment("daily")
    assert next_segments < needed_by(read_chain(store, "daily"))
    assert gc(runs).removed.objects == 0
    assert_whole(runs, "daily")


def test_a_dead_full_create_is_settled_before_its_objects_are_judged(runs: Runs) -> None:
    with pytest.raises(DiedError):
        create_full(runs.fleet, CreateRequest("daily"), runs.spark, die_at(CrashPoint.RESOLVED))
    preview = preview_garbage(runs.fleet, 0.0, Silent())
    assert preview.garbage == []
    assert [one.id for one in preview.open_operations]
    assert all(slots_of(node.dsn) for node in runs.fleet.nodes)
    report = gc(runs)
    assert {one.why for one in report.garbage} == {GarbageReason.FAILED}
    assert (report.unsettled, report.refused, report.open_operations) == ("", [], ())
    assert not any(slots_of(node.dsn) for node in runs.fleet.nodes)
    store = runs.fleet.store.open()
    # Only its void is left.
    assert store.list("snapshots") == ["snapshots/daily/snapshot.json"]


@dataclass
class Collector:
    """Runs gc without a grace period again and again, in a thread."""

    fleet: Fleet
    reports: list[GcReport] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.done.wait(PAUSE_SECONDS):
            try:
                self.reports.append(collect_garbage(self.fleet, 0.0, Silent()))
            except BaseException as error:
                self.errors.append(error)
                raise


@contextmanager
def collecting(fleet: Fleet) -> Iterator[Collector]:
    collector = Collector(fleet)
    thread = threading.Thread(target=collector.run)
    thread.start()
    try:
        yield collector
    finally:
        collector.done.set()
        thread.join()


def retry_while_busy(create: object, *arguments: object) -> None:
    """Retry as an operator does: while gc settles operations, the fleet is busy."""
    for _ in range(TRIES):
        try:
            create(*arguments)  # type: ignore[operator]
        except BusyError:
            continue
        return
    raise AssertionError("the fleet was busy at every attempt")


def test_gc_during_running_creates_loses_nothing(runs: Runs) -> None:
    with collecting(runs.fleet) as collector:
        retry_while_busy(runs.full, "daily")
        for number in range(INCREMENTS):
            write(runs.fleet)
            progress = die_at(INCREMENT_DEATHS[number % len(INCREMENT_DEATHS)])
            with pytest.raises(DiedError):
                retry_while_busy(create_increment, runs.fleet, CreateRequest("daily"), runs.spark, progress)
            write(runs.fleet)
            retry_while_busy(runs.increment, "daily")
        with pytest.raises(DiedError):
            retry_while_busy(create_full, runs.fleet, CreateRequest("other"), runs.spark, die_at(CrashPoint.ARCHIVED))
        retry_while_busy(runs.full, "other")
    assert collector.errors == []
    assert len(collector.reports) > INCREMENTS
    # gc ran during the creates, and removed the dead create's objects.
    assert any(report.open_operations for report in collector.reports)
    assert gc(runs).garbage == []
    assert sum(report.removed.objects for report in collector.reports) > 0
    store = runs.fleet.store.open()
    assert increment_numbers(store, "daily") == list(range(1, INCREMENTS + 1))
    assert_whole(runs, "daily", "other")


def fleet_in(bucket_url: str, embedded: EmbeddedFleet, folder: Path, s3: S3Server) -> Fleet:
    fleet = configure_fleet(embedded, folder / "fleet.toml", f"{bucket_url}/shop", s3.options)
    ensure_identity(fleet.store.open(), fleet)
    return fleet


def test_unfinished_uploads_are_removed_except_those_of_other_programs(
    shared_fleet: EmbeddedFleet, tmp_path: Path, s3: S3Server
) -> None:
    bucket = fleet_in(s3.bucket(BUCKET), shared_fleet, tmp_path, s3)
    made = StoreBuilder(bucket.store.open())
    chain = made.take_full("daily")
    failed = made.begin_create("other")
    left = made.store_base(failed)
    key = f"snapshots/other/base/a/{failed.id}/part-000009-000-ab.parquet"

    def begin(name: str) -> None:
        upload = s3.client.create_multipart_upload(Bucket=BUCKET, Key=name)
        s3.client.upload_part(Bucket=BUCKET, Key=name, UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * 1000)

    begin(f"shop/{key}")
    begin("elsewhere/file")
    assert run_gc(made.store).garbage == []
    record_outcome(made.store, failed, "failed")
    code, done = run_here(bucket, "gc", "--yes", "--grace", "0")
    assert (code, done["objects"]) == (0, len(left) + 1)
    assert {one["object"] for one in done["garbage"] if one["kind"] == "unfinished"} == {key}
    uploads = s3.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [one["Key"] for one in uploads] == ["elsewhere/file"]
    s3.client.abort_multipart_upload(Bucket=BUCKET, Key="elsewhere/file", UploadId=uploads[0]["UploadId"])
    assert all(made.store.exists(one) for one in needed_by(chain))


def test_an_object_under_legal_hold_is_named_and_removed_after_its_release(
    shared_fleet: EmbeddedFleet, tmp_path: Path, s3: S3Server
) -> None:
    url = s3.bucket("locked-garbage", lock=True)
    fleet = fleet_in(url, shared_fleet, tmp_path, s3)
    made = StoreBuilder(fleet.store.open())
    failed = made.begin_create("other")
    left = made.store_base(failed)
    record_outcome(made.store, failed, "failed")
    place = {"Bucket": "locked-garbage", "Key": f"shop/{left[0]}"}
    s3.client.put_object_legal_hold(**place, LegalHold={"Status": "ON"})
    code, done = run_here(fleet, "gc", "--yes", "--grace", "0")
    assert (code, done["objects"]) == (3, len(left) - 1)
    assert [one["object"] for one in done["refused"]] == [left[0]]
    assert made.store.list("snapshots") == [left[0]]
    s3.client.put_object_legal_hold(**place, LegalHold={"Status": "OFF"})
    code, done = run_here(fleet, "gc", "--yes", "--grace", "0")
    assert (code, done["objects"], done["refused"]) == (0, 1, [])
    assert made.store.list("snapshots") == []
