"""A repaired chain is as it was: check finds it valid, and every increment restores the rows that PostgreSQL had."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.ddl.dump import find_ddl
from cutline.snapshots.records.proven_chains import read_chain
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.in_process import run_and_capture, run_here
from tests.integration.damage.copied_chain import NAME, CopiedChain
from tests.stores.damage import change_base, flip_byte, remove, truncate
from tests.stores.documents import check_documents


def repair(copied: CopiedChain, *words: str, code: int = 0) -> dict[str, Any]:
    """Run the command; without Spark, because the objects are small."""
    found, document = run_here(copied.fleet, "repair", NAME, "--yes", *words)
    assert found == code, document
    return document


def check(copied: CopiedChain, *words: str) -> tuple[int, dict[str, Any]]:
    return run_here(copied.fleet, "check", NAME, *words, spark=copied.spark.running)


def check_restored(copied: CopiedChain, increment: int) -> None:
    """A restore of the increment from the primaries' copies has the rows of the cut."""
    copied.drop_databases()
    request = RestoreRequest(NAME, increment)
    restore_fleet(plan_restore(copied.fleet, copied.target, request), copied.spark, Silent())
    assert copied.restored() == copied.truth[increment]


@pytest.mark.parametrize("damage", [flip_byte, remove, truncate])
def test_a_base_object_is_rebuilt_from_the_standbys_copy(copied: CopiedChain, damage: Callable[[Path], None]) -> None:
    """Of s1, an object of the full snapshot, with tables with and without a key, and one of a table copied again."""
    keys = [copied.base("s1"), copied.base("s1", 1)]
    copied.damage(dict.fromkeys(keys, damage))
    assert check(copied, "--metadata-only")[0] == (4 if damage is flip_byte else 1)
    document = repair(copied)
    assert {one["object"] for one in document["damaged"]} == set(keys)
    assert [one["from_copy"] for one in document["replaced"]] == ["s1-b1"] * 2
    assert check_documents(copied.fleet.store.open())["Repair"] == 1
    assert check(copied)[1]["result"] == "valid"
    for increment in (0, 2):
        check_restored(copied, increment)


def test_a_standbys_copy_is_rebuilt_from_the_primary(copied: CopiedChain) -> None:
    copied.damage({copied.base("s2-b1"): remove, copied.base("s2-b1", 2): flip_byte})
    assert {one["from_copy"] for one in repair(copied)["replaced"]} == {"s2"}
    assert check(copied)[1]["result"] == "valid"


def test_segments_are_rebuilt_from_the_other_archive(copied: CopiedChain) -> None:
    """The first segment of a node needs an archive that begins earlier; without one, it is refused by name."""
    copied.damage({copied.segment(node, 1): flip_byte for node in ("s1", "s2-b1")} | {copied.segment("s2", 2): remove})
    document = repair(copied)
    assert {one["from_copy"] for one in document["replaced"]} == {"s1-b1", "s2", "s2-b1"}
    assert check(copied)[1]["result"] == "valid"
    check_restored(copied, 2)
    check_restored(copied, 1)


def test_the_first_segment_is_rebuilt_only_from_an_archive_that_begins_earlier(copied: CopiedChain) -> None:
    base = copied.chain.full.base
    earlier, later = sorted(["s1", "s1-b1"], key=lambda node: base[node])
    copied.damage({copied.segment(earlier, 0): flip_byte})
    if base[earlier] < base[later]:
        code, document = run_here(copied.fleet, "repair", NAME, "--yes")
        assert (code, document["error"]) == (3, "nothing-repairable")
        assert f"the archive of {later} begins at {base[later]}" in document["message"]
    copied = undamaged(copied, copied.segment(earlier, 0))
    copied.damage({copied.segment(later, 0): flip_byte})
    assert [one["from_copy"] for one in repair(copied)["replaced"]] == [earlier]
    assert check(copied)[1]["result"] == "valid"


def undamaged(copied: CopiedChain, key: str) -> CopiedChain:
    """The chain with the object as it was: the damage is undone by hand."""
    flip_byte(copied.store / key)
    return copied


def test_objects_come_from_a_second_store(copied: CopiedChain, tmp_path: Path) -> None:
    """Missing: the same bytes under the same key. Altered, and DDL, which has one copy: under a new key."""
    second = tmp_path / "second"
    shutil.copytree(copied.store, second)
    missing, altered, ddl = copied.base("s1"), copied.segment("s2", 1), find_ddl(copied.chain, "s2").key
    body = (copied.store / missing).read_bytes()
    copied.damage({missing: remove, altered: flip_byte, ddl: truncate})
    code, planned = run_here(copied.fleet, "repair", NAME, "--dry-run", "--from", f"file://{second}")
    assert code == 0
    assert {(step["method"], *step["objects"]) for step in planned["steps"]} == {
        ("put-back", missing), ("fetch", altered), ("fetch", ddl),
    }  # fmt: skip
    document = repair(copied, "--from", f"file://{second}")
    assert document["put_back"] == [missing]
    assert (copied.store / missing).read_bytes() == body
    assert len(document["replaced"]) == 2
    assert check(copied)[1]["result"] == "valid"
    check_restored(copied, 2)


def test_what_both_copies_lost_is_refused_by_name_and_the_rest_is_repaired(copied: CopiedChain) -> None:
    lost = [copied.base("s1", 1), copied.base("s1-b1", 1)]
    copied.damage(dict.fromkeys([*lost, copied.base("s2")], remove))
    code, text = run_and_capture(copied.fleet, "repair", NAME, "--dry-run")
    assert code == 1
    assert f"can't be repaired: object {lost[0]}: neither copy can be trusted: object {lost[1]} of s1-b1" in text
    document = repair(copied, code=1)
    assert {one["object"] for one in document["unrepaired"]} == set(lost)
    code, checked = check(copied)
    assert (code, {one["object"] for one in checked["snapshots"][0]["conflicts"]}) == (1, set(lost))


def test_without_confirmation_nothing_is_changed(copied: CopiedChain) -> None:
    copied.damage({copied.base("s1"): remove})
    before = copied.fleet.store.open().list("")
    code, document = run_here(copied.fleet, "repair", NAME)
    assert (code, document["error"]) == (2, "confirmation-missing")
    assert run_here(copied.fleet, "repair", NAME, "--dry-run")[0] == 0
    assert copied.fleet.store.open().list("") == before


def test_a_restore_that_began_before_a_repair_is_not_resumed_with_other_objects(copied: CopiedChain) -> None:
    """Its ledger names the objects that it has loaded: with others, rows would be loaded twice."""
    chain = copied.chain
    copied.damage({copied.base("s1"): remove})
    repair(copied)
    repaired = read_chain(copied.fleet.store.open(), NAME)
    assert repaired.last.digest == chain.last.digest
    assert repaired.digest != chain.digest


def test_a_restorable_snapshot_says_so_without_a_server_for_its_rows(copied: CopiedChain) -> None:
    code, document = check(copied, "--restorable")
    assert (code, document["result"]) == (0, "valid")
    counted = [sum(rows.count(b"\n") for rows in shard.values()) for shard in copied.truth[2]]
    assert list(document["restorable"]["rows"].values()) == counted
    assert document["restorable"]["ddl"] == "run", document["restorable"]
    code, newest = run_here(copied.fleet, "check", "--newest", "--restorable", spark=copied.spark.running)
    assert (code, [one["name"] for one in newest["snapshots"]]) == (0, [NAME])
    assert newest["restorable"]["rows"] == document["restorable"]["rows"]


def test_what_a_restore_would_refuse_is_a_conflict(copied: CopiedChain) -> None:
    """A key that occurs twice; a missing object."""

    def repeat_first(table: Any) -> Any:
        import pyarrow as pa

        return pa.concat_tables([table, table.slice(0, 1)])

    change_base(copied.store, NAME, "s1", repeat_first)
    code, document = check(copied, "--restorable")
    kinds = {one["kind"] for one in document["snapshots"][0]["conflicts"]}
    assert (code, "restore" in kinds) == (1, True)
    found = [one for one in document["snapshots"][0]["conflicts"] if one["kind"] == "restore"]
    assert any("occur more than once in the rows that a restore would load: 1" in one["detail"] for one in found), found
    copied.damage({copied.base("s1"): remove})
    code, document = check(copied, "--restorable")
    assert any(
        one["kind"] == "restore" and "lacks" in one["detail"] for one in document["snapshots"][0]["conflicts"]
    ), document
    with pytest.raises(ObjectDamagedError):
        restore_fleet(plan_restore(copied.fleet, copied.target, RestoreRequest(NAME)), copied.spark, Silent())
    assert check_snapshots(copied.fleet, CheckRequest(NAME), copied.spark, Silent()).exit_code == 1
