"""Merges of large tables of which few rows have changed: objects are carried with the numbers of their dead rows.

Expected rows come from the live servers (COPY), and expected results of checks from what was done to the store.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.snapshots.fold import limits
from cutline.snapshots.merge import rewriting, running
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import StoredObject, listed_objects
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.operation_records import VALID
from cutline.snapshots.repair import work
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.servers.dealt import start_fleet
from tests.servers.fleets import fleet_of
from tests.stores.damage import flip_byte, truncate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NODES = ("s1", "s1-b1")
ROWS = 20_000
TABLES = (
    "DROP TABLE IF EXISTS seen, item, bag, wide, low, gone",
    "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
    "CREATE TABLE item (id int PRIMARY KEY, n int, text text)",
    f"INSERT INTO item SELECT n, 0, md5(n::text) FROM generate_series(1, {ROWS}) n",
    "CREATE TABLE bag (a text, n int)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT md5((n / 2)::text), n % 4 FROM generate_series(1, 6000) n",
    "CREATE TABLE wide (id int PRIMARY KEY, n int, large text)",
    "ALTER TABLE wide ALTER large SET STORAGE EXTERNAL",
    "INSERT INTO wide SELECT n, 0, repeat(md5(n::text), 90) FROM generate_series(1, 400) n",
    "INSERT INTO wide SELECT n, 0, repeat(md5(n::text), 3000) FROM generate_series(401, 410) n",
    "CREATE TABLE low (id int PRIMARY KEY)",
    "INSERT INTO low SELECT generate_series(1, 300)",
    "CREATE TABLE gone (id int PRIMARY KEY)",
    "INSERT INTO gone SELECT generate_series(1, 300)",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    """A shard with a standby, and an empty one to restore into."""
    folder = tmp_path_factory.mktemp("dead")
    try:
        fleet = start_fleet(folder / "fleet", shards=1, backups=1)
        with fleet_of(folder / "target", [None]) as target:
            yield fleet, target
    finally:
        stop_fleet(folder / "fleet", delete=True)


@pytest.fixture
def more(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Further tables of fleet.toml."""
    return sealed_by(tmp_path / "key", "11") if getattr(request, "param", None) == "encrypted" else ""


@pytest.fixture
def place(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession, more: str
) -> Iterator[ChangingFleet]:
    source, target = servers
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=more)
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = ChangingFleet(source, into, Runs(fleet, Ready(spark)), tmp_path)
    found.execute("s1", *TABLES)
    found.await_replay("s1-b1")
    with dropping_slots(fleet):
        found.runs.init()
        found.runs.full("chain")
        found.states[0] = found.live_state()
        yield found


def sealed_by(key: Path, digits: str) -> str:
    key.write_text(digits * 32)
    key.chmod(0o600)
    return f"[encryption]\nkey_file = {json.dumps(str(key))}\n"


def command(place: ChangingFleet, *words: str) -> dict[str, Any]:
    code, document = run_here(place.fleet, *words, spark=place.runs.spark.running)
    assert code == 0, document
    return document


def scatter(place: ChangingFleet, *more: str) -> int:
    """Change about 2 % of the rows of all large tables, others in each round, and take an increment."""
    place.written += 1
    n = place.written
    place.execute(
        "s1",
        f"UPDATE item SET n = {n} WHERE id % 100 = {n}",
        f"DELETE FROM item WHERE id % 200 = {n + 50}",
        f"UPDATE item SET id = id + 1000000 WHERE id % 400 = {n + 60}",
        "UPDATE bag SET n = n + 10 WHERE ctid IN (SELECT ctid FROM bag WHERE a < '04' ORDER BY a, n LIMIT 60)",
        f"DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE a > 'fa' LIMIT {n})",
        f"INSERT INTO bag VALUES ('new', {n}), ('new', {n})",
        f"UPDATE wide SET n = {n} WHERE id % 50 = {n}",
        f"INSERT INTO item SELECT n, {n}, 'new' FROM generate_series({n * 10**7}, {n * 10**7 + 20}) n",
        *more,
    )
    return place.increment().increment


def chain_of(fleet: Fleet, increment: int | None = None) -> Chain:
    store = fleet.store.open()
    return read_chain_lists(store, read_from_merge(store, "chain", increment))


def bases_of(chain: Chain, node: str) -> list[StoredObject]:
    return [one for entry in chain.base_entries(node) for one in listed_objects(entry)]


def partly_dead(chain: Chain) -> dict[str, StoredObject]:
    """The objects with dead rows, by key."""
    return {one.key: one for node in NODES for one in bases_of(chain, node) if one.dead is not None}


def stored_bytes(place: ChangingFleet) -> int:
    return sum(path.stat().st_size for path in (place.folder / "store").rglob("*") if path.is_file())


def check_no_garbage(place: ChangingFleet) -> None:
    """The store has the objects that the chain needs, and no other rows."""
    assert command(place, "gc", "--grace", "0s", "--dry-run")["objects"] == 0
    chain = chain_of(place.fleet)
    needed = {entry.key for commit in chain.commits for entry in commit.named_and_listed}
    stored = {key for key in place.fleet.store.open().list("snapshots") if "/base/" in key}
    assert stored == {key for key in needed if "/base/" in key}


def check_states(place: ChangingFleet, *increments: int) -> None:
    report = place.check()
    assert (report.result, report.conflicts) == (VALID, [])
    place.check_restores(*increments)


def test_few_changes_of_a_large_table_are_merged_without_writing_it_again(place: ChangingFleet) -> None:
    scatter(place)
    before = stored_bytes(place)
    document = command(place, "merge", "chain")
    written = stored_bytes(place) - before
    assert written < 0.1 * document["bytes"]
    first = partly_dead(chain_of(place.fleet))
    assert len(first) == document["carried_objects"]
    assert {one.node for one in first.values()} == {*NODES}
    for one in first.values():
        assert one.dead is not None
        # Of each object, 2 % of the rows have changed.
        assert 0 < one.dead.rows < 0.2 * sum(one.rows.values())
        footer = pq.read_metadata(place.folder / "store" / one.key)
        assert footer.num_rows == one.dead.rows + sum(one.rows.values())
    check_states(place, 0, 1)
    (tables,) = place.states[1]
    assert document["rows"] == sum(copied.count(b"\n") for copied in tables.values())

    # Dead rows accumulate, and an object that has more of them gets another list of them.
    scatter(place)
    check_states(place, 2)
    command(place, "merge", "chain")
    second = partly_dead(chain_of(place.fleet))
    for key in first.keys() & second.keys():
        was, now = first[key].dead, second[key].dead
        assert was is not None
        assert now is not None
        assert now.rows > was.rows
        assert now.key != was.key
    assert first.keys() <= second.keys()
    check_states(place, 0, 1, 2)
    # A merge without changes writes no object of rows.
    place.increment()
    document = command(place, "merge", "chain")
    assert document["objects"] == document["carried_objects"] + len(second)
    assert partly_dead(chain_of(place.fleet)) == second

    # What a later state needs stays, whichever merge has stored it.
    command(place, "merge", "chain", "--drop-earlier", "--yes")
    check_no_garbage(place)
    check_states(place, 3)
    place.execute("s1", "UPDATE item SET n = -1 WHERE id % 2 = 1")
    at = place.increment().increment
    command(place, "merge", "chain")
    chain = chain_of(place.fleet)
    (item,) = (group.number for group in chain.groups("s1") if group.table == "item")
    rewritten = {key for key, one in first.items() if item in one.rows}
    assert rewritten
    assert rewritten.isdisjoint(one.key for node in NODES for one in bases_of(chain, node))
    check_states(place, at)
    command(place, "merge", "chain", "--drop-earlier", "--yes")
    check_no_garbage(place)
    check_states(place, scatter(place))


def test_large_rows_that_change_again_and_again_do_not_stay(place: ChangingFleet) -> None:
    """They are few of the rows, and most of the bytes: the objects that had them are written again."""
    sizes: list[int] = []
    for n in range(3):
        large = f"(SELECT string_agg(md5('{n} ' || i), '') FROM generate_series(1, 40000) i)"
        place.execute("s1", f"UPDATE wide SET large = {large} WHERE id > 400")
        at = scatter(place)
        command(place, "merge", "chain")
        sizes.append(sum(one.size for one in bases_of(chain_of(place.fleet), "s1")))
    assert sizes[2] < 1.2 * sizes[0]
    check_states(place, 1, at)


@pytest.mark.parametrize("who", ["driver", "spark", "lists"])
def test_tables_change_between_merges(place: ChangingFleet, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    if who == "spark":
        monkeypatch.setattr(limits, "CHANGES_MAX", 0)
        monkeypatch.setattr(work, "LOCAL_ROWS_MAX", 0)
    if who == "lists":
        monkeypatch.setattr(running, "OWN_OBJECTS_MAX", 0)
    scatter(place)
    command(place, "merge", "chain")
    assert partly_dead(chain_of(place.fleet))
    scatter(place, "ALTER TABLE item ADD c int DEFAULT 7", "TRUNCATE low", "DROP TABLE gone")
    at = scatter(place, "ALTER TABLE wide ADD m int DEFAULT 1", "INSERT INTO low VALUES (7)")
    check_states(place, at)
    command(place, "merge", "chain")
    assert partly_dead(chain_of(place.fleet))
    check_states(place, 1, 2, at)
    later = scatter(place, "UPDATE item SET c = 8 WHERE id % 100 = 99", "TRUNCATE low")
    check_states(place, later)
    command(place, "merge", "chain", "--drop-earlier", "--yes")
    check_no_garbage(place)
    check_states(place, later)
    place.check_restores_without("s1", later)


@pytest.mark.parametrize("more", ["encrypted"], indirect=True)
def test_an_encrypted_store_and_its_copies_have_the_same_rows(place: ChangingFleet, spark: SparkSession) -> None:
    scatter(place)
    command(place, "merge", "chain")
    scatter(place)
    command(place, "merge", "chain", "--to", "2")
    assert partly_dead(chain_of(place.fleet))
    check_states(place, 1, 2)
    for name, words in (("all", ()), ("dropped", ("--drop-earlier", "--yes"))):
        command(place, "merge", "chain", *words)
        text = sealed_by(place.folder / f"{name}-key", "22")
        second = configure_fleet(
            place.servers, place.folder / f"{name}.toml", f"file://{place.folder}/{name}", more=text
        )
        command(place, "copy", "chain", "--to", str(second.path))
        assert partly_dead(chain_of(second)).keys() == partly_dead(chain_of(place.fleet)).keys()
        code, checked = run_here(second, "check", "chain", spark=spark)
        assert (code, checked["result"]) == (0, VALID), checked
        Runs(second, place.runs.spark).restore("chain", place.target, 2)
        assert [sorted_copies(node.dsn) for node in place.target.primaries] == place.states[2]
        assert run_here(second, "gc", "--grace", "0s", "--dry-run")[1]["objects"] == 0


def exchange(path: Path) -> None:
    """Put another object's list of dead rows in the place of this one."""
    other = next(one for one in sorted(path.parent.glob("dead-*")) if one.read_bytes() != path.read_bytes())
    shutil.copy(other, path)


DAMAGES = {
    "missing": Path.unlink,
    "altered": flip_byte,
    "truncated": truncate,
    "exchanged": exchange,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("lists", [False, True], ids=["own", "listed"])
def test_damaged_lists_of_dead_rows_are_named_and_repaired(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch, damage: str, *, lists: bool
) -> None:
    if lists:
        monkeypatch.setattr(running, "OWN_OBJECTS_MAX", 0)
    for _ in range(2):
        scatter(place)
        command(place, "merge", "chain")
    at = scatter(place)
    (key, one), *_ = ((key, one) for key, one in partly_dead(chain_of(place.fleet)).items() if one.node == "s1")
    assert one.dead is not None
    path = place.folder / "store" / one.dead.key
    DAMAGES[damage](path)
    report = place.check()
    assert {conflict.object for conflict in report.conflicts if conflict.object} == {one.dead.key}
    # Without it, no row of the object can be restored from this copy.
    words = ("restore", "chain", "--to", str(place.target.path), "--replace", "--yes")
    code, document = run_here(place.fleet, *words, spark=place.runs.spark.running)
    assert code == 3, document
    assert one.dead.key in document["message"]
    place.check_restores(2, at)
    document = command(place, "repair", "chain", "--yes")
    assert (document["unrepaired"], [one["from_copy"] for one in document["replaced"]]) == ([], ["s1-b1"])
    assert key not in partly_dead(chain_of(place.fleet))
    check_states(place, 2, at)
    place.runs.restore("chain", place.target, at)
    assert [sorted_copies(node.dsn) for node in place.target.primaries] == place.states[at]
    # The next merges begin with the repaired objects.
    at = scatter(place)
    command(place, "merge", "chain", "--drop-earlier", "--yes")
    check_no_garbage(place)
    check_states(place, at)


def test_no_increment_follows_a_chain_that_lacks_one(place: ChangingFleet) -> None:
    scatter(place)
    command(place, "merge", "chain", "--drop-earlier", "--yes")
    *_, one = partly_dead(chain_of(place.fleet)).values()
    assert one.dead is not None
    (place.folder / "store" / one.dead.key).unlink()
    code, document = run_here(place.fleet, "create", "chain", "--incremental", spark=place.runs.spark.running)
    assert code == 3, document
    assert one.dead.key in document["message"]


def test_lost_objects_are_rebuilt_without_dead_rows(place: ChangingFleet) -> None:
    scatter(place)
    command(place, "merge", "chain")
    lost = [one for one in partly_dead(chain_of(place.fleet)).values() if one.node == "s1-b1"]
    for one in lost:
        (place.folder / "store" / one.key).unlink()
    document = command(place, "repair", "chain", "--yes")
    assert document["unrepaired"] == []
    assert not [one for one in partly_dead(chain_of(place.fleet)).values() if one.node == "s1-b1"]
    check_states(place, 1)
    place.check_restores_without("s1", 1)
    at = scatter(place)
    command(place, "merge", "chain")
    check_states(place, 1, at)
    place.check_restores_without("s1", at)


@pytest.mark.parametrize("lists", [False, True], ids=["own", "listed"])
@pytest.mark.parametrize("what", ["object missing", "rows missing", "object altered", "rows altered", "both altered"])
def test_damaged_objects_are_taken_from_another_store(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch, what: str, *, lists: bool
) -> None:
    """Earlier restore points have the same object with other dead rows, or with none."""
    if lists:
        monkeypatch.setattr(running, "OWN_OBJECTS_MAX", 0)
    scatter(place)
    command(place, "merge", "chain")
    scatter(place)
    command(place, "merge", "chain")
    at = scatter(place)
    shutil.copytree(place.folder / "store", place.folder / "intact")
    for one in partly_dead(chain_of(place.fleet)).values():
        assert one.dead is not None
        part, _, damage = what.partition(" ")
        for key in [one.key] * (part != "rows") + [one.dead.key] * (part != "object"):
            path = place.folder / "store" / key
            if damage == "missing":
                path.unlink()
            else:
                flip_byte(path)
    document = command(place, "repair", "chain", "--from", f"file://{place.folder}/intact", "--yes")
    assert document["unrepaired"] == []
    assert not any(one["from_copy"] for one in document["replaced"])
    assert bool(document["put_back"]) == what.endswith("missing")
    assert partly_dead(chain_of(place.fleet))
    check_states(place, 2, at)
    # Objects that an earlier merge or the full snapshot lists itself are replaced there, too.
    if not lists or "rows" in what or what.endswith("missing"):
        for increment in (0, 1):
            assert place.check(increment).result == VALID, increment
            place.check_restores(increment)
    at = scatter(place)
    command(place, "merge", "chain", "--drop-earlier", "--yes")
    check_no_garbage(place)
    check_states(place, at)


def test_rows_that_a_second_store_has_rebuilt_do_not_return_in_a_copied_merge(
    place: ChangingFleet, spark: SparkSession
) -> None:
    """They are those before the dead rows died: the merge needs the object itself, which the copy puts back."""
    second = configure_fleet(place.servers, place.folder / "second.toml", f"file://{place.folder}/second")
    scatter(place)
    command(place, "copy", "chain", "--to", str(second.path))
    lost = [one.key for one in bases_of(chain_of(second), "s1")]
    for key in lost:
        (place.folder / "second" / key).unlink()
    code, repaired = run_here(second, "repair", "chain", "--yes", spark=spark)
    assert (code, {one["from_copy"] for one in repaired["replaced"]}) == (0, {"s1-b1"}), repaired
    command(place, "merge", "chain")
    assert {*lost} & partly_dead(chain_of(place.fleet)).keys()
    command(place, "copy", "chain", "--to", str(second.path))
    assert partly_dead(chain_of(second)).keys() == partly_dead(chain_of(place.fleet)).keys()
    runs = Runs(second, place.runs.spark)
    for increment in (0, 1):
        code, checked = run_here(second, "check", "chain", "--increment", str(increment), spark=spark)
        assert (code, checked["result"]) == (0, VALID), checked
        runs.restore("chain", place.target, increment)
        assert [sorted_copies(node.dsn) for node in place.target.primaries] == place.states[increment]
    # What is lost of the merge is rebuilt by itself, with the rows at its cut.
    for key in {*lost} & partly_dead(chain_of(second)).keys():
        (place.folder / "second" / key).unlink()
    code, repaired = run_here(second, "repair", "chain", "--yes", spark=spark)
    assert (code, {one["from_copy"] for one in repaired["replaced"]}) == (0, {"s1-b1"}), repaired
    for increment in (0, 1):
        runs.restore("chain", place.target, increment)
        assert [sorted_copies(node.dsn) for node in place.target.primaries] == place.states[increment]
    assert run_here(second, "gc", "--grace", "0s", "--dry-run")[1]["objects"] == 0


class KilledError(BaseException):
    """Stands for the end of the process: nothing after it runs."""


def test_a_merge_that_dies_after_a_node_is_continued(place: ChangingFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter(place)
    written: list[str] = []
    write = running.write_base

    def die(chain: Chain, node: str, *rest: Any) -> rewriting.NewBase:
        if written and written[-1] != node:
            raise KilledError(node)
        written.append(node)
        return write(chain, node, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(running, "write_base", die)
        patched.setattr("cutline.snapshots.operations.leases.record_outcome", lambda *_, **__: None)
        with pytest.raises(KilledError):
            command(place, "merge", "chain")
    assert chain_of(place.fleet).full.increment == 0
    monkeypatch.setattr(running, "is_gone", lambda _process: True)
    command(place, "merge", "chain")
    assert {one.node for one in partly_dead(chain_of(place.fleet)).values()} == {*NODES}
    check_states(place, 0, 1)
    command(place, "merge", "chain", "--drop-earlier", "--yes")
    check_no_garbage(place)
    check_states(place, 1)
