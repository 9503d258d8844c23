"""What a metadata check, list, show and a restore's plan find in a damaged chain without reading its contents.

The next increment finds it too, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from cutline.check.report import CheckReport
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.fleet.progress import Silent
from cutline.fleet.units import size_text
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.snapshots.create.chain_objects import ChainObjectMissingError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import preview_increment
from cutline.snapshots.listing.listing import list_store, show_snapshot
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.records.store_identity import ForeignSnapshotError
from tests.integration.damage.stored_chain import NAME, ONLY_PRIMARIES, StoredChain
from tests.run.soak import first_of_each
from tests.stores.damage import change_document, empty, extend, flip_byte, remove, truncate
from tests.stores.listed import objects_of


def check_metadata(stored: StoredChain, name: str | None = NAME) -> CheckReport:
    return check_snapshots(stored.fleet, CheckRequest(name, metadata_only=True), stored.spark, Silent())


def preview_next(stored: StoredChain) -> object:
    return preview_increment(stored.fleet, CreateRequest(NAME), Silent())


def test_a_metadata_check_is_inconclusive_at_best(stored: StoredChain) -> None:
    request = CheckRequest(NAME, metadata_only=True)
    assert check_snapshots(stored.fleet, request, stored.spark, Silent()).exit_code == 4
    key = stored.key_by_kind()["base"]
    (stored.store / key).unlink()
    report = check_snapshots(stored.fleet, request, stored.spark, Silent())
    assert report.exit_code == 1
    assert [one.object for one in report.snapshots[0].conflicts] == [key]


@pytest.mark.parametrize("damage", [truncate, extend, empty, remove])
def test_missing_objects_and_wrong_sizes_are_found_without_reading_and_refuse_the_next_increment(
    stored: StoredChain, damage: Callable[[Path], None]
) -> None:
    assert preview_next(stored)
    bodies = {key: (stored.store / key).read_bytes() for key in stored.object_by_kind().values()}
    for key, body in bodies.items():
        damage(stored.store / key)
        report = check_metadata(stored)
        (conflict,) = report.snapshots[0].conflicts
        kind = "missing" if damage is remove else "size"
        assert (report.exit_code, conflict.kind, conflict.object) == (1, kind, key)
        assert report.snapshots[0].compared.objects == len(stored.objects()) - 1
        with pytest.raises(ChainObjectMissingError, match=key) as refused:
            preview_next(stored)
        assert refused.value.details["object"] == key
        (stored.store / key).write_bytes(body)


def test_a_metadata_check_names_what_it_skipped(stored: StoredChain) -> None:
    for key in stored.object_by_kind().values():
        flip_byte(stored.store / key)
    report = check_metadata(stored)
    assert (report.result, report.exit_code) == ("inconclusive", 4)
    skipped = [one.what for one in report.snapshots[0].skipped]
    size = sum((stored.store / key).stat().st_size for key in stored.objects())
    assert skipped == [
        f"object contents ({size_text(size)} in {len(stored.objects())} objects)",
        "comparison of copies", "comparison of global transactions between shards",
    ]  # fmt: skip


@pytest.mark.parametrize(("number", "damage"), first_of_each(product([0, 1], [truncate, extend, empty, flip_byte])))
def test_a_damaged_commit_is_named_by_every_command_and_hides_no_other_snapshot(
    stored: StoredChain, number: int, damage: Callable[[Path], None]
) -> None:
    key = commit_key(NAME, number)
    damage(stored.store / key)
    entries = {one.name: one for one in list_store(stored.fleet).entries}
    assert (entries[NAME].state, entries[ONLY_PRIMARIES].state) == ("broken", "complete")
    assert key in str(entries[NAME].problem)
    for command in (
        lambda: show_snapshot(stored.fleet, NAME),
        lambda: plan_restore(stored.fleet, stored.fleet, RestoreRequest(NAME)),
        lambda: preview_next(stored),
    ):
        with pytest.raises(ManifestError, match=key) as refused:
            command()
        assert refused.value.exit_code == 3
    report = check_metadata(stored, None)
    assert report.exit_code == 1
    assert {one.name: [c.object for c in one.conflicts] for one in report.snapshots} == {
        NAME: [key],
        ONLY_PRIMARIES: [],
    }


@pytest.mark.parametrize("damage", [flip_byte, remove])
def test_a_check_compares_what_precedes_a_damaged_commit(stored: StoredChain, damage: Callable[[Path], None]) -> None:
    key, base = commit_key(NAME, 1), stored.key_by_kind()["base"]
    damage(stored.store / key)
    report = stored.check().snapshots[0]
    assert [one.object for one in report.conflicts] == [key]
    assert report.increment == 0
    assert report.compared.rows == sum(
        sum(one.rows.values()) for one in objects_of(stored.chain.full) if one.kind == "base"
    )
    assert [one.what for one in report.skipped] == [f"increment 1 of {NAME} and later"] * (damage is flip_byte)
    flip_byte(stored.store / base)
    assert {one.object for one in stored.conflicts()} == {key, base}


def test_a_snapshot_of_another_fleet_is_refused_by_every_command(stored: StoredChain) -> None:
    change_document(stored.store / "fleet.json", lambda document: document.update(fleet="0badf00d"))
    assert {one.state for one in list_store(stored.fleet).entries} == {"broken"}
    for command in (
        lambda: show_snapshot(stored.fleet, NAME),
        lambda: plan_restore(stored.fleet, stored.fleet, RestoreRequest(NAME)),
        lambda: preview_next(stored),
    ):
        with pytest.raises(ForeignSnapshotError, match="0badf00d"):
            command()


def test_a_check_reports_a_damaged_outcome(stored: StoredChain) -> None:
    key = f"operations/{stored.chain.full.operation}/outcome.json"
    truncate(stored.store / key)
    report = check_metadata(stored)
    assert report.exit_code == 1
    assert [(one.kind, one.object) for one in report.snapshots[0].conflicts] == [("operation", key)]
