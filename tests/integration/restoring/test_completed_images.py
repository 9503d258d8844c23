"""Images that lack large values are completed by the tasks that read the values, and the ledger says how many were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.nodes.connections import connect
from cutline.nodes.groups import Column, Group
from cutline.restore.rows.jobs import _check_completed
from cutline.restore.rows.load import Feed, Loader, LoadError, LoadTarget, check_counts, create_ledger
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changes import choose_changes
from cutline.snapshots.fold.fold import Fold
from cutline.snapshots.fold.sources import sources_of
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.snapshot_runs import Ready, Runs
from tests.integration.own_database import own_database, restore_target
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "large"
SCHEMA = (
    "CREATE TABLE large (id int PRIMARY KEY, n int, what text, other text)",
    "ALTER TABLE large ALTER what SET STORAGE EXTERNAL, ALTER other SET STORAGE EXTERNAL",
    "INSERT INTO large SELECT i, 0, repeat(md5(i::text), 100), repeat('o', 3000) FROM generate_series(1, 60) AS i",
)
FIRST = (
    "UPDATE large SET n = 1 WHERE id <= 30",
    "UPDATE large SET id = id + 100 WHERE id BETWEEN 20 AND 40",
    "INSERT INTO large SELECT i, 0, repeat(md5(i::text), 100), NULL FROM generate_series(201, 210) AS i",
)
SECOND = (
    "UPDATE large SET n = 2 WHERE id > 110",
    "UPDATE large SET other = repeat('p', 3000) WHERE id IN (5, 205)",
    "DELETE FROM large WHERE id IN (7, 207)",
)
QUERY = "SELECT id, n, md5(what), md5(other) FROM large ORDER BY id"


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, NAME) as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def test_a_restore_has_the_rows_of_the_source_and_a_check_finds_them_complete(
    runs: Runs, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHANGES_MAX", 0)
    monkeypatch.setattr(limits, "CHANGES_PER_SEGMENT", 0)
    monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", 100_000)
    (node,) = runs.fleet.nodes
    runs.full(NAME)
    for statements in (FIRST, SECOND):
        execute(node.dsn, *statements)
        runs.increment(NAME)
    sources = sources_of(read_chain(runs.fleet.store.open(), NAME), (node.id,), runs.fleet.store.open())
    chosen = choose_changes(spark, sources, runs.fleet.store)
    assert chosen is not None
    assert chosen.in_bases
    assert chosen.in_segments
    assert runs.check_one(NAME).conflicts == []
    target = restore_target(runs.fleet)
    runs.restore(NAME, target)
    with psycopg.connect(node.dsn) as source, psycopg.connect(target.nodes[0].dsn) as restored:
        assert restored.execute(QUERY).fetchall() == source.execute(QUERY).fetchall()
    feed = Feed({0: LoadTarget(target.nodes[0], {group: _table(group) for group in chosen.in_bases[0]}, "")})
    whole = Counter({(0, group): len(images.images) for group, images in chosen.in_bases[0].items()})
    folded = Fold(None, {}, [], [], in_bases=chosen.in_bases)
    _check_completed(folded, {0: feed}, whole)
    with pytest.raises(LoadError, match=r"1 rows of public\.large can't be completed: the snapshot lacks"):
        _check_completed(folded, {0: feed}, whole - Counter([next(iter(whole))]))


def _table(number: int) -> Group:
    return Group(number, "public", "large", "default", 1, (Column("id", "integer", 23, -1, 0),))


def test_a_task_that_is_in_the_ledger_knows_what_it_has_completed(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    with database_on(shared_fleet, NAME, tmp_path) as fleet:
        (node,) = fleet.primaries
        execute(node.dsn, SCHEMA[0])
        with connect(node) as connection:
            target = LoadTarget(node, {7: _table(7)}, create_ledger(connection))
            for count in (3, 4):
                with connection.transaction():
                    loader = Loader(connection, target, "task")
                    loader.note_completed(7, count)
                    # The second attempt loads nothing.
                    assert loader.completed() == {7: 3}
                    loader.finish()
            assert check_counts(connection, target) == 0
