"""Folding groups without a key: rows are counted, line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapshots.folding import CHANGE_ROWS, Fold, _fold_multisets
from snapshots.sources import PROBLEM, Sources

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GROUP = 7
INSERTED, DELETED = ord("I"), ord("D")


def folded(spark: SparkSession, changes: list[tuple[int, bytes]]) -> list[tuple[int, int, bytes]]:
    """The rows (group, partition, line) that these changes (op, line) of one group without a base leave."""
    rows = [(0, GROUP, 0, b"", number, 0, op, line) for number, (op, line) in enumerate(changes)]
    fold = Fold(None, {}, [], [])
    sources = Sources(("a",), (), (), frozenset({GROUP}), {})
    _fold_multisets(spark, sources, ("memory://nothing", {}), spark.createDataFrame(rows, CHANGE_ROWS), fold)
    try:
        assert fold.images is not None
        return sorted((row["group"], row["partition"], bytes(row["row"])) for row in fold.images.collect())
    finally:
        fold.release()


def test_a_line_is_there_as_often_as_it_came_and_did_not_go(spark: SparkSession) -> None:
    changes = [(INSERTED, b"x\n"), (INSERTED, b"y\n"), (INSERTED, b"x\n"), (DELETED, b"y\n"), (INSERTED, b"x\n")]
    assert folded(spark, [*changes, (DELETED, b"x\n")]) == [(GROUP, 0, b"x\n"), (GROUP, 0, b"x\n")]


def test_a_line_that_went_and_was_never_there_is_a_problem_not_a_silence(spark: SparkSession) -> None:
    assert folded(spark, [(INSERTED, b"x\n"), (DELETED, b"gone\n")]) == [
        (PROBLEM, GROUP, b"gone\n"),
        (GROUP, 0, b"x\n"),
    ]
