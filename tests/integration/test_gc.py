"""gc on real fleets: after creates that died, beside creates that run, and on S3."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from check.verify import CheckRequest, check_snapshots
from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from fleet.nodes.connections import with_database
from fleet.progress import Silent
from snapshots.create.full import create_full
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.operations.crash_points import CrashPoint
from snapshots.operations.operation import record_outcome
from snapshots.records.commits import increment_numbers, read_chain
from snapshots.records.store_identity import ensure_identity
from snapshots.removal.garbage import GarbageReason
from snapshots.removal.gc import GcReport, collect_garbage
from storage.errors import BusyError, IndeterminateError
from tests.cli_runs import run_here
from tests.s3_server import S3Server
from tests.snapshot_runs import Runs, described, runs_on, slots_of, sorted_copies, transfers_taken_back
from tests.stored_documents import documents_known
from tests.unit.made_garbage import MadeStore, collected, needed_by
from tests.watching import Reached, Watching
from wal.slots.slots import slot_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESTORED = "restored"
# Behind each of them more is in the store than behind the one before.
FULL_DEATHS = (CrashPoint.BASE_COPIED, CrashPoint.SEQUENCES_READ)
INCREMENT_DEATHS = (CrashPoint.ARCHIVED, CrashPoint.RESOLVED)
BESIDE = 2
# Between two of gc, which would else take the processor from the creates.
PAUSE_SECONDS = 0.05
TRIES = 200
BUCKET = "garbage"


class DiedError(IndeterminateError):
    """What ends a create as a kill does: nothing on the nodes is undone, and no outcome is stored."""


def dying_at(point: CrashPoint) -> Watching:
    def then(reached: Reached) -> None:
        if reached.point == point:
            raise DiedError(f"died at {point}")

    return Watching(then)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession) -> Iterator[Runs]:
    with transfers_taken_back(shared_fleet.dsns()), runs_on(shared_fleet, tmp_path, spark) as found:
        yield found


def write(fleet: Fleet, rows: int = 20) -> None:
    for node in fleet.primaries:
        with psycopg.connect(node.dsn) as connection:
            connection.execute(
                "INSERT INTO transfer SELECT gen_random_uuid(), 1, 2, n FROM generate_series(1, %s) AS n", (rows,)
            )


def gc(runs: Runs) -> GcReport:
    return collect_garbage(runs.fleet, 0.0, Silent())


def check_whole(runs: Runs, *names: str) -> None:
    """The snapshots lack no object, and the newest state of the first is what the shards hold now."""
    report = check_snapshots(runs.fleet, CheckRequest(metadata_only=True), runs.spark, Silent())
    assert [(one.name, one.conflicts) for one in report.snapshots] == [(name, []) for name in sorted(names)]
    assert documents_known(runs.fleet.store.open())["Void"] > 0
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


def test_what_dead_creates_left_goes_and_the_chain_goes_on(runs: Runs) -> None:
    runs.full("daily")
    write(runs.fleet)
    store = runs.fleet.store.open()
    for point in FULL_DEATHS:
        with pytest.raises(DiedError):
            create_full(runs.fleet, CreateRequest("other"), runs.spark, dying_at(point))
    for point in INCREMENT_DEATHS:
        write(runs.fleet)
        with pytest.raises(DiedError):
            create_increment(runs.fleet, CreateRequest("daily"), runs.spark, dying_at(point))
    chain = read_chain(store, "daily")
    data = {key for key in store.list("snapshots") if not key.endswith(".json")}
    begun = {key for key in data if key.startswith("snapshots/daily/wal/")} - needed_by(chain)
    failed = data - needed_by(chain) - begun
    assert begun
    assert {key.split("/")[2] for key in failed} == {"base", "schema", "wal"}
    # The last of them is not settled yet, and all of the others are: an increment's, so that nothing of it is shown.
    code, foreseen = run_here(runs.fleet, "gc", "--dry-run", "--grace", "0")
    assert (code, len(foreseen["open_operations"])) == (0, 1)
    assert {one["object"] for one in foreseen["garbage"]} == failed
    code, done = run_here(runs.fleet, "gc", "--grace", "0")
    assert (code, done["objects"], done["settled"], done["open_operations"]) == (0, len(failed), True, [])
    assert done["bytes"] == foreseen["bytes"] > 0
    left = {key for key in store.list("snapshots") if not key.endswith(".json")}
    assert left == needed_by(chain) | begun
    ours = tuple(slot_name(operation) for operation in store.list_children("operations"))
    for node in runs.fleet.nodes:
        slots = [slot for slot in slots_of(node.dsn) if slot.startswith(ours)]
        assert slots == [slot_name(chain.full.operation)]
    assert gc(runs).removed.objects == 0
    write(runs.fleet)
    runs.increment("daily")
    assert begun < needed_by(read_chain(store, "daily"))
    assert gc(runs).removed.objects == 0
    check_whole(runs, "daily")


def test_a_dead_full_create_is_settled_before_its_objects_are_looked_at(runs: Runs) -> None:
    with pytest.raises(DiedError):
        create_full(runs.fleet, CreateRequest("daily"), runs.spark, dying_at(CrashPoint.RESOLVED))
    foreseen = collect_garbage(runs.fleet, 0.0, Silent(), dry_run=True)
    assert foreseen.garbage == []
    assert [one.id for one in foreseen.open_operations]
    assert all(slots_of(node.dsn) for node in runs.fleet.nodes)
    report = gc(runs)
    assert {one.why for one in report.garbage} == {GarbageReason.FAILED}
    assert (report.unsettled, report.refused, report.open_operations) == ("", [], ())
    assert not any(slots_of(node.dsn) for node in runs.fleet.nodes)
    store = runs.fleet.store.open()
    # Its void.
    assert store.list("snapshots") == ["snapshots/daily/snapshot.json"]


@dataclass
class Collecting:
    """gc without a grace period, over and over, in a thread."""

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
def collecting(fleet: Fleet) -> Iterator[Collecting]:
    found = Collecting(fleet)
    thread = threading.Thread(target=found.run)
    thread.start()
    try:
        yield found
    finally:
        found.done.set()
        thread.join()


def persistently(create: object, *arguments: object) -> None:
    """As whoever finds the fleet busy for the moment in which gc settles."""
    for _ in range(TRIES):
        try:
            create(*arguments)  # type: ignore[operator]
        except BusyError:
            continue
        return
    raise AssertionError("the fleet was busy all the time")


def test_beside_creates_that_run_nothing_is_lost(runs: Runs) -> None:
    with collecting(runs.fleet) as beside:
        persistently(runs.full, "daily")
        for number in range(BESIDE):
            write(runs.fleet)
            dying = dying_at(INCREMENT_DEATHS[number % len(INCREMENT_DEATHS)])
            with pytest.raises(DiedError):
                persistently(create_increment, runs.fleet, CreateRequest("daily"), runs.spark, dying)
            write(runs.fleet)
            persistently(runs.increment, "daily")
        with pytest.raises(DiedError):
            persistently(create_full, runs.fleet, CreateRequest("other"), runs.spark, dying_at(CrashPoint.ARCHIVED))
        persistently(runs.full, "other")
    assert beside.errors == []
    assert len(beside.reports) > BESIDE
    # It was there while they ran, and took the dead one's objects away.
    assert any(report.open_operations for report in beside.reports)
    assert gc(runs).garbage == []
    assert sum(report.removed.objects for report in beside.reports) > 0
    store = runs.fleet.store.open()
    assert increment_numbers(store, "daily") == list(range(1, BESIDE + 1))
    check_whole(runs, "daily", "other")


def fleet_in(bucket_url: str, embedded: EmbeddedFleet, folder: Path, s3: S3Server) -> Fleet:
    fleet = described(embedded, folder / "fleet.toml", f"{bucket_url}/shop", s3.options)
    ensure_identity(fleet.store.open(), fleet)
    return fleet


def test_uploads_that_nobody_ends_go_and_those_of_others_stay(
    shared_fleet: EmbeddedFleet, tmp_path: Path, s3: S3Server
) -> None:
    bucket = fleet_in(s3.bucket(BUCKET), shared_fleet, tmp_path, s3)
    made = MadeStore(bucket.store.open())
    chain = made.full("daily")
    failed = made.begin("other")
    left = made.base(failed)
    key = f"snapshots/other/base/a/{failed.id}/part-000009-000-ab.parquet"

    def begin(name: str) -> None:
        upload = s3.client.create_multipart_upload(Bucket=BUCKET, Key=name)
        s3.client.upload_part(Bucket=BUCKET, Key=name, UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * 1000)

    begin(f"shop/{key}")
    begin("elsewhere/file")
    assert collected(made.store).garbage == []
    record_outcome(made.store, failed, "failed")
    code, done = run_here(bucket, "gc", "--grace", "0")
    assert (code, done["objects"]) == (0, len(left) + 1)
    assert {one["object"] for one in done["garbage"] if one["kind"] == "unfinished"} == {key}
    uploads = s3.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [one["Key"] for one in uploads] == ["elsewhere/file"]
    s3.client.abort_multipart_upload(Bucket=BUCKET, Key="elsewhere/file", UploadId=uploads[0]["UploadId"])
    assert all(made.store.exists(one) for one in needed_by(chain))


def test_what_a_lock_keeps_is_named_and_goes_by_a_repeat_once_it_may(
    shared_fleet: EmbeddedFleet, tmp_path: Path, s3: S3Server
) -> None:
    url = s3.bucket("locked-garbage", lock=True)
    fleet = fleet_in(url, shared_fleet, tmp_path, s3)
    made = MadeStore(fleet.store.open())
    failed = made.begin("other")
    left = made.base(failed)
    record_outcome(made.store, failed, "failed")
    place = {"Bucket": "locked-garbage", "Key": f"shop/{left[0]}"}
    s3.client.put_object_legal_hold(**place, LegalHold={"Status": "ON"})
    code, done = run_here(fleet, "gc", "--grace", "0")
    assert (code, done["objects"]) == (3, len(left) - 1)
    assert [one["object"] for one in done["refused"]] == [left[0]]
    assert made.store.list("snapshots") == [left[0]]
    s3.client.put_object_legal_hold(**place, LegalHold={"Status": "OFF"})
    code, done = run_here(fleet, "gc", "--grace", "0")
    assert (code, done["objects"], done["refused"]) == (0, 1, [])
    assert made.store.list("snapshots") == []
