"""Values for Python workers where Spark encrypts what it writes, as on every cluster: large arrays and Arrow tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from cutline.columns.bytes_column import from_list
from cutline.columns.python_workers import local_frame, map_batches
from cutline.fleet.progress import Silent
from cutline.snapshots.fold.changed_keys import KeyFilter
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import run_tasks
from tests.run.quick_spark import SETTINGS
from tests.unit.made_keys import key_set

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# pickle hands over the memory of arrays from 64 KiB on.
COUNT = 100_000
KEYS = [b"%d" % number for number in range(COUNT)]


def test_the_sessions_of_tests_encrypt_as_those_of_clusters_do(spark: SparkSession) -> None:
    assert SETTINGS["spark.io.encryption.enabled"] == "true"
    assert spark.sparkContext._encryption_enabled


def test_large_arrays_and_tables_are_the_same_in_the_workers(spark: SparkSession) -> None:
    words = np.arange(COUNT, dtype=np.uint64)
    table = pa.table({"key": KEYS, "number": words})
    value = {"set": key_set(KEYS), "filter": KeyFilter(words), "table": table, "small": ["ü", None, 1.5]}
    sent = broadcast(spark, value)

    def describe(number: int) -> list[object]:
        found = sent.value
        here = found["set"].contains(from_list([KEYS[number], b"no such key"])).tolist()
        digest = hashlib.sha256(found["filter"].words.tobytes()).hexdigest()
        return [here, digest, found["table"].column("key").to_pylist() == KEYS, found["small"]]

    expected = [[True, False], hashlib.sha256(words.tobytes()).hexdigest(), True, value["small"]]
    assert spark.sparkContext.parallelize([0, COUNT - 1], 2).map(describe).collect() == [expected] * 2
    sent.unpersist()


def test_tasks_and_functions_bring_large_arrays_with_them(spark: SparkSession) -> None:
    words = np.arange(COUNT)
    sums = run_tasks(spark, lambda task: int(task.sum() + words.sum()), [words, words[::2]], Silent())
    assert sums == [sum(range(COUNT)) * 2, sum(range(COUNT)) + sum(range(0, COUNT, 2))]


@pytest.mark.timeout(120)
def test_results_of_megabytes_come_back(spark: SparkSession) -> None:
    """The driver fetches each by a message of its own, on one encrypted connection. Smaller ones it is sent."""
    numbers = [*range(8)]
    found = (
        spark.sparkContext.parallelize(numbers, len(numbers)).map(lambda number: b"%d" % number * (2 << 20)).collect()
    )
    assert found == [b"%d" % number * (2 << 20) for number in numbers]


def test_arrow_tables_become_rows(spark: SparkSession) -> None:
    """The driver sends the rows that it has folded, and functions that refer to more than a megabyte."""
    table = pa.table({"key": pa.array(KEYS, pa.binary()), "number": np.arange(COUNT)})
    long = b"x" * (2 << 20)

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            right = [b"%d" % number == key for key, number in zip(*batch.to_pydict().values(), strict=True)]
            yield pa.record_batch([pa.array([sum(right)], pa.int64()), pa.array([len(long)])], names=["right", "long"])

    rows = map_batches(spark.createDataFrame(table), count, "right bigint, long bigint").collect()
    assert (sum(row["right"] for row in rows), {row["long"] for row in rows}) == (COUNT, {len(long)})


def test_a_local_table_is_read_beyond_a_batch_without_rows(spark: SparkSession) -> None:
    schema = pa.schema([("number", pa.int32())])
    one, none, two = (pa.record_batch([pa.array(values, pa.int32())], schema) for values in ([1], [], [2, 3]))
    table = pa.Table.from_batches([none, one, none, two, none], schema)
    assert sorted(row.number for row in local_frame(spark, table).collect()) == [1, 2, 3]
    assert local_frame(spark, table.slice(0, 0)).collect() == []

    def again(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        yield from [one, none, two]

    rows = map_batches(local_frame(spark, table).repartition(1), again, "number int").collect()
    assert sorted(row.number for row in rows) == [1, 1, 2, 2, 3, 3]
