"""A store's location opens itself, travels to executors, and is printed without secrets."""

from __future__ import annotations

import pickle
from pathlib import Path

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.storage.location import StoreLocation

SECRET = "s3cr3t"
LOCATION = StoreLocation(f"s3://user:{SECRET}@bucket/folder", {"secret": SECRET})


def test_a_location_opens_the_same_store_in_every_process(tmp_path: Path) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    assert pickle.loads(pickle.dumps(location)) == location
    assert location.open() is pickle.loads(pickle.dumps(location)).open()


def test_a_location_prints_as_the_url_without_credentials() -> None:
    assert str(LOCATION) == "s3://bucket/folder"
    assert repr(LOCATION) == "StoreLocation('s3://bucket/folder')"


def test_a_fleet_prints_without_the_secrets_of_its_location() -> None:
    fleet = Fleet(Path("fleet.toml"), "shop", LOCATION, (Node("s1", "dbname=x"),), "exact", GroupRules(), "local", {})
    assert "bucket/folder" in repr(fleet)
    assert SECRET not in repr(fleet)
