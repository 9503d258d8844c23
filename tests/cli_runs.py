"""`snapshot …` in this process: one of its own takes a second to start, and most of ten where it needs Spark.

How a process ends is tested where that is the point (run_command in tests/snapshot_runs.py).
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import cli.spark.start
from cli.main import run
from fleet.config import Fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class Running:
    """A start of Spark that is over: the session of all tests, which no command stops."""

    spark: SparkSession | None

    def session(self) -> SparkSession:
        assert self.spark, "the command was to need no Spark"
        return self.spark

    def stop(self, *, graceful: bool) -> None:
        """Leave it to the tests after this."""


def said_here(fleet: Fleet, *words: str, spark: SparkSession | None = None) -> tuple[int, str, str]:
    """Run the command line; its exit code, and what it wrote to stdout and to stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(cli.spark.start, "start_spark", lambda _fleet, _name: Running(spark))
        code = run(["--fleet", str(fleet.path), *words])
    return code, out.getvalue(), errors.getvalue()


def run_here(fleet: Fleet, *words: str, spark: SparkSession | None = None) -> tuple[int, dict[str, Any]]:
    """Run the command line with --json; its exit code and its document."""
    code, out, errors = said_here(fleet, *words, "--json", spark=spark)
    assert out, errors
    return code, json.loads(out)
