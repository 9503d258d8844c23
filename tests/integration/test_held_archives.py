"""A small archive is read once, by the driver, which finds in it what the jobs find."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

import cutline.check.reported_changes
import cutline.check.streams
import cutline.check.verify
from cutline.check.copies import Copies
from cutline.check.hashing import combine_all
from cutline.check.image_hashes import PartitionHashes
from cutline.check.new_part import NewPart
from cutline.check.partitions import hash_partitions
from cutline.check.report import Findings, SnapshotReport
from cutline.check.sequence_values import INTEGERS
from cutline.check.streams import StreamHashes, hash_streams
from cutline.check.verify import CheckRequest, check_snapshots, hold_archive
from cutline.embedded.bank_workload import BankWorkload
from cutline.fleet.progress import Silent
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.sources import sources_of
from cutline.snapshots.records.proven_chains import read_chain
from cutline.spark.driver_session import DriverSession
from cutline.spark.task_processes import Lane, TaskProcess, start_processes
from cutline.storage.local import LocalStore
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.run.quick_spark import LINES
from tests.run.soak import first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

INCREMENTS = 3
ENCRYPTION = f'[spark]\n{LINES}[encryption]\nkey_file = "{{key}}"\n'


@pytest.fixture(scope="module", params=first(["plain", "encrypted"]))
def runs(
    request: pytest.FixtureRequest,
    shared_fleet: EmbeddedFleet,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("held")
    key = folder / "key"
    key.write_text(bytes(range(32)).hex())
    key.chmod(0o600)
    more = ENCRYPTION.format(key=key) if request.param == "encrypted" else ""
    fleet = configure_fleet(shared_fleet, folder / "fleet.toml", f"file://{folder}/store", more=more)
    with dropping_slots(fleet):
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full("held")
        for _ in range(INCREMENTS):
            with BankWorkload(shared_fleet.dsns(), cross_shard_ratio=0.5) as bank:
                bank.wait(0.5)
            runs.increment("held")
        yield runs


@pytest.fixture(autouse=True)
def driver_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever folds small amounts is drawn for other tests (tests/run/folding.py)."""
    monkeypatch.setattr(limits, "CHANGES_MAX", cutline.check.verify.CHANGES_MAX)
    monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", 5_000_000)
    monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", limits.STORED_BYTES_MAX)


def test_each_segment_is_read_once(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    read_range = LocalStore.read_range

    def counting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        read[key] += 1
        return read_range(self, key, start, length)

    monkeypatch.setattr(LocalStore, "read_range", counting)
    report = check_snapshots(runs.fleet, CheckRequest("held"), runs.spark, Silent())
    assert report.exit_code == 0, report.to_json()
    chain = read_chain(runs.fleet.store.open(), "held")
    segments = {one.key for node in chain.baseline for one in chain.segments(node)}
    assert len(segments) >= (INCREMENTS + 1) * len(chain.baseline)
    assert {key: read[key] for key in segments} == dict.fromkeys(segments, 1)


def test_each_segment_of_a_larger_archive_is_read_by_one_job(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_range = LocalStore.read_range

    def noting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        read.append(key)
        return read_range(self, key, start, length)

    monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", 0)
    monkeypatch.setattr(LocalStore, "read_range", noting)
    context, group = runs.spark.running.sparkContext, str(runs.fleet.path)
    context.setJobGroup(group, group)
    try:
        report = check_snapshots(runs.fleet, CheckRequest("held"), runs.spark, Silent())
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
    assert report.exit_code == 0, report.to_json()
    # The segments', and that of the base copies, whose objects have no changes.
    assert len(context.statusTracker().getJobIdsForGroup(group)) == 2
    assert [key for key in read if "/wal/" in key] == []


def as_dicts(found: PartitionHashes) -> list[dict[tuple[int, ...], tuple[int, ...]]]:
    # Where no row is compared, a job says so by zeros, and the driver says nothing.
    hashes = [{key: value for key, value in one.as_dict().items() if value[0]} for one in (found.rows, found.versions)]
    return [*hashes, dict(found.extremes)]


def test_the_driver_finds_what_the_jobs_find(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    store = runs.fleet.store
    chain = read_chain(store.open(), "held")
    # As if every key that is an integer came from a sequence.
    fed = {
        shard: {group.number for group in groups if group.key_width == 1 and group.columns[0].type_oid in INTEGERS}
        for shard, groups in chain.all_groups.items()
    }
    copies, held = Copies.of(chain, fed=fed), hold_archive(store, NewPart(chain))
    assert held
    assert all(fed.values())
    findings = Findings(SnapshotReport("held", INCREMENTS))

    unread, read = (StreamHashes(combine_all([], 2), {}, one) for one in (store, held))

    def hashes() -> list[dict[tuple[int, ...], tuple[int, ...]]]:
        sources = sources_of(chain, tuple(copies.nodes), store.open())
        reported = hash_streams(runs.spark, copies, store, findings, Silent(), sources)
        assert all(reported.last[one.source.key] for one in sources.segments)
        found = []
        by_spark, many_keys = ("CHANGES_MAX",), ("CHANGES_MAX", "CHOSEN_KEYS_BYTES_MAX")
        for streams, exceeded in ((read, ()), (reported, by_spark), (reported, many_keys), (unread, by_spark)):
            with monkeypatch.context() as patched:
                for name in exceeded:
                    patched.setattr(limits, name, 0)
                patched.setattr(cutline.check.reported_changes, "HASHED_AT_ONCE", 100)
                # The reports are released once they were used.
                again = replace(streams, last=dict(streams.last))
                hashed = hash_partitions(runs.spark.running, copies, store, findings, Silent(), again)
            found.append(as_dicts(hashed))
        of_driver, of_reports, of_many_keys, of_jobs = found
        assert of_driver == of_reports == of_many_keys == of_jobs
        assert min(map(len, of_driver)) > 0
        return of_driver

    every = hashes()
    # As if the base copies had been made later, and all tables copied again later still.
    first, second = (one.cut for one in chain.increments[:2])
    with monkeypatch.context() as patched:
        patched.setattr(Copies, "since", lambda self, node: first.of(self.shard[node]).position)
        since = hashes()

        def recopied_since(self: Copies, node: str) -> dict[int, int]:
            position = second.of(self.shard[node]).position
            return {group.number: position for group in self.chain.groups(node)}

        patched.setattr(Copies, "recopied_since", recopied_since)
        recopied = hashes()
    assert every[0] == since[0] == recopied[0]
    versions = [sum(one[0] for one in found[1].values()) for found in (every, since, recopied)]
    assert versions[0] > versions[1] > versions[2] > 0
    reports = []
    unlimited = cutline.check.verify.STORED_BYTES_MAX, limits.CHOSEN_CHANGES_MAX, cutline.check.streams.EVENTS_MAX
    for held_max, changes_max, events_max in (unlimited, (0, *unlimited[1:]), (0, 0, 0)):
        monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", held_max)
        monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", changes_max)
        monkeypatch.setattr(cutline.check.streams, "EVENTS_MAX", events_max)
        (report,) = check_snapshots(runs.fleet, CheckRequest("held"), runs.spark, Silent()).snapshots
        reports.append(report)
    assert reports[0].compared == reports[1].compared == reports[2].compared
    assert reports[0].compared.transactions > 0


def test_processes_find_what_spark_finds(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", 0)
    jobs: list[str] = []
    run = TaskProcess.run

    def noting(self: TaskProcess, job: int, lane: Lane, read: Any) -> list[Any]:
        reports = run(self, job, lane, read)
        jobs.append(lane.work.__name__)
        return reports

    monkeypatch.setattr(TaskProcess, "run", noting)
    processes = start_processes(2)
    session = cast("SparkSession", DriverSession(runs.spark.session, 3, processes=processes))
    try:
        found = [
            check_snapshots(runs.fleet, CheckRequest("held", rows=3), spark, Silent()).snapshots[0]
            for spark in (runs.spark, Ready(session))
        ]
    finally:
        for process in processes:
            process.close()
    by_spark, by_processes = (replace(report, read=None) for report in found)
    assert by_processes == by_spark
    assert by_processes.compared.rows > 0
    assert set(jobs) == {"hash_run", "hash_base"}
