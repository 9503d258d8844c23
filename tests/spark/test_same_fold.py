"""The same chains folded by the driver and by Spark: the same images, changed keys and hashes, those of the tables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.check.copies import Copies
from cutline.check.image_hashes import PartitionHashes, hash_local
from cutline.check.partitions import hash_folded
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.changed_keys import KeySet
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader
from cutline.snapshots.fold.sources import Sources
from cutline.snapshots.records.chain import Chain
from cutline.storage.location import StoreLocation
from tests.chains.drawn_history import NODES, store_history
from tests.chains.folded_rows import driver_folds, images_of, rows_at_cut, spark_folds
from tests.run.soak import SEED, first
from tests.unit.made_commits import commit, counted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def keys_of(folded: Fold) -> dict[tuple[int, int], set[bytes]]:
    """The changed keys by node and group."""
    found: dict[tuple[int, int], set[bytes]] = {}
    for node, of_groups in folded.changed.items():
        for group, keys in of_groups.items():
            assert isinstance(keys, KeySet)
            found[node, group] = set(keys.keys.to_arrow().to_pylist())
    return found


@pytest.mark.parametrize("number", first(range(4), 2))
def test_a_chain_has_the_same_rows_whoever_folds_it(spark: SparkSession, tmp_path: Path, number: int) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    sources, expected = store_history(location.open(), SEED + number)
    images, keys = [], []
    for folding, is_local in ((driver_folds, True), (spark_folds, False)):
        with folding():
            folded = fold(spark, sources, location)
        assert (folded.local is not None) == is_local
        assert rows_at_cut(folded, sources, location) == expected
        images.append(images_of(folded, sources, location))
        keys.append(keys_of(folded))
        folded.release()
    assert images[0] == images[1]
    assert keys[0] == keys[1]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Two copies of one shard, which have the same WAL from a position on that is within the chain."""
    monkeypatch.setattr(Copies, "since", lambda _self, _node: Lsn(200))
    monkeypatch.setattr(Copies, "recopied_since", lambda _self, _node: {})
    return Copies(NODES, dict.fromkeys(NODES, NODES[0]), Chain(counted(commit(0))))


def hashes_of(folded: Fold, sources: Sources, location: StoreLocation, copies: Copies) -> PartitionHashes:
    if folded.local is not None:
        return hash_local(folded.local, copies)
    assert folded.images is not None
    return hash_folded(folded.images, folded, copies, long_image_reader(sources, location))


def test_a_check_has_the_same_hashes_whoever_folds(spark: SparkSession, tmp_path: Path, copies: Copies) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    sources, _ = store_history(location.open(), SEED)
    found = []
    folding: Callable[[], AbstractContextManager[None]]
    for folding in (driver_folds, spark_folds):
        with folding():
            folded = fold(spark, sources, location, hashed=True)
        hashes = hashes_of(folded, sources, location, copies)
        folded.release()
        found.append((hashes.rows.as_dict(), {key: sums for key, sums in hashes.versions.as_dict().items() if sums[0]}))
    assert found[0] == found[1]
    assert all(found[0])
