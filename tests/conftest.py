"""One Spark session for all tests of a run, built by the place that builds every session.

A process has one at a time, and the tests of several folders need it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cli.spark.start import start_spark_at
from tests.quick_spark import SETTINGS
from tests.soak import SEED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_configure() -> None:
    """Take Ctrl-C even where a shell has started the tests in the background, deaf to it: commands inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What tests start draws the same, and so does who repeats a part of them.
    os.environ["CUTLINE_SEED"] = str(SEED)


def pytest_report_header() -> str:
    """Say how to draw the same again."""
    return f"CUTLINE_SEED={SEED}"


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session at local[2]; stopped, JVM included, after the last test."""
    with start_spark_at("local[2]", SETTINGS, "tests") as start:
        yield start.session()
