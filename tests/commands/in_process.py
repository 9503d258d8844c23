"""Run `snapshot …` in this process: the whole command line, on the Spark session that the tests share.

What only a separate process shows (how it ends, its JVM, its signals) is tested in tests/unit/test_cli_main.py and
wherever `run_command` is used.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from cutline.cli.main import run
from cutline.fleet.config import Fleet
from cutline.spark.on_demand import SparkOnDemand

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run_here(fleet: Fleet, *words: str, spark: SparkSession | None = None) -> tuple[int, dict[str, Any]]:
    """Run `snapshot … --json`; return its exit code and its document. Without `spark` it must not need a session."""
    code, out = run_and_capture(fleet, *words, "--json", spark=spark)
    return code, json.loads(out)


def run_as_text(fleet: Fleet, *words: str, spark: SparkSession | None = None) -> str:
    """Run the command, which must succeed; return its text on stdout."""
    code, out = run_and_capture(fleet, *words, spark=spark)
    assert code == 0, out
    return out


@contextmanager
def shared_session(spark: SparkSession | None) -> Iterator[None]:
    """Give this session to the commands in the block; without one, commands that need a session fail."""

    def begin(_: SparkOnDemand, *__: object) -> None:
        assert spark, "this command needs no Spark"

    def session(_: SparkOnDemand) -> SparkSession:
        assert spark, "this command needs no Spark"
        return spark

    with patch.object(SparkOnDemand, "begin", begin), patch.object(SparkOnDemand, "session", session):
        yield


def run_and_capture(fleet: Fleet, *words: str, spark: SparkSession | None = None) -> tuple[int, str]:
    """Run the command line; return its exit code and stdout, which must not be empty."""
    err = io.StringIO()
    code, out = run_with_stderr(err, fleet, *words, spark=spark)
    assert out, err.getvalue()
    return code, out


def run_with_stderr(err: io.StringIO, fleet: Fleet, *words: str, spark: SparkSession | None = None) -> tuple[int, str]:
    """Run the command line, and write its stderr to `err`; return its exit code and stdout."""
    out = io.StringIO()
    with shared_session(spark), redirect_stdout(out), redirect_stderr(err):
        code = run(["--fleet", str(fleet.path), *words])
    return code, out.getvalue()
