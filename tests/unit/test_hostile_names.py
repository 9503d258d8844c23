"""Names, pipes and folders that somebody who can write to the store plants there: no command ends or waits for them."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cutline.fleet.progress import Silent
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.removal.removing import objects_of, open_removals, remove_objects
from cutline.storage.ids import new_operation_id
from cutline.storage.local import INCOMING, LocalStore
from cutline.storage.probe import PROBES
from cutline.storage.store import ObjectStore
from tests.stores.planting import plant
from tests.unit.made_commits import memory
from tests.unit.made_garbage import StoreBuilder, backdate, preview_gc, run_gc


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "store") if request.param == "folder" else memory()


@pytest.mark.parametrize("name", ["operations/a%b/intent.json", "operations/a*/intent.json"])
def test_an_operation_of_an_invalid_name_is_none(store: ObjectStore, name: str) -> None:
    StoreBuilder(store).take_full("nightly")
    plant(store, name)
    assert not read_open_operations(store)
    assert not open_removals(store)
    assert run_gc(store).garbage == []


def test_a_snapshot_of_an_invalid_name_is_none(store: ObjectStore) -> None:
    StoreBuilder(store).take_full("nightly")
    plant(store, "snapshots/a%b/snapshot.json")
    report = run_gc(store)
    assert report.garbage == []
    assert report.unknown == []


def test_a_deletion_leaves_an_object_of_an_invalid_name_and_finishes(store: ObjectStore) -> None:
    StoreBuilder(store).take_full("two")
    plant(store, "snapshots/two/a%b")
    keys = [one.key for one in objects_of(store, "two")]
    assert len(keys) > 9
    assert remove_objects(store, keys, Silent()) == {}
    assert objects_of(store, "two") == []


def test_a_folder_among_the_unfinished_objects_is_named_and_ends_no_gc(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    StoreBuilder(store).take_full("nightly")
    for name in ("evil", "died"):
        path = store.root / INCOMING / name
        path.mkdir() if name == "evil" else path.touch()
        os.utime(path, (0, 0))
    report = run_gc(store)
    assert report.unknown == [f"{INCOMING}/evil (unfinished)"]
    assert report.removed.objects == 1
    assert [path.name for path in (store.root / INCOMING).iterdir()] == ["evil"]


def test_only_the_names_of_probes_are_removed_as_those_of_probes() -> None:
    store = memory()
    folder = f"{PROBES}/{new_operation_id(datetime.now(UTC))}"
    ours = [f"{folder}/{name}" for name in ("parts-once", "parts-raced-2", "put-once", "put-raced-0", "read")]
    foreign = [f"{folder}/{name}" for name in ("id-rsa", "put", "put-once-more", "reads")]
    for key in ours + foreign:
        store.create(key, b"x")
    backdate(store, 1)
    report = preview_gc(store)
    assert sorted(one.objects[0].key for one in report.garbage) == ours
    assert report.unknown == foreign
