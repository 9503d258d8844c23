"""`python -m cutline.spark.record_archive`: write the class archive ahead of time; `make install` runs it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.spark.class_archive import DUMP_SECONDS_MAX
from cutline.spark.session_folder import session_folder
from cutline.spark.start import start_spark_at
from cutline.storage.errors import SnapshotError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def main() -> int:
    """Run a small job of every kind, and let the JVM archive the classes that it loaded; return 0 even on failure."""
    with contextlib.suppress(SnapshotError), session_folder(), start_spark_at("local[2]", {}, "class-archive") as start:
        session = start.session()
        if start.is_recording:
            _run_one_job_of_every_kind(session, start.temporary)
            start.stop(archive_seconds_max=DUMP_SECONDS_MAX)
    return 0


def _run_one_job_of_every_kind(session: SparkSession, folder: Path) -> None:
    from pyspark.sql import functions

    session.sparkContext.parallelize(range(4), 2).map(str).collect()
    rows = session.range(1000).select((functions.col("id") % 8).alias("partition"), "id")
    rows.write.parquet(str(folder / "rows"))
    stored = session.read.parquet(str(folder / "rows"))
    passed = stored.mapInArrow(lambda batches: batches, stored.schema).withColumnRenamed("partition", "other")
    hashes = functions.bit_xor(functions.xxhash64("partition", "id"))
    passed.join(stored, "id").groupBy("partition").agg(hashes).orderBy("partition").collect()


if __name__ == "__main__":
    sys.exit(main())
