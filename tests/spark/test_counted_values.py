"""The command counts the values in the sets of constraints as Spark does."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cutline.fleet.progress import Silent
from cutline.restore.drill.counted_values import COUNTED_SCHEMA, count_values
from cutline.restore.drill.restorable import LOADED, LOADED_SCHEMA, _count_in_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MULTISETS = frozenset({2})
PROBLEMS = ("incomplete", '{"breach": "x"}')


def random_values(chance: random.Random, count: int) -> pa.Table:
    """Return few different values in few sets, some with references, and some problems."""
    rows = [
        (
            chance.randrange(2),
            chance.randrange(1, 4),
            chance.randrange(3),
            chance.choice((-(2**63), -5, 0, 7, 2**63 - 1)) if chance.random() < 0.5 else chance.randrange(50),
            chance.randrange(-2, 2),
            chance.choice((0, 0, 1, 2, 1 << 62)),
            None,
        )
        for _ in range(count)
    ]
    rows += [
        (chance.randrange(2), chance.randrange(3), 0, 0, 0, 0, chance.choice(PROBLEMS))
        for _ in range(chance.randrange(5) if count else 0)
    ]
    columns = list(zip(*rows, strict=True)) or [()] * len(LOADED_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, LOADED_SCHEMA, strict=True)]
    return pa.table(arrays, schema=LOADED_SCHEMA)


def in_order(counted: pa.Table) -> list[tuple[Any, ...]]:
    """Return the rows in an order of their own, which is not counted."""
    columns = [counted[name].to_pylist() for name in COUNTED_SCHEMA.names]
    return sorted(zip(*columns, strict=True), key=repr)


@pytest.mark.parametrize("count", [0, 1, 30, 300])
def test_the_command_counts_as_spark_does(spark: SparkSession, count: int) -> None:
    values = random_values(random.Random(count), count)
    sources: Any = SimpleNamespace(multisets=MULTISETS)
    expected = _count_in_spark(spark, spark.createDataFrame(values.to_pylist(), LOADED), sources, Silent())
    found = count_values(values, MULTISETS)
    assert found.schema == COUNTED_SCHEMA
    assert in_order(found) == in_order(expected)
