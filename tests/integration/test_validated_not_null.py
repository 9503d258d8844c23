"""NOT NULL constraints that are NOT VALID, and validated later, as only 18 has them.

Validation changes no row of pg_attribute, but pg_dump then writes the constraint with the column.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.postgresql(18, reason="NOT NULL constraints that are NOT VALID came with 18")

NAME = "snp"
TABLES = (
    "CREATE TABLE item (id int PRIMARY KEY, v int, w int)",
    "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (item)",
    "CREATE TABLE part (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE apart (v int, id int PRIMARY KEY)",
)
CONSTRAINTS = (
    'ALTER TABLE item ADD CONSTRAINT "it has; one" NOT NULL v NOT VALID',
    "ALTER TABLE part ADD CONSTRAINT part_v NOT NULL v NOT VALID",
    "ALTER TABLE apart ADD CONSTRAINT part_v NOT NULL v NOT VALID",
    "ALTER TABLE part ATTACH PARTITION apart FOR VALUES FROM (100) TO (200)",
)
VALIDATIONS = (
    'ALTER TABLE item VALIDATE CONSTRAINT "it has; one"',
    "ALTER TABLE part VALIDATE CONSTRAINT part_v",
)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession) -> Iterator[Runs]:
    with database_on(shared_fleet, "unproved", tmp_path) as fleet, dropping_slots(fleet):
        runs = Runs(fleet, Ready(spark))
        execute(fleet.primaries[0].dsn, *TABLES, "INSERT INTO item VALUES (1, NULL), (2, 2)")
        yield runs


@pytest.mark.parametrize("is_before", [True, False])
def test_a_validation_is_no_conflict(runs: Runs, *, is_before: bool) -> None:
    """Of constraints that the full snapshot has, or the increment before."""
    dsn = runs.fleet.primaries[0].dsn
    if is_before:
        execute(dsn, *CONSTRAINTS)
    runs.init()
    runs.full(NAME)
    if not is_before:
        execute(dsn, *CONSTRAINTS)
        runs.increment(NAME)
    execute(dsn, "UPDATE item SET v = 1 WHERE id = 1", *VALIDATIONS)
    runs.increment(NAME)
    assert runs.check_one(NAME).conflicts == []
