"""`check --since-last` of a real chain: it reads what is new, starts no Spark for little, and finds what is wrong.

One chain is checked in full after its first increment. Later checks are calls, which record nothing, so that every test
begins with the same records; the store is put back in place after each test.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.check.resting as resting
import cutline.check.verify
from cutline.check.report import SnapshotReport
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.progress import Silent
from cutline.snapshots.records.proven_chains import commit_key, read_chain
from cutline.storage.local import LocalStore
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Runs, runs_on
from tests.integration.refusing import NoSpark, execute
from tests.stores.damage import Document, change_commit, change_segment, flip_byte, with_value

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "chain"
HELD = "held over a cut"
TABLES = """
CREATE TABLE copied (id int PRIMARY KEY, a text, b text);
INSERT INTO copied SELECT i, 'a' || i, 'b' FROM generate_series(1, 50) AS i
"""


def prepare(dsn: str, amount: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("UPDATE copied SET b = %s WHERE id = 1", (str(amount),))
        connection.execute(f"PREPARE TRANSACTION '{HELD}'".encode())


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Return a chain that was checked up to increment 1, and has two increments more.

    A transaction is prepared before the cut of increment 1, and committed before that of increment 3. Nothing happens
    before increment 2.
    """
    dsns = shared_fleet.dsns()
    for dsn in dsns:
        execute(dsn, TABLES)
    try:
        with runs_on(shared_fleet, tmp_path_factory.mktemp("since"), spark) as found:
            found.full(NAME)
            with BankWorkload(dsns, cross_shard_ratio=0.5) as bank:
                bank.wait(0.5)
            for number, dsn in enumerate(dsns):
                prepare(dsn, number)
            found.increment(NAME)
            code, document = run_here(found.fleet, "check", NAME, spark=spark)
            assert (code, document["result"], document["rests_on_records"]) == (0, "valid", False), document
            found.increment(NAME)
            with BankWorkload(dsns, cross_shard_ratio=0.5) as bank:
                bank.wait(0.5)
            for dsn in dsns:
                execute(dsn, f"COMMIT PREPARED '{HELD}'", "UPDATE copied SET b = 'again' WHERE id < 4")
            found.increment(NAME)
            yield found
    finally:
        for dsn in dsns:
            execute(dsn, "DROP TABLE copied")


def folder_of(runs: Runs) -> Path:
    return Path(runs.fleet.store.url.removeprefix("file://"))


@pytest.fixture
def store(runs: Runs, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of the store; at the end, put back what a test has changed, with its times."""
    folder, kept = folder_of(runs), tmp_path / "kept"
    shutil.copytree(folder, kept)
    yield folder
    for path in kept.rglob("*"):
        target = folder / path.relative_to(kept)
        if path.is_file() and (not target.exists() or target.read_bytes() != path.read_bytes()):
            shutil.copyfile(path, target)
            os.utime(target, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))


@contextmanager
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yield the keys of the objects that are read in the block."""
    read: set[str] = set()
    read_range = LocalStore.read_range

    def noting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        read.add(key)
        return read_range(self, key, start, length)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "read_range", noting)
        yield read


def since_last(runs: Runs, **given: Any) -> SnapshotReport:
    """Check what is new, without Spark and without a record of it."""
    request = CheckRequest(NAME, since_last=True, **given)
    (report,) = check_snapshots(runs.fleet, request, NoSpark(), Silent()).snapshots
    return report


def kinds(report: SnapshotReport) -> set[tuple[str, str | None]]:
    return {(one.kind, one.node) for one in report.conflicts}


def test_little_that_is_new_is_checked_without_spark_and_without_reading_the_rest(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = read_chain(runs.fleet.store.open(), NAME)
    with reading(monkeypatch) as read:
        report = since_last(runs)
    assert (report.result, report.increment, report.skipped) == ("valid", 3, []), report.to_json()
    assert report.rests_on is not None
    new = {one.key for commit in chain.commits[2:] for listed in commit.segments.values() for one in listed}
    old = {one.key for node in chain.baseline for one in chain.segments(node)} - new
    assert new <= read
    # Of the others, only those that extend beyond the cut of increment 1, and those of the transactions that were
    # undecided then.
    assert HELD in [one.global_id for one in chain.increments[0].cut.of("s1").undecided]
    assert old & read
    assert not old <= read
    assert not any("/base/" in key for key in read)
    # A few seconds are a millionth of 24 days, so probably nothing was reread.
    assert report.rests_on.objects > len(old)
    assert min(report.compared.changes, report.compared.transactions) > 0
    assert report.compared.partitions == report.compared.rows == 0


def test_a_larger_part_is_checked_by_jobs_with_the_same_result(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = since_last(runs).compared
    monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", 0)
    (report,) = check_snapshots(runs.fleet, CheckRequest(NAME, since_last=True), runs.spark, Silent()).snapshots
    assert (report.result, report.compared) == ("valid", expected), report.to_json()


def test_a_change_that_one_copy_has_differently_is_found_in_what_is_new(runs: Runs, store: Path) -> None:
    def change(table: Any) -> Any:
        row = next(at for at, key in enumerate(table["key"].to_pylist()) if key)
        return with_value(table, row, "seq", table["seq"].to_pylist()[row] + 100)

    change_segment(store, NAME, 3, "s1-b1", change)
    report = since_last(runs)
    assert {one.kind for one in report.conflicts} == {"changes", "operation"}
    assert kinds(report) == {("changes", "s1"), ("operation", None)}
    assert report.read is None


def test_a_cut_that_does_not_follow_from_its_events_is_found_in_what_is_new(runs: Runs, store: Path) -> None:
    def change(document: Document) -> None:
        document["cut"]["global_transactions"] += 1
        document["counts"]["transactions"] += 1

    change_commit(store, NAME, 3, change)
    assert ("cut", None) in kinds(since_last(runs))


def test_a_transaction_that_was_undecided_and_is_torn_now_is_found(runs: Runs, store: Path) -> None:
    # On s1, the commit says that the transaction is still undecided, so its state does not contain it.
    undecided = read_chain(runs.fleet.store.open(), NAME).increments[1].cut.of("s1").undecided

    def change(document: Document) -> None:
        (cut,) = [one for one in document["cut"]["nodes"] if one["node"] == "s1"]
        cut["undecided"] = [
            {"global_id": one.global_id, "lsn": str(one.lsn), "end_lsn": str(one.end_lsn)} for one in undecided
        ]

    change_commit(store, NAME, 3, change)
    report = since_last(runs)
    torn = [one for one in report.conflicts if one.kind == "transaction"]
    assert [(one.node, one.other_node, one.global_id) for one in torn] == [("s1", "s2", HELD)]


def test_a_damaged_object_of_an_increment_is_named(runs: Runs, store: Path) -> None:
    chain = read_chain(runs.fleet.store.open(), NAME)
    key = next(one.key for commit in chain.commits[2:] for one in commit.segments.get("s2", ()) if one.size)
    flip_byte(store / key)
    os.utime(store / key, ns=((store / "fleet.json").stat().st_mtime_ns,) * 2)
    assert ("digest", "s2") in kinds(since_last(runs))


def test_damage_of_what_was_read_is_found_when_it_is_reread(runs: Runs, store: Path) -> None:
    chain = read_chain(runs.fleet.store.open(), NAME)
    key = next(one.key for one in chain.full.own_objects if one.kind == "base" and one.node == "s1-b1")
    before = (store / key).stat()
    flip_byte(store / key)
    os.utime(store / key, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Its size is right, so only reading it shows the damage.
    assert since_last(runs).result == "valid"
    assert kinds(since_last(runs, subset=(1, 1))) == {("digest", "s1-b1")}
    rotten = replace(runs, fleet=replace(runs.fleet, reread_seconds=0.001))
    assert kinds(since_last(rotten)) == {("digest", "s1-b1")}
    (store / key).unlink()
    assert kinds(since_last(runs)) == {("missing", "s1-b1")}


def test_a_copy_of_the_store_is_read_as_a_whole(runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(folder_of(runs), tmp_path / "store")
    fleet = replace(runs.fleet, store=replace(runs.fleet.store, url=f"file://{tmp_path}/store"))
    (report,) = check_snapshots(fleet, CheckRequest(NAME, since_last=True), runs.spark, Silent()).snapshots
    assert (report.result, report.rests_on) == ("valid", None)
    assert "at another address" in report.unused_records


def test_a_check_without_time_checks_an_increment_and_says_which_it_has_not_reached(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting, "PART_BYTES", 0)
    report = since_last(runs, seconds_max=0.0)
    assert (report.result, report.increment) == ("inconclusive", 2), report.to_json()
    assert [(one.what, one.why) for one in report.skipped] == [("increment 3", "--max-seconds 0 ended the check")]
    assert report.read is not None


def test_the_commands_say_what_a_result_rests_on(runs: Runs, spark: SparkSession, tmp_path: Path) -> None:
    """The last test, as it records its checks: the record is extended by each of them, also over a copied table."""
    words = ("check", "--newest", "--since-last")
    junit = tmp_path / "junit.xml"
    code, document = run_here(runs.fleet, *words, "--junit", str(junit))
    assert (code, document["result"], document["rests_on_records"]) == (0, "valid", True), document
    (snapshot,) = document["snapshots"]
    first = snapshot["rests_on"]["operation"]
    assert (snapshot["name"], snapshot["increment"], snapshot["rests_on"]["compared_by"]) == (NAME, 3, first)
    assert "rests on records" in junit.read_text()
    text = run_as_text(runs.fleet, *words)
    assert f"{NAME} at increment 3: valid, with records of earlier checks" in text
    assert f"everything was compared by check {first}" in text
    listed = run_here(runs.fleet, "list")[1]["snapshots"][0]
    covering = listed["last_covering_check"]
    assert (covering["increment"], covering["full"], covering["rests_on_records"]) == (3, False, True)
    assert listed["last_full_check"]["operation"] == first
    assert listed["last_record"]["oldest_read_at"] == snapshot["rests_on"]["oldest_read_at"]
    assert "valid by records just now" in run_as_text(runs.fleet, "list")
    done = run_here(runs.fleet, "history")[1]["operations"][0]
    assert done["reason"] == "valid, with records of earlier checks"

    # A table that is copied again, and a new table: their rows are compared, which needs Spark.
    dsn = runs.fleet.primaries[0].dsn
    execute(dsn, "ALTER TABLE copied ALTER a TYPE varchar(40) USING a || '!'", "CREATE TABLE more (id int PRIMARY KEY)")
    try:
        runs.increment(NAME)
        code, document = run_here(runs.fleet, "check", NAME, "--since-last", spark=spark)
        (snapshot,) = document["snapshots"]
        assert (code, snapshot["increment"], snapshot["rests_on"]["compared_by"]) == (0, 4, first), document
        assert snapshot["compared"]["rows"] == 100
        assert snapshot["compared"]["partitions"] > 0
        # The commit file of the last increment is lost. What is left rests on the record before that.
        (folder_of(runs) / commit_key(NAME, 4)).unlink()
        code, document = run_here(runs.fleet, "check", NAME, "--since-last", spark=spark)
        assert code == 1
        (snapshot,) = document["snapshots"]
        assert [one["object"] for one in snapshot["conflicts"]] == [commit_key(NAME, 4)]
        assert (snapshot["increment"], snapshot["rests_on"]["compared_by"]) == (3, first)
    finally:
        execute(dsn, "DROP TABLE more")
