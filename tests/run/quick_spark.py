"""Spark settings for tests, in which a session lives for minutes at most and no job has many rows.

The JVM's optimising compiler takes more time than it saves: with it, a session and its first job take twice the
processor time. tests/spark/test_session.py also starts sessions as users do.
"""

from __future__ import annotations

QUICK = "-XX:TieredStopAtLevel=1"
SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": QUICK,
    # No test has rows for the eight partitions of a usual session, and each is a task with a Python worker.
    "spark.sql.shuffle.partitions": "2",
    # As on every cluster. The default without a cluster is tested where sessions start as users start them.
    "spark.io.encryption.enabled": "true",
}
# The same settings as lines of a fleet.toml, for its table [spark].
LINES = "".join(f'"{name}" = "{value}"\n' for name, value in SETTINGS.items())


def with_spark(tables: str) -> str:
    """Add these settings to the tables of a fleet.toml, unless they have a table [spark]."""
    return tables if "[spark]" in tables else f"[spark]\n{LINES}{tables}"
