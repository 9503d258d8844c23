"""Merges of real chains: a restore of any increment equals what the primaries were, before and after a merge.

Expected rows come from the live servers (COPY), and expected results of checks from what was done to the chain.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec import structs

from cutline.check.live.run import LiveRequest, check_live
from cutline.check.merge_proof import MergeUnprovenError, prove_merge
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.progress import Silent
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.sources import sources_of
from cutline.snapshots.merge import running
from cutline.snapshots.merge.rewriting import NewBase
from cutline.snapshots.merge.running import MergeReport, Proof, plan_merge, run_merge
from cutline.snapshots.operations import leases
from cutline.snapshots.operations.committing import MergeSupersededError, put_merge
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Void
from cutline.snapshots.records.documents import ManifestError, checking, parse_document, read_body, unseal
from cutline.snapshots.records.merge_records import Merge, check_merge, find_merge, first_increment, merge_key
from cutline.snapshots.records.merged_chain import begin_with, read_from_merge
from cutline.snapshots.records.operation_records import VALID
from cutline.snapshots.records.proven_chains import read_as_committed, read_part_at
from cutline.snapshots.removal.earlier_objects import drop_earlier_objects, plan_drop
from cutline.snapshots.removal.pinning import PinnedError, pin_in_store
from cutline.snapshots.repair import work
from cutline.snapshots.repair.work import Work
from cutline.storage.errors import SnapshotError
from cutline.storage.local import LocalStore
from cutline.storage.open import open_store
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import ArchiveError
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.changing_fleet import ChangingFleet, changing_fleet
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Runs, configure_fleet
from tests.mutations.sealing import seal_document
from tests.mutations.values import collect_others, mutate, mutations_of
from tests.servers.dealt import start_pair
from tests.simulation.calls_in_order import calls_in_order
from tests.stores.damage import flip_byte
from tests.unit.test_pins import MeetingStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDBYS = ("s1-b1", "s2-b1")
OTHER = "20260101T000000Z-0123456abc"
TABLES = (
    "DROP TABLE IF EXISTS seen, bag, events, wide, quiet, altered, copied, gone, parted, fresh CASCADE",
    "DROP SEQUENCE IF EXISTS numbers",
    "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
    "CREATE TABLE bag (a text, n int)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT 'b' || n % 3, n % 2 FROM generate_series(1, 30) n",
    "INSERT INTO bag VALUES ('commit-later', 5), ('commit-later', 5), ('roll-back-later', 5)",
    "CREATE TABLE events (text text)",
    "INSERT INTO events SELECT 'before' FROM generate_series(1, 5)",
    "CREATE TABLE wide (id int PRIMARY KEY, n int, large text)",
    "ALTER TABLE wide ALTER large SET STORAGE EXTERNAL",
    "INSERT INTO wide SELECT n, 0, repeat(n::text, 9000) FROM generate_series(1, 9) n",
    "INSERT INTO wide VALUES (1046, 0, repeat('later', 900)), (1047, 0, repeat('never', 900))",
    "CREATE TABLE quiet (id int PRIMARY KEY, text text)",
    "INSERT INTO quiet SELECT n, repeat('quiet', 50) FROM generate_series(1, 500) n",
    "CREATE TABLE altered (id int PRIMARY KEY, a text, b text)",
    "INSERT INTO altered SELECT n, 'a' || n, 'b' FROM generate_series(1, 20) n",
    "CREATE TABLE copied (id int PRIMARY KEY, a text)",
    "INSERT INTO copied SELECT n, 'a' || n FROM generate_series(1, 20) n",
    "CREATE TABLE gone (id int PRIMARY KEY)",
    "INSERT INTO gone SELECT generate_series(1, 20)",
    "CREATE TABLE parted (id int PRIMARY KEY, text text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (100) TO (10000)",
    "INSERT INTO parted SELECT n, 'p' FROM generate_series(90, 110) n",
    "CREATE SEQUENCE numbers",
)
MORE = """
[groups]
append_only = ["public.events"]
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with start_pair(tmp_path_factory.mktemp("merge")) as pair:
        yield pair


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession) -> Iterator[ChangingFleet]:
    with changing_fleet(*servers, tmp_path, spark, tables=TABLES, more=MORE) as found:
        try:
            yield found
        finally:
            for standby in STANDBYS:
                found.start(standby)


def merge(place: ChangingFleet, increment: int | None = None) -> MergeReport:
    plan = plan_merge(place.fleet, "chain", increment, Silent())
    return run_merge(place.fleet, plan, place.runs.spark, Silent(), prove_merge)


def write(place: ChangingFleet) -> None:
    """Change rows of tables of all kinds, by round."""
    place.write()
    n = place.written
    for node in place.live:
        place.execute(
            node,
            f"INSERT INTO bag VALUES ('b1', 1), ('round', {n})",
            "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE a = 'b2' LIMIT 1)",
            "UPDATE bag SET n = n + 10 WHERE ctid IN (SELECT ctid FROM bag WHERE a = 'b0' LIMIT 2)",
            f"INSERT INTO events VALUES ('round {n}')",
            f"UPDATE wide SET n = {n} WHERE id < 1000 AND id % 2 = {n % 2}",
            f"UPDATE wide SET id = id + 100 WHERE id = {n}",
            f"INSERT INTO wide VALUES ({n + 2000}, {n}, repeat('long', 30000))",
            f"UPDATE wide SET n = n + 1 WHERE id = {n + 1999}",
            f"INSERT INTO parted VALUES ({n + 50}, 'low'), ({n + 150}, 'high')",
            f"UPDATE parted SET id = id + 200 WHERE id = {n + 90}",
            f"UPDATE altered SET a = 'round {n}' WHERE id % 4 = {n % 4}",
            f"UPDATE copied SET a = 'round {n}' WHERE id % 5 = {n % 5}",
            "SELECT nextval('numbers')",
        )


def prepare(place: ChangingFleet, gid: str, key: int) -> None:
    """Prepare a global transaction that changes tables with and without a key."""
    for node in place.live:
        place.execute(
            node,
            "BEGIN; "
            f"INSERT INTO seen VALUES ({key}, '{gid}'); DELETE FROM seen WHERE id = {key - 9000}; "
            f"INSERT INTO bag VALUES ('{gid}', 1); "
            f"DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE a = '{gid}' AND n = 5 LIMIT 1); "
            f"UPDATE wide SET n = {key} WHERE id = {key - 8000}; "
            f"PREPARE TRANSACTION '{gid}'",
        )


def decide(place: ChangingFleet, gid: str, verb: str) -> None:
    for node in place.live:
        place.execute(node, f"{verb} PREPARED '{gid}'")


def test_states_before_and_after_a_merge(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.states[0] = place.live_state()
    write(place)
    place.increment()
    prepare(place, "commit-later", 9046)
    prepare(place, "roll-back-later", 9047)
    for node in place.live:
        place.execute(
            node,
            "ALTER TABLE altered ADD c int DEFAULT 7",
            "ALTER TABLE altered RENAME a TO first",
            "ALTER TABLE altered RENAME first TO a",
            "DROP TABLE gone",
            "ALTER TABLE copied ADD CONSTRAINT named UNIQUE (id, a)",
            "TRUNCATE parted_low",
        )
    write(place)
    place.increment()
    write(place)
    at = place.increment()
    assert {len(cut.undecided) for cut in at.cut.nodes} == {2}

    report = merge(place)
    assert report.is_new
    chain = read_from_merge(place.fleet.store.open(), "chain")
    assert (chain.full.increment, len(chain.increments)) == (3, 0)
    assert place.check().result == VALID
    assert place.check(2).result == VALID
    place.check_restores(2, 3)

    decide(place, "commit-later", "COMMIT")
    write(place)
    place.increment()
    decide(place, "roll-back-later", "ROLLBACK")
    for node in place.live:
        place.execute(
            node,
            "ALTER TABLE altered DROP COLUMN b",
            "CREATE TABLE fresh (id int PRIMARY KEY)",
            "INSERT INTO fresh VALUES (1)",
        )
    write(place)
    place.increment()
    chain = read_from_merge(place.fleet.store.open(), "chain")
    assert (chain.full.increment, len(chain.increments)) == (3, 2)
    place.check_restores(4, 5)
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)

    again = merge(place, 4)
    assert again.is_new
    assert read_from_merge(place.fleet.store.open(), "chain", 3).full.increment == 3
    assert read_from_merge(place.fleet.store.open(), "chain").full.increment == 4
    assert place.check().result == VALID
    place.check_restores(3, 4, 5)
    # A table that was copied on its own, and has not changed since, keeps its object.
    merged = merge(place).merge
    kept = [one for one in merged.objects if merged.operation not in one.key]
    assert len(kept) == merged.counts["carried_objects"]
    assert len([one for one in kept if one.dead is None]) == 4
    place.check_restores(5)
    assert place.check().result == VALID


def command(place: ChangingFleet, *words: str) -> dict[str, Any]:
    code, document = run_here(place.fleet, *words, spark=place.runs.spark.running)
    assert code == 0, document
    return document


def make_chain(place: ChangingFleet, increments: int, **options: Any) -> None:
    place.runs.full("chain", **options)
    place.states[0] = place.live_state()
    for _ in range(increments):
        write(place)
        place.increment()


def first_of(place: ChangingFleet) -> int:
    return read_from_merge(place.fleet.store.open(), "chain").full.increment


def compare_live(place: ChangingFleet) -> None:
    """Compare the primaries with the newest cut, since which a row was written."""
    for standby in STANDBYS:
        place.await_replay(standby)
    for node in place.live:
        place.execute(node, "UPDATE quiet SET text = 'later' WHERE id = 1")
    report = check_live(place.fleet, LiveRequest("chain"), place.runs.spark, Silent())
    assert (report.result, report.skipped, report.conflicts) == (VALID, [], [])
    assert [shard.cut.written for shard in report.shards if shard.cut] == [1, 1]


def test_dropping_what_lies_before(place: ChangingFleet) -> None:
    for node in place.live:
        place.execute(node, "SELECT lo_from_bytea(0, 'a large object')")
    make_chain(place, 3, large_objects=True)
    command(place, "check", "chain", "--increment", "1")
    (listed,) = command(place, "list")["snapshots"]
    assert listed["last_check"]["increment"] == 1
    words = ("merge", "chain", "--to", "2", "--drop-earlier")
    planned = command(place, *words, "--dry-run")["to_drop"]
    document = command(place, *words, "--yes")
    assert planned["increments"] == document["dropped"]["increments"]
    # What was carried stays, and so do segments with transactions that are needed later.
    kept_max = document["carried_objects"] + 2 * len(place.fleet.nodes)
    assert 0 <= planned["objects"] - document["dropped"]["objects"] <= kept_max
    assert planned["bytes"] >= document["dropped"]["bytes"]
    exact = command(place, *words, "--dry-run")["to_drop"]
    assert (exact["increments"], exact["objects"]) == ([], 0)
    assert (document["increment"], document["is_new"]) == (2, True)
    assert document["written_objects"] + document["carried_objects"] == document["objects"]
    assert document["written_bytes"] + document["carried_bytes"] == document["bytes"]
    assert document["dropped"]["increments"] == [0, 1]
    assert document["dropped"]["objects"] > 0
    assert document["dropped"]["refused"] == []
    # The node's archive still has its segments from the cut of increment 2 on.
    assert place.check().result == VALID
    compare_live(place)
    place.check_restores(2, 3)
    for node in place.target.primaries:
        with psycopg.connect(node.dsn) as connection:
            rows = connection.execute("SELECT convert_from(lo_get(oid), 'UTF8') FROM pg_largeobject_metadata")
            assert rows.fetchall() == [("a large object",)]
    for words in (("restore", "chain", "--increment", "1", "--dry-run"), ("check", "chain", "--increment", "1")):
        code, document = run_here(place.fleet, *words)
        assert (code, document["error"]) == (3, "merged-away")
    # A time before the beginning is one before the first cut, wherever the chain began once.
    for words in (("restore", "chain", "--dry-run"), ("restore", "chain", "--exact", "--dry-run"), ("check", "chain")):
        code, document = run_here(place.fleet, *words, "--at", "2020-01-01T00:00:00Z")
        assert (code, document["error"]) == (3, "merged-away"), document
        assert "its first cut was made at" in document["hint"]
    assert command(place, "gc", "--grace", "0s", "--dry-run")["objects"] == 0
    (listed,) = command(place, "list")["snapshots"]
    assert (listed["state"], listed["begins_at"]) == ("complete", 2)
    assert [one["number"] for one in listed["increments"]] == [2, 3]
    # What it read has been given up.
    assert listed["last_check"] is None
    assert [row["increment"] for row in command(place, "list", "--flat")["restore_points"]] == [2, 3]
    shown = command(place, "show", "chain")
    assert {name: shown[name] for name in ("name", "cut_at", "begins_at", "increments")} == {
        name: listed[name] for name in ("name", "cut_at", "begins_at", "increments")
    }
    assert [cut["id"] for cut in shown["cuts"]] == [one["cut"] for one in listed["increments"]]
    made_at = listed["increments"][0]["cut_at"][:19].replace("T", " ")
    begins = f"chain: begins with the merge at increment 2 of {made_at}Z, 1 increment, "
    assert run_and_capture(place.fleet, "show", "chain")[1].startswith(begins)
    code, document = run_here(place.fleet, "show", "chain", "--increment", "1")
    assert (code, document["error"]) == (3, "merged-away")

    write(place)
    place.increment()
    assert place.check().result == VALID
    assert place.check(since_last=True).result == VALID
    document = command(place, "merge", "chain", "--drop-earlier", "--yes")
    assert document["dropped"]["increments"] == [2, 3]
    write(place)
    place.increment()
    place.check_restores(4, 5)
    assert place.check().result == VALID
    again = command(place, "merge", "chain", "--to", "4", "--drop-earlier", "--yes")
    assert (again["is_new"], again["dropped"]["increments"], again["dropped"]["objects"]) == (False, [], 0)


def given_up(place: ChangingFleet, *words: str) -> tuple[int | None, list[list[int]]]:
    """Run prune with the default rules; return where the chain will begin, and which increments go."""
    document = command(place, "prune", *words)
    (verdict,) = document["snapshots"]
    gone = [one["increments"] for one in document["given_up"]]
    points = verdict["points"]
    assert [[one["increment"] for one in points if not one["kept"]]] * bool(gone) == gone
    return verdict["begins_at"], gone


def test_retention_gives_up_what_no_rule_or_pin_wants(place: ChangingFleet) -> None:
    make_chain(place, 4)
    for increment in (1, 2, 3):
        merge(place, increment)
    store = place.fleet.store.open()
    check_pins_at_any_moment(place)

    command(place, "keep", "chain@1", "--reason", "audit")
    for words in (("merge", "chain", "--drop-earlier", "--yes"), ("merge", "chain", "--drop-earlier", "--dry-run")):
        code, document = run_here(place.fleet, *words, spark=place.runs.spark.running)
        assert (code, document["error"]) == (3, "pinned")
    # The default rule `last 2` wants what follows the second newest of the merges, and the pin more.
    assert given_up(place, "--dry-run") == (1, [[0]])
    assert first_increment(store, "chain") == 0
    assert given_up(place, "--yes") == (1, [[0]])
    assert first_increment(store, "chain") == 1
    assert given_up(place, "--yes") == (None, [])
    code, document = run_here(place.fleet, "keep", "chain@0")
    assert (code, document["error"]) == (3, "merged-away")
    place.check_restores(1, 4)

    command(place, "keep", "chain@1", "--release")
    # A merge that can't be restored replaces nothing.
    base = next((place.folder / "store/snapshots/chain/base/s1" / read_operation(store, 2)).iterdir())
    body = base.read_bytes()
    base.unlink()
    document = command(place, "prune", "--dry-run")
    assert document["given_up"] == []
    assert "can't begin at its merge" in document["warnings"][0]
    base.write_bytes(body)
    assert given_up(place, "--yes") == (2, [[1]])
    code, document = run_here(place.fleet, "check", "chain", "--increment", "1")
    assert (code, document["error"]) == (3, "merged-away")
    assert place.check().result == VALID
    place.check_restores(2, 3, 4)
    assert command(place, "gc", "--grace", "0s", "--dry-run")["objects"] == 0
    assert read_open_intents(store) == []
    (listed,) = command(place, "list")["snapshots"]
    assert [one["number"] for one in listed["increments"]] == [2, 3, 4]

    command(place, "keep", "chain@3")
    command(place, "delete", "chain", "--force", "--yes")
    assert list(store.list("snapshots")) == []
    assert [key for key in store.list("deleted")] == ["deleted/chain.json"]


def read_operation(store: ObjectStore, increment: int) -> str:
    found = find_merge(store, "chain", increment).merge
    assert found is not None
    return found.operation


def check_pins_at_any_moment(place: ChangingFleet) -> None:
    """Pin increment 1 before each call with which a copy of the store gives up what lies before increment 3."""
    found: list[bool] = []
    for number in itertools.count(1):
        folder = place.folder / f"meeting-{number}"
        shutil.copytree(place.folder / "store", folder)
        store, pinned = LocalStore(folder), list[bool]()
        plan = plan_drop(store, "chain", 3)
        assert plan.points == (0, 1, 2)

        def meet(call: int, store: LocalStore = store, number: int = number, pinned: list[bool] = pinned) -> None:
            if call == number:
                try:
                    pin_in_store(store, "chain", 1)
                    pinned.append(True)
                except SnapshotError:
                    pinned.append(False)

        meeting: Any = MeetingStore(store, meet)
        with suppress(PinnedError):
            drop_earlier_objects(meeting, plan, Silent())
        is_left = first_increment(store, "chain") == 0
        shutil.rmtree(folder)
        if not pinned:
            break
        assert is_left == pinned[0], f"call {number}"
        found += pinned
        # After the mark, only objects are removed.
        if found[-8:] == [False] * 8:
            break
    assert found == sorted(found, reverse=True)
    assert {*found} == {True, False}


def test_a_copy_that_the_increment_leaves_out_is_carried(place: ChangingFleet) -> None:
    make_chain(place, 1)
    place.stop(STANDBYS[0])
    write(place)
    assert place.increment().absent
    report = merge(place)
    assert report.merge.counts["carried_objects"] > 0
    place.start(STANDBYS[0])
    write(place)
    assert not place.increment().absent
    assert first_of(place) == 2
    assert place.check().result == VALID
    place.check_restores(2, 3)


@pytest.mark.rest
def test_a_copy_that_has_ended_is_left_out_of_every_later_merge(place: ChangingFleet) -> None:
    """Its archive ends before the cut, and lacks the end of a transaction that an earlier merge left undecided."""
    place.runs.full("chain")
    place.execute("s1", "BEGIN", "INSERT INTO seen VALUES (7777, 'held')", "PREPARE TRANSACTION 'held'")
    place.increment()
    merge(place)
    for _ in range(2):
        place.write()
        place.increment()
    whole = place.runs
    place.runs = Runs(
        replace(whole.fleet, nodes=tuple(one for one in whole.fleet.nodes if one.id != "s1-b1")),
        whole.spark,
    )
    place.execute("s1", "COMMIT PREPARED 'held'")
    place.write()
    last = place.increment()
    assert last.absent["s1-b1"].has_ended
    for _ in range(2):
        merge(place)
        assert not place.check().conflicts
        place.check_restores(last.increment)
        place.write()
        last = place.increment()
    place.runs = whole
    assert not place.increment().absent
    merge(place)
    assert place.check().result == VALID
    place.check_restores_without("s1", last.increment + 1)


def test_damage_of_a_merged_base_is_repaired(place: ChangingFleet) -> None:
    make_chain(place, 2)
    operation = merge(place, 1).operation
    (path, *_) = sorted((place.folder / "store/snapshots/chain/base/s1" / operation).iterdir())
    flip_byte(path)
    report = place.check()
    assert [conflict.object for conflict in report.conflicts if conflict.object] == [
        str(path.relative_to(place.folder / "store"))
    ]
    assert command(place, "repair", "chain", "--yes")["unrepaired"] == []
    assert place.check().result == VALID
    place.check_restores(1, 2)


def test_a_fold_by_spark_gives_the_same(place: ChangingFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chain(place, 2)
    monkeypatch.setattr(limits, "CHANGES_MAX", 0)
    monkeypatch.setattr(work, "LOCAL_ROWS_MAX", 0)
    assert merge(place).is_new
    monkeypatch.undo()
    place.check_restores(2)
    assert place.check().result == VALID


class KilledError(BaseException):
    """Stands for the end of the process: nothing after it runs."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[list[str]]:
    """Let the process die when it has stored the object with this number; yields the keys that it stores."""
    stored: list[str] = []
    create = LocalStore.create

    def store(self: LocalStore, key: str, body: bytes) -> None:
        create(self, key, body)
        stored.append(key)
        if len(stored) == at:
            raise KilledError(key)

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "create", store)
        # A process that is gone records nothing.
        patched.setattr(leases, "record_outcome", lambda *_, **__: None)
        yield stored


def test_a_merge_that_dies_anywhere_changes_nothing_and_is_continued(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_chain(place, 2)
    monkeypatch.setattr(running, "is_gone", lambda _process: True)
    died_at: list[str] = []
    while first_of(place) == 0:
        with dying(monkeypatch, len(died_at) + 1):
            try:
                assert merge(place).is_new
            except KilledError as error:
                died_at.append(str(error))
                assert first_of(place) == (2 if "/merges/" in died_at[-1] else 0)
    # The intent first; then bases of nodes, which are continued, or renewals of the lease.
    assert died_at[0].endswith("/intent.json")
    assert len({key.split("/")[1] for key in died_at if key.startswith("operations/")}) == 1
    assert any("/base/" in key for key in died_at)
    report = merge(place)
    assert not report.is_new
    place.check_restores(1, 2)
    assert place.check().result == VALID
    command(place, "gc", "--grace", "0s", "--yes")
    place.check_restores(1, 2)


@contextmanager
def dying_at_effect(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[list[str]]:
    """Let the process die before the effect on the store with this number; yields the keys stored and deleted."""
    done: list[str] = []

    def before(real: Callable[..., None]) -> Callable[..., None]:
        def change(self: LocalStore, key: str, *body: bytes) -> None:
            if len(done) >= at:
                raise KilledError(key)
            real(self, key, *body)
            done.append(key)

        return change

    with monkeypatch.context() as patched, calls_in_order():
        for name in ("create", "delete"):
            patched.setattr(LocalStore, name, before(getattr(LocalStore, name)))
        yield done


def keys_of(chain: Chain) -> set[str]:
    return {entry.key for commit in chain.commits for entry in commit.named_and_listed}


def test_a_removal_of_what_lies_before_that_dies_anywhere_is_completed(
    place: ChangingFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_chain(place, 2)
    merge(place, 1)
    whole, kept = tmp_path / "whole", set[str]()
    shutil.copytree(tmp_path / "store", whole)
    states = set[int]()
    for at in itertools.count():
        folder = tmp_path / f"store-{at}"
        shutil.copytree(whole, folder)
        store = open_store(f"file://{folder}", {})
        with dying_at_effect(monkeypatch, at) as done, suppress(KilledError):
            drop_earlier_objects(store, plan_drop(store, "chain"), Silent())
        is_over = len(done) < at
        states.add(first_increment(store, "chain"))
        # Before the mark everything is there, and after it everything from the merge on.
        is_marked = first_increment(store, "chain") == 1
        chain = read_from_merge(store, "chain") if is_marked else read_as_committed(store, "chain", 2)
        assert keys_of(chain) <= set(store.list("snapshots"))
        again = drop_earlier_objects(store, plan_drop(store, "chain"), Silent())
        assert again.refused == {}
        left = {key for key in store.list("snapshots") if not key.endswith(".json")}
        kept = kept or left
        assert left == kept
        assert read_open_intents(store) == []
        shutil.rmtree(folder)
        if is_over:
            break
    assert states == {0, 1}
    assert kept >= keys_of(read_from_merge(open_store(f"file://{whole}", {}), "chain"))


def test_damage_is_named_and_nothing_is_merged(place: ChangingFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    make_chain(place, 2)
    store = place.folder / "store"
    for pattern in ("base/s1/*/*.parquet", "wal/s2-b1/*/*2.parquet"):
        (path,) = sorted(store.glob(f"snapshots/chain/{pattern}"))[:1]
        body = path.read_bytes()
        flip_byte(path)
        with pytest.raises(SnapshotError) as raised:
            merge(place)
        assert str(path.relative_to(store)) in raised.value.message
        assert raised.value.exit_code in (1, 3)
        path.write_bytes(body)
    assert first_of(place) == 0

    written = running.write_base

    def write_less(chain: Chain, node: str, operation: str, work: Work) -> NewBase:
        base = written(chain, node, operation, work)
        return structs.replace(base, written=base.written[1:]) if node == "s2" else base

    monkeypatch.setattr(running, "write_base", write_less)
    with pytest.raises(MergeUnprovenError) as unproven:
        merge(place)
    assert unproven.value.exit_code == 1
    assert "on s2" in unproven.value.message
    monkeypatch.undo()
    assert first_of(place) == 0
    assert merge(place).is_new
    assert place.check().result == VALID


def test_no_changed_merge_is_read_as_another(place: ChangingFleet) -> None:
    make_chain(place, 2)
    prepare(place, "roll-back-later", 9047)
    write(place)
    place.increment()
    stored = merge(place).merge
    decide(place, "roll-back-later", "ROLLBACK")
    store = place.fleet.store.open()
    part = read_part_at(store, "chain", 3)
    key = merge_key("chain", 3)
    content = unseal(key, read_body(store, key))[0]
    documents = {key: json.loads(content)}
    nodes = tuple(stored.copies)

    def recipe(document: Merge) -> object:
        chain = begin_with(part, document)
        sources = sources_of(chain, nodes, store)
        return sources, [chain.excluded(node) for node in nodes], [chain.segments(node) for node in nodes]

    expected, others, counted = recipe(stored), collect_others(documents), 0
    for mutation in mutations_of(key, documents[key]):
        changed = mutate(documents, mutation, others, seed=1)
        if changed is None:
            continue
        counted += 1
        try:
            found, digest = unseal(key, seal_document(changed))
            read: Merge | Void = parse_document(key, found, Merge | Void)
            with checking(key):
                check_merge(read)
            result = recipe(structs.replace(read, digest=digest))
        except (ManifestError, ObjectDamagedError, ArchiveError):
            continue
        # Some values describe the merge, or are proven when the object is read.
        is_described = mutation.path[0] in ("operation", "made_at", "seconds", "by", "proof", "counts")
        is_proven = mutation.path[-1] in ("key", "size", "digest", "events_at", "events_digest", "operation", "open")
        is_proven |= mutation.path[0] == "archived" or not {"rows", "dead"}.isdisjoint(mutation.path)
        assert is_described or is_proven or result == expected, str(mutation)
    assert counted > 1000


def test_of_two_merges_one_counts(place: ChangingFleet) -> None:
    make_chain(place, 1)
    store = place.fleet.store.open()

    def prove(chain: Chain, merged: Chain, work: Work) -> Proof:
        proof = prove_merge(chain, merged, work)
        assert merged.beginning is not None
        # Another machine, whose clock is wrong, has stored the same merge.
        put_merge(store, structs.replace(merged.beginning.merge, operation=OTHER, proof=proof.digest), 1)
        return proof

    with pytest.raises(MergeSupersededError):
        run_merge(place.fleet, plan_merge(place.fleet, "chain", None, Silent()), place.runs.spark, Silent(), prove)
    assert first_of(place) == 1
    place.check_restores(1)


def test_a_restore_of_an_encrypted_store_begins_with_the_merge(place: ChangingFleet, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    text = f"{MORE}\n[encryption]\nkey_file = {json.dumps(str(key))}\n"
    fleet = configure_fleet(place.servers, tmp_path / "sealed.toml", f"file://{tmp_path}/sealed", more=text)
    sealed = ChangingFleet(place.servers, place.target, Runs(fleet, place.runs.spark), tmp_path)
    sealed.runs.init()
    make_chain(sealed, 2)
    document = command(sealed, "merge", "chain", "--drop-earlier", "--yes")
    assert document["increment"] == 2
    write(sealed)
    sealed.increment()
    sealed.check_restores(2, 3)
    assert sealed.check().result == VALID
    assert not [path for path in tmp_path.glob("sealed/snapshots/chain/base/*/*/*") if b"PAR1" in path.read_bytes()]
