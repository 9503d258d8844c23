"""A chain whose commits are as those of a fleet with thousands of tables: compressed, with equal groups only once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.nodes.connections import with_database
from cutline.snapshots.records import commit as commit_module
from cutline.snapshots.records import documents
from cutline.snapshots.records.documents import ZSTD_MAGIC, decompress
from cutline.snapshots.records.proven_chains import commit_key
from tests.commands.snapshot_runs import Runs, runs_on, sorted_copies
from tests.integration.refusing import execute
from tests.stores.documents import check_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, BACK = "large", "large_back"


@pytest.fixture
def runs(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runs]:
    monkeypatch.setattr(commit_module, "SHARED_FROM", 0)
    monkeypatch.setattr(documents, "COMPRESSED_FROM", 1000)
    with runs_on(shared_fleet, tmp_path, spark) as found:
        yield found
    for node in found.fleet.primaries:
        execute(node.dsn, "DROP TABLE IF EXISTS of_all")
        execute(with_database(node, "postgres").dsn, f"DROP DATABASE IF EXISTS {BACK} WITH (FORCE)")


def test_its_increments_are_checked_and_restored(runs: Runs) -> None:
    store = runs.fleet.store.open()
    runs.full(NAME)
    expected = {0: [sorted_copies(node.dsn) for node in runs.fleet.primaries]}
    for statement in (
        "CREATE TABLE of_all (id int PRIMARY KEY); INSERT INTO of_all VALUES (1), (2)",
        "INSERT INTO of_all VALUES (3)",
        "ALTER TABLE of_all ADD COLUMN text text DEFAULT 'x'; DELETE FROM of_all WHERE id = 1",
    ):
        for node in runs.fleet.primaries:
            execute(node.dsn, statement)
        number = runs.increment(NAME).increment
        expected[number] = [sorted_copies(node.dsn) for node in runs.fleet.primaries]

    body = store.read(commit_key(NAME, 0))
    assert body.startswith(ZSTD_MAGIC)
    first, second = (node.id for node in runs.fleet.primaries)
    assert f'"same_groups":{{"{second}":"{first}"}}'.encode() in decompress(body, 1 << 20)
    assert b'"column_lists":[[{"name":"' in decompress(body, 1 << 20)
    assert check_documents(store)["StoredFull"] == 1

    assert runs.check_one(NAME).result == "valid"
    restored = replace(runs.fleet, nodes=tuple(with_database(node, BACK) for node in runs.fleet.primaries))
    for number in (0, 3):
        runs.restore(NAME, restored, number)
        assert [sorted_copies(node.dsn) for node in restored.nodes] == expected[number]
