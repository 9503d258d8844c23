"""Check finds and names any damage of a stored chain and exits 1, and it never passes if there is nothing to check.

One small chain is made once; every test damages a copy of its store, in all ways at once that do not hide each other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from cutline.check.report import CheckReport
from cutline.check.structure import check_structure
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.fold.changes import read_changes
from cutline.snapshots.fold.sources import problem_of, sources_of
from cutline.snapshots.records.proven_chains import SnapshotMissingError, commit_key
from cutline.snapshots.records.store_identity import StoreNotInitialisedError
from cutline.storage.errors import SnapshotError
from cutline.wal.segments.segments import PREPARE
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import run_command
from tests.integration.damage.stored_chain import (
    NAME,
    ONLY_PRIMARIES,
    StoredChain,
    changed_keys,
    group_number,
    is_shared,
    row_of,
)
from tests.run.soak import first_of_each
from tests.stores.damage import (
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


def check_everything(stored: StoredChain) -> CheckReport:
    """Check all snapshots without reading objects; their commits are checked as in any other check."""
    return check_snapshots(stored.fleet, CheckRequest(metadata_only=True), stored.spark, Silent())


def conflicts_of(report: CheckReport) -> list[tuple[str, str | None]]:
    assert report.exit_code == 1
    return [(one.kind, one.object) for found in report.snapshots for one in found.conflicts]


def test_a_healthy_chain_is_valid(stored: StoredChain) -> None:
    report = stored.check()
    assert (report.result, report.exit_code) == ("valid", 0), report.to_json()
    compared = report.snapshots[0].compared
    assert compared.objects == len(stored.objects())
    assert min(compared.rows, compared.changes, compared.partitions, compared.transactions) > 0
    # The bank names the participants of its transfers, also of those during the full snapshot.
    assert report.snapshots[0].unknown_participants == 0
    assert stored.check(increment=0).exit_code == 0


@pytest.mark.parametrize(("number", "damage"), first_of_each(product([0, 1], [flip_byte, remove])))
def test_a_damaged_commit_is_named(stored: StoredChain, number: int, damage: Callable[[Path], None]) -> None:
    key = commit_key(NAME, number)
    damage(stored.store / key)
    # If the last increment is missing, check reads the rest of the chain, which the next test covers.
    report = check_everything(stored) if (damage, number) == (remove, 1) else stored.check()
    assert report.exit_code == 1
    assert [one.object for found in report.snapshots for one in found.conflicts] == [key]


def test_if_a_commit_is_missing_the_objects_of_the_others_are_still_checked(stored: StoredChain) -> None:
    def empty_segments(document: Document) -> None:
        document["segments"]["s1"] = []

    # In addition, a hole in an archive, and damaged objects of other nodes.
    change_commit(stored.store, NAME, 0, empty_segments)
    keys = stored.key_by_kind()
    remove(stored.store / keys["increment's commit"])
    remove(stored.store / keys["segment of a standby"])
    flip_byte(stored.store / keys["DDL"])
    found = {(one.kind, one.node, one.object) for one in stored.conflicts()}
    assert {one for _, _, one in found} >= {keys["increment's commit"], keys["segment of a standby"], keys["DDL"]}
    assert ("archive", "s1") in {(kind, node) for kind, node, _ in found}


def test_every_damaged_object_is_named_with_what_is_wrong(stored: StoredChain) -> None:
    """Each kind of object is damaged in a particular way; the others are flipped or removed."""
    keys, more_keys = stored.object_by_kind(), stored.key_by_kind()
    others = [stored.chain.full.segments["s1"][0].key, stored.chain.increments[0].segments["s1-b1"][0].key]
    like = (more_keys["segment of a primary"], stored.chain.increments[0].segments["s1"][0].key)
    bodies = {key: (stored.store / key).read_bytes() for key in [*others, *like]}
    expected: dict[str, str] = {}

    def damage(key: str, kind: str, damage: Callable[[Path], object]) -> None:
        assert key not in expected
        damage(stored.store / key)
        expected[key] = kind

    damage(keys["base"], "size", truncate)
    damage(keys["DDL"], "size", extend)
    damage(keys["other DDL"], "digest", flip_byte)
    damage(keys["segment"], "missing", remove)
    # Another segment of the same node, and another node's segment of the same cut: valid except for their digests.
    damage(keys["segment of an increment"], "size", lambda path: path.write_bytes(bodies[others[0]]))
    damage(like[0], "", lambda path: path.write_bytes(bodies[like[1]]))
    for number, key in enumerate(one for one in stored.objects() if one not in expected):
        damage(key, *(("missing", remove), ("digest", flip_byte))[number % 2])
    found = {str(one.object): one for one in stored.conflicts()}
    assert found.keys() == set(stored.objects()) == expected.keys()
    assert {key: found[key].kind for key, kind in expected.items() if kind} == {
        key: kind for key, kind in expected.items() if kind
    }
    assert all(key in one.detail for key, one in found.items())
    assert found[like[0]].node == "s2"


def test_a_check_of_everything_reports_missing_commits(stored: StoredChain) -> None:
    removed = [commit_key(NAME, 0), commit_key(ONLY_PRIMARIES, 0)]
    for key in removed:
        (stored.store / key).unlink()
    assert sorted(str(key) for _, key in conflicts_of(check_everything(stored))) == removed
    # Also the only commit of its snapshot.
    assert [key for _, key in conflicts_of(stored.check(ONLY_PRIMARIES))] == removed[1:]


def test_what_never_existed_is_no_damage(stored: StoredChain) -> None:
    with pytest.raises(SnapshotMissingError):
        stored.check("never")
    with pytest.raises(SnapshotMissingError):
        stored.check(increment=7)


def test_a_changed_fleet_id_is_found(stored: StoredChain) -> None:
    change_document(stored.store / "fleet.json", lambda document: document.update(fleet="0badf00d"))
    assert ("fleet", "fleet.json") in conflicts_of(check_everything(stored))


def test_a_store_without_fleet_json_is_refused(stored: StoredChain) -> None:
    (stored.store / "fleet.json").unlink()
    with pytest.raises(StoreNotInitialisedError):
        stored.check()


def test_rows_that_a_standby_lacks_or_has_different_are_found_by_comparison_alone(stored: StoredChain) -> None:
    """A row and a transfer are missing in segments with correct digests, and one value differs in a base copy."""
    changed, altered, lacking = changed_keys(stored, "s2-b1"), list[str](), list[str]()

    def other_balance(table: pa.Table) -> pa.Table:
        row = row_of(stored, table, "account", changed)
        key = table["key"][row].as_py()
        altered.append(table["row"][row].as_py().decode().strip("\n"))
        return with_value(table, row, "row", key + b"\t999\n")

    change_segment(stored.store, NAME, 1, "s1-b1", lambda table: without_row(table, row_of(stored, table, "account")))

    def without_transfer(table: pa.Table) -> pa.Table:
        row = row_of(stored, table, "transfer")
        lacking.append(table["row"][row].as_py().decode().strip("\n"))
        return without_row(table, row)

    change_segment(stored.store, NAME, 1, "s2-b1", without_transfer)
    change_base(stored.store, NAME, "s2-b1", other_balance)
    report = check_snapshots(stored.fleet, CheckRequest(NAME, rows=5), stored.spark, Silent())
    assert report.exit_code == 1
    # The outcome of the increment tells other counts, too.
    conflicts = [one for one in report.snapshots[0].conflicts if one.kind != "operation"]
    first = {(one.kind, one.group) for one in conflicts if (one.node, one.other_node) == ("s1", "s1-b1")}
    second = {(one.kind, one.group) for one in conflicts if (one.node, one.other_node) == ("s2", "s2-b1")}
    assert ("changes", "public.account") in first
    assert {group for _, group in first} == {"public.account"}
    assert second == {("changes", "public.transfer"), ("row-count", "public.transfer"), ("row-hash", "public.account")}
    # One different value is in one partition.
    assert len([one for one in conflicts if one.node == "s2" and one.kind == "row-hash"]) == 1
    assert {(one.node, one.other_node) for one in conflicts} == {("s1", "s1-b1"), ("s2", "s2-b1")}
    # What each copy has of these rows is named; of two copies, neither is known to be wrong.
    (hashed,) = [one for one in conflicts if one.node == "s2" and one.kind == "row-hash"]
    (row,) = hashed.rows
    key = altered[0].partition("\t")[0]
    assert (row.key, row.outvoted) == (key, ())
    assert [(one.node, one.line, one.position) for one in row.copies] == [
        ("s2", altered[0], None),
        ("s2-b1", f"{key}\t999", None),
    ]
    (counted,) = [one for one in conflicts if one.node == "s2" and one.kind == "row-count"]
    (row,) = counted.rows
    (whole, none) = row.copies
    assert (whole.node, whole.line, whole.increment) == ("s2", lacking[0], 1)
    assert whole.position
    assert (none.node, none.line, none.increment) == ("s2-b1", None, None)


def test_half_of_a_transfer_is_missed_on_its_other_shard(stored: StoredChain) -> None:
    """All traces of a transfer are removed from the archives of one shard, whose copies then agree with each other."""
    segment = stored.chain.increments[0].segments["s2"][0]
    events = pq.read_table(stored.store / segment.key).to_pylist()
    position = stored.chain.increments[0].cut.of("s2").position
    half = next(
        one
        for one in events
        if one["op"] == PREPARE and one["lsn"] < position and one["key"] == b"s1,s2" and is_shared(stored, one)
    )
    for node in ("s2", "s2-b1"):
        change_segment(
            stored.store,
            NAME,
            1,
            node,
            lambda table: table.filter(pa.array([row["global_id"] != half["global_id"] for row in table.to_pylist()])),
        )
    missing = [one for one in stored.conflicts() if one.kind == "transaction"]
    assert [(one.node, one.other_node, one.global_id) for one in missing] == [("s2", "s1", half["global_id"])]


def test_a_commit_with_a_wrong_cut_is_found(stored: StoredChain) -> None:
    """A global transaction is on only one shard, and markers are not where they should be."""
    segment = stored.chain.increments[0].segments["s2"][0]
    cut = stored.chain.increments[0].cut.of("s2")
    events = pq.read_table(stored.store / segment.key).to_pylist()
    torn = next(e for e in events if e["op"] == PREPARE and e["lsn"] < cut.position and is_shared(stored, e))

    def leave_out(document: Document) -> None:
        (node,) = (one for one in document["cut"]["nodes"] if one["node"] == "s2")
        positions = {name: f"{torn[name] >> 32:X}/{torn[name] & 0xFFFFFFFF:X}" for name in ("lsn", "end_lsn")}
        node["undecided"].append({"global_id": torn["global_id"], **positions})
        document["cut"].update(id="another.1")

    change_commit(stored.store, NAME, 1, leave_out)
    conflicts = stored.conflicts()
    assert {(one.kind, one.node) for one in conflicts} == {
        ("transaction", "s1"), ("cut", "s2"), *(("marker", node) for node in ("s1", "s2", "s1-b1", "s2-b1")),
        # The cut is not one of its operation.
        ("cut", None),
    }  # fmt: skip
    (half,) = [one for one in conflicts if one.kind == "transaction"]
    assert (half.other_node, half.global_id) == ("s2", torn["global_id"])


def test_a_value_that_is_stored_nowhere_is_found(stored: StoredChain) -> None:
    def without_wide_rows(table: pa.Table) -> pa.Table:
        is_wide = [group == group_number(stored, "wide") for group in table["group"].to_pylist()]
        return table.filter(pa.compute.invert(pa.array(is_wide)))

    for node in ("s1", "s1-b1"):
        change_base(stored.store, NAME, node, without_wide_rows)
    assert {(one.kind, one.node, one.group) for one in stored.conflicts()} == {
        ("history", "s1", "public.wide"), ("history", "s1-b1", "public.wide"),
        # The outcome of the create tells the number of rows that it stored.
        ("operation", None, None),
    }  # fmt: skip


def databases_of(stored: StoredChain) -> list[set[str]]:
    """The databases of each primary's server."""
    found: list[set[str]] = []
    for node in stored.fleet.primaries:
        with psycopg.connect(node.dsn) as connection:
            found.append({row[0] for row in connection.execute("SELECT datname FROM pg_database")})
    return found


@pytest.mark.parametrize("kind", ["base", "DDL", "segment of a primary"])
def test_a_restore_from_damaged_objects_is_refused_and_leaves_nothing(stored: StoredChain, kind: str) -> None:
    flip_byte(stored.store / stored.key_by_kind()[kind])
    before = databases_of(stored)
    nodes = tuple(replace(node, dsn=node.dsn.replace("/bank", "/damaged")) for node in stored.fleet.primaries)
    target = replace(stored.fleet, nodes=nodes)
    with pytest.raises(SnapshotError) as refused:
        restore_fleet(plan_restore(stored.fleet, target, RestoreRequest(NAME)), stored.spark, Silent())
    assert refused.value.exit_code == 3
    assert refused.value.details["object"] == stored.key_by_kind()[kind]
    assert databases_of(stored) == before


def test_a_task_reports_every_damaged_segment_beside_the_rows_of_the_others(stored: StoredChain) -> None:
    nodes = tuple(identity.node for identity in stored.chain.nodes)
    sources = sources_of(stored.chain, nodes, stored.fleet.store.open())
    whole = max(sources.segments, key=lambda one: one.source.size)
    damaged = [one.source.key for one in sources.segments if one != whole]
    for key in damaged:
        flip_byte(stored.store / key)
    # Each task reads the whole segment, too.
    tasks = 2 * stored.spark.session().sparkContext.defaultParallelism
    sources = structs.replace(sources, segments=(*sources.segments, *[whole] * tasks))
    rows = read_changes(stored.spark.session(), sources, stored.fleet.store).collect()
    reports = [report for row in rows if (report := problem_of(bytes(row["row"])))]
    assert sorted(str(report["details"]["object"]) for report in reports) == sorted(damaged)
    assert len(rows) > len(reports)


def test_without_standbys_a_check_is_inconclusive(stored: StoredChain) -> None:
    report = stored.check(ONLY_PRIMARIES)
    assert (report.result, report.exit_code) == ("inconclusive", 4)
    assert [one.what for one in report.snapshots[0].skipped] == ["rows of shard s1", "rows of shard s2"]


def test_an_empty_store_is_inconclusive(stored: StoredChain) -> None:
    # Records say what was committed: that it is gone is a conflict.
    shutil.rmtree(stored.store / "snapshots")
    report = stored.check(name=None)
    assert (report.exit_code, report.result) == (1, "conflicts")
    assert [one.kind for one in report.snapshots[0].conflicts] == ["commit"]
    shutil.rmtree(stored.store / "operations")
    report = stored.check(name=None)
    assert (report.exit_code, report.result, report.snapshots) == (4, "inconclusive", ())


def test_the_command_exits_1_and_names_the_damaged_object(stored: StoredChain) -> None:
    """One damaged object in this process, with Spark; and a damaged commit in a separate process."""
    key = stored.key_by_kind()["base"]
    flip_byte(stored.store / key)
    code, document = run_here(stored.fleet, "check", NAME, spark=stored.spark.running)
    assert (code, objects_of(document)) == (1, [key])
    commit = stored.key_by_kind()["increment's commit"]
    flip_byte(stored.store / commit, 0.9)
    code, document = run_command(stored.fleet, "check", NAME)
    assert (code, objects_of(document)) == (1, [commit, key])


def objects_of(document: Document) -> list[str]:
    (found,) = document["snapshots"]
    return [one["object"] for one in found["conflicts"]]


def test_a_lost_increment_of_the_same_second_as_its_full_snapshot_is_named(stored: StoredChain) -> None:
    """Of ids of one second the random parts say nothing."""
    key = commit_key(NAME, 1)
    remove(stored.store / key)
    second, full = stored.chain.full.operation.rpartition("-")[0], stored.chain.full
    for operation, found in ((f"{second}-0000000000", [key]), (f"{second}-ffffffffff", [key]), ("2025-0", [])):
        _, report = check_structure(stored.fleet.store.open(), full.fleet_id, NAME, None, {operation: 1})
        assert [one.object for one in report.conflicts] == found
