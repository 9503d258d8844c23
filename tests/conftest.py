"""One Spark session for all tests of a process, and how a run begins, ends and is told of.

A process has one at a time, and the tests of several folders need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cli.spark.start import start_spark_at
from tests.quick_spark import SETTINGS
from tests.soak import SEED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["tests.run.interrupts", "tests.run.order", "tests.run.times"]


def pytest_configure() -> None:
    """Let what tests start draw the same, and the other processes of the run, and who repeats a part of it."""
    os.environ["CUTLINE_SEED"] = str(SEED)


def pytest_report_header() -> str:
    """Say how to draw the same again."""
    return f"CUTLINE_SEED={SEED}"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session at local[2]; stopped, JVM included, after the last test."""
    with start_spark_at("local[2]", SETTINGS, "tests") as start:
        yield start.session()
