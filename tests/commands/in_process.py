"""`snapshot …` in this process: the whole command line, on the Spark session that the tests share.

What only a process shows (how it ends, its JVM, its signals) is in tests/unit/test_cli_main.py and wherever
`run_command` is used.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from cli.main import run
from cli.spark.on_demand import SparkOnDemand
from fleet.config import Fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_here(fleet: Fleet, *words: str, spark: SparkSession | None = None) -> tuple[int, dict[str, Any]]:
    """Run `snapshot … --json`; its exit code and its document. Without `spark` it may not ask for a session."""
    code, out = _run(fleet, (*words, "--json"), spark)
    return code, json.loads(out)


def told_here(fleet: Fleet, *words: str, spark: SparkSession | None = None) -> str:
    """What the command says to a person, on stdout; it must succeed."""
    code, out = _run(fleet, words, spark)
    assert code == 0, out
    return out


@contextmanager
def sessions_given(spark: SparkSession | None) -> Iterator[None]:
    """In the block commands that ask for a session get this one, or fail where there is none."""

    def begin(_: SparkOnDemand) -> None:
        assert spark, "this command needs no Spark"

    def session(_: SparkOnDemand) -> SparkSession:
        assert spark, "this command needs no Spark"
        return spark

    with patch.object(SparkOnDemand, "begin", begin), patch.object(SparkOnDemand, "session", session):
        yield


def _run(fleet: Fleet, words: tuple[str, ...], spark: SparkSession | None) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with sessions_given(spark), redirect_stdout(out), redirect_stderr(err):
        code = run(["--fleet", str(fleet.path), *words])
    assert out.getvalue(), err.getvalue()
    return code, out.getvalue()
