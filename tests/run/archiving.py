"""Make Spark archive the WAL of every cut, however little. Otherwise the command archives little WAL itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import cutline.wal.drain.lags


def archive_by_spark() -> None:
    """Make Spark archive all WAL, in this process."""
    cutline.wal.drain.lags.LITTLE_BYTES = -1


@contextmanager
def archiving_by_spark(*, wanted: bool = True) -> Iterator[None]:
    """Make Spark archive all WAL while the block runs, if `wanted`."""
    before = cutline.wal.drain.lags.LITTLE_BYTES
    try:
        if wanted:
            archive_by_spark()
        yield
    finally:
        cutline.wal.drain.lags.LITTLE_BYTES = before
