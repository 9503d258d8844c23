"""Whatever is wrong with a stored chain, check finds it, names it and exits 1; and never passes on nothing.

One small chain is made once; every test damages a copy of its store.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fleet.progress import Silent
from restore.plan import plan_restore
from restore.request import RestoreRequest
from restore.restore import restore_fleet
from snapshots.records.commits import SnapshotMissingError, commit_key
from snapshots.records.store_identity import StoreNotInitialisedError
from storage.errors import SnapshotError
from tests.integration.stored_chain import (
    NAME,
    ONLY_PRIMARIES,
    Stored,
    changed_keys,
    group_number,
    is_shared,
    made,
    row_of,
    stored,
)
from tests.snapshot_runs import run_command
from tests.store_damage import (
    Document,
    change_base,
    change_commit,
    change_document,
    change_segment,
    extend,
    flip_byte,
    remove,
    truncate,
    with_value,
    without_row,
)
from wal.segments.segment_schema import PREPARE

__all__ = ["made", "stored"]  # the fixtures


def test_a_healthy_chain_is_valid(stored: Stored) -> None:
    report = stored.check()
    assert (report.result, report.exit_code) == ("valid", 0), report.to_json()
    compared = report.snapshots[0].compared
    assert compared.objects == len(stored.objects())
    assert min(compared.rows, compared.changes, compared.partitions, compared.transactions) > 0
    assert stored.check(increment=0).exit_code == 0


@pytest.mark.parametrize(("damage", "kind"), [
    (flip_byte, "base"), (flip_byte, "DDL"), (flip_byte, "segment of a primary"), (remove, "segment of a standby"),
    (flip_byte, "full commit"), (flip_byte, "increment's commit"),
    (remove, "full commit"), (remove, "increment's commit"),
])  # fmt: skip
def test_one_damaged_object_is_named(stored: Stored, kind: str, damage: Callable[[Path], None]) -> None:
    key = stored.kinds()[kind]
    damage(stored.store / key)
    (conflict,) = stored.conflicts()
    assert conflict.object == key
    assert key in conflict.detail or "commit" in kind


@pytest.mark.parametrize("damage", [flip_byte, remove])
def test_every_damaged_object_is_named(stored: Stored, damage: Callable[[Path], None]) -> None:
    for key in stored.objects():
        damage(stored.store / key)
    assert sorted(str(one.object) for one in stored.conflicts()) == sorted(stored.objects())


@pytest.mark.parametrize("kind", ["full commit", "increment's commit"])
def test_a_commit_that_is_gone_is_missed_by_a_check_of_everything(stored: Stored, kind: str) -> None:
    (stored.store / stored.kinds()[kind]).unlink()
    report = stored.check(name=None)
    assert report.exit_code == 1
    assert [one.object for found in report.snapshots for one in found.conflicts] == [stored.kinds()[kind]]


def test_a_snapshot_whose_only_commit_is_gone_is_missed_too(stored: Stored) -> None:
    (stored.store / commit_key(ONLY_PRIMARIES, 0)).unlink()
    for name in (None, ONLY_PRIMARIES):
        report = stored.check(name)
        assert report.exit_code == 1
        assert [one.object for f in report.snapshots for one in f.conflicts] == [commit_key(ONLY_PRIMARIES, 0)]


def test_what_was_never_there_is_no_damage(stored: Stored) -> None:
    with pytest.raises(SnapshotMissingError):
        stored.check("never")
    with pytest.raises(SnapshotMissingError):
        stored.check(increment=7)


def test_objects_swapped_with_their_like_are_found(stored: Stored) -> None:
    first, second = (stored.chain.increments[0].segments[node][0].key for node in ("s1", "s2"))
    shutil.copyfile(stored.store / first, stored.store / second)
    (conflict,) = stored.conflicts()
    assert (conflict.object, conflict.node) == (second, "s2")


def test_a_changed_fleet_id_is_found(stored: Stored) -> None:
    change_document(stored.store / "fleet.json", lambda document: document.update(fleet="0badf00d"))
    assert ("fleet", "fleet.json") in [(one.kind, one.object) for one in stored.conflicts()]


def test_without_fleet_json_nothing_is_believed(stored: Stored) -> None:
    (stored.store / "fleet.json").unlink()
    with pytest.raises(StoreNotInitialisedError):
        stored.check()


def test_a_row_lost_from_a_standbys_segment_is_found_by_comparison_alone(stored: Stored) -> None:
    change_segment(stored.store, NAME, 1, "s1-b1", lambda table: without_row(table, row_of(stored, table, "account")))
    found = {(one.kind, one.node, one.other_node, one.group) for one in stored.conflicts()}
    assert ("changes", "s1", "s1-b1", "public.account") in found
    assert {(node, other) for _, node, other, _ in found} == {("s1", "s1-b1")}


def test_a_transfer_lost_from_a_standbys_segment_is_missed_in_its_rows(stored: Stored) -> None:
    change_segment(stored.store, NAME, 1, "s2-b1", lambda table: without_row(table, row_of(stored, table, "transfer")))
    conflicts = stored.conflicts()
    assert {(one.kind, one.group) for one in conflicts} == {
        ("changes", "public.transfer"), ("row-count", "public.transfer"),
    }  # fmt: skip
    assert all((one.node, one.other_node) == ("s2", "s2-b1") for one in conflicts)


def test_one_value_changed_in_a_standbys_base_is_found(stored: Stored) -> None:
    changed = changed_keys(stored, "s2-b1")

    def other_balance(table: pa.Table) -> pa.Table:
        row = row_of(stored, table, "account", changed)
        key = table["key"][row].as_py()
        return with_value(table, row, "row", key + b"\t999\n")

    change_base(stored.store, NAME, "s2-b1", other_balance)
    (conflict,) = stored.conflicts()
    assert (conflict.kind, conflict.node, conflict.other_node) == ("row-hash", "s2", "s2-b1")
    assert conflict.group == "public.account"


def test_a_half_present_global_transaction_is_named(stored: Stored) -> None:
    segment = stored.chain.increments[0].segments["s2"][0]
    cut = stored.chain.increments[0].cut.of("s2")
    events = pq.read_table(stored.store / segment.key).to_pylist()
    torn = next(e for e in events if e["op"] == PREPARE and e["lsn"] < cut.position and is_shared(stored, e))

    def leave_out(document: Document) -> None:
        (node,) = (one for one in document["cut"]["nodes"] if one["node"] == "s2")
        place = {name: f"{torn[name] >> 32:X}/{torn[name] & 0xFFFFFFFF:X}" for name in ("lsn", "end_lsn")}
        node["undecided"].append({"global_id": torn["global_id"], **place})

    change_commit(stored.store, NAME, 1, leave_out)
    (conflict,) = stored.conflicts()
    assert (conflict.kind, conflict.node, conflict.other_node) == ("transaction", "s1", "s2")
    assert conflict.global_id == torn["global_id"]


def test_a_marker_that_is_not_where_its_commit_says_is_found(stored: Stored) -> None:
    change_commit(stored.store, NAME, 1, lambda document: document["cut"].update(id="another.1"))
    assert {(one.kind, one.node) for one in stored.conflicts()} == {
        ("marker", node) for node in ("s1", "s2", "s1-b1", "s2-b1")
    }


def test_a_hole_in_an_archive_is_found(stored: Stored) -> None:
    def forget(document: Document) -> None:
        document["segments"]["s1"] = []

    change_commit(stored.store, NAME, 0, forget)
    found = {(one.kind, one.node) for one in stored.conflicts()}
    assert ("archive", "s1") in found


def test_a_value_that_is_stored_nowhere_is_found(stored: Stored) -> None:
    def without_wide_rows(table: pa.Table) -> pa.Table:
        is_wide = [group == group_number(stored, "wide") for group in table["group"].to_pylist()]
        return table.filter(pa.compute.invert(pa.array(is_wide)))

    for node in ("s1", "s1-b1"):
        change_base(stored.store, NAME, node, without_wide_rows)
    assert {(one.kind, one.node, one.group) for one in stored.conflicts()} == {
        ("history", "s1", "public.wide"), ("history", "s1-b1", "public.wide"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["base", "DDL", "segment of a primary"])
def test_a_restore_from_damaged_objects_is_refused_and_leaves_nothing(stored: Stored, kind: str) -> None:
    flip_byte(stored.store / stored.kinds()[kind])
    nodes = tuple(replace(node, dsn=node.dsn.replace("/bank", "/damaged")) for node in stored.fleet.primaries)
    target = replace(stored.fleet, nodes=nodes)
    with pytest.raises(SnapshotError) as refused:
        restore_fleet(plan_restore(stored.fleet, target, RestoreRequest(NAME)), stored.spark, Silent())
    assert refused.value.exit_code == 3
    assert refused.value.details["object"] == stored.kinds()[kind]
    for node in stored.fleet.primaries:
        with psycopg.connect(node.dsn) as connection:
            names = {row[0] for row in connection.execute("SELECT datname FROM pg_database")}
        assert names == {"bank", "postgres", "template0", "template1"}


def test_without_standbys_a_check_is_inconclusive(stored: Stored) -> None:
    report = stored.check(ONLY_PRIMARIES)
    assert (report.result, report.exit_code) == ("inconclusive", 4)
    assert [one.what for one in report.snapshots[0].skipped] == ["rows of shard s1", "rows of shard s2"]


def test_an_empty_store_is_inconclusive(stored: Stored) -> None:
    shutil.rmtree(stored.store / "snapshots")
    code, document = run_command(stored.fleet, "check")
    assert (code, document["result"], document["snapshots"]) == (4, "inconclusive", [])


def test_the_command_exits_1_and_names_the_damaged_object(stored: Stored) -> None:
    key = stored.kinds()["base"]
    flip_byte(stored.store / key)
    code, document = run_command(stored.fleet, "check", NAME)
    assert code == 1
    (found,) = document["snapshots"]
    assert [one["object"] for one in found["conflicts"]] == [key]


def test_the_command_exits_1_on_a_changed_commit(stored: Stored) -> None:
    key = stored.kinds()["increment's commit"]
    flip_byte(stored.store / key, 0.9)
    code, document = run_command(stored.fleet, "check", NAME)
    assert code == 1
    assert [one["object"] for found in document["snapshots"] for one in found["conflicts"]] == [key]


def test_one_check_tells_every_kind_of_damage_to_every_kind_of_object(stored: Stored) -> None:
    keys = stored.every_kind()
    truncate(stored.store / keys["base"])
    extend(stored.store / keys["pre-data"])
    flip_byte(stored.store / keys["post-data"])
    remove(stored.store / keys["segment"])
    # Another attempt's of the same node: as good as any, but for its digest.
    other = stored.chain.full.segments["s1"][0].key
    shutil.copyfile(stored.store / other, stored.store / keys["segment of an increment"])
    found = {str(one.object): one.kind for one in stored.conflicts()}
    assert {name: found.get(key) for name, key in keys.items()} == {
        "base": "size", "pre-data": "size", "post-data": "digest", "segment": "missing",
        "segment of an increment": "size",
    }  # fmt: skip
    assert found.keys() == set(keys.values())
