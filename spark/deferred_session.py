"""A Spark session that is made when a job first needs SQL.

Most jobs are plain tasks, which need only the context; a session loads the classes of Spark SQL, which takes a third of
the processor time of a JVM that runs only plain tasks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


class DeferredSession:
    """The session of `sparkContext`: every attribute but the context is a SparkSession's, made for the first use.

    Settings that plain tasks need are therefore read from the context.
    """

    def __init__(self, context: SparkContext) -> None:
        self.sparkContext = context  # Spark's name
        self._made: SparkSession | None = None
        # Several threads may run jobs.
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session(), name)

    def stop(self) -> None:
        """Stop the context, with the session if there is one."""
        if self._made is not None:
            self._made.stop()
        else:
            self.sparkContext.stop()

    def _session(self) -> SparkSession:
        with self._lock:
            if self._made is None:
                from pyspark.sql import SparkSession

                self._made = SparkSession.builder.getOrCreate()
            return self._made
