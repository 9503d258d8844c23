"""How Spark runs in tests, where a session lives for minutes at most and no job has many rows.

The compiler of long runs takes more time than it saves: with it a session and its first job take twice the processor
time. tests/spark/test_session.py starts sessions as users do, too.
"""

from __future__ import annotations

QUICK = "-XX:TieredStopAtLevel=1"
SETTINGS = {
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": QUICK,
    # Nobody has rows for the eight of a session on this machine, and each is a task with a Python worker.
    "spark.sql.shuffle.partitions": "3",
}
# The same for a fleet.toml, below its [spark].
LINES = "".join(f'"{name}" = "{value}"\n' for name, value in SETTINGS.items())


def with_spark(tables: str) -> str:
    """The tables of a fleet.toml with Spark's, if they have none of their own."""
    return tables if "[spark]" in tables else f"[spark]\n{LINES}{tables}"
