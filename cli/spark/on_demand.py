"""A Spark session that starts only when a command needs it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from cli.spark.protection import check_protection
from fleet.config import Fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cli.spark.start import SparkStart


class SparkOnDemand:
    """The SparkSource of one command: `begin` starts the session in the background, leaving the block ends it.

    Raises SparkUnprotectedError at once if fleet.toml leaves the session unprotected.
    """

    def __init__(self, fleet: Fleet, name: str) -> None:
        check_protection(fleet.spark_master, fleet.spark_settings)
        self._fleet, self._name = fleet, name
        self._start: SparkStart | None = None

    def begin(self) -> None:
        """Start the session in the background, unless it was started before."""
        if self._start is None:
            from cli.spark.start import start_spark

            self._start = start_spark(self._fleet, self._name)

    def session(self) -> SparkSession:
        """Start the session if necessary, wait for it and return it."""
        self.begin()
        if self._start is None:
            raise RuntimeError("begin did not start the session")
        return self._start.session()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._start is not None:
            self._start.stop(graceful=error is None)
