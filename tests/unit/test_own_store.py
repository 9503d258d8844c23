"""What has become of the store that a command started with: gone, another fleet's, or without its fleet.json."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.fleet.config import Fleet, load_fleet
from cutline.snapshots.records.store_identity import (
    FLEET_KEY,
    IdentityLostError,
    StoreNotInitialisedError,
    ensure_identity,
    foreign_snapshot_error,
    read_identity,
)
from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from cutline.wal.segments.own_store import StoreGoneError, check_own_store


@pytest.fixture(params=["folder", "elsewhere"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "store") if request.param == "folder" else InMemoryStore("shop")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text('name = "shop"\nstore = "/backups"\n[[node]]\nid = "a"\ndsn = "host=127.0.0.1 dbname=shop"\n')
    return load_fleet(path)


def is_folder(store: ObjectStore) -> bool:
    return isinstance(store, LocalStore)


def test_a_store_that_only_lost_its_identity_is_not_to_be_mounted(store: ObjectStore, fleet: Fleet) -> None:
    identity, _ = ensure_identity(store, fleet)
    store.create("snapshots/daily/snapshot.json", b"{}")
    check_own_store(store, identity.fleet_id)
    store.delete(FLEET_KEY)
    with pytest.raises(StoreGoneError, match=r"object fleet\.json was removed from store .*, which still") as raised:
        check_own_store(store, identity.fleet_id)
    assert raised.value.hint.startswith("put it back from a copy of the store")
    assert "mount" not in raised.value.hint
    assert raised.value.details["object"] == FLEET_KEY


def test_only_a_folder_can_be_mounted_again(store: ObjectStore, fleet: Fleet) -> None:
    identity, _ = ensure_identity(store, fleet)
    store.delete(FLEET_KEY)
    # A command that goes on while its store is unmounted stores these.
    store.create("operations/20260101T000000Z-0/sign-1.json", b"{}")
    store.create("snapshots/daily/wal/a/00000000000000000001.parquet", b"x")
    with pytest.raises(StoreGoneError, match="nothing is there now") as raised:
        check_own_store(store, identity.fleet_id)
    assert ("mount its file system" in raised.value.hint) == is_folder(store)
    with pytest.raises(StoreNotInitialisedError) as unknown:
        read_identity(store, fleet)
    assert not isinstance(unknown.value, IdentityLostError)
    assert ("mount its file system" in unknown.value.hint) == is_folder(store)
    assert ("correct store in fleet.toml" in unknown.value.hint) != is_folder(store)
    assert unknown.value.hint.endswith("run: snapshot init")
    # Another fleet's store is there now.
    ensure_identity(store, fleet)
    with pytest.raises(StoreGoneError, match="a store of fleet"):
        check_own_store(store, identity.fleet_id)


def test_a_lost_identity_is_told_by_every_command(store: ObjectStore, fleet: Fleet) -> None:
    ensure_identity(store, fleet)
    store.create("snapshots/daily/snapshot.json", b"{}")
    store.delete(FLEET_KEY)
    for act in (read_identity, ensure_identity):
        with pytest.raises(IdentityLostError, match="which contains snapshots: daily") as raised:
            act(store, fleet)
        assert "mount" not in raised.value.hint
        assert raised.value.hint.startswith("put fleet.json back from a copy of the store")


def test_a_snapshot_of_another_fleet_may_also_mean_another_identity() -> None:
    lines = foreign_snapshot_error("daily", "1234", "5678").hint.split("\n")
    assert ["copied here" in lines[0], "fleet.json was replaced" in lines[1]] == [True, True]
